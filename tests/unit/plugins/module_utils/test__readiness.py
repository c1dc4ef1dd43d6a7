# SPDX-License-Identifier: Apache-2.0
"""Waiting ends when the service is ready, when it cannot become so, or when the time is up."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._readiness import Outcome, wait


class Script:
    """A clock, a probe and a unit that follow a script: one entry for each look."""

    def __init__(self, answers: list[str], states: list[dict[str, Any]]) -> None:
        self.answers, self.states, self.now, self.looks = answers, states, 0.0, 0

    def probe(self) -> str:
        answer = self.answers[min(self.looks, len(self.answers) - 1)]
        self.looks += 1
        return answer

    def state(self) -> dict[str, Any]:
        entry = self.states[min(self.looks, len(self.states) - 1)]
        return {"active_state": "active", "restarts": 0, "result": "success", "job": False} | entry

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, timeout: float = 100) -> Outcome:
        return wait(self.probe, self.state, lambda: self.now, self.sleep, timeout, 2)


def test_it_waits_until_the_probe_is_content() -> None:
    assert Script(["refused", "503", ""], [{}]).run() == Outcome("", 4.0, "")


def test_the_time_is_bounded() -> None:
    outcome = Script(["503"], [{}]).run(timeout=10)
    assert (outcome.reason, outcome.seconds, outcome.answer) == (
        "not ready after 10 s, the unit is active",
        10.0,
        "503",
    )


@pytest.mark.parametrize(
    ("states", "reason", "looks"),
    [
        ([{}, {}, {"active_state": "failed", "result": "signal"}], "the unit is failed (result: signal)", 2),
        ([{}, {"active_state": "inactive"}], "the unit is inactive (result: success)", 1),
        ([{"restarts": 3}, {"restarts": 4}, {"restarts": 5}], "the unit has died 2 times while it was waited for", 2),
    ],
)
def test_a_unit_that_cannot_become_ready_ends_the_wait(states: list[dict[str, Any]], reason: str, looks: int) -> None:
    script = Script(["refused"], states)
    assert script.run().reason == reason
    assert script.looks == looks


def test_an_answer_of_a_dead_unit_is_an_orphans_answer() -> None:
    assert Script([""], [{}, {"active_state": "failed"}]).run().reason.startswith("the unit is failed")


def test_an_answer_counts_only_of_an_active_unit() -> None:
    script = Script([""], [{}, {"active_state": "activating"}, {"active_state": "activating"}, {}])
    assert script.run() == Outcome("", 4.0, "")


def test_an_answer_before_a_restart_is_not_the_new_processs() -> None:
    """A restart that was only queued: the old process still answers, then it stops, then the new one starts."""
    states = [{"job": True}, {"job": True}, {"active_state": "deactivating", "job": True}]
    states += [{"active_state": "inactive", "job": True}, {"active_state": "activating", "job": True}, {}]
    assert Script([""], states).run() == Outcome("", 8.0, "")


def test_one_restart_is_forgiven() -> None:
    assert Script(["refused", "refused", ""], [{}, {"restarts": 1}]).run().reason == ""
