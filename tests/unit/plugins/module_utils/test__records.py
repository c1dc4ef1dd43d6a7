# SPDX-License-Identifier: Apache-2.0
"""What a group was proven with: kept whole, gone back to byte for byte, whatever is interrupted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _records


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Keeping narrows the mask of its process, a module's own, for all that it makes."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "decode.service"
    path.parent.mkdir()
    path.write_text("first")
    path.chmod(0o644)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "groups" / "a")


def record(number: int) -> dict[str, Any]:
    return {"id": str(number), "plan": {"instances": [number]}, "answers": {"Hello": str(number)}}


def test_nothing_is_kept_before_anything_is(folder: str) -> None:
    assert _records.load(folder) == {"good": None, "previous": None}


def test_what_is_kept_can_be_read_and_is_roots_alone(folder: str, unit: Path) -> None:
    assert _records.keep(folder, record(1), [str(unit)])
    assert _records.load(folder) == {"good": record(1), "previous": None}
    modes = {stat.S_IMODE(os.stat(parent).st_mode) for parent, _folders, _files in os.walk(folder)}
    assert modes == {0o700}


def test_the_same_again_changes_nothing_whatever_it_answered(folder: str, unit: Path) -> None:
    _records.keep(folder, record(1), [str(unit)])
    assert not _records.keep(folder, record(1) | {"answers": {}}, [str(unit)])
    assert _records.load(folder)["good"] == record(1)


def test_a_dry_run_says_that_it_would_and_does_nothing(folder: str, unit: Path) -> None:
    assert _records.keep(folder, record(1), [str(unit)], dry=True)
    assert not Path(folder).exists()


def test_the_good_one_becomes_the_previous_one_and_the_one_before_goes(folder: str, unit: Path) -> None:
    for number in (1, 2, 3):
        _records.keep(folder, record(number), [str(unit)])
    assert _records.load(folder) == {"good": record(3), "previous": record(2)}
    assert len([entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]) == 2


def test_another_record_of_the_same_that_runs_leaves_the_previous_one(folder: str, unit: Path) -> None:
    _records.keep(folder, record(1), [str(unit)])
    _records.keep(folder, record(2), [str(unit)])
    unit.write_text("the same unit with another comment")
    assert _records.keep(folder, record(2), [str(unit)])
    assert _records.load(folder) == {"good": record(2), "previous": record(1)}


def test_going_back_and_keeping_that_turns_the_two_round(folder: str, unit: Path) -> None:
    _records.keep(folder, record(1), [str(unit)])
    unit.write_text("second")
    _records.keep(folder, record(2), [str(unit)])
    assert _records.restore(folder, "previous") == [str(unit)]
    assert _records.keep(folder, record(1), [str(unit)])
    assert _records.load(folder) == {"good": record(1), "previous": record(2)}


def test_files_come_back_byte_for_byte_with_their_mode(folder: str, unit: Path) -> None:
    secret = unit.with_name("decode.env")
    secret.write_bytes(b"KEY=\xff\x00")
    secret.chmod(0o600)
    _records.keep(folder, record(1), [str(unit), str(secret)])
    unit.write_text("second")
    secret.unlink()
    assert _records.restore(folder, "good") == sorted([str(unit), str(secret)])
    assert (unit.read_text(), secret.read_bytes()) == ("first", b"KEY=\xff\x00")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (unit, secret)] == [0o644, 0o600]
    assert _records.restore(folder, "good") == []


def test_what_the_record_lacks_is_removed(folder: str, unit: Path) -> None:
    _records.keep(folder, record(1), [str(unit)])
    added = unit.with_name("decode2.service")
    added.write_text("new")
    assert _records.restore(folder, "good", [str(unit), str(added)], dry=True) == [str(added)]
    assert added.exists()
    assert _records.restore(folder, "good", [str(unit), str(added)]) == [str(added)]
    assert (added.exists(), unit.read_text()) == (False, "first")


def test_there_is_nothing_to_go_back_to_where_nothing_was_kept(folder: str) -> None:
    with pytest.raises(FileNotFoundError, match="previous is not there"):
        _records.restore(folder, "previous")


def test_a_missing_file_is_told_and_the_good_one_stays(folder: str, unit: Path) -> None:
    _records.keep(folder, record(1), [str(unit)])
    with pytest.raises(FileNotFoundError):
        _records.keep(folder, record(2), [str(unit), str(unit) + ".gone"])
    assert _records.load(folder)["good"] == record(1)


def test_an_interrupted_copy_is_made_anew(folder: str, unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _records.keep(folder, record(1), [str(unit)])
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", lambda *_names: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            _records.keep(folder, record(2), [str(unit)])
    assert _records.load(folder)["good"] == record(1)
    assert _records.keep(folder, record(2), [str(unit)])
    assert _records.load(folder) == {"good": record(2), "previous": record(1)}
