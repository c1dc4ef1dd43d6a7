# SPDX-License-Identifier: Apache-2.0
"""A module as Ansible runs it on a host: a process that is given arguments and answers with JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]


def run_module(name: str, arguments: dict[str, Any], check_mode: bool = False) -> dict[str, Any]:
    """What the collection's module ``name`` answers; its exit status agrees with it."""
    given = json.dumps({"ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_check_mode": check_mode}})
    # As in Ansible's own wrapper, which profile of its JSON is spoken is said beside the arguments.
    start = (
        "import runpy, sys; from ansible.module_utils import basic; "
        "basic._ANSIBLE_ARGS = sys.stdin.buffer.read(); basic._ANSIBLE_PROFILE = 'legacy'; "
        f"runpy.run_module('ansible_collections.llmfleet.sglang.plugins.modules.{name}', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", start],
        input=given,
        cwd=ROOT / ".collections",
        capture_output=True,
        text=True,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert bool(done.returncode) == bool(answer.get("failed"))
    return answer
