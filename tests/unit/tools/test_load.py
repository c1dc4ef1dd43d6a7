# SPDX-License-Identifier: Apache-2.0
"""The table of a load, and how a program on a host is run."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tools import demo, load, on_host

RESULT: dict[str, Any] = {
    "capacity": {"clients": 19, "whole_per_s": 6.1},
    "unloaded": {"whole_s": {"p50": 0.3, "p99": 0.4, "longest": 0.4}, "first_token_s": {"p50": 0.1}},
    "load": {
        "seconds": 600.0,
        "requests": 7300,
        "asked_per_s": 12.2,
        "outcomes": {"whole": 3600, "refused": 3700},
        "whole_per_s": 6.0,
        "whole_s": {"p50": 3.1, "p99": 4.0, "longest": 5.0},
        "first_token_s": {"p50": 2.9},
        "refused_s": {},
        "refused_retry_after": {"2": 3700},
    },
    "answers": {"compared": 1800, "unequal": 0},
    "queues": {"router queued": {"bound": 16, "highest": 16.0, "samples": 300}},
    "memory": {"decode": {"first_mib": 100.0, "last_mib": 101.0, "ratio": 1.01}},
}


def test_the_table_has_a_line_for_each_figure() -> None:
    lines = load.table(RESULT).splitlines()
    assert lines[2:] == [
        "| capacity | 6.1 requests/s (19 clients) |",
        "| asked, for 10.0 minutes | 7300 requests, 12.2/s |",
        "| served whole | 3600 (6.0/s) |",
        "| refused | 3700 |",
        "| accepted and lost | 0 |",
        "| Retry-After of the refused | 3700 x 2 |",
        "| seconds to a refusal: median, p99, longest | - |",
        "| seconds to the first token, unloaded | 0.10 |",
        "| seconds to the first token, served | 2.90 |",
        "| seconds to the whole answer, unloaded | 0.30, 0.40, 0.40 |",
        "| seconds to the whole answer, served | 3.10, 4.00, 5.00 |",
        "| answers that are not the unloaded one | 0 of 1800 |",
        "| router queued: highest, bound | 16, 16 |",
        "| memory of decode: first third, last third | 100.0, 101.0 MiB (1.01) |",
    ]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine in the place of the host: a command is one of a shell."""
    monkeypatch.setattr(on_host, "line", lambda _host, command: ["/bin/sh", "-c", command])
    monkeypatch.setattr(on_host, "copy_programs", lambda _host: "")


@pytest.mark.usefixtures("host")
def test_the_program_is_told_to_end_when_what_happens_meanwhile_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    script = "print('load: 3 requests/s', flush=True); import sys; sys.stdin.read(); print('{\"figure\": 1}')"
    monkeypatch.setattr(on_host, "line", lambda _host, _command: [sys.executable, "-c", script])
    assert load.measure("load1", "", lambda: told.append("changed")) == {"figure": 1}
    assert told == ["changed"]


@pytest.mark.usefixtures("host")
def test_a_program_that_fails_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        on_host, "line", lambda _host, _command: [sys.executable, "-c", "print('unloaded: 16 prompts')"]
    )
    with pytest.raises(demo.DemoError, match="load1 has given no result"):
        load.measure("load1", "", lambda: None)
