# SPDX-License-Identifier: Apache-2.0
"""The stand-ins: what they show, and that they fail as the real thing does."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from testbed.stand_ins import node_tree, tiny_model

NUMACTL = Path(tiny_model.__file__).parents[1] / "bin" / "numactl"
MEMINFO = {"MemTotal": 24683656, "MemFree": 20000000}


@pytest.mark.parametrize(
    ("cpus", "text"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 8], "0,2-3,8"), ([], ""), ([5, 4], "4-5")]
)
def test_cpu_lists_are_written_as_the_kernel_does(cpus: list[int], text: str) -> None:
    assert node_tree.cpu_list(cpus) == text


@pytest.mark.parametrize(
    ("cpus", "possible", "text"),
    [
        ([0, 1], 2, "3"),
        ([4, 5, 6, 7], 8, "f0"),
        ([0], 32, "00000001"),
        ([32], 64, "00000001,00000000"),
        ([0, 33], 40, "00000002,00000001"),
    ],
)
def test_cpu_masks_are_written_as_the_kernel_does(cpus: list[int], possible: int, text: str) -> None:
    assert node_tree.cpu_mask(cpus, possible) == text


def test_the_node_tree_splits_the_machine() -> None:
    files = node_tree.tree([0, 1, 2, 3], MEMINFO)
    assert files["online"] == files["possible"] == files["has_cpu"] == files["has_memory"] == "0-1\n"
    assert (files["node0/cpulist"], files["node1/cpulist"]) == ("0-1\n", "2-3\n")
    assert (files["node0/distance"], files["node1/distance"]) == ("10 21\n", "21 10\n")
    totals = [int(files[f"node{node}/meminfo"].split("MemTotal:")[1].split()[0]) for node in (0, 1)]
    assert sum(totals) == MEMINFO["MemTotal"]
    assert abs(totals[0] - totals[1]) <= 4
    assert files["node1/meminfo"].startswith("Node 1 MemTotal:")
    assert files["node1/hugepages/hugepages-2048kB/nr_hugepages"] == "0\n"
    assert node_tree.links([0, 1, 2, 3])["node1/cpu2"] == "../../cpu/cpu2"


def test_one_processor_still_makes_two_nodes() -> None:
    files = node_tree.tree([0], MEMINFO)
    assert (files["node0/cpulist"], files["node1/cpulist"]) == ("0\n", "0\n")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    cpus = sorted(os.sched_getaffinity(0))
    for name, text in node_tree.tree(cpus, MEMINFO).items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def numactl(program: str | Path, tree: Path, *argv: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of one of the two programs."""
    environment = {**os.environ, "LLMFLEET_STAND_IN_NODE_TREE": str(tree)}
    done = subprocess.run([program, *argv], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


needs_numactl = pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")


@needs_numactl
@pytest.mark.parametrize(
    "argv",
    [
        ["--membind=7", "true"],
        ["--cpunodebind=7", "true"],
        ["--preferred=7", "true"],
        ["--membind=0,7", "true"],
        ["--membind=-1", "true"],
        ["--cpunodebind", "-1", "true"],
        ["--preferred=-1", "true"],
        ["--membind=", "true"],
        ["--cpunodebind=", "true"],
        ["--preferred=", "true"],
        ["--membind=x", "true"],
        ["--physcpubind=99999", "true"],
        ["--no-such-option", "true"],
        ["--membind=0", "--cpunodebind=0"],
        ["--localalloc", "--membind=0", "true"],
        ["--membind=0", "no-such-program"],
        [],
    ],
)
def test_numactl_fails_with_the_words_of_the_real_one(tree: Path, argv: list[str]) -> None:
    real, stand_in = numactl("/usr/bin/numactl", tree, *argv), numactl(NUMACTL, tree, *argv)
    assert real[0] == 1
    assert stand_in == real


@needs_numactl
@pytest.mark.parametrize(
    "argv",
    [
        ["--cpunodebind=1", "--membind=1"],
        ["--cpunodebind", "1", "--membind", "1", "--"],
        ["-N1", "-m", "1"],
        ["--cpunodebind=1", "--preferred=1"],
        ["--cpunodebind=1", "--localalloc"],
    ],
)
def test_numactl_accepts_the_node_that_is_made_up(tree: Path, argv: list[str]) -> None:
    status, out, err = numactl(NUMACTL, tree, *argv, "grep", "Cpus_allowed_list", "/proc/self/status")
    assert (status, err) == (0, "")
    assert out.split()[1] == (tree / "node1" / "cpulist").read_text().strip()


@needs_numactl
def test_numactl_refuses_to_prefer_two_nodes(tree: Path) -> None:
    status, _, err = numactl(NUMACTL, tree, "--preferred=0-1", "true")
    assert status == 1
    assert err.startswith("usage: numactl")


def test_the_model_is_the_same_each_time() -> None:
    assert tiny_model.files() == tiny_model.files()


def test_the_model_can_be_built_again(tmp_path: Path) -> None:
    target = tmp_path / tiny_model.NAME
    assert tiny_model.build(target)
    assert not tiny_model.build(target)
    (target / "config.json").write_text("{}")
    assert tiny_model.build(target)
    assert json.loads((target / "config.json").read_text())["max_position_embeddings"] == 8192


def test_the_models_tensors_fill_their_file() -> None:
    data = tiny_model.files()["model.safetensors"]
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))
    assert ends[-1][1] == len(data) - 8 - length
    assert 350_000 < ends[-1][1] / 4 < 600_000


def test_every_word_is_one_token() -> None:
    ids, merges = tiny_model.vocabulary()
    space = tiny_model.byte_alphabet()[ord(" ")]
    assert len(set(tiny_model.byte_alphabet())) == 256
    assert all(space + word in ids for word in tiny_model.WORDS)
    assert all(left in ids and right in ids and left + right in ids for left, right in merges)
    assert sorted(ids.values()) == list(range(len(ids)))
