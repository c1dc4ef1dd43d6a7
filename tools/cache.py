# SPDX-License-Identifier: Apache-2.0
"""Fill the wheel cache from the artefact manifest: ``python -m tools.cache [SET ...]``.

Downloads what is missing or has a wrong digest into ``LLMFLEET_CACHE/wheels`` and verifies every file. The wheels are
for the target hosts (Debian 12: Python 3.11, glibc 2.36), whatever Python this machine has. pip does the downloading,
so the user's pip configuration (mirrors, find-links, certificates) is honoured. Can be run again at any time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ansible_collections.llmfleet.sglang.plugins.module_utils import _artefacts

from tools import cache_dir
from tools.artefacts import Entry, load, sha256

#: What the test hosts run; sets for GPU hosts are fetched there, or when named.
DEFAULT_SETS = ("engine-0.5.16-cpu", "engine-0.5.23-cpu", "gpu_exporter", "router", "uv")
CHUNK = 25
#: glibc of Debian 12 and everything older, newest first.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64", "any"]
TARGET = ["--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp"]
TARGET += [part for abi in ("cp311", "abi3", "none") for part in ("--abi", abi)]
TARGET += [part for platform in PLATFORMS for part in ("--platform", platform)]


class Verified:
    """Which files were found to have their digest, so that a file that was not touched is not read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / ".verified.json"
        self._seen: dict[str, list[object]] = {}
        if self._file.exists():
            self._seen = json.loads(self._file.read_text())

    def holds(self, entry: Entry) -> bool:
        """Whether the folder holds this artefact, byte for byte."""
        path = self._folder / entry["file"]
        if not path.is_file() or path.stat().st_size != entry["size"]:
            return False
        mark = [entry["sha256"], path.stat().st_mtime_ns, path.stat().st_ino]
        if self._seen.get(entry["file"]) != mark:
            if sha256(path) != entry["sha256"]:
                return False
            self._seen[entry["file"]] = mark
        return True

    def save(self) -> None:
        """Remember for the next run."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._seen, indent=1, sort_keys=True) + "\n")
        new.replace(self._file)


def download(entries: Sequence[Entry], folder: Path, index: str | None) -> str:
    """One pip call for some wheels; returns "" or what pip printed when it failed."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lines:
        lines.writelines(f"{e['name']}=={e['version']} --hash=sha256:{e['sha256']}\n" for e in entries)
        lines.flush()
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--require-hashes", *TARGET]
        command += ["--dest", str(folder), "-r", lines.name]
        if index:
            command += ["--extra-index-url", index]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.strip() if done.returncode else ""


def fetch(entries: Sequence[Entry], folder: Path) -> str:
    """Download wheels of one source: first as pip is configured here, then with the source's own index."""
    failure = download(entries, folder, None)
    if failure and entries[0]["source"] != "pypi":
        failure = download(entries, folder, entries[0]["source"])
    return failure


def fill(entries: Sequence[Entry], folder: Path) -> None:
    """Make ``folder`` hold every wheel in ``entries``; raises SystemExit naming the first that cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    verified = Verified(folder)
    missing = [entry for entry in entries if not verified.holds(entry)]
    verified.save()
    if not missing:
        print(f"wheels: {len(entries)} in {folder}, nothing to do")
        return
    megabytes = sum(entry["size"] for entry in missing) / 1e6
    print(
        f"wheels: {len(missing)} of {len(entries)} are missing in {folder}, downloading {megabytes:.0f} MB",
        flush=True,
    )
    done = 0
    for chunk in _chunks(missing):
        # In the same folder, so that a verified file can be moved into place in one step.
        with tempfile.TemporaryDirectory(prefix=".incoming-", dir=folder) as incoming:
            failure = fetch(chunk, Path(incoming))
            if failure and len(chunk) > 1:
                # One file of many cannot be had: go one by one, to keep the rest and to name it.
                failure = ""
                for entry in chunk:
                    if failure := fetch([entry], Path(incoming)):
                        break
            for entry in chunk:
                path = Path(incoming) / entry["file"]
                if not path.exists():
                    verified.save()
                    raise SystemExit(_cannot_have(entry, failure or "pip found another file for this version"))
                if (digest := sha256(path)) != entry["sha256"]:
                    verified.save()
                    raise SystemExit(_cannot_have(entry, f"its digest is {digest}"))
                path.replace(folder / entry["file"])
                verified.holds(entry)
        verified.save()
        done += len(chunk)
        print(f"wheels: {done} of {len(missing)} downloaded, {time.monotonic() - started:.0f} s", flush=True)


def _chunks(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Groups of one source each: few pip calls, and yet a line of progress now and then."""
    chunks: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda e: (e["source"], e["name"])):
        if not chunks or len(chunks[-1]) == CHUNK or chunks[-1][0]["source"] != entry["source"]:
            chunks.append([])
        chunks[-1].append(entry)
    return chunks


def _cannot_have(entry: Entry, why: str) -> str:
    index = "PyPI" if entry["source"] == "pypi" else entry["source"]
    return (
        f"cannot get {entry['file']}\n"
        f"  expected: sha256 {entry['sha256']}, {entry['size']} bytes, from {index}\n"
        f"  found:    {why}\n"
        f"  cure:     make {index} reachable for pip (pip config, PIP_INDEX_URL, PIP_FIND_LINKS), or put the file\n"
        f"            into {cache_dir() / 'wheels'}, and run this again: what was downloaded is kept"
    )


def main() -> None:
    """Entry point of ``python -m tools.cache``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sets", nargs="*", metavar="SET", help=f"sets of the manifest (default: {' '.join(DEFAULT_SETS)})"
    )
    args = parser.parse_args()
    manifest = load()
    try:
        entries = {e["file"]: e for name in args.sets or DEFAULT_SETS for e in _artefacts.wheels(manifest, name)}
    except _artefacts.UnknownSetError as error:
        raise SystemExit(str(error)) from error
    fill([dict(entry) for entry in entries.values()], cache_dir() / "wheels")


if __name__ == "__main__":
    main()
