# SPDX-License-Identifier: Apache-2.0
"""A folder of text files is what it should be after one writing, and what is right already is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._text_files import differing, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILES = {"__main__.py": "print('ä')\n", "empty.py": ""}
NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(path.stat().st_mode & 0o7777) for path in [folder, *folder.iterdir()]}


def test_nothing_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "0123"
    assert differing(str(folder), FILES) == [".", "__main__.py", "empty.py"]
    assert not folder.parent.exists()
    write(str(folder), FILES)
    assert {path.name: path.read_text() for path in folder.iterdir()} == FILES
    assert modes(folder) == {"0123": "0o755", "__main__.py": "0o644", "empty.py": "0o644"}
    assert differing(str(folder), FILES) == []


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.dictionaries(NAMES, st.text(max_size=20), max_size=4),
    after=st.dictionaries(NAMES, st.text(max_size=20), max_size=4),
)
def test_any_files_are_there_after_one_writing(
    tmp_path_factory: pytest.TempPathFactory, before: dict[str, str], after: dict[str, str]
) -> None:
    before, after = ({name.lower(): text for name, text in files.items()} for files in (before, after))
    folder = tmp_path_factory.mktemp("any") / "folder"
    write(str(folder), before)
    assert differing(str(folder), after) == sorted(name for name, text in after.items() if before.get(name) != text)
    write(str(folder), after)
    assert differing(str(folder), after) == []
    assert {path.name: path.read_bytes().decode() for path in folder.iterdir()} == {**before, **after}


@pytest.mark.parametrize("damage", ["content", "shorter", "mode", "link", "gone"])
def test_a_damaged_file_is_found_and_mended_and_the_other_left_alone(tmp_path: Path, damage: str) -> None:
    write(str(tmp_path / "f"), FILES)
    file, other = tmp_path / "f" / "__main__.py", tmp_path / "f" / "empty.py"
    untouched = other.stat()
    if damage == "content":
        file.write_text("print('Ä')\n")
    elif damage == "shorter":  # What a power cut leaves.
        file.write_text("")
    elif damage == "mode":
        file.chmod(0o666)
    else:
        file.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_text(FILES["__main__.py"])
            file.symlink_to(tmp_path / "elsewhere")
    assert differing(str(tmp_path / "f"), FILES) == ["__main__.py"]
    write(str(tmp_path / "f"), FILES)
    assert file.read_text() == FILES["__main__.py"]
    assert not file.is_symlink()
    assert differing(str(tmp_path / "f"), FILES) == []
    assert other.stat().st_ino == untouched.st_ino


def test_folders_above_it_can_be_entered_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write(str(tmp_path / "a" / "b" / "f"), FILES)
    finally:
        os.umask(before)
    assert [oct((tmp_path / path).stat().st_mode & 0o777) for path in ("a", "a/b", "a/b/f", "a/b/f/empty.py")] == [
        "0o755", "0o755", "0o755", "0o644"
    ]  # fmt: skip


def test_a_folder_that_others_may_write_to_is_mended(tmp_path: Path) -> None:
    write(str(tmp_path / "f"), FILES)
    (tmp_path / "f").chmod(0o777)
    assert differing(str(tmp_path / "f"), FILES) == ["."]
    write(str(tmp_path / "f"), FILES)
    assert modes(tmp_path / "f")["f"] == "0o755"


def test_what_else_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir(mode=0o755)
    (tmp_path / "f" / "other").write_text("mine")
    write(str(tmp_path / "f"), FILES)
    assert (tmp_path / "f" / "other").read_text() == "mine"


def test_a_file_in_the_folder_s_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(OSError, match="f"):
        write(str(tmp_path / "f"), FILES)
