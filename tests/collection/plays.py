# SPDX-License-Identifier: Apache-2.0
"""Plays that tests of this folder run on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def run_play(folder: Path, play: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
    """Run one play with these extra variables from the root of the repository; its output. It has to succeed."""
    path = folder / "play.yml"
    path.write_text(yaml.safe_dump([dict(play)]))
    # pytest's own environment has the interpreter of the modules too.
    extra = {"ansible_python_interpreter": sys.executable, **variables}
    done = subprocess.run(
        ["ansible-playbook", str(path), "-i", "localhost,", "-e", json.dumps(extra)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_FORCE_COLOR": "false", "ANSIBLE_NOCOLOR": "true"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
