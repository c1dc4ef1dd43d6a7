# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for every GPU without a GPU, and run the kernels' unit tests; ``tools/kernels`` calls it.

The compilers (Triton, nvcc) and the engines' sources are pinned: they come from the wheel cache, as the sets of the
artefact manifest say, and are unpacked once into ``LLMFLEET_CACHE/kernels-<digest>``. A test that is skipped fails the
run: everything that the tests need is there. What each kernel takes of a GPU is compared with
``docs/benchmarks/compile.json``; ``--record`` writes that file anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from ansible_collections.llmfleet.sglang.plugins.module_utils import _artefacts

from tools import ROOT, cache_dir
from tools.artefacts import Entry, load
from tools.cache import fill

SET = "kernels"
ENGINES = ROOT / "files" / "engine"
RECORD = ROOT / "docs" / "benchmarks" / "compile.json"
#: What a kernel's source needs of the engine's wheel; the folder is `kernels/jit` or `jit_kernel`, by version.
SOURCES = re.compile(r"sglang/(kernels/jit|jit_kernel)/(include|csrc/deepseek_v4)/")
#: One compiler may take 2 GB.
WORKERS = 2
PYTHON = (3, 11)


def wheels() -> tuple[list[Entry], dict[str, Entry]]:
    """Entries of the compilers, and of the engine's wheel for each version that has patches."""
    manifest = load()
    versions = sorted(path.parent.name for path in ENGINES.glob("*/manifest.json"))
    engines = {
        str(entry["version"]): dict(entry)
        for entry in manifest["artefacts"]
        if entry["kind"] == "wheel" and entry["name"] == "sglang" and entry["version"] in versions
    }
    if missing := sorted(set(versions) - set(engines)):
        raise SystemExit(f"files/artefacts.yml has no wheel of sglang {', '.join(missing)}, which has patches here")
    return [dict(entry) for entry in _artefacts.wheels(manifest, SET)], engines


def unpacked(compilers: Sequence[Entry], engines: dict[str, Entry]) -> Path:
    """The folder that holds the compilers (``site``) and the engines' sources (``engines/<version>``)."""
    cache = cache_dir()
    pins = sorted(entry["sha256"] for entry in [*compilers, *engines.values()])
    folder = cache / f"kernels-{hashlib.sha256(' '.join(pins).encode()).hexdigest()[:12]}"
    if folder.exists():
        print(f"kernels: {folder}, nothing to do")
        return folder
    print(f"kernels: making {folder}", flush=True)
    with tempfile.TemporaryDirectory(prefix=".kernels-", dir=cache) as name:
        new = Path(name) / "new"
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
        command += ["--no-index", "--require-hashes", f"--find-links={cache / 'wheels'}", f"--target={new / 'site'}"]
        pinned = Path(name) / "pins.txt"
        pinned.write_text("".join(f"{e['name']}=={e['version']} --hash=sha256:{e['sha256']}\n" for e in compilers))
        subprocess.run([*command, "-r", pinned], check=True)
        for version, entry in engines.items():
            with zipfile.ZipFile(cache / "wheels" / entry["file"]) as archive:
                members = [member for member in archive.namelist() if SOURCES.match(member)]
                archive.extractall(new / "engines" / version, members)
        new.rename(folder)
    return folder


def environment(folder: Path, engines: Sequence[str]) -> dict[str, str]:
    """What the tests need to find compilers and sources."""
    toolkit = folder / "site" / "nvidia" / "cu13"
    return dict(os.environ) | {
        "PYTHONPATH": str(folder / "site"),
        "PATH": f"{toolkit / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CUDA_HOME": str(toolkit),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "LLMFLEET_ENGINE_TREES": os.pathsep.join(str(folder / "engines" / version) for version in engines),
    }


def skipped(report: Path) -> list[str]:
    """Tests and modules that pytest skipped, with the reason, from its JUnit report."""
    return [
        f"{case.get('classname')}.{case.get('name')}: {reason.text or reason.get('message')}"
        for case in ElementTree.parse(report).iter("testcase")  # noqa: S314  (our own pytest wrote it)
        for reason in case.iter("skipped")
    ]


def test(folder: Path, engines: Sequence[str], record: bool) -> None:
    """Run the tests; raises SystemExit when one fails or is skipped."""
    with tempfile.TemporaryDirectory() as name:
        report, fragments = Path(name) / "report.xml", Path(name) / "record"
        fragments.mkdir()
        own = environment(folder, engines) | ({"LLMFLEET_COMPILE_RECORD": str(fragments)} if record else {})
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(WORKERS),
            f"--junitxml={report}",
            "tests/unit/kernels",
        ]
        if status := subprocess.run(command, cwd=ROOT, env=own, check=False).returncode:
            raise SystemExit(status)
        if found := skipped(report):
            raise SystemExit("kernels: found tests that were skipped, expected none:\n" + "\n".join(found))
        if record:
            versions = {dist.name: dist.version for dist in metadata.distributions(path=[str(folder / "site")])}
            kernels: dict[str, object] = {}
            for fragment in fragments.iterdir():
                kernels |= json.loads(fragment.read_text(encoding="utf-8"))
            text = {
                "compilers": {"triton": versions["triton"], "nvcc": versions["nvidia-cuda-nvcc"]},
                "kernels": dict(sorted(kernels.items())),
            }
            RECORD.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
            print(f"kernels: {len(kernels)} recorded in {RECORD.relative_to(ROOT)}")


def main() -> None:
    """Entry point of ``tools/kernels``."""
    parser = argparse.ArgumentParser(prog="tools/kernels", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)} anew")
    arguments = parser.parse_args()
    if sys.version_info[:2] != PYTHON:
        raise SystemExit(f"kernels: found Python {sys.version.split()[0]}, expected 3.11, which the wheels are for")
    if shutil.which("g++") is None:
        raise SystemExit("kernels: found no g++, which nvcc needs; cure: apt-get install g++")
    compilers, engines = wheels()
    fill([*compilers, *engines.values()], cache_dir() / "wheels")
    test(unpacked(compilers, engines), sorted(engines), arguments.record)


if __name__ == "__main__":
    main()
