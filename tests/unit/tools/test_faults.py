# SPDX-License-Identifier: Apache-2.0
"""The table of faults."""

from __future__ import annotations

from tools import faults


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
