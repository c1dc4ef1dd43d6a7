# SPDX-License-Identifier: Apache-2.0
"""Programs of the tests that run on a host of the testbed, beside what it serves."""

from __future__ import annotations

import subprocess
import sys

from tools import ROOT

#: Folders with such programs and what they share; on the host they lie below TESTS, as they do here.
FOLDERS = ("on_host", "faults", "load")
TESTS = "/root/tests"


def line(host: str, command: str) -> list[str]:
    """A command line here that runs a command of a shell there."""
    return [sys.executable, "-m", "testbed", "ssh", host, "--", command]


def run(host: str, command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(line(host, command), input=text, cwd=ROOT, check=False, capture_output=True, text=True)


def copy_programs(host: str) -> str:
    """What stood in the way, nothing when the programs are there."""
    for folder in FOLDERS:
        for path in sorted((ROOT / "tests" / folder).glob("*.py")):
            there = f"{TESTS}/{folder}"
            text = path.read_text(encoding="utf-8")
            copied = run(host, f"mkdir -p {there} && cat > {there}/{path.name}", text)
            if copied.returncode != 0:
                return f"{host} cannot be asked: {copied.stderr.strip()}"
    return ""
