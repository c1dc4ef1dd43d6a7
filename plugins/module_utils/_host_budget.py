# SPDX-License-Identifier: Apache-2.0
"""From a host's variables to its HiCache budget: geometry, rules of the release, reserves. PRIVATE to the collection.

The arithmetic itself is in ``_budget.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _budget, _engine, _hicache, _nodes
from ansible_collections.llmfleet.sglang.plugins.module_utils._checks import check_host
from ansible_collections.llmfleet.sglang.plugins.module_utils._commands import effective_flags, node_set
from ansible_collections.llmfleet.sglang.plugins.module_utils._geometry import Geometry, read_geometry
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._size import GIB, parse_share
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import (
    Instance,
    Wants,
    integer,
    numeral,
    parse_wants,
)

# CUDA's context and libraries on each GPU, which no flag counts.
DEVICE_OVERHEAD = 2 * GIB


def _number_flag(flags: Mapping[str, Any], name: str) -> int | None:
    value = flags.get(name)
    return None if value is None else integer(value, name)


def device_memory(
    wants: Wants,
    instance: Instance,
    geometry: Geometry,
    bf16_keys: Geometry | None,
    flags: Mapping[str, Any],
    model_size: int | None,
) -> dict[str, Any]:
    """What the KV cache of one rank costs on its GPU, in bytes; and the tokens that fit, where that can be told.

    ``largest_tokens`` = (plan_gpu_memory x mem-fraction-static - model / ranks - 2 GiB - fixed) / bytes_per_token, in
    whole pages: an upper bound, since the engine measures what loading has really left. ``slots`` are the request slots
    (max-running-requests, which is 256 for DeepSeek V4 where it is not set, and one more). ``bf16_keys``: the same with
    the index keys of DeepSeek V4 in bf16, None for other models.
    """
    slots = (_number_flag(flags, "max-running-requests") or 256) + 1
    slots += (_number_flag(flags, "disaggregation-decode-extra-slots") or 0) if instance.role == "decode" else 0
    fixed = geometry.fixed_bytes(slots)
    context = _number_flag(flags, "context-length")
    found: dict[str, Any] = {
        "kind": geometry.kind,
        "bytes_per_token": float(geometry.bytes_per_token),
        "bytes_per_token_bf16_keys": float(bf16_keys.bytes_per_token) if bf16_keys else None,
        "fixed": fixed,
        "context_tokens": context,
        "context_bytes": None if context is None else int(context * geometry.bytes_per_token),
        "largest_tokens": None,
    }
    fraction = flags.get("mem-fraction-static")
    if wants.gpu_memory is not None and model_size is not None and fraction is not None:
        share = Fraction(str(parse_share(numeral(fraction), "mem-fraction-static")))
        room = int(wants.gpu_memory * share) - model_size // instance.tp_size - DEVICE_OVERHEAD - fixed
        found["largest_tokens"] = geometry.aligned(max(0, int(room / geometry.bytes_per_token)))
    return found


def node_sets(wants: Wants, topology: Mapping[str, Any]) -> tuple[dict[str, _nodes.NodeSet], list[RefusalError]]:
    """The node set of each instance by name, and why some have none."""
    sets, refused = {}, []
    for instance in (*wants.instances, *wants.fallbacks):
        try:
            sets[instance.name] = node_set(wants, instance, topology)
        except RefusalError as error:
            refused.append(error)
    return sets, refused


def host_budget(
    wants: Wants,
    sets: Mapping[str, _nodes.NodeSet],
    topology: Mapping[str, Any],
    config: Any,
    model_size: int | None = None,
) -> tuple[dict[str, Any], list[RefusalError]]:
    """The HiCache budget of a host and what its servers' KV caches cost on the device; see ``_budget.py``.

    ``config``: the content of the model's config.json, needed where HiCache is asked for. ``model_size`` in bytes.
    ``sets``: the node set of each instance. Result: the budget, with ``device`` for each server in it, and with
    ``fallbacks``, the parts of the fallbacks. Each of those is counted in the place of what it displaces and beside all
    other servers, so a node gives the larger of the two, and never their sum.
    """
    version = wants["plan_engine_version"]
    servers = [instance for instance in wants.instances if instance.is_engine]
    asked = {item.name: _asks(item, wants.hicache is not None) for item in (*servers, *wants.fallbacks)}
    refused: list[RefusalError] = []
    consumers: dict[str, _budget.Consumer] = {}
    device: dict[str, Any] = {}
    release = _hicache.RELEASES[_engine.DEFAULT_ENGINE]
    if any(asked.values()):
        try:
            version, release = _hicache.release_of(version, wants["plan_hicache_like"])
        except RefusalError as error:
            return {}, [error]

    def add(instance: Instance, takes: bool) -> None:
        try:
            consumers[instance.name], told = _consumer(
                wants, instance, sets[instance.name], config, model_size, version, release, takes
            )
            device.update({instance.name: told} if told else {})
        except RefusalError as error:
            refused.append(error)

    for instance in servers:
        add(instance, asked[instance.name])
    if refused:
        return {}, refused
    budget, refused = _budget.make_budget(
        topology, list(consumers.values()), wants.hicache, wants.reserves, release, wants["plan_memory_nodes"]
    )
    budget["fallbacks"] = []
    for fallback in wants.fallbacks if not refused else ():
        displaced = [instance.name for instance in wants.displaced(fallback)]
        replaced = [entry for entry in budget["instances"] if entry["name"] in displaced]
        add(fallback, asked[fallback.name] or _asks(fallback, any(entry["given"] for entry in replaced)))
        if fallback.name not in consumers:
            continue
        own = consumers[fallback.name]
        beside = [
            replace(
                consumers[entry["name"]],
                demand=None,
                share={int(node): amount for node, amount in entry["by_node"].items()},
            )
            for entry in budget["instances"]
            if entry not in replaced
        ]
        if own.demand is None and not own.none_because:
            if wants.hicache is not None and wants.hicache.kind == "ratio":
                own.demand = wants.hicache
            else:
                own.share, own.cut = _budget.share_of(budget, own, replaced, wants.hicache, len(wants.fallbacks)), True
        alone, problems = _budget.make_budget(
            topology, [own, *beside], None, wants.reserves, release, wants["plan_memory_nodes"]
        )
        refused += problems
        budget["fallbacks"] += [entry for entry in alone["instances"] if entry["name"] == own.name]
    budget["warnings"] += [
        f"{item.name}: max-total-tokens {item.tokens:,} is more than the {room:,} that fit on its GPUs "
        "(plan_gpu_memory x mem-fraction-static, less the model): the engine will take fewer, and the proof will fail"
        for item in consumers.values()
        if item.tokens is not None
        and (room := device.get(item.name, {}).get("largest_tokens")) is not None
        and item.tokens > room
    ]
    return budget | {"device": device}, refused


def _asks(instance: Instance, otherwise: bool) -> bool:
    """Whether a server is to have HiCache; ``otherwise`` where it does not say itself."""
    return otherwise if instance.hicache is None else instance.hicache.kind != "none"


def _consumer(
    wants: Wants,
    instance: Instance,
    nodes: _nodes.NodeSet,
    config: Any,
    model_size: int | None,
    version: str,
    release: _hicache.Release,
    asked: bool,
) -> tuple[_budget.Consumer, dict[str, Any] | None]:
    """A server as the budget sees it, and what its KV cache costs on the device, None where that cannot be told.

    ``asked``: whether it is to have HiCache. Raises RefusalError where it is, and cannot.
    """
    flags = effective_flags(wants, instance)
    environment = wants["plan_environment"] | instance.environment
    consumer = _budget.Consumer(
        name=instance.name,
        role=instance.role,
        unit=instance.unit,
        ranks=instance.tp_size,
        memory_nodes=nodes.memory_nodes,
        policy=wants["plan_numa_policy"],
        demand=instance.hicache if asked else None,
        hugepage=_hicache.HUGEPAGES.get(environment.get("SGLANG_HUGEPAGE_SIZE", "").strip().upper()),
    )
    if instance.hicache is not None and instance.hicache.kind == "none":
        consumer.none_because = "disabled by the operator"
    request = _hicache.Request(instance.role, wants["plan_device"], flags, environment)
    # A server that takes none whatever its model is needs no model to be read.
    takes = asked and not _takes_none(consumer, instance, request, version)
    geometry = _geometry_of(wants, instance, flags, environment, config, release, takes)
    if geometry is None:
        return consumer, None
    with_bf16 = _geometry_of(wants, instance, flags, environment, config, release, False, "bf16")
    other = with_bf16 if geometry.kind == "dsv4" else None
    told = device_memory(wants, instance, geometry, other, flags, model_size)
    consumer.geometry = geometry
    consumer.tokens = _number_flag(flags, "max-total-tokens") or told["largest_tokens"]
    if takes:
        _hicache_rules(consumer, instance, replace(request, kind=geometry.kind), version)
    return consumer, told


def budget_of(
    host: str,
    variables: Mapping[str, Any],
    topology: Mapping[str, Any],
    config: Any,
    model_size: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The HiCache budget of one host from its variables and its topology alone, with its refusals as data.

    For budgets without a plan: no peers, no artefacts, no disks, and releases that this collection cannot build but
    knows the rules of (``_hicache.RELEASES``).
    """
    wants = parse_wants(host, variables)
    refused = check_host(wants, built=False)
    budget: dict[str, Any] = {}
    if not refused:
        sets, refused = node_sets(wants, topology)
    if not refused:
        budget, refused = host_budget(wants, sets, topology, config, model_size)
    return budget, [error.on(host) for error in refused]


def _geometry_of(
    wants: Wants,
    instance: Instance,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config: Any,
    release: _hicache.Release,
    asked: bool,
    index_keys: str | None = None,
) -> Geometry | None:
    """The geometry of a server's KV cache. Where no HiCache is asked for it only informs, and may be unknown."""
    # Without the feature, every release stores index keys as fp8.
    keys = index_keys or wants.features.get("index_keys", "fp8")
    try:
        server = _hicache.server_of(release, flags, environment, instance.tp_size, keys)
        return read_geometry(config, server)
    except RefusalError:
        if asked:
            raise
        return None


def _takes_none(consumer: _budget.Consumer, instance: Instance, request: _hicache.Request, version: str) -> bool:
    """Note why a server has no HiCache; RefusalError where it was asked for it by name."""
    none = _hicache.broken(_hicache.NONE_RULES, version, request)
    if none is not None and instance.hicache is not None:
        raise RefusalError(
            none.code, f"{instance.name} asks for HiCache: {none.reason}", f"SGLang {version}", none.cure
        )
    if none is not None:
        consumer.none_because = none.reason
    return none is not None


def _hicache_rules(consumer: _budget.Consumer, instance: Instance, request: _hicache.Request, version: str) -> None:
    """RefusalError where a server that is to have HiCache could not start with it, or would be counted wrongly."""
    refused = _hicache.broken(_hicache.REFUSE_RULES, version, request)
    if not _takes_none(consumer, instance, request, version) and refused is not None:
        raise RefusalError(
            refused.code,
            f"{instance.name} is to have HiCache: {refused.reason} (SGLang {version})",
            "settings that this release can start with",
            refused.cure,
        )
