# SPDX-License-Identifier: Apache-2.0
"""What a gateway is told of the PD groups behind it: a pure function of the inventory. PRIVATE to the collection.

A gateway is no part of a group and no part of a host's plan: adding a group changes the configuration of the gateways,
and nothing on the hosts of other groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _admission
from ansible_collections.llmfleet.sglang.plugins.module_utils._addresses import (
    Member,
    advertised,
    bracketed,
    group_members,
    url,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._checks import check_group
from ansible_collections.llmfleet.sglang.plugins.module_utils._commands import served_name
from ansible_collections.llmfleet.sglang.plugins.module_utils._group_admission import group_admission
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import FALLBACK, Instance, Wants

#: The defaults of the role ``gateway`` that others need: role defaults of another host cannot be read in Ansible.
DEFAULTS: Mapping[str, Any] = {"gateway_metrics_listen_address": "127.0.0.1", "gateway_metrics_port": 8405}
#: HAProxy's largest weight.
WEIGHT_MAX = 256
#: Seconds after which a client may try again: the router's own word when it is full, and about the time in which a
#: router that is started again is ready.
RETRY_FULL_S = 2
RETRY_NONE_S = 10
#: What a router answers at /readiness when it can serve.
READY = (200,)
#: What a fallback answers there, in its place: the engine has no such route, and no router ever says so. 401 is that of
#: 0.5.16 with API keys, whose exemptions know no path of that kind.
READY_FALLBACK = (401, 404)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def server_name(group: str, host: str, router: str) -> str:
    """The name of a router in the gateway; no part has a colon. Raises RefusalError where HAProxy cannot have it."""
    for what, part in (("PD group", group), ("host", host)):
        if not _NAME.fullmatch(part):
            raise RefusalError(
                "gateway_name",
                f"the {what} {part!r} is behind a gateway",
                "a name of letters, digits, '.', '_' and '-'",
                f"rename the {what}, or name the groups of the gateway in gateway_groups",
            )
    return f"{group}:{host}:{router}"


def weights(takes: Sequence[int | None]) -> list[int]:
    """HAProxy's weights, 1 to 256, in proportion to the requests that each router takes; None where it has no bound,
    and then all are equal."""
    known = [take for take in takes if take is not None]
    if len(known) < len(takes):
        return [1] * len(takes)
    return [max(1, round(WEIGHT_MAX * take / max(known))) for take in known]


def gateway_plan(
    gateway: str, fleet: Mapping[str, Wants], asked: Sequence[str] = (), ports: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """What the gateway on the host ``gateway`` is told, from the wants of all hosts of the inventory.

    ``asked``: the groups that it serves, all where none is named; ``ports``: what it listens on itself, by purpose.
    Returns ``{models[], servers[{name, group, host, address, takes, weight}], seconds{answer, full, none}, ready[]}``:
    ``takes`` are the requests that a router lets in and queues, None without a bound; ``answer`` is how long it may
    take for an answer, ``full`` and ``none`` when to try again; ``ready`` are the statuses of ``/readiness`` with which
    it is asked. Raises RefusalError.
    """
    groups = _groups(fleet, asked)
    fallbacks = any(group_members(fleet, group, FALLBACK) for group in groups)
    _check_host(gateway, fleet, ports or {})
    servers, answer, full, models = [], 0, RETRY_FULL_S, {}
    for group in groups:
        for refusal in check_group(fleet, group, gateway):
            raise refusal
        admission = group_admission(fleet, group)
        models[group] = served_name(group_members(fleet, group, "prefill")[0][0])
        answer = max(answer, _admission.describe(admission)["timeouts"]["client"])
        figures = admission.demand.figures
        if figures:
            full = max(full, math.ceil(figures.own_s(max(server.queues for server in admission.prefill))))
        for router, member in zip(admission.routers, group_members(fleet, group, "router"), strict=True):
            flags = admission.flags_of(router)
            cap = flags[_admission.CAP]
            servers.append(_server(gateway, member) | {"takes": cap + flags[_admission.QUEUE] if cap > 0 else None})
    if len(set(models.values())) > 1:
        raise RefusalError(
            "gateway_models",
            "behind the gateway are " + ", ".join(f"{name} in group {group}" for group, name in models.items()),
            "one model: every group has to be able to answer every request",
            "name the groups of one model in gateway_groups, and give each model its own gateway",
        )
    for server, weight in zip(servers, weights([server["takes"] for server in servers]), strict=True):
        server["weight"] = weight
    return {
        "models": sorted(set(models.values())),
        "servers": servers,
        "seconds": {"answer": answer, "full": full, "none": RETRY_NONE_S},
        "ready": [*READY, *(READY_FALLBACK if fallbacks else ())],
    }


def _server(gateway: str, member: Member) -> dict[str, Any]:
    wants, instance = member
    return {
        "name": server_name(instance.group, wants.host, instance.name),
        "group": instance.group,
        "host": wants.host,
        "address": url(member, gateway).removeprefix("http://"),
    }


def _groups(fleet: Mapping[str, Wants], asked: Sequence[str]) -> list[str]:
    """The groups behind the gateway; one that is not sound is refused, or clients would get half of it."""
    for wants in fleet.values():
        for refusal in wants.refusals:
            raise RefusalError(
                refusal.code, f"{refusal.found} on {wants.host}", refusal.expected, f"{refusal.cure}, on {wants.host}"
            )
    known = sorted({instance.group for wants in fleet.values() for instance in wants.instances})
    unknown = [group for group in asked if group not in known]
    if unknown:
        raise RefusalError(
            "gateway_groups",
            f"gateway_groups names {', '.join(unknown)}",
            f"groups among {', '.join(known)}",
            "correct its spelling",
        )
    return [group for group in known if group in asked or not asked]


def _check_host(gateway: str, fleet: Mapping[str, Wants], ports: Mapping[str, int]) -> None:
    """What the gateway has in common with the instances of its host, where it has some."""
    holders: dict[int, list[str]] = {}
    for purpose, port in ports.items():
        holders.setdefault(port, []).append(f"the gateway ({purpose})")
    if gateway in fleet:
        wants = fleet[gateway]
        for instance in (*wants.instances, *wants.fallbacks):
            if instance.name == "gateway":
                raise RefusalError(
                    "gateway_unit",
                    f"an instance of {gateway} is named gateway, and so is the unit of its gateway",
                    "another name",
                    "rename the instance",
                )
            for purpose, port in instance.ports.items():
                holders.setdefault(port, []).append(f"{instance.name} ({purpose})")
        for service in ("gpu_exporter", "prometheus"):
            holders.setdefault(wants[f"{service}_port"], []).append(service)
    for port, names in holders.items():
        if len(names) > 1 and names[0].startswith("the gateway"):
            raise RefusalError(
                "port_shared",
                f"port {port} of {gateway} is asked for by {' and '.join(names)}",
                "one owner for each port",
                "give each service its own port",
            )


def scrape_targets(gateways: Mapping[str, Mapping[str, Any]], monitor: str) -> list[dict[str, Any]]:
    """What Prometheus on ``monitor`` scrapes of the gateways, whose variables by host are given.

    Raises RefusalError where a gateway tells its metrics to another host's loopback only.
    """
    found = []
    for host, variables in sorted(gateways.items()):
        known = {name: variables.get(name, default) for name, default in {**DEFAULTS, "plan_address": ""}.items()}
        if "ansible_host" in variables:
            known["ansible_host"] = variables["ansible_host"]
        listen, port = str(known["gateway_metrics_listen_address"]), int(known["gateway_metrics_port"])
        told = Instance("the gateway", "gateway", "", listen, port, None, None, [], None, 1, {}, {})
        found.append(
            {
                "address": f"{bracketed(advertised((Wants(host, known), told), monitor))}:{port}",
                "path": "/metrics",
                "labels": {"host": host},
            }
        )
    return [{"job": "gateway", "targets": found}] if found else []
