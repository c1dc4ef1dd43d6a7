# SPDX-License-Identifier: Apache-2.0
"""What a PD group last ran with success on a host, kept so that it can be gone back to. PRIVATE to the collection.

    <root>/<group>/<hash>/record.json     the plan of the group on this host, and what it answered
    <root>/<group>/<hash>/files/<path>    its unit and environment files, as they were
    <root>/<group>/good                   link to what was proven last
    <root>/<group>/previous               link to what was proven before that

A record never changes once it is there, and a link is replaced in one step: whatever is interrupted, a link leads to
a whole record. Records hold environment files, so everything is root's alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._text_files import write_out

LINKS = ("good", "previous")
RECORD = "record.json"


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read()


def _link(folder: str, name: str, target: str) -> None:
    unfinished = os.path.join(folder, f".{name}")
    if os.path.lexists(unfinished):
        os.remove(unfinished)
    os.symlink(target, unfinished)
    os.rename(unfinished, os.path.join(folder, name))


def target(folder: str, name: str) -> str:
    """The record that a link leads to; empty where there is none."""
    path = os.path.join(folder, name)
    return os.readlink(path) if os.path.isfile(os.path.join(path, RECORD)) else ""


def load(folder: str) -> dict[str, dict[str, Any] | None]:
    """``{good, previous}``: the records of a group's folder, None where there is none. Raises OSError, ValueError."""
    return {
        name: json.loads(_read(os.path.join(folder, name, RECORD))) if target(folder, name) else None for name in LINKS
    }


def keep(folder: str, record: Mapping[str, Any], files: Sequence[str], dry: bool = False) -> bool:
    """Make ``record`` with copies of ``files`` the good one; whether anything changed. Raises OSError.

    Its name is a hash over plan and files, so the same one again changes nothing, whatever it answered this time.
    What was good becomes the previous one where the group ran something else with it (``record["id"]``), and what is
    neither goes.
    """
    contents = {path: _read(path) for path in sorted(files)}
    hashed = hashlib.sha256(json.dumps(record["plan"], sort_keys=True).encode())
    for path, data in contents.items():
        hashed.update(f"\0{path}\0".encode() + hashlib.sha256(data).digest())
    name = hashed.hexdigest()[:12]
    good = target(folder, "good")
    if good == name:
        return False
    if dry:
        return True
    os.umask(0o077)
    os.makedirs(folder, exist_ok=True)
    whole, unfinished = os.path.join(folder, name), os.path.join(folder, f".{name}")
    if not os.path.isfile(os.path.join(whole, RECORD)):
        for path in (whole, unfinished):
            shutil.rmtree(path, ignore_errors=True)
        os.makedirs(unfinished)
        for path, data in contents.items():
            copy = os.path.join(unfinished, "files", path.lstrip("/"))
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            write_out(copy, data, stat.S_IMODE(os.stat(path).st_mode))
        write_out(os.path.join(unfinished, RECORD), json.dumps(record, sort_keys=True, indent=1).encode(), 0o600)
        os.rename(unfinished, whole)
    before = load(folder)["good"]
    if before is not None and before.get("id") != record.get("id"):
        _link(folder, "previous", good)
    _link(folder, "good", name)
    kept = {target(folder, link) for link in LINKS}
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) and entry.name not in kept:
            shutil.rmtree(entry.path)
    return True


def restore(folder: str, name: str, absent: Sequence[str] = (), dry: bool = False) -> list[str]:
    """Put the files of the record ``name`` back, and remove those of ``absent`` that it lacks: the paths that changed.

    Raises FileNotFoundError where there is no such record, OSError.
    """
    if not target(folder, name):
        raise FileNotFoundError(f"{os.path.join(folder, name)} is not there")
    top = os.path.join(folder, name, "files")
    changed, held = [], set()
    for parent, _folders, names in os.walk(top):
        for entry in sorted(names):
            copy = os.path.join(parent, entry)
            path = "/" + os.path.relpath(copy, top)
            held.add(path)
            data, mode = _read(copy), stat.S_IMODE(os.stat(copy).st_mode)
            if os.path.isfile(path) and _read(path) == data and stat.S_IMODE(os.stat(path).st_mode) == mode:
                continue
            changed.append(path)
            if not dry:
                write_out(f"{path}.restored", data, mode)
                os.rename(f"{path}.restored", path)
    for path in absent:
        if path not in held and os.path.lexists(path):
            changed.append(path)
            if not dry:
                os.remove(path)
    return sorted(changed)
