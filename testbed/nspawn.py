# SPDX-License-Identifier: Apache-2.0
"""Hosts as systemd-nspawn containers: native speed, real systemd, up in seconds; they share the machine's kernel.

A host's root is an overlay: below the image's root directory (and snapshots), above a disk of the host's own, a
sparse ext4 file. So a host can really run out of disk, and a reset is a new file.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testbed import stage
from testbed.host import Host, Snapshot, load_snapshot
from testbed.image import Image
from testbed.layout import BRIDGE, BRIDGE_ADDRESS, Layout, machine_id
from testbed.shell import TestbedError, locked, require_programs, run, wait_until, write_atomically

FAULTS = ("network", "hang", "power", "disk-full")
NODE_TREE = "/opt/llmfleet-testbed/node_tree/tree"  # as a host sees it
# A container keeps a copy of all mounts that are there when it starts. Without other hosts' roots among them, a host's
# disk is really gone when the host is. Ends in an exec, so that the process started is systemd-nspawn.
_WITHOUT_OTHER_ROOTS = (
    *("unshare", "--mount", "--propagation", "slave", "sh", "-c"),
    'for other in "$1"/*/root; do [ "$other" = "$2" ] || umount -q "$other"; done; shift 2; exec "$@"',
    "without-other-roots",
)
_FILL = "var/tmp/.testbed-fill"


def root(layout: Layout, host: Host) -> Path:
    """Where the host's root directory is mounted on the build machine while it runs."""
    return host.directory(layout) / "root"


def disk(layout: Layout, host: Host) -> Path:
    return host.directory(layout) / "disk.img"


def start(layout: Layout, host: Host) -> None:
    """Mount the host's root and boot it; returns as soon as systemd-nspawn runs."""
    require_programs("systemd-nspawn", "ip", "mount", "mke2fs", "unshare")
    stage.ensure(layout)
    if not host.host_network:
        _ensure_bridge(layout)
    _mount_root(layout, host)
    _write_identity(layout, host)
    console = host.console(layout).open("w")
    # nspawn's own small tmpfs on /tmp would hide the root disk's /tmp, which a bare-metal Debian has.
    environment = {**os.environ, "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}
    process = subprocess.Popen(
        [*_WITHOUT_OTHER_ROOTS, str(layout.hosts), str(root(layout, host)), *argv(layout, host)],
        stdin=subprocess.DEVNULL,
        stdout=console,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: _enter_own_cgroup(host.name),
    )
    host.started(process.pid)


def argv(layout: Layout, host: Host) -> list[str]:
    """The systemd-nspawn command line."""
    line = [
        "systemd-nspawn",
        "--quiet",
        "--boot",
        f"--directory={root(layout, host)}",
        f"--machine={host.name}",
        f"--uuid={machine_id(host.name)}",
        "--settings=no",
        "--register=no",
        "--console=pipe",
        "--link-journal=no",
        "--resolv-conf=" + ("copy-host" if host.host_network else "off"),
        f"--bind-ro={layout.stand_ins}:/opt/llmfleet-testbed",
        f"--bind-ro={layout.wheels}:/var/cache/llmfleet/wheels",
        f"--bind-ro={layout.dist}:/var/cache/llmfleet/dist",
        f"--bind-ro={layout.models}:/var/cache/llmfleet/models",
    ]
    if not _systemd_runs_here():
        line.append("--keep-unit")
    if not host.host_network:
        line.append(f"--network-bridge={BRIDGE}")
    return line


def stop(layout: Layout, host: Host) -> None:
    """Power off in good order, by force when that takes too long, and unmount."""
    if host.running():
        if "hang" in host.faults:
            _signal_all(host, signal.SIGCONT)
        leader = _leader(host)
        if leader:
            os.kill(leader, signal.SIGRTMIN + 4)  # systemd's "power off"
        try:
            wait_until(lambda: not host.running(), f"{host.name} powers off", seconds=60)
        except TestbedError:
            cut_power(layout, host)
    _unmount_root(layout, host)


def cut_power(layout: Layout, host: Host) -> None:
    """Kill the container's first process: the kernel takes all others with it, nothing is stopped in order."""
    leader = _leader(host)
    if leader:
        os.kill(leader, signal.SIGKILL)
    else:
        host.signal(signal.SIGKILL)
    wait_until(lambda: not host.running(), f"{host.name} is dead", seconds=30)
    _unmount_root(layout, host)


def break_(layout: Layout, host: Host, fault: str) -> None:
    """Bring about a fault of `FAULTS` on a running host."""
    if fault == "network":
        _set_link(host, "down")
    elif fault == "hang":
        _signal_all(host, signal.SIGSTOP)
    elif fault == "power":
        cut_power(layout, host)
    elif fault == "disk-full":
        fill_disk(root(layout, host) / _FILL)


def mend(layout: Layout, host: Host, fault: str) -> None:
    """Take a fault back (all but ``power``, which is a start)."""
    if fault == "network":
        _set_link(host, "up")
    elif fault == "hang":
        _signal_all(host, signal.SIGCONT)
    elif fault == "disk-full":
        (root(layout, host) / _FILL).unlink(missing_ok=True)


def delete(layout: Layout, host: Host) -> None:
    """Remove what a stopped host left outside its directory."""
    _unmount_root(layout, host)
    for group in (mount / "llmfleet" / host.name for mount in _systemd_hierarchies()):
        for inner in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                inner.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()


def keep_layer(layout: Layout, host: Host, snapshot: Snapshot) -> None:
    """Turn a stopped host's disk into the snapshot's layer; the host goes on with a new disk above it."""
    target = layout.snapshots / snapshot.id
    target.mkdir(parents=True, exist_ok=True)
    disk(layout, host).rename(target / "disk.img")


def fill_disk(path: Path) -> None:
    """Take all free blocks of the file system that holds ``path`` for one file there."""
    with path.open("wb") as file:
        step, offset = 1 << 30, 0
        while step >= 4096:
            try:
                os.posix_fallocate(file.fileno(), offset, step)
                offset += step
            except OSError:
                step //= 2


def remove_bridge() -> None:
    """Remove the bridge when nothing is left on it (a testbed in another state directory may use it too)."""
    bridge = Path(f"/sys/class/net/{BRIDGE}")
    if bridge.exists() and not any((bridge / "brif").iterdir()):
        run(["ip", "link", "del", BRIDGE])


def _systemd_runs_here() -> bool:
    return Path("/run/systemd/system").is_dir()


def _ensure_bridge(layout: Layout) -> None:
    with locked(layout.lock("bridge")):
        if not Path(f"/sys/class/net/{BRIDGE}").exists():
            run(["ip", "link", "add", BRIDGE, "type", "bridge"])
        addresses = run(["ip", "-o", "-4", "addr", "show", "dev", BRIDGE]).stdout
        if f" {BRIDGE_ADDRESS}/24 " not in addresses:
            run(["ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE])
        run(["ip", "link", "set", BRIDGE, "up"])


def _mounted(path: Path) -> bool:
    return any(line.split()[1] == str(path) for line in Path("/proc/self/mounts").read_text().splitlines())


@contextlib.contextmanager
def _loop_mounts(directory: Path, images: list[tuple[Path, str]]) -> Iterator[list[Path]]:
    """Mount disk files at numbered directories for the time it takes to stack an overlay on them.

    The overlay keeps the file systems alive by itself afterwards, so that one mount is all there is to clean up.
    """
    points: list[Path] = []
    try:
        for number, (file, options) in enumerate(images):
            point = directory / f"layer{number}"
            point.mkdir(exist_ok=True)
            run(["mount", "-o", f"loop,{options}", str(file), str(point)])
            points.append(point)
        yield points
    finally:
        for point in points:
            run(["umount", str(point)])


def _mount_root(layout: Layout, host: Host) -> None:
    if _mounted(root(layout, host)):
        return
    directory, own = host.directory(layout), disk(layout, host)
    root(layout, host).mkdir(parents=True, exist_ok=True)
    if not own.exists():
        unfinished = own.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        with unfinished.open("wb") as file:
            file.truncate(host.disk_gb << 30)
        run(["mke2fs", "-q", "-t", "ext4", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(unfinished)])
        unfinished.rename(own)
    below = load_snapshot(layout, host.base).layers if host.base else []
    images = [(own, "rw"), *((layout.snapshots / layer / "disk.img", "ro,noload") for layer in below)]
    with _loop_mounts(directory, images) as points:
        upper, work = points[0] / "upper", points[0] / "work"
        upper.mkdir(exist_ok=True)
        work.mkdir(exist_ok=True)
        rootfs = Image(layout.images / host.image).rootfs
        lower = ":".join([*(str(point / "upper") for point in points[1:]), str(rootfs)])
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        run(["mount", "-t", "overlay", "overlay", "-o", options, str(root(layout, host))])


def _unmount_root(layout: Layout, host: Host) -> None:
    if _mounted(root(layout, host)):
        run(["umount", str(root(layout, host))])


def _write_identity(layout: Layout, host: Host) -> None:
    top = root(layout, host)
    write_atomically(top / "etc/hostname", f"{host.name}\n")
    write_atomically(top / "etc/hosts", f"127.0.0.1 localhost\n{host.address} {host.name}\n")
    write_atomically(top / "etc/machine-id", f"{machine_id(host.name)}\n", 0o444)
    # Not a --bind of nspawn's: it mounts /sys anew after its binds, on top of anything below there.
    (top / "etc/fstab").write_text(f"{NODE_TREE} /sys/devices/system/node none bind,ro 0 0\n")
    network = top / "etc/systemd/network/05-host0.network"
    network_daemon = top / "etc/systemd/system/systemd-networkd.service"
    sshd = top / "etc/ssh/sshd_config.d/05-testbed-port.conf"
    for path in (network, sshd):
        path.unlink(missing_ok=True)
    if host.host_network:
        # The host must not configure the build machine's interfaces, and only the build machine may reach its ssh.
        if not network_daemon.is_symlink():
            network_daemon.symlink_to("/dev/null")
        sshd.write_text(f"Port {host.port}\nListenAddress 127.0.0.1\n")
    else:
        if network_daemon.is_symlink():
            network_daemon.unlink()
        network.write_text(
            f"[Match]\nName=host0\n[Network]\nAddress={host.address}/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
        )


def _enter_own_cgroup(name: str) -> None:
    """Give the container a cgroup of its own in the hierarchies that its systemd keeps its units in.

    Without a systemd here to do that, two containers would both take the root group for theirs, and one's systemd
    would find the other's processes in its units. The v1 controllers stay as they are: a container cannot write
    them, and a group there would only give all of a host's processes together the CPU share of one process.
    """
    if _systemd_runs_here():
        return
    for mount in _systemd_hierarchies():
        group = mount / "llmfleet" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))


def _systemd_hierarchies() -> list[Path]:
    """Where cgroup v2 and the v1 hierarchy named systemd are mounted."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(point))
    return found


def _leader(host: Host) -> int:
    """Pid, seen from here, of the container's first process; 0 when there is none."""
    if not host.running():
        return 0
    for task in Path(f"/proc/{host.pid}/task").glob("*/children"):
        for child in task.read_text().split():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{child}/status").read_text()
                if re.search(r"^NSpid:.*\t1$", status, flags=re.MULTILINE):
                    return int(child)
    return 0


def _members(leader: int) -> list[int]:
    """Every process in the leader's pid namespace (and in namespaces nested in it)."""
    found = [leader]
    known = {leader}
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    for pid in found:
        for child in parents.get(pid, []):
            if child not in known:
                known.add(child)
                found.append(child)
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _signal_all(host: Host, number: signal.Signals) -> None:
    """Stop or continue all of the container's processes; works on every cgroup version, unlike the freezer."""
    leader = _leader(host)
    if not leader:
        raise TestbedError(f"{host.name} has no first process; it is not running")

    def done() -> bool:
        pids = [pid for pid in _members(leader) if (_state(pid) not in "TtZ") == (number == signal.SIGSTOP)]
        pids = [pid for pid in pids if _state(pid) not in ("Z", "gone")]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return not pids

    wait_until(done, f"all of {host.name}'s processes take {number.name}", seconds=20, interval=0.05)


def _set_link(host: Host, state: str) -> None:
    """Pull or plug the host's network cable: the build machine's end of its interface."""
    if host.host_network:
        raise TestbedError(f"{host.name} is on the build machine's own network; start it without --host-network")
    own_end = Path(f"/proc/{_leader(host)}/root/sys/class/net/host0/iflink")
    number = own_end.read_text().strip()
    for link in Path("/sys/class/net").iterdir():
        if (link / "ifindex").read_text().strip() == number:
            run(["ip", "link", "set", link.name, state])
            return
    raise TestbedError(f"no interface with index {number} on this machine: {host.name}'s network is already gone")
