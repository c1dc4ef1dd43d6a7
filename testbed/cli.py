# SPDX-License-Identifier: Apache-2.0
"""Command line of the testbed: ``python -m testbed``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from testbed import commands, stage
from testbed.host import Host, all_snapshots, load_all, ssh_argv
from testbed.layout import Layout
from testbed.shell import TestbedError, say

VM_ONLY = ("memory", "gpus_per_node", "forward")


def parser() -> argparse.ArgumentParser:
    """The command line; every option here is spelled out in docs/testbed.md."""
    top = argparse.ArgumentParser(
        prog="python -m testbed", description="Build, boot, break and remove the hosts that the project is tested on."
    )
    commands_ = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, host: bool = True) -> argparse.ArgumentParser:
        sub = commands_.add_parser(name, help=text, description=text, allow_abbrev=False)
        if host:
            sub.add_argument("name", metavar="NAME", help="host")
        return sub

    def add_json(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--json", action="store_true", help="print the result as JSON")

    add_json(add("image", "build the base image if there is none for this recipe", host=False))
    up = add("up", "make and boot a host, or find it running")
    up.add_argument("--backend", choices=("nspawn", "tcg", "kvm", "vm"), default="nspawn", help="vm: kvm if it works")
    up.add_argument("--index", type=int, help="2 to 254, decides addresses and ports; default: the first free one")
    up.add_argument("--from", dest="base", default="", metavar="HOST/TAG", help="start from a snapshot")
    up.add_argument("--disk", type=int, default=32, metavar="GB", help="size of an nspawn host's disk (default 32)")
    up.add_argument("--host-network", action="store_true", help="nspawn on the build machine's own network")
    up.add_argument("--memory", type=int, metavar="MB", help="virtual machines: memory of both nodes (default 1536)")
    up.add_argument("--gpus-per-node", type=int, metavar="N", help="virtual machines: PCI devices a node (default 2)")
    up.add_argument("--forward", action="append", metavar="HOST:GUEST", help="virtual machines: a port of 127.0.0.1")
    add_json(up)
    add_json(add("down", "stop and remove a host", host=False))
    down = commands_.choices["down"]
    down.add_argument("name", metavar="NAME", nargs="?", help="host")
    down.add_argument("--all", action="store_true", help="every host, and the bridge")
    reset = add("reset", "give a host a fresh disk and boot it")
    reset.add_argument("--to", default="", metavar="HOST/TAG", help="from now on start from this snapshot")
    add_json(reset)
    for name, text in (("snapshot", "keep a host's disk as HOST/TAG"), ("rm-snapshot", "remove a snapshot")):
        sub = add(name, text)
        sub.add_argument("tag", metavar="TAG")
        add_json(sub)
    add_json(add("list", "show hosts and snapshots", host=False))
    ssh = add("ssh", "run a command in a host as root, or open a shell")
    ssh.add_argument("remote", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="default: a shell")
    add("inventory", "print the running hosts as an Ansible inventory", host=False)
    for name, text in (("break", "bring about a fault"), ("mend", "take a fault back")):
        sub = add(name, text)
        sub.add_argument(
            "fault", metavar="FAULT", help="network, hang, power, disk-full; of virtual machines also gpu-lost"
        )
        sub.add_argument("slot", metavar="SLOT", nargs="?", default="", help="node and number, such as 10")
        add_json(sub)
    clean = add("clean", "remove every host and snapshot", host=False)
    clean.add_argument("--image", action="store_true", help="and the images")
    add_json(clean)
    model = add("model", "build the tiny model for engines without a GPU", host=False)
    add_json(model)
    return top


def wanted_host(layout: Layout, arguments: argparse.Namespace) -> Host:
    """The host that the arguments of ``up`` ask for; refuses options that its backend has not."""
    virtual = arguments.backend != "nspawn"
    if not virtual:
        for option in VM_ONLY:
            if getattr(arguments, option) is not None:
                raise TestbedError(f"--{option.replace('_', '-')} is for virtual machines; {arguments.name} is nspawn")
    elif arguments.host_network:
        raise TestbedError("--host-network is for nspawn hosts")
    if arguments.disk < 1:
        raise TestbedError(f"--disk {arguments.disk}: expected at least 1 (GB)")
    memory = 0 if not virtual else arguments.memory if arguments.memory is not None else 1536
    if virtual and memory < 512:
        raise TestbedError(f"--memory {memory}: expected at least 512 (MB, for both nodes together)")
    gpus = 0 if not virtual else arguments.gpus_per_node if arguments.gpus_per_node is not None else 2
    if not 0 <= gpus <= 8:
        raise TestbedError(f"--gpus-per-node {gpus}: expected 0 to 8")
    for forward in arguments.forward or []:
        ports = forward.split(":")
        if len(ports) != 2 or not all(port.isdigit() and 0 < int(port) < 65536 for port in ports):
            raise TestbedError(f"--forward {forward}: expected HOST:GUEST, two port numbers")
    return Host(
        name=arguments.name,
        backend=arguments.backend,
        index=arguments.index if arguments.index is not None else free_index(layout, arguments.name),
        image="",
        base=arguments.base,
        memory_mb=memory,
        gpus_per_node=gpus,
        disk_gb=arguments.disk,
        host_network=arguments.host_network,
        forwards=arguments.forward or [],
    )


def free_index(layout: Layout, name: str) -> int:
    """The index a host of that name has, else the lowest that no host has, from 100 up (lower ones are for scripts)."""
    taken = {host.index: host.name for host in load_all(layout)}
    for index, owner in taken.items():
        if owner == name:
            return index
    return next(index for index in range(100, 255) if index not in taken)


def _show(arguments: argparse.Namespace, changed: bool, result: dict[str, object] | None = None) -> int:
    if arguments.json:
        print(json.dumps({"changed": changed, **(result or {})}, indent=1))
    elif not changed:
        say("nothing to do")
    return 0


def _list(layout: Layout, as_json: bool) -> int:
    hosts = [commands.describe(host) for host in load_all(layout)]
    if as_json:
        print(json.dumps({"hosts": hosts, "snapshots": all_snapshots(layout)}, indent=1))
        return 0
    for host in hosts:
        state = "running" if host["running"] else "stopped"
        faults = host["faults"] if isinstance(host["faults"], list) else []
        where = f"{host['address']}:{host['port']}"
        print(f"{host['name']:16} {host['backend']:7} {where:16} {state} {' '.join(faults)}".rstrip())
    for snapshot in all_snapshots(layout):
        print(f"{snapshot:16} snapshot")
    return 0


def _run(layout: Layout, arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "image":
            built, changed = commands.build_image(layout)
            stage.ensure(layout)
            say(f"image {built.id} is ready in {built.path}")
            return _show(arguments, changed, {"image": built.id, "path": str(built.path)})
        case "up":
            wanted = wanted_host(layout, arguments)
            changed = commands.up(layout, wanted)
            return _show(arguments, changed, commands.describe(commands.existing(layout, arguments.name)))
        case "down":
            if arguments.all == bool(arguments.name):
                raise TestbedError("down takes either a host's name or --all")
            changed = commands.down_all(layout) if arguments.all else commands.down(layout, arguments.name)
            return _show(arguments, changed)
        case "reset":
            return _show(arguments, commands.reset(layout, arguments.name, arguments.to))
        case "snapshot":
            return _show(arguments, commands.snapshot(layout, arguments.name, arguments.tag))
        case "rm-snapshot":
            return _show(arguments, commands.remove_snapshot(layout, arguments.name, arguments.tag))
        case "list":
            return _list(layout, arguments.json)
        case "ssh":
            remote = arguments.remote[1:] if arguments.remote[:1] == ["--"] else arguments.remote
            line = ssh_argv(layout, commands.existing(layout, arguments.name), remote)
            os.execvp(line[0], line)  # noqa: S606
        case "inventory":
            print(commands.inventory(layout), end="")
            return 0
        case "break":
            return _show(arguments, commands.break_(layout, arguments.name, arguments.fault, arguments.slot))
        case "mend":
            return _show(arguments, commands.mend(layout, arguments.name, arguments.fault, arguments.slot))
        case "clean":
            return _show(arguments, commands.clean(layout, arguments.image))
        case "model":
            from testbed.stand_ins import tiny_model

            target = layout.models / "tiny-qwen2"
            changed = tiny_model.build(target)
            say(f"the tiny model is in {target}")
            return _show(arguments, changed, {"path": str(target)})
    raise TestbedError(f"unknown command {arguments.command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 1 with the reason on stderr."""
    arguments = parser().parse_args(argv)
    try:
        return _run(Layout.from_environment(), arguments)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("testbed: interrupted", file=sys.stderr)
        return 130
