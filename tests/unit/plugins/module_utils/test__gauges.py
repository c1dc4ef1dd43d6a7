# SPDX-License-Identifier: Apache-2.0
"""Waiting for the last request: gauges as the engine exports them, deadlines, and servers that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._gauges import QUEUES, requests, wait_idle

TEXT = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="decode",tp_rank="0"} 2.0
sglang:num_running_reqs{engine_type="decode",tp_rank="1"} 3.0
sglang:num_queue_reqs{engine_type="decode",tp_rank="0"} 0.0
sglang:num_decode_transfer_queue_reqs{engine_type="decode",tp_rank="0"} 1.0
sglang:num_used_tokens{tp_rank="0"} 4711.0
sglang:num_running_reqs_total{tp_rank="0"} 9.0
"""


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_only_queues_that_hold_requests_are_told_and_ranks_count_once() -> None:
    assert requests(TEXT) == {"num_running_reqs": 3, "num_decode_transfer_queue_reqs": 1}


def test_it_ends_when_nothing_is_left() -> None:
    clock = Clock()
    left, seconds = wait_idle(lambda _url: TEXT if clock.now < 4 else "", ["u"], lambda: clock.now, clock.sleep, 60)
    assert (left, seconds) == ({}, 4)


def test_what_is_left_at_the_deadline_is_told() -> None:
    clock = Clock()
    left, seconds = wait_idle(
        lambda url: TEXT if url == "busy" else "", ["busy", "idle"], lambda: clock.now, clock.sleep, 5
    )
    assert (left, seconds) == ({"busy": {"num_running_reqs": 3, "num_decode_transfer_queue_reqs": 1}}, 5)


def test_a_server_that_is_gone_is_not_waited_for() -> None:
    def read(_url: str) -> str:
        raise OSError("refused")

    assert wait_idle(read, ["u"], lambda: 0.0, pytest.fail, 60) == ({"u": "refused"}, 0.0)


def test_nothing_to_ask_is_idle() -> None:
    assert wait_idle(lambda _url: TEXT, [], lambda: 0.0, pytest.fail, 60) == ({}, 0.0)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_the_names_are_those_of_the_engines_metrics(version: str) -> None:
    text = Path(__file__).parents[3].joinpath("fixtures", "engine", f"metrics_{version}.txt").read_text()
    exported = {word for line in text.splitlines() for word in line.replace("{", " ").split()[:2]}
    assert [name for name in QUEUES if f"sglang:{name}" not in exported] == []
