# SPDX-License-Identifier: Apache-2.0
"""``playbooks/plan.yml``: a fleet is budgeted from captured trees, without reaching a host or changing anything."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugins.module_utils.plan_cases import FLASH
from tests.unit.plugins.module_utils.topology_cases import load, write

ROOT = Path(__file__).parents[2]
HOSTS = ("gpu-01.example.net", "gpu-02.example.net")


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """Two hosts of eight GPUs on two nodes; the memory of the first is the reference's, the second has half."""
    for host, total in zip(HOSTS, (240_000_000, 120_000_000), strict=True):
        files = {
            path: text.replace("MemTotal:", "MemFree0:").replace("MemFree0:", f"MemTotal: {total} kB\nNode 0 Was:", 1)
            if path.endswith("meminfo")
            else text
            for path, text in load("eight_gpus_two_nodes").items()
            if "fs/cgroup" not in path
        }
        write(tmp_path / host, {**files, "model/config.json": json.dumps(FLASH)})
    return tmp_path


def run(captured: Path, **variables: Any) -> subprocess.CompletedProcess[str]:
    extra = json.dumps({"plan_capture": str(captured), **variables})
    environment = {**os.environ, "ANSIBLE_FORCE_COLOR": "false", "ANSIBLE_NOCOLOR": "true"}
    command = ["ansible-playbook", "playbooks/plan.yml", "-i", "prod", "-e", extra]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def test_a_fleet_is_budgeted_from_files(captured: Path) -> None:
    done = run(captured, plan_hicache={"total": "120GB"})
    assert done.returncode == 0, done.stdout
    assert "changed=0" in done.stdout
    lines = [line.strip(" -'").split() for line in done.stdout.splitlines()]
    given = [line for line in lines if line[:1] == ["0"] and line[-1:] == ["prefill"]]
    assert [line[5:9] for line in given] == [["60.0", "GB", "60.0", "GB"]] * len(HOSTS)
    assert sum(line[-3:] == ["unused,", "see", "decode"] for line in lines) == len(HOSTS)
    assert "4.1 GB for one context of 524,288" in done.stdout


def test_every_host_is_told_before_one_is_refused(captured: Path) -> None:
    done = run(captured, plan_hicache={"total": "300GB"})
    assert done.returncode != 0
    assert "150.0 GB  150.0 GB  prefill" in done.stdout
    assert (
        "gpu-02.example.net: found node 0 is asked for 150.0 GB (139.7 GiB) of plain memory by prefill" in done.stdout
    )
    assert "gpu-01.example.net: found" not in done.stdout


def test_a_truncated_tree_is_an_error_that_names_the_file(captured: Path) -> None:
    meminfo = captured / HOSTS[0] / "sys/devices/system/node/node1/meminfo"
    meminfo.unlink()
    done = run(captured)
    assert done.returncode != 0
    assert f"cannot read {meminfo}" in done.stdout.replace("\n", " ")
