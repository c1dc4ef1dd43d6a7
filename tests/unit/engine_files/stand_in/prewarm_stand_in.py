# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the engine's server: answers like it, and "compiles" a file for each number of tokens that is new.

STAND_IN_CACHE is where files go, STAND_IN_PIDS where each process writes its id. STAND_IN is what it does wrong: it
``dies`` before it is ready, is ``silent`` for ever, ``aborts`` or ``refuses`` each request, ``stays`` on SIGTERM.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

WRONG = os.environ.get("STAND_IN", "")
CACHE = Path(os.environ["STAND_IN_CACHE"])
PIDS = Path(os.environ["STAND_IN_PIDS"])
FACTS = {
    "chunked_prefill_size": 64,
    "context_length": 1024,
    "max_running_requests": 4,
    "max_total_num_tokens": 4096,
    "enable_hierarchical_cache": "--enable-hierarchical-cache" in sys.argv,
}


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(503 if WRONG == "silent" else 200, FACTS if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        prompts = json.loads(self.rfile.read(int(self.headers["content-length"])))["input_ids"]
        prompts = prompts if isinstance(prompts[0], list) else [prompts]
        if WRONG == "refuses":
            self.answer(500, {"message": "no kernel image is available"})
            return
        CACHE.joinpath("triton", str(sum(map(len, prompts)))).touch()
        reason = {"type": "abort", "message": "too long"} if WRONG == "aborts" else {"type": "length"}
        answers = [{"meta_info": {"finish_reason": reason}} for _ in prompts]
        self.answer(200, answers if len(answers) > 1 else answers[0])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet: the log is for the start."""


def main() -> None:
    # As the engine's ranks do, a child outlives its parent unless somebody ends it.
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    PIDS.write_text(f"{os.getpid()} {child.pid}")
    CACHE.joinpath("triton").mkdir(exist_ok=True)
    CACHE.joinpath("triton", "at the start").touch()
    print("the stand-in starts", flush=True)
    if WRONG == "dies":
        sys.exit("no CUDA device")
    if WRONG == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
