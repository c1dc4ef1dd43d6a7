# SPDX-License-Identifier: Apache-2.0
"""Who listens on a TCP port: from /proc alone, so that nothing has to be installed. PRIVATE to the collection."""

from __future__ import annotations

import os
import re
import socket
import struct
from typing import Any

_LISTEN = "0A"  # include/net/tcp_states.h: TCP_LISTEN is 10


def _address(text: str) -> str:
    """``0100007F`` -> ``127.0.0.1``: the kernel prints 32-bit words in the machine's byte order."""
    raw = b"".join(struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def parse_listeners(text: str) -> list[tuple[str, int, str]]:
    """The listening sockets of a /proc/net/tcp or tcp6 table: (address, port, inode)."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN:
            host, port = fields[1].split(":")
            found.append((_address(host), int(port, 16), fields[9]))
    return found


def unit_of_cgroup(text: str) -> str:
    """The systemd unit in a /proc/<pid>/cgroup file, empty when the process belongs to none.

    On cgroup v1 and hybrid hosts the line of the name=systemd hierarchy counts, on v2 the only line.
    """
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    for _number, controllers, path in sorted(lines, key=lambda parts: parts[1] != "name=systemd"):
        if controllers in ("", "name=systemd"):
            units = re.findall(r"[^/]+\.(?:service|scope)", path)
            if units:
                return str(units[-1])
    return ""


def read_text(path: str) -> str:
    """The file, or nothing if it is gone: processes end while they are being looked at."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def _owners(proc_root: str, inodes: set[str]) -> dict[str, int]:
    """Which process holds each socket inode; the lowest PID where several share it (a parent and its workers)."""
    owners: dict[str, int] = {}
    for pid in sorted(int(name) for name in os.listdir(proc_root) if name.isdigit()):
        folder = os.path.join(proc_root, str(pid), "fd")
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(os.path.join(folder, name))
            except OSError:
                continue
            if target.startswith("socket:["):
                inode = target[8:-1]
                if inode in inodes:
                    owners.setdefault(inode, pid)
    return owners


def read_ports(proc_root: str = "/proc") -> dict[str, dict[str, Any]]:
    """Port (as text, since it becomes a JSON key) -> ``{pid, unit, command, addresses}`` of its listener.

    ``pid`` is 0 and the texts are empty where the owner cannot be seen (another user's process, without root).
    """
    listeners = []
    for table in ("net/tcp", "net/tcp6"):
        listeners += parse_listeners(read_text(os.path.join(proc_root, table)))
    owners = _owners(proc_root, {inode for _address_, _port, inode in listeners})
    ports: dict[str, dict[str, Any]] = {}
    for address, port, inode in sorted(listeners, key=lambda item: (item[1], item[0])):
        pid = owners.get(inode, 0)
        entry = ports.setdefault(str(port), {"pid": 0, "unit": "", "command": "", "addresses": []})
        if address not in entry["addresses"]:
            entry["addresses"].append(address)
        if pid and not entry["pid"]:
            entry["pid"] = pid
            entry["unit"] = unit_of_cgroup(read_text(os.path.join(proc_root, str(pid), "cgroup")))
            command = read_text(os.path.join(proc_root, str(pid), "cmdline")).replace("\0", " ").strip()
            entry["command"] = command[:200]
    return ports
