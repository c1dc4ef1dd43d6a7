# SPDX-License-Identifier: Apache-2.0
"""The rules of a rollout: who is changed when, and what changes. Pure functions over inventory, plans and what runs.

PRIVATE to the collection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._addresses import bracketed, local_address
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError


def _groups(fleet: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """``{group: {hosts, routers}}`` of the raw variables: a fleet is looked at once for each of its hosts."""
    found: dict[str, dict[str, list[Any]]] = {}
    for host in sorted(fleet):
        entries = fleet[host].get("plan_instances")
        for entry in entries if isinstance(entries, Sequence) and not isinstance(entries, str) else []:
            if not isinstance(entry, Mapping):
                continue
            group = found.setdefault(str(entry.get("group", host)), {"hosts": [], "routers": []})
            if host not in group["hosts"]:
                group["hosts"].append(host)
            if entry.get("role") == "router":
                address = bracketed(local_address(str(entry.get("host", "127.0.0.1"))))
                group["routers"].append({"host": host, "url": f"http://{address}:{entry.get('port')}"})
    return found


def rollout_order(fleet: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The PD groups in the order in which they are changed: the canary, then by name; the same on every host.

    ``fleet`` maps every host of the inventory to its variables. Each group is ``{name, hosts[], routers[{host,
    url}]}``, the URL as its own host reaches it. Raises RefusalError where hosts name several canaries, or one that
    is no group.
    """
    groups = _groups(fleet)
    canaries = sorted({str(variables.get("rollout_canary") or "") for variables in fleet.values()})
    if len(canaries) > 1:
        raise RefusalError(
            "rollout_canary",
            f"rollout_canary is {' and '.join(map(repr, canaries))}, not the same on every host",
            "one value: every host follows the same order",
            "set it for the whole inventory group, not for a host",
        )
    canary = canaries[0] if canaries else ""
    if canary and canary not in groups:
        raise RefusalError(
            "rollout_canary",
            f"rollout_canary is {canary!r}",
            f"one of {', '.join(sorted(groups))}, or nothing",
            "correct its spelling",
        )
    names = sorted(groups, key=lambda name: (name != canary, name))
    return [{"name": name, **groups[name]} for name in names]


def group_plan(plan: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The plan of a host as if it had this PD group only: what every task of a role then does concerns this group."""
    instances = [instance for instance in plan["instances"] if instance["group"] == group]
    # A plan that an earlier version has stored knows of none.
    fallbacks = [fallback for fallback in plan.get("fallbacks", []) if fallback["group"] == group]
    names = [instance["name"] for instance in (*instances, *fallbacks)]
    budget = dict(plan["budget"])
    for part in ("instances", "fallbacks"):
        if part in budget:
            budget[part] = [entry for entry in budget[part] if entry["name"] in names]
    groups = {name: members for name, members in plan["groups"].items() if name == group}
    return {**plan, "instances": instances, "fallbacks": fallbacks, "groups": groups, "budget": budget}


def fallback_plan(plan: Mapping[str, Any], written: Sequence[str]) -> dict[str, Any]:
    """The plan of a host as if its fallbacks were all that it runs: what a role's tasks then do concerns them.

    Only of those whose files are of this plan: ``written`` are the fingerprints in the files.
    """
    fallbacks = [fallback for fallback in plan.get("fallbacks", []) if fallback["fingerprint"] in written]
    names = [fallback["name"] for fallback in fallbacks]
    entries = [entry for entry in plan["budget"].get("fallbacks", []) if entry["name"] in names]
    budget = {**plan["budget"], "instances": entries, "fallbacks": []}
    return {**plan, "instances": fallbacks, "fallbacks": [], "budget": budget}


def rollout_changes(instances: Sequence[Mapping[str, Any]], running: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a turn would change, of what runs alone: nothing of it was written down by an earlier run.

    ``[{name, unit, role, running, planned, why}]`` of the instances that do not run what is planned. ``running`` is
    what ``unit_info`` tells, by unit.
    """
    found = []
    for instance in instances:
        unit = running[instance["unit"]]
        now, planned = str(unit["fingerprint"]), str(instance["fingerprint"])
        if int(unit["main_pid"]) == 0:
            why = f"is {unit['active_state']}"
        elif now != planned:
            why = f"runs {now or 'something unknown'}, planned is {planned}"
        else:
            continue
        found.append(
            {
                "name": instance["name"],
                "unit": instance["unit"],
                "role": instance["role"],
                "running": now,
                "planned": planned,
                "why": why,
            }
        )
    return found


def proven_groups(order: Sequence[Mapping[str, Any]], records: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """The groups of ``order`` that were proven once, on any of their hosts. ``records`` are those of each host by
    group, None
    for a host that was not read: its groups count as proven, for it is better to spare too few groups than too many."""
    found = []
    for group in order:
        read = [records.get(host) for host in group["hosts"]]
        if any(of_host is None or (of_host.get(group["name"]) or {}).get("good") for of_host in read):
            found.append(str(group["name"]))
    return found
