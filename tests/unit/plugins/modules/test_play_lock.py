# SPDX-License-Identifier: Apache-2.0
"""The lock of a host, as the action plugin asks the module for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.plugins.modules.process import run_module

ONE = {"controller": "build1 boot", "pid": 1, "started": "100", "user": "root"}
OTHER = {"controller": "build2 boot", "pid": 2, "started": "100", "user": "ops"}


def lock(tmp_path: Path, holder: dict[str, Any], **more: Any) -> dict[str, Any]:
    return run_module("play_lock", {"path": str(tmp_path / "play.lock"), "holder": holder} | more)


def test_the_second_is_refused_until_the_first_gives_it_back(tmp_path: Path) -> None:
    assert not lock(tmp_path, ONE)["changed"]
    refused = lock(tmp_path, OTHER)
    assert refused["refused"]["pid"] == 1
    assert refused["msg"].startswith("another play changes this host: process 1 of root on build1, heard of ")
    lock(tmp_path, ONE, state="free")
    assert lock(tmp_path, OTHER)["taken_over"] is None


def test_a_dead_holder_is_taken_over_and_told(tmp_path: Path) -> None:
    lock(tmp_path, ONE)
    gone = lock(tmp_path, OTHER)["refused"]
    assert lock(tmp_path, OTHER, gone=gone)["taken_over"]["pid"] == 1


def test_check_mode_takes_nothing(tmp_path: Path) -> None:
    given = {"path": str(tmp_path / "play.lock"), "holder": ONE}
    assert not run_module("play_lock", given, check_mode=True)["changed"]
    assert list(tmp_path.iterdir()) == []


def test_it_says_that_it_wants_its_action_plugin(tmp_path: Path) -> None:
    assert "runs through its action plugin" in run_module("play_lock", {"path": str(tmp_path / "play.lock")})["msg"]
