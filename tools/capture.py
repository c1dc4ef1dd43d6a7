# SPDX-License-Identifier: Apache-2.0
"""Capture what planning reads of a host: ``python -m tools.capture HOST DIR``.

Writes ``DIR/sys``, ``DIR/proc`` and, with ``--model``, ``DIR/model/config.json``: trees that ``numa_info`` reads as it
reads the live host (``sysfs_root``, ``proc_root``). HOST is a destination of ssh, or ``local``. Nothing is installed or
written on the host, which needs Python 3.7 or newer and no root.

Nothing private is taken. ``tools/capture_on_host.py`` names every file that is read: sizes, CPU lists, distances and
counters of NUMA nodes; vendor, device, class and place of display controllers; memory limits; which CPUs and nodes are
allowed. No host name, serial number, UUID, user or process.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import (
    TopologyError,
    read_topology,
    slice_folders,
)

from tools import ROOT

PROGRAM = ROOT / "tools" / "capture_on_host.py"
LOCAL = "local"
#: What a file of the archive may be called: nothing absolute, nothing that climbs, nothing that a shell minds.
NAME = re.compile(r"(?:sys|proc|model)(?:/(?!\.{1,2}(?:/|$))[\w.:\\@-]+)+")


class CaptureError(Exception):
    """The host could not be captured."""


def command(host: str, request: str, python: str, ssh_options: Sequence[str]) -> list[str]:
    """The command line that runs a program from stdin with one argument, here or on a host."""
    if host == LOCAL:
        return [sys.executable, "-I", "-", request]
    options = [word for option in ssh_options for word in ("-o", option)]
    # ssh gives its words to a shell on the host.
    return ["ssh", *options, "--", host, shlex.join([python, "-I", "-", request])]


def fetch(argv: Sequence[str]) -> bytes:
    """The archive that the program on the host answers with. Raises CaptureError."""
    try:
        done = subprocess.run(argv, input=PROGRAM.read_bytes(), capture_output=True, check=False)
    except OSError as error:
        raise CaptureError(f"cannot run {argv[0]}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise CaptureError(f"{argv[0]} ended with status {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def unpack(archive: bytes) -> dict[str, bytes]:
    """Name -> content of an archive that a host has sent. Raises CaptureError for anything but files below DIR."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isreg() else None
                if stream is None or NAME.fullmatch(member.name) is None:
                    raise CaptureError(f"the host sent {member.name!r}: expected files below sys, proc and model only")
                files[member.name] = stream.read()
    except tarfile.TarError as error:
        raise CaptureError(
            f"the host answered {archive[:60]!r}: expected an archive. A login script that prints breaks it; see "
            f"`ssh HOST true`, which must print nothing ({error})"
        ) from error
    return files


def save(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files below a folder that is empty or not there yet."""
    for name, content in sorted(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def capture(argv: Sequence[str] | None = None) -> str:
    """What ``python -m tools.capture`` does; returns the line that it prints. Raises CaptureError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.capture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host", metavar="HOST", help="destination as ssh takes it, or 'local'")
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write; must be empty or not exist")
    parser.add_argument("--ssh-option", action="append", default=[], metavar="KEY=VALUE", help="for ssh -o; repeatable")
    parser.add_argument("--python", default="python3", help="the host's Python (default: %(default)s)")
    parser.add_argument("--model", metavar="PATH", help="folder of a model on the host, to take its config.json too")
    parser.add_argument("--gpu-id", action="append", default=[], metavar="VENDOR:DEVICE", help="another device to take")
    parser.add_argument("--slice", default="llmfleet.slice", help="slice of the services (default: %(default)s)")
    parser.add_argument("--sysfs-root", default="/sys", help="on the host (default: %(default)s)")
    parser.add_argument("--proc-root", default="/proc", help="on the host (default: %(default)s)")
    args = parser.parse_args(argv)
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"{folder} is not an empty folder: name one that is, or that does not exist")
    try:
        request = {
            "sysfs_root": args.sysfs_root,
            "proc_root": args.proc_root,
            "gpu_ids": [entry.strip().lower() for entry in args.gpu_id],
            "slice_folders": slice_folders(args.slice),
            "model": args.model,
        }
        files = unpack(fetch(command(args.host, json.dumps(request), args.python, args.ssh_option)))
        save(files, folder)
        topology = read_topology(str(folder / "sys"), args.gpu_id, str(folder / "proc"), args.slice)
    except TopologyError as error:
        raise CaptureError(f"{error}. What was captured is not a host that can be planned.") from error
    nodes, gpus, limits = (len(topology[key]) for key in ("nodes", "gpus", "limits"))
    model = ", model/config.json" if args.model else ""
    return f"{folder}: {nodes} nodes, {gpus} GPUs, {limits} memory limits, {len(files)} files{model}"


def main() -> None:
    """Entry point of ``python -m tools.capture``."""
    try:
        print(capture())
    except CaptureError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
