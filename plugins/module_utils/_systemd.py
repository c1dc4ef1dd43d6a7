# SPDX-License-Identifier: Apache-2.0
"""Write values for systemd so that it reads back exactly the same bytes, and read the state of units.

PRIVATE to the collection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def quote_argument(argument: str) -> str:
    """One argument of an ExecStart= line.

    systemd splits the line as a shell would, undoes C escapes, expands ``$NAME`` and ``%`` specifiers
    (systemd.service(5), "COMMAND LINES"): all four are neutralised here. Raises ValueError for a NUL byte.
    """
    if "\0" in argument:
        raise ValueError("an argument of a unit cannot hold a NUL byte")
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    escaped = escaped.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return escaped if _PLAIN.fullmatch(argument) else f'"{escaped}"'


def exec_line(argv: Sequence[str]) -> str:
    """A whole command line for ExecStart=, one argument per line so that a diff shows what changed."""
    return " \\\n    ".join(quote_argument(argument) for argument in argv)


def environment_file(environment: Mapping[str, str]) -> str:
    """The text of an EnvironmentFile=, sorted by name.

    Inside double quotes systemd takes a backslash away only before ``"``, ``\\``, `````, ``$`` and a newline
    (systemd.exec(5)), and expands nothing. Raises ValueError for a name or value that cannot be written.
    """
    lines = []
    for name in sorted(environment):
        if _ENVIRONMENT_NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a name of an environment variable")
        value = environment[name]
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL byte")
        escaped = re.sub(r'(["\\`$])', r"\\\1", value)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)


SHOW_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "MainPID",
    "NRestarts",
    "FragmentPath",
    "ActiveEnterTimestampMonotonic",
    "Result",
    "NeedDaemonReload",
    "RuntimeDirectory",
)


def parse_show(text: str) -> list[dict[str, str]]:
    """The blocks of ``systemctl show`` (separated by empty lines), each as a mapping of property to value."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if properties:
            blocks.append(properties)
    return blocks


def fingerprint_file(properties: Mapping[str, str]) -> str:
    """Where a unit's start leaves the fingerprint of what it runs; empty for a unit without runtime directory.

    The unit writes it in ExecStartPre= from its own environment, and systemd removes the folder when the unit stops.
    /proc/<pid>/environ would not do: programs that set their process title, as the router does, write over it.
    """
    folders = properties.get("RuntimeDirectory", "").split()
    return f"/run/{folders[0]}/fingerprint" if folders else ""


def reports_folder(properties: Mapping[str, str]) -> str:
    """Where the processes of a server report which features of the plugin are active in them; see ``_features.py``."""
    folders = properties.get("RuntimeDirectory", "").split()
    return next((f"/run/{folder}" for folder in folders if folder.endswith("/features")), "")


def unit_state(
    properties: Mapping[str, str], read: Callable[[str], str], reports: Callable[[str], dict[str, object]] | None = None
) -> dict[str, object]:
    """What a reader needs of one unit. ``read(path)`` gives a file's text, nothing when there is none;
    ``reports(folder)`` what a server's processes report, by their name.

    ``fingerprint`` and ``reports`` are of the *running* process, empty when none runs; the unit file may already say
    something else.
    """
    folder = reports_folder(properties)
    pid = int(properties.get("MainPID") or 0)
    path = fingerprint_file(properties)
    return {
        "loaded": properties.get("LoadState") == "loaded",
        "active_state": properties.get("ActiveState", "inactive"),
        "sub_state": properties.get("SubState", ""),
        "enabled": properties.get("UnitFileState") == "enabled",
        "main_pid": pid,
        "restarts": int(properties.get("NRestarts") or 0),
        "result": properties.get("Result", ""),
        "path": properties.get("FragmentPath", ""),
        "started_monotonic_us": int(properties.get("ActiveEnterTimestampMonotonic") or 0),
        "needs_daemon_reload": properties.get("NeedDaemonReload") == "yes",
        "fingerprint": read(path).strip() if pid > 0 and path else "",
        "reports": reports(folder) if pid > 0 and folder and reports else {},
    }
