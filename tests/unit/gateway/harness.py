# SPDX-License-Identifier: Apache-2.0
"""A real HAProxy with the role's configuration, before stand-ins for routers that do what a test tells them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jinja2
import yaml
from ansible.plugins.filter.core import FilterModule
from ansible_collections.llmfleet.sglang.plugins.module_utils import _haproxy

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles" / "gateway"
PROGRAM = os.environ.get("LLMFLEET_HAPROXY") or shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
KEEP = ROOT / "files" / "gateway" / "keep_servers.py"
#: As the role makes it.
EMPTY_STATE = "1\n"
WITHIN_S = 20

Json = dict[str, Any]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, f"after {WITHIN_S} s: not {what}"
        time.sleep(0.02)


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])


def rendered(**changes: Any) -> str:
    """The role's configuration; Jinja set up as Ansible does it, with those filters that Jinja has not."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROLE / "templates"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters = FilterModule().filters() | environment.filters
    constants = yaml.safe_load((ROLE / "vars" / "main.yml").read_text())
    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    values = defaults | {
        "ansible_managed": "managed",
        "_gateway_backend": constants["_gateway_backend"],
        "_gateway_errors": constants["_gateway_errors"],
        "_gateway_state_file": constants["_gateway_state_file"],
        "_gateway_digest": "0123456789abcdef",
        "_gateway_listen": "127.0.0.1:8000",
        "_gateway_metrics_listen": "127.0.0.1:8405",
        "__gateway_plan": plan(),
    }
    return environment.get_template("haproxy.cfg.j2").render(values | changes)


def plan(
    *servers: tuple[str, str], answer: int = 60, full: int = 3, none: int = 10, ready: list[int] | None = None
) -> Json:
    """What the gateway is told of routers, each a name and an address."""
    found = servers or (("a:gpu1:router", "127.0.0.1:30001"), ("b:gpu2:router", "[2001:db8::2]:30001"))
    return {
        "models": ["tiny"],
        "servers": [
            {"name": name, "group": name[0], "host": "gpu", "address": address, "takes": 33, "weight": 256}
            for name, address in found
        ],
        "seconds": {"answer": answer, "full": full, "none": none},
        "ready": ready or [200],
    }


class Router(ThreadingHTTPServer):
    """A router that answers as its ``answer`` says: "stream", one token for each ``tokens.release()``; or a status."""

    daemon_threads = True

    def __init__(self, name: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.name = name
        self.ready = True
        self.unready = 503
        self.answer: Any = "whole"
        self.headers: dict[str, str] = {}
        self.asked: list[str] = []
        self.gone = threading.Event()
        self.tokens = threading.Semaphore(0)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer goes out in one piece: a health check closes the connection as soon as it has read the status.
    wbufsize = -1
    server: Router

    def log_request(self, *_arguments: Any) -> None:
        pass

    def _send(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self._send(200 if self.server.ready and self.path == "/readiness" else self.server.unready, "")

    def do_POST(self) -> None:
        router = self.server
        self.rfile.read(int(self.headers["content-length"]))
        router.asked.append(self.path)
        if isinstance(router.answer, int):
            self._send(router.answer, f"said by {router.name}", router.headers)
        elif router.answer == "silence":
            # Until the client is gone.
            router.gone.clear()
            with suppress(ConnectionError):
                while self.connection.recv(1):
                    pass
            router.gone.set()
            self.close_connection = True
        elif router.answer == "stream":
            self._stream(router)
        else:
            self._send(200, f"said by {router.name}")

    def _stream(self, router: Router) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for number in range(3):
            router.tokens.acquire()
            event = f"data: {router.name} {number}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


class Gateway:
    """HAProxy with the role's configuration in ``folder``."""

    def __init__(self, folder: Path, *routers: Router, ready: list[int] | None = None, **changes: Any) -> None:
        self.folder, self.ready, self.changes = folder, ready, changes
        self.port, self.metrics_port = free_port(), free_port()
        self.socket, self.state_file = str(folder / "master.sock"), folder / "servers"
        self.ask = _haproxy.asker(self.socket)
        self.process: subprocess.Popen[bytes] | None = None
        self.told: tuple[Router, ...] = routers
        self.state_file.write_text(EMPTY_STATE)

    def write(self, digest: str, *routers: Router) -> None:
        servers = [(router.name, router.address) for router in routers]
        (self.folder / "haproxy.cfg").write_text(
            rendered(
                _gateway_digest=digest,
                _gateway_state_file=str(self.state_file),
                _gateway_listen=f"127.0.0.1:{self.port}",
                _gateway_metrics_listen=f"127.0.0.1:{self.metrics_port}",
                __gateway_plan=plan(*servers, ready=self.ready),
                **self.changes,
            )
        )

    def start(self, digest: str = "first") -> None:
        assert PROGRAM, "haproxy not found; tools/setup installs it"
        self.write(digest, *self.told)
        self.process = subprocess.Popen(
            [PROGRAM, "-W", "-f", str(self.folder / "haproxy.cfg"), "-S", self.socket],
            stdout=(self.folder / "log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        self.wait_loaded(digest)

    def wait_loaded(self, digest: str) -> None:
        def loaded() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()
            try:
                return _haproxy.digest(self.ask) == digest
            except _haproxy.RuntimeApiError:
                return False

        wait_until(loaded, f"loaded {digest}")

    def reload(self, digest: str, *routers: Router) -> None:
        assert self.process is not None
        self.write(digest, *routers)
        self.keep()
        self.process.send_signal(signal.SIGUSR2)
        self.wait_loaded(digest)

    def keep(self) -> None:
        """As the unit does it, before a reload."""
        argv = ["/usr/bin/python3", "-I", "-B", str(KEEP), str(self.state_file), str(self.folder / "haproxy.cfg")]
        subprocess.run([*argv, self.socket], check=True)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(WITHIN_S)
            self.process = None

    def servers(self) -> dict[str, dict[str, Any]]:
        return _haproxy.servers(self.ask)

    def wait_up(self, **up: bool) -> None:
        wait_until(lambda: {name: self.servers()[name]["up"] for name in up} == up, f"{up}, is {self.servers()}")

    @contextmanager
    def request(self, path: str = "/v1/chat/completions", method: str = "POST") -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        try:
            connection.request(method, path, json.dumps({"messages": []}) if method == "POST" else None)
            yield connection.getresponse()
        finally:
            connection.close()
