# SPDX-License-Identifier: Apache-2.0
"""STAND-IN for ``python -m sglang.launch_server`` where servers are started again and again: it is ready in a second.

It takes the engine's command line and speaks the engine's protocol as far as a router, a rollout and a client see it:
readiness, /server_info, /model_info, /v1/loads, /metrics with the queue gauges, /generate and /v1/chat/completions,
both also streamed, and the bootstrap server of a prefill. A decode answers a request only when the prefill that the
router has chosen knows its room, and refuses one of another revision, as the engine refuses another layout of the KV
cache. On SIGTERM it is not ready any more, finishes what it has and ends, without a limit of its own.

With the feature ``api_keys`` on, the plugin of the release decides who may come in, as it does in the engine; it is
reported for every rank.

What it is not: a model. An answer is words drawn from a hash of the prompt, so that the same prompt gives the same
answer.

Faults are told by environment: PD_WORKER_FAULT=never_ready (the server is up and never ready), rubbish (every answer is
"!!!!"), random (the same prompt, another answer), exit (it ends with status 0 while it loads), crash (it kills itself
as the engine does when a rank dies). PD_WORKER_TOKEN_SECONDS is the time that a token takes.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import http.server
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.parse
from typing import Any, ClassVar

WORDS = ("stone", "river", "lamp", "cloud", "seven", "bread", "north", "paper", "glass", "early", "window", "salt")
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_grammar_queue_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
)
FAULT = os.environ.get("PD_WORKER_FAULT", "")
TOKEN_SECONDS = float(os.environ.get("PD_WORKER_TOKEN_SECONDS", "0.01"))
REVISION = os.environ.get("LLMFLEET_REVISION", "")
API_KEYS = os.environ.get("LLMFLEET_API_KEYS", "off") == "on"
#: What the engine lets in without a key (``sglang.srt.utils.auth``).
EXEMPT = ("/health", "/metrics", "/ready")
# As long as the engine's decode waits for its prefill, within reason for a test.
TRANSFER_SECONDS = 30


def log(message: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def answer(prompt: str, tokens: int) -> list[str]:
    """``tokens`` words for a prompt; the first of them also without more."""
    if FAULT == "rubbish":
        return ["!"] * tokens
    salt = os.urandom(8) if FAULT == "random" else b""
    drawn = [hashlib.sha256(prompt.encode() + salt + b"%d" % number).digest()[0] for number in range(tokens)]
    return [WORDS[number % len(WORDS)] + " " for number in drawn]


class Server:
    """What the handlers share: options, gauges, and the rooms in which a prefill waits for its decode."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready = False
        self.draining = False
        self.gauges = dict.fromkeys(GAUGES, 0)
        self.tokens = 0
        self.rooms: set[int] = set()
        self.changed = threading.Condition()

    def count(self, gauge: str, by: int) -> None:
        with self.changed:
            self.gauges[gauge] += by
            self.changed.notify_all()

    def requests(self) -> int:
        return sum(self.gauges.values())

    def prefill(self, room: int) -> None:
        """Compute, then hold the cache until decode has taken it."""
        with self.changed:
            self.rooms.add(room)
            self.gauges["num_prefill_inflight_queue_reqs"] += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: room not in self.rooms, TRANSFER_SECONDS)
            self.rooms.discard(room)
            self.gauges["num_prefill_inflight_queue_reqs"] -= 1

    def hand_over(self, room: int, revision: str) -> str:
        """What a decode is told that asks for a room: nothing when it has the cache, else why not."""
        if revision != REVISION:
            return f"this prefill runs revision {REVISION}, the decode {revision}"
        with self.changed:
            if not self.changed.wait_for(lambda: room in self.rooms, TRANSFER_SECONDS):
                return f"room {room} is not known"
            self.rooms.discard(room)
            self.changed.notify_all()
        return ""

    def fetch(self, body: dict[str, Any]) -> str:
        """A decode takes the cache from the prefill that the router has chosen; why it could not, else nothing."""
        # The router takes the host from its worker's URL, where IPv6 stands in brackets; the engine strips them too.
        host = body["bootstrap_host"].strip("[]")
        connection = http.client.HTTPConnection(host, body["bootstrap_port"], timeout=TRANSFER_SECONDS)
        self.count("num_decode_transfer_queue_reqs", 1)
        try:
            connection.request("GET", f"/room/{body['bootstrap_room']}?revision={REVISION}")
            response = connection.getresponse()
            text = response.read().decode()
            return "" if response.status == 200 else text
        except OSError as error:
            return f"the prefill cannot be reached: {error}"
        finally:
            self.count("num_decode_transfer_queue_reqs", -1)
            connection.close()


class Listener(http.server.ThreadingHTTPServer):
    """Listens as the engine does: an IPv6 address, the wildcard too, takes no IPv4 connections."""

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        super().server_bind()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: ClassVar[Server]
    # The plugin's door; nothing where everybody is let in.
    door: ClassVar[Any] = None

    def turned_away(self) -> bool:
        """Whether the request shows no key that the server knows; it is answered then."""
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        scope = {"type": "http", "method": self.command, "path": self.path, "headers": headers}
        if self.door is None or self.door.opens(scope):
            return False
        self.send(401, {"error": "Unauthorized"})
        return True

    def send(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = (json.dumps(body) if kind == "application/json" else str(body)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.turned_away():
            return
        state, path = self.server_state, urllib.parse.urlsplit(self.path).path
        up = state.ready and not state.draining
        if path in ("/ready", "/health", "/health_generate"):
            self.send(200 if up else 503, "", "text/plain")
        elif path in ("/server_info", "/get_server_info"):
            self.send(200, vars(state.options) | {"version": "0.5.23", "internal_states": [{}]})
        elif path in ("/model_info", "/get_model_info"):
            self.send(200, {"model_path": state.options.model_path, "is_generation": True})
        elif path == "/v1/models":
            self.send(200, {"object": "list", "data": [{"id": state.options.served_model_name, "object": "model"}]})
        elif path == "/v1/loads":
            running, waiting = state.gauges["num_running_reqs"], state.gauges["num_queue_reqs"]
            load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": 0.0}
            self.send(200, {"version": "0.5.23", "loads": [load]})
        elif path == "/metrics":
            labels = f'{{engine_type="{state.options.disaggregation_mode}",tp_rank="0"}}'
            lines = [f"sglang:{name}{labels} {float(value)}\n" for name, value in state.gauges.items()]
            lines.append(f"sglang:generation_tokens_total{labels} {float(state.tokens)}\n")
            self.send(200, "".join(lines), "text/plain; version=0.0.4")
        else:
            self.send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.turned_away():
            return
        if self.path not in ("/generate", "/v1/chat/completions"):
            self.send(404, {"detail": "Not Found"})
            return
        chat = self.path != "/generate"
        sampling = body if chat else body.get("sampling_params", {})
        tokens = int(sampling.get("max_tokens") or sampling.get("max_new_tokens") or 16)
        prompt = json.dumps(body.get("messages")) if chat else str(body.get("text"))
        state = self.server_state
        state.count("num_running_reqs", 1)
        try:
            if state.options.disaggregation_mode == "prefill":
                state.prefill(body["bootstrap_room"])
                self.send(200, {"object": "chat.completion", "choices": []} if chat else {"text": ""})
                return
            if state.options.disaggregation_mode == "decode" and (problem := state.fetch(body)):
                log(f"KV transfer failed: {problem}")
                self.send(500, {"error": {"message": f"KV transfer failed: {problem}", "code": 500}})
                return
            self.generate(body, answer(prompt, tokens), len(prompt.split()), chat)
        finally:
            state.count("num_running_reqs", -1)

    def generate(self, body: dict[str, Any], words: list[str], prompt_tokens: int, chat: bool) -> None:
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(words),
            "total_tokens": prompt_tokens + len(words),
        }
        base = {"id": "chatcmpl-1", "created": int(time.time()), "model": self.server_state.options.served_model_name}
        if not body.get("stream"):
            for _word in words:
                self.spend()
            text = "".join(words).strip()
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
            whole = {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
            self.send(200, whole if chat else {"text": text, "meta_info": usage})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        so_far = ""
        for number, word in enumerate(words):
            self.spend()
            so_far += word
            finish = "length" if number == len(words) - 1 else None
            delta = {"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": finish}
            event = {**base, "object": "chat.completion.chunk", "choices": [delta]}
            self.event(json.dumps(event if chat else {"text": so_far.strip(), "meta_info": usage}))
        if chat and (body.get("stream_options") or {}).get("include_usage"):
            self.event(json.dumps({**base, "object": "chat.completion.chunk", "choices": [], "usage": usage}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def spend(self) -> None:
        time.sleep(TOKEN_SECONDS)
        self.server_state.tokens += 1

    def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet: the journal is for the start and for what goes wrong."""


class Bootstrap(http.server.BaseHTTPRequestHandler):
    """A prefill's bootstrap server: decodes come here for what belongs to a room."""

    server_state: ClassVar[Server]

    def do_GET(self) -> None:
        asked = urllib.parse.urlsplit(self.path)
        problem = ""
        if asked.path.startswith("/room/"):
            revision = urllib.parse.parse_qs(asked.query, keep_blank_values=True)["revision"][0]
            problem = self.server_state.hand_over(int(asked.path.removeprefix("/room/")), revision)
        data = problem.encode()
        self.send_response(409 if problem else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet, as the other one."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", "--model", default="")
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disaggregation-bootstrap-port", type=int)
    options, _others = parser.parse_known_args()
    return options


def open_door(ranks: int) -> Any:
    """The plugin's door with the keys of the unit's credential; every process of the engine reports the feature."""
    from llmfleet_plugin import _report, api_keys

    keys = api_keys.read_keys(os.environ)
    for process in ("main", *(_report.rank_name(rank, 0, 0) for rank in range(ranks))):
        _report.write(process, "0.5.23", {"api_keys": {"value": "on", "keys": len(keys)}}, os.environ)
    return api_keys.Door(keys, lambda _method, path: path.startswith(EXEMPT))


def main() -> None:
    options = parse_options()
    log(f"server_args={options}")
    state = Server(options)
    Handler.server_state = Bootstrap.server_state = state
    if API_KEYS:
        Handler.door = open_door(options.tp_size)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: setattr(state, "draining", True))
    if FAULT == "exit":
        log("Nothing to do.")
        sys.exit(0)
    if FAULT == "crash":
        log("Received sigquit from a child process. It usually means the child failed.")
        os.kill(os.getpid(), signal.SIGKILL)
    servers = [Listener(options.host, options.port, Handler)]
    if options.disaggregation_bootstrap_port:
        servers.append(Listener(options.host, options.disaggregation_bootstrap_port, Bootstrap))
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    state.ready = FAULT != "never_ready"
    if state.ready:
        log("The server is fired up and ready to roll!")
    while not state.draining:
        time.sleep(0.1)
    log(f"Gracefully exiting... Remaining number of requests: {state.requests()}")
    with state.changed:
        state.changed.wait_for(lambda: state.requests() == 0)


if __name__ == "__main__":
    main()
