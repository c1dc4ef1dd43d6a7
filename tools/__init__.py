# SPDX-License-Identifier: Apache-2.0
"""Tools of the build machine: set up, cache, check, test. Run them from the repository root (``python -m tools.x``)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "files" / "artefacts.yml"

# The same names as in an installed collection: ansible_collections.llmfleet.sglang.plugins...
sys.path.insert(0, str(ROOT / ".collections"))


def cache_dir() -> Path:
    """Where everything that is downloaded or built lies: ``LLMFLEET_CACHE``, or ``~/.cache/llmfleet``."""
    return Path(os.environ.get("LLMFLEET_CACHE") or Path.home() / ".cache" / "llmfleet").absolute()


def source_files() -> list[Path]:
    """Every file and link of the working tree that git tracks or would track, relative to the root, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = {name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)}
    return [Path(name) for name in sorted(names)]


def copy_sources(destination: Path) -> None:
    """Copy the working tree as a clone of it would look, uncommitted changes included; links stay links."""
    for name in source_files():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
