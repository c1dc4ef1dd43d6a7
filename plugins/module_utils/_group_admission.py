# SPDX-License-Identifier: Apache-2.0
"""From an inventory to the admission of a PD group, and what is wrong with it. PRIVATE to the collection.

The arithmetic itself is in ``_admission.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _admission, _engine
from ansible_collections.llmfleet.sglang.plugins.module_utils._addresses import Member, group_members
from ansible_collections.llmfleet.sglang.plugins.module_utils._admission import BOUND
from ansible_collections.llmfleet.sglang.plugins.module_utils._commands import (
    effective_flags,
    served_name,
    timeout_variables,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import (
    ENGINE_ROLES,
    FALLBACK,
    ROLES,
    Wants,
    flag_value,
    integer,
)


def group_admission(fleet: Mapping[str, Wants], group: str) -> _admission.Admission:
    """What a complete group takes in. Raises RefusalError where a figure set by hand is no whole number."""
    prefill, decode = (
        [_server(fleet, member) for member in group_members(fleet, group, role)] for role in ENGINE_ROLES
    )
    routers = [_router(fleet, member) for member in group_members(fleet, group, "router")]
    return _admission.admit(group_members(fleet, group, "prefill")[0][0].admission, prefill, decode, routers)


def _name(fleet: Mapping[str, Wants], member: Member) -> str:
    """The name of an instance in its group: with its host where the group has more than one, since each host names its
    own instances."""
    wants, instance = member
    hosts = {other.host for role in ROLES for other, _instance in group_members(fleet, instance.group, role)}
    return instance.name if len(hosts) == 1 else f"{wants.host}/{instance.name}"


def _router(fleet: Mapping[str, Wants], member: Member) -> _admission.Router:
    wants, instance = member
    flags = wants["plan_router_args"] | instance.args
    found = {}
    for name, default in _admission.ROUTER_DEFAULTS.items():
        if name in flags:
            found[name] = default if flags[name] is None else integer(flags[name], f"{name} of {instance.name}")
    return _admission.Router(_name(fleet, member), found)


def _server(fleet: Mapping[str, Wants], member: Member) -> _admission.Server:
    wants, instance = member
    flags = effective_flags(wants, instance)
    variable = _admission.WAITING if instance.role == "decode" else _admission.BOOTSTRAP
    timeout = (wants["plan_environment"] | instance.environment).get(variable)

    def number(value: Any, name: str) -> int | None:
        return None if value is None else integer(value, f"{name} of {instance.name}")

    return _admission.Server(
        _name(fleet, member),
        bound=number(flags.get(BOUND), BOUND),
        by_hand=BOUND in flags,
        enforced="queue_bound" in wants.features and not _parts(member),
        queues=_number(member, "dp-size", "data-parallel-size", "attn-dp-size"),
        slots=number(flags.get("max-running-requests"), "max-running-requests"),
        timeout=number(timeout, variable),
    )


def _number(member: Member, *names: str) -> int:
    """The largest of some flags, 1 where none is set."""
    flags = effective_flags(*member)
    return max(1, *(integer(flags.get(name) or 1, f"{name} of {member[1].name}") for name in names))


def _parts(member: Member) -> str:
    """The flag that makes a server of parts of which none knows all requests; "" where there is none."""
    for names in (("pp-size", "pipeline-parallel-size"), ("tokenizer-worker-num",)):
        if _number(member, *names) > 1:
            return names[0]
    return ""


def timeouts(admission: _admission.Admission, member: Member) -> dict[str, str]:
    """The timeouts in a server's environment, before the operator's."""
    return {name: str(admission.engine_timeout) for name in timeout_variables(*member)}


def engine_bound(fleet: Mapping[str, Wants], admission: _admission.Admission, member: Member) -> int | None:
    """``max-queued-requests`` of a server; None where it is set by hand, or would not be heeded."""
    role, name = member[1].role, _name(fleet, member)
    servers = admission.prefill if role == "prefill" else admission.decode
    return admission.engine_bound(next(server for server in servers if server.name == name), role)


def fallback_bound(admission: _admission.Admission, member: Member) -> int | None:
    """``max-queued-requests`` of a fallback: all that the group's routers let in and queue, since none of them is in
    front of it. None where it is set by hand, would not be heeded, or a router lets in everything."""
    if BOUND in effective_flags(*member) or _parts(member):
        return None
    flags = [admission.flags_of(router) for router in admission.routers]
    if any(found[_admission.CAP] <= 0 for found in flags):
        return None
    return sum(found[_admission.CAP] + found[_admission.QUEUE] for found in flags)


def check_admission(fleet: Mapping[str, Wants], group: str) -> list[RefusalError]:
    """What is wrong with the admission of a complete group whose hosts are sound."""
    asked: dict[_admission.Demand, list[str]] = {}
    for role in ROLES:
        for wants, _instance in group_members(fleet, group, role):
            asked.setdefault(wants.admission, []).append(wants.host)
    if len(asked) > 1:
        return [
            RefusalError(
                "group_disagrees",
                f"plan_admission of group {group} is one on {', another on '.join(_hosts(h) for h in asked.values())}",
                "one plan_admission for all hosts of a group, since it is computed for the group",
                "set plan_admission for the group of hosts, not for one of them",
            )
        ]
    try:
        admission = group_admission(fleet, group)
    except RefusalError as error:
        return [error]
    refused = _admission.check_timeouts(group, admission)
    refused += _admission.check_safeguards(group, admission, _turned_on(fleet, group))
    for role in (*ENGINE_ROLES, FALLBACK):
        for wants, instance in group_members(fleet, group, role):
            bound, parts = effective_flags(wants, instance).get(BOUND), _parts((wants, instance))
            if bound is not None and parts and "queue_bound" in wants.features:
                refused.append(
                    RefusalError(
                        "queue_bound_parts",
                        f"{instance.name} has {BOUND} {bound} and {parts} above 1",
                        "one scheduler and one tokenizer that know all requests; the server would not start",
                        f"remove {BOUND}, and let the router bound what is in flight, or set {parts} to 1",
                    )
                )
    return refused


def _hosts(hosts: list[str]) -> str:
    return " ".join(sorted(set(hosts)))


def _turned_on(fleet: Mapping[str, Wants], group: str) -> dict[str, list[str]]:
    """Router -> what the operator turns on in it."""
    found = {}
    for wants, instance in group_members(fleet, group, "router"):
        flags = wants["plan_router_args"] | instance.args
        found[_name(fleet, (wants, instance))] = [
            name for name, flag in _admission.SAFEGUARDS.items() if flag_value(flags.get(flag, True)) is not True
        ]
    return found


def warnings(fleet: Mapping[str, Wants], group: str, admission: _admission.Admission) -> list[str]:
    """What is allowed and unwise about the admission of a group."""
    found = []
    for role in ENGINE_ROLES:
        for wants, instance in group_members(fleet, group, role):
            flags = effective_flags(wants, instance)
            if flags.get(BOUND) is not None and "queue_bound" not in wants.features:
                found.append(
                    f"{instance.name}: {BOUND} has no effect on a {role} server of SGLang "
                    f"{wants['plan_engine_version']} without the feature queue_bound; set it on in plan_features, or "
                    f"bound the queue at the router with {_admission.CAP} and {_admission.QUEUE}"
                )
            if flag_value(flags.get("enable-priority-scheduling")) is True and "queue_bound" in wants.features:
                found.append(
                    f"{instance.name}: with enable-priority-scheduling a full queue rejects the worst request that "
                    "waits, not the one that comes"
                )
    found += _admission.warnings(group, admission)
    for router, member in zip(admission.routers, group_members(fleet, group, "router"), strict=True):
        found += _sheds_early(member, admission.flags_of(router), admission)
        found += _thinks_alone(fleet, member)
    return found


def _sheds_early(member: Member, numbers: Mapping[str, int], admission: _admission.Admission) -> list[str]:
    wants, instance = member
    flags = {**_engine.ROUTERS[wants["plan_router_version"]].flags, **wants["plan_router_args"], **instance.args}
    limit = numbers.get(_admission.OVERLOAD, _admission.ROUTER_DEFAULTS[_admission.OVERLOAD])
    protects = flag_value(flags.get("disable-worker-overload-protection")) is not True
    if not protects or limit > max(admission.bounds.values()):
        return []
    sheds = flag_value(flags.get("worker-overload-shed")) is True
    what = "rejects what servers would still queue" if sheds else "avoids servers that would still queue"
    return [f"{instance.name}: worker overload protection {what}, at {limit} waiting ({_admission.OVERLOAD})"]


def _thinks_alone(fleet: Mapping[str, Wants], member: Member) -> list[str]:
    """The router asks for thinking by the name of the model, and nothing turns that off."""
    wants, instance = member
    models = _engine.ROUTERS[wants["plan_router_version"]].thinking_models
    silent = [
        (served_name(server), other.name)
        for role in ENGINE_ROLES
        for server, other in group_members(fleet, instance.group, role)
        if served_name(server) in models and not _thinks(effective_flags(server, other))
    ]
    return [
        f"{instance.name}: for {model} the router asks for thinking where a request does not say, and {name} has no "
        "default-chat-template-kwargs {thinking: true}; set it, so that both say the same, or serve the model under "
        "another name"
        for model, name in silent
    ]


def _thinks(flags: Mapping[str, Any]) -> bool:
    kwargs = flags.get("default-chat-template-kwargs")
    if isinstance(kwargs, str):
        try:
            kwargs = json.loads(kwargs)
        except ValueError:
            return False
    return isinstance(kwargs, Mapping) and flag_value(kwargs.get("thinking")) is True
