# SPDX-License-Identifier: Apache-2.0
"""What the plugin's feature ``api_keys`` makes of the HTTP server of an installed engine, without a model.

    <release>/venv/bin/python check_api_keys.py

Installs the feature as SGLang would, asks the engine's own application with and without a key, and lets the engine's
own warm-up code ask a stand-in that keeps what it was shown. Prints a line for each fact, and exits with 1 unless all
of them hold.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

OLD, NEW, WRONG = "old-key-of-the-clients", "new-key-of-the-clients", "a-key-that-nobody-has"


class Peer(BaseHTTPRequestHandler):
    """Answers the warm-up, and keeps who asked with which key."""

    shown: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.shown.append((self.path, self.headers["authorization"]))
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet."""


def status(app: Any, method: str, path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
    """What the application answers first; -1 where it came to the engine's own code, which has no model here."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": kind, "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": list(headers),
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    try:
        asyncio.run(app(scope, receive, send))
    except Exception:
        return -1
    return sent[0].get("status", sent[0]["type"])


def bearer(key: str, scheme: str = "Bearer") -> tuple[bytes, bytes]:
    return b"authorization", f"{scheme} {key}".encode()


def main() -> int:
    broken = 0

    def hold(what: str, found: Any, expected: Any) -> None:
        nonlocal broken
        good = found == expected
        broken += not good
        print(f"{'ok    ' if good else 'BROKEN'} {what}: {found}{'' if good else f', expected {expected}'}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "api-keys").write_text(f"{NEW}\n{OLD}\n")
        os.environ |= {"CREDENTIALS_DIRECTORY": folder, "LLMFLEET_API_KEYS": "on", "LLMFLEET_QUEUE_BOUND": "on"}
        from llmfleet_plugin._install import install_wanted

        hold("active", install_wanted(os.environ)["api_keys"], {"value": "on", "keys": 2})

    import requests
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.entrypoints import http_server

    app = http_server.app
    hold("the HTTP server takes the application for ASGI 3", inspect.iscoroutinefunction(app.__call__), True)
    for path in ("/server_info", "/get_server_info", "/v1/models", "/v1/loads", "/"):
        hold(f"GET {path} without a key", status(app, "GET", path), 401)
    for path in ("/v1/chat/completions", "/generate", "/flush_cache"):
        hold(f"POST {path} without a key", status(app, "POST", path), 401)
    hold("POST /generate with a wrong key", status(app, "POST", "/generate", bearer(WRONG)), 401)
    hold("POST /generate with a part of a key", status(app, "POST", "/generate", bearer(NEW[:-1])), 401)
    hold("POST /generate with a key as Basic", status(app, "POST", "/generate", bearer(NEW, "Basic")), 401)
    no_text = (b"authorization", b"Bearer \xff")
    hold("POST /generate with bytes that are no text", status(app, "POST", "/generate", no_text), 401)
    hold("a WebSocket without a key", status(app, "GET", "/v1/realtime", kind="websocket"), "websocket.close")
    for name, key in (("new", NEW), ("old", OLD)):
        found = status(app, "POST", "/generate", bearer(key))
        hold(f"POST /generate with the {name} key comes to the engine", found not in (401, 403, 404), True)
    ready = [path for path in ("/health", "/ready", "/metrics") if version("sglang") != "0.5.16" or path != "/ready"]
    for path in ready:
        hold(f"GET {path} without a key is no 401", status(app, "GET", path) != 401, True)

    # What a start of 0.5.23 publishes, as far as the warm-up asks for it.
    settings = MagicMock(num_dp_ranks=1, skip_server_warmup=False, checkpoint_engine_wait_weights_before_ready=False)
    settings.moe.is_ep_scale_joiner = False
    for name in ("get_exec", "get_model", "get_parallel", "get_serving"):
        setattr(http_server, name, lambda: settings)

    peer = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    threading.Thread(target=peer.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{peer.server_address[1]}"
    ours, stock = [("/x", f"Bearer {NEW}")], [("/x", None)]

    def asks(where: str) -> bool:
        requests.get(f"{where}/x", timeout=5)
        return False

    def shown() -> list[tuple[str, str | None]]:
        told, Peer.shown = Peer.shown, []
        return told

    def warm_up(own: str) -> list[tuple[str, str | None]]:
        server_args = MagicMock(checkpoint_engine_wait_weights_before_ready=False, skip_server_warmup=False)
        server_args.url.return_value = own
        http_server._wait_and_warmup(server_args, execute_warmup_func=lambda _args: asks(url))
        return shown()

    hold("what the warm-up shows its own server", warm_up(url), ours)
    hold("what it shows another one", warm_up("http://127.0.0.1:1"), stock)
    asks(url)
    hold("what anybody else shows", shown(), stock)
    arguments: dict[str, Any] = {"server_args": SimpleNamespace(dp_size=1)} if version("sglang") == "0.5.16" else {}
    arguments |= {"url": url, "headers": {}, "ssl_verify": True, "timeout": 5}
    asyncio.run(http_server._send_disaggregation_warmup_requests(**arguments))
    hold("what the warm-up of a pair shows", shown(), [("/generate", f"Bearer {NEW}")])
    manager = SimpleNamespace(_prefill_recompute_sessions=threading.local())
    CommonKVManager._get_prefill_recompute_session(manager).post(f"{url}/generate", timeout=5)
    hold("what a decode shows its prefill", shown(), [("/generate", f"Bearer {NEW}")])
    peer.shutdown()
    print(f"{broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
