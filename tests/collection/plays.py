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


def ansible_playbook(play: Path, inventory: str, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a playbook from the root of the repository, without colours; programs of the folder ``path`` come first."""
    search = os.pathsep.join(filter(None, [path, os.environ["PATH"]]))
    return subprocess.run(
        ["ansible-playbook", str(play), "-i", inventory, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": search, "ANSIBLE_FORCE_COLOR": "false", "ANSIBLE_NOCOLOR": "true"},
    )


def run_play(folder: Path, play: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
    """Run one play with these extra variables on this machine; its output. It has to succeed."""
    path = folder / "play.yml"
    path.write_text(yaml.safe_dump([dict(play)]))
    # pytest's own environment has the interpreter of the modules too.
    extra = {"ansible_python_interpreter": sys.executable, **variables}
    done = ansible_playbook(path, "localhost,", "-e", json.dumps(extra))
    assert done.returncode == 0, done.stdout
    return done.stdout
