# SPDX-License-Identifier: Apache-2.0
"""The artefact manifest: how it is read, and whether the one that is shipped is complete."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.llmfleet.sglang.plugins.module_utils import _artefacts

ROOT = Path(__file__).resolve().parents[4]
A, B = "a" * 64, "b" * 64


def entry(name: str, *sets: str, version: str = "1.0", sha256: str = A) -> dict[str, Any]:
    return {
        "name": name,
        "version": version,
        "kind": "wheel",
        "arch": "any",
        "file": f"{name}-{version}-py3-none-any.whl",
        "source": "pypi",
        "sha256": sha256,
        "size": 7,
        "licence": "MIT",
        "sets": list(sets),
    }


def manifest(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "artefacts": list(entries)}


SMALL = manifest(
    {
        "name": "base",
        "version": "bookworm",
        "kind": "image",
        "arch": "amd64",
        "source": "debian",
        "verified_by": "keyring",
        "licence": "various",
        "sets": ["base_image"],
    },
    entry("alpha", "one", "two"),
    entry("beta", "one", version="2.0+cpu", sha256=B),
)


def test_requirements_pin_version_and_digest_of_exactly_the_set() -> None:
    assert _artefacts.requirements(SMALL, "one") == [
        f"alpha==1.0 --hash=sha256:{A}",
        f"beta==2.0+cpu --hash=sha256:{B}",
    ]
    assert _artefacts.requirements(SMALL, "two") == [f"alpha==1.0 --hash=sha256:{A}"]


@pytest.mark.parametrize("name", ["three", "", "base_image"])
def test_a_set_without_wheels_is_refused_and_the_known_ones_are_named(name: str) -> None:
    with pytest.raises(_artefacts.UnknownSetError, match=r"expected one of one, two\."):
        _artefacts.requirements(SMALL, name)


def test_a_sound_manifest_has_no_problems() -> None:
    assert _artefacts.problems(SMALL) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sha256": "abc"}, "alpha: sha256 is 'abc', expected 64 hexadecimal digits"),
        ({"sha256": A.upper()}, f"alpha: sha256 is {A.upper()!r}, expected 64 hexadecimal digits"),
        ({"version": ">=1.0"}, "alpha: version '>=1.0' is not one exact version"),
        ({"version": ""}, "alpha: version is '', expected text"),
        ({"size": 0}, "alpha: size is 0, expected a number of bytes"),
        ({"size": True}, "alpha: size is True, expected a number of bytes"),
        ({"name": "Al_pha"}, "Al_pha: name 'Al_pha' is not a normalised package name"),
        ({"kind": "egg"}, "alpha: kind is 'egg', expected one of deb, image, wheel"),
        ({"sets": []}, "alpha: sets is [], expected at least one name, sorted, none twice"),
        ({"sets": ["two", "one"]}, "alpha: sets is ['two', 'one'], expected at least one name, sorted, none twice"),
        ({"url": "x"}, "alpha: missing [], unexpected ['url']"),
    ],
)
def test_a_bad_entry_is_named_with_what_was_expected(change: dict[str, Any], expected: str) -> None:
    bad = copy.deepcopy(SMALL)
    bad["artefacts"][1].update(change)
    assert _artefacts.problems(bad) == [expected]


def test_an_incomplete_entry_is_refused() -> None:
    bad = copy.deepcopy(SMALL)
    del bad["artefacts"][1]["sha256"]
    assert _artefacts.problems(bad) == ["alpha: missing ['sha256'], unexpected []"]


def test_order_and_uniqueness_are_checked() -> None:
    alpha, beta = entry("alpha", "one"), entry("beta", "one")
    assert _artefacts.problems(manifest(beta, alpha)) == ["the entries are not sorted by kind, name, version and arch"]
    newer = entry("alpha", "one", version="1.1")
    assert _artefacts.problems(manifest(alpha, newer)) == ["two versions of wheel alpha for one in one set"]
    assert "file alpha-1.0-py3-none-any.whl occurs twice" in _artefacts.problems(manifest(alpha, alpha))


@pytest.mark.parametrize("bad", [{}, {"schema": 2, "artefacts": []}, {"schema": 1, "artefacts": {}}])
def test_another_schema_is_refused(bad: dict[str, Any]) -> None:
    assert len(_artefacts.problems(bad)) == 1


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "files/artefacts.yml").read_text())
    return loaded


class TestShippedManifest:
    """``files/artefacts.yml`` itself."""

    def test_every_entry_is_complete_sorted_and_unique(self, shipped: dict[str, Any]) -> None:
        assert _artefacts.problems(shipped) == []

    def test_it_holds_the_sets_that_roles_name(self, shipped: dict[str, Any]) -> None:
        assert _artefacts.wheel_sets(shipped) == [
            "engine-0.5.16-cpu",
            "engine-0.5.16-cuda",
            "engine-0.5.23-cpu",
            "engine-0.5.23-cuda",
            "gpu_exporter",
            "kernels",
            "router",
            "uv",
        ]

    @pytest.mark.parametrize(
        ("set_name", "pin"),
        [
            ("engine-0.5.16-cpu", "sglang==0.5.16"),
            ("engine-0.5.16-cpu", "torch==2.13.0+cpu"),
            ("engine-0.5.16-cuda", "sglang==0.5.16"),
            ("engine-0.5.16-cuda", "torch==2.11.0"),
            ("engine-0.5.16-cuda", "mooncake-transfer-engine-cuda13==0.3.14"),
            ("engine-0.5.23-cpu", "sglang==0.5.23"),
            ("engine-0.5.23-cpu", "torch==2.13.0+cpu"),
            ("engine-0.5.23-cuda", "sglang==0.5.23"),
            ("engine-0.5.23-cuda", "mooncake-transfer-engine-cuda13==0.3.14"),
            ("router", "smg==1.13.0"),
            ("gpu_exporter", "nvidia-ml-py==13.615.71"),
            ("uv", "uv==0.13.9"),
        ],
    )
    def test_a_set_pins_what_it_is_for(self, shipped: dict[str, Any], set_name: str, pin: str) -> None:
        assert pin in {line.split(" ", 1)[0] for line in _artefacts.requirements(shipped, set_name)}

    @pytest.mark.parametrize("set_name", ["engine-0.5.16-cuda", "engine-0.5.23-cuda"])
    def test_compiler_and_headers_are_of_one_cuda(self, shipped: dict[str, Any], set_name: str) -> None:
        """The headers of CCCL refuse a compiler of another CUDA than the runtime's headers."""
        names = ("cccl", "crt", "nvcc", "nvrtc", "runtime")
        parts = [f"nvidia-cuda-{name}" for name in names] + ["nvidia-nvvm"]
        found = {e["name"]: e["version"] for e in _artefacts.wheels(shipped, set_name) if e["name"] in parts}
        assert {name: version.rsplit(".", 1)[0] for name, version in found.items()} == dict.fromkeys(parts, "13.0")

    def test_wheels_fit_the_oldest_target(self, shipped: dict[str, Any]) -> None:
        """Debian 12 has Python 3.11; a wheel for one interpreter must be for that one."""
        tags = {e["file"].removesuffix(".whl").rsplit("-", 3)[1] for e in shipped["artefacts"] if e["kind"] == "wheel"}
        assert {tag for tag in tags if tag.startswith("cp3") and int(tag[3:]) > 11} == set()
