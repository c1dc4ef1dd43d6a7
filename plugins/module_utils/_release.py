# SPDX-License-Identifier: Apache-2.0
"""Build an immutable release folder: wheels, own packages, patches, proven; complete or not there at all.

A release is complete when its ``manifest.json`` exists, which is written last; a folder without one is the rest of an
interrupted build and is built again. Runs on the target with the standard library only. PRIVATE to the collection.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from ansible_collections.llmfleet.sglang.plugins.module_utils import _patch

MANIFEST = "manifest.json"
PATCH_MANIFEST = "manifest.json"
#: The CUDA toolkit of a release that has one, in its folder.
CUDA = "cuda"
#: Where the distributions that are supported have the driver's library.
DRIVER_LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
#: Memory that one compiler of CUDA templates is given; MAX_JOBS is bounded by it.
BYTES_A_JOB = 4 * 1024**3
#: In the arguments of a check, the release's folder.
HERE = "{release}"


class BuildError(Exception):
    """A build step failed. ``log`` is the file that holds the whole output, ``tail`` its last lines; ``free`` are the
    bytes that its disk had left."""

    def __init__(self, step: str, log: str, tail: str, free: int) -> None:
        super().__init__(f"{step} failed; the whole log is {log}, whose disk had {free // 1024**2} MiB left")
        self.step, self.log, self.tail = step, log, tail


class BusyError(Exception):
    """Another build holds the folder of the releases."""


@dataclass(frozen=True)
class Check:
    """A command that has to end with status 0 before a release is complete. ``user`` is who runs it, as services do."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""


@dataclass(frozen=True)
class Release:
    """What to build.

    ``requirements`` and ``installer`` are lines ``name==version --hash=sha256:...``. ``sources`` maps paths to texts
    that become ``src/``; ``packages`` are folders in it that are installed, ``patches`` the folder in it with the
    patches and their manifest.
    """

    root: str
    id: str
    requirements: Sequence[str]
    installer: Sequence[str] = ()
    wheelhouse: str = ""
    index_url: str = ""
    python: str = "/usr/bin/python3"
    sources: Mapping[str, str] = field(default_factory=dict)
    packages: Sequence[str] = ()
    patches: str = ""
    checks: Sequence[Check] = ()

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
    """The commands that install a release, each with a name for people.

    Digests are required and nothing is resolved, so exactly the pinned wheels are installed. uv unpacks a large engine
    several times faster than pip; it lies beside the environment, not in it. It also brings the build back-end of our
    own packages, so that no index is asked for one. Byte code is compiled now because the service user may not write
    into the release.
    """
    venv = os.path.join(release.path, "venv")
    where = _from_where(release)
    pinned = ["--no-deps", "--require-hashes", "--only-binary=:all:"]
    found = [("create the virtual environment", [release.python, "-m", "venv", venv])]
    pip = [f"{venv}/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    if not release.installer:
        wanted = f"--requirement={release.path}/requirements.txt"
        return [*found, ("install the pinned packages", [*pip, *where, *pinned, wanted])]
    uv = os.path.join(release.path, "uv")
    install = [
        f"{uv}/bin/uv",
        "pip",
        "install",
        "--no-config",
        f"--python={venv}/bin/python",
        "--no-cache",
        "--compile-bytecode",
        "--no-deps",
    ]
    found.append(
        ("install uv", [*pip, *where, *pinned, f"--target={uv}", f"--requirement={release.path}/installer.txt"])
    )
    found.append(
        (
            "install the pinned packages",
            [*install, "--no-build", "--require-hashes", *where, f"--requirement={release.path}/requirements.txt"],
        )
    )
    if release.packages:
        folders = [os.path.join(release.path, "src", name) for name in release.packages]
        found.append(("install our own packages", [*install, "--offline", "--no-index", *folders]))
    return found


def jobs(memory: int, cpus: int) -> int:
    """How many compilers may run at once: one for each CPU, but no more than ``memory`` bytes are enough for."""
    return max(1, min(cpus, memory // BYTES_A_JOB))


def _memory_available() -> int:
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _write_lines(path: str, lines: Sequence[str]) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def _write_sources(release: Release) -> None:
    for name, text in release.sources.items():
        path = os.path.join(release.path, "src", name)
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)


def _site_packages(release: Release) -> str:
    return glob.glob(os.path.join(release.path, "venv", "lib", "python3*", "site-packages"))[0]


def _link_cuda(release: Release) -> None:
    """``cuda`` in the release leads to the compiler, headers and libraries that NVIDIA's wheels bring, whatever
    Python's version is. What the wheels leave out for linking is added: ``lib64``, where compilers look for libraries;
    the names without a version (``-lcudart``); and the driver's library, which is the host's (``-lcuda``)."""
    toolkits = glob.glob(os.path.join(release.path, "venv/lib/python3*/site-packages/nvidia/cu[0-9]*"))
    if len(toolkits) != 1:
        return
    os.symlink(os.path.relpath(toolkits[0], release.path), os.path.join(release.path, CUDA))
    library = os.path.join(toolkits[0], "lib")
    os.makedirs(os.path.join(library, "stubs"), exist_ok=True)
    links = {os.path.join(toolkits[0], "lib64"): "lib", os.path.join(library, "stubs", "libcuda.so"): DRIVER_LIBRARY}
    for name in sorted(os.listdir(library)):
        if ".so." in name:
            links.setdefault(os.path.join(library, f"{name.split('.so.')[0]}.so"), name)
    for link, target in links.items():
        if not os.path.lexists(link):
            os.symlink(target, link)


def _patches(release: Release) -> list[dict[str, str]]:
    """The patch manifest's entries: ``{file, patch, before, after, why}``, ``file`` below site-packages."""
    if not release.patches:
        return []
    found: list[dict[str, str]] = json.loads(release.sources[f"{release.patches}/{PATCH_MANIFEST}"])["patches"]
    return found


def _run(name: str, command: Sequence[str], log: TextIO, environment: Mapping[str, str], user: str) -> None:
    """Run one command into the log. Raises _StepError."""
    log.write(f"== {name}: {' '.join(command)}\n")
    log.flush()
    options: dict[str, Any] = {}
    if user and os.geteuid() == 0:
        options = {"user": user, "group": user, "extra_groups": [], "cwd": "/"}
    try:
        result = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, env=environment, **options
        )
    except (OSError, LookupError) as error:
        raise _StepError(name, str(error)) from error
    if result.returncode:
        raise _StepError(name, f"exit status {result.returncode}")


class _StepError(Exception):
    def __init__(self, step: str, why: str) -> None:
        super().__init__(why)
        self.step = step


def _build_steps(release: Release, log: TextIO) -> None:
    environment = {**os.environ, "MAX_JOBS": str(jobs(_memory_available(), os.cpu_count() or 1))}
    _write_lines(os.path.join(release.path, "requirements.txt"), release.requirements)
    _write_lines(os.path.join(release.path, "installer.txt"), release.installer)
    _write_sources(release)
    for name, command in steps(release):
        _run(name, command, log, environment, "")
    _link_cuda(release)
    for entry in _patches(release):
        log.write(f"== patch {entry['file']}\n")
        try:
            _patch.apply(_site_packages(release), entry, release.sources[f"{release.patches}/{entry['patch']}"])
        except _patch.PatchError as error:
            raise _StepError(f"patch {entry['file']}", str(error)) from error
    for check in release.checks:
        argv = [word.replace(HERE, release.path) for word in check.argv]
        own = {name: value.replace(HERE, release.path) for name, value in check.environment.items()}
        _run(check.name, argv, log, environment | own, check.user)
    # A manifest says that everything before it is there, after a power cut too: the kernel may write out what was
    # installed half a minute later than the manifest, and would leave empty files.
    _run("write it out to the disk", ["sync", "--file-system", release.path], log, environment, "")


@contextmanager
def _only_builder(root: str) -> Iterator[None]:
    """Hold the folder of the releases; a build that was killed lets go of it. Raises BusyError."""
    with open(os.path.join(root, ".lock"), "a", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(
                f"another run is building in {root}; expected to be the only one; wait for it and run again"
            ) from error
        yield


def build(release: Release) -> None:
    """Build the release from nothing. Raises BuildError and leaves only the log when a step fails; BusyError."""
    os.makedirs(release.root, mode=0o755, exist_ok=True)
    with _only_builder(release.root):
        # Who held the lock before may have built the very same.
        if not is_complete(release.path):
            _build(release)


def _build(release: Release) -> None:
    if os.path.isdir(release.path):
        shutil.rmtree(release.path)
    os.mkdir(release.path, 0o755)
    try:
        with open(release.log, "w", encoding="utf-8") as log:
            _build_steps(release, log)
    except (_StepError, OSError) as error:
        free = shutil.disk_usage(release.root).free
        # Before the rest is written: on a full disk the log has no room either.
        shutil.rmtree(release.path)
        step = error.step if isinstance(error, _StepError) else "write the release"
        with open(release.log, "a", encoding="utf-8") as log:
            log.write(f"{error}\n")
        with open(release.log, encoding="utf-8", errors="replace") as written:
            raise BuildError(step, release.log, "".join(written.readlines()[-15:]), free) from error
    manifest = {
        "id": release.id,
        "python": release.python,
        "requirements": sorted(release.requirements),
        "files": dict(sorted(_digests(release).items())),
        "checks": [check.name for check in release.checks],
    }
    partial = os.path.join(release.path, f"{MANIFEST}.partial")
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(partial, os.path.join(release.path, MANIFEST))
    os.remove(release.log)


def _digests(release: Release) -> dict[str, str]:
    """Digest of every file that is ours or was patched, by its path in the release."""
    paths = [os.path.join("src", name) for name in release.sources]
    if release.patches:
        site = os.path.relpath(_site_packages(release), release.path)
        paths += [os.path.join(site, entry["file"]) for entry in _patches(release)]
    return {path: _sha256(os.path.join(release.path, path)) for path in paths}


def _sha256(path: str) -> str:
    with open(path, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def changed_files(path: str) -> list[str]:
    """Files of a complete release, by their path in it, that are no longer what was built; empty when all is well."""
    with open(os.path.join(path, MANIFEST), encoding="utf-8") as stream:
        expected: dict[str, str] = json.load(stream).get("files", {})
    return [
        name
        for name, digest in expected.items()
        if not os.path.isfile(os.path.join(path, name)) or _sha256(os.path.join(path, name)) != digest
    ]


def unused(found: Mapping[str, float], named: Iterable[str], keep: int) -> list[str]:
    """Which releases to remove: of those that are not named, all but the ``keep`` newest.

    ``found`` maps a release's folder to when it was completed, in seconds; ``named`` are those that a unit names or a
    process uses, which are kept whatever their age.
    """
    idle = sorted(set(found) - set(named), key=lambda path: (-found[path], path))
    return sorted(idle[keep:])


@dataclass(frozen=True)
class Prune:
    """What to look at when old releases are removed; see the module ``release_prune``."""

    root: str
    keep: int
    protect: Sequence[str] = ()
    references: Sequence[str] = ()
    caches: str = ""
    proc: str = "/proc"


def prune(wanted: Prune, dry: bool) -> tuple[list[str], dict[str, str]]:
    """Remove what nothing uses: ``(removed folders, {folder in use: what uses it})``. Raises BusyError, OSError."""
    if not os.path.isdir(wanted.root):
        return [], {}
    with _only_builder(wanted.root):
        folders = [entry.path for entry in os.scandir(wanted.root) if entry.is_dir(follow_symlinks=False)]
        complete = {
            path: os.stat(os.path.join(path, MANIFEST)).st_mtime for path in sorted(folders) if is_complete(path)
        }
        used = {os.path.join(wanted.root, name): "protected" for name in wanted.protect}
        used |= _named(folders, wanted.references) | _running(folders, wanted.proc)
        removed = unused(complete, used, wanted.keep)
        removed += sorted(path for path in folders if path not in complete and path not in used)
        for path in [] if dry else removed:
            # First what makes it complete, so that an interrupted removal leaves no broken release.
            if path in complete:
                os.remove(os.path.join(path, MANIFEST))
            shutil.rmtree(path)
            cache = os.path.join(wanted.caches, os.path.basename(path))
            if wanted.caches and os.path.isdir(cache):
                shutil.rmtree(cache)
    return removed, {path: why for path, why in used.items() if path in folders}


def _named(folders: Sequence[str], references: Sequence[str]) -> dict[str, str]:
    """``{folder: file}`` of the folders that a unit or environment file, or a drop-in of one, names."""
    found: dict[str, str] = {}
    for top in references:
        for parent, _folders, files in os.walk(top):
            for name in sorted(files):
                if not name.endswith((".service", ".conf", ".env", ".timer")):
                    continue
                path = os.path.join(parent, name)
                with open(path, encoding="utf-8", errors="replace") as stream:
                    text = stream.read()
                found |= {folder: path for folder in folders if _names(text, folder)}
    return found


def _names(text: str, folder: str) -> bool:
    """Whether a text names a folder or what lies in it, and not another one whose name only begins alike."""
    return re.search(rf"{re.escape(folder)}(?![\w.-])", text) is not None


def _target(link: str) -> str:
    """Where a link leads; nowhere when it went meanwhile, as open files do."""
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def _running(folders: Sequence[str], proc: str) -> dict[str, str]:
    """``{folder: process}`` of the folders that a process has files of (mapped, open, as program or as working folder)
    or was given as an argument: files that links in a folder lead to are mapped by their own paths.

    A process that ends while it is looked at uses nothing any more.
    """
    found: dict[str, str] = {}
    for pid in sorted(name for name in os.listdir(proc) if name.isdigit()):
        texts: list[str] = []
        try:
            with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as stream:
                texts.append(stream.read())
            names = ["exe", "cwd", *(f"fd/{number}" for number in os.listdir(f"{proc}/{pid}/fd"))]
            texts += [_target(f"{proc}/{pid}/{name}") for name in names]
            with open(f"{proc}/{pid}/cmdline", encoding="utf-8", errors="replace") as stream:
                texts += stream.read().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            pass
        for folder in folders:
            if any(_names(text, folder) for text in texts):
                found[folder] = f"process {pid}"
    return found
