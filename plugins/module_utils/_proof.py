# SPDX-License-Identifier: Apache-2.0
"""The proof after a start: what a server's log and the kernel tell, against the plan. PRIVATE to the collection.

Three witnesses, and none is believed alone:

- the log of the start: which host pools each rank made, and the device's tokens that a ratio multiplies;
- the unit's cgroup (``memory.numa_stat``): bytes by node that are charged to the unit;
- ``/proc/PID/numa_maps``: bytes by node that the unit's processes map. It sees hugepages, which no cgroup of systemd
  counts; memory that several processes map counts once for each.

Nodes and ranks are keys of text, since JSON has no other. Bytes are whole. Everything here is pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._size import show

PLAIN = "plain"
# ---------------------------------------------------------------------------------------------------------- the log

# The engine writes GB, 10^9 bytes, with two decimals.
GB_STEP = 10**7
GB_ROUNDING = GB_STEP // 2
# What a process of a server with one rank writes no tag for.
ONLY_RANK = "TP0"

# What a start is known by, for `journalctl --grep` (PCRE2); parse_log needs no other line.
START_LINES = r"^(\[[^]]*\] )?(server_args=|Allocating .*GB host memory|max_total_num_tokens=|DSV4 pool sizes:)"

# utils/common.py, configure_logger: "[2026-01-31 12:00:00 DP0 TP1] message", milliseconds with SGLANG_LOG_MS.
_LINE = re.compile(r"(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?P<rank>(?: [A-Z_]+\d+)*)\] )?(?P<message>.*)")
_TOKENS = re.compile(r"max_total_num_tokens=(\d+), chunked_prefill_size=|DSV4 pool sizes: full=(\d+),")
_GB = r"(?P<gb>\d+\.\d\d) GB host memory"
# Name of the pool where the line has none, and the line.
_POOLS = [
    (name, re.compile(pattern))
    for name, pattern in (
        # memory_pool_host.py, DeepSeekV4PagedHostPool and DeepSeekV4StateHostPool (0.5.16, 0.5.23)
        (
            "",
            rf"Allocating {_GB} for V4 (?:paged|state) pool '(?P<name>[^']+)' "
            r"\(layers=(?P<layers>\d+), pages=(?P<pages>\d+), (?:item|state_page)_bytes=(?P<item>\d+), ",
        ),
        # pool_host/base.py, HostKVCache: 0.5.23, then 0.5.16
        ("", rf"Allocating (?P<name>\S+) hierarchical KV host pool: (?P<tokens>\d+) tokens, {_GB}"),
        ("kv", rf"Allocating {_GB} for hierarchical KV cache"),
        # pool_host/mamba.py; 0.5.16 does not tell the slots
        ("mamba", rf"Allocating {_GB} for hierarchical Mamba cache \((?:(?P<tokens>\d+) state slots, )?"),
        # pool_host/dsa.py
        ("indexer", rf"Allocating {_GB} for DSA indexer"),
        # Any other pool takes memory too: it is named by its own words, and no plan has it.
        ("", rf"Allocating {_GB} for (?P<name>[^(.]*[^(. ])"),
    )
]


def parse_log(text: str) -> dict[str, Any]:
    """What the engine's log of one start says of its KV cache: ``{max_total_tokens, ranks: {rank: [pool]}}``.

    A pool is ``{name, bytes, exact, tokens}``: ``bytes`` are ``exact`` where the line has pages and their size, else
    they are GB rounded to two decimals; ``tokens`` is None where the line has none (state slots, of a mamba pool).
    ``max_total_tokens`` is None where no line tells it; the device's pool is printed as profiled and then as capped by
    --max-total-tokens, so the last one counts. Of several starts in the text the last one counts.
    """
    tokens: int | None = None
    ranks: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        parts = _LINE.fullmatch(line)
        if parts is None:
            continue
        message = parts["message"]
        if message.startswith("server_args="):
            tokens, ranks = None, {}
        elif told := _TOKENS.match(message):
            tokens = int(told[1] or told[2])
        elif pool := _pool(message):
            ranks.setdefault((parts["rank"] or "").strip() or ONLY_RANK, []).append(pool)
    return {"max_total_tokens": tokens, "ranks": {rank: ranks[rank] for rank in sorted(ranks, key=_by_number)}}


def _by_number(rank: str) -> list[Any]:
    """Sorts TP10 behind TP9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", rank)]


def _pool(message: str) -> dict[str, Any] | None:
    for name, pattern in _POOLS:
        match = pattern.match(message)
        if match is None:
            continue
        told = match.groupdict()
        exact = told.get("item") is not None
        size = int(told["gb"].replace(".", "")) * GB_STEP
        if exact:
            size = int(told["layers"]) * int(told["pages"]) * int(told["item"])
        tokens = told.get("tokens")
        return {
            "name": told.get("name") or name,
            "bytes": size,
            "exact": exact,
            "tokens": int(tokens) if tokens else None,
        }
    return None


# ------------------------------------------------------------------------------------------------------- the kernel

_NODE = re.compile(r"\bN(\d+)=(\d+)")
# cgroup v2: anonymous memory and shared anonymous memory ("file" holds the latter too, so it is not added).
_V2 = re.compile(r"(?:anon|shmem) N")
# cgroup v1 has lists of pages instead: shared anonymous pages are on the anonymous list, locked ones on their own.
_V1 = re.compile(r"hierarchical_(?:anon|unevictable)=")
# Shared memory without a file in any file system, as numa_maps names it (a blank is written \040).
_OWN_MEMORY = re.compile(r"/dev/zero\\040\(deleted\)|/SYSV[0-9a-f]+\\040\(deleted\)|/memfd:\S*|/anon_hugepage\S*")


def add(total: dict[str, int], part: Mapping[str, int]) -> None:
    """Adds bytes by node to bytes by node."""
    for node, size in part.items():
        total[node] = total.get(node, 0) + size


def parse_numa_stat(text: str, page_size: int = 4096) -> dict[str, int]:
    """Bytes by node of the memory that processes made themselves, from a cgroup's ``memory.numa_stat``.

    cgroup v2 writes ``anon N0=BYTES N1=BYTES``, v1 ``hierarchical_anon=PAGES N0=PAGES N1=PAGES`` with pages of
    ``page_size``. Nodes without a byte are kept. Empty for a text that has neither.
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        unit = 1 if _V2.match(line) else page_size if _V1.match(line) else 0
        if unit:
            add(found, {node: int(count) * unit for node, count in _NODE.findall(line)})
    return found


def parse_hugetlb_numa_stat(text: str) -> dict[str, int]:
    """Bytes by node from a cgroup v2's ``hugetlb.<size>.numa_stat``: ``total=BYTES N0=BYTES N1=BYTES``."""
    return {node: int(count) for node, count in _NODE.findall(text)}


def mapping_bytes(line: str) -> dict[str, int]:
    """Bytes by node of one line of ``/proc/PID/numa_maps``, if it is memory that processes made themselves.

    That is anonymous memory, shared anonymous memory, System V and memfd segments, and every mapping of hugepages.
    Files are the page cache's, whoever read them first; the copied pages of libraries are too few to matter.
    """
    words = line.split()
    file = next((word[5:] for word in words if word.startswith("file=")), None)
    if file is None:
        own = "huge" in words or any(word.startswith("anon=") for word in words)
    else:
        own = "huge" in words or _OWN_MEMORY.fullmatch(file) is not None
    if not own:
        return {}
    size = next((int(word.partition("=")[2]) for word in words if word.startswith("kernelpagesize_kB=")), 4) * 1024
    return {word[1:].partition("=")[0]: int(word.partition("=")[2]) * size for word in words if _NODE.fullmatch(word)}


def parse_numa_maps(text: str) -> dict[str, int]:
    """Bytes by node of a whole ``/proc/PID/numa_maps``, see :func:`mapping_bytes`."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        add(found, mapping_bytes(line))
    return found


# ------------------------------------------------------------------------------------------------------ the findings


def findings(
    instances: Sequence[Mapping[str, Any]],
    observed: Mapping[str, Mapping[str, Any]],
    tolerance_bytes: int,
    tolerance_share: float,
) -> list[dict[str, str]]:
    """Where what runs is not what was planned: ``[{code, instance, found, expected, cure}]``, in order of instances.

    ``instances`` is the budget of each instance as in the plan; ``max_total_tokens`` there is in whole pages, as the
    engine makes it. ``observed`` is by unit what the module ``memory_info`` returns; what ``/server_info`` answered may
    be added to a unit as ``server_info``.

    ``tolerance_share``: how far a figure may be from the plan, as a share of it: the bytes of each pool, the bytes on a
    node, and the part of an instance's memory that may lie outside its nodes. ``tolerance_bytes``: what each rank may
    hold beside its pools (heap, CUDA context), which counts into the bytes on a node.

    ==================  =============================================================================================
    unit_stopped        there is no process to look at
    start_log           the journal has nothing of the start, so pools cannot be compared
    device_tokens       the device's pool has other tokens than were pinned
    server_info         the server was asked for its tokens and does not tell
    ranks               other ranks made host pools than were planned
    pool_missing        a planned pool was not made
    pool_size           a pool is larger or smaller than planned
    pool_unplanned      a pool that the plan does not have; any pool, where HiCache is off
    memory_unread       no witness saw all of the instance's memory
    memory_missing      less memory than the pools take
    pages_misplaced     memory outside the instance's nodes, policies strict and preferred
    node_over           more on a node than was planned there
    ==================  =============================================================================================
    """
    found: list[dict[str, str]] = []
    for instance in instances:
        unit = observed.get(instance["unit"])
        if unit is None or not unit["pids"]:
            found.append(_stopped(instance, unit))
            continue
        found += _log_findings(instance, unit, tolerance_share)
        if instance["mode"] != "off":
            found += _memory_findings(instance, unit, tolerance_bytes, tolerance_share)
        else:
            # Without pools nothing was set aside; where the pages of the process itself are is still a matter.
            found += _misplaced_findings(instance, _seen(unit), tolerance_share)
    return found


def _finding(instance: Mapping[str, Any], code: str, found: str, expected: str, cure: str) -> dict[str, str]:
    return {"code": code, "instance": instance["name"], "found": found, "expected": expected, "cure": cure}


def _stopped(instance: Mapping[str, Any], unit: Mapping[str, Any] | None) -> dict[str, str]:
    name = instance["unit"]
    found = f"{name} was not looked at" if unit is None else f"{name} is {unit['active_state']} and has no process"
    return _finding(instance, "unit_stopped", found, "a running unit", f"see journalctl -u {name}, then start it")


def _bytes(size: int) -> str:
    return f"{size} bytes" if size < 10**6 else f"{size} bytes ({show(size)})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _log_findings(instance: Mapping[str, Any], unit: Mapping[str, Any], share: float) -> list[dict[str, str]]:
    log = unit.get("log") or {"max_total_tokens": None, "ranks": {}}
    found = _token_findings(instance, log, unit.get("server_info") or {})
    if instance["mode"] == "off":
        return found + _pools_though_off(instance, log["ranks"])
    if not log["ranks"] and log["max_total_tokens"] is None:
        missing = _finding(
            instance,
            "start_log",
            f"the journal has no line of this start of {instance['unit']} that tells its pools",
            "the engine's lines about host pools and tokens",
            "the journal may have dropped them: raise SystemMaxUse= in journald.conf, restart the unit, verify again",
        )
        return [*found, missing]
    return found + _rank_findings(instance, log["ranks"]) + _pool_findings(instance, log["ranks"], share)


def _token_findings(
    instance: Mapping[str, Any], log: Mapping[str, Any], server_info: Mapping[str, Any]
) -> list[dict[str, str]]:
    pinned = instance["max_total_tokens"]
    if pinned is None:
        return []
    told = {"the log": log["max_total_tokens"], "/server_info": server_info.get("max_total_num_tokens")}
    found = [
        _finding(
            instance,
            "device_tokens",
            f"{source} tells {tokens} tokens of the device's pool",
            f"{pinned}, pinned by --max-total-tokens: host pools are a multiple of it",
            "fewer: the GPU has less memory than was planned with, so lower max-total-tokens or raise "
            "mem-fraction-static; more: the unit runs another command line than the plan's, so restart it",
        )
        for source, tokens in told.items()
        if tokens is not None and tokens != pinned
    ]
    if server_info and told["/server_info"] is None:
        silent = "/server_info does not tell max_total_num_tokens"
        cure = "ask it yourself on the host: another server may hold the port, or the release answers otherwise"
        found.append(_finding(instance, "server_info", silent, f"{pinned}", cure))
    return found


def _pools_though_off(
    instance: Mapping[str, Any], ranks: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, str]]:
    made = sorted({pool["name"] for pools in ranks.values() for pool in pools})
    if not made:
        return []
    size = sum(pool["bytes"] for pools in ranks.values() for pool in pools)
    return [
        _finding(
            instance,
            "pool_unplanned",
            f"host pools {_listed(made)} of {_bytes(size)} on {_listed(list(ranks))}",
            "no host pool: HiCache is off for this instance, and nothing was set aside for one",
            "remove enable-hierarchical-cache from the unit's command line, or plan HiCache for the instance",
        )
    ]


def _rank_findings(instance: Mapping[str, Any], ranks: Mapping[str, Any]) -> list[dict[str, str]]:
    if len(ranks) == instance["ranks"]:
        return []
    return [
        _finding(
            instance,
            "ranks",
            f"host pools of {len(ranks)} ranks in the log: {_listed(list(ranks))}",
            f"those of {instance['ranks']} ranks",
            f"compare --tp-size with the plan, and see journalctl -u {instance['unit']} for a rank that failed",
        )
    ]


def _pool_findings(
    instance: Mapping[str, Any], ranks: Mapping[str, Sequence[Mapping[str, Any]]], share: float
) -> list[dict[str, str]]:
    """One finding for each pool and figure; ranks that agree are told together."""
    planned = {pool["name"]: pool for pool in instance["pools"]}
    cases: dict[tuple[str, str, int], list[str]] = {}
    for rank, pools in ranks.items():
        made = {pool["name"] for pool in pools}
        for name, plan in planned.items():
            if name not in made:
                cases.setdefault(("pool_missing", name, 0), []).append(rank)
                continue
            size, rounding = _measured([pool for pool in pools if pool["name"] == name], plan)
            if abs(size - plan["bytes"]) > rounding + share * plan["bytes"]:
                cases.setdefault(("pool_size", name, size), []).append(rank)
        for name in sorted(made - set(planned)):
            size = sum(pool["bytes"] for pool in pools if pool["name"] == name)
            cases.setdefault(("pool_unplanned", name, size), []).append(rank)
    return [
        _pool_finding(instance, code, name, size, where, planned.get(name))
        for (code, name, size), where in sorted(cases.items())
    ]


def _pool_finding(
    instance: Mapping[str, Any],
    code: str,
    name: str,
    size: int,
    ranks: Sequence[str],
    plan: Mapping[str, Any] | None,
) -> dict[str, str]:
    where = f"on {_listed(ranks)}"
    if plan is None:
        return _finding(
            instance,
            code,
            f"host pool {name} of {_bytes(size)} {where}",
            f"only {_listed([pool['name'] for pool in instance['pools']])}",
            "the model or the engine has a pool that the plan does not count: plan with the release that runs",
        )
    wanted = f"{plan['layers']} layers x {plan['pages']} pages x {plan['item_bytes']} bytes = {_bytes(plan['bytes'])}"
    if code == "pool_missing":
        return _finding(
            instance,
            code,
            f"no host pool {name} {where}",
            f"{wanted} for each rank",
            f"see journalctl -u {instance['unit']} and whether its command line has --enable-hierarchical-cache",
        )
    difference = f"{_bytes(abs(size - plan['bytes']))} {'more' if size > plan['bytes'] else 'less'} than planned"
    return _finding(
        instance,
        code,
        f"host pool {name} has {_bytes(size)} {where}, {difference}",
        f"{wanted} for each rank",
        "compare --hicache-ratio, --hicache-size and --max-total-tokens of the running process with the plan, and the "
        "model's config.json with the one that was planned from",
    )


def _measured(pools: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of one rank's pools of one name, and how far they may be off because the log rounds."""
    size = sum(pool["bytes"] for pool in pools)
    rounding = sum(0 if pool["exact"] else GB_ROUNDING for pool in pools)
    tokens = [pool["tokens"] for pool in pools]
    if rounding and plan.get("tokens") and None not in tokens:
        # Tokens are exact; what one takes is the plan's, unless the same tokens take other GB.
        by_tokens = sum(tokens) * int(plan["bytes"]) // int(plan["tokens"])
        if sum(tokens) != plan["tokens"] or abs(by_tokens - size) <= rounding:
            return by_tokens, 0
    return size, rounding


def _memory_findings(
    instance: Mapping[str, Any], unit: Mapping[str, Any], tolerance_bytes: int, share: float
) -> list[dict[str, str]]:
    unread = _unread(instance, unit)
    found = []
    if unread:
        found.append(
            _finding(
                instance,
                "memory_unread",
                _listed(unread),
                "bytes by node of all of the instance's memory",
                "run as root on a kernel with NUMA; raise numa_maps_timeout_s where reading was stopped",
            )
        )
    memory = _seen(unit)
    total = sum(memory.values())
    pools = max(1, instance["ranks"]) * sum(pool["bytes"] for pool in instance["pools"])
    if not unread and total < pools * (1 - share):
        found.append(
            _finding(
                instance,
                "memory_missing",
                f"{_bytes(total)} of memory in all its processes",
                f"{_bytes(pools)} of host pools at least",
                f"see journalctl -u {instance['unit']}: the pools were not made, or were given back",
            )
        )
    return (
        found + _misplaced_findings(instance, memory, share) + _over_findings(instance, memory, tolerance_bytes, share)
    )


def _seen(unit: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by node. Each witness may miss some and invents none, so the larger figure is the truer one."""
    seen = [witness for witness in (unit["by_node"], unit["maps_by_node"]) if witness is not None]
    return {node: max(witness.get(node, 0) for witness in seen) for witness in seen for node in witness}


def _unread(instance: Mapping[str, Any], unit: Mapping[str, Any]) -> list[str]:
    """Why no witness saw all of the memory; empty where one did."""
    plain = instance["backing"] == PLAIN
    incomplete = list(unit["numa_maps_incomplete"])
    if unit["by_node"] is not None and (plain or unit["hugetlb_counted"]):
        return []
    if unit["maps_by_node"] is not None and not incomplete:
        return []
    first = "its cgroup has no memory.numa_stat" if unit["by_node"] is None else "its cgroup does not count hugepages"
    return [first, *(incomplete or ["numa_maps was not read"])]


def _in_order(memory: Mapping[str, int]) -> list[str]:
    return sorted(memory, key=int)


def _misplaced_findings(instance: Mapping[str, Any], memory: Mapping[str, int], share: float) -> list[dict[str, str]]:
    nodes = [str(node) for node in instance["memory_nodes"]]
    policy = instance["policy"]
    if policy == "none" or not nodes:
        return []
    outside = {node: memory[node] for node in _in_order(memory) if node not in nodes and memory[node]}
    total, wrong = sum(memory.values()), sum(outside.values())
    if wrong <= share * total:
        return []
    cures = {
        "strict": f"compare the unit's binding with the plan (systemctl cat {instance['unit']}) and restart it: "
        "a strict binding that holds cannot place pages elsewhere",
        "preferred": "the node was full when the pages were made: free memory there and restart the unit, or set the "
        "policy strict to be refused instead",
    }
    where = ", ".join(f"{_bytes(size)} on node {node}" for node, size in outside.items())
    return [
        _finding(
            instance,
            "pages_misplaced",
            f"{100 * wrong / total:.1f} % of {_bytes(total)} outside its nodes: {where}",
            f"pages on node {', '.join(nodes)} (policy {policy})",
            cures[policy],
        )
    ]


def _over_findings(
    instance: Mapping[str, Any], memory: Mapping[str, int], tolerance_bytes: int, share: float
) -> list[dict[str, str]]:
    """More than planned. An instance of one node is judged there; one of several as a whole, since the kernel fills the
    node that a rank runs on first, whatever the plan's account of it is. What lies outside is told as misplaced."""
    bound = [str(node) for node in instance["memory_nodes"]] if instance["policy"] != "none" else []
    nodes = [node for node in _in_order(memory) if not bound or node in bound]
    planned = sum(instance["by_node"].values())
    beside = tolerance_bytes * max(1, instance["ranks"])
    taken, allowed = sum(memory[node] for node in nodes), int(planned * (1 + share)) + beside
    if taken <= allowed:
        return []
    return [
        _finding(
            instance,
            "node_over",
            f"{_bytes(taken)} on node {_listed(nodes)}",
            f"at most {_bytes(allowed)}: {_bytes(planned)} of pools with tolerance, {_bytes(beside)} beside them",
            "another instance may be refused memory there: plan with what the instance really holds, or see what it is "
            f"in numa_maps of the processes of {instance['unit']}",
        )
    ]
