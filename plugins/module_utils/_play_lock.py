# SPDX-License-Identifier: Apache-2.0
"""One play at a time changes a host. PRIVATE to the collection.

The lock is a file on the host that says who holds it: a process of a controller, and when that was last said. It lies
below /run, so a reboot frees it, and its time is the kernel's since boot, which no change of the clock moves. Its
holder is dead, and the lock free to be taken over, when the controller that asks is the holder's own and that process
is gone there, or when nothing was heard of the holder for longer than the longest step of a play takes.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from typing import Any

Holder = dict[str, Any]


def controller() -> str:
    """What tells apart the places in which a process number means something: machine, boot, namespace of processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            boot = stream.read().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        # Not Linux: there a name has to do.
        boot = space = ""
    return f"{socket.gethostname()} {boot} {space}".strip()


def started(pid: int) -> str:
    """When a process was started, in ticks, so that a number that is used again differs; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return ""
    # Not Linux, and it lives.
    return "alive" if not os.path.isdir("/proc/self") else ""


def is_gone(holder: Holder) -> bool:
    """Whether the holder was a process of this controller that is not there any more."""
    return bool(holder["controller"] == controller() and started(int(holder["pid"])) != holder["started"])


def now() -> float:
    """Seconds since the machine has booted, with those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def take(path: str, wanted: Holder, stale: float, gone: Holder | None = None) -> tuple[Holder | None, Holder | None]:
    """Take the lock, or say again that it is held: ``(who holds it instead, whose lock was taken over)``. Raises
    OSError.

    ``wanted`` is ``{controller, pid, started, user}``; ``gone`` a holder that is known to be dead. The holder told has
    ``age``, the seconds since it was last heard of.
    """
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        held = _parse(stream.read())
        mine = held is None or _same(held, wanted)
        if held is not None:
            held["age"] = round(now() - held["heard"])
        free = mine or (gone is not None and held is not None and _same(held, gone))
        if not free and held is not None and held["age"] <= stale:
            return held, None
        stream.seek(0)
        stream.truncate()
        json.dump({**wanted, "heard": now()}, stream)
        return None, None if mine else held


def release(path: str, mine: Holder) -> bool:
    """Give the lock back; whether it was held by us. Raises OSError."""
    try:
        with open(path, "r+", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            held = _parse(stream.read())
            if held is None or not _same(held, mine):
                return False
            # Emptied, not removed: another play may be waiting on this very file.
            stream.truncate(0)
            return True
    except FileNotFoundError:
        return False


def _same(one: Holder, other: Holder) -> bool:
    return all(one.get(key) == other.get(key) for key in ("controller", "pid", "started"))


def _parse(text: str) -> Holder | None:
    """Who the text names; a file that a crash has left half written names nobody."""
    try:
        found = json.loads(text)
        return {**found, "heard": float(found["heard"])}
    except (ValueError, TypeError, KeyError):
        return None
