# SPDX-License-Identifier: Apache-2.0
"""Is the collection usable as a clone and as an installed collection? ``python -m tools.collection``

Builds it, installs it, and runs the playbook's syntax check from there; then copies the tree to a folder with an odd
name and does what a user of a clone does. Needs no network: the collection has no dependencies.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools import ROOT, copy_sources

FQCN = "llmfleet.sglang"
#: How roles name what they share: ``{{ role_path }}/../../files/...``, or the same with ``| dirname | dirname``.
SHARED = re.compile(
    r"role_path\s*(?:(?:}}|~\s*['\"])/\.\./\.\./|\|\s*dirname\s*\|\s*dirname\s*(?:}}|~\s*['\"])/)"
    r"((?:files|templates)(?:/[\w.-]+)*)"
)
#: Parts of the repository that an installed collection must not carry.
NOT_SHIPPED = (
    "testbed",
    "tests",
    "tools",
    "molecule",
    ".ci",
    ".collections",
    ".git",
    "prod",
    "ansible.cfg",
    "Makefile",
)


def build(destination: Path) -> Path:
    """Build the collection from the working tree, as a clone of it would be; returns the tarball."""
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        run(["ansible-galaxy", "collection", "build", "--force", "--output-path", str(destination)], Path(folder))
    return next(destination.glob("llmfleet-sglang-*.tar.gz"))


def run(command: Sequence[str], cwd: Path, **env: str) -> str:
    """Run a command and return its output; a failure ends the check with that output."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_C")}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise SystemExit(f"in {cwd}: {' '.join(command)}\nexit status {done.returncode}\n{done.stdout}")
    return done.stdout


def shared_files(root: Path) -> set[str]:
    """Paths of shared files that the roles under ``root`` name."""
    texts = [path.read_text() for path in sorted((root / "roles").rglob("*.yml"))]
    return {match for text in texts for match in SHARED.findall(text)}


def check_installed(folder: Path) -> None:
    """Build, install, and use what was installed, from a folder that has nothing to do with the clone."""
    tarball = build(folder)
    collections = folder / "collections"
    run(
        ["ansible-galaxy", "collection", "install", "--offline", "--collections-path", str(collections), str(tarball)],
        folder,
    )
    installed = collections / "ansible_collections/llmfleet/sglang"
    for name in NOT_SHIPPED:
        if os.path.lexists(installed / name):
            raise SystemExit(f"the built collection carries {name}; galaxy.yml should list it in build_ignore")
    links = [str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_symlink()]
    if links:
        raise SystemExit(f"the built collection carries links, which not every way of installing keeps: {links}")
    print(f"installed: {tarball.name}, {tarball.stat().st_size / 1e6:.1f} MB")
    named = shared_files(installed)
    absent = sorted(name for name in named if not (installed / name).exists())
    if absent or not named:
        raise SystemExit(
            f"roles name these shared files, which the installed collection has not: {absent or 'none is named at all'}"
        )
    print(f"installed: {len(named)} shared files found")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    run(
        ["ansible-playbook", f"{FQCN}.site", "-i", str(installed / "inventories/prod"), "--syntax-check"],
        elsewhere,
        ANSIBLE_COLLECTIONS_PATH=str(collections),
    )
    print(f"installed: ansible-playbook {FQCN}.site --syntax-check")


def check_clone(folder: Path) -> None:
    """What a user of a clone does, in a folder whose name says nothing of the collection's."""
    clone = folder / "an odd-name.2 (copy)"
    copy_sources(clone)
    run(["ansible-playbook", "site.yml", "-i", "prod", "--syntax-check"], clone)
    hosts = run(["ansible-playbook", "site.yml", "-i", "prod", "--list-hosts"], clone)
    if not re.search(r"hosts \([1-9]\d*\):", hosts):
        raise SystemExit(f"ansible-playbook site.yml -i prod --list-hosts names no host:\n{hosts}")
    absent = sorted(name for name in shared_files(clone) if not (clone / name).exists())
    if absent:
        raise SystemExit(f"roles name these shared files, which the clone has not: {absent}")
    print("clone: ansible-playbook site.yml -i prod, --syntax-check and --list-hosts")


def main() -> None:
    """Entry point of ``python -m tools.collection``."""
    with tempfile.TemporaryDirectory(prefix="llmfleet-collection-") as folder:
        check_installed(Path(folder))
        check_clone(Path(folder))
    print(f"{FQCN}: usable from {ROOT.name} and installed")


if __name__ == "__main__":
    main()
