# SPDX-License-Identifier: Apache-2.0
"""A rollout over a fallback that serves, up to where hosts would be changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from plays import ansible_playbook

WHOLE: dict[str, Any] = {
    "name": "whole",
    "role": "server",
    "group": "a",
    "unit": "llmfleet-whole.service",
    "fingerprint": "0123456789abcdef",
    "conflicts": ["llmfleet-prefill.service"],
}
PREFILL = {"name": "prefill", "role": "prefill", "group": "a", "unit": "llmfleet-prefill.service", "fingerprint": "f0"}
PLAN: dict[str, Any] = {
    "instances": [PREFILL],
    "fallbacks": [WHOLE],
    "groups": {"a": {"revision": "r1"}},
    "budget": {"instances": [{"name": "prefill"}], "fallbacks": [{"name": "whole"}]},
}
# Of each unit: that it is loaded and in the state that a file of its name says.
SYSTEMCTL = """#!/bin/sh
for unit; do :; done
state=$(cat "$(dirname "$0")/$unit" 2>/dev/null || echo inactive)
printf 'LoadState=loaded\\nActiveState=%s\\nMainPID=0\\n' "$state"
"""


def play(folder: Path, tasks: list[dict[str, Any]], **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run tasks on this machine as the role's, with a systemctl that says what the folder's files say."""
    program = folder / "systemctl"
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    content = {
        "hosts": "sglang",
        "connection": "local",
        "gather_facts": False,
        "vars": {
            "plan_facts": {},
            "plan_instances": [],
            "rollout_group": {"name": "a", "hosts": ["here"], "routers": []},
        },
        "tasks": tasks,
    }
    (folder / "play.yml").write_text(yaml.safe_dump([content]))
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": {"sglang": {"hosts": {"here": {}}}}}}))
    extra = {"ansible_python_interpreter": sys.executable, **variables}
    return ansible_playbook(folder / "play.yml", str(folder / "hosts.yml"), "-e", json.dumps(extra), path=str(folder))


def role(file: str, **variables: Any) -> dict[str, Any]:
    return {
        "name": f"Run {file}",
        "ansible.builtin.include_role": {"name": "llmfleet.sglang.rollout", "tasks_from": file, "public": True},
        "vars": variables,
    }


def told(name: str) -> dict[str, Any]:
    return {"name": f"Tell {name}", "ansible.builtin.debug": {"msg": f"{name}: {{{{ {name} | to_json }}}}"}}


# It may have failed and wait for its next start: its servers would still end it for good.
@pytest.mark.parametrize("state", ["active", "activating"])
def test_a_rollout_over_a_fallback_is_refused_with_both_ways_out(tmp_path: Path, state: str) -> None:
    (tmp_path / WHOLE["unit"]).write_text(state)
    done = play(tmp_path, [role("precheck.yml")], plan_host=PLAN)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "llmfleet-whole.service serves in the place of PD group a on here" in said
    assert "playbooks/undrain.yml -e pd_group=a" in said
    assert "-e rollout_end_fallback=true" in said


def test_a_rollout_that_may_end_it_takes_the_group_for_one_that_is_not_drained(tmp_path: Path) -> None:
    (tmp_path / WHOLE["unit"]).write_text("active")
    records = {
        "name": "Drain",
        "ansible.builtin.set_fact": {"__rollout_records": {"a": {"good": None, "drained": True}}},
    }
    tasks = [role("precheck.yml"), records, told("_rollout_drained"), told("_rollout_replaced")]
    done = play(tmp_path, tasks, plan_host=PLAN, rollout_end_fallback=True)
    assert done.returncode == 0, done.stdout
    assert "_rollout_drained: false" in done.stdout
    assert "_rollout_replaced: true" in done.stdout


def test_a_fallback_that_stands_by_stops_no_rollout_and_a_drained_group_stays_drained(tmp_path: Path) -> None:
    records = {
        "name": "Drain",
        "ansible.builtin.set_fact": {"__rollout_records": {"a": {"good": None, "drained": True}}},
    }
    done = play(tmp_path, [role("precheck.yml"), records, told("_rollout_drained")], plan_host=PLAN)
    assert done.returncode == 0, done.stdout
    assert "_rollout_drained: true" in done.stdout
