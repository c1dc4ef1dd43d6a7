# SPDX-License-Identifier: Apache-2.0
"""One play at a time: who is refused, whose lock is taken over, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _play_lock
from ansible_collections.llmfleet.sglang.plugins.module_utils._play_lock import Holder, is_gone, release, started, take


def holder(pid: int, controller: str = "build1") -> Holder:
    return {"controller": controller, "pid": pid, "started": "100", "user": "root"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "play.lock")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [1000.0]
    monkeypatch.setattr(_play_lock, "now", lambda: time[0])
    return time


def test_a_free_lock_is_taken_and_may_be_taken_again(path: str) -> None:
    assert take(path, holder(1), 60) == (None, None)
    assert take(path, holder(1), 60) == (None, None)


def test_another_play_is_refused_and_told_who_holds_it(path: str, clock: list[float]) -> None:
    take(path, holder(1), 60)
    clock[0] += 12
    refused, taken = take(path, holder(2), 60)
    assert refused == holder(1) | {"heard": 1000.0, "age": 12}
    assert taken is None


def test_taking_it_again_keeps_it_fresh(path: str, clock: list[float]) -> None:
    take(path, holder(1), 60)
    clock[0] += 50
    take(path, holder(1), 60)
    clock[0] += 50
    refused, _taken = take(path, holder(2), 60)
    assert (refused or {})["age"] == 50


def test_a_holder_that_was_not_heard_of_for_too_long_is_taken_over(path: str, clock: list[float]) -> None:
    take(path, holder(1), 60)
    clock[0] += 61
    refused, taken = take(path, holder(2), 60)
    assert (refused, (taken or {})["pid"]) == (None, 1)
    assert take(path, holder(1), 60)[0] is not None


def test_a_holder_known_to_be_gone_is_taken_over_at_once(path: str) -> None:
    take(path, holder(1), 60)
    refused, _taken = take(path, holder(2), 60)
    assert take(path, holder(2), 60, gone=refused)[1] is not None
    assert take(path, holder(2), 60) == (None, None)


def test_only_the_holder_that_is_gone_is_taken_over(path: str) -> None:
    take(path, holder(3), 60)
    refused, taken = take(path, holder(2), 60, gone=holder(1))
    assert ((refused or {})["pid"], taken) == (3, None)


def test_it_is_given_back_by_its_holder_only(path: str) -> None:
    assert not release(path, holder(1))
    take(path, holder(1), 60)
    assert not release(path, holder(2))
    assert release(path, holder(1))
    assert take(path, holder(2), 60) == (None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"heard": null}'])
def test_a_file_that_names_nobody_is_free(path: str, text: str) -> None:
    Path(path).parent.mkdir()
    Path(path).write_text(text)
    assert take(path, holder(1), 60) == (None, None)


def test_a_process_of_this_controller_is_seen_to_live_and_to_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = {"controller": _play_lock.controller(), "pid": child.pid, "started": started(child.pid)}
    assert not is_gone(mine)
    # Its number may belong to somebody else by now.
    assert is_gone(mine | {"started": "1"})
    child.communicate(b"\n")
    assert is_gone(mine)
    assert started(child.pid) == ""


def test_nothing_is_known_of_a_process_elsewhere() -> None:
    assert not is_gone({"controller": "elsewhere", "pid": os.getpid(), "started": "1"})
