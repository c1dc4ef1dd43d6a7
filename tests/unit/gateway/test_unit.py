# SPDX-License-Identifier: Apache-2.0
"""The unit of the gateway: what systemd reads in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible_collections.llmfleet.sglang.plugins.module_utils import _haproxy

from tests.unit.gateway.harness import ROLE

CERTIFICATE = "/etc/ssl/private/gateway.pem"


def unit(**changes: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROLE / "templates"), trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    values = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    values |= yaml.safe_load((ROLE / "vars" / "main.yml").read_text())
    values |= {"ansible_managed": "Ansible managed", "_gateway_fingerprint": "0123456789abcdef"}
    return environment.get_template("llmfleet-gateway.service.j2").render(values | changes) + "\n"


def settings(text: str, name: str) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", text)


@pytest.mark.parametrize("certificate", ["", CERTIFICATE])
def test_systemd_finds_nothing_to_say(tmp_path: Path, certificate: str) -> None:
    # A program that is there on every machine.
    text = unit(gateway_tls_certificate=certificate, _gateway_program="/bin/true")
    (tmp_path / "llmfleet-gateway.service").write_text(text)
    argv = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "llmfleet-gateway.service")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "llmfleet-gateway" in line]) == (0, [])


def test_a_reload_checks_and_keeps_before_it_takes_effect() -> None:
    text = unit(gateway_tls_certificate=CERTIFICATE)
    copied, checked, kept, signalled = settings(text, "ExecReload")
    assert copied.startswith("+/usr/bin/install ")
    assert copied.endswith(f" --mode=0600 {CERTIFICATE} /run/llmfleet/gateway/tls.pem")
    assert checked == f"/usr/sbin/haproxy -c -q -f {_haproxy.CONFIGURATION}"
    assert kept.endswith(f" {_haproxy.KEEP_PROGRAM} {_haproxy.STATE_FILE} {_haproxy.CONFIGURATION} {_haproxy.SOCKET}")
    assert signalled == "/bin/kill -USR2 $MAINPID"
    assert settings(text, "ExecStart") == [f"/usr/sbin/haproxy -Ws -f {_haproxy.CONFIGURATION} -S {_haproxy.SOCKET}"]


def test_without_tls_no_certificate_is_touched() -> None:
    text = unit()
    assert len(settings(text, "ExecReload")) == 3
    assert "install" not in text.replace("[Install]", "")


def test_it_may_bind_low_ports_and_nothing_else() -> None:
    text = unit()
    assert settings(text, "CapabilityBoundingSet") == settings(text, "AmbientCapabilities") == ["CAP_NET_BIND_SERVICE"]
    assert settings(text, "User") == ["llmfleet-gateway"]
    # Both ends of each connection, and what HAProxy itself opens.
    assert settings(text, "LimitNOFILE") == ["9000"]
