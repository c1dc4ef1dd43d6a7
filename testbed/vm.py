# SPDX-License-Identifier: Apache-2.0
"""Hosts as QEMU machines: two real NUMA nodes, PCI devices with NUMA affinity, cgroup v2, a kernel of their own.

``tcg`` emulates the processor and runs anywhere, slowly; ``kvm`` is the same machine on hardware virtualisation.
The GPUs are QEMU's ``edu`` devices (PCI 1234:11e8): they have an address and a node and can be lost, no more.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from testbed import image as images
from testbed import stage
from testbed.host import Host, Snapshot, load_snapshot, ssh_argv
from testbed.image import Image
from testbed.layout import Layout, mac, machine_id, ssh_port, vm_lan_address
from testbed.nspawn import fill_disk
from testbed.shell import TestbedError, locked, require_programs, run, say, wait_until, write_atomically

FAULTS = ("network", "hang", "power", "disk-full", "gpu-lost")
DEFAULT_MEMORY_MB = 1536
LAN = "230.77.0.1:17777"  # multicast group on loopback that carries the network between virtual machines
KVM_TRIAL_SECONDS = 60
_CPUS = 2
_FILL = "/var/tmp/.testbed-fill"  # noqa: S108 (a path in the guest)


def disk(layout: Layout, host: Host) -> Path:
    return host.directory(layout) / "disk.qcow2"


def argv(layout: Layout, host: Host, stand_ins: Path) -> list[str]:
    """The QEMU command line; ``stand_ins`` is the read-only disk seen at /opt/llmfleet-testbed."""
    image, directory = Image(layout.images / host.image), host.directory(layout)
    half = (host.memory_mb or DEFAULT_MEMORY_MB) // 2
    forwards = [f"tcp:127.0.0.1:{ssh_port(host.index)}-:22"]
    forwards += [f"tcp:127.0.0.1:{here}-:{there}" for here, there in (f.split(":") for f in host.forwards)]
    kernel_line = (
        f"root=LABEL=root rw console=ttyS0 quiet systemd.hostname={host.name} "
        f"systemd.machine_id={machine_id(host.name)} llmfleet.lan={vm_lan_address(host.index)}/24"
    )
    line = ["qemu-system-x86_64", "-name", host.name, "-machine", "q35,usb=off,vmport=off,hpet=off"]
    if host.backend == "kvm":
        line += ["-accel", "kvm", "-cpu", "host"]
    else:
        line += ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem"]
    line += ["-m", str(2 * half), "-smp", f"{_CPUS},sockets=2,cores={_CPUS // 2},threads=1"]
    for node in (0, 1):
        line += ["-object", f"memory-backend-ram,id=m{node},size={half}M"]
        line += ["-numa", f"node,nodeid={node},cpus={node},memdev=m{node}"]
    line += ["-numa", "dist,src=0,dst=1,val=21", "-numa", "dist,src=1,dst=0,val=21"]
    line += ["-nodefaults", "-no-user-config", "-display", "none"]
    line += ["-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", kernel_line]
    # Flushes are ignored: what these disks must survive is a guest's power cut, not the build machine's.
    line += ["-drive", f"if=none,id=d0,file={disk(layout, host)},format=qcow2,cache=unsafe,discard=unmap"]
    line += ["-device", "virtio-blk-pci,drive=d0"]
    line += ["-drive", f"if=none,id=d1,file={stand_ins},format=raw,readonly=on"]
    line += ["-device", "virtio-blk-pci,drive=d1"]
    line += ["-netdev", ",".join(["user", "id=n0", *(f"hostfwd={forward}" for forward in forwards)])]
    line += ["-device", f"virtio-net-pci,netdev=n0,mac={mac('wan', host.index)},romfile="]
    line += ["-netdev", f"socket,id=n1,mcast={LAN},localaddr=127.0.0.1"]
    line += ["-device", f"virtio-net-pci,netdev=n1,mac={mac('lan', host.index)},romfile="]
    line += ["-device", "virtio-rng-pci"]
    line += ["-chardev", f"file,id=console,path={host.console(layout)}", "-serial", "chardev:console"]
    line += ["-qmp", f"unix:{directory / 'qmp.sock'},server=on,wait=off"]
    line += ["-monitor", f"unix:{directory / 'monitor.sock'},server=on,wait=off"]
    for node in (0, 1) if host.gpus_per_node else ():
        line += ["-device", f"pxb-pcie,id=pxb{node},bus_nr={64 * (node + 1)},bus=pcie.0,numa_node={node}"]
        for gpu in range(host.gpus_per_node):
            port = f"id=rp{node}{gpu},bus=pxb{node},chassis={10 + 16 * node + gpu},slot={gpu},addr={gpu:x}.0"
            line += ["-device", f"pcie-root-port,{port}", "-device", f"edu,id=gpu{node}{gpu},bus=rp{node}{gpu}"]
    return line


def start(layout: Layout, host: Host) -> None:
    """Make the host's disk if it has none and start QEMU; returns as soon as it runs."""
    require_programs("qemu-system-x86_64", "qemu-img", "mke2fs")
    stage.ensure(layout)
    image = Image(layout.images / host.image)
    images.ensure_disk(layout, image)
    directory = host.directory(layout)
    directory.mkdir(parents=True, exist_ok=True)
    if not disk(layout, host).exists():
        below, kind = (image.disk, "raw")
        if host.base:
            below, kind = layout.snapshots / load_snapshot(layout, host.base).layers[0] / "disk.qcow2", "qcow2"
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", kind, "-b", str(below), str(disk(layout, host))])
    line = argv(layout, host, _stand_ins_disk(layout))
    write_atomically(directory / "command", shlex.join(line) + "\n")
    host.console(layout).unlink(missing_ok=True)
    with (directory / "qemu.log").open("w") as log:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    host.started(process.pid)
    try:
        process.wait(timeout=1)  # a command line that QEMU refuses ends at once
    except subprocess.TimeoutExpired:
        return
    raise TestbedError(f"QEMU did not start: {(directory / 'qemu.log').read_text().strip()}")


def stop(layout: Layout, host: Host) -> None:
    """Power off in good order, by force when that takes too long."""
    if not host.running():
        return
    if "hang" in host.faults:
        host.signal(signal.SIGCONT)
    if not {"network", "hang"} & set(host.faults):
        # By ssh and not by the power button: that would need an ACPI daemon in the guest to be heard.
        with contextlib.suppress(TestbedError):
            run(ssh_argv(layout, host, ["systemctl", "poweroff"]), check=False, timeout=60)
    else:
        _monitor(layout, host, "system_powerdown")
    try:
        wait_until(lambda: not host.running(), f"{host.name} powers off", seconds=120)
    except TestbedError:
        cut_power(layout, host)


def cut_power(layout: Layout, host: Host) -> None:
    """Kill QEMU: what the guest had not written out is lost."""
    del layout
    host.signal(signal.SIGKILL)
    wait_until(lambda: not host.running(), f"{host.name} is dead", seconds=30)


def delete(layout: Layout, host: Host) -> None:
    """Nothing of a stopped machine lies outside its directory."""
    del layout, host


def keep_layer(layout: Layout, host: Host, snapshot: Snapshot) -> None:
    """Turn a stopped machine's disk into the snapshot's layer; the machine goes on with a new disk above it."""
    target = layout.snapshots / snapshot.id
    target.mkdir(parents=True, exist_ok=True)
    disk(layout, host).rename(target / "disk.qcow2")


def break_(layout: Layout, host: Host, fault: str) -> None:
    """Bring about a fault of `FAULTS` on a running host; ``gpu-lost`` comes as ``gpu-lost:SLOT``."""
    if fault == "network":
        _monitor(layout, host, "set_link n0 off", "set_link n1 off")
    elif fault == "hang":
        host.signal(signal.SIGSTOP)
    elif fault == "power":
        cut_power(layout, host)
    elif fault == "disk-full":
        program = f"import os\nfrom pathlib import Path\n{inspect.getsource(fill_disk)}\nfill_disk(Path({_FILL!r}))\n"
        run(ssh_argv(layout, host, ["python3", "-"]), text_in=program, timeout=300)
    else:
        slot = fault.partition(":")[2]
        qmp(layout, host, "device_del", id=f"gpu{slot}")
        # The guest presses the slot's button for five seconds before it lets go.
        wait_until(lambda: not _device_present(layout, host, slot), f"GPU {slot} is unplugged", seconds=60)


def mend(layout: Layout, host: Host, fault: str) -> None:
    """Take a fault back (all but ``power``, which is a start)."""
    if fault == "network":
        _monitor(layout, host, "set_link n0 on", "set_link n1 on")
    elif fault == "hang":
        host.signal(signal.SIGCONT)
    elif fault == "disk-full":
        run(ssh_argv(layout, host, ["rm", "-f", _FILL]), timeout=120)
    elif fault.startswith("gpu-lost:"):
        slot = fault.partition(":")[2]
        qmp(layout, host, "device_add", driver="edu", id=f"gpu{slot}", bus=f"rp{slot}")


def best_accelerator(layout: Layout, image: Image) -> str:
    """``kvm`` when a machine really boots with it here, else ``tcg``; the answer is kept with the image.

    The device file alone says nothing: there are hosts that have it and cannot run a kernel with it.
    """
    answer = image.path / "accelerator"
    if answer.exists():
        return answer.read_text().strip()
    found = "tcg"
    if Path("/dev/kvm").exists():
        images.ensure_disk(layout, image)
        with locked(layout.lock("kvm-trial")):
            say(f"trying whether KVM can boot the image, at most {KVM_TRIAL_SECONDS} s")
            found = "kvm" if _kvm_boots(layout, image) else "tcg"
    say(f"virtual machines use {found} here")
    write_atomically(answer, f"{found}\n")
    return found


def _kvm_boots(layout: Layout, image: Image) -> bool:
    console = layout.root / "kvm-trial.log"
    console.unlink(missing_ok=True)
    process = subprocess.Popen(
        [
            "qemu-system-x86_64",
            *("-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "512", "-nodefaults", "-display", "none"),
            *("-no-reboot", "-kernel", str(image.kernel), "-initrd", str(image.initrd)),
            # The initrd's shell is enough of a boot: it shows that the kernel and a user program run.
            *("-append", "console=ttyS0 break=top panic=-1"),
            *("-chardev", f"file,id=console,path={console}", "-serial", "chardev:console"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + KVM_TRIAL_SECONDS
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if console.exists() and "(initramfs)" in console.read_text(errors="replace"):
                return True
            time.sleep(0.2)
        return False
    finally:
        process.kill()
        process.wait()


def _stand_ins_disk(layout: Layout) -> Path:
    """A small ext4 disk with the staged stand-ins, made again when they change.

    Each content has a file of its own: running machines keep the one they were started with, also when it is unlinked.
    """
    stamp = (layout.root / "stand_ins.stamp").read_text()[:16]
    target = layout.root / f"stand_ins-{stamp}.raw"
    with locked(layout.lock("stand-ins-disk")):
        if not target.exists():
            unfinished = target.with_suffix(".new")
            unfinished.unlink(missing_ok=True)
            run(["mke2fs", "-q", "-t", "ext4", "-L", "stand-ins", "-d", str(layout.stand_ins), str(unfinished), "64M"])
            unfinished.rename(target)
            for old in set(layout.root.glob("stand_ins-*.raw")) - {target}:
                old.unlink()
    return target


def qmp(layout: Layout, host: Host, command: str, **arguments: Any) -> Any:
    """Send one QMP command and return its answer; raises `TestbedError` when QEMU refuses it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        _connect(connection, host.directory(layout) / "qmp.sock")
        stream = connection.makefile("rw")
        stream.readline()
        for name, values in (("qmp_capabilities", {}), (command, arguments)):
            stream.write(json.dumps({"execute": name, "arguments": values}) + "\n")
            stream.flush()
            while True:
                answer = json.loads(stream.readline())
                if "error" in answer:
                    raise TestbedError(f"{host.name}: QEMU refused {name}: {answer['error']['desc']}")
                if "return" in answer:
                    break
        return answer["return"]


def _connect(connection: socket.socket, path: Path) -> None:
    """Connect to a Unix socket through /proc/self/fd, since its path may be longer than an address may be."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _monitor(layout: Layout, host: Host, *commands: str) -> None:
    for command in commands:
        answer = qmp(layout, host, "human-monitor-command", **{"command-line": command})
        if answer.strip():
            raise TestbedError(f"{host.name}: QEMU monitor said to {command!r}: {answer.strip()}")


def _device_present(layout: Layout, host: Host, slot: str) -> bool:
    devices = qmp(layout, host, "qom-list", path="/machine/peripheral")
    return any(device["name"] == f"gpu{slot}" for device in devices)
