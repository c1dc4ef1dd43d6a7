# SPDX-License-Identifier: Apache-2.0
"""What a path is, who may read it, and how much room is there. PRIVATE to the collection."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from typing import Any


def _groups(user: str) -> tuple[int, set[int]]:
    """(uid, gids) of a user; (-1, {}) for one that does not exist yet, who then has only what everybody has."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return -1, set()
    return entry.pw_uid, {entry.pw_gid} | {group.gr_gid for group in grp.getgrall() if user in group.gr_mem}


def _allows(info: os.stat_result, uid: int, gids: set[int], owner: int, group: int, other: int) -> bool:
    if uid == 0:
        return True
    if info.st_uid == uid:
        return bool(info.st_mode & owner)
    if info.st_gid in gids:
        return bool(info.st_mode & group)
    return bool(info.st_mode & other)


def unreadable_part(path: str, user: str) -> str:
    """The first part of ``path`` that ``user`` cannot pass or read; empty when the whole path is readable."""
    uid, gids = _groups(user)
    parts = path.rstrip("/").split("/")
    for end in range(1, len(parts)):
        parent = "/".join(parts[:end]) or "/"
        if not _allows(os.stat(parent), uid, gids, stat.S_IXUSR, stat.S_IXGRP, stat.S_IXOTH):
            return parent
    return "" if _allows(os.stat(path), uid, gids, stat.S_IRUSR, stat.S_IRGRP, stat.S_IROTH) else path


def existing_parent(path: str) -> str:
    """``path`` itself, or the nearest folder above it that exists: where it would be created."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def tree_size(path: str) -> int:
    """Bytes below ``path``, links not followed."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _folders, names in os.walk(path) for name in names
    )


def read_path(path: str, user: str) -> dict[str, Any]:
    """``{exists, is_dir, unreadable, size, device, free}``; sizes in bytes, ``free`` where the path is or would be.

    ``device`` tells which paths share their free space. ``unreadable`` is the part of the path that ``user`` cannot
    read or pass (empty: readable).
    """
    parent = existing_parent(path)
    room = os.statvfs(parent)
    exists = os.path.exists(path)
    return {
        "exists": exists,
        "is_dir": os.path.isdir(path),
        "unreadable": unreadable_part(path, user) if exists else "",
        "size": tree_size(path) if exists else 0,
        "device": os.stat(parent).st_dev,
        "free": room.f_bavail * room.f_frsize,
    }
