# SPDX-License-Identifier: Apache-2.0
"""The module says what it writes, writes nothing in check mode, and refuses what is no text by a plain name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugins.modules.process import run_module

FILES = {"__main__.py": "print('this is the program')\n", "other.py": "# another part of it\n"}


def test_the_second_run_has_nothing_to_write(tmp_path: Path) -> None:
    given = {"path": str(tmp_path / "program"), "files": FILES}
    planned = run_module("text_files", given, check_mode=True)
    assert list(tmp_path.iterdir()) == []
    written = run_module("text_files", given)
    assert planned["written"] == written["written"] == [".", "__main__.py", "other.py"]
    assert planned["changed"]
    assert written["changed"]
    assert "__main__.py is written\n" in written["diff"]["after"]
    again = run_module("text_files", given)
    assert (again["changed"], again["written"]) == (False, [])


def test_contents_are_not_told(tmp_path: Path) -> None:
    said = run_module("text_files", {"path": str(tmp_path / "program"), "files": FILES})
    assert "this is the program" not in str(said)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"../evil": "a line\n"}, "no plain file name at '../evil'"),
        ({"": "a line\n"}, "no plain file name at ''"),
        ({"..": "a line\n"}, "no plain file name at '..'"),
        ({"list": ["a line\n"]}, "a list at 'list'"),
    ],
)
def test_anything_else_is_refused_before_a_file_is_written(tmp_path: Path, files: dict[str, Any], found: str) -> None:
    refused = run_module("text_files", {"path": str(tmp_path / "program"), "files": {"good": "a line\n"} | files})
    assert refused["msg"] == f"files has {found}; expected texts by file name, without folders"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_folder_s_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("")
    failed = run_module("text_files", {"path": str(tmp_path / "program"), "files": FILES})
    assert failed["msg"].startswith(f"cannot write the files of {tmp_path}/program: ")
