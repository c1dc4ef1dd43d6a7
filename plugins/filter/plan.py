# SPDX-License-Identifier: Apache-2.0
"""Filters around the plan: compute it, print it, and write its values into unit files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llmfleet.sglang.plugins.module_utils import (
    _admission,
    _api_keys,
    _budget,
    _commands,
    _features,
    _gateway,
    _host_budget,
    _plan,
    _proof,
    _sources,
    _systemd,
    _wants,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

# The collection's own files, in a clone and in an installed collection.
_FILES = str(Path(__file__).resolve().parents[2] / "files")
_VARIABLES = ("ansible_host", "plan_instances", *_wants.DEFAULTS, *_wants.NEIGHBOURS)


def _fleet(hostvars: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The variables that a plan reads, of every host named; a host of the inventory without them is planned too."""
    return {host: _variables_of(hostvars, host, _VARIABLES) for host in hosts}


def _variables_of(hostvars: Mapping[str, Any], host: str, names: Sequence[str]) -> dict[str, Any]:
    return {name: hostvars[host][name] for name in names if name in hostvars[host]}


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
    fleet = _fleet(hostvars, hosts)
    return _plan.make_plan(host, fleet, {**artefacts, "sources": _sources_of(fleet)}, facts, monitor)


def _sources_of(fleet: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``{plan_engine_files: {version: {"digest"} or {"error"}}}`` for what the hosts of a fleet ask for."""
    asked = {
        (
            str(variables.get("plan_engine_files") or ""),
            str(variables.get("plan_engine_version", _wants.DEFAULTS["plan_engine_version"])),
        )
        for variables in fleet.values()
    }
    found: dict[str, Any] = {}
    for folder, version in sorted(asked):
        try:
            told = {"digest": _commands.digest(_sources.digests(_sources.read_sources(folder or _FILES, version)), 64)}
        except (OSError, UnicodeDecodeError) as error:
            told = {"error": str(error)}
        found.setdefault(folder, {})[version] = told
    return found


def engine_sources(folder: str, version: str) -> dict[str, str]:
    try:
        return _sources.read_sources(folder or _FILES, version)
    except (OSError, UnicodeDecodeError) as error:
        raise AnsibleFilterError(f"cannot read the engine's plugin, kernels and patches: {error}") from error


def feature_findings(instances: Sequence[Mapping[str, Any]], observed: Mapping[str, Any]) -> list[dict[str, str]]:
    return _features.findings(instances, observed)


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


def scrape_targets(
    hostvars: Mapping[str, Any], hosts: Sequence[str], monitor: str, gateways: Sequence[str] = ()
) -> list[dict[str, Any]]:
    try:
        return _plan.scrape_targets(_wants_of(hostvars, hosts), monitor) + _gateway.scrape_targets(
            {host: _variables_of(hostvars, host, (*_VARIABLES, *_gateway.DEFAULTS)) for host in gateways}, monitor
        )
    except RefusalError as refused:
        raise AnsibleFilterError(_plan.refusal_text([refused.on(monitor)])) from refused


def gateway_plan(
    hostvars: Mapping[str, Any],
    gateway: str,
    hosts: Sequence[str],
    groups: Sequence[str] = (),
    ports: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    try:
        return _gateway.gateway_plan(gateway, _wants_of(hostvars, hosts), groups, ports)
    except RefusalError as refused:
        raise AnsibleFilterError(_plan.refusal_text([refused.on(gateway)])) from refused


def gateway_servers(instances: Sequence[Mapping[str, Any]], host: str) -> list[str]:
    return [
        _gateway.server_name(instance["group"], host, instance["name"])
        for instance in instances
        if instance["role"] == "router"
    ]


def _wants_of(hostvars: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, _wants.Wants]:
    return {name: _wants.parse_wants(name, variables) for name, variables in _fleet(hostvars, hosts).items()}


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
            "admission_table": _admission.table,
            "authorization": _api_keys.authorization,
            "budget_table": budget_table,
            "credential": _api_keys.credential,
            "engine_sources": engine_sources,
            "feature_findings": feature_findings,
            "gateway_plan": gateway_plan,
            "gateway_servers": gateway_servers,
            "hicache_budget": hicache_budget,
            "hicache_findings": hicache_findings,
            "plan": plan,
            "refusal_text": _plan.refusal_text,
            "scrape_targets": scrape_targets,
            "systemd_environment": systemd_environment,
            "systemd_exec": systemd_exec,
        }
