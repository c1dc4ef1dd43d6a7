# SPDX-License-Identifier: Apache-2.0
"""What a client's request counts as when faults are injected, and the table of them."""

from __future__ import annotations

import http.server
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator

import pytest

from tools import ROOT, faults

EVENT = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":%s}]}\n\n'
WHOLE = EVENT % b"null" + EVENT % b'"length"' + b"data: [DONE]\n\n"
ANSWERS: dict[str, tuple[int, bytes, bool]] = {
    "whole": (200, WHOLE, True),
    "full": (429, b"{}", True),
    "away": (503, b"{}", True),
    "bad gateway": (502, b"{}", True),
    "cut": (200, WHOLE[:40], False),
    "ended early": (200, EVENT % b"null" + b"data: [DONE]\n\n", True),
    "error event": (200, EVENT % b"null" + b'data: {"error":{"message":"EOF"}}\n\ndata: [DONE]\n\n', True),
}


class Router(http.server.BaseHTTPRequestHandler):
    """Answers with what the prompt names."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"])).decode()
        status, body, whole = next(answer for name, answer in ANSWERS.items() if f'"{name}"' in asked)
        self.send_response(status)
        self.send_header("content-length", str(len(body) + (0 if whole else 10)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet."""


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("inject", ROOT / "tests" / "faults" / "inject.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "inject", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def router(inject: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(inject, "ROUTER", server.server_port)
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("whole", "whole"),
        ("full", "refused"),
        ("away", "refused"),
        ("bad gateway", "failed"),
        ("cut", "broken"),
        ("ended early", "broken"),
        ("error event", "broken"),
    ],
)
@pytest.mark.usefixtures("router")
def test_only_an_answer_that_came_whole_counts_as_one(inject: types.ModuleType, answer: str, outcome: str) -> None:
    assert inject.ask(answer, tokens=2, timeout=10).outcome == outcome


def test_a_router_that_is_away_has_refused(
    inject: types.ModuleType, router: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = router.server_port
    router.shutdown()
    router.server_close()
    monkeypatch.setattr(inject, "ROUTER", port)
    assert inject.ask("whole", timeout=10).outcome == "refused"


def test_the_table_has_a_line_for_each_fault() -> None:
    row = {
        "about": "kill -9 of decode",
        "outcomes": {"whole": 24, "broken": 4},
        "unserved_s": 62.7,
        "healthy_s": 63.2,
        "more": {"main process replaced": ["decode"]},
    }
    quiet = {"about": "burst", "outcomes": {"refused": 3}, "unserved_s": 0.0, "healthy_s": 0.0, "more": {}}
    assert faults.table([row, quiet]).splitlines()[2:] == [
        "| kill -9 of decode | 24 | 0 | 0 | 4 | 62.7 s | 63.2 s | decode |",
        "| burst | 0 | 3 | 0 | 0 | - | - | - |",
    ]
