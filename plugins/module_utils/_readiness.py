# SPDX-License-Identifier: Apache-2.0
"""Wait until a service is ready, and stop waiting as soon as it cannot become so. PRIVATE to the collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# One restart may be a port that was still closing; a service that has died twice while being waited for will not come.
MAX_RESTARTS = 1


@dataclass(frozen=True)
class Outcome:
    """How the wait ended. ``reason`` is empty when the service is ready; ``seconds`` is how long it took."""

    reason: str
    seconds: float
    answer: str


def wait(
    probe: Callable[[], str],
    state: Callable[[], Mapping[str, Any]],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    timeout: float,
    interval: float,
) -> Outcome:
    """Ask ``probe`` (empty answer: ready, else what is missing) until it is content, at most ``timeout`` seconds.

    ``state`` gives the unit as ``_systemd.unit_state`` does, and as ``job`` whether systemd has still to do something
    with it. An answer counts only of an active unit without a job: before that it may be of a process that is about to
    be stopped, or of one that does not serve all it should yet. The wait ends early when the unit has failed, does not
    run and will not, or keeps dying.
    """
    begin = clock()
    first = int(state()["restarts"])
    while True:
        answer = probe()
        seconds = clock() - begin
        unit = state()
        restarts = int(unit["restarts"]) - first
        if unit["active_state"] in ("failed", "inactive") and not unit["job"]:
            return Outcome(f"the unit is {unit['active_state']} (result: {unit['result'] or 'none'})", seconds, answer)
        if restarts > MAX_RESTARTS:
            return Outcome(f"the unit has died {restarts} times while it was waited for", seconds, answer)
        if not answer and unit["active_state"] == "active" and not unit["job"]:
            return Outcome("", seconds, answer)
        if seconds >= timeout:
            return Outcome(f"not ready after {timeout:g} s, the unit is {unit['active_state']}", seconds, answer)
        sleep(interval)
