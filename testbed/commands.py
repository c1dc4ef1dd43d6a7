# SPDX-License-Identifier: Apache-2.0
"""What the tool does to hosts. Every function is idempotent and returns whether it changed anything."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from testbed import image as images
from testbed import nspawn, stage, vm
from testbed.host import Host, Snapshot, all_snapshots, load, load_all, load_snapshot, ssh_argv, ssh_options
from testbed.layout import Layout, check_index, check_name, check_tag
from testbed.shell import TestbedError, locked, require_programs, require_root, run, say, tail, wait_until

# Seconds a host may take from start to a systemd that has reached its target. An emulated machine on a busy
# two-core build machine has been seen to take 70.
BOOT_SECONDS = {"nspawn": 120, "tcg": 900, "kvm": 180}


def existing(layout: Layout, name: str) -> Host:
    """The host of that name; an error that lists the hosts there are."""
    host = load(layout, name)
    if host is None:
        known = ", ".join(h.name for h in load_all(layout)) or "none"
        raise TestbedError(f"no host {name!r}; there are: {known}")
    return host


def build_image(layout: Layout) -> tuple[images.Image, bool]:
    """The base image and whether it had to be built; a build removes older images that nothing stands on."""
    image, built = images.ensure(layout)
    if built:
        used = {host.image for host in load_all(layout)}
        used |= {load_snapshot(layout, snapshot).image for snapshot in all_snapshots(layout)}
        images.remove(layout, keep={image.id, *used})
    return image, built


def up(layout: Layout, wanted: Host) -> bool:
    """Make and boot a host, or boot it again, or find it running; returns when its systemd has settled.

    ``wanted.backend`` may be ``vm``: KVM where the machine can boot with it, else emulation.
    """
    require_root()
    require_programs("ssh")
    check_index(wanted.index)
    with locked(layout.lock(f"host-{check_name(wanted.name)}")):
        host = load(layout, wanted.name)
        if host is None:
            image, _ = build_image(layout)
            if wanted.backend == "vm":
                wanted = replace(wanted, backend=vm.best_accelerator(layout, image))
            host = replace(wanted, image=image.id)
            if host.base:
                snapshot = load_snapshot(layout, host.base)
                if snapshot.kind != _kind(host):
                    raise TestbedError(f"snapshot {host.base} is of kind {snapshot.kind}, {host.name} is {_kind(host)}")
                host.image = snapshot.image
            _refuse_taken_index(layout, host)
            host.save(layout)
        else:
            _refuse_other_settings(host, wanted)
        if not host.running():
            _start(layout, host)
            return True
        stage.ensure(layout)  # the stand-ins it sees may have changed in the source tree
        if not host.faults:
            _wait_until_up(layout, host)  # a command that was interrupted may have left it half-way
        say(f"{host.name} is running" + (f" with faults: {', '.join(host.faults)}" if host.faults else ""))
        return False


def down(layout: Layout, name: str) -> bool:
    """Stop a host and remove it; its snapshots stay."""
    require_root()
    with locked(layout.lock(f"host-{check_name(name)}")):
        host = load(layout, name)
        if host is None:
            return False
        _stop(layout, host)
        _backend(host).delete(layout, host)
        host.forget(layout)
        say(f"{name} is removed")
    return True


def reset(layout: Layout, name: str, to: str = "") -> bool:
    """Give a host a fresh disk, from what it was made from or from the snapshot ``to``, and boot it."""
    require_root()
    with locked(layout.lock(f"host-{check_name(name)}")):
        host = existing(layout, name)
        if to:
            snapshot = load_snapshot(layout, to)
            if snapshot.kind != _kind(host):
                raise TestbedError(f"snapshot {to} is of kind {snapshot.kind}, {name} is {_kind(host)}")
            host.base, host.image = to, snapshot.image
        _kill(layout, host)
        _backend(host).disk(layout, host).unlink(missing_ok=True)
        _start(layout, host)
    return True


def snapshot(layout: Layout, name: str, tag: str) -> bool:
    """Keep the host's disk as ``NAME/TAG``; the host is stopped for it and started again on top of the snapshot."""
    require_root()
    check_tag(tag)
    with locked(layout.lock(f"host-{check_name(name)}")):
        host = existing(layout, name)
        new_id = f"{name}/{tag}"
        if new_id in all_snapshots(layout):
            say(f"there is a snapshot {new_id}; remove it first to take it again")
            return False
        was_running = host.running()
        _stop(layout, host)
        below = load_snapshot(layout, host.base).layers if host.base else []
        kept = Snapshot(id=new_id, kind=_kind(host), image=host.image, layers=[new_id, *below])
        _backend(host).keep_layer(layout, host, kept)
        kept.save(layout)
        host.base = new_id
        host.save(layout)
        say(f"snapshot {new_id} is taken")
        if was_running:
            _start(layout, host)
    return True


def remove_snapshot(layout: Layout, name: str, tag: str) -> bool:
    """Remove ``NAME/TAG``; refused while a host or another snapshot stands on it."""
    require_root()
    gone = f"{check_name(name)}/{check_tag(tag)}"
    if gone not in all_snapshots(layout):
        return False
    users = [h.name for h in load_all(layout) if h.base and gone in load_snapshot(layout, h.base).layers]
    users += [s for s in all_snapshots(layout) if s != gone and gone in load_snapshot(layout, s).layers]
    if users:
        raise TestbedError(f"snapshot {gone} is in use by {', '.join(users)}; take those down or remove them first")
    shutil.rmtree(layout.snapshots / gone)
    return True


def break_(layout: Layout, name: str, fault: str, slot: str = "") -> bool:
    """Bring about a fault on a running host."""
    require_root()
    with locked(layout.lock(f"host-{check_name(name)}")):
        host = existing(layout, name)
        backend, label = _backend(host), _fault_label(host, fault, slot)
        if label in host.faults:
            say(f"{name} has the fault {label} already")
            return False
        if not host.running():
            raise TestbedError(f"{name} is not running; start it with: python -m testbed up {name}")
        backend.break_(layout, host, label)
        host.faults.append(label)
        host.save(layout)
        say(f"{name} now has the fault {label}")
    return True


def mend(layout: Layout, name: str, fault: str, slot: str = "") -> bool:
    """Take a fault back; after ``power`` that means to boot the host again from the disk as it was left."""
    require_root()
    with locked(layout.lock(f"host-{check_name(name)}")):
        host = existing(layout, name)
        label = _fault_label(host, fault, slot)
        if label not in host.faults:
            return False
        if label == "power":
            host.faults.remove(label)
            _start(layout, host)
        else:
            _backend(host).mend(layout, host, label)
            host.faults.remove(label)
            host.save(layout)
        say(f"{name} no longer has the fault {label}")
    return True


def down_all(layout: Layout) -> bool:
    """Remove every host and the bridge."""
    require_root()
    changed = [down(layout, host.name) for host in load_all(layout)]
    with locked(layout.lock("bridge")):
        nspawn.remove_bridge()
    return any(changed)


def clean(layout: Layout, with_images: bool) -> bool:
    """Remove every host and snapshot, and the images too when asked; downloads and the ssh key stay."""
    changed = down_all(layout) or bool(all_snapshots(layout))
    shutil.rmtree(layout.snapshots, ignore_errors=True)
    if with_images:
        changed = changed or any(layout.images.glob("*"))
        images.remove(layout, keep=set())
    return changed


def describe(host: Host) -> dict[str, object]:
    """A host as ``list --json`` and ``up --json`` show it."""
    return {
        "name": host.name,
        "backend": host.backend,
        "index": host.index,
        "address": host.address,
        "port": host.port,
        "running": host.running(),
        "faults": host.faults,
        "base": host.base,
        "image": host.image,
    }


def inventory(layout: Layout) -> str:
    """The running hosts as an Ansible inventory in YAML."""
    lines = ["---", "all:", "  hosts:"]
    running = [host for host in load_all(layout) if host.running()]
    if not running:
        return "---\nall:\n  hosts: {}\n"
    for host in running:
        lines += [
            f"    {host.name}:",
            f"      ansible_host: {host.address}",
            f"      ansible_port: {host.port}",
            "      ansible_user: root",
            f"      ansible_ssh_private_key_file: {layout.ssh_key}",
            f"      ansible_ssh_common_args: {' '.join(ssh_options())}",
        ]
    return "\n".join(lines) + "\n"


def in_host(layout: Layout, host: Host, command: Sequence[str], seconds: float = 30) -> tuple[int, str]:
    """Run a command in the host as root; its status (255 when ssh itself failed) and what it printed."""
    try:
        done = run(ssh_argv(layout, host, command), check=False, timeout=seconds)
    except TestbedError as error:
        return 255, str(error)
    return done.returncode, f"{done.stdout}{done.stderr}".strip()


class Backend(Protocol):
    """What `nspawn` and `vm` have in common: both modules are backends."""

    FAULTS: tuple[str, ...]

    def start(self, layout: Layout, host: Host) -> None: ...
    def stop(self, layout: Layout, host: Host) -> None: ...
    def cut_power(self, layout: Layout, host: Host) -> None: ...
    def delete(self, layout: Layout, host: Host) -> None: ...
    def disk(self, layout: Layout, host: Host) -> Path: ...
    def keep_layer(self, layout: Layout, host: Host, snapshot: Snapshot) -> None: ...
    def break_(self, layout: Layout, host: Host, fault: str) -> None: ...
    def mend(self, layout: Layout, host: Host, fault: str) -> None: ...


def _backend(host: Host) -> Backend:
    return vm if host.is_vm else nspawn


def _kind(host: Host) -> str:
    return "vm" if host.is_vm else "nspawn"


def _start(layout: Layout, host: Host) -> None:
    """Start a host that does not run and wait until its systemd has settled."""
    host.faults = []
    say(f"starting {host.name} ({host.backend}, index {host.index})")
    _backend(host).start(layout, host)
    host.save(layout)
    _wait_until_up(layout, host)
    say(f"{host.name} is up: ssh -i {layout.ssh_key} -p {host.port} root@{host.address}")


def _wait_until_up(layout: Layout, host: Host) -> None:
    """Wait until the host answers ssh and its systemd has settled; units that failed are named, not refused."""
    limit = BOOT_SECONDS[host.backend]

    def explain() -> str:
        return f"end of {host.console(layout)}:\n{tail(host.console(layout))}"

    def answers() -> bool:
        if not host.running():
            raise TestbedError(f"{host.name} died while starting; {explain()}")
        return _ssh_listens(host)

    wait_until(answers, f"{host.name} answers ssh at {host.address} port {host.port}", seconds=limit, explain=explain)
    state = ""

    def settled() -> bool:
        nonlocal state
        _, output = in_host(layout, host, ["systemctl", "is-system-running"])
        state = output.splitlines()[-1] if output else ""
        return state in ("running", "degraded")

    wait_until(
        settled, f"{host.name}'s systemd settles", seconds=limit, explain=lambda: f"it says {state!r}\n{explain()}"
    )
    if state == "degraded":
        _, failed = in_host(layout, host, ["systemctl", "--failed", "--no-legend", "--plain"])
        say(f"{host.name}: units failed at boot:\n{failed}")


def _stop(layout: Layout, host: Host) -> None:
    if host.running():
        say(f"stopping {host.name}")
    _backend(host).stop(layout, host)
    host.faults = []


def _kill(layout: Layout, host: Host) -> None:
    """Stop a host whose disk is about to go: nothing is left to save."""
    if host.running():
        _backend(host).cut_power(layout, host)
    else:
        _backend(host).stop(layout, host)


def _ssh_listens(host: Host) -> bool:
    """Whether an ssh server greets at the host's address (QEMU itself accepts connections before the guest does)."""
    try:
        with socket.create_connection((host.address, host.port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _fault_label(host: Host, fault: str, slot: str) -> str:
    """``gpu-lost`` is one fault a slot and written ``gpu-lost:10``; others stand for themselves."""
    known = _backend(host).FAULTS
    if fault not in known:
        raise TestbedError(f"{host.name} ({host.backend}) has no fault {fault!r}; it has: {', '.join(known)}")
    if fault != "gpu-lost":
        if slot:
            raise TestbedError(f"fault {fault} takes no slot")
        return fault
    slots = [f"{node}{number}" for node in (0, 1) for number in range(host.gpus_per_node)]
    if slot not in slots:
        raise TestbedError(f"gpu-lost: slot {slot!r}; {host.name} has: {', '.join(slots) or 'none'}")
    return f"gpu-lost:{slot}"


def _refuse_taken_index(layout: Layout, host: Host) -> None:
    for other in load_all(layout):
        if other.index == host.index and other.name != host.name:
            raise TestbedError(f"index {host.index} belongs to {other.name}; choose another for {host.name}")


def _refuse_other_settings(host: Host, wanted: Host) -> None:
    differences = [
        f"{key} is {getattr(host, key)!r}, wanted {getattr(wanted, key)!r}"
        for key in ("index", "base", "memory_mb", "gpus_per_node", "disk_gb", "host_network", "forwards")
        if getattr(host, key) != getattr(wanted, key)
    ]
    if wanted.backend not in (host.backend, "vm" if host.is_vm else "nspawn"):
        differences.append(f"backend is {host.backend!r}, wanted {wanted.backend!r}")
    if differences:
        raise TestbedError(f"{host.name} exists with other settings ({'; '.join(differences)}); take it down first")
