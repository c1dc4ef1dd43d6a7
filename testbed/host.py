# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a host between commands, and which of its processes is alive."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from testbed import layout as names
from testbed.layout import Layout
from testbed.shell import TestbedError, write_atomically


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 when there is no such process or it is a zombie.

    Together with the pid it names one process: a pid alone may by now belong to another.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


@dataclass
class Host:
    """One host; the fields are the content of ``hosts/<name>/host.json``.

    ``backend`` is ``nspawn``, ``tcg`` or ``kvm``; ``base`` is the snapshot (``HOST/TAG``) its disk starts from, empty
    for the plain image; ``memory_mb`` and ``gpus_per_node`` are for virtual machines; ``forwards`` are extra
    ``HOST:GUEST`` ports; ``pid`` is that of systemd-nspawn or QEMU, 0 when never started.
    """

    name: str
    backend: str
    index: int
    image: str
    base: str = ""
    memory_mb: int = 0
    gpus_per_node: int = 0
    disk_gb: int = 32
    host_network: bool = False
    forwards: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    pid: int = 0
    pid_start: int = 0

    @property
    def is_vm(self) -> bool:
        return self.backend != "nspawn"

    @property
    def address(self) -> str:
        """Address at which the build machine reaches the host's ssh."""
        return "127.0.0.1" if self.is_vm or self.host_network else names.nspawn_address(self.index)

    @property
    def port(self) -> int:
        """Port of the host's ssh at `address`."""
        return names.ssh_port(self.index) if self.is_vm or self.host_network else 22

    def directory(self, layout: Layout) -> Path:
        return layout.hosts / self.name

    def console(self, layout: Layout) -> Path:
        return self.directory(layout) / "console.log"

    def running(self) -> bool:
        """Whether the process that was started for this host is still that process."""
        return self.pid > 0 and self.pid_start == process_start(self.pid) != 0

    def started(self, pid: int) -> None:
        """Remember the process that now runs this host."""
        self.pid, self.pid_start = pid, process_start(pid)

    def signal(self, number: signal.Signals) -> None:
        """Signal the host's process if it still is that process."""
        if self.running():
            os.kill(self.pid, number)

    def save(self, layout: Layout) -> None:
        text = json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"
        write_atomically(self.directory(layout) / "host.json", text)

    def forget(self, layout: Layout) -> None:
        """Remove all that the host left on disk."""
        shutil.rmtree(self.directory(layout), ignore_errors=True)


def load(layout: Layout, name: str) -> Host | None:
    """The host of that name, None when there is none."""
    path = layout.hosts / names.check_name(name) / "host.json"
    if not path.exists():
        return None
    try:
        return Host(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise TestbedError(f"{path} cannot be read ({error}); remove {path.parent} if no such host runs") from error


def load_all(layout: Layout) -> list[Host]:
    """Every known host, by name."""
    found = [load(layout, path.parent.name) for path in sorted(layout.hosts.glob("*/host.json"))]
    return [host for host in found if host]


def ssh_argv(layout: Layout, host: Host, command: Sequence[str] = ()) -> list[str]:
    """Command line of an ssh into the host as root. Host keys are not checked: hosts come and go."""
    return [
        "ssh",
        *("-i", str(layout.ssh_key)),
        *("-p", str(host.port)),
        *ssh_options(),
        f"root@{host.address}",
        *command,
    ]


def ssh_options() -> list[str]:
    return [
        *("-o", "StrictHostKeyChecking=no"),
        *("-o", "UserKnownHostsFile=/dev/null"),
        *("-o", "LogLevel=ERROR"),
        *("-o", "BatchMode=yes"),
        *("-o", "ConnectTimeout=10"),
    ]


@dataclass(frozen=True)
class Snapshot:
    """A disk layer kept by ``snapshot``: the content of ``snapshots/<host>/<tag>/snapshot.json``.

    ``layers`` names this snapshot and those below it, newest first; ``kind`` is ``nspawn`` or ``vm``.
    """

    id: str
    kind: str
    image: str
    layers: list[str]

    def save(self, layout: Layout) -> None:
        write_atomically(layout.snapshots / self.id / "snapshot.json", json.dumps(asdict(self), indent=1) + "\n")


def load_snapshot(layout: Layout, snapshot_id: str) -> Snapshot:
    """The snapshot ``HOST/TAG``; an error lists those there are."""
    path = layout.snapshots / snapshot_id / "snapshot.json"
    if snapshot_id.count("/") != 1 or not path.exists():
        known = ", ".join(all_snapshots(layout)) or "none"
        raise TestbedError(f"no snapshot {snapshot_id!r} (written HOST/TAG); there are: {known}")
    return Snapshot(**json.loads(path.read_text()))


def all_snapshots(layout: Layout) -> list[str]:
    return sorted(f"{p.parent.parent.name}/{p.parent.name}" for p in layout.snapshots.glob("*/*/snapshot.json"))
