# SPDX-License-Identifier: Apache-2.0
"""What clients see of the gateway: the role's configuration in a real HAProxy, before stand-ins for routers."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _haproxy

from tests.unit.gateway.conftest import Start
from tests.unit.gateway.harness import EMPTY_STATE, KEEP, PROGRAM, WITHIN_S, Router, plan, rendered, wait_until
from tests.unit.plugins.modules.process import run_module

Pair = tuple[Router, Router]
A, B = "a:gpu1:router", "b:gpu2:router"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"_gateway_listen": "[::1]:8000", "_gateway_metrics_listen": "[::1]:8405"},
        {"gateway_paths": ["/v1/", "/generate"]},
    ],
)
def test_haproxy_accepts_the_configuration_without_a_warning(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert warnings(tmp_path, **changes) == []


def test_a_name_that_is_not_found_keeps_no_other_router_from_being_served(tmp_path: Path) -> None:
    told = warnings(tmp_path, __gateway_plan=plan((A, "127.0.0.1:1"), (B, "gpu-2.example.invalid:30001")))
    assert [
        B in line and line.endswith("could not resolve address 'gpu-2.example.invalid', disabling server.")
        for line in told
    ] == [True]


def warnings(folder: Path, **changes: Any) -> list[str]:
    """What HAProxy says of the configuration, which it has to accept."""
    assert PROGRAM, "haproxy not found; tools/setup installs it"
    (folder / "servers").write_text(EMPTY_STATE)
    (folder / "haproxy.cfg").write_text(rendered(_gateway_state_file=str(folder / "servers"), **changes))
    argv = [PROGRAM, "-c", "-f", str(folder / "haproxy.cfg")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "[NOTICE]" not in line and line.strip()]


def test_tokens_pass_one_by_one(start: Start, routers: Pair) -> None:
    gateway = start(routers[0])
    routers[0].answer = "stream"
    with gateway.request() as response:
        for number in range(3):
            # The router has nothing more to say before this one has arrived.
            routers[0].tokens.release()
            assert response.readline() == f"data: {A} {number}\n".encode()
            assert response.readline() == b"\n"
        assert response.read() == b""


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("headers", "retry_after"), [({"retry-after": "7"}, "7"), ({}, "3")])
def test_what_a_router_refuses_is_refused_once_and_in_its_words(
    start: Start, routers: Pair, status: int, headers: dict[str, str], retry_after: str
) -> None:
    gateway = start(*routers)
    for router in routers:
        router.answer, router.headers = status, headers
    with gateway.request() as response:
        assert response.status == status
        assert response.headers.get_all("Retry-After") == [retry_after]
        assert response.read().startswith(b"said by ")
    assert len(routers[0].asked + routers[1].asked) == 1


def test_without_a_ready_group_clients_are_told_when_to_come_again(start: Start, routers: Pair) -> None:
    for router in routers:
        router.ready = False
    gateway = start(*routers)
    gateway.wait_up(**{A: False, B: False})
    with gateway.request() as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "10")
        assert response.headers["content-type"] == "application/json"
        assert json.loads(response.read()) == {
            "error": {
                "code": "no_group_ready",
                "message": "no PD group is ready",
                "param": None,
                "type": "gateway_error",
            }
        }
    with gateway.request("/readiness", "GET") as response:
        assert response.status == 503
    routers[1].ready = True
    gateway.wait_up(**{A: False, B: True})
    with gateway.request("/readiness", "GET") as response:
        assert response.status == 200
    with gateway.request() as response:
        assert response.read() == f"said by {B}".encode()


def test_a_fallback_is_asked_in_the_place_of_its_router(start: Start, routers: Pair) -> None:
    # It knows no /readiness, and nothing else about the gateway changes.
    routers[0].ready, routers[0].unready = False, 404
    routers[1].ready = False
    gateway = start(*routers, ready=[200, 401, 404])
    gateway.wait_up(**{A: True, B: False})
    with gateway.request() as response:
        assert response.read() == f"said by {A}".encode()
    routers[0].unready = 503
    gateway.wait_up(**{A: False, B: False})


def test_a_request_that_could_not_be_sent_goes_to_another_router(start: Start, routers: Pair) -> None:
    gateway = start(*routers)
    gateway.wait_up(**{A: True, B: True})
    routers[0].stop()
    # Sooner than any health check has noticed: the router of which the connection is refused is passed over.
    for _attempt in range(4):
        with gateway.request() as response:
            assert (response.status, response.read()) == (200, f"said by {B}".encode())


def test_a_router_is_told_that_its_client_has_gone(start: Start, routers: Pair) -> None:
    gateway = start(routers[0])
    routers[0].answer = "silence"

    body = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: 2\r\n\r\n{}"
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(body)
        wait_until(lambda: len(routers[0].asked) == 1, "asked")
    wait_until(routers[0].gone.is_set, "told")


def test_what_is_not_served_is_not_passed_on(start: Start, routers: Pair) -> None:
    gateway = start(routers[0])
    with gateway.request("/workers") as response:
        assert (response.status, json.loads(response.read())["error"]["code"]) == (404, "not_served")
    assert routers[0].asked == []


def test_a_drained_group_ends_its_streams_and_gets_nothing_else(start: Start, routers: Pair) -> None:
    gateway = start(*routers)
    routers[0].answer = routers[1].answer = "stream"
    with gateway.request() as first, gateway.request() as second:
        # One each: the router with the fewest is asked.
        wait_until(lambda: len(routers[0].asked) == len(routers[1].asked) == 1, "one each")
        _haproxy.set_drained(gateway.ask, [A], True)
        assert gateway.servers() == {
            A: {"drained": True, "up": True, "sessions": 1},
            B: {"drained": False, "up": True, "sessions": 1},
        }
        with gateway.request():
            wait_until(lambda: len(routers[1].asked) == 2, "asked")
            assert len(routers[0].asked) == 1
            routers[1].tokens.release(6)
            routers[0].tokens.release(3)
            told = {first.read(), second.read()}
    assert told == {"".join(f"data: {name} {number}\n\n" for number in range(3)).encode() for name in (A, B)}
    assert _haproxy.wait(gateway.ask, [A], True, WITHIN_S) == {}
    _haproxy.set_drained(gateway.ask, [B], True)
    with gateway.request() as response:
        assert json.loads(response.read())["error"]["code"] == "no_group_ready"
    _haproxy.set_drained(gateway.ask, [A], False)
    routers[0].answer = "whole"
    with gateway.request() as response:
        assert response.read() == f"said by {A}".encode()


def test_a_reload_keeps_streams_and_what_is_drained(start: Start, routers: Pair) -> None:
    third = Router("c:gpu3:router")
    gateway = start(*routers)
    routers[0].answer = "stream"
    routers[1].ready = False
    gateway.wait_up(**{A: True, B: False})
    with gateway.request() as response:
        routers[0].tokens.release()
        assert response.readline() == f"data: {A} 0\n".encode()
        _haproxy.set_drained(gateway.ask, [A], True)
        gateway.reload("second", *routers, third)
        # The stream is in the worker from before, and counted all the same.
        assert {name: server["sessions"] for name, server in gateway.servers().items()} == {A: 1, B: 0, third.name: 0}
        assert gateway.servers()[A]["drained"]
        assert not gateway.servers()[B]["up"]
        assert list(_haproxy.wait(gateway.ask, [A], True, 0)) == [A]
        with gateway.request() as other:
            assert other.read() == f"said by {third.name}".encode()
        routers[0].tokens.release(2)
        assert response.read().endswith(f"data: {A} 2\n\n".encode())
    assert _haproxy.wait(gateway.ask, [A], True, WITHIN_S) == {}
    third.stop()


def test_what_is_drained_stays_so_after_a_crash(start: Start, routers: Pair) -> None:
    gateway = start(*routers)
    _haproxy.set_drained(gateway.ask, [A], True)
    gateway.keep()
    assert gateway.process is not None
    gateway.process.kill()
    gateway.process.wait()
    gateway.process = None
    gateway.start()
    assert {name: server["drained"] for name, server in gateway.servers().items()} == {A: True, B: False}


def test_a_router_that_has_moved_is_found_where_it_is(start: Start, routers: Pair) -> None:
    gateway = start(*routers)
    moved = Router(A)
    gateway.reload("second", moved, routers[1])
    _haproxy.set_drained(gateway.ask, [B], True)
    gateway.wait_up(**{A: True})
    with gateway.request() as response:
        assert response.read() == f"said by {A}".encode()
    assert (len(moved.asked), routers[0].asked) == (1, [])
    moved.stop()


def test_it_tells_its_metrics_beside_its_clients(start: Start, routers: Pair) -> None:
    gateway = start(*routers)
    gateway.wait_up(**{A: True, B: True})
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=WITHIN_S) as response:
        told = response.read().decode()
    assert f'haproxy_server_status{{proxy="routers",server="{A}",state="UP"}} 1' in told
    with gateway.request("/metrics", "GET") as refused:
        assert refused.status == 404


def test_tls_with_the_certificate_that_the_unit_names(
    start: Start, routers: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate, pem = tmp_path / "key", tmp_path / "certificate", tmp_path / "tls.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    subprocess.run([*argv, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    pem.write_bytes(certificate.read_bytes() + key.read_bytes())
    monkeypatch.setenv("GATEWAY_CERTIFICATE", str(pem))
    gateway = start(routers[0], gateway_tls_certificate="/etc/ssl/private/gateway.pem")
    context = ssl.create_default_context(cafile=str(certificate))
    url = f"https://127.0.0.1:{gateway.port}/v1/chat/completions"
    with urllib.request.urlopen(url, b"{}", timeout=WITHIN_S, context=context) as response:
        assert response.read() == f"said by {A}".encode()


def test_the_modules_drain_admit_and_tell(start: Start, routers: Pair, tmp_path: Path) -> None:
    gateway = start(*routers)
    gateway.wait_up(**{A: True, B: True})
    given = {"socket": gateway.socket, "state_file": str(gateway.state_file), "program": str(KEEP)}
    given["configuration"] = str(tmp_path / "haproxy.cfg")

    def servers(state: str, *names: str, check_mode: bool = False, timeout: int = 30) -> dict[str, Any]:
        asked = {"servers": list(names), "state": state, "timeout": timeout, **given}
        return run_module("gateway_servers", asked, check_mode)

    assert servers("drained", A, check_mode=True)["changed"]
    assert not gateway.servers()[A]["drained"]
    done = servers("drained", A, "x:gpu9:router")
    assert (done["changed"], done["unknown"], done["left"]) == (True, ["x:gpu9:router"], {})
    assert gateway.servers()[A]["drained"]
    # Kept for the next start.
    assert [line.split()[6] for line in gateway.state_file.read_text().splitlines() if A in line] == ["8"]
    assert not servers("drained", A)["changed"]
    told = run_module("gateway_info", {"socket": gateway.socket})
    assert (told["running"], told["digest"]) == (True, "first")
    assert told["servers"][A] == {"drained": True, "up": True, "sessions": 0}
    assert servers("ready", A)["changed"]
    routers[0].ready = False
    gateway.wait_up(**{A: False})
    failed = servers("ready", A, timeout=0)
    assert failed["failed"]
    assert f"found {A} not ready for the gateway after 0 s" in failed["msg"]


def test_a_gateway_that_does_not_run_is_told(tmp_path: Path) -> None:
    told = run_module("gateway_info", {"socket": str(tmp_path / "none.sock")})
    assert (told["running"], told["digest"], told["servers"]) == (False, "", {})
    assert told["why"].startswith(f"found no HAProxy at {tmp_path}/none.sock: ")
    failed = run_module("gateway_servers", {"servers": [A], "state": "drained", "socket": str(tmp_path / "none.sock")})
    assert failed["msg"] == told["why"]
