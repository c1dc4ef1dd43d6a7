# SPDX-License-Identifier: Apache-2.0
"""What the module reads of a tree, as Ansible runs it on a host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.llmfleet.sglang.plugins.module_utils._nodes import gpu_node
from ansible_collections.llmfleet.sglang.plugins.modules import numa_info

from tests.unit.gpu_exporter.harness import EXAMPLE, build_stand_in
from tests.unit.plugins.module_utils.topology_cases import load, write
from tests.unit.plugins.modules.process import run_module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write(tmp_path / "host", load("gpus_without_node"))


def run(root: Path, check_mode: bool = False, **more: Any) -> dict[str, Any]:
    """What the module answers about a tree."""
    arguments = {"sysfs_root": str(root / "sys"), "proc_root": str(root / "proc"), **more}
    return run_module("numa_info", arguments, check_mode)


def shape(value: Any) -> Any:
    """The keys of dictionaries at every depth; a list of them is as its first entry. Pools are named by their size."""
    if isinstance(value, dict):
        return {key: None if key == "hugepages" else shape(own) for key, own in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def documented(returns: dict[str, Any]) -> dict[str, Any]:
    """The same, as RETURN says."""
    found: dict[str, Any] = {}
    for key, own in returns.items():
        inner = documented(own["contains"]) if "contains" in own else None
        found[key] = [inner] if inner and own["type"] == "list" else inner
    return found


@pytest.mark.parametrize("check_mode", [False, True])
def test_the_answer_is_what_is_documented(tree: Path, tmp_path: Path, check_mode: bool) -> None:
    build_stand_in(tmp_path)
    (tmp_path / "state").write_text(f"{EXAMPLE.read_text()}1.pci=0000:97:00.0\n1.numa_node=1\n")
    write(tree, {"sys/fs/cgroup/llmfleet.slice/memory.max": "1000\n"})
    variables = {"LD_LIBRARY_PATH": str(tmp_path), "NVML_STAND_IN_STATE": str(tmp_path / "state")}
    answer = run(tree, check_mode, nvml_python=sys.executable, nvml_environment=variables)
    assert (answer["changed"], answer["nvml_error"], answer["mems_allowed"]) == (False, None, [0, 1])
    assert answer["limits"] == [{"path": "/llmfleet.slice", "file": "memory.max", "limit": 1000}]
    assert [gpu["nvml"]["uuid"][-1] for gpu in answer["gpus"]] == ["0", "1"]
    assert [gpu_node(gpu, answer, {}) for gpu in answer["gpus"]] == [0, 1]
    found = {key: answer[key] for key in answer if key not in ("changed", "invocation")}
    assert shape(found) == documented(yaml.safe_load(numa_info.RETURN))


def test_the_samples_are_as_documented() -> None:
    returns = yaml.safe_load(numa_info.RETURN)
    assert shape({key: own["sample"] for key, own in returns.items()}) == documented(returns)


def test_without_an_interpreter_nvml_is_not_asked(tree: Path, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"nvml_python": str(tmp_path / "nowhere/bin/python")}]
    for more in options:
        answer = run(tree, **more)
        assert answer["nvml_error"] is None
        assert [gpu["nvml"] for gpu in answer["gpus"]] == [None, None]


def test_nvml_that_cannot_be_asked_fails_nothing(tree: Path, tmp_path: Path) -> None:
    answer = run(tree, nvml_python=sys.executable, nvml_environment={"LD_LIBRARY_PATH": str(tmp_path)})
    assert "NVML Shared Library Not Found" in answer["nvml_error"]
    assert [gpu["nvml"] for gpu in answer["gpus"]] == [None, None]
    assert len(answer["nodes"]) == 2


def test_the_slice_is_the_operators(tree: Path) -> None:
    write(tree, {"sys/fs/cgroup/llm.slice/llm-a.slice/memory.max": "7\n"})
    assert run(tree)["limits"] == []
    assert [limit["limit"] for limit in run(tree, slice="llm-a.slice")["limits"]] == [7]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"slice": "llmfleet"}, "'llmfleet' is not the name of a slice"),
        ({"gpu_pci_ids": ["10de"]}, "'10de' is not a PCI id"),
        ({"sysfs_root": "/nowhere"}, "cannot list /nowhere/devices/system/node: No such file or directory (read with"),
    ],
)
def test_what_cannot_be_read_is_a_failure_in_words(tree: Path, more: dict[str, Any], message: str) -> None:
    answer = run(tree, **more)
    assert answer["failed"] is True
    assert message in answer["msg"]
