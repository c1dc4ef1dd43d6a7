# SPDX-License-Identifier: Apache-2.0
"""Apply and revert a unified diff exactly: known file in, known file out, or nothing happens.

A patch belongs to one state of one file, named by the file's SHA-256 before and after. Whether to write is decided by
these digests alone; the diff is applied line for line, without the offsets and the fuzz of patch(1), and what comes out
must have the digest that was promised. Runs on the target with the standard library only. PRIVATE to the collection.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence

BEFORE, AFTER, OTHER, MISSING = "before", "after", "other", "missing"

_RANGES = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")

#: Where a block of lines begins, counted from 0, and its lines with their line feeds.
_Block = tuple[int, list[bytes]]


class PatchError(Exception):
    """A file or a diff is not what was expected; says what was found, what was expected and what to do."""


def state(root: str, entry: Mapping[str, str]) -> str:
    """State of the file that a manifest entry is about: ``before``, ``after``, ``other`` or ``missing``.

    ``root`` is the folder that ``entry["file"]`` is relative to; ``entry["before"]`` and ``entry["after"]`` are the
    digests of the file without and with the patch.
    """
    try:
        digest = _sha256(_read(_path(root, entry)))
    except FileNotFoundError:
        return MISSING
    return {entry["before"]: BEFORE, entry["after"]: AFTER}.get(digest, OTHER)


def apply(root: str, entry: Mapping[str, str], patch_text: str) -> bool:
    """Patch the file of a manifest entry; returns whether it was changed (False: it is patched already).

    Raises PatchError, and leaves the file as it is, when the file is in neither state, or when the diff does not lead
    from the one to the other.
    """
    return _change(root, entry, patch_text, BEFORE, AFTER)


def revert(root: str, entry: Mapping[str, str], patch_text: str) -> bool:
    """Take the patch out of the file; returns whether it was changed. Raises PatchError as ``apply`` does."""
    return _change(root, entry, patch_text, AFTER, BEFORE)


def _change(root: str, entry: Mapping[str, str], patch_text: str, source: str, target: str) -> bool:
    path, found = _path(root, entry), state(root, entry)
    if found == target:
        return False
    if found != source:
        what = "does not exist" if found == MISSING else f"has sha256 {_sha256(_read(path))}"
        raise PatchError(
            f"{path} {what}; expected {entry['before']} (without the patch) or {entry['after']} (with it). "
            "It is left as it is. Cure: build the release anew, if the file was changed by hand; "
            "make a patch for this version of the engine, if the version is a new one."
        )
    changes = _changes(patch_text, entry["file"])
    text = _replaced(_read(path), changes if target == AFTER else [(new, old) for old, new in changes])
    if _sha256(text) != entry[target]:
        raise PatchError(
            f"the patch would make {path} have sha256 {_sha256(text)}; expected {entry[target]}. "
            "It is left as it is. Cure: take the patch and its manifest from one version of the collection."
        )
    _write(path, text)
    return True


def _changes(patch_text: str, file: str) -> list[tuple[_Block, _Block]]:
    """The hunks of a unified diff of one file, old and new side; what stands before its ``---`` line is for people."""
    lines = _LINE.findall(patch_text.encode())
    names = [f"--- a/{file}", f"+++ b/{file}"]
    start = next((number for number, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    if lines[start : start + 2] != [f"{name}\n".encode() for name in names]:
        raise _malformed(start, lines, f"{names[0]!r} and {names[1]!r}")
    heads = [number for number, line in enumerate(lines) if number > start + 1 and line.startswith(b"@@")]
    if heads[:1] != [start + 2]:
        raise _malformed(start + 2, lines, "a line with @@")
    ends = [*heads[1:], len(lines)]
    return [_hunk(lines, head, end) for head, end in zip(heads, ends, strict=True)]


def _hunk(lines: Sequence[bytes], head: int, end: int) -> tuple[_Block, _Block]:
    """Old and new block of the hunk that reaches from line ``head`` to before line ``end``."""
    ranges = _RANGES.match(lines[head])
    if ranges is None:
        raise _malformed(head, lines, "@@ -start,count +start,count @@")
    for number in range(head + 1, end):
        if lines[number][:1] not in (b" ", b"-", b"+"):
            raise _malformed(number, lines, "a line that begins with a space, - or +")
    old = [line[1:] for line in lines[head + 1 : end] if line[:1] != b"+"]
    new = [line[1:] for line in lines[head + 1 : end] if line[:1] != b"-"]
    old_start, old_count, new_start, new_count = (1 if part is None else int(part) for part in ranges.groups())
    if (len(old), len(new)) != (old_count, new_count):
        raise _malformed(head, lines, f"counts of {len(old)} and {len(new)}, which is what follows,")
    # A side without a line is said to be after the line that the number names.
    return (old_start - bool(old), old), (new_start - bool(new), new)


def _replaced(text: bytes, changes: Iterable[tuple[_Block, _Block]]) -> bytes:
    """A text with the second block of each change in place of the first; they are in order, as diff writes them."""
    lines: list[bytes] = _LINE.findall(text)
    result: list[bytes] = []
    done = 0
    for (start, old), (_start, new) in changes:
        if start < done or lines[start : start + len(old)] != old:
            raise PatchError(
                f"the patch does not fit at line {start + 1}; expected the lines {b''.join(old).decode()!r}. "
                "The file is left as it is. Cure: take the patch and its manifest from one version of the collection."
            )
        result += [*lines[done:start], *new]
        done = start + len(old)
    return b"".join([*result, *lines[done:]])


def _malformed(number: int, lines: Sequence[bytes], expected: str) -> PatchError:
    found = repr(lines[number].decode(errors="replace").rstrip("\n")) if number < len(lines) else "the end"
    return PatchError(
        f"found {found} at line {number + 1} of the patch; expected {expected}. Cure: make the patch anew."
    )


def _path(root: str, entry: Mapping[str, str]) -> str:
    return os.path.join(root, entry["file"])


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read()


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _write(path: str, text: bytes) -> None:
    """Replace a file in one step, with its mode; another name of the old file (a wheel cache's hard link) keeps it."""
    mode = os.stat(path).st_mode & 0o7777
    handle, temporary = tempfile.mkstemp(prefix=".patch-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.rename(temporary, path)
    except BaseException:
        os.remove(temporary)
        raise
