# SPDX-License-Identifier: Apache-2.0
"""The probe against a router made of Python: every way an answer can be wrong, and what is written of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import probe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.lifecycle.stub import CHAT, WHOLE, Answer, Stub, chunk, hangs, serving, status, stream

# Far above what any answer takes; a test that is about the deadline sets its own.
PATIENT = 60.0


@pytest.fixture
def router() -> Iterator[Stub]:
    with serving() as stub:
        yield stub


@pytest.fixture(scope="module")
def router_of_all() -> Iterator[Stub]:
    """For tests that ask many times and set the answer each time."""
    with serving() as stub:
        yield stub


def ask(router: Stub, answer: Answer, timeout: float = PATIENT, **more: Any) -> probe.Result:
    router.routes[CHAT] = answer
    return probe.ask(probe.Question(router.url, "tiny", timeout, **more))


def test_a_whole_answer(router: Stub) -> None:
    result = ask(router, stream(*WHOLE), prompt="Say it", tokens=5)
    assert (result.reason, result.detail, result.success) == (probe.OK, "", True)
    assert result.first_token_seconds is not None
    assert result.duration_seconds is not None
    assert 0 < result.first_token_seconds <= result.duration_seconds
    ((path, headers, body),) = router.requests
    assert path == CHAT
    assert "Authorization" not in headers
    assert json.loads(body) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say it"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
    }


def test_thinking_is_text_too(router: Stub) -> None:
    thinking = (chunk(role="assistant"), chunk(reasoning_content="Let me see"), chunk(finish="length"), "[DONE]")
    assert ask(router, stream(*thinking)).reason == probe.OK


def test_the_key_goes_into_the_header_only(router: Stub) -> None:
    assert ask(router, stream(*WHOLE), api_key="sesame").success
    ((_path, headers, body),) = router.requests
    assert headers["Authorization"] == "Bearer sesame"
    assert b"sesame" not in body


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        (status(429, "full"), probe.SHED, "status 429: full"),
        (status(503, "full", Retry_After="2"), probe.SHED, "status 503: full"),
        (
            status(503, '{"error": {"code": "no_available_workers"}}', Retry_After="1"),
            probe.NO_WORKER,
            'status 503: {"error": {"code": "no_available_workers"}}',
        ),
        (
            status(429, '{"error": {"code": "admission_queue_full"}}', Retry_After="2"),
            probe.SHED,
            'status 429: {"error": {"code": "admission_queue_full"}}',
        ),
        (status(503, '{"error": 1}', Retry_After="2"), probe.SHED, 'status 503: {"error": 1}'),
        (status(503, "no worker"), probe.STATUS, "status 503: no worker"),
        (status(500, "x" * 1000), probe.STATUS, f"status 500: {'x' * 1000}"[:300]),
        (status(404), probe.STATUS, "status 404: "),
        (stream('{"error": {"code": 503}}'), probe.ENGINE_ERROR, '{"code": 503}'),
        (stream(*WHOLE[:3], '{"error": {"code": 500}}', "[DONE]"), probe.ENGINE_ERROR, '{"code": 500}'),
        (stream(*WHOLE[:-1]), probe.BROKEN_STREAM, "the stream ended without [DONE]"),
        (stream(*WHOLE[:2], "[DONE]"), probe.SHAPE, "the stream ended without a finish_reason"),
        (stream("hello", "[DONE]"), probe.SHAPE, "an event is no JSON: hello"),
        (stream("[1]", "[DONE]"), probe.SHAPE, "an event has no list of choices: [1]"),
        (stream('{"choices": [{"delta": "x"}]}'), probe.SHAPE, 'a delta is no object: "x"'),
        (stream("[" * 100_000), probe.SHAPE, f"an event is no JSON: {'[' * 300}"[:300]),
        (status(503, "[" * 100_000), probe.STATUS, f"status 503: {'[' * 300}"[:300]),
        (stream('{"choices": [1]}'), probe.SHAPE, 'an event has no list of choices: {"choices": [1]}'),
        (status(200, '{"choices": []}'), probe.BROKEN_STREAM, "the stream ended without [DONE]"),
        (stream(WHOLE[0], *WHOLE[3:]), probe.EMPTY, "the text of the whole answer is ''"),
        (
            stream(chunk("!!"), chunk("!!"), chunk("!", finish="length"), "[DONE]"),
            probe.REPETITION,
            "the text of the whole answer is '!!!!!'",
        ),
    ],
)
def test_what_is_no_success(router: Stub, answer: Answer, reason: str, detail: str) -> None:
    result = ask(router, answer)
    assert (result.reason, result.detail, result.success) == (reason, detail, False)


def test_a_short_answer_of_one_letter_is_one(router: Stub) -> None:
    assert ask(router, stream(chunk("aaa"), chunk(finish="stop"), "[DONE]")).success


def test_a_stream_that_is_cut(router: Stub) -> None:
    result = ask(router, stream(*WHOLE[:3], cut=True))
    assert result.reason == probe.BROKEN_STREAM
    assert result.first_token_seconds is not None


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        result = probe.ask(probe.Question(f"http://127.0.0.1:{taken.getsockname()[1]}", "tiny", PATIENT))
    assert (result.reason, result.first_token_seconds) == (probe.CONNECT, None)
    assert result.detail.startswith("ConnectionRefusedError")


@pytest.mark.parametrize("answer", [hangs, stream(*WHOLE, hang_after=0), stream(*WHOLE, hang_after=2)])
def test_what_hangs_ends_at_the_deadline(router: Stub, answer: Answer) -> None:
    result = ask(router, answer, timeout=0.5)
    assert (result.reason, result.detail) == (probe.TIMEOUT, "no whole answer within 0.5 s")
    assert not router.ending.is_set()


def test_a_connection_that_comes_too_late_is_not_waited_for(router: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name has several addresses, and the first of them take all the time there is."""
    connect = http.client.HTTPConnection.connect

    def late(connection: http.client.HTTPConnection) -> None:
        exchange.timed_out.wait()
        connect(connection)

    class Timed(probe.Exchange):
        def __init__(self, url: str, timeout: float) -> None:
            super().__init__(url, timeout)
            self.timed_out = threading.Event()

        def _end(self) -> None:
            super()._end()
            self.timed_out.set()

    monkeypatch.setattr(http.client.HTTPConnection, "connect", late)
    router.routes["/health"] = hangs
    with Timed(f"{router.url}/health", 0.2) as exchange, pytest.raises(TimeoutError, match="before the deadline"):
        exchange.send("GET", None, {})


def test_what_trickles_ends_at_the_deadline(router: Stub) -> None:
    """Each byte comes long before the socket's own timeout, and the answer would never be whole."""

    def trickle(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ")
        while not handler.server.ending.wait(0.02):
            handler.wfile.write(b"x")

    assert ask(router, trickle, timeout=0.5).reason == probe.TIMEOUT
    router.routes["/health"] = trickle
    with pytest.raises(OSError, match="no whole answer within"):
        probe.get(f"{router.url}/health", 0.5)


@given(st.binary(max_size=200))
def test_whatever_is_answered_is_a_result(router_of_all: Stub, content: bytes) -> None:
    def answer(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\ndata: " + content)
        handler.close_connection = True

    assert ask(router_of_all, answer).reason in set(probe.REASONS) - {probe.OK, probe.TIMEOUT}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "delta", "content", "finish_reason", "error"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=4))
def test_whatever_json_is_streamed_is_a_result(router_of_all: Stub, events: list[Any]) -> None:
    result = ask(router_of_all, stream(*(json.dumps(event) for event in events), "[DONE]"))
    assert result.reason in set(probe.REASONS) - {probe.TIMEOUT, probe.CONNECT, probe.STATUS}


def arguments(router: Stub, folder: Path) -> list[str]:
    found = ["--router", "router", "--group", "main", "--url", router.url, "--model", "tiny", "--interval", "30"]
    return [*found, "--out", str(folder), "--timeout", str(PATIENT)]


def series(folder: Path) -> dict[str, float]:
    """Value by metric name; every series has the labels of the router."""
    found = {}
    for family in text_string_to_metric_families((folder / "router.prom").read_text()):
        for sample in family.samples:
            assert {"instance_name": "router", "group": "main"}.items() <= sample.labels.items()
            found[sample.name.removeprefix("llmfleet_probe_") + sample.labels.get("reason", "")] = sample.value
    return found


def test_files_of_a_success_and_of_what_followed(
    router: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router.routes[CHAT] = stream(*WHOLE)
    monkeypatch.setattr(time, "time", lambda: 1700.5)
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert probe.main(arguments(router, tmp_path)) == 0
    told = json.loads((tmp_path / "router.json").read_text())
    first, duration = told.pop("first_token_seconds"), told.pop("duration_seconds")
    assert 0 < first <= duration
    success = {"reason": "ok", "detail": "", "success": True, "at": 1700.5, "last_success": 1700.5}
    assert told == {"instance_name": "router", "group": "main", "url": router.url, **success}
    found = series(tmp_path)
    assert begun + duration <= found.pop("ended_since_boot_seconds") <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert found == {
        "success": 1,
        "reasonok": 1,
        "first_token_seconds": pytest.approx(first),
        "duration_seconds": pytest.approx(duration),
        "last_success_timestamp_seconds": 1700.5,
        "interval_seconds": 30,
    }

    router.routes[CHAT] = status(429, "full")
    monkeypatch.setattr(time, "time", lambda: 1800.5)
    assert probe.main(arguments(router, tmp_path)) == 0
    told = json.loads((tmp_path / "router.json").read_text())
    assert (told["reason"], told["success"], told["at"], told["last_success"]) == ("shed", False, 1800.5, 1700.5)
    found = series(tmp_path)
    assert (found["success"], found["reasonshed"], found["last_success_timestamp_seconds"]) == (0, 1, 1700.5)
    assert "first_token_seconds" not in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router.json", "router.prom"]
    served, shed = capsys.readouterr().out.splitlines()
    assert served.startswith("router: ok ")
    assert shed.startswith("<4>router: shed ")


def test_the_key_is_a_credential(router: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "api-keys").write_text("sesame\nanother\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    router.routes[CHAT] = stream(*WHOLE)
    assert probe.main(arguments(router, tmp_path)) == 0
    assert router.requests[0][1]["Authorization"] == "Bearer sesame"
    assert "sesame" not in (tmp_path / "router.json").read_text() + (tmp_path / "router.prom").read_text()


def test_a_folder_that_is_not_there_is_an_error(
    router: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router.routes[CHAT] = stream(*WHOLE)
    assert probe.main(arguments(router, tmp_path / "none")) == 1
    assert "expected a readable key and a folder to write to" in capsys.readouterr().err
