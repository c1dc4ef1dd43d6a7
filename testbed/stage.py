# SPDX-License-Identifier: Apache-2.0
"""Puts the stand-ins where hosts see them: a built copy, brought up to date in place, never in the source tree."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from testbed.layout import Layout
from testbed.shell import locked, require_programs, run, say, write_atomically
from testbed.stand_ins import node_tree

SOURCE = Path(__file__).resolve().parent / "stand_ins"


def ensure(layout: Layout) -> None:
    """Bring the staged stand-ins, the made-up node tree and the shared directories up to date."""
    with locked(layout.lock("stage")):
        for directory in (layout.wheels, layout.models, layout.dist, layout.stand_ins, layout.node_tree):
            directory.mkdir(parents=True, exist_ok=True)
        _stage_stand_ins(layout)
        _stage_node_tree(layout)


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()


def _stage_stand_ins(layout: Layout) -> None:
    content = {
        str(path.relative_to(SOURCE)): path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    stamp, digest = layout.root / "stand_ins.stamp", _digest(content)
    if stamp.exists() and stamp.read_text() == digest:
        return
    say(f"building the stand-ins in {layout.stand_ins}")
    # In place: running hosts have this very directory mounted. Files are replaced, never rewritten while in use.
    for name, data in content.items():
        write_atomically(layout.stand_ins / name, data, (SOURCE / name).stat().st_mode & 0o755)
    for script in sorted(layout.stand_ins.glob("*/build.sh")):
        require_programs("gcc")
        run(["sh", str(script), str(script.parent)])
    write_atomically(stamp, digest)


def _stage_node_tree(layout: Layout) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    meminfo = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        meminfo[key] = int(value.split()[0])
    stamp = layout.root / "node_tree.stamp"
    # Free memory moves all the time; the tree is made again only when the machine or the generator changes.
    source = Path(node_tree.__file__).read_bytes()
    digest = _digest({"cpus": str(cpus).encode(), "total": str(meminfo["MemTotal"]).encode(), "source": source})
    if (layout.node_tree / "online").exists() and stamp.exists() and stamp.read_text() == digest:
        return
    for name, text in node_tree.tree(cpus, meminfo).items():
        write_atomically(layout.node_tree / name, text, 0o444)
    write_atomically(layout.node_tree.parent / "proc/self/status", node_tree.status(cpus), 0o444)
    for name, target in node_tree.links(cpus).items():
        (layout.node_tree / name).unlink(missing_ok=True)
        (layout.node_tree / name).symlink_to(target)
    write_atomically(stamp, digest)
