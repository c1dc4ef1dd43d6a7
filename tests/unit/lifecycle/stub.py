# SPDX-License-Identifier: Apache-2.0
"""A server of ours, a router or an engine, whose answers a test sets: one function for each route."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHAT = "/v1/chat/completions"

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """One request; ``body`` is what came with it."""

    protocol_version = "HTTP/1.1"
    server: Stub

    def answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.path, dict(self.headers), self.body))
        self.server.routes.get(self.path, status(404))(self)

    do_GET = answer  # noqa: N815
    do_POST = answer  # noqa: N815

    def log_message(self, *_arguments: Any) -> None:
        """Nothing: tests say what they need."""


class Stub(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, Answer] = {}
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.ending = threading.Event()
        """What a hanging answer waits for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, path: str) -> int:
        return sum(1 for asked, _headers, _body in self.requests if asked == path)

    def handle_error(self, *_arguments: Any) -> None:
        """A client that went away is what some tests are about."""


@contextmanager
def serving() -> Iterator[Stub]:
    stub = Stub()
    threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield stub
    stub.ending.set()
    stub.shutdown()
    stub.server_close()


def status(code: int, body: str = "", **headers: str) -> Answer:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body.encode())))
        handler.end_headers()
        handler.wfile.write(body.encode())

    return answer


def hangs(handler: Handler) -> None:
    """Nothing is ever answered."""
    handler.server.ending.wait()
    handler.close_connection = True


def stream(*events: str, hang_after: int | None = None, cut: bool = False) -> Answer:
    """An event stream, chunked. ``hang_after``: events before it goes quiet; ``cut``: it ends in the middle."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for number, event in enumerate(events):
            if number == hang_after:
                handler.server.ending.wait()
            data = f"data: {event}\n\n".encode()
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            handler.wfile.flush()
        if cut:
            handler.close_connection = True
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def chunk(content: str | None = None, finish: str | None = None, **delta: str) -> str:
    """One event of a chat completion."""
    found = {"content": content, **delta} if content is not None else dict(delta)
    choice = {"index": 0, "delta": found, "finish_reason": finish}
    return json.dumps({"id": "1", "object": "chat.completion.chunk", "choices": [choice]})


WHOLE = (chunk(role="assistant", content=""), chunk("jumps"), chunk(" over"), chunk(finish="length"), "[DONE]")
