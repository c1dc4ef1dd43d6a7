# SPDX-License-Identifier: Apache-2.0
"""The proof after a start: logs as the engine writes them, memory as the kernel tells it, differences from a plan."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _host_budget, _proof
from ansible_collections.llmfleet.sglang.plugins.modules import memory_info
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.plan_cases import gpu
from tests.unit.plugins.module_utils.plan_cases import node as numa_node

MIB, GIB = 1 << 20, 1 << 30

# --------------------------------------------------------------------------------------------------------------- logs

# The pools of a DeepSeek V4 server with fp4 index keys and split rotary parts: name, kind, layers, pages, bytes.
NINE = [
    ("swa", "paged", 43, 780, 149760),
    ("deepseek_v4_c4", "paged", 21, 7814, 28672),
    ("deepseek_v4_c4_indexer", "paged", 21, 7814, 4096),
    ("deepseek_v4_c4_indexer_scale", "paged", 21, 7814, 256),
    ("deepseek_v4_c4_rope", "paged", 21, 7814, 8192),
    ("deepseek_v4_c4_state", "state", 21, 780, 65536),
    ("deepseek_v4_c4_indexer_state", "state", 21, 780, 16384),
    ("deepseek_v4_c128", "paged", 20, 7814, 1728),
    ("deepseek_v4_c128_rope", "paged", 20, 7814, 256),
]


def v4_line(name: str, kind: str, layers: int, pages: int, item: int) -> str:
    size = f"{'item' if kind == 'paged' else 'state_page'}_bytes={item}"
    return (
        f"Allocating {layers * pages * item / 1e9:.2f} GB host memory for V4 {kind} pool '{name}' "
        f"(layers={layers}, pages={pages}, {size}, layout=page_first)."
    )


def v4_start(ranks: list[str]) -> str:
    """A start with the ranks' lines in turn, as their processes write them."""
    stamp = "2026-01-31 12:00:00"
    sizes = "swa=99840, c4=250048, c128=7814, c4_state=6240, c128_state=0"
    lines = [
        f"[{stamp}] server_args=ServerArgs(model_path='/srv/model', max_total_tokens=1000192)",
        *(f"[{stamp}{rank}] DSV4 pool sizes: full=44700160, {sizes}" for rank in ranks),
        *(f"[{stamp}{rank}] DSV4 pool sizes: full=1000192, {sizes}" for rank in ranks),
        f"[{stamp}{ranks[0]}] max_total_num_tokens=1000192, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=256, context_len=524288, available_gpu_mem=10.11 GB",
        *(f"[{stamp}{rank}] {v4_line(*pool)}" for pool in NINE for rank in ranks),
        f"[{stamp}] The server is fired up and ready to roll!",
    ]
    return "".join(f"{line}\n" for line in lines)


def test_nine_pools_of_four_ranks() -> None:
    told = _proof.parse_log(v4_start([" TP0", " TP1", " TP2", " TP3"]))
    assert told["max_total_tokens"] == 1000192
    assert list(told["ranks"]) == ["TP0", "TP1", "TP2", "TP3"]
    for pools in told["ranks"].values():
        assert [pool["name"] for pool in pools] == [name for name, *_ in NINE]
        assert pools[0] == {"name": "swa", "bytes": 5022950400, "exact": True, "tokens": None}
        assert sum(pool["bytes"] for pool in pools) == 13438157824


@pytest.mark.parametrize(
    ("tag", "rank"),
    [("", "TP0"), (" TP1", "TP1"), (" DP0 TP1", "DP0 TP1"), (".123 DP0 TP1 EP1", "DP0 TP1 EP1"), (".123", "TP0")],
)
def test_the_rank_is_what_the_engine_tags_a_line_with(tag: str, rank: str) -> None:
    told = _proof.parse_log(f"[2026-01-31 12:00:00{tag}] {v4_line(*NINE[0])}\n")
    assert list(told["ranks"]) == [rank]


def test_ranks_are_in_order_of_number() -> None:
    lines = [f"[2026-01-31 12:00:00 TP{rank}] {v4_line(*NINE[0])}" for rank in (10, 2, 0)]
    assert list(_proof.parse_log("\n".join(lines))["ranks"]) == ["TP0", "TP2", "TP10"]


@pytest.mark.parametrize(
    ("line", "pool"),
    [
        (
            "Allocating kv hierarchical KV host pool: 304 tokens, 12.35 GB host memory.",
            {"name": "kv", "bytes": 12350000000, "exact": False, "tokens": 304},
        ),
        (
            "Allocating draft_swa hierarchical KV host pool: 1024 tokens, 0.10 GB host memory, packed MTP KV layers: "
            "target_layers=43, draft_layers=1, total_layers=44.",
            {"name": "draft_swa", "bytes": 100000000, "exact": False, "tokens": 1024},
        ),
        (
            "Allocating 40.00 GB host memory for hierarchical KV cache.",
            {"name": "kv", "bytes": 40000000000, "exact": False, "tokens": None},
        ),
        (
            "Allocating 1.07 GB host memory for hierarchical Mamba cache (129 state slots, layout=page_first).",
            {"name": "mamba", "bytes": 1070000000, "exact": False, "tokens": 129},
        ),
        (
            "Allocating 1.07 GB host memory for hierarchical Mamba cache (layout=page_first).",
            {"name": "mamba", "bytes": 1070000000, "exact": False, "tokens": None},
        ),
        (
            "Allocating 3.14 GB host memory for DSA indexer (layout=page_first), packed MTP layers: target_layers=60, "
            "draft_layers=1, total_layers=61.",
            {"name": "indexer", "bytes": 3140000000, "exact": False, "tokens": None},
        ),
        (
            "Allocating 3.14 GB host memory for MiniMax sparse index-K (layout=page_first).",
            {"name": "MiniMax sparse index-K", "bytes": 3140000000, "exact": False, "tokens": None},
        ),
    ],
)
def test_every_other_pool_that_the_engine_writes_of(line: str, pool: dict[str, Any]) -> None:
    assert _proof.parse_log(line)["ranks"] == {"TP0": [pool]}


def test_only_the_last_start_counts() -> None:
    assert _proof.parse_log(v4_start([" TP0", " TP1"]) + v4_start([""])) == _proof.parse_log(v4_start([""]))


def test_other_lines_tell_nothing() -> None:
    text = (
        "[2026-01-31 12:00:00] ValueError: Not enough host memory for V4 paged pool swa. Requesting 5.02 GB but only "
        "have 1.00 GB free.\n"
        "[2026-01-31 12:00:00] HiCache kv host pool (100 tokens) is smaller than the device pool (200 tokens);\n"
        "Prefill batch, max_total_num_tokens=5, chunked_prefill_size=8192\n"
    )
    assert _proof.parse_log(text) == {"max_total_tokens": None, "ranks": {}}


# ---------------------------------------------------------------------------------------------------------- the kernel

NUMA_MAPS = r"""55d0c0a00000 bind:0 file=/usr/bin/python3.11 mapped=245 N0=245 kernelpagesize_kB=4
55d0c1e4d000 bind:0 heap anon=1024 dirty=1024 active=0 N0=1000 N1=24 kernelpagesize_kB=4
7f0000000000 bind:0 file=/dev/zero\040(deleted) dirty=262144 active=0 N0=52429 N1=209715 kernelpagesize_kB=4
7f1000000000 bind:0 file=/SYSV00000000\040(deleted) dirty=16 N1=16 kernelpagesize_kB=4
7f2000000000 bind:0 file=/memfd:cuda\040pool\040(deleted) dirty=8 active=0 N0=8 kernelpagesize_kB=4
7f3000000000 bind:0 file=/anon_hugepage\040(deleted) huge dirty=4 N0=3 N1=1 kernelpagesize_kB=2048
7f4000000000 bind:0 huge anon=1 dirty=1 N1=1 kernelpagesize_kB=1048576
7f5000000000 bind:0 file=/dev/hugepages/pool huge dirty=2 N0=2 kernelpagesize_kB=2048
7f6000000000 bind:0 file=/usr/lib/libc.so.6 anon=4 dirty=4 mapped=268 mapmax=11 N0=268 kernelpagesize_kB=4
7f7000000000 bind:0 file=/srv/model/N1=7.safetensors mapped=9000 N1=9000 kernelpagesize_kB=4
7f8000000000 bind:0 anon=32 dirty=32 active=0 N1=32 kernelpagesize_kB=64
7f9000000000 bind:0
7ffd00000000 bind:0 stack anon=11 dirty=11 active=1 N0=11 kernelpagesize_kB=4
"""


def test_pages_by_node() -> None:
    assert _proof.parse_numa_maps(NUMA_MAPS) == {
        "0": (1000 + 52429 + 8 + 11) * 4096 + 5 * 2 * MIB,
        "1": (24 + 209715 + 16) * 4096 + 2 * MIB + GIB + 32 * 64 * 1024,
    }


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="a kernel without NUMA")
def test_the_running_kernel_writes_what_is_read() -> None:
    grown = bytearray(os.urandom(1)) * (32 * MIB)
    found = _proof.parse_numa_maps(Path("/proc/self/numa_maps").read_text())
    assert sum(found.values()) >= len(grown)


def test_numa_stat_of_cgroup_v2() -> None:
    text = (
        "anon N0=1000 N1=20\nfile N0=9999 N1=9999\nkernel_stack N0=5 N1=5\nshmem N0=300 N1=0\nfile_mapped N0=7 N1=7\n"
        "anon_thp N0=500 N1=500\nshmem_thp N0=1 N1=1\nunevictable N0=3 N1=3\n"
    )
    assert _proof.parse_numa_stat(text) == {"0": 1300, "1": 20}


def test_numa_stat_of_cgroup_v1() -> None:
    text = (
        "total=3665 N0=3665 N1=0\nanon=374 N0=374 N1=0\nunevictable=9 N0=9 N1=0\nhierarchical_total=90 N0=60 N1=30\n"
        "hierarchical_anon=35 N0=20 N1=15\nhierarchical_unevictable=5 N0=0 N1=5\n"
    )
    assert _proof.parse_numa_stat(text, 4096) == {"0": 20 * 4096, "1": 20 * 4096}


def test_numa_stat_of_hugepages() -> None:
    assert _proof.parse_hugetlb_numa_stat("total=6291456 N0=4194304 N1=2097152\n") == {"0": 4194304, "1": 2097152}


# ---------------------------------------------------------------------------------------------------------- the reading


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


GROUP = "llmfleet.slice/llmfleet-prefill.service"
PROPERTIES = {
    "ActiveState": "active",
    "MainPID": "41",
    "ControlGroup": f"/{GROUP}",
    "InvocationID": "0123456789abcdef0123456789abcdef",
}
ONE_PAGE = "7f0000000000 default anon=1 dirty=1 N{node}=1 kernelpagesize_kB=4\n"


def test_a_unit_of_cgroup_v2(tmp_path: Path) -> None:
    group = f"sys/fs/cgroup/{GROUP}"
    write(
        tmp_path,
        {
            f"{group}/cgroup.procs": "43\n41\n",
            f"{group}/workers/cgroup.procs": "42\n",
            f"{group}/memory.numa_stat": "anon N0=100 N1=0\nshmem N0=10 N1=1\n",
            f"{group}/hugetlb.2MB.numa_stat": "total=2097152 N0=2097152 N1=0\n",
            **{f"proc/{pid}/numa_maps": ONE_PAGE.format(node=pid % 2) for pid in (41, 42)},
        },
    )
    unit = memory_info.observe(PROPERTIES, str(tmp_path / "proc"), str(tmp_path / "sys"), float("inf"))
    assert unit == {
        "active_state": "active",
        "main_pid": 41,
        "invocation_id": PROPERTIES["InvocationID"],
        "pids": [41, 42, 43],
        "by_node": {"0": 110 + 2 * MIB, "1": 1},
        "hugetlb_counted": True,
        "maps_by_node": {"0": 4096, "1": 4096},
        "numa_maps_incomplete": ["process 43: numa_maps cannot be read: No such file or directory"],
        "log": None,
    }


def test_a_unit_of_cgroup_v1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            f"fs/cgroup/systemd/{GROUP}/cgroup.procs": "41\n",
            f"fs/cgroup/memory/{GROUP}/memory.numa_stat": "hierarchical_anon=3 N0=1 N1=2\n",
        },
    )
    unit = memory_info.observe(PROPERTIES, str(tmp_path), str(tmp_path), None)
    page = os.sysconf("SC_PAGE_SIZE")
    assert (unit["pids"], unit["by_node"], unit["hugetlb_counted"]) == ([41], {"0": page, "1": 2 * page}, False)
    assert (unit["maps_by_node"], unit["numa_maps_incomplete"]) == (None, [])


def test_a_unit_without_accounting_is_read_from_its_main_process(tmp_path: Path) -> None:
    write(tmp_path, {"proc/41/numa_maps": ONE_PAGE.format(node=0)})
    unit = memory_info.observe(PROPERTIES, str(tmp_path / "proc"), str(tmp_path), float("inf"))
    assert (unit["pids"], unit["by_node"], unit["maps_by_node"]) == ([41], None, {"0": 4096})


def test_a_unit_that_does_not_run(tmp_path: Path) -> None:
    stopped = {"ActiveState": "failed", "MainPID": "0", "ControlGroup": "", "InvocationID": "0123"}
    assert memory_info.observe(stopped, str(tmp_path), str(tmp_path), float("inf")) == {
        "active_state": "failed",
        "main_pid": 0,
        "invocation_id": "",
        "pids": [],
        "by_node": {},
        "hugetlb_counted": False,
        "maps_by_node": {},
        "numa_maps_incomplete": [],
        "log": None,
    }


def test_reading_stops_at_the_deadline_between_lines(tmp_path: Path) -> None:
    write(tmp_path, {f"{pid}/numa_maps": ONE_PAGE.format(node=0) * 5 for pid in (1, 2)})
    ticks = itertools.count()
    found, incomplete = memory_info.mapped_by(str(tmp_path), [1, 2], 3, lambda: next(ticks))
    assert found == {"0": 3 * 4096}
    assert incomplete == [f"process {pid}: numa_maps was not read to its end within the time allowed" for pid in (1, 2)]


class Module:
    """Stands for AnsibleModule where journalctl answers ``answer``."""

    def __init__(self, answer: tuple[int, str, str]) -> None:
        self.answer = answer
        self.command: list[str] = []

    def run_command(self, command: list[str]) -> tuple[int, str, str]:
        self.command = command
        return self.answer

    def fail_json(self, msg: str) -> None:
        raise SystemExit(msg)


def test_the_log_is_that_of_the_running_invocation() -> None:
    module = Module((0, v4_start([""]), ""))
    assert memory_info.start_log(module, "0123")["max_total_tokens"] == 1000192
    assert module.command[-1] == "_SYSTEMD_INVOCATION_ID=0123"


def test_a_journal_without_such_lines_tells_nothing() -> None:
    assert memory_info.start_log(Module((1, "", "")), "0123") == {"max_total_tokens": None, "ranks": {}}


def test_a_journal_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"journalctl exited with 1: Compiled without pattern matching support"):
        memory_info.start_log(Module((1, "", "Compiled without pattern matching support")), "0123")


@pytest.mark.parametrize("rank", ["", " TP0", " DP0 TP1"])
def test_what_is_asked_of_the_journal_is_all_that_a_log_is_parsed_from(rank: str) -> None:
    lines = v4_start([rank]).splitlines()
    asked = [line for line in lines if re.match(_proof.START_LINES, line)]
    assert len(asked) == len(lines) - 1
    assert _proof.parse_log("\n".join(asked)) == _proof.parse_log("\n".join(lines))


# --------------------------------------------------------------------------------------------------------- the findings


def pool(name: str, layers: int, pages: int, item_bytes: int, tokens: int | None = None) -> dict[str, Any]:
    size = layers * pages * item_bytes
    return {"name": name, "layers": layers, "pages": pages, "item_bytes": item_bytes, "tokens": tokens, "bytes": size}


def budget(pools: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The budget of one instance on node 0."""
    ranks = changes.get("ranks", 4)
    given = ranks * sum(entry["bytes"] for entry in pools)
    return {
        "name": "prefill",
        "role": "prefill",
        "unit": "llmfleet-prefill.service",
        "memory_nodes": [0],
        "policy": "strict",
        "ranks": ranks,
        "mode": "ratio",
        "given": given,
        "per_rank": given // ranks,
        "by_node": {"0": given},
        "max_total_tokens": 1000192,
        "backing": "plain",
        "pools": pools,
        **changes,
    }


def as_planned(instance: dict[str, Any], exact: bool = True) -> dict[str, Any]:
    """What memory_info would see of an instance that runs just as it was planned."""
    pools = [
        {
            "name": entry["name"],
            "bytes": entry["bytes"] if exact else int(f"{entry['bytes'] / 1e9:.2f}".replace(".", "")) * 10**7,
            "exact": exact,
            "tokens": None if exact else entry["tokens"],
        }
        for entry in instance["pools"]
    ]
    return {
        "active_state": "active",
        "main_pid": 41,
        "invocation_id": "0123",
        "pids": list(range(41, 41 + instance["ranks"] + 1)),
        "by_node": dict(instance["by_node"]),
        "hugetlb_counted": False,
        "maps_by_node": dict(instance["by_node"]),
        "numa_maps_incomplete": [],
        "log": {
            "max_total_tokens": instance["max_total_tokens"],
            "ranks": {f"TP{rank}": copy.deepcopy(pools) for rank in range(instance["ranks"])},
        },
    }


V4 = [pool(name, layers, pages, item) for name, _, layers, pages, item in NINE]
UNIT = "llmfleet-prefill.service"


def found_in(
    instance: dict[str, Any], unit: dict[str, Any], beside: int = 0, share: float = 0.0
) -> list[dict[str, str]]:
    return _proof.findings([instance], {instance["unit"]: unit}, beside, share)


def test_a_server_as_planned_has_no_findings() -> None:
    instance = budget(V4)
    unit = as_planned(instance)
    unit["log"] = _proof.parse_log(v4_start([" TP0", " TP1", " TP2", " TP3"]))
    unit["server_info"] = {"max_total_num_tokens": 1000192}
    assert found_in(instance, unit) == []


def test_four_fifths_on_the_wrong_node() -> None:
    instance = budget([pool("swa", 1, 1000, 1_000_000)], ranks=1)
    unit = as_planned(instance)
    unit["by_node"] = unit["maps_by_node"] = {"0": 200_000_000, "1": 800_000_000}
    assert found_in(instance, unit, beside=GIB, share=0.05) == [
        {
            "code": "pages_misplaced",
            "instance": "prefill",
            "found": "80.0 % of 1000000000 bytes (1.0 GB) outside its nodes: 800000000 bytes (800.0 MB) on node 1",
            "expected": "pages on node 0 (policy strict)",
            "cure": "compare the unit's binding with the plan (systemctl cat llmfleet-prefill.service) and restart it: "
            "a strict binding that holds cannot place pages elsewhere",
        }
    ]
    instance["policy"] = "preferred"
    (finding,) = found_in(instance, unit, beside=GIB, share=0.05)
    assert finding["code"] == "pages_misplaced"
    assert finding["cure"].startswith("the node was full when the pages were made")
    assert found_in(instance, unit, share=0.8) == []


@pytest.mark.parametrize(("policy", "nodes"), [("none", [0]), ("strict", [0, 1])])
def test_where_the_kernel_chooses_among_nodes_their_sum_is_judged(policy: str, nodes: list[int]) -> None:
    instance = budget([pool("swa", 1, 1000, 1_000_000)], ranks=1, policy=policy) | {"memory_nodes": nodes}
    instance["by_node"] = {"0": 500_000_000, "1": 500_000_000}
    unit = as_planned(instance)
    unit["by_node"] = unit["maps_by_node"] = {"0": 200_000_000, "1": 800_000_000}
    assert found_in(instance, unit, beside=100_000_000) == []
    unit["by_node"] = {"0": 400_000_000, "1": 800_000_000}
    (finding,) = found_in(instance, unit, beside=100_000_000)
    assert finding["code"] == "node_over"
    assert finding["found"] == "1200000000 bytes (1.2 GB) on node 0, 1"


def test_what_a_rank_holds_beside_its_pools_counts_into_its_node() -> None:
    instance = budget([pool("swa", 1, 1000, 1_000_000)], ranks=4)
    unit = as_planned(instance)
    unit["by_node"]["0"] += 4 * GIB
    assert found_in(instance, unit, beside=GIB) == []
    (finding,) = found_in(instance, unit, beside=GIB - 1)
    assert finding["code"] == "node_over"
    assert finding["found"] == "8294967296 bytes (8.3 GB) on node 0"
    assert finding["expected"].startswith("at most 8294967292 bytes (8.3 GB): 4000000000 bytes (4.0 GB) of pools")


@pytest.mark.parametrize("amount", [1, -1])
def test_a_pool_of_another_size_on_two_ranks_is_one_finding(amount: int) -> None:
    instance = budget(V4)
    unit = as_planned(instance)
    for rank in ("TP1", "TP3"):
        unit["log"]["ranks"][rank][0]["bytes"] += amount * 43 * 149760
    (finding,) = found_in(instance, unit)
    assert finding["code"] == "pool_size"
    size, word = 5022950400 + amount * 6439680, "more" if amount > 0 else "less"
    assert finding["found"] == (
        f"host pool swa has {size} bytes (5.0 GB) on TP1, TP3, 6439680 bytes (6.4 MB) {word} than planned"
    )
    assert finding["expected"] == ("43 layers x 780 pages x 149760 bytes = 5022950400 bytes (5.0 GB) for each rank")


def test_pools_that_are_missing_and_pools_that_nobody_planned() -> None:
    instance = budget(V4[1:])
    unit = as_planned(budget(V4[:-1]))
    unit["by_node"] = unit["maps_by_node"] = {"0": instance["given"]}
    assert [(finding["code"], finding["found"]) for finding in found_in(instance, unit)] == [
        ("pool_missing", "no host pool deepseek_v4_c128_rope on TP0, TP1, TP2, TP3"),
        ("pool_unplanned", "host pool swa of 5022950400 bytes (5.0 GB) on TP0, TP1, TP2, TP3"),
    ]


def test_a_rank_that_made_no_pools() -> None:
    instance = budget(V4)
    unit = as_planned(instance)
    del unit["log"]["ranks"]["TP2"]
    (finding,) = found_in(instance, unit)
    assert (finding["code"], finding["expected"]) == ("ranks", "those of 4 ranks")
    assert finding["found"] == "host pools of 3 ranks in the log: TP0, TP1, TP3"


def test_tokens_other_than_pinned() -> None:
    instance = budget(V4)
    unit = as_planned(instance)
    unit["log"]["max_total_tokens"] = 999936
    unit["server_info"] = {"max_total_num_tokens": 512}
    assert [(finding["code"], finding["found"]) for finding in found_in(instance, unit)] == [
        ("device_tokens", "the log tells 999936 tokens of the device's pool"),
        ("device_tokens", "/server_info tells 512 tokens of the device's pool"),
    ]


def test_pools_where_hicache_is_off() -> None:
    instance = budget([], mode="off", max_total_tokens=None, given=0, by_node={})
    unit = {**as_planned(budget(V4)), "by_node": {"0": 100}, "maps_by_node": None}
    (finding,) = found_in(instance, unit, beside=100)
    assert (finding["code"], finding["instance"]) == ("pool_unplanned", "prefill")
    assert finding["found"].endswith(f"of {4 * 13438157824} bytes (53.8 GB) on TP0, TP1, TP2, TP3")
    unit["log"] = None
    assert found_in(instance, unit, beside=100) == []


def test_a_start_that_the_journal_has_lost() -> None:
    instance = budget(V4)
    lost: list[Any] = [None, {"max_total_tokens": None, "ranks": {}}]
    for log in lost:
        (finding,) = found_in(instance, {**as_planned(instance), "log": log})
        assert finding["code"] == "start_log"


@pytest.mark.parametrize(
    ("observed", "found"),
    [
        ({}, "llmfleet-prefill.service was not looked at"),
        ({UNIT: {"active_state": "failed", "pids": []}}, "llmfleet-prefill.service is failed and has no process"),
    ],
)
def test_a_unit_that_cannot_be_looked_at(observed: dict[str, Any], found: str) -> None:
    (finding,) = _proof.findings([budget(V4)], observed, 0, 0.0)
    assert (finding["code"], finding["found"]) == ("unit_stopped", found)


STOPPED = ["process 42: numa_maps was not read to its end within the time allowed"]


@pytest.mark.parametrize(
    ("changes", "backing", "found"),
    [
        ({"by_node": None}, "plain", None),
        ({"maps_by_node": None}, "plain", None),
        ({"numa_maps_incomplete": STOPPED}, "plain", None),
        ({}, "2097152", None),
        ({"hugetlb_counted": True, "maps_by_node": None}, "2097152", None),
        (
            {"by_node": None, "maps_by_node": None},
            "plain",
            "its cgroup has no memory.numa_stat, numa_maps was not read",
        ),
        (
            {"by_node": None, "numa_maps_incomplete": STOPPED},
            "plain",
            f"its cgroup has no memory.numa_stat, {STOPPED[0]}",
        ),
        ({"maps_by_node": None}, "2097152", "its cgroup does not count hugepages, numa_maps was not read"),
    ],
)
def test_memory_that_no_witness_saw_whole(changes: dict[str, Any], backing: str, found: str | None) -> None:
    instance = budget(V4, backing=backing)
    told = [(finding["code"], finding["found"]) for finding in found_in(instance, {**as_planned(instance), **changes})]
    assert told == ([] if found is None else [("memory_unread", found)])


def test_either_witness_is_enough_to_find_pages_on_the_wrong_node() -> None:
    instance = budget(V4)
    for witness in ("by_node", "maps_by_node"):
        unit = as_planned(instance)
        unit[witness] = {"1": instance["given"]}
        assert "pages_misplaced" in [finding["code"] for finding in found_in(instance, unit, share=0.1)]


def test_pools_that_were_written_of_and_are_not_there() -> None:
    instance = budget(V4)
    unit = {**as_planned(instance), "by_node": {"0": 4096}, "maps_by_node": {"0": 8192}}
    (finding,) = found_in(instance, unit, share=0.05)
    assert (finding["code"], finding["found"]) == ("memory_missing", "8192 bytes of memory in all its processes")


# 28 layers x 4 KV heads x (128 + 128) x 2 bytes: 57344 bytes a token, in pages of 64.
KV = pool("kv", 1, 2001, 57344 * 64, 2001 * 64)
MAMBA = pool("mamba", 1, 129, 8_300_000, 129)


@pytest.mark.parametrize("pools", [[KV], [KV, MAMBA]], ids=["mha", "hybrid"])
def test_tokens_are_compared_where_the_log_rounds_the_bytes(pools: list[dict[str, Any]]) -> None:
    instance = budget(pools, max_total_tokens=64000)
    assert found_in(instance, as_planned(instance, exact=False)) == []
    unit = as_planned(instance, exact=False)
    # One page, 3.7 MB, is less than the log's rounding of 5 MB, and is seen all the same.
    unit["log"]["ranks"]["TP0"][0]["tokens"] += 64
    (finding,) = found_in(instance, unit)
    assert finding["found"].endswith(f"on TP0, {57344 * 64} bytes (3.7 MB) more than planned")


def test_the_same_tokens_at_another_size_are_found() -> None:
    instance = budget([KV], max_total_tokens=64000)
    unit = as_planned(instance, exact=False)
    unit["log"]["ranks"]["TP0"][0]["bytes"] //= 2
    (finding,) = found_in(instance, unit)
    assert finding["code"] == "pool_size"


def test_the_line_of_0_5_16_has_only_rounded_bytes() -> None:
    instance = budget([KV], ranks=1, max_total_tokens=64000)
    unit = as_planned(instance)
    unit["log"]["ranks"] = _proof.parse_log("Allocating 7.34 GB host memory for hierarchical KV cache.")["ranks"]
    assert KV["bytes"] == 7343702016
    assert found_in(instance, unit) == []
    unit["log"]["ranks"] = _proof.parse_log("Allocating 7.35 GB host memory for hierarchical KV cache.")["ranks"]
    assert [finding["code"] for finding in found_in(instance, unit)] == ["pool_size"]


# ----------------------------------------------------------------------------------------------------------- properties

POOLS = st.lists(
    st.builds(
        pool,
        st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True),
        st.integers(1, 100),
        st.integers(1, 100_000),
        st.integers(1, 200_000),
    ),
    min_size=1,
    max_size=9,
    unique_by=lambda entry: entry["name"],
)


@st.composite
def instances(draw: st.DrawFn) -> dict[str, Any]:
    """Any instance, its memory split anyhow over its nodes."""
    nodes = draw(st.lists(st.integers(0, 33), min_size=1, max_size=4, unique=True))
    instance = budget(
        draw(POOLS),
        ranks=draw(st.integers(1, 8)),
        policy=draw(st.sampled_from(["strict", "preferred", "none"])),
        memory_nodes=nodes,
        max_total_tokens=draw(st.none() | st.integers(1, 10**7)),
    )
    rest = instance["given"]
    instance["by_node"] = {}
    for node in nodes[1:]:
        instance["by_node"][str(node)] = draw(st.integers(0, rest))
        rest -= instance["by_node"][str(node)]
    instance["by_node"][str(nodes[0])] = rest
    return instance


@given(instances())
def test_an_observation_made_from_the_plan_has_no_findings(instance: dict[str, Any]) -> None:
    assert found_in(instance, as_planned(instance)) == []


@given(instances(), st.data())
def test_any_pool_that_is_off_by_more_than_the_tolerance_is_found(
    instance: dict[str, Any], data: st.DataObject
) -> None:
    share = data.draw(st.sampled_from([0.0, 0.01, 0.25]))
    unit = as_planned(instance)
    changed = data.draw(st.sampled_from(data.draw(st.sampled_from(sorted(unit["log"]["ranks"].items())))[1]))
    least = int(share * changed["bytes"]) + 1
    by = data.draw(st.integers(least, least + 10**12))
    changed["bytes"] += by if data.draw(st.booleans()) or by > changed["bytes"] else -by
    told = [finding for finding in found_in(instance, unit, share=share) if finding["code"] == "pool_size"]
    assert [f"host pool {changed['name']} has " in finding["found"] for finding in told] == [True]


@given(instances(), st.integers(1, 10**12))
def test_anything_more_on_a_node_is_found(instance: dict[str, Any], more: int) -> None:
    node = str(instance["memory_nodes"][0])
    unit = as_planned(instance)
    unit["by_node"][node] += more
    assert [finding["code"] for finding in found_in(instance, unit)] == ["node_over"]


# -------------------------------------------------------------------------------- two servers that a plan was made for

PLANNED = json.loads((Path(__file__).parents[3] / "fixtures/engine/planned_0.5.16.json").read_text())


def planned_start(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The budget of a server, computed again, and what was seen of it when it ran with the flags of that budget."""
    start = next(start for start in PLANNED["starts"] if start["model"] == model)
    instance = {
        "name": "prefill",
        "role": "prefill",
        "gpus": [0, 1],
        "port": 20000,
        "bootstrap_port": 8998,
        "args": start["args"],
        "hicache": {"total": start["total"]},
    }
    variables = {"plan_engine_version": "0.5.16", "plan_instances": [instance], "plan_model_path": "/srv/model"}
    topology = {
        "nodes": [numa_node(0, PLANNED["machine_bytes"], nodes=1)],
        "gpus": [gpu(index, 0) for index in range(2)],
        "mems_allowed": [0],
        "limits": [],
    }
    budget, refusals = _host_budget.budget_of("gpu", variables, topology, json.dumps(start["config"]))
    assert refusals == []
    planned = budget["instances"][0]
    assert planned["flags"] == start["flags"]
    assert abs(planned["given"] - start["given"]) < 2 * 6 * 4096  # each pool is a mapping of whole pages
    seen = {
        "active_state": "active",
        "main_pid": 1,
        "pids": list(range(1, len(start["by_process"]) + 1)),
        "by_node": None,
        "hugetlb_counted": False,
        "maps_by_node": {"0": sum(process.get("0", 0) for process in start["by_process"])},
        "numa_maps_incomplete": [],
        "log": _proof.parse_log("\n".join(start["log"])),
        "server_info": {"max_total_num_tokens": start["server_info_tokens"]},
    }
    return planned, seen


def test_the_engine_took_what_was_planned_for_its_two_ranks() -> None:
    planned, seen = planned_start("v4")
    assert list(seen["log"]["ranks"]) == ["TP0", "TP1"]
    for pools in seen["log"]["ranks"].values():
        assert [pool["bytes"] for pool in pools] == [pool["bytes"] for pool in planned["pools"]]
    assert _proof.findings([planned], {planned["unit"]: seen}, 4 * GIB, 0.02) == []
    twice = copy.deepcopy(planned)
    twice["pools"][0]["bytes"] *= 2
    codes = [finding["code"] for finding in _proof.findings([twice], {planned["unit"]: seen}, 4 * GIB, 0.02)]
    assert codes == ["pool_size", "memory_missing"]


def test_a_server_that_does_not_tell_its_tokens_is_a_finding() -> None:
    planned, seen = planned_start("v4")
    seen["server_info"] = {"max_total_num_tokens": None}
    (finding,) = _proof.findings([planned], {planned["unit"]: seen}, 4 * GIB, 0.02)
    assert (finding["code"], finding["expected"]) == ("server_info", "999936")


def test_a_server_that_says_it_is_ready_and_is_gone_is_found_by_its_memory() -> None:
    """Its port was held by another: the log tells of its pools, and no process of it holds them."""
    planned, seen = planned_start("mha")
    (finding,) = _proof.findings([planned], {planned["unit"]: seen}, 4 * GIB, 0.02)
    assert finding["code"] == "memory_missing"
