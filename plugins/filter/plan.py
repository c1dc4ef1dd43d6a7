# SPDX-License-Identifier: Apache-2.0
"""Filters around the plan: compute it, print it, and write its values into unit files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llmfleet.sglang.plugins.module_utils import (
    _budget,
    _host_budget,
    _plan,
    _proof,
    _systemd,
    _wants,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

_VARIABLES = ("ansible_host", "plan_instances", *_wants.DEFAULTS, *_wants.NEIGHBOURS)


def _fleet(hostvars: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The variables that a plan reads, of every host named; a host of the inventory without them is planned too."""
    return {host: {name: hostvars[host][name] for name in _VARIABLES if name in hostvars[host]} for host in hosts}


def plan(
    hostvars: Mapping[str, Any],
    host: str,
    hosts: Sequence[str],
    artefacts: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    monitor: str | None = None,
) -> dict[str, Any]:
    if host not in hosts:
        raise AnsibleFilterError(
            f"{host} is not among the planned hosts {', '.join(hosts)}: put it into the group sglang"
        )
    return _plan.make_plan(host, _fleet(hostvars, hosts), artefacts, facts, monitor)


def hicache_budget(
    hostvars: Mapping[str, Any], host: str, topology: Mapping[str, Any], model_config: Any = None
) -> dict[str, Any]:
    budget, refusals = _host_budget.budget_of(host, _fleet(hostvars, [host])[host], topology, model_config)
    return {"budget": budget, "refusals": refusals}


def budget_table(budget: Mapping[str, Any]) -> str:
    return _budget.table(budget)


def hicache_findings(
    instances: Sequence[Mapping[str, Any]],
    observed: Mapping[str, Any],
    tolerance_bytes: int,
    tolerance_share: float,
    tokens: Mapping[str, int] | None = None,
    asked: Sequence[str] = (),
) -> list[dict[str, str]]:
    told = {
        unit: {**seen, "server_info": {"max_total_num_tokens": (tokens or {}).get(unit)}} if unit in asked else seen
        for unit, seen in observed.items()
    }
    return _proof.findings(instances, told, tolerance_bytes, tolerance_share)


def scrape_targets(hostvars: Mapping[str, Any], hosts: Sequence[str], monitor: str) -> list[dict[str, Any]]:
    fleet = {name: _wants.parse_wants(name, variables) for name, variables in _fleet(hostvars, hosts).items()}
    try:
        return _plan.scrape_targets(fleet, monitor)
    except RefusalError as refused:
        raise AnsibleFilterError(_plan.refusal_text([refused.on(monitor)])) from refused


def systemd_exec(argv: Sequence[str]) -> str:
    return _written(_systemd.exec_line, argv)


def systemd_environment(environment: Mapping[str, str]) -> str:
    return _written(_systemd.environment_file, environment)


def _written(write: Callable[[Any], str], value: Any) -> str:
    try:
        return write(value)
    except ValueError as error:
        raise AnsibleFilterError(f"cannot be written for systemd: {error}") from error


class FilterModule:
    """The filters of this file, for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "budget_table": budget_table,
            "hicache_budget": hicache_budget,
            "hicache_findings": hicache_findings,
            "plan": plan,
            "refusal_text": _plan.refusal_text,
            "scrape_targets": scrape_targets,
            "systemd_environment": systemd_environment,
            "systemd_exec": systemd_exec,
        }
