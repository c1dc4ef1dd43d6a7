# SPDX-License-Identifier: Apache-2.0
"""``playbooks/status.yml`` where nothing is deployed or a host cannot be read; scenarios show it of what runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from plays import ROOT, ansible_playbook


@pytest.fixture
def inventory(tmp_path: Path) -> str:
    """This machine, and a host at a port where nobody listens."""
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    away = {"ansible_host": "127.0.0.1", "ansible_port": 1}
    children = {"sglang": {"hosts": {"here": here, "away": away}}, "gateway": {"hosts": {}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": children}}))
    return str(tmp_path / "hosts.yml")


def test_a_host_that_cannot_be_read_is_named(inventory: str) -> None:
    done = ansible_playbook(ROOT / "playbooks" / "status.yml", inventory)
    assert done.returncode != 0
    assert "Nothing is deployed on here." in done.stdout
    assert "away: not read" in done.stdout


def test_a_part_of_the_fleet_can_be_asked_for(inventory: str) -> None:
    done = ansible_playbook(ROOT / "playbooks" / "status.yml", inventory, "--limit", "here")
    assert done.returncode == 0, done.stdout
    assert "TASK [Show the table]" in done.stdout
    assert "away" not in done.stdout
