# SPDX-License-Identifier: Apache-2.0
"""A tiny completion through a router, streamed: the only check that a whole PD group serves.

    python3 lifecycle probe --router router --group main --url http://127.0.0.1:30001 --model NAME --out FOLDER

Writes ``<router>.prom`` (Prometheus text, for an exporter) and ``<router>.json`` (for a person or a playbook) into
FOLDER, each whole or not at all. Exit status 0 whatever the router answered, since that is what the files say; 1 when
they cannot be written. The API key, if there is one, is the first of the unit's credential (``credentials.py``):
it is in no command line and no environment.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from credentials import read_api_keys

# How a probe can end. SHED is a router or an engine that rejects on purpose; everything else but OK is a failure.
OK = "ok"
SHED = "shed"
NO_WORKER = "no_worker"  # the router has no healthy server to give it to
CONNECT = "connect"  # nobody listens, or the connection broke before an answer
STATUS = "status"  # another status than 200
TIMEOUT = "timeout"  # not answered whole within the deadline
BROKEN_STREAM = "broken_stream"  # it ended before its end
SHAPE = "shape"  # it is no stream of chat completion chunks
ENGINE_ERROR = "engine_error"  # the stream carries an error
EMPTY = "empty"  # it ended well and without any text
REPETITION = "repetition"  # one character over and over, as from NaN logits
REASONS = (OK, SHED, NO_WORKER, CONNECT, STATUS, TIMEOUT, BROKEN_STREAM, SHAPE, ENGINE_ERROR, EMPTY, REPETITION)

# Level of a line in the journal, which takes it off; what has no level is information, and its unit does not keep it.
WARNING = "<4>"

# The router's code for it; it comes as 503 with Retry-After, as a rejection does.
_NO_WORKER_CODE = "no_available_workers"
# Below it a short answer can be one letter; above it that is no language.
_REPEATED = 4
_LONGEST_LINE = 1 << 20
_LONGEST_DETAIL = 300


@dataclass(frozen=True)
class Result:
    """How one probe ended. Times in seconds since its start, None where it did not get that far."""

    reason: str
    detail: str = ""
    first_token_seconds: float | None = None
    duration_seconds: float | None = None

    @property
    def success(self) -> bool:
        return self.reason == OK


class ProbeError(Exception):
    """Why a probe did not succeed. ``reason`` is one of ``REASONS``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Question:
    """What is asked, of whom, and for how long (seconds, from the connection to the last byte)."""

    url: str
    model: str
    timeout: float
    prompt: str = "The quick brown fox"
    tokens: int = 8
    api_key: str = ""


class Exchange:
    """One HTTP request whose whole length has a deadline, however slowly its bytes come; a context manager.

    A socket's timeout bounds each read; the timer ends the reads that remain. Raises OSError and HTTPException, and
    ``late`` tells whether the deadline was the cause.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = make(parts.netloc, timeout=timeout)
        self._path = parts.path or "/"
        self._timer = threading.Timer(timeout, self._end)
        self._timer.daemon = True
        self._response: http.client.HTTPResponse | None = None
        self.late = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.cancel()
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def _end(self) -> None:
        self.late = True
        sock = self._connection.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # closed in the meantime

    def send(self, method: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        self._connection.connect()
        if self.late:
            # The timer has found no socket to end; each address of a name may take the whole time to connect.
            raise TimeoutError("no connection before the deadline")
        sock = self._connection.sock
        self._connection.request(method, self._path, body=body, headers=headers)
        self._response = self._connection.getresponse()
        # http.client forgets the socket of a response that ends with its connection; the timer still needs it.
        self._connection.sock = sock
        return self._response


def get(url: str, timeout: float) -> tuple[int, str]:
    """Status and text of a GET. Raises OSError or HTTPException where there is no whole answer within ``timeout``."""
    with Exchange(url, timeout) as exchange:
        response = exchange.send("GET", None, {})
        text = response.read().decode("utf-8", "replace")
        if exchange.late:
            raise TimeoutError(f"no whole answer within {timeout:g} s")
        return response.status, text


def ask(question: Question) -> Result:
    """Puts the question and checks the answer. Raises http.client.InvalidURL for a URL that is none, else nothing."""
    begin = time.monotonic()
    first: float | None = None
    text = ""
    exchange = Exchange(f"{question.url}/v1/chat/completions", question.timeout)
    try:
        with exchange:
            response = exchange.send("POST", _body(question), _headers(question))
            _check_status(response)
            for part in _deltas(response):
                if part and first is None:
                    first = time.monotonic() - begin
                text += part
        _check_text(text)
        reason, detail = OK, ""
    except ProbeError as error:
        reason, detail = error.reason, str(error)
    except (OSError, http.client.HTTPException, ValueError) as error:
        timed_out = isinstance(error, TimeoutError)
        reason = TIMEOUT if timed_out else CONNECT if first is None else BROKEN_STREAM
        detail = f"{type(error).__name__}: {error}"
    if reason != OK and (exchange.late or reason == TIMEOUT):
        # What the cut connection looked like says nothing.
        reason, detail = TIMEOUT, f"no whole answer within {question.timeout:g} s"
    return Result(reason, _printable(detail), first, time.monotonic() - begin)


def _body(question: Question) -> bytes:
    return json.dumps(
        {
            "model": question.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": question.tokens,
            "temperature": 0,
            "stream": True,
        }
    ).encode()


def _headers(question: Question) -> dict[str, str]:
    found = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    return found | ({"Authorization": f"Bearer {question.api_key}"} if question.api_key else {})


def _check_status(response: http.client.HTTPResponse) -> None:
    if response.status == http.HTTPStatus.OK:
        return
    said = response.read(_LONGEST_LINE).decode("utf-8", "replace")
    # 429 says by itself that there was too much; 503 does when it says when to come back.
    later = response.status == http.HTTPStatus.SERVICE_UNAVAILABLE and response.getheader("Retry-After") is not None
    if _error_code(said) == _NO_WORKER_CODE:
        reason = NO_WORKER
    elif later or response.status == http.HTTPStatus.TOO_MANY_REQUESTS:
        reason = SHED
    else:
        reason = STATUS
    raise ProbeError(reason, f"status {response.status}: {said}")


def _error_code(body: str) -> object:
    """The code in an error's JSON body, ``{"error": {"code": ...}}``; None where there is none."""
    try:
        error = json.loads(body)["error"]
        return error.get("code") if isinstance(error, dict) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _deltas(response: http.client.HTTPResponse) -> Iterator[str]:
    """The text of each chunk, answer and reasoning alike, until the stream has ended as it should.

    Raises ProbeError for anything that is no stream of chat completion chunks with a finish and an end.
    """
    finished = False
    for data in _events(response):
        if data == "[DONE]":
            if not finished:
                raise ProbeError(SHAPE, "the stream ended without a finish_reason")
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProbeError(SHAPE, f"an event is no JSON: {data}") from error
        if isinstance(chunk, dict) and chunk.get("error"):
            raise ProbeError(ENGINE_ERROR, json.dumps(chunk["error"]))
        for choice in _choices(chunk):
            delta = choice.get("delta") or {}
            if not isinstance(delta, dict):
                raise ProbeError(SHAPE, f"a delta is no object: {json.dumps(delta)}")
            yield "".join(str(delta.get(key) or "") for key in ("reasoning_content", "content"))
            finished = finished or choice.get("finish_reason") in ("stop", "length")
    raise ProbeError(BROKEN_STREAM, "the stream ended without [DONE]")


def _choices(chunk: Any) -> list[dict[str, Any]]:
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ProbeError(SHAPE, f"an event has no list of choices: {json.dumps(chunk)}")
    return choices


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The ``data:`` lines of an event stream. An engine writes one line for each event."""
    while line := response.readline(_LONGEST_LINE):
        field, colon, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
        if colon and field == "data":
            yield value.strip()


def _check_text(text: str) -> None:
    letters = text.strip()
    if not letters:
        raise ProbeError(EMPTY, f"the text of the whole answer is {text!r}")
    if len(letters) >= _REPEATED and len(set(letters)) == 1:
        raise ProbeError(REPETITION, f"the text of the whole answer is {text!r}")


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_LONGEST_DETAIL]


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the new one, never half of it. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read_last_success(path: Path) -> float | None:
    """When a probe last succeeded (Unix time), from the JSON file of an earlier one; None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["last_success"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def exposition(
    labels: dict[str, str], result: Result, interval: float, last_success: float | None, ended: float
) -> str:
    """The result as Prometheus text; series without a value are left out. ``interval``: seconds between two probes;
    ``ended``: seconds between the machine's boot and the end of this one, from which its age is told whatever the clock
    is set to."""
    families: list[tuple[str, str, dict[str, str], float | None]] = [
        ("success", "1 when the last completion through the router was whole and well-formed.", {}, result.success),
        ("reason", "1 for how the last probe ended.", {"reason": result.reason}, 1),
        ("first_token_seconds", "From the start of the probe to its first token.", {}, result.first_token_seconds),
        ("duration_seconds", "From the start of the probe to its end.", {}, result.duration_seconds),
        ("last_success_timestamp_seconds", "When a probe last succeeded, as Unix time.", {}, last_success),
        ("interval_seconds", "Time between two probes.", {}, interval),
        ("ended_since_boot_seconds", "From the machine's boot to the end of the last probe.", {}, ended),
    ]
    lines = []
    for name, text, more, value in families:
        if value is not None:
            metric = f"llmfleet_probe_{name}"
            pairs = ",".join(
                f"{label}={json.dumps(given, ensure_ascii=False)}" for label, given in sorted((labels | more).items())
            )
            lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge", f"{metric}{{{pairs}}} {float(value)}"]
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lifecycle probe", description=__doc__, allow_abbrev=False)
    parser.add_argument("--router", required=True, help="name of the router, which names the files")
    parser.add_argument("--group", required=True, help="PD group of the router")
    parser.add_argument("--url", required=True, help="of the router, without a path")
    parser.add_argument("--model", required=True, help="name under which the model is served")
    parser.add_argument("--prompt", default=Question.prompt)
    parser.add_argument("--tokens", type=int, default=Question.tokens)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for the whole answer")
    parser.add_argument("--interval", type=float, required=True, help="seconds between two probes, which readers go by")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = _arguments(argv)
    record = options.out / f"{options.router}.json"
    try:
        api_key = next(iter(read_api_keys()), "")
        question = Question(options.url, options.model, options.timeout, options.prompt, options.tokens, api_key)
        result = ask(question)
        now = time.time()
        last_success = now if result.success else read_last_success(record)
        labels = {"instance_name": options.router, "group": options.group}
        told = {**labels, "url": options.url, "at": now, "success": result.success, "last_success": last_success}
        ended = time.clock_gettime(time.CLOCK_BOOTTIME)
        write_atomically(
            options.out / f"{options.router}.prom", exposition(labels, result, options.interval, last_success, ended)
        )
        write_atomically(record, json.dumps(told | asdict(result), sort_keys=True) + "\n")
    except OSError as error:
        print(f"{WARNING}found {error}; expected a readable key and a folder to write to", file=sys.stderr)
        return 1
    seconds = f"{result.duration_seconds:.3f} s" if result.duration_seconds is not None else ""
    print(f"{'' if result.success else WARNING}{options.router}: {result.reason} {seconds} {result.detail}".rstrip())
    return 0
