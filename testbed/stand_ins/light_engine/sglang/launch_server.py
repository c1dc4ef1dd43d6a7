# SPDX-License-Identifier: Apache-2.0
"""STAND-IN for ``python -m sglang.launch_server`` on hosts that cannot run the engine.

It takes the engine's command line, opens the ports that line names, and writes to 64 MiB of memory, so that units,
binding and the placement of pages can be proven. It serves no model: every path but the readiness route is a 404. Like
the engine it exits with an error when a port is taken, and ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import http.server
import signal
import sys
import threading

MEMORY = 64 << 20
PAGE = 4096


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 200 if self.path in ("/ready", "/health") else 404
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet: the journal is for what goes wrong."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--disaggregation-bootstrap-port", type=int)
    options, _others = parser.parse_known_args()
    memory = bytearray(MEMORY)
    memory[::PAGE] = b"x" * (MEMORY // PAGE)  # a page is placed on a node when it is first written
    ports = [options.port, *filter(None, [options.disaggregation_bootstrap_port])]
    servers = [http.server.ThreadingHTTPServer((options.host, port), Handler) for port in ports]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
