# SPDX-License-Identifier: Apache-2.0
"""What is wrong: with a host's wants, with its PD groups, and with what the host is. PRIVATE to the collection.

Each function returns refusals and changes nothing; facts that move (ports, free disk, free memory) only ever add some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _api_keys, _budget, _capability, _engine, _nodes
from ansible_collections.llmfleet.sglang.plugins.module_utils._addresses import advertised, group_members
from ansible_collections.llmfleet.sglang.plugins.module_utils._commands import effective_flags, release_plan
from ansible_collections.llmfleet.sglang.plugins.module_utils._features import OFF, check_features
from ansible_collections.llmfleet.sglang.plugins.module_utils._geometry import parse_config
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._size import show_binary, show_both
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import (
    ENGINE_ROLES,
    FALLBACK,
    ROLES,
    Instance,
    Wants,
)

SERVICE_USER = "llmfleet"


def choice(wants: Wants, name: str, allowed: Iterable[str]) -> None:
    options = list(allowed)
    if wants[name] not in options:
        raise RefusalError(
            "choice", f"{name} is {wants[name]!r}", f"one of {', '.join(options)}", f"set {name} to one of them"
        )


def _clash(kind: str, holders: Mapping[Any, list[str]], cure: str) -> list[RefusalError]:
    return [
        RefusalError(
            f"{kind}_shared", f"{kind} {key} is asked for by {' and '.join(names)}", f"one owner for each {kind}", cure
        )
        for key, names in sorted(holders.items(), key=lambda item: str(item[0]))
        if len(names) > 1
    ]


def check_host(wants: Wants, built: bool = True) -> list[RefusalError]:
    """What is wrong with one host's wants, whatever the host is like. ``built``: its engine is one that we build."""
    refused = list(wants.refusals)

    def attempt(check: Any, *arguments: Any) -> None:
        try:
            check(*arguments)
        except RefusalError as error:
            refused.append(error)

    if built:
        attempt(choice, wants, "plan_engine_version", _engine.ENGINES)
    attempt(choice, wants, "plan_router_version", _engine.ROUTERS)
    attempt(choice, wants, "plan_numa_policy", _nodes.POLICIES)
    attempt(choice, wants, "plan_numa_binder", _nodes.BINDERS)
    engine = _engine.ENGINES.get(wants["plan_engine_version"])
    if engine is not None:
        attempt(choice, wants, "plan_device", engine.devices)
        attempt(choice, wants, "plan_transfer_backend", engine.transfer_backends)
    if built:
        refused += check_features(wants.features, wants["plan_device"])
    if not str(wants["plan_model_path"]).startswith("/"):
        refused.append(
            RefusalError(
                "model_path",
                f"plan_model_path is {wants['plan_model_path']!r}",
                "the absolute path of the model's folder on the host",
                "set plan_model_path",
            )
        )

    names: dict[str, list[str]] = {}
    ports: dict[int, list[str]] = {}
    gpus: dict[int, list[str]] = {}
    for service in ("gpu_exporter", "prometheus"):
        port = wants[f"{service}_port"]
        if port is not None:
            ports.setdefault(port, []).append(service)
    for instance in (*wants.instances, *wants.fallbacks):
        names.setdefault(instance.name, []).append(f"a {instance.role}")
        if instance.role != FALLBACK:
            for purpose, port in instance.ports.items():
                ports.setdefault(port, []).append(f"{instance.name} ({purpose})")
            for gpu in instance.gpus:
                gpus.setdefault(gpu, []).append(instance.name)
        if instance.role == "router" or wants["plan_device"] == "cpu":
            if instance.gpus:
                why = "a router uses none" if instance.role == "router" else "plan_device is cpu"
                refused.append(
                    RefusalError(
                        "gpu_unused",
                        f"{instance.name} has gpus {instance.gpus}",
                        f"no gpus, since {why}",
                        "remove gpus",
                    )
                )
        elif not instance.gpus:
            refused.append(
                RefusalError("gpu_none", f"{instance.name} has no gpus", "at least one GPU index", "set gpus")
            )
        if instance.tp_size < 1 or (instance.gpus and len(instance.gpus) % instance.tp_size):
            refused.append(
                RefusalError(
                    "tp_size",
                    f"tp_size of {instance.name} is {instance.tp_size} with {len(instance.gpus)} GPUs",
                    "a divisor of the number of GPUs, 1 or more",
                    "correct tp_size or leave it out: it defaults to the number of GPUs",
                )
            )
        if instance.numa_nodes is not None and (not instance.numa_nodes or min(instance.numa_nodes) < 0):
            refused.append(
                RefusalError(
                    "numa_node",
                    f"numa_nodes of {instance.name} is {instance.numa_nodes}",
                    "node numbers of the host, 0 or more (-1 means that the firmware does not say)",
                    "name the nodes of its GPUs, or leave numa_nodes out to have them read from the host",
                )
            )
    refused += check_other_doors(wants)
    refused += check_fallbacks(wants)
    refused += _clash("name", names, "give each instance its own name")
    refused += _clash("port", ports, "give each service its own port")
    refused += _clash("gpu", gpus, "give each GPU to one instance")
    return refused


def check_fallbacks(wants: Wants) -> list[RefusalError]:
    """A fallback may share ports and GPUs with what it displaces, its group's instances of the host, and with nothing
    else: to start it must not end what is not its own."""
    refused = []
    groups = [fallback.group for fallback in wants.fallbacks]
    for fallback in wants.fallbacks:
        displaced = wants.displaced(fallback)
        if not displaced:
            refused.append(
                RefusalError(
                    "fallback_alone",
                    f"{fallback.name} is the fallback of group {fallback.group}, which has no instance on {wants.host}",
                    "a prefill, decode or router of that group on the host, in whose place it serves",
                    f"correct the group of {fallback.name}, or take it out of plan_instances",
                )
            )
        others = [other for other in (*wants.instances, *wants.fallbacks) if other.group != fallback.group]
        taken: dict[str, list[str]] = {}
        for service in ("gpu_exporter", "prometheus"):
            taken.setdefault(f"port {wants[f'{service}_port']}", []).append(service)
        for other in others:
            for name in _holdings(other):
                taken.setdefault(name, []).append(other.name)
        refused += [
            RefusalError(
                "fallback_shared",
                f"{name} is asked for by {fallback.name}, the fallback of group {fallback.group}, and by "
                f"{' and '.join(taken[name])}",
                f"what it shares to be of group {fallback.group} alone, which ends when it starts",
                f"give {fallback.name} GPUs and a port of its group, or some that nobody else has",
            )
            for name in _holdings(fallback)
            if name in taken
        ]
    return refused + [
        RefusalError(
            "fallback_second",
            f"group {group} has {groups.count(group)} fallbacks on {wants.host}",
            "one instance with the role server for each group of a host",
            "keep the one that is to be started at night",
        )
        for group in sorted(set(groups))
        if groups.count(group) > 1
    ]


def _holdings(instance: Instance) -> list[str]:
    """What nobody else can have while an instance runs."""
    return [f"port {port}" for port in instance.ports.values()] + [f"GPU {gpu}" for gpu in instance.gpus]


def check_other_doors(wants: Wants) -> list[RefusalError]:
    """What would let requests in past the HTTP server that asks for a key."""
    refused = []
    for instance in (*wants.instances, *wants.fallbacks) if wants.api_keys else ():
        if not instance.is_engine:
            continue
        flags = effective_flags(wants, instance)
        environment = wants["plan_environment"] | instance.environment
        found = [f"the flag {name}" for name in _api_keys.OTHER_DOORS if flags.get(name) not in (None, False)]
        found += [f"the variable {name}" for name in _api_keys.OTHER_DOORS_ENVIRONMENT if name in environment]
        if str(flags.get("tokenizer-worker-num", 1)) != "1":
            found.append("more than one tokenizer-worker-num")
        refused += [
            RefusalError(
                "api_keys_other_door",
                f"{instance.name} has {what} and {_api_keys.VARIABLE} is set",
                "one HTTP server, in one process: nothing else of the engine asks for a key",
                f"remove it, or {_api_keys.VARIABLE}",
            )
            for what in found
        ]
    return refused


def _agreed(wants: Wants) -> dict[str, str]:
    """What the prefill and decode servers of a group have to have in common."""
    names = (
        "plan_engine_version",
        "plan_device",
        "plan_transfer_backend",
        "plan_model_path",
        "plan_served_model_name",
    )
    features = {"index_keys of plan_features": wants.features.get("index_keys", OFF)}
    return {name: str(wants[name]) for name in names} | features


def check_group(fleet: Mapping[str, Wants], group: str, host: str) -> list[RefusalError]:
    """What is wrong with a PD group as seen from one of its hosts."""
    refused = []
    for role in ROLES:
        if not group_members(fleet, group, role):
            refused.append(
                RefusalError(
                    "group_incomplete",
                    f"group {group} has no {role}",
                    "at least one prefill, one decode and one router in each group",
                    f"add a {role} to the group, or correct the group's name on its instances",
                )
            )
    found: dict[str, dict[str, list[str]]] = {}
    for role in ENGINE_ROLES:
        for wants, _instance in group_members(fleet, group, role):
            for name, value in _agreed(wants).items():
                found.setdefault(name, {}).setdefault(value, []).append(wants.host)
    for name, values in found.items():
        if len(values) > 1:
            told = ", ".join(f"{value!r} on {' '.join(sorted(set(hosts)))}" for value, hosts in sorted(values.items()))
            refused.append(
                RefusalError(
                    "group_disagrees",
                    f"{name} of group {group} is {told}",
                    "one value for all prefill and decode servers of a group",
                    f"set {name} for the group of hosts, not for one of them",
                )
            )
    refused += check_group_keys(fleet, group)
    routers = {wants.host for wants, _instance in group_members(fleet, group, "router")}
    for member in (*group_members(fleet, group, "prefill"), *group_members(fleet, group, "decode")):
        peers = (
            routers
            if member[1].role == "decode"
            else routers | {w.host for w, _i in group_members(fleet, group, "decode")}
        )
        for peer in sorted(peers):
            if host in (peer, member[0].host):
                try:
                    advertised(member, peer)
                except RefusalError as error:
                    refused.append(error)
    return refused


def check_group_keys(fleet: Mapping[str, Wants], group: str) -> list[RefusalError]:
    """A router shows its servers the first key, and hands on what clients have shown it: all need the same keys."""
    found: dict[str, set[str]] = {}
    for role in ROLES:
        for wants, _instance in group_members(fleet, group, role):
            found.setdefault(_api_keys.digest(wants.api_keys), set()).add(wants.host)
    if len(found) < 2:
        return []
    told = " differ from those of ".join(" ".join(sorted(hosts)) for hosts in sorted(found.values(), key=sorted))
    return [
        RefusalError(
            "api_keys_disagree",
            f"{_api_keys.VARIABLE} of group {group}: the keys of {told}",
            "the same keys in the same order for all members of a group",
            f"set {_api_keys.VARIABLE} for the group of hosts, not for one of them",
        )
    ]


def check_peers(fleet: Mapping[str, Wants], groups: Sequence[str], host: str) -> list[RefusalError]:
    """A host cannot be planned when another of its PD groups is not sound: it would be told half of the group."""
    peers = [
        wants
        for wants in fleet.values()
        if wants.host != host and any(instance.group in groups for instance in wants.instances)
    ]
    return [
        RefusalError(
            "peer",
            f"{wants.host}, of the same PD group, is refused: {problems[0]}",
            "every host of a group to be sound",
            f"correct {wants.host} first",
        )
        for wants in sorted(peers, key=lambda item: item.host)
        if (problems := check_host(wants))
    ]


def check_platform(facts: Mapping[str, Any]) -> list[RefusalError]:
    system = facts["os"]
    refused = []
    if system["major"] not in _engine.PLATFORMS.get(system["distribution"], ()):
        known = ", ".join(f"{name} {version}" for name, versions in _engine.PLATFORMS.items() for version in versions)
        refused.append(
            RefusalError(
                "os", f"{system['distribution']} {system['major']}", known, "install a supported system on this host"
            )
        )
    if system["arch"] not in _engine.ARCHITECTURES:
        refused.append(
            RefusalError(
                "arch",
                system["arch"],
                " or ".join(_engine.ARCHITECTURES),
                "use a host of that architecture: wheels are pinned for it",
            )
        )
    return refused


def check_model(wants: Wants, facts: Mapping[str, Any]) -> list[RefusalError]:
    """The model has to be on the host already, unless the model role will bring it from the controller."""
    path = wants["plan_model_path"]
    source = facts.get("model_source")
    if source is not None:
        if source["exists"] and source["is_dir"]:
            return []
        return [
            RefusalError(
                "model_source",
                f"model_source {source['path']} does not exist on the controller"
                if not source["exists"]
                else f"{source['path']} is a file",
                "a folder with the model's files",
                "correct model_source, or put the model on the host and leave model_source out",
            )
        ]
    for name, found in (("folder", facts["paths"][path]), ("config.json", facts["paths"][f"{path}/config.json"])):
        if not found["exists"]:
            return [
                RefusalError(
                    "model_missing",
                    f"plan_model_path {path}: its {name} does not exist",
                    "a model folder with config.json on the host",
                    "copy the model there, set model_source, or correct plan_model_path",
                )
            ]
        if found["unreadable"]:
            return [
                RefusalError(
                    "model_unreadable",
                    f"plan_model_path {path}: the user {SERVICE_USER} cannot read {found['unreadable']}",
                    f"files and folders that {SERVICE_USER} may read",
                    f"chmod o+rX {found['unreadable']}, or give its group to {SERVICE_USER}",
                )
            ]
    return []


def check_gpu(wants: Wants, facts: Mapping[str, Any] | None) -> list[RefusalError]:
    """What the servers ask for that their GPUs or the loaded driver cannot do.

    The capability is the operator's ``plan_gpu_capability``, else what NVML says of each server's GPUs; where neither
    tells it is not checked. The driver is looked at only where one is loaded.
    """
    version = wants["plan_engine_version"]
    if wants["plan_device"] != "cuda" or version not in _capability.BACKENDS:
        return []
    topology = facts["topology"] if facts is not None else {"gpus": []}
    driver = topology.get("driver")
    refused = _capability.check_driver(version, driver) if driver else []
    seen = {gpu["index"]: (gpu.get("nvml") or {}).get("capability") for gpu in topology["gpus"]}
    try:
        parsed = parse_config(facts.get("model_config")) if facts is not None else None
    except RefusalError:
        # Whether the model can be read is told by what needs it.
        parsed = None
    config = parsed if isinstance(parsed, Mapping) else None
    for instance in (*wants.instances, *wants.fallbacks):
        if not instance.is_engine:
            continue
        found = [wants["plan_gpu_capability"]] if wants["plan_gpu_capability"] else [seen.get(n) for n in instance.gpus]
        flags = effective_flags(wants, instance)
        environment = wants["plan_environment"] | instance.environment
        for capability in sorted({text for text in found if text}):
            asked = _capability.check(version, capability, flags, config, wants.features, environment)
            refused += [
                RefusalError(error.code, f"{instance.name}: {error.found}", error.expected, error.cure)
                for error in asked
            ]
    return refused


def check_disk(wants: Wants, artefacts: Mapping[str, Any], facts: Mapping[str, Any]) -> list[RefusalError]:
    """Room for what is still to be written: releases that are not there yet, a model that is still to be copied."""
    needs: dict[Any, list[tuple[str, int]]] = {}
    where: dict[Any, tuple[str, int]] = {}

    def need(path: str, what: str, size: int) -> None:
        found = facts["paths"][path]
        needs.setdefault(found["device"], []).append((what, size))
        where[found["device"]] = (path, found["free"])

    engine = _engine.ENGINES[wants["plan_engine_version"]]
    sizes = {
        "engine": engine.devices[wants["plan_device"]].release_bytes,
        "router": _engine.ROUTERS[wants["plan_router_version"]].release_bytes,
    }
    for kind, size in sizes.items():
        if release_plan(wants, artefacts, kind)["dir"] not in facts["releases"]:
            need(wants["plan_root"], f"the {kind} release", size)
    source = facts.get("model_source")
    if source is not None and source["exists"]:
        missing = source["size"] - facts["paths"][wants["plan_model_path"]]["size"]
        if missing > 0:
            need(wants["plan_model_path"], "the model", missing)
    refused = []
    for device, parts in needs.items():
        path, free = where[device]
        total = sum(size for _what, size in parts)
        if total > free:
            told = " and ".join(f"{size / _engine.GIB:.1f} GiB for {what}" for what, size in parts)
            refused.append(
                RefusalError(
                    "disk",
                    f"{free / _engine.GIB:.1f} GiB free at {path}",
                    f"{total / _engine.GIB:.1f} GiB: {told}",
                    "free some space there, or set plan_root and plan_model_path to a larger disk",
                )
            )
    return refused


def check_ports(wants: Wants, facts: Mapping[str, Any]) -> list[RefusalError]:
    """A port has to be free, or held by the very unit that is to use it, or by the one that stops when that starts."""
    refused = []
    stops: dict[str, set[str]] = {}
    for fallback in wants.fallbacks:
        for displaced in wants.displaced(fallback):
            stops.setdefault(fallback.unit, set()).add(displaced.unit)
            stops.setdefault(displaced.unit, set()).add(fallback.unit)
    for instance in (*wants.instances, *wants.fallbacks):
        for purpose, port in instance.ports.items():
            holder = facts["ports"].get(str(port))
            if holder is not None and holder["unit"] not in {instance.unit, *stops.get(instance.unit, ())}:
                refused.append(
                    RefusalError(
                        "port_taken",
                        f"port {port} ({purpose} of {instance.name}) is held by PID {holder['pid']} of "
                        f"{holder['unit'] or 'no unit'}: {holder['command'] or 'command unknown'}",
                        f"a free port, or one held by {instance.unit}",
                        "stop that process yourself, or give the instance another port; nothing is killed for you",
                    )
                )
    return refused


def check_memory(budget: Mapping[str, Any], facts: Mapping[str, Any]) -> list[RefusalError]:
    """A gate, not a budget: what is planned has to be there now, or be held by the very unit that is to have it, or by
    one that stops when that starts.

    ``facts.memory``: unit -> ``{main_pid, by_node}``, bytes that our running units hold on each node.
    """
    if "memory" not in facts:
        return []
    now = {node["id"]: node for node in facts["topology"]["nodes"]}
    refused = []
    for node in budget.get("nodes", []):
        for backing in (_budget.PLAIN, *node["hugepage_pools"]):
            takers = [
                entry
                for entry in budget["instances"]
                if entry["backing"] == backing and str(node["id"]) in entry["by_node"]
            ]
            need = sum(_missing(facts["memory"], entry, str(node["id"])) for entry in takers)
            there = _free(now[node["id"]], backing)
            # A fallback that runs stops before these start. One that stands by needs nothing yet, and is not asked for.
            there += sum(
                _held(facts["memory"], entry, str(node["id"]))
                for entry in budget["fallbacks"]
                if entry["backing"] == backing and str(node["id"]) in entry["by_node"]
            )
            if need > there:
                refused.append(_busy(node["id"], backing, [entry["name"] for entry in takers], need, there))
    return refused


def _free(node: Mapping[str, Any], backing: str) -> int:
    """Bytes of a node that a start could get now: of plain memory, or of the pool of hugepages of a size."""
    if backing == _budget.PLAIN:
        return int(node["mem_available"])
    return int(backing) * int(node["hugepages"][backing]["free"])


def _missing(memory: Mapping[str, Any], entry: Mapping[str, Any], node: str) -> int:
    """Bytes that a server still has to get on a node. What its running unit holds there it has; where the kernel does
    not tell (v1 cgroups count no hugepages), a running unit holds what it is planned to."""
    unit, planned = memory.get(entry["unit"]), int(entry["by_node"][node])
    if not unit or not unit["main_pid"]:
        return planned
    if unit["by_node"] is None or entry["backing"] != _budget.PLAIN:
        return 0
    return max(0, planned - int(unit["by_node"].get(node, 0)))


def _held(memory: Mapping[str, Any], entry: Mapping[str, Any], node: str) -> int:
    """Bytes of what is planned for a server on a node that its running unit has."""
    return int(entry["by_node"][node]) - _missing(memory, entry, node)


def _busy(node: int, backing: str, names: Sequence[str], need: int, there: int) -> RefusalError:
    what = "" if backing == _budget.PLAIN else f" in pages of {show_binary(int(backing))}"
    return RefusalError(
        "memory_busy",
        f"node {node} has {show_both(there)}{what} free now, and {' and '.join(names)} still needs {show_both(need)} "
        f"there: {show_both(need - there)} short",
        "the planned memory to be free, or held by the units themselves",
        f"the plan fits, and something else holds memory of node {node} (numastat -m, numastat -p PID): end it if it "
        "does not belong there, or keep it back with plan_reserve_nodes",
    )
