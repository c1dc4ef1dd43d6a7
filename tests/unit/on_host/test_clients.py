# SPDX-License-Identifier: Apache-2.0
"""What a client's request counts as."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import clients
import pytest

EVENT = b'data: {"choices":[{"delta":{"content":" a"},"finish_reason":%s}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
WHOLE = ROLE + EVENT % b"null" + EVENT % b'"length"' + b"data: [DONE]\n\n"
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
        if status == 429:
            self.send_header("retry-after", "2")
        self.send_header("content-length", str(len(body) + (0 if whole else 10)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet."""


@pytest.fixture
def router() -> Iterator[http.server.HTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("asked", "outcome", "status", "retry_after", "text"),
    [
        ("whole", "whole", 200, None, " a a"),
        ("full", "refused", 429, "2", ""),
        ("away", "refused", 503, None, ""),
        ("bad gateway", "failed", 502, None, ""),
        ("cut", "broken", 200, None, ""),
        ("ended early", "broken", 200, None, ""),
        ("error event", "broken", 200, None, ""),
    ],
)
def test_only_an_answer_that_came_whole_counts_as_one(
    router: http.server.HTTPServer, asked: str, outcome: str, status: int, retry_after: str | None, text: str
) -> None:
    answer = clients.ask(router.server_port, asked, tokens=2, timeout=10)
    assert (answer.outcome, answer.status, answer.retry_after, answer.text) == (outcome, status, retry_after, text)


def test_the_first_token_is_not_the_first_event(router: http.server.HTTPServer) -> None:
    answer = clients.ask(router.server_port, "whole", timeout=10)
    assert answer.first is not None
    assert answer.began <= answer.first <= answer.ended
    assert clients.content(ROLE.decode()) == ""


def test_a_router_that_is_away_has_refused(router: http.server.HTTPServer) -> None:
    port = router.server_port
    router.shutdown()
    router.server_close()
    assert (clients.ask(port, "whole", timeout=10).outcome, clients.ask(port, "whole").status) == ("refused", 0)


def test_clients_ask_until_they_are_told(router: http.server.HTTPServer) -> None:
    with clients.clients(2, lambda: clients.ask(router.server_port, "whole", timeout=10)) as asking:
        asking.wait_whole(5, 0, within=10)
    assert len(asking.answers) >= 5
    assert {answer.outcome for answer in asking.answers} == {"whole"}
    assert not any(thread.is_alive() for thread in asking.threads)
