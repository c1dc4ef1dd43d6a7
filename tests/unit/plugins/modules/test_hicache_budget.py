# SPDX-License-Identifier: Apache-2.0
"""The budget of a host, as Ansible asks for it on the host: read, counted, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugins.module_utils.plan_cases import FLASH, decode, prefill
from tests.unit.plugins.module_utils.topology_cases import load, write
from tests.unit.plugins.modules.process import run_module

PINNED = prefill(args={"max-total-tokens": 1_000_192})


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Eight GPUs on two nodes of about 102 GB, under a limit of 160 GiB."""
    return write(tmp_path, {**load("eight_gpus_two_nodes"), "model/config.json": json.dumps(FLASH)})


def run(host: Path, check_mode: bool = False, instances: Any = None, **settings: Any) -> dict[str, Any]:
    arguments = {
        "instances": instances or [PINNED, decode()],
        "model_path": str(host / "model"),
        "settings": {f"plan_{name}": value for name, value in settings.items()},
        "sysfs_root": str(host / "sys"),
        "proc_root": str(host / "proc"),
    }
    return run_module("hicache_budget", arguments, check_mode)


@pytest.mark.parametrize("check_mode", [False, True])
def test_the_budget_and_its_table(host: Path, check_mode: bool) -> None:
    answer = run(host, check_mode, hicache={"total": "80GB"})
    assert (answer["changed"], answer["refusals"]) == (False, [])
    servers = {item["name"]: item for item in answer["budget"]["instances"]}
    assert 39 * 10**9 < servers["prefill"]["given"] <= 40 * 10**9
    assert servers["decode"]["given"] == 0
    assert answer["budget"]["limit"]["limit"] == 160 * 1024**3
    assert answer["table"].splitlines()[1].split()[0] == "0"


def test_what_does_not_fit_fails_with_every_reason(host: Path) -> None:
    answer = run(host, hicache={"total": "900GB"})
    assert answer["failed"]
    assert [refusal["code"] for refusal in answer["refusals"]] == ["hicache_node"]
    assert "node 0 is asked for 450.0 GB" in answer["msg"]
    assert answer["budget"]["host"]["given"] == 0
    assert "plan_hicache.total is '300 gigs'" in run(host, hicache={"total": "300 gigs"})["msg"]
    assert "plan_numa_policy is 'loose'" in run(host, numa_policy="loose")["msg"]
    assert "plan_device is 'rocm'" in run(host, device="rocm")["msg"]
    assert "tp_size of prefill is 0" in run(host, instances=[prefill(tp_size=0), decode()])["msg"]
    assert "gpu 0 is asked for by decode and prefill" in run(host, instances=[decode(gpus=[0]), prefill()])["msg"]
    assert "asks for GPU 9" in run(host, instances=[prefill(gpus=[9]), decode()])["msg"]


def test_without_the_models_dimensions_there_is_a_budget_of_nothing_only(host: Path) -> None:
    (host / "model/config.json").unlink()
    assert run(host)["budget"]["host"]["given"] == 0
    assert "config.json of the model" in run(host, hicache={"total": "80GB"})["msg"]


def test_a_truncated_tree_is_told_by_its_file(host: Path) -> None:
    (host / "sys/devices/system/node/node1/cpulist").unlink()
    answer = run(host)
    assert answer["failed"]
    assert "node1/cpulist" in answer["msg"]
