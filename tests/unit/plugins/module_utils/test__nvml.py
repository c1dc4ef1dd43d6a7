# SPDX-License-Identifier: Apache-2.0
"""Asking NVML through an interpreter: against the compiled stand-in, and where there is nobody who could answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._nvml import (
    NvmlError,
    members,
    merge,
    parse,
    read_nvml,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gpu_exporter.harness import EXAMPLE, build_stand_in
from tests.unit.plugins.module_utils.topology_cases import gpu

#: Reached only when the child never answers.
DEADLINE_S = 60

#: Three questions that the stand-in does not answer, answered as the state says: ``N.cpu_words``, the 64-bit words of
#: the CPUs next to GPU N, ``N.own_node``, the node that is its memory, and ``N.capability``, major and minor.
AFFINITY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int find(const int *gpu, const char *key, char *value)
{
    char line[256], wanted[64];
    FILE *file = fopen(getenv("NVML_STAND_IN_STATE"), "r");
    int found = 0;
    snprintf(wanted, sizeof wanted, "%d.%s=", *gpu, key);
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, wanted, strlen(wanted)))
            found = !!strcpy(value, line + strlen(wanted));
    if (file)
        fclose(file);
    return found;
}
int nvmlDeviceGetCpuAffinity(const int *gpu, unsigned count, unsigned long long *words)
{
    char value[256], *next = value;
    if (!find(gpu, "cpu_words", value))
        return 3;
    for (unsigned word = 0; word < count; word++)
        words[word] = strtoull(next, &next, 16);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(const int *gpu, int *major, int *minor)
{
    char value[256];
    if (!find(gpu, "capability", value))
        return 3;
    return sscanf(value, "%d %d", major, minor) == 2 ? 0 : 999;
}
int nvmlDeviceGetNumaNodeId(const int *gpu, int *node)
{
    char value[256];
    if (!find(gpu, "own_node", value))
        return 3;
    *node = atoi(value);
    return 0;
}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the compiled stand-in, which has every function that is asked."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "affinity.c").write_text(AFFINITY)
    build_stand_in(folder, str(folder / "affinity.c"))
    return folder


def environment(library: Path, folder: Path, state: str = "") -> dict[str, str]:
    """That of a host with the GPUs of the example, whose state has more lines."""
    path = folder / "state"
    path.write_text(f"{EXAMPLE.read_text()}{state}\n")
    return {"LD_LIBRARY_PATH": str(library), "NVML_STAND_IN_STATE": str(path)}


def ask(library: Path, folder: Path, state: str = "") -> list[dict[str, Any]]:
    return read_nvml(sys.executable, environment(library, folder, state), DEADLINE_S)


def test_a_gpu_has_exactly_these_facts(library: Path, tmp_path: Path) -> None:
    state = "3.cpu_words=000000ffffffffff 00ff000000000001\n3.own_node=10\n3.numa_node=70\n3.capability=12 1\n"
    assert ask(library, tmp_path, state)[3] == {
        "pci": "0000:70:00.0",
        "uuid": "GPU-5eed0000-0000-4000-8000-000000000003",
        "name": "NVIDIA H200",
        "memory_total": 150754820096,
        "memory_affinity": [70],
        "cpu_affinity": [*range(40), 64, *range(112, 120)],
        "numa_node": 10,
        "capability": "12.1",
        "driver": "580.95.05",
    }


def test_all_gpus_are_told_in_nvmls_order(library: Path, tmp_path: Path) -> None:
    found = ask(library, tmp_path)
    assert [entry["pci"][5:7] for entry in found] == ["17", "3d", "60", "70", "98", "bb", "dd", "ed"]
    assert [entry["memory_affinity"] for entry in found] == [[0]] * 4 + [[1]] * 4
    # What the driver does not support.
    assert {(entry["numa_node"], *entry["cpu_affinity"]) for entry in found} == {(None,)}


@pytest.mark.parametrize(
    ("function", "field", "empty"),
    [
        ("nvmlDeviceGetPciInfo_v3", "pci", None),
        ("nvmlDeviceGetUUID", "uuid", None),
        ("nvmlDeviceGetName", "name", None),
        ("nvmlDeviceGetMemoryInfo", "memory_total", None),
        ("nvmlDeviceGetMemoryAffinity", "memory_affinity", []),
        ("nvmlSystemGetDriverVersion", "driver", None),
    ],
)
@pytest.mark.parametrize("error", ["not_supported", "unknown", "no_permission"])
def test_one_failure_does_not_lose_the_rest(
    library: Path, tmp_path: Path, function: str, field: str, empty: Any, error: str
) -> None:
    whole = ask(library, tmp_path)
    assert whole[5][field] != empty
    of_one = function.startswith("nvmlDevice")
    failed = ask(library, tmp_path, f"{'5.' if of_one else ''}error.{function}={error}\n")
    assert failed[5] == whole[5] | {field: empty}
    if of_one:
        assert failed[:5] + failed[6:] == whole[:5] + whole[6:]


def test_text_that_is_no_text_is_one_failure(library: Path, tmp_path: Path) -> None:
    given = environment(library, tmp_path)
    with (tmp_path / "state").open("ab") as stream:
        stream.write(b"0.name=\xff\xfe\n")
    found = read_nvml(sys.executable, given, DEADLINE_S)[0]
    assert (found["name"], found["uuid"]) == (None, "GPU-5eed0000-0000-4000-8000-000000000000")


def test_a_library_that_does_not_know_a_question_is_one_failure(tmp_path: Path) -> None:
    """The stand-in alone: nvmlDeviceGetCpuAffinity and nvmlDeviceGetNumaNodeId are missing symbols."""
    build_stand_in(tmp_path)
    found = ask(tmp_path, tmp_path)[7]
    assert (found["cpu_affinity"], found["numa_node"], found["memory_affinity"]) == ([], None, [1])


def test_a_lost_gpu_answers_nothing_and_the_others_do(library: Path, tmp_path: Path) -> None:
    found = ask(library, tmp_path, "2.lost=1\n")
    assert len(found) == 8
    nothing = {"pci": None, "uuid": None, "name": None, "memory_total": None, "numa_node": None}
    assert found[2] == nothing | {
        "memory_affinity": [],
        "cpu_affinity": [],
        "capability": None,
        "driver": "580.95.05",
    }
    assert [entry["pci"] is None for entry in found].count(True) == 1


def test_memory_that_is_the_hosts_own_is_not_told(library: Path, tmp_path: Path) -> None:
    assert ask(library, tmp_path, "0.error.nvmlDeviceGetMemoryInfo=not_supported\n")[0]["memory_total"] is None
    # "Not available" as the largest number.
    assert ask(library, tmp_path, f"0.memory_total={2**64 - 1}\n")[0]["memory_total"] is None


def test_a_host_may_have_no_gpu(library: Path, tmp_path: Path) -> None:
    assert ask(library, tmp_path, "count=0\n") == []


# --------------------------------------------------------------------------------------------------- nobody answers


@pytest.mark.parametrize(("error", "said"), [("driver_not_loaded", "Driver Not Loaded"), ("lib_mismatch", "mismatch")])
def test_a_driver_that_refuses_is_told(library: Path, tmp_path: Path, error: str, said: str) -> None:
    with pytest.raises(NvmlError, match=rf"cannot ask NVML \(exit status 1\): NVMLError.*{said}.*a loaded driver"):
        ask(library, tmp_path, f"init={error}\n")


def test_no_library_is_told(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=r"NVML Shared Library Not Found.*Expected .*libnvidia-ml\.so\.1"):
        read_nvml(sys.executable, {"LD_LIBRARY_PATH": str(tmp_path)}, DEADLINE_S)


def test_no_interpreter_is_told(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=r"cannot run .*/nowhere: No such file or directory. Expected a Python"):
        read_nvml(str(tmp_path / "nowhere"))


def fake(folder: Path, script: str) -> str:
    """An interpreter that does something else."""
    path = folder / "python"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_without_nvidia_ml_py_is_told(tmp_path: Path) -> None:
    """Nothing is taken from the working directory or from PYTHONPATH, which are not the interpreter's own."""
    (tmp_path / "pynvml.py").write_text("raise SystemExit('imported from a foreign folder')\n")
    python = fake(tmp_path, f'cd {tmp_path}; exec {sys.executable} -S "$@"')
    with pytest.raises(NvmlError, match=r"ModuleNotFoundError: No module named 'pynvml'. Expected nvidia-ml-py"):
        read_nvml(python, {"PYTHONPATH": str(tmp_path)}, DEADLINE_S)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", r"\(exit status 3\): it said nothing"),
        ("kill -SEGV $$", r"\(exit status -11\)"),
        ("echo hello", r"printed 'hello\\n': expected JSON"),
        ("true", "printed '': expected JSON"),
        ("echo 7", r"printed '7\\n': expected a list of GPUs"),
        ("echo '[7]'", "expected a list of GPUs"),
    ],
)
def test_an_answer_that_is_none_is_told(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(NvmlError, match=message):
        read_nvml(fake(tmp_path, script), timeout_s=DEADLINE_S)


def test_chatter_before_the_answer_is_passed_over(tmp_path: Path) -> None:
    assert read_nvml(fake(tmp_path, "echo 'NVML: warning'; echo '[]'"), timeout_s=DEADLINE_S) == []


def test_a_driver_that_hangs_is_left(library: Path, tmp_path: Path) -> None:
    given = environment(library, tmp_path, "4.hang=nvmlDeviceGetMemoryInfo\n")
    with pytest.raises(NvmlError, match=r"NVML did not answer .* within 0\.5 s\. The driver may be stuck"):
        read_nvml(sys.executable, given, timeout_s=0.5)


def test_what_the_child_has_started_ends_with_it(tmp_path: Path) -> None:
    """A grandchild holds a lock for as long as it lives."""
    lock = tmp_path / "lock"
    with pytest.raises(NvmlError, match="did not answer"):
        read_nvml(fake(tmp_path, f"exec 9>{lock}; flock 9; sleep 600 & wait"), timeout_s=1)
    # Taken as soon as the last of them is gone.
    taken = subprocess.run(["flock", "--timeout", str(DEADLINE_S), str(lock), "true"], check=False)
    assert taken.returncode == 0


def test_the_environment_is_added_to_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN", "1")
    python = fake(tmp_path, 'echo "[{\\"name\\": \\"$OWN $MORE\\"}]"')
    assert read_nvml(python, {"MORE": "2"}, DEADLINE_S)[0]["name"] == "1 2"
    assert "MORE" not in os.environ


# -------------------------------------------------------------------------------------------------------------- pure


@given(st.sets(st.integers(0, 1023)))
def test_a_set_of_words_reads_back(numbers: set[int]) -> None:
    words = [sum(1 << number % 64 for number in numbers if number // 64 == word) for word in range(16)]
    assert members(words) == sorted(numbers)
    # The words are the same where a binding made them signed.
    assert members([word - 2**64 if word >= 2**63 else word for word in words]) == sorted(numbers)


@pytest.mark.parametrize("words", [None, 7, "7", ["1"], [None], [1.0]])
def test_what_is_no_set_is_empty(words: Any) -> None:
    assert members(words) == []


@pytest.mark.parametrize("rubbish", [None, "rubbish", -1, ["1"], {}, 1.5])
def test_an_answer_of_the_wrong_kind_is_no_answer(rubbish: Any) -> None:
    fields = ("pci", "memory_total", "memory_affinity", "cpu_affinity", "numa_node")
    found = parse(json.dumps([dict.fromkeys(fields, rubbish) | {"name": "N"}]))[0]
    assert found["name"] == "N"
    assert [found[field] for field in fields] == [None, None, [], [], None]


def test_facts_are_merged_by_address(library: Path, tmp_path: Path) -> None:
    """sysfs has a GPU that NVML does not know, and NVML has others."""
    nvml = ask(library, tmp_path, "1.pci=0000:01:00.0\n2.lost=1\n")
    found = merge([gpu(0, None), gpu(1, 1, {"name": "stale"})], nvml)
    assert [(entry["pci"], entry["numa_node"]) for entry in found] == [("0000:01:00.0", None), ("0000:02:00.0", 1)]
    assert found[0]["nvml"] == nvml[1]
    assert found[1]["nvml"] is None
    assert merge([], nvml) == []
