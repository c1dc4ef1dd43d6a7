# SPDX-License-Identifier: Apache-2.0
"""``files/gateway/keep_servers.py``: what is kept of HAProxy's servers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.gateway.harness import KEEP, plan, rendered

NAMES = "# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state"
STATE = f"""\
1
{NAMES}
2 routers 1 a:gpu1:router 127.0.0.1 2 8 256 256 1 8 2 0 6 0 0 0 - 30001 - 0 0 - - 0
2 routers 2 b:gpu2:router 127.0.0.1 2 0 256 256 1 8 2 0 6 0 0 0 - 30002 - 0 0 - - 0
"""


def keep(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "haproxy.cfg").write_text(rendered(__gateway_plan=plan(("a:gpu1:router", "[2001:db8::1]:40001"))))
    argv = ["/usr/bin/python3", "-I", "-B", str(KEEP), str(folder / "servers"), str(folder / "haproxy.cfg"), *more]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_ports_are_those_of_the_configuration_and_servers_that_it_lacks_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text(STATE)
    assert keep(tmp_path).returncode == 0
    fitted = "\n".join(STATE.splitlines()[:3]).replace(" 30001 ", " 40001 ") + "\n"
    assert (tmp_path / "servers").read_text() == fitted
    assert (tmp_path / "servers").stat().st_mode & 0o777 == 0o600
    # Again: nothing moves.
    assert keep(tmp_path).returncode == 0
    assert (tmp_path / "servers").read_text() == fitted


@pytest.mark.parametrize("content", [None, "", "rubbish\n"])
def test_what_cannot_be_read_keeps_no_gateway_from_starting(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "servers").write_text(content)
    done = keep(tmp_path)
    assert (done.returncode, (tmp_path / "servers").read_text()) == (0, "1\n")
    assert ("begun anew" in done.stderr) == (content is not None)


def test_nothing_is_kept_of_a_gateway_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text(STATE)
    done = keep(tmp_path, str(tmp_path / "none.sock"))
    assert done.returncode == 1
    assert "expected the gateway to run" in done.stderr
    assert (tmp_path / "servers").read_text() == STATE
