# SPDX-License-Identifier: Apache-2.0
"""The plan: a pure function of what the operator wants, what the host is, and what the pinned engine can do.

    make_plan(host, fleet, artefacts, facts) -> plain data, ready for JSON

``fleet`` maps every inventory host to its variables (``plan_*`` and a few neighbours, see ``Wants``); ``facts`` is
what was read from this host, or None to plan from the inventory alone. Argv, environment and revisions come from the
inventory and from facts that do not move; facts that move (ports, free disk) only add refusals. The shape of the
result is in ``docs/architecture.md``. PRIVATE to the collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _admission, _api_keys, _engine, _nodes, _sources
from ansible_collections.llmfleet.sglang.plugins.module_utils._addresses import (
    advertised,
    bracketed,
    group_members,
    local_address,
    metrics_host,
    metrics_port,
    url,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._checks import (
    check_disk,
    check_gpu,
    check_group,
    check_host,
    check_memory,
    check_model,
    check_peers,
    check_platform,
    check_ports,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._commands import (
    binding,
    bound_text,
    digest,
    engine_argv,
    engine_environment,
    group_revision,
    instance_environment,
    ranks,
    release_plan,
    router_argv,
    served_name,
    served_path,
    unit_settings,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._group_admission import (
    check_admission,
    engine_bound,
    fallback_bound,
    group_admission,
    timeouts,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._group_admission import warnings as admission_warnings
from ansible_collections.llmfleet.sglang.plugins.module_utils._host_budget import host_budget, node_sets
from ansible_collections.llmfleet.sglang.plugins.module_utils._overlay import GENERATION_FILE
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._release import jobs
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import (
    FALLBACK,
    ROLES,
    Instance,
    Wants,
    named_groups,
    parse_wants,
)

SCHEMA = 1


def _instance_plan(
    wants: Wants,
    instance: Instance,
    fleet: Mapping[str, Wants],
    artefacts: Mapping[str, Any],
    nodes: _nodes.NodeSet,
    cache: Mapping[str, Any] | None,
    jobs: int | None,
    monitor: str,
    admission: _admission.Admission,
) -> dict[str, Any]:
    """One instance; ``cache`` is its part of the host's budget, None where there is none; ``jobs`` see
    ``instance_environment``; ``admission`` is its group's."""
    release = release_plan(wants, artefacts, "router" if instance.role == "router" else "engine")
    if instance.role == "router":
        argv = router_argv(wants, instance, fleet, release["dir"], monitor, admission.router_flags())
    else:
        alone = instance.role == FALLBACK
        member = (wants, instance)
        bound = fallback_bound(admission, member) if alone else engine_bound(fleet, admission, member)
        argv = engine_argv(wants, instance, release["python"], cache["flags"] if cache else {}, bound)
    revision = group_revision(fleet, instance.group, artefacts)
    bind = binding(wants, nodes)
    settings = unit_settings(wants, nodes, cache["memory_max"] if cache else None)
    environment = instance_environment(wants, instance, release, jobs, timeouts(admission, (wants, instance)))
    environment |= {"LLMFLEET_REVISION": revision}
    # Settings only where there are some: a host without HiCache keeps the fingerprint it has always had.
    ran_with = {"argv": bind + argv, "environment": environment} | ({"settings": settings} if settings else {})
    if wants.api_keys:
        ran_with |= {"api_keys": _api_keys.digest(wants.api_keys)}
    fingerprint = digest(ran_with, 16)
    return {
        "name": instance.name,
        "role": instance.role,
        "group": instance.group,
        "unit": instance.unit,
        "gpus": instance.gpus,
        "ranks": ranks(wants, instance),
        "features": {} if instance.role == "router" else wants.features,
        "api_keys": len(wants.api_keys),
        "nodes": nodes.nodes,
        "memory_nodes": nodes.memory_nodes,
        "binding": bind,
        "settings": settings,
        "bound": bound_text(wants, nodes),
        "argv": argv,
        "environment": environment | {"LLMFLEET_FINGERPRINT": fingerprint},
        "host": instance.host,
        "port": instance.port,
        "bootstrap_port": instance.bootstrap_port,
        "url": f"http://{bracketed(local_address(instance.host))}:{instance.port}",
        "metrics": {
            "host": metrics_host(wants, instance, monitor),
            "port": metrics_port(instance),
            "path": "/metrics",
        },
        "ports": instance.ports,
        "release_dir": release["dir"],
        "python": release["python"],
        "fingerprint": fingerprint,
        "revision": revision,
    }


def _group_plan(fleet: Mapping[str, Wants], group: str, artefacts: Mapping[str, Any]) -> dict[str, Any]:
    members: dict[str, Any] = {"revision": group_revision(fleet, group, artefacts)}
    for role in ROLES:
        members[role] = [
            {
                "host": wants.host,
                "name": instance.name,
                "url": url((wants, instance), wants.host),
                "bootstrap_port": instance.bootstrap_port,
            }
            for wants, instance in group_members(fleet, group, role)
        ]
    return members


def scrape_targets(fleet: Mapping[str, Wants], monitor: str) -> list[dict[str, Any]]:
    """What Prometheus on ``monitor`` scrapes: every instance and exporter of the given hosts.

    Raises RefusalError where a target listens on another host's loopback.
    """
    jobs: dict[str, list[dict[str, Any]]] = {"sglang": [], "router": [], "gpu_exporter": []}
    for wants in sorted(fleet.values(), key=lambda item: item.host):
        for instance in sorted(wants.instances, key=lambda item: item.name):
            served = replace(instance, host=metrics_host(wants, instance, monitor))
            jobs["router" if instance.role == "router" else "sglang"].append(
                {
                    "address": f"{bracketed(advertised((wants, served), monitor))}:{metrics_port(served)}",
                    "path": "/metrics",
                    "labels": {
                        "host": wants.host,
                        "instance_name": instance.name,
                        "role": instance.role,
                        "group": instance.group,
                    },
                }
            )
        listen, port = wants["gpu_exporter_listen_address"], wants["gpu_exporter_port"]
        exporter = Instance("gpu-exporter", "gpu_exporter", "", listen, port, None, None, [], None, 1, {}, {})
        jobs["gpu_exporter"].append(
            {
                "address": f"{bracketed(advertised((wants, exporter), monitor))}:{port}",
                "path": "/metrics",
                "labels": {"host": wants.host},
            }
        )
    return [{"job": job, "targets": targets} for job, targets in jobs.items()]


def make_plan(
    host: str,
    fleet: Mapping[str, Mapping[str, Any]],
    artefacts: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    monitor: str | None = None,
) -> dict[str, Any]:
    """The plan of one host; see the module's text and ``docs/architecture.md``.

    With refusals the plan is not to be applied; ``instances``, ``fallbacks`` and ``groups`` are then left empty.
    ``facts``: ``{os {distribution, major, arch}, topology, ports, paths, releases[], model_source | None, model_config,
    memory {unit: {main_pid, by_node}}}``; of a captured host there are ``topology`` and ``model_config`` only.
    """
    # Only the hosts of its own PD groups matter to a host: the cost of a fleet grows with its hosts, not their square.
    own = named_groups(host, fleet[host])
    wanted = {
        name: parse_wants(name, variables)
        for name, variables in fleet.items()
        if name == host or own & named_groups(name, variables)
    }
    wants = wanted[host]
    refused = check_host(wants)
    groups = sorted({instance.group for instance in wants.instances})
    for group in groups:
        refused += check_group(wanted, group, host)
    refused += check_peers(wanted, groups, host)
    if facts is not None and "os" in facts:
        refused += check_platform(facts)
    if not refused:
        # A figure of a group is computed from all of its members, so each of them has to be sound.
        refused = [error for group in groups for error in check_admission(wanted, group)]
    plan: dict[str, Any] = {
        "schema": SCHEMA,
        "host": host,
        "address": wants.address,
        "engine": {},
        "router": {},
        "model": {"path": wants["plan_model_path"], "served_path": "", "served_name": "", "changes": {}},
        "gpus": []
        if facts is None
        else [{"index": gpu["index"], "pci": gpu["pci"]} for gpu in facts["topology"]["gpus"]],
        "instances": [],
        "fallbacks": [],
        "budget": {},
        "admission": {},
        "groups": {},
        "scrape": [],
        "warnings": [],
        "refusals": [],
    }
    if not refused:
        refused += _fill(plan, wanted, wants, artefacts, facts, monitor or host)
    plan["refusals"] = [error.on(host) for error in refused]
    if refused:
        plan |= {"instances": [], "fallbacks": [], "admission": {}, "groups": {}, "scrape": []}
    return plan


def _fill(
    plan: dict[str, Any],
    fleet: Mapping[str, Wants],
    wants: Wants,
    artefacts: Mapping[str, Any],
    facts: Mapping[str, Any] | None,
    monitor: str,
) -> list[RefusalError]:
    """Complete a plan whose wants are sound; the refusals that only rendering and the host's facts can give."""
    refused: list[RefusalError] = []
    engine = _engine.ENGINES[wants["plan_engine_version"]]
    try:
        plan["engine"] = release_plan(wants, artefacts, "engine") | {
            "device": wants["plan_device"],
            "readiness_route": engine.readiness_route,
            "decode_keeps_prefill_ports": engine.decode_keeps_prefill_ports,
        }
        plan["engine"] |= {
            "environment": engine_environment(wants, plan["engine"]) | wants["plan_environment"],
            "files": wants["plan_engine_files"],
            "packages": list(_sources.PACKAGES),
            "patches": _sources.PATCHES,
        }
        plan["router"] = release_plan(wants, artefacts, "router")
        plan["scrape"] = scrape_targets({wants.host: wants}, monitor)
        groups = sorted({instance.group for instance in wants.instances})
        plan["groups"] = {group: _group_plan(fleet, group, artefacts) for group in groups}
        admissions = {group: group_admission(fleet, group) for group in groups}
        plan["admission"] = {group: _admission.describe(found) for group, found in admissions.items()}
    except RefusalError as error:
        return [error]
    plan["model"] |= {"served_name": served_name(wants), "served_path": served_path(wants)}
    if wants["plan_generation_config"]:
        plan["model"]["changes"] = {GENERATION_FILE: wants["plan_generation_config"]}
    # Without facts nothing is known to bind to.
    sets = {instance.name: _nodes.NodeSet([], []) for instance in (*wants.instances, *wants.fallbacks)}
    if facts is None:
        refused = check_gpu(wants, None)
    else:
        sets, refused = node_sets(wants, facts["topology"])
        refused += check_gpu(wants, facts)
        refused += _check_facts(wants, artefacts, facts)
        if not refused:
            plan["budget"], refused = host_budget(
                wants, sets, facts["topology"], facts.get("model_config"), _model_size(wants, facts)
            )
    if refused:
        return refused
    budget = plan["budget"]
    caches = {entry["name"]: entry for entry in (*budget.get("instances", []), *budget.get("fallbacks", []))}
    for instance in (*wants.instances, *wants.fallbacks):
        try:
            found = _instance_plan(
                wants,
                instance,
                fleet,
                artefacts,
                sets[instance.name],
                caches.get(instance.name),
                _jobs(sets[instance.name], facts),
                monitor,
                admissions[instance.group],
            )
        except RefusalError as error:
            refused.append(error)
            continue
        if instance.role == FALLBACK:
            plan["fallbacks"].append(found | {"conflicts": [other.unit for other in wants.displaced(instance)]})
        else:
            plan["instances"].append(found)
    told = [text for group, admission in admissions.items() for text in admission_warnings(fleet, group, admission)]
    plan["warnings"] = [*told, *plan["budget"].get("warnings", [])]
    if facts is not None and not refused:
        refused = check_memory(plan["budget"], facts)
    return refused


def _jobs(nodes: _nodes.NodeSet, facts: Mapping[str, Any] | None) -> int | None:
    """How many compilers a server may run at once: a quarter of its nodes' memory has to be enough for them.

    Compilers run when a server starts with kernels that the release's cache lacks, and they are bound as it is.
    """
    if facts is None:
        return None
    found = [
        node for node in facts["topology"]["nodes"] if not nodes or node["id"] in (*nodes.nodes, *nodes.memory_nodes)
    ]
    return jobs(sum(node["mem_total"] for node in found) // 4, sum(len(node["cpus"]) for node in found))


def _check_facts(wants: Wants, artefacts: Mapping[str, Any], facts: Mapping[str, Any]) -> list[RefusalError]:
    """What the host's facts rule out; a captured tree has some of them only."""
    refused: list[RefusalError] = []
    if "paths" in facts:
        refused += check_model(wants, facts) + check_disk(wants, artefacts, facts)
    if "ports" in facts:
        refused += check_ports(wants, facts)
    return refused


def _model_size(wants: Wants, facts: Mapping[str, Any]) -> int | None:
    """Bytes of the model's files: of the source where the model is copied, so that a copy does not move the plan."""
    source = facts.get("model_source")
    found = source if source is not None else facts.get("paths", {}).get(wants["plan_model_path"])
    return int(found["size"]) if found else None


def refusal_text(refusals: Iterable[Mapping[str, str]]) -> str:
    """Refusals for a person to read: one block each."""
    return "\n".join(
        f"{entry['host']}: found {entry['found']}\n  expected: {entry['expected']}\n  to do: {entry['cure']}"
        for entry in refusals
    )
