# SPDX-License-Identifier: Apache-2.0
"""HAProxy's runtime API, asked through the socket of its master process. PRIVATE to the collection.

A reload leaves the worker before it running until its streams have ended, so what is set or counted is set and counted
in all of them. ``ask`` is ``(command) -> answer``; commands and columns are those of HAProxy 2.6 and 2.8
(management.txt, sections 9.1, 9.3 and 9.4).
"""

from __future__ import annotations

import csv
import io
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SOCKET = "/run/llmfleet/gateway/master.sock"
CONFIGURATION = "/etc/llmfleet/gateway/haproxy.cfg"
STATE_FILE = "/var/lib/llmfleet-gateway/servers"
KEEP_PROGRAM = "/opt/llmfleet/gateway/keep_servers.py"
BACKEND = "routers"
NOW = "@1"
#: Bits of srv_admin_state: told to drain, by the runtime API or by an agent; and the value of srv_op_state that
#: means that the server does not answer its health check.
_DRAINED = 0x08 | 0x10
_STOPPED = 0

Ask = Callable[[str], str]


class RuntimeApiError(Exception):
    """HAProxy cannot be asked, or answers what was not expected."""


def asker(path: str, timeout: float = 10) -> Ask:
    """Asks HAProxy through a socket. What it returns raises RuntimeApiError where nobody listens there."""

    def ask(command: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout)
                connection.connect(path)
                connection.sendall(f"{command}\n".encode())
                connection.shutdown(socket.SHUT_WR)
                parts = []
                while part := connection.recv(65536):
                    parts.append(part)
        except OSError as error:
            raise RuntimeApiError(f"found no HAProxy at {path}: {error}; expected the gateway to run there") from error
        return b"".join(parts).decode(errors="replace")

    return ask


def workers(ask: Ask) -> list[str]:
    """How each worker is addressed: the one that takes requests, and those that only end what they have begun."""
    found, section = [NOW], ""
    for line in ask("show proc").splitlines():
        if line.startswith("#"):
            section = line
        elif "old workers" in section and line.split():
            found.append(f"@!{line.split()[0]}")
    return found


def digest(ask: Ask) -> str:
    """The description in the configuration that the worker has loaded; nothing where it has none."""
    for line in ask(f"{NOW} show info").splitlines():
        name, _colon, value = line.partition(":")
        if name == "description":
            return value.strip()
    return ""


def servers(ask: Ask) -> dict[str, dict[str, Any]]:
    """``{name: {drained, up, sessions}}`` of the servers of the backend; sessions over all workers."""
    table = _table(ask(f"{NOW} show servers state {BACKEND}"))
    found = {
        row["srv_name"]: {
            "drained": bool(int(row["srv_admin_state"]) & _DRAINED),
            "up": int(row["srv_op_state"]) != _STOPPED,
            "sessions": 0,
        }
        for row in table
    }
    for worker in workers(ask):
        for name, sessions in _sessions(ask(f"{worker} show stat {BACKEND} 4 -1")).items():
            if name in found:
                found[name]["sessions"] += sessions
    return found


def _table(text: str) -> list[dict[str, str]]:
    """Rows of ``show servers state``: a version, a header, and values that blanks divide."""
    lines = text.strip().splitlines()
    if len(lines) < 2 or lines[0] != "1" or not lines[1].startswith("# "):
        raise RuntimeApiError(f"asked for the state of its servers, HAProxy says {text.strip()[:200]!r}")
    names = lines[1][2:].split()
    return [dict(zip(names, line.split(), strict=False)) for line in lines[2:] if line]


def _sessions(text: str) -> dict[str, int]:
    """Sessions by server, of ``show stat``. A worker that has ended meanwhile says nothing, and has none."""
    start = text.find("# ")
    if start < 0:
        return {}
    rows = csv.DictReader(io.StringIO(text[start + 2 :].strip()))
    return {row["svname"]: int(row["scur"] or 0) + int(row["qcur"] or 0) for row in rows if row.get("svname")}


def changes(now: Mapping[str, Mapping[str, Any]], names: Sequence[str], drained: bool) -> list[str]:
    """Those of ``names`` that are not as they should be."""
    return [name for name in names if name in now and now[name]["drained"] is not drained]


def set_drained(ask: Ask, names: Sequence[str], drained: bool) -> None:
    """Let servers take no more requests, or let them take some again. Raises RuntimeApiError where HAProxy objects."""
    state = "drain" if drained else "ready"
    for worker in workers(ask):
        for name in names:
            answer = ask(f"{worker} set server {BACKEND}/{name} state {state}").strip()
            # A worker from before a reload may not know the server, or may have ended.
            if answer and worker == NOW:
                raise RuntimeApiError(f"told to set {name} to {state}, HAProxy says {answer[:200]!r}")


def wait(
    ask: Ask,
    names: Sequence[str],
    drained: bool,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, dict[str, Any]]:
    """Wait until servers have no session left, or until they are up; returns those that are not after ``timeout``
    seconds."""
    end = clock() + timeout
    while True:
        now = servers(ask)
        left = {
            name: now[name]
            for name in names
            if name in now and (now[name]["sessions"] > 0 if drained else not now[name]["up"])
        }
        if not left or clock() >= end:
            return left
        sleep(0.5)
