# SPDX-License-Identifier: Apache-2.0
"""What a path is, and which part of it a user cannot read."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llmfleet.sglang.plugins.module_utils._paths import read_path, tree_size


def open_all(path: Path) -> None:
    """Let everybody pass the folders that pytest makes for its user only."""
    for folder in (path, *path.parents):
        if folder.owner() == path.owner() and str(folder) != "/":
            folder.chmod(folder.stat().st_mode | 0o055)


def test_a_folder_that_is_closed_is_named(tmp_path: Path) -> None:
    open_all(tmp_path)
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    (closed / "config.json").write_text("{}")
    assert read_path(str(closed / "config.json"), "nobody")["unreadable"] == str(closed)
    closed.chmod(0o755)
    assert read_path(str(closed / "config.json"), "nobody")["unreadable"] == ""


def test_a_file_that_is_closed_is_named(tmp_path: Path) -> None:
    open_all(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{}")
    file.chmod(0o640)
    assert read_path(str(file), "no-such-user")["unreadable"] == str(file)
    assert read_path(str(file), "root")["unreadable"] == ""


def test_a_path_that_is_not_there_has_the_room_of_its_parent(tmp_path: Path) -> None:
    found = read_path(str(tmp_path / "a/b/c"), "root")
    assert (found["exists"], found["size"], found["unreadable"]) == (False, 0, "")
    assert found["device"] == tmp_path.stat().st_dev
    assert found["free"] > 0


def test_sizes_are_those_of_all_files_and_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "sub/b").write_bytes(b"x" * 5)
    (tmp_path / "sub/loop").symlink_to(tmp_path)
    link = (tmp_path / "sub/loop").lstat().st_size
    assert tree_size(str(tmp_path)) in (15, 15 + link)
