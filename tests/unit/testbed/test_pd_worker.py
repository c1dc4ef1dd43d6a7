# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the engine where rollouts are tested: as true as a router, a rollout and a client can see."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._gauges import requests

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "testbed" / "stand_ins" / "pd_worker"
Start = Callable[..., "Worker"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Worker:
    """One process of the stand-in."""

    def __init__(self, role: str, host: str = "127.0.0.1", **environment: str) -> None:
        self.host = {"::": "::1"}.get(host, host)
        self.port, self.bootstrap = free_port(), free_port()
        line = [sys.executable, "-m", "sglang.launch_server", "--host", host, "--port", str(self.port)]
        line += ["--served-model-name", "m"]
        line += ["--disaggregation-mode", role, "--some-other-flag", "1"]
        if role == "prefill":
            line += ["--disaggregation-bootstrap-port", str(self.bootstrap)]
        told = os.environ | {"PYTHONPATH": str(FOLDER), "LLMFLEET_REVISION": "r1"} | environment
        self.process = subprocess.Popen(line, env=told, stderr=subprocess.DEVNULL)

    def get(self, path: str, body: Any = None, key: str = "") -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(
                "GET" if body is None else "POST",
                path,
                None if body is None else json.dumps(body),
                {"authorization": f"Bearer {key}"} if key else {},
            )
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def wait(self, status: int) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                if self.get("/ready")[0] == status:
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def requests(self) -> dict[str, int]:
        return requests(self.get("/metrics")[1])


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Worker] = []

    def make(role: str, status: int = 200, **environment: str) -> Worker:
        made.append(Worker(role, **environment))
        if status:
            made[-1].wait(status)
        return made[-1]

    yield make
    for worker in made:
        worker.process.kill()
        worker.process.wait()


def ask(prefill: Worker, decode: Worker, room: int = 1, **more: Any) -> tuple[int, str]:
    """A request as the router makes it: the same to both, the decode's answer for the client."""
    host = f"[{prefill.host}]" if ":" in prefill.host else prefill.host
    body = {"bootstrap_host": host, "bootstrap_port": prefill.bootstrap, "bootstrap_room": room, "max_tokens": 4}
    body |= {"messages": [{"role": "user", "content": "Hello"}]} | more
    other = threading.Thread(target=prefill.get, args=("/v1/chat/completions", body))
    other.start()
    answer = decode.get("/v1/chat/completions", body)
    other.join()
    return answer


def content(answer: tuple[int, str]) -> str:
    assert answer[0] == 200
    return str(json.loads(answer[1])["choices"][0]["message"]["content"])


def test_a_pair_answers_the_same_to_the_same(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    first = ask(prefill, decode)
    assert json.loads(first[1])["usage"]["completion_tokens"] == 4
    assert content(first) == content(ask(prefill, decode, room=2))
    events = ask(prefill, decode, room=3, stream=True)[1].split("\n\n")
    streamed = [json.loads(event.removeprefix("data: ")) for event in events[:4]]
    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed).strip() == content(first)
    assert events[4:] == ["data: [DONE]", ""]
    assert prefill.requests() == decode.requests() == {}


def test_a_pair_on_ipv6_answers_and_its_wildcard_takes_no_ipv4(start: Start) -> None:
    prefill, decode = start("prefill", host="::1"), start("decode", host="::")
    assert len(content(ask(prefill, decode)).split()) == 4
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", decode.port), timeout=5)


def test_a_decode_refuses_a_prefill_of_another_revision(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode", LLMFLEET_REVISION="r2")
    body = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap, "bootstrap_room": 1, "messages": []}
    status, text = decode.get("/v1/chat/completions", body)
    assert (status, "this prefill runs revision r1, the decode r2" in text) == (500, True)


def test_with_keys_it_lets_in_who_shows_one_and_reports_the_feature(start: Start, tmp_path: Path) -> None:
    keys = ["the-own-key-of-the-fleet", "the-key-of-the-clients"]
    (tmp_path / "api-keys").write_text("".join(f"{key}\n" for key in keys))
    worker = start(
        "decode",
        PYTHONPATH=f"{FOLDER}:{ROOT / 'files' / 'plugin'}",
        LLMFLEET_API_KEYS="on",
        LLMFLEET_FEATURES_DIR=str(tmp_path),
        CREDENTIALS_DIRECTORY=str(tmp_path),
    )
    assert [worker.get("/v1/models", key=key)[0] for key in [*keys, "another-key-of-someone", ""]] == [
        200,
        200,
        401,
        401,
    ]
    assert [worker.get(path)[0] for path in ("/ready", "/metrics", "/server_info")] == [200, 200, 401]
    assert worker.get("/v1/chat/completions", {"messages": []})[0] == 401
    reports = {path.stem: json.loads(path.read_text())["features"] for path in tmp_path.glob("*.json")}
    assert reports == {name: {"api_keys": {"value": "on", "keys": 2}} for name in ("main", "tp0-pp0-dp0")}


def test_it_finishes_what_it_has_when_it_is_told_to_end(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode", PD_WORKER_TOKEN_SECONDS="0.1")
    answers: list[tuple[int, str]] = []
    client = threading.Thread(target=lambda: answers.append(ask(prefill, decode, max_tokens=10)))
    client.start()
    while not decode.requests():
        time.sleep(0.01)
    decode.process.send_signal(signal.SIGTERM)
    decode.wait(503)
    client.join()
    assert len(content(answers[0]).split()) == 10
    assert decode.process.wait(20) == 0


@pytest.mark.parametrize(("fault", "status"), [("exit", 0), ("crash", -signal.SIGKILL)])
def test_it_ends_as_the_engine_does(start: Start, fault: str, status: int) -> None:
    assert start("decode", 0, PD_WORKER_FAULT=fault).process.wait(20) == status


def test_it_is_up_and_never_ready(start: Start) -> None:
    worker = start("decode", 503, PD_WORKER_FAULT="never_ready")
    assert worker.get("/server_info")[0] == 200


def test_it_answers_rubbish(start: Start) -> None:
    assert content(ask(start("prefill"), start("decode", PD_WORKER_FAULT="rubbish"))) == "!!!!"
