# SPDX-License-Identifier: Apache-2.0
"""A diff is applied to the file it was made for, exactly, or not at all."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _patch
from ansible_collections.llmfleet.sglang.plugins.module_utils._patch import PatchError
from hypothesis import given
from hypothesis import strategies as st

ENGINE_FILES = Path(__file__).parents[4] / "files" / "engine"
NAME = "pkg/kernel.cuh"
OLD = "".join(f"line {number}\n" for number in range(20))
NEW = OLD.replace("line 3\n", "line three\nand more\n").replace("line 17\n", "")

# Few different lines: blocks look alike, and only their position tells them apart. Some end a line for Python only.
LINES = st.lists(
    st.sampled_from(["", "a", "b", "a\r", " \x0c", "- a", "+++ b", "@@ -1 +1 @@", "é\x85\u2028"]), max_size=25
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def entry_of(old: str, new: str) -> dict[str, str]:
    return {"file": NAME, "patch": "kernel.patch", "before": digest(old), "after": digest(new), "why": "to test"}


def unified(old: str, new: str, context: int = 3) -> str:
    sides = [[f"{line}\n" for line in text.split("\n")[:-1]] for text in (old, new)]
    return "Words for people.\n" + "".join(difflib.unified_diff(*sides, f"a/{NAME}", f"b/{NAME}", n=context))


def tree(folder: Path, text: str) -> Path:
    target = folder / NAME
    target.parent.mkdir()
    target.write_bytes(text.encode())
    return target


ENTRY, PATCH = entry_of(OLD, NEW), unified(OLD, NEW)


def test_apply_and_revert(tmp_path: Path) -> None:
    target = tree(tmp_path, OLD)
    root = str(tmp_path)
    assert _patch.state(root, ENTRY) == "before"
    assert _patch.apply(root, ENTRY, PATCH)
    assert (target.read_text(), _patch.state(root, ENTRY)) == (NEW, "after")
    assert not _patch.apply(root, ENTRY, PATCH), "nothing left to do"
    assert _patch.revert(root, ENTRY, PATCH)
    assert (target.read_text(), _patch.state(root, ENTRY)) == (OLD, "before")
    assert not _patch.revert(root, ENTRY, PATCH)
    assert os.listdir(target.parent) == [target.name]


@given(old=LINES, new=LINES, context=st.integers(0, 3))
def test_any_change_can_be_applied_and_reverted(old: list[str], new: list[str], context: int) -> None:
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (old, new))
    if before == after:
        return
    entry, patch = entry_of(before, after), unified(before, after, context)
    with tempfile.TemporaryDirectory() as name:
        target = tree(Path(name), before)
        assert _patch.apply(name, entry, patch)
        assert target.read_bytes() == after.encode()
        assert _patch.revert(name, entry, patch)
        assert target.read_bytes() == before.encode()


@given(extra=st.text(min_size=1), position=st.integers(0, len(OLD)))
def test_a_changed_file_is_refused_and_left_alone(extra: str, position: int) -> None:
    """A patch(1) would take most of these."""
    text = OLD[:position] + extra + OLD[position:]
    with tempfile.TemporaryDirectory() as name:
        target = tree(Path(name), text)
        assert _patch.state(name, ENTRY) == "other"
        found = f"has sha256 {digest(text)}; expected {ENTRY['before']} .* or {ENTRY['after']} .*build the release anew"
        for change in (_patch.apply, _patch.revert):
            with pytest.raises(PatchError, match=found):
                change(name, ENTRY, PATCH)
        assert target.read_bytes() == text.encode()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert _patch.state(str(tmp_path), ENTRY) == "missing"
    with pytest.raises(PatchError, match=f"{NAME} does not exist; expected {ENTRY['before']}"):
        _patch.apply(str(tmp_path), ENTRY, PATCH)


def test_a_patch_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    target = tree(tmp_path, OLD)
    with pytest.raises(
        PatchError, match=r"would make .* have sha256 .*; expected .*from one version of the collection"
    ):
        _patch.apply(str(tmp_path), ENTRY, PATCH.replace("+and more", "+and less"))
    with pytest.raises(PatchError, match=r"does not fit at line 1; expected the lines 'line 0"):
        _patch.apply(str(tmp_path), ENTRY, PATCH.replace(" line 2\n", " line two\n"))
    assert target.read_text() == OLD


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("", f"found the end at line 1 of the patch; expected .*a/{NAME}"),
        (PATCH.replace(f"a/{NAME}", "a/other"), f"found '--- a/other' at line 2 .*; expected .*a/{NAME}"),
        ("".join(PATCH.splitlines(keepends=True)[:3]), "found the end at line 4 of the patch; expected a line with @@"),
        (PATCH.replace("@@ -1,7 +1,8 @@", "@@ one @@"), "found '@@ one @@' at line 4 .*expected @@ -start"),
        (PATCH.replace("@@ -1,7", "@@ -1,8"), r"found .*@@ -1,8 .*; expected counts of 7 and 8"),
        (PATCH.replace(" line 1\n", "line 1\n"), "found 'line 1' at line 6 .*; expected a line that begins with"),
        (PATCH + "\\ No newline at end of file\n", "found '.. No newline .*expected a line that begins with"),
    ],
    ids=["empty", "another_file", "no_hunk", "no_ranges", "wrong_count", "not_a_line", "no_line_feed"],
)
def test_a_malformed_patch_is_refused(tmp_path: Path, patch: str, message: str) -> None:
    target = tree(tmp_path, OLD)
    with pytest.raises(PatchError, match=message):
        _patch.apply(str(tmp_path), ENTRY, patch)
    assert target.read_text() == OLD


def test_the_mode_stays_and_a_hard_link_keeps_the_old_text(tmp_path: Path) -> None:
    """Installers link files into place from their cache."""
    target = tree(tmp_path, OLD)
    target.chmod(0o640)
    cached = tmp_path / "cached"
    os.link(target, cached)
    _patch.apply(str(tmp_path), ENTRY, PATCH)
    assert cached.read_text() == OLD
    assert target.read_text() == NEW
    assert target.stat().st_mode & 0o7777 == 0o640


def test_a_write_that_fails_leaves_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tree(tmp_path, OLD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _patch.apply(str(tmp_path), ENTRY, PATCH)
    assert target.read_text() == OLD
    assert os.listdir(target.parent) == [target.name]


def manifest(version: str) -> list[Mapping[str, str]]:
    entries: list[Mapping[str, str]] = json.loads((ENGINE_FILES / version / "manifest.json").read_text())["patches"]
    return entries


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_what_the_engine_patches_replace_and_add(version: str) -> None:
    """Read as diffs of the file that the manifest names; the engine's own files are not here, the contract has them."""
    for entry in manifest(version):
        assert sorted(entry) == ["after", "before", "file", "patch", "why"]
        text = (ENGINE_FILES / version / entry["patch"]).read_text()
        assert "Copyright 2023-2024 SGLang Team" in text.split("\n--- ", 1)[0]
        with pytest.raises(PatchError, match=f"{entry['file']} does not exist"):
            _patch.apply("/nowhere", entry, text)
        body = text.split("\n+++ ", 1)[1].splitlines()
        removed = [line for line in body if line.startswith("-")]
        assert len(removed) == 3, "as little of the engine's own as possible"
        added = "\n".join(line for line in body if line.startswith("+"))
        assert "if constexpr (kBf16Store)" in added
