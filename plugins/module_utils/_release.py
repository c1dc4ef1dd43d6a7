# SPDX-License-Identifier: Apache-2.0
"""Build an immutable release folder: a virtual environment from pinned requirements, complete or not there at all.

A release is complete when its ``manifest.json`` exists, which is written last; a folder without one is the rest of an
interrupted build and is built again. Runs on the target with the standard library only. PRIVATE to the collection.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

MANIFEST = "manifest.json"


class BuildError(Exception):
    """A build step failed. ``log`` is the file that holds the whole output, ``tail`` its last lines."""

    def __init__(self, step: str, log: str, tail: str) -> None:
        super().__init__(f"{step} failed; the whole log is {log}")
        self.step, self.log, self.tail = step, log, tail


@dataclass(frozen=True)
class Release:
    """What to build. ``requirements`` and ``installer`` are lines ``name==version --hash=sha256:...``."""

    root: str
    id: str
    requirements: Sequence[str]
    installer: Sequence[str] = ()
    wheelhouse: str = ""
    index_url: str = ""
    python: str = "/usr/bin/python3"
    source: str = ""

    @property
    def path(self) -> str:
        return os.path.join(self.root, self.id)

    @property
    def log(self) -> str:
        return os.path.join(self.root, f"{self.id}.build.log")


def is_complete(path: str) -> bool:
    return os.path.isfile(os.path.join(path, MANIFEST))


def _from_where(release: Release) -> list[str]:
    """pip's and uv's options for the place that wheels come from: a folder, an index, or the host's own setting."""
    if release.wheelhouse:
        return ["--no-index", f"--find-links={release.wheelhouse}"]
    return [f"--index-url={release.index_url}"] if release.index_url else []


def steps(release: Release) -> list[tuple[str, list[str]]]:
    """The commands that build a release, each with a name for people.

    Digests are required and nothing is resolved, so exactly the pinned wheels are installed. uv unpacks a large engine
    several times faster than pip; it lies beside the environment, not in it. Byte code is compiled now because the
    service user may not write into the release.
    """
    venv = os.path.join(release.path, "venv")
    where = _from_where(release)
    pinned = ["--no-deps", "--require-hashes", "--only-binary=:all:"]
    found = [("create the virtual environment", [release.python, "-m", "venv", venv])]
    pip = [f"{venv}/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    if release.installer:
        uv = os.path.join(release.path, "uv")
        found.append(
            ("install uv", [*pip, *where, *pinned, f"--target={uv}", f"--requirement={release.path}/installer.txt"])
        )
        found.append(
            (
                "install the pinned packages",
                [
                    f"{uv}/bin/uv",
                    "pip",
                    "install",
                    "--no-config",
                    f"--python={venv}/bin/python",
                    "--no-build",
                    "--no-cache",
                    "--compile-bytecode",
                    "--no-deps",
                    "--require-hashes",
                    *where,
                    f"--requirement={release.path}/requirements.txt",
                ],
            )
        )
    else:
        found.append(
            ("install the pinned packages", [*pip, *where, *pinned, f"--requirement={release.path}/requirements.txt"])
        )
    return found


def _write_lines(path: str, lines: Sequence[str]) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def build(release: Release) -> None:
    """Build the release from nothing. Raises BuildError and leaves only the log when a step fails."""
    os.makedirs(release.root, mode=0o755, exist_ok=True)
    if os.path.isdir(release.path):
        shutil.rmtree(release.path)
    os.mkdir(release.path, 0o755)
    _write_lines(os.path.join(release.path, "requirements.txt"), release.requirements)
    _write_lines(os.path.join(release.path, "installer.txt"), release.installer)
    with open(release.log, "w", encoding="utf-8") as log:
        for name, command in steps(release):
            log.write(f"== {name}: {' '.join(command)}\n")
            log.flush()
            try:
                result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
                failed = result.returncode != 0
            except OSError as error:
                log.write(f"{error}\n")
                failed = True
            if failed:
                log.flush()
                shutil.rmtree(release.path)
                with open(release.log, encoding="utf-8", errors="replace") as written:
                    raise BuildError(name, release.log, "".join(written.readlines()[-15:]))
    if release.source:
        shutil.copytree(release.source, os.path.join(release.path, "src"))
    manifest = {"id": release.id, "python": release.python, "requirements": sorted(release.requirements)}
    partial = os.path.join(release.path, f"{MANIFEST}.partial")
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(partial, os.path.join(release.path, MANIFEST))
    os.remove(release.log)
