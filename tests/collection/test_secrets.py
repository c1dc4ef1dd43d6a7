# SPDX-License-Identifier: Apache-2.0
"""Keys reach the processes by credential and by nothing else: no rendered file, no plan, no task has one to show."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from plays import ansible_playbook

ROOT = Path(__file__).parents[2]
ROLES = ROOT / "roles"
KEYS = ["QZfleetQZownQZkeyQZ", "QZkeyQZofQZclientsQZ"]
# What has a key in it, or makes one readable.
SECRET = re.compile(r"plan_api_keys|llmfleet\.sglang\.(authorization|credential)\b|/etc/llmfleet/credentials/\{\{")
# What of a task or a play has tasks of its own.
PARTS = ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks")
FILES = {
    "instance.service.j2": "{{ item.unit }}",
    "probe.service.j2": "probe-{{ item.unit }}",
    "liveness.service.j2": "liveness-{{ item.unit }}",
}
PLAY = """
- hosts: sglang
  gather_facts: false
  connection: local
  vars_files: [{files}]
  vars:
    role_path: "{roles}/pd_service"
    pd_service_after: []
    plan_host: >-
      {{{{ hostvars | llmfleet.sglang.plan(inventory_hostname, groups['sglang'],
           lookup('ansible.builtin.file', '{root}/files/artefacts.yml') | from_yaml,
           monitor=groups['monitoring'][0]) }}}}
  tasks:
    - ansible.builtin.copy:
        dest: "{out}/{{{{ inventory_hostname }}}}-plan.json"
        content: "{{{{ plan_host | to_nice_json }}}}"
    - ansible.builtin.copy:
        dest: "{out}/{{{{ inventory_hostname }}}}-{{{{ item.name }}}}.env"
        content: "{{{{ item.environment | llmfleet.sglang.systemd_environment }}}}"
      loop: "{{{{ plan_host.instances }}}}"
"""


def tasks(node: Any) -> Iterator[dict[str, Any]]:
    """Every task of a task file or playbook, blocks and their parts too."""
    for entry in node if isinstance(node, list) else []:
        if isinstance(entry, dict):
            yield entry
            for part in PARTS:
                yield from tasks(entry.get(part))


def own(task: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in task.items() if name not in PARTS})


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The reference inventory with keys: what a talkative play prints, with every diff, and what it writes."""
    out, folder = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("play")
    files = [ROLES / role / part / "main.yml" for role in ("pd_service", "watch") for part in ("defaults", "vars")]
    play = PLAY.format(files=", ".join(map(str, files)), roles=ROLES, root=ROOT, out=out)
    for template, name in FILES.items():
        of_routers = {"probe": "selectattr", "liveness": "rejectattr"}.get(template.split(".")[0])
        chosen = f" | {of_routers}('role', 'eq', 'router')" if of_routers else ""
        play += f"""
    - ansible.builtin.template:
        src: "{ROOT}/templates/{template}"
        dest: "{out}/{{{{ inventory_hostname }}}}-{name}"
      loop: "{{{{ plan_host.instances{chosen} }}}}"
"""
    play += f"""
    - name: Write the keys
      ansible.builtin.copy:
        dest: "{folder}/{{{{ inventory_hostname }}}}-credential"
        content: "{{{{ plan_api_keys | llmfleet.sglang.credential }}}}"
        mode: "0600"
      diff: false
      no_log: true
"""
    (folder / "play.yml").write_text(play)
    (folder / "keys.json").write_text(json.dumps({"plan_api_keys": KEYS, "ansible_python_interpreter": sys.executable}))
    talkative = ("-vvv", "--diff", "-e", f"@{folder}/keys.json")
    done = ansible_playbook(folder / "play.yml", "inventories/prod", *talkative)
    assert done.returncode == 0, done.stdout
    assert all(
        (folder / file).read_text().split() == KEYS for file in os.listdir(folder) if file.endswith("credential")
    )
    return done.stdout + done.stderr, {file.name: file.read_text() for file in out.iterdir()}


def test_nothing_that_is_written_has_a_key_in_it(rendered: tuple[str, dict[str, str]]) -> None:
    written = rendered[1]
    assert len(written) == 2 * (1 + 3 + 3 + 3), sorted(written)
    assert [name for name, text in written.items() if "QZ" in text] == []


def test_nothing_that_is_printed_has_a_key_in_it(rendered: tuple[str, dict[str, str]]) -> None:
    assert "QZ" not in rendered[0]


def test_every_unit_gets_the_keys_as_its_credential(rendered: tuple[str, dict[str, str]]) -> None:
    units = {name: text for name, text in rendered[1].items() if name.endswith(".service")}
    for name, text in units.items():
        instance = name.removesuffix(".service").rpartition("llmfleet-")[2]
        assert re.findall(r"(?m)^LoadCredential=(.*)$", text) == [f"api-keys:/etc/llmfleet/credentials/{instance}"]
    (command,) = {
        " ".join(re.findall(r"(?ms)^ExecStart=(.*?)(?<!\\)$", text)[0].replace("\\\n", " ").split()[:6])
        for name, text in units.items()
        if re.fullmatch(r"[^/]*net-llmfleet-router\.service", name)
    }
    assert re.fullmatch(
        r"/opt/llmfleet/router/\w+/venv/bin/python -I -B /opt/llmfleet/lifecycle/[0-9a-f]{12} router launch", command
    )


@pytest.mark.parametrize("path", sorted([*ROLES.glob("*/tasks/*.yml"), *ROOT.glob("playbooks/*.yml")]), ids=str)
def test_a_task_that_has_a_key_logs_nothing(path: Path) -> None:
    found = [task for task in tasks(yaml.safe_load(path.read_text())) if SECRET.search(own(task))]
    assert [task["name"] for task in found if task.get("no_log") is not True] == []


def test_the_tasks_that_have_a_key_are_found() -> None:
    found = {
        path.parent.parent.name
        for path in ROLES.glob("*/tasks/*.yml")
        for task in tasks(yaml.safe_load(path.read_text()))
        if SECRET.search(own(task))
    }
    assert found == {"gateway", "pd_service", "rollout", "router"}


def test_the_keys_are_hidden_where_arguments_of_roles_are_checked() -> None:
    specs = yaml.safe_load((ROLES / "plan/meta/argument_specs.yml").read_text())["argument_specs"]
    assert specs["main"]["options"]["plan_api_keys"]["no_log"] is True
