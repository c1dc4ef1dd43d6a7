# SPDX-License-Identifier: Apache-2.0
"""Inventories are sound, those that ship and that of the load: every host of each is planned without a refusal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAYBOOK = """
- hosts: localhost
  gather_facts: false
  connection: local
  tasks:
    - ansible.builtin.copy:
        dest: "{{ result }}"
        content: "{{ plans | from_yaml | to_json }}"
        mode: "0600"
      vars:
        manifest: "{{ lookup('ansible.builtin.file', root ~ '/files/artefacts.yml') | from_yaml }}"
        plans: |
          {% for host in groups['sglang'] %}
          {{ host | to_json }}: {{ hostvars | llmfleet.sglang.plan(
            host, groups['sglang'], manifest, monitor=groups['monitoring'] | first | default(none)) | to_json }}
          {% endfor %}
"""


@pytest.mark.parametrize(
    ("inventory", "hosts", "groups"),
    [("inventories/prod", 2, 1), ("inventories/demo", 1, 1), ("tests/load/inventory", 1, 2)],
)
def test_an_inventory_is_planned_without_refusal(inventory: str, hosts: int, groups: int, tmp_path: Path) -> None:
    playbook, result = tmp_path / "plan.yml", tmp_path / "plans.json"
    playbook.write_text(PLAYBOOK)
    extra = json.dumps({"result": str(result), "root": str(ROOT)})
    command = ["ansible-playbook", str(playbook), "-i", inventory, "-e", extra]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    plans = json.loads(result.read_text())
    assert len(plans) == hosts
    for plan in plans.values():
        assert plan["refusals"] == []
        roles = [entry["role"] for entry in plan["instances"]]
        assert sorted(roles) == sorted(["decode", "prefill", "router"] * groups)
