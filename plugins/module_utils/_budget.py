# SPDX-License-Identifier: Apache-2.0
"""How much host memory each server's HiCache may take, node by node, with every step of the arithmetic.

    make_budget(topology, consumers, demand, reserves, release) -> (budget, refusals)

Pure and deterministic. Only amounts that stay are counted: a node's total memory, its hugepage reservation, what the
operator keeps back, cgroup limits. What is free at the moment never enters, since a pinned pool is not free: a second
run would otherwise see its own pools and shrink. PRIVATE to the collection.

For each host node, in bytes:

    plain     = MemTotal - hugepages reserved (of every size)
    base      = os + services + what the operator keeps back on this node
    headroom  = the larger of page_cache and growth x (plain - base)
    processes = reserve for each rank that has memory from this node
    available = plain - base - headroom - processes      (not below 0)

``growth`` is what servers take beyond their idle size under load: with 400 GiB allowed and 291 GiB taken when idle, one
was killed at 399. Page cache is given back when processes grow, so the two are not added.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _hicache
from ansible_collections.llmfleet.sglang.plugins.module_utils._geometry import Geometry
from ansible_collections.llmfleet.sglang.plugins.module_utils._nodes import host_nodes
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._size import (
    GIB,
    parse_number,
    parse_share,
    parse_size,
    show,
    show_binary,
    show_both,
)

SCHEMA = 1
PLAIN = "plain"
WIDTH = 72
DEMANDS = ("total", "fraction", "ratio", "enabled")


@dataclass(frozen=True)
class Demand:
    """What an operator asks for: a ``total`` in bytes, a ``fraction`` of what is available, a fixed ``ratio``; or that
    there be none (kind ``none``)."""

    kind: str
    value: int | float = 0

    def data(self) -> dict[str, Any]:
        return {"kind": self.kind, "value": self.value}


@dataclass(frozen=True)
class Reserves:
    """What is kept back, in bytes. ``os``, ``page_cache`` and ``services`` for each node, ``process`` for each rank,
    ``check`` for the machine (the engine's own 10 GiB), ``nodes`` more for single nodes; ``growth`` is a share."""

    os: int = 4 * GIB
    page_cache: int = 8 * GIB
    services: int = 2 * GIB
    process: int = 4 * GIB
    check: int = _hicache.ENGINE_CHECK
    growth: Fraction = Fraction(28, 100)
    nodes: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Consumer:
    """One server of the host. ``memory_nodes`` is empty where its memory is not bound. ``none_because`` says why it has
    no HiCache; ``tokens`` is its pinned device pool, None where the engine sizes it by profiling."""

    name: str
    role: str
    unit: str
    ranks: int
    memory_nodes: Sequence[int] = ()
    policy: str = "strict"
    demand: Demand | None = None
    geometry: Geometry | None = None
    tokens: int | None = None
    hugepage: int | None = None
    none_because: str = ""
    # Bytes that it has by node, out of an earlier budget of the host: in the place of a demand.
    share: Mapping[int, int] | None = None
    # Whether its share is cut to what the engine accepts, as a fraction is, instead of refused.
    cut: bool = False

    @property
    def backing(self) -> str:
        return PLAIN if self.hugepage is None else str(self.hugepage)


def parse_demand(value: Any, what: str) -> Demand | None:
    """A mapping with one of ``total``, ``fraction``, ``ratio`` and ``enabled: false``; nothing asked is None.

    Raises RefusalError for anything else, a ratio that is text among it.
    """
    if value is None or value == {} or value == "":
        return None
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in DEMANDS:
        raise RefusalError(
            "hicache",
            f"{what} is {value!r}",
            "one of {total: 300GiB}, {fraction: 0.6}, {ratio: 2.0} and {enabled: false}",
            f"write {what} as a mapping with one of these keys",
        )
    (key, asked), where = next(iter(value.items())), f"{what}.{next(iter(value))}"
    if key == "total":
        return Demand("total", parse_size(asked, where))
    if key == "fraction":
        return Demand("fraction", parse_share(asked, where))
    if key == "enabled":
        if asked is not False:
            raise RefusalError("hicache", f"{where} is {asked!r}", "false", "name total, fraction or ratio to have it")
        return Demand("none")
    ratio = parse_number(asked, where)
    if not 0 < ratio <= _hicache.LARGEST_RATIO:
        raise RefusalError(
            "hicache", f"{where} is {asked!r}", "a number above 0", "a ratio is host memory over device memory: 2.0"
        )
    return Demand("ratio", ratio)


# --------------------------------------------------------------------------------------------------------- the capacity


def _ceil(value: Fraction) -> int:
    return math.ceil(value)


def _capacity(node: Mapping[str, Any], consumers: Sequence[Consumer], reserves: Reserves) -> dict[str, Any]:
    """One node's arithmetic, as data; see the module's text."""
    pools = {size: int(size) * pool["total"] for size, pool in sorted(node["hugepages"].items())}
    hugepages = sum(pools.values())
    plain = max(0, node["mem_total"] - hugepages)
    extra = reserves.nodes.get(node["id"], 0)
    base = reserves.os + reserves.services + extra
    headroom = max(reserves.page_cache, _ceil(reserves.growth * max(0, plain - base)))
    processes = sum(
        -(-consumer.ranks * reserves.process // len(consumer.memory_nodes))
        for consumer in consumers
        if node["id"] in consumer.memory_nodes
    )
    return {
        "id": node["id"],
        "total": node["mem_total"],
        "hugepages": hugepages,
        "hugepage_pools": pools,
        "reserved": {
            "os": reserves.os,
            "services": reserves.services,
            "node": extra,
            "headroom": headroom,
            "processes": processes,
        },
        "available": max(0, plain - base - headroom - processes),
    }


def _limit(topology: Mapping[str, Any], reserves: Reserves, processes: int) -> dict[str, Any] | None:
    """The tightest cgroup limit on the way to the services' slice, and what it leaves for pools; None without one."""
    limits = sorted(topology.get("limits") or [], key=lambda entry: (entry["limit"], entry["path"], entry["file"]))
    if not limits:
        return None
    least = limits[0]
    left = least["limit"] - _ceil(least["limit"] * reserves.growth) - processes
    return {**least, "headroom": _ceil(least["limit"] * reserves.growth), "available": max(0, left)}


# --------------------------------------------------------------------------------------------------------- the demands


def _spread(amount: int, weights: Mapping[int, int]) -> dict[int, int]:
    """An amount over nodes in proportion to their weights, each share rounded up (by less than a byte)."""
    whole = sum(weights.values())
    if not whole:
        weights, whole = dict.fromkeys(weights, 1), len(weights)
    return {node: -(-amount * weight // whole) for node, weight in weights.items()}


class _Host:
    """The working state of one budget. Amounts by node and backing, since hugepages are a pool of their own."""

    def __init__(
        self,
        topology: Mapping[str, Any],
        consumers: Sequence[Consumer],
        demand: Demand | None,
        reserves: Reserves,
        release: _hicache.Release,
        memory_only: Sequence[int],
    ) -> None:
        usable = host_nodes(topology, memory_only)
        # Memory that is not bound may come from anywhere.
        self.consumers = [
            replace(item, memory_nodes=usable) if not item.memory_nodes or item.policy == "none" else item
            for item in sorted(consumers, key=lambda item: item.name)
        ]
        self.nodes = [_capacity(node, self.consumers, reserves) for node in topology["nodes"] if node["id"] in usable]
        self.by_id = {node["id"]: node for node in self.nodes}
        processes = sum(item.ranks for item in self.consumers) * reserves.process
        self.limit = _limit(topology, reserves, processes)
        # What the engine's check sees: the machine and, in releases that heed it, what the cgroup leaves.
        self.countable = {"machine": _countable(topology, self.nodes)}
        if self.limit is not None and release.check_by_rank:
            self.countable["cgroup"] = max(0, self.limit["limit"] - processes)
        self.release, self.reserves = release, reserves
        # Who is to have HiCache, and what for: an own demand comes before the host's.
        self.wanted = {
            item.name: wanted
            for item in self.consumers
            if not item.none_because and (wanted := _wanted(item, demand)) is not None
        }
        self.asked: dict[str, dict[int, int]] = {}
        self.fixed: dict[str, _hicache.Sizing] = {}
        self.unused: dict[int, int] = {}
        self.flexible: list[Consumer] = []
        # The most that a server which asked for a fraction can get under a cgroup limit.
        self.caps: dict[str, int] = {}

    def capacity(self, node: int, backing: str) -> int:
        entry = self.by_id[node]
        there: int = entry["available"] if backing == PLAIN else entry["hugepage_pools"].get(backing, 0)
        return there

    def room(self, consumer: Consumer) -> dict[int, int]:
        return {node: self.capacity(node, consumer.backing) for node in consumer.memory_nodes}

    def need(self, consumer: Consumer, sized: _hicache.Sizing) -> int:
        return _hicache.engine_need(self.release, sized.pools, consumer.ranks, consumer.hugepage)


def _countable(topology: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> int:
    """What the engine will count as available when it builds its pools, without any pool: every node's plain memory,
    nodes without CPUs too, less system, services and processes."""
    plain: int = sum(
        max(0, node["mem_total"] - sum(int(size) * pool["total"] for size, pool in node["hugepages"].items()))
        for node in topology["nodes"]
    )
    kept = sum(sum(node["reserved"][key] for key in ("os", "services", "node", "processes")) for node in nodes)
    return max(0, plain - kept)


def _wanted(consumer: Consumer, demand: Demand | None) -> Demand | None:
    """An own demand comes before a share, and that before the host's."""
    if consumer.demand is None and consumer.share is not None:
        return Demand("total", sum(consumer.share.values())) if any(consumer.share.values()) else None
    return consumer.demand or demand


def _ask(host: _Host, demand: Demand | None) -> list[RefusalError]:
    """Fill ``host.asked``: bytes by consumer and node."""
    refused: list[RefusalError] = []
    takers = [item for item in host.consumers if item.name in host.wanted]
    inherit = [item for item in takers if item.demand is None and item.share is None]
    for consumer in takers:
        wanted = host.wanted[consumer.name]
        if consumer.demand is None and consumer.share is not None:
            room = host.room(consumer)
            host.asked[consumer.name] = {
                node: min(amount, room[node]) if consumer.cut else amount
                for node, amount in ((node, consumer.share.get(node, 0)) for node in consumer.memory_nodes)
            }
        elif wanted.kind == "ratio":
            try:
                geometry, tokens = _pinned(consumer, "a fixed ratio")
            except RefusalError as error:
                refused.append(error)
                continue
            found = _hicache.sizing(geometry, tokens, consumer.hugepage, ratio=float(wanted.value))
            host.fixed[consumer.name] = found
            host.asked[consumer.name] = _spread(found.backed * consumer.ranks, host.room(consumer))
        elif consumer.demand is not None and wanted.kind == "total":
            host.asked[consumer.name] = _spread(int(wanted.value), host.room(consumer))
        elif consumer.demand is not None:
            share = Fraction(str(wanted.value))
            host.asked[consumer.name] = {node: int(share * room) for node, room in host.room(consumer).items()}
    if demand is not None and demand.kind in ("total", "fraction"):
        _share_out(host, demand, inherit)
    _fit_fractions(host)
    return refused


def _share_out(host: _Host, demand: Demand, inherit: Sequence[Consumer]) -> None:
    """The host's total (the same part for each node) or fraction, over the servers that name none of their own.

    By ranks. A fraction is of what backs a server's pools: of plain memory, or of the node's hugepages of that size.
    """
    for node in host.nodes:
        number = node["id"]
        takers = [item for item in inherit if number in item.memory_nodes]
        part = int(demand.value) // len(host.nodes) if demand.kind == "total" else 0
        for item in takers:
            beside = takers
            if demand.kind == "fraction":
                beside = [other for other in takers if other.backing == item.backing]
                part = int(Fraction(str(demand.value)) * host.capacity(number, item.backing))
            weight = _weight(item) / sum((_weight(other) for other in beside), Fraction(0))
            host.asked.setdefault(item.name, {})[number] = int(part * weight)
        if not takers and part:
            host.unused[number] = part


def _weight(consumer: Consumer) -> Fraction:
    """A server's claim to one of its nodes: its ranks, which may be on any of them."""
    return Fraction(consumer.ranks, len(consumer.memory_nodes))


def _fit_fractions(host: _Host) -> None:
    """A fraction means of what is there: under a cgroup limit the servers that asked for one share what it leaves.

    Each gets its part by ranks, not by memory, so that more memory on one node never takes from a server of another.
    """
    askers = [item for item in host.consumers if item.name in host.asked]
    host.flexible = [
        item for item in askers if host.wanted[item.name].kind == "fraction" or (item.demand is None and item.cut)
    ]
    if host.limit is None:
        return
    plain = [item for item in askers if item.backing == PLAIN]
    cut = [item for item in plain if item in host.flexible]
    others = sum(sum(host.asked[item.name].values()) for item in plain if item not in cut)
    left, ranks = max(0, host.limit["available"] - others), sum(item.ranks for item in cut)
    for item in cut:
        cap, whole = left * item.ranks // ranks, sum(host.asked[item.name].values())
        host.caps[item.name] = cap
        if whole > cap:
            host.asked[item.name] = {node: amount * cap // whole for node, amount in host.asked[item.name].items()}


def _pinned(consumer: Consumer, what: str) -> tuple[Geometry, int]:
    if consumer.tokens is None:
        raise RefusalError(
            "device_pool",
            f"{consumer.name} is to have {what} of HiCache and its device pool is not pinned: the engine would size it "
            "by profiling, and the host pool is a multiple of it",
            "max-total-tokens in args of the server, or plan_gpu_memory and mem-fraction-static to compute it from",
            f"set max-total-tokens of {consumer.name}",
        )
    return _geometry(consumer), consumer.tokens


def _geometry(consumer: Consumer) -> Geometry:
    if consumer.geometry is None:
        raise ValueError(f"{consumer.name} is to have HiCache, and its geometry was not given")
    return consumer.geometry


# ----------------------------------------------------------------------------------------------------------- the budget


def make_budget(
    topology: Mapping[str, Any],
    consumers: Sequence[Consumer],
    demand: Demand | None,
    reserves: Reserves,
    release: _hicache.Release,
    memory_only: Sequence[int] = (),
) -> tuple[dict[str, Any], list[RefusalError]]:
    """The budget of one host and what is wrong with it; the shape is in ``docs/hicache.md``.

    ``topology`` as read by numa_info; ``consumers`` all servers of the host, those without HiCache too, since their
    processes take memory. With refusals the budget tells what was asked and gives nothing.
    """
    host = _Host(topology, consumers, demand, reserves, release, memory_only)
    refused = _ask(host, demand)
    refused += _check_nodes(host, demand)
    given: dict[str, _hicache.Sizing] = {}
    if not refused:
        # Fractions last: they are cut to what fixed amounts leave of the engine's own check.
        fixed = [item for item in host.consumers if item.name in host.asked and item not in host.flexible]
        for consumer in (*fixed, *host.flexible):
            try:
                given[consumer.name] = _size_one(host, consumer, given)
            except RefusalError as error:
                refused.append(error)
    if not refused:
        refused += _check_limits(host, given)
    if refused:
        given = {}
    return _told(host, given, demand), refused


def share_of(
    budget: Mapping[str, Any],
    consumer: Consumer,
    replaced: Sequence[Mapping[str, Any]],
    demand: Demand | None,
    sharers: int,
) -> dict[int, int]:
    """Bytes by node of a server that runs in the place of others: what those were given there, and one of ``sharers``
    equal parts of what the host's demand leaves over. So any of them may run in the place of its own, and no node ever
    gives more than it was asked for."""
    shared = {}
    for node in budget["nodes"]:
        key = str(node["id"])
        if consumer.memory_nodes and consumer.policy != "none" and node["id"] not in consumer.memory_nodes:
            continue
        same = {e["name"]: e["by_node"].get(key, 0) for e in budget["instances"] if e["backing"] == consumer.backing}
        there = node["available"] if consumer.backing == PLAIN else node["hugepage_pools"].get(consumer.backing, 0)
        part = 0
        if demand is not None and demand.kind == "total":
            part = int(demand.value) // len(budget["nodes"])
        elif demand is not None and demand.kind == "fraction":
            part = int(Fraction(str(demand.value)) * there)
        left = max(0, part - sum(same.values())) // sharers
        shared[node["id"]] = min(there, sum(same.get(entry["name"], 0) for entry in replaced) + left)
    return shared


def _check_nodes(host: _Host, demand: Demand | None) -> list[RefusalError]:
    """Every node and backing can give what is asked of it."""
    refused = []
    backings = {item.name: item.backing for item in host.consumers}
    for node in host.nodes:
        for backing in (PLAIN, *node["hugepage_pools"]):
            askers = {
                name: amounts[node["id"]]
                for name, amounts in host.asked.items()
                if backings[name] == backing and node["id"] in amounts
            }
            asked, there = sum(askers.values()), host.capacity(node["id"], backing)
            if asked > there:
                refused.append(_short(node, backing, askers, there))
    for consumer in host.consumers:
        missing = [
            number
            for number in consumer.memory_nodes
            if consumer.name in host.asked and consumer.backing not in (PLAIN, *host.by_id[number]["hugepage_pools"])
        ]
        if missing:
            refused.append(
                RefusalError(
                    "hicache_hugepages",
                    f"{consumer.name} backs its pools with pages of {show(consumer.hugepage or 0)}, and node "
                    f"{missing[0]} has no pool of that size",
                    "hugepages of that size reserved on each of its nodes",
                    "reserve them (vm.nr_hugepages by node, or hugepages= at boot), or remove SGLANG_HUGEPAGE_SIZE",
                )
            )
    if demand is not None and demand.kind == "total" and not refused:
        whole = sum(node["available"] for node in host.nodes)
        if int(demand.value) > whole:
            refused.append(
                RefusalError(
                    "hicache_host",
                    f"plan_hicache asks for {show_both(int(demand.value))}; the host has {show_both(whole)} to give",
                    f"at most {show_both(whole)} over {len(host.nodes)} nodes",
                    "ask for less, or lower the reserves (plan_reserve_*) where you know better",
                )
            )
    return refused


def _short(node: Mapping[str, Any], backing: str, askers: Mapping[str, int], there: int) -> RefusalError:
    asked = sum(askers.values())
    kept = node["reserved"]
    what = "plain memory" if backing == PLAIN else f"pages of {show(int(backing))}"
    arithmetic = (
        f"{show(node['total'])} less {show(node['hugepages'])} of hugepages, {show(kept['os'])} for the system, "
        f"{show(kept['services'] + kept['node'])} for services, {show(kept['headroom'])} of headroom and "
        f"{show(kept['processes'])} for processes"
    )
    return RefusalError(
        "hicache_node",
        f"node {node['id']} is asked for {show_both(asked)} of {what} by {' and '.join(sorted(askers))}, and has "
        f"{show_both(there)} to give: {show_both(asked - there)} short",
        f"at most {show_both(there)} on node {node['id']}"
        + (f" ({arithmetic})" if backing == PLAIN else " (what is reserved there)"),
        "lower plan_hicache or hicache of these servers, or the reserves (plan_reserve_*) where you know better",
    )


def _size_one(host: _Host, consumer: Consumer, given: Mapping[str, _hicache.Sizing]) -> _hicache.Sizing:
    """The largest pools within what was asked for one server; ``given``: what the servers of fixed amounts have."""
    if consumer.name in host.fixed:
        return host.fixed[consumer.name]
    geometry, tokens = _geometry(consumer), consumer.tokens
    if tokens is None and not geometry.takes_size:
        _pinned(consumer, "an amount")
    asked = sum(host.asked[consumer.name].values())
    room = asked // consumer.ranks
    accepts = _engine_accepts(host, consumer, given) if consumer in host.flexible else lambda _sized: True
    found = _hicache.largest(geometry, tokens, consumer.hugepage, lambda sized: sized.backed <= room and accepts(sized))
    if found is None:
        raise RefusalError(
            "hicache_small",
            f"{consumer.name} would get {show_both(asked)} of HiCache, {show_both(room)} for each of {consumer.ranks} "
            "ranks: less than one page of each pool",
            "room for one page of each pool on every rank" + ("" if tokens else ", and whole GB without a pinned pool"),
            f"ask for more, pin max-total-tokens of {consumer.name}, or set its hicache: {{enabled: false}}",
        )
    return found


def _engine_accepts(
    host: _Host, consumer: Consumer, given: Mapping[str, _hicache.Sizing]
) -> Callable[[_hicache.Sizing], bool]:
    """Whether the engine would start a server that asked for a fraction, so that it is cut instead of refused.

    The others of its kind are taken to have all that they ask for: that grows by less than the memory it is a part of,
    so more memory anywhere leaves more here. What they can have under a limit does not depend on memory at all.
    """
    fixed = [item for item in host.consumers if item.name in given and item not in host.flexible]
    taken = sum(_plain(item, given[item.name]) for item in fixed)
    again = max((host.need(item, given[item.name]) - _plain(item, given[item.name]) for item in fixed), default=0)
    others = [item for item in host.flexible if item is not consumer and item.backing == PLAIN]
    rooms = {}
    for counted, there in host.countable.items():
        asked = (
            host.caps[item.name] if counted == "cgroup" else sum(host.asked[item.name].values()) for item in others
        )
        rooms[counted] = there - host.reserves.check - taken - sum(asked)
    room = min(rooms.values())
    return lambda sized: max(host.need(consumer, sized), _plain(consumer, sized) + max(0, again)) <= room


def _plain(consumer: Consumer, sized: _hicache.Sizing) -> int:
    """Plain memory that a server's pools take."""
    return sized.backed * consumer.ranks if consumer.backing == PLAIN else 0


def _check_limits(host: _Host, given: Mapping[str, _hicache.Sizing]) -> list[RefusalError]:
    """The cgroup's limit, and the check that the engine itself makes before it allocates."""
    refused = []
    takers = [item for item in host.consumers if item.name in given]
    whole = sum(_plain(item, given[item.name]) for item in takers)
    if host.limit is not None and whole > host.limit["available"]:
        limit = host.limit
        refused.append(
            RefusalError(
                "hicache_limit",
                f"{' and '.join(item.name for item in takers)} would pin {show_both(whole)}, and {limit['file']} of "
                f"{limit['path']} leaves {show_both(limit['available'])}: "
                f"{show_both(whole - limit['available'])} short",
                f"at most that: {show_both(limit['limit'])} less {show_both(limit['headroom'])} for growth under load "
                "and the processes themselves",
                f"raise the limit of {limit['path']}, ask for less, or lower plan_reserve_growth",
            )
        )
    for consumer in takers:
        need = _engine_total(host, given, consumer)
        there = min(host.countable.values())
        if need > there:
            counted = "plain memory, which hugepages are not part of" if consumer.hugepage else "available memory"
            refused.append(
                RefusalError(
                    "engine_check",
                    f"SGLang would refuse to start {consumer.name}: its own check wants {show_both(need)} of "
                    f"{counted}, and will count {show_both(there)}: {show_both(need - there)} short",
                    "room for the pools of all servers, for what each rank asks again while its siblings have theirs, "
                    f"and for {show_both(host.reserves.check)} that the engine keeps free",
                    "ask for less HiCache" + (", or reserve fewer hugepages" if consumer.hugepage else ""),
                )
            )
    return refused


def _engine_total(host: _Host, given: Mapping[str, _hicache.Sizing], consumer: Consumer) -> int:
    """Plain memory for a server's check to pass when the other servers' pools are in place."""
    others = sum(
        _plain(item, given[item.name]) for item in host.consumers if item.name in given and item.name != consumer.name
    )
    return others + host.need(consumer, given[consumer.name]) + host.reserves.check


# ----------------------------------------------------------------------------------------------------------- the result


def _told(host: _Host, given: Mapping[str, _hicache.Sizing], demand: Demand | None) -> dict[str, Any]:
    instances = [_instance(host, item, given.get(item.name), demand) for item in host.consumers]
    nodes = []
    for node in host.nodes:
        number, key = node["id"], str(node["id"])
        by = {item["name"]: item["by_node"][key] for item in instances if item["by_node"].get(key)}
        nodes.append(
            {
                **node,
                "asked": sum(amounts.get(number, 0) for amounts in host.asked.values()) + host.unused.get(number, 0),
                "given": sum(by.values()),
                "unused": host.unused.get(number, 0),
                "by": by,
                "why": _node_why(host, number, by, instances),
            }
        )
    needed = max((_engine_total(host, given, item) for item in host.consumers if item.name in given), default=0)
    return {
        "schema": SCHEMA,
        "demand": demand.data() if demand else None,
        "growth": float(host.reserves.growth),
        "process": host.reserves.process,
        "nodes": nodes,
        "limit": host.limit,
        "host": {
            "available": sum(node["available"] for node in nodes),
            "asked": sum(node["asked"] for node in nodes),
            "given": sum(item["given"] for item in instances),
            "engine_check": {"available": min(host.countable.values()), "needed": needed},
        },
        "instances": instances,
        "warnings": _warnings(host, given),
    }


def _instance(host: _Host, consumer: Consumer, found: _hicache.Sizing | None, demand: Demand | None) -> dict[str, Any]:
    amounts = host.asked.get(consumer.name, {})
    asked = sum(amounts.values())
    given = found.backed * consumer.ranks if found else 0
    geometry, tokens = consumer.geometry, consumer.tokens
    told: dict[str, Any] = {
        "name": consumer.name,
        "role": consumer.role,
        "unit": consumer.unit,
        "policy": consumer.policy,
        "memory_nodes": list(consumer.memory_nodes),
        "ranks": consumer.ranks,
        "mode": found.mode if found else "off",
        "asked": asked,
        "given": given,
        "per_rank": found.backed if found else 0,
        # Rounded up, and never above what was asked of the node.
        "by_node": {str(node): -(-amount * given // asked) for node, amount in amounts.items() if asked and given},
        "backing": consumer.backing,
        "max_total_tokens": geometry.aligned(tokens) if found and geometry and tokens is not None else None,
        "flags": {},
        "tokens": {},
        "pools": [pool.data() for pool in found.pools] if found else [],
        "memory_max": None,
        "steps": [],
        "why": _instance_why(consumer, found, demand),
    }
    if found and geometry:
        # Both are said: a ratio is nothing without the pool that it multiplies.
        told["flags"] = {"enable-hierarchical-cache": True, **found.flags}
        if tokens is not None:
            told["flags"]["max-total-tokens"] = tokens
        ratio, size_gb = (float(found.value), None) if found.mode == "ratio" else (None, int(found.value))
        told["tokens"] = {"device": told["max_total_tokens"], **geometry.host_tokens(tokens or 0, ratio, size_gb)}
        told["memory_max"] = _memory_max(host, consumer, found)
        told["steps"] = _steps(consumer, found, asked, given, told["memory_max"])
    return told


def _memory_max(host: _Host, consumer: Consumer, found: _hicache.Sizing) -> int:
    """MemoryMax= of the unit: what it pins and its processes, with the same share left for growth as everywhere; and
    not so little that the engine's own check, which sees this limit, refuses. Never above a limit that holds already.
    """
    processes = consumer.ranks * host.reserves.process
    limit = _ceil((_plain(consumer, found) + processes) / (1 - host.reserves.growth))
    if host.release.check_by_rank:
        limit = max(limit, host.need(consumer, found) + host.reserves.check + processes)
    return min(limit, int(host.limit["limit"])) if host.limit else limit


def _steps(
    consumer: Consumer, found: _hicache.Sizing, asked: int, given: int, memory_max: int
) -> list[dict[str, int | str]]:
    """The arithmetic of one server, in order: what, bytes, and how it came about."""
    rows: list[dict[str, int | str]] = [
        {"what": "asked", "bytes": asked, "how": f"on nodes {', '.join(map(str, consumer.memory_nodes))}"},
        {"what": "for each rank", "bytes": asked // consumer.ranks, "how": f"{consumer.ranks} ranks"},
    ]
    rows += [
        {
            "what": f"pool {pool.name}",
            "bytes": pool.bytes,
            "how": f"{pool.layers} layers x {pool.pages} pages x {pool.item_bytes} B",
        }
        for pool in found.pools
    ]
    return [
        *rows,
        {"what": "one rank", "bytes": found.backed, "how": f"{found.mode} {found.value}, pages of {consumer.backing}"},
        {"what": "given", "bytes": given, "how": f"{consumer.ranks} ranks"},
        {"what": "MemoryMax", "bytes": memory_max, "how": "pools, processes, growth, the engine's own check"},
    ]


def _instance_why(consumer: Consumer, found: _hicache.Sizing | None, demand: Demand | None) -> str:
    if consumer.none_because:
        return consumer.none_because
    if _wanted(consumer, demand) is None:
        return "none asked"
    if found is None:
        return "refused"
    if found.mode == "ratio":
        return f"ratio {found.value:g} of {consumer.tokens:,} device tokens"
    return f"size {found.value} GB for each rank"


def _backing_of(host: _Host, name: str) -> str:
    return next(item.backing for item in host.consumers if item.name == name)


def _node_why(host: _Host, node: int, by: Mapping[str, int], instances: Sequence[Mapping[str, Any]]) -> str:
    """Who has a node's memory, or why nobody has it; what is behind it stands with the server."""
    bound = [item["name"] for item in instances if node in item["memory_nodes"] and not item["given"]]
    without = f"see {' and '.join(bound)}" if bound else "no server here"
    parts = [name if _backing_of(host, name) == PLAIN else f"{name} (hugepages)" for name in sorted(by)]
    if host.unused.get(node):
        parts.append(f"unused, {without}")
    return ", ".join(parts) or without


def _warnings(host: _Host, given: Mapping[str, _hicache.Sizing]) -> list[str]:
    found = []
    takers = [item for item in host.consumers if item.name in given]
    for item in takers:
        sized = given[item.name]
        if sized.mode == "ratio" and sized.value < 1:
            found.append(
                f"{item.name}: hicache-ratio {sized.value:g} is below 1: the host pool is smaller than the device's "
                "and hardly anything is found there that the device has not; releases differ in whether they warn"
            )
    for number, one in enumerate(takers):
        for other in takers[number + 1 :]:
            shared = set(one.memory_nodes) & set(other.memory_nodes)
            if shared and set(one.memory_nodes) != set(other.memory_nodes):
                found.append(
                    f"{one.name} and {other.name} share node {min(shared)} and not all of their nodes: the kernel may "
                    "fill the shared one first; give them the same node set or separate ones"
                )
    return found


# ------------------------------------------------------------------------------------------------------------ the table


def table(budget: Mapping[str, Any]) -> str:
    """The budget for a person: a line for each node and one for the host, then what there is to say of each server.

    No line is longer than ``WIDTH``, which is what Ansible prints without folding.
    """
    rows = [("node", "available", "reserved", "asked", "given", "why")]
    for node in budget["nodes"]:
        reserved = node["hugepages"] + sum(node["reserved"].values())
        amounts = (node["available"], reserved, node["asked"], node["given"])
        rows.append((str(node["id"]), *map(show, amounts), node["why"]))
    host = budget["host"]
    rows.append(("host", show(host["available"]), "", show(host["asked"]), show(host["given"]), ""))
    lines = _aligned(rows)
    for item in budget["instances"]:
        lines += ["", *_server_lines(item, budget.get("device", {}).get(item["name"]))]
    for item in budget.get("fallbacks", []):
        lines += ["", *_wrapped(f"{item['name']} stands by, in the place of its group's servers:", "")]
        lines += _server_lines(item, budget.get("device", {}).get(item["name"]))
    notes = [*_host_notes(budget), *(f"warning: {text}" for text in budget["warnings"])]
    for note in notes:
        lines += ["", *_wrapped(note, "")]
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _server_lines(item: Mapping[str, Any], device: Mapping[str, Any] | None) -> list[str]:
    nodes = ", ".join(map(str, item["memory_nodes"])) or "any"
    lines = _wrapped(f"{item['name']} (memory of node {nodes}): {show(item['given'])}, {item['why']}", "")
    if item["given"]:
        limit = f"MemoryMax {show(item['memory_max'])}"
        lines += _wrapped(
            f"{item['ranks']} ranks x {show(item['per_rank'])}, backed by {_backing(item)}; {limit}", "  "
        )
        tokens = item["tokens"]
        text = f"host pool {tokens['all']:,} tokens"
        if "window" in tokens:
            text += f", window {tokens['window']:,}: what can be reused is bounded by the smaller"
        lines += _wrapped(text, "  ")
    if device:
        lines += _wrapped(_device_text(device), "  ")
    return lines


def _backing(item: Mapping[str, Any]) -> str:
    return "plain pages" if item["backing"] == PLAIN else f"hugepages of {show_binary(int(item['backing']))}"


def _device_text(device: Mapping[str, Any]) -> str:
    """What the KV cache costs on the GPU of one rank."""
    parts = [f"on each GPU {device['bytes_per_token']:,.2f} B for each token"]
    other = device["bytes_per_token_bf16_keys"]
    if other:
        parts[0] += f" ({other:,.2f} with bf16 index keys)"
    if device["fixed"]:
        parts.append(f"{show(device['fixed'])} for request slots")
    if device["context_bytes"] is not None:
        parts.append(f"{show(device['context_bytes'])} for one context of {device['context_tokens']:,}")
    if device["largest_tokens"] is not None:
        parts.append(f"room for {device['largest_tokens']:,} tokens")
    return ", ".join(parts)


def _host_notes(budget: Mapping[str, Any]) -> list[str]:
    notes = [f"{budget['growth']:.0%} of each node is kept for growth under load, or the page cache if that is more."]
    if budget["limit"]:
        limit = budget["limit"]
        left = show(limit["available"])
        notes.append(f"{limit['file']} of {limit['path']} is {show(limit['limit'])} and leaves {left} for pools.")
    check = budget["host"]["engine_check"]
    if check["needed"]:
        notes.append(
            f"The engine's own check before it starts: it wants {show(check['needed'])} and will count "
            f"{show(check['available'])}."
        )
    return notes


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, len(row) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
