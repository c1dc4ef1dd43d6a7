# SPDX-License-Identifier: Apache-2.0
"""STAND-IN for a prefill and a decode server, as far as a router sees them: for what only the router decides.

    with Pair(prefill=Limits(running=1, waiting=4), decode=Limits(running=8, waiting=32)) as pair:
        pair.prefill.url, pair.decode.url

Each stage holds ``running`` requests at once, lets ``waiting`` more wait, and answers the next one with the 503 and the
``Retry-After`` that the engine's plugin gives. A request is prefilled for ``Limits.seconds`` before its decode half
starts; the halves of a pair find each other by ``bootstrap_room``. A stage tells its load as ``/v1/loads`` does, unless
``loads`` is replaced, and keeps every body that it got. Where ``keys`` are set, a request has to show one of them, as
with the plugin's ``api_keys``.

Standard library only.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

#: The name that both serve.
MODEL = "deepseek-v4-flash"
FULL = {"object": "error", "message": "The request queue is full.", "param": None, "type": "503", "code": 503}


@dataclass
class Limits:
    """Requests that run at once, requests that may wait, and the seconds that one runs."""

    running: int
    waiting: int
    seconds: float = 0.2


class Stage(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, role: str, limits: Limits, rooms: Rooms, model: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.role, self.limits, self.rooms, self.model = role, limits, rooms, model
        self.turn = threading.Condition()
        self.running = self.waiting = self.most_running = self.most_waiting = 0
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.shown: list[str | None] = []
        self.loads: Callable[[], dict[str, Any]] = self.load
        self.events = 4
        self.polls = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def load(self) -> dict[str, Any]:
        queue = f"{'prefill_bootstrap' if self.role == 'prefill' else 'decode_prealloc'}_queue_reqs"
        return {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_total_reqs": self.running + self.waiting,
            "num_used_tokens": 0,
            "num_total_tokens": 0,
            "max_total_num_tokens": 100_000,
            "max_running_requests": self.limits.running,
            "token_usage": 0.0,
            "gen_throughput": 1.0,
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "disaggregation": {"mode": self.role, queue: self.waiting},
            "queues": {"waiting": self.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
        }

    def enter(self) -> bool:
        """Wait for a place among the running; False at once where no place to wait is left."""
        with self.turn:
            if self.running >= self.limits.running and self.waiting >= self.limits.waiting:
                return False
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting - (self.running < self.limits.running))
            self.turn.wait_for(lambda: self.running < self.limits.running)
            self.waiting -= 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            return True

    def leave(self) -> None:
        with self.turn:
            self.running -= 1
            self.turn.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A router that goes away is no error of the test."""


class Rooms:
    """What became of the prefill half of each pair: True served, False rejected. While ``go_on`` is not set, none of
    them is served."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.told = threading.Condition()
        self.outcome: dict[int, bool] = {}

    def tell(self, room: int, served: bool) -> None:
        with self.told:
            self.outcome[room] = served
            self.told.notify_all()

    def served(self, room: int) -> bool:
        with self.told:
            self.told.wait_for(lambda: room in self.outcome)
            return self.outcome[room]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stage

    def turned_away(self) -> bool:
        """Whether the request lacks a key, and has got its answer."""
        shown = self.headers["authorization"]
        if not self.server.keys or self.path.startswith(("/health", "/ready", "/metrics")):
            return False
        self.server.shown.append(shown)
        if shown in [f"Bearer {key}" for key in self.server.keys]:
            return False
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.answer(401, {"error": "Unauthorized"})
        return True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        stage = self.server
        if self.turned_away():
            return
        if path in ("/health", "/ready", "/health_generate"):
            self.answer(200, {})
        elif path in ("/server_info", "/get_server_info"):
            info = {"model_path": "/none", "served_model_name": stage.model, "disaggregation_mode": stage.role}
            sizes = {"tp_size": 1, "dp_size": 1, "max_running_requests": stage.limits.running, "version": "0.5.23"}
            self.answer(200, info | sizes | {"load_balance_method": "auto"})
        elif path in ("/model_info", "/get_model_info"):
            self.answer(200, {"model_path": "/none", "served_model_name": stage.model, "is_generation": True})
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": stage.model, "object": "model"}]})
        elif path == "/v1/loads":
            stage.polls += 1
            self.answer(
                200,
                {
                    "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
                    "version": "0.5.23",
                    "loads": [stage.loads()],
                },
            )
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        stage = self.server
        if self.turned_away():
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stage.bodies.append(body)
        room = int(body["bootstrap_room"])
        with suppress(BrokenPipeError, ConnectionResetError):
            if stage.role == "prefill":
                served = self.hold(stage.limits.seconds)
                stage.rooms.tell(room, served)
                self.finish_request(served, body)
            elif not stage.enter():
                self.finish_request(False, body)
            else:
                try:
                    served = stage.rooms.served(room)
                    if served and not body.get("stream"):
                        time.sleep(stage.limits.seconds)
                    self.finish_request(served, body)
                finally:
                    stage.leave()

    def hold(self, seconds: float) -> bool:
        """Run for a time; False where there was no place."""
        if not self.server.enter():
            return False
        try:
            time.sleep(seconds)
            self.server.rooms.go_on.wait()
        finally:
            self.server.leave()
        return True

    def finish_request(self, served: bool, body: dict[str, Any]) -> None:
        if not served:
            self.answer(503, FULL, {"Retry-After": "2"})
        elif body.get("stream"):
            self.stream()
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            reply = {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": self.server.model,
                "choices": [choice],
            }
            self.answer(200, reply | {"usage": usage, "text": "yes", "meta_info": {"id": "1"}})

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        delta = {"index": 0, "delta": {"role": "assistant", "content": "yes"}, "finish_reason": None}
        chunk = {
            "id": "1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self.server.model,
            "choices": [delta],
        }
        for event in [json.dumps(chunk)] * self.server.events + ["[DONE]"]:
            data = f"data: {event}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            time.sleep(self.server.limits.seconds / self.server.events)
        self.wfile.write(b"0\r\n\r\n")

    def answer(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet."""


class Pair:
    """Both stages, each on a free port of the loopback, until the block ends. ``prefills``: how many of the first."""

    def __init__(self, prefill: Limits, decode: Limits, model: str = MODEL, prefills: int = 1) -> None:
        rooms = Rooms()
        self.prefills = [Stage("prefill", prefill, rooms, model) for _ in range(prefills)]
        self.prefill, self.decode = self.prefills[0], Stage("decode", decode, rooms, model)
        self.go_on = rooms.go_on

    def __enter__(self) -> Pair:
        for stage in (*self.prefills, self.decode):
            threading.Thread(target=stage.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stage in (*self.prefills, self.decode):
            stage.shutdown()
            stage.server_close()
