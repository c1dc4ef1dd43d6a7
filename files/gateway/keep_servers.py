# SPDX-License-Identifier: Apache-2.0
"""Keep what HAProxy knows of its servers in the file that it reads when it is started or reloaded.

    /usr/bin/python3 -I -B keep_servers.py FILE CONFIGURATION [SOCKET]

So a server that was drained stays drained, and one that does not answer gets no request before its first check. With
SOCKET a running HAProxy is asked, else what is in FILE already is kept. HAProxy takes the port of a server from FILE,
not from its configuration, so the ports are made those of CONFIGURATION. The unit of the gateway runs it before it
starts and before each reload, and a rollout after each change. Standard library only.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile

EMPTY = "1\n"
NAME, PORT = 3, 18


def asked(path: str) -> str:
    """The state of the servers, of HAProxy's master process."""
    answer = b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(b"@1 show servers state\n")
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            answer += part
    return answer.decode()


def kept(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return EMPTY


def fitted(state: str, configuration: str) -> str:
    """The state of those servers that are configured, with the ports that they have there."""
    ports = dict(re.findall(r"(?m)^\s*server (\S+) \S+:(\d+)(?: |$)", configuration))
    lines = []
    for line in state.strip().splitlines():
        fields = line.split(" ")
        if len(fields) > PORT and not line.startswith("#"):
            if fields[NAME] not in ports:
                continue
            fields[PORT] = ports[fields[NAME]]
        lines.append(" ".join(fields))
    return "\n".join(lines) + "\n"


def write(file: str, text: str) -> None:
    folder = os.path.dirname(file)
    descriptor, written = tempfile.mkstemp(dir=folder)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        # HAProxy reads it as its own user, who has the folder.
        owner = os.stat(folder)
        os.fchown(stream.fileno(), owner.st_uid, owner.st_gid)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(written, file)


def main(file: str, configuration: str, path: str = "") -> int:
    try:
        state = asked(path) if path else kept(file)
    except OSError as error:
        print(f"found no HAProxy at {path}: {error}; expected the gateway to run", file=sys.stderr)
        return 1
    if not state.startswith(EMPTY):
        if path:
            print(f"found {state[:200]!r}; expected version 1 of HAProxy's server state", file=sys.stderr)
            return 1
        # A file that nobody can read must not keep the gateway from starting.
        print(
            f"found {state[:200]!r} in {file}; expected version 1 of HAProxy's server state: begun anew",
            file=sys.stderr,
        )
        state = EMPTY
    with open(configuration, encoding="utf-8") as stream:
        write(file, fitted(state, stream.read()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
