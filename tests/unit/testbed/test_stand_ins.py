# SPDX-License-Identifier: Apache-2.0
"""The stand-ins: what they show, and that they fail as the real thing does."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._proof import parse_log, parse_numa_maps

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


# ---------------------------------------------------------------------------------------------------- the light engine

LIGHT_ENGINE = Path(tiny_model.__file__).parents[1] / "light_engine"
# Six layers of DeepSeek V4's own dimensions: two of ratio 4, two of ratio 128.
V4_CONFIG = {
    "num_hidden_layers": 6,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}
# 5200 tokens are 20 pages of 256, and a tenth of them 2 window pages; ratio 2 doubles both.
V4_FLAGS = ["--tp-size", "2", "--max-total-tokens", "5200", "--enable-hierarchical-cache", "--hicache-ratio", "2"]
FULL_PAGE, SWA_PAGE = 95_232, 1_062_400
V4_POOLS = {
    "swa": 6 * 4 * 149_760,
    "deepseek_v4_c4": 2 * 40 * 37_440,
    "deepseek_v4_c4_indexer": 2 * 40 * 8_448,
    "deepseek_v4_c4_state": 2 * 4 * 65_536,
    "deepseek_v4_c4_indexer_state": 2 * 4 * 16_384,
    "deepseek_v4_c128": 2 * 40 * 1_728,
}


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} did not hold within {seconds} s"
        time.sleep(0.02)
    return value


class LightEngine:
    """One stand-in server; ``log`` is what it has written."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        (folder / "config.json").write_text(json.dumps(V4_CONFIG))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.path = folder / "log"
        argv = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port), "--model-path", str(folder)]
        # The machine of the tests need not have 10 GiB to spare.
        variables = {**os.environ, "PYTHONPATH": str(LIGHT_ENGINE), "LIGHT_ENGINE_RESERVE_BYTES": "0", **environment}
        with self.path.open("w") as stream:
            self.process = subprocess.Popen([*argv, *flags], env=variables, stderr=stream)

    @property
    def log(self) -> str:
        return self.path.read_text()

    def get(self, path: str) -> tuple[int, bytes] | None:
        """Status and body; None while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            assert self.process.poll() is None, self.log
            return None

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def light_engine(tmp_path: Path) -> Iterator[Callable[..., LightEngine]]:
    started: list[LightEngine] = []

    def start(*flags: str, **environment: str) -> LightEngine:
        started.append(LightEngine(tmp_path, *flags, **environment))
        return started[-1]

    yield start
    for engine in started:
        engine.process.kill()
        engine.process.wait()


def test_the_light_engine_makes_the_pools_that_it_says(light_engine: Callable[..., LightEngine]) -> None:
    assert sum(V4_POOLS.values()) == 40 * FULL_PAGE + 4 * SWA_PAGE
    engine = light_engine(*V4_FLAGS)
    assert until(lambda: engine.get("/server_info")) == (200, b'{"max_total_num_tokens": 5120}')
    told = parse_log(engine.log)
    assert told["max_total_tokens"] == 5120
    assert list(told["ranks"]) == ["TP0", "TP1"]
    for pools in told["ranks"].values():
        assert {pool["name"]: pool["bytes"] for pool in pools} == V4_POOLS
        assert all(pool["exact"] for pool in pools)
    # Profiled, then capped: each rank tells both.
    assert engine.log.count("DSV4 pool sizes: full=1048576, swa=104704, ") == 2
    assert engine.log.count("DSV4 pool sizes: full=5120, swa=512, c4=1280, c128=40, c4_state=16, ") == 2
    ranks = engine.children()
    assert len(ranks) == 2
    if Path("/proc/self/numa_maps").exists():
        pages = sum(-(-size // 4096) for size in V4_POOLS.values())
        for rank in ranks:
            lines = Path(f"/proc/{rank}/numa_maps").read_text().splitlines()
            shared = "\n".join(line for line in lines if "/dev/zero" in line)
            assert sum(parse_numa_maps(shared).values()) == pages * 4096
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(timeout=60) == 0
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def test_without_the_flag_the_light_engine_makes_no_pool(light_engine: Callable[..., LightEngine]) -> None:
    engine = light_engine("--tp-size", "2", "--disaggregation-mode", "decode", "--max-total-tokens", "5200")
    assert until(lambda: engine.get("/ready")) == (200, b"")
    assert engine.get("/v1/models") == (404, b"")
    assert parse_log(engine.log) == {"max_total_tokens": 5120, "ranks": {}}
    assert engine.children() == []
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("flags", "environment", "words", "status"),
    [
        (
            [*V4_FLAGS, "--disaggregation-mode", "decode"],
            {},
            "enable-hierarchical-cache and disable-radix-cache are mutually exclusive",
            1,
        ),
        (
            [*V4_FLAGS[:-2], "--hicache-size", "1"],
            {},
            "ValueError: DeepSeek V4 HiCache currently does not support --hicache-size; use --hicache-ratio instead.",
            -signal.SIGKILL,
        ),
        (
            V4_FLAGS[:-2],
            {},
            "ValueError: HiCache auto-sizing does not support DeepSeekV4TokenToKVPool",
            -signal.SIGKILL,
        ),
        (
            V4_FLAGS,
            {"LIGHT_ENGINE_RESERVE_BYTES": str(1 << 60)},
            "ValueError: Not enough host memory for V4 paged pool swa. Requesting 0.00 GB but only have -",
            -signal.SIGKILL,
        ),
    ],
    ids=["decode", "size", "neither", "memory"],
)
def test_the_light_engine_refuses_as_the_engine_does(
    light_engine: Callable[..., LightEngine], flags: list[str], environment: dict[str, str], words: str, status: int
) -> None:
    engine = light_engine(*flags, **environment)
    assert engine.process.wait(timeout=60) == status
    assert words in engine.log
