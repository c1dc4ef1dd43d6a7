# SPDX-License-Identifier: Apache-2.0
"""Keeping what a group was proven with and putting it back, as Ansible asks for it on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugins.modules.process import run_module


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    path = tmp_path / "decode.service"
    path.write_text("first")
    return path


def keep(tmp_path: Path, unit: Path, number: int, check_mode: bool = False) -> dict[str, Any]:
    record = {"id": str(number), "plan": {"number": number}}
    given = {"root": str(tmp_path / "groups"), "group": "a", "state": "good", "record": record, "files": [str(unit)]}
    return run_module("group_record", given, check_mode)


def read(tmp_path: Path) -> dict[str, Any]:
    answer = run_module("group_record_info", {"root": str(tmp_path / "groups"), "groups": ["a"]})
    found: dict[str, Any] = answer["groups"]["a"]
    return found


def test_kept_read_and_put_back(tmp_path: Path, unit: Path) -> None:
    assert keep(tmp_path, unit, 1)["changed"]
    assert not keep(tmp_path, unit, 1)["changed"]
    unit.write_text("second")
    assert keep(tmp_path, unit, 2)["changed"]
    assert read(tmp_path) == {
        "good": {"id": "2", "plan": {"number": 2}},
        "previous": {"id": "1", "plan": {"number": 1}},
        "drained": False,
    }
    given = {"root": str(tmp_path / "groups"), "group": "a", "state": "restored", "which": "previous"}
    assert run_module("group_record", given)["restored"] == [str(unit)]
    assert unit.read_text() == "first"
    assert not run_module("group_record", given)["changed"]


def test_check_mode_changes_nothing(tmp_path: Path, unit: Path) -> None:
    assert keep(tmp_path, unit, 1, check_mode=True)["changed"]
    assert read(tmp_path) == {"good": None, "previous": None, "drained": False}


def test_a_drained_group_is_told(tmp_path: Path) -> None:
    (tmp_path / "groups" / "a").mkdir(parents=True)
    (tmp_path / "groups" / "a" / "drained").touch()
    assert read(tmp_path)["drained"]


def test_nothing_to_put_back_is_a_failure_that_says_so(tmp_path: Path) -> None:
    answer = run_module("group_record", {"root": str(tmp_path), "group": "a", "state": "restored"})
    assert answer["failed"]
    assert "good is not there; expected the group's files or its record" in answer["msg"]


def test_a_broken_record_is_told(tmp_path: Path, unit: Path) -> None:
    keep(tmp_path, unit, 1)
    next((tmp_path / "groups" / "a").glob("*/record.json")).write_text("{")
    answer = run_module("group_record_info", {"root": str(tmp_path / "groups"), "groups": ["a"]})
    assert "the records of group a" in answer["msg"]
