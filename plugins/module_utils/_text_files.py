# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""A folder of text files: which of them differ, and how they are written.

All of them are read and written in one go, because a program of many small files costs more to copy one by one than to
hold: a task of Ansible's own takes two runs of a module for each file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

FOLDER_MODE = 0o755
FILE_MODE = 0o644


def differing(folder: str, files: Mapping[str, str]) -> list[str]:
    """Names in ``files`` whose file in ``folder`` is missing or has another content, mode or owner, sorted.

    ``.`` stands for the folder itself. The owner is meant to be the user who asks.
    """
    found = [name for name in files if not _is(os.path.join(folder, name), FILE_MODE, files[name])]
    return sorted([*found, *([] if _is(folder, FOLDER_MODE) else ["."])])


def _is(path: str, mode: int, content: str | None = None) -> bool:
    """Whether a file with this content, or a folder for no content, is there with this mode and the user as owner."""
    try:
        status = os.lstat(path)
        kind = stat.S_ISDIR if content is None else stat.S_ISREG
        if not kind(status.st_mode) or stat.S_IMODE(status.st_mode) != mode or status.st_uid != os.geteuid():
            return False
        if content is None:
            return True
        with open(path, "rb") as file:
            return file.read() == content.encode()
    except FileNotFoundError:
        return False


def write(folder: str, files: Mapping[str, str]) -> None:
    """Write those files of ``files`` that differ, each whole or not at all, and return when all are on the disk: a unit
    that names them may be started after a power cut, with nothing in them before that. Raises OSError."""
    names = differing(folder, files)
    _make(folder)
    os.chmod(folder, FOLDER_MODE)
    for name in names:
        if name != ".":
            _replace(os.path.join(folder, name), files[name])
    for path in (folder, os.path.dirname(folder)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _make(folder: str) -> None:
    """Make a folder and those above it that are missing, with their mode whatever the umask is."""
    if not os.path.isdir(folder):
        _make(os.path.dirname(folder))
        os.mkdir(folder)
        os.chmod(folder, FOLDER_MODE)


def _replace(path: str, content: str) -> None:
    partial = f"{path}.partial"
    write_out(partial, content.encode(), FILE_MODE)
    os.replace(partial, path)


def write_out(path: str, data: bytes, mode: int) -> None:
    """A file with exactly this mode from its first byte on, written out before anything may name it."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as stream:
        os.fchmod(stream.fileno(), mode)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
