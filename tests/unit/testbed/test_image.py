# SPDX-License-Identifier: Apache-2.0
"""What the image's recipe takes from the build machine, and when it asks for a new image."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testbed import image
from testbed.shell import TestbedError

RECIPE = image.Recipe(
    mirrors={"bookworm": "http://a/debian"},
    apt_options="",
    pip_config="",
    environment="",
    ca_certificates={},
    authorized_key="ssh-ed25519 AAAA",
)


def test_the_same_recipe_has_the_same_id() -> None:
    assert RECIPE.id == replace(RECIPE).id
    assert len(RECIPE.id) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"mirrors": {"bookworm": "http://b/debian"}},
        {"packages": (*image.PACKAGES, "jq")},
        {"authorized_key": "ssh-ed25519 BBBB"},
        {"ca_certificates": {"own.crt": "PEM"}},
        {"files": {**image.FILES, "/etc/motd": "hello"}},
        {"steps": 2},
    ],
)
def test_any_change_of_the_recipe_changes_the_id(change: dict[str, object]) -> None:
    assert replace(RECIPE, **change).id != RECIPE.id  # type: ignore[arg-type]


def test_mirrors_from_a_debian_machine() -> None:
    deb822 = (
        "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm bookworm-updates\nComponents: main\n\n"
        "Types: deb deb-src\nURIs: http://mirror/security\nSuites: bookworm-security\n"
    )
    assert image.apt_mirrors({"debian.sources": deb822}) == {
        "bookworm": "http://mirror/debian",
        "bookworm-updates": "http://mirror/debian",
        "bookworm-security": "http://mirror/security",
    }


def test_mirrors_from_one_line_sources() -> None:
    text = "# deb http://old bookworm main\ndeb [signed-by=/k] http://mirror/debian bookworm main contrib\n"
    assert image.apt_mirrors({"sources.list": text})["bookworm"] == "http://mirror/debian"


def test_mirrors_fall_back_to_debian_on_other_systems() -> None:
    ubuntu = "Types: deb\nURIs: http://archive.ubuntu.com/ubuntu\nSuites: noble noble-updates\n"
    source_only = "Types: deb-src\nURIs: http://mirror/sources\nSuites: bookworm\n"
    assert image.apt_mirrors({"ubuntu.sources": ubuntu, "src.sources": source_only}) == {
        "bookworm": image.DEBIAN,
        "bookworm-updates": image.DEBIAN,
        "bookworm-security": image.DEBIAN_SECURITY,
    }


def test_apt_options_keep_only_how_to_reach_the_archive() -> None:
    dump = (
        'APT::Install-Recommends "1";\nAcquire "";\nAcquire::http::Proxy "http://proxy:3128";\n'
        'Acquire::Check-Date "false";\nAcquire::cdrom::mount "/media/cdrom/";\n'
    )
    assert image.apt_options(dump) == 'Acquire::http::Proxy "http://proxy:3128";\nAcquire::Check-Date "false";\n'


def test_pip_config_leaves_local_directories_behind() -> None:
    text = (
        "[global]\nindex-url = https://index/simple\nextra-index-url = file:///opt/x https://extra/simple\n"
        "find-links = /srv/wheels\ncert = /etc/own.pem\n"
    )
    assert image.pip_config([text]).splitlines() == [
        "[global]",
        "disable-pip-version-check = 1",
        "index-url = https://index/simple",
        "extra-index-url = https://extra/simple",
        f"cert = {image.CA_BUNDLE}",
    ]


def test_a_broken_pip_config_is_named() -> None:
    with pytest.raises(TestbedError, match="pip configuration cannot be parsed"):
        image.pip_config(["no section = 1"])


def test_environment_of_hosts() -> None:
    given = {"https_proxy": "http://proxy:3128", "SSL_CERT_FILE": "/here/ca.pem", "SECRET": "x"}
    assert image.host_environment(given) == f"https_proxy=http://proxy:3128\nSSL_CERT_FILE={image.CA_BUNDLE}\n"
