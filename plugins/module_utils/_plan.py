# SPDX-License-Identifier: Apache-2.0
"""The plan: a pure function of what the operator wants, what the host is, and what the pinned engine can do.

    make_plan(host, fleet, artefacts, facts) -> plain data, ready for JSON

``fleet`` maps every inventory host to its variables (``plan_*`` and a few neighbours, see ``Wants``); ``facts`` is
what was read from this host, or None to plan from the inventory alone. Argv, environment and revisions come from the
inventory and from facts that do not move; facts that move (ports, free disk) only add refusals. The shape of the
result is in ``docs/architecture.md``. PRIVATE to the collection.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _engine
from ansible_collections.llmfleet.sglang.plugins.module_utils._artefacts import (
    UnknownSetError,
    requirements,
    wheel_sets,
)

SCHEMA = 1
ENGINE_ROLES = ("prefill", "decode")
ROLES = (*ENGINE_ROLES, "router")
NUMA_POLICIES = ("strict", "preferred", "none")

# The defaults of the role ``plan``; they are needed here because a peer's role defaults cannot be read in Ansible.
DEFAULTS: Mapping[str, Any] = {
    "plan_address": "",
    "plan_device": "cuda",
    "plan_engine_args": {},
    "plan_engine_version": _engine.DEFAULT_ENGINE,
    "plan_environment": {},
    "plan_gpu_pci_ids": [],
    "plan_model_path": "",
    "plan_numa_policy": "strict",
    "plan_numactl": "/usr/bin/numactl",
    "plan_python": "/usr/bin/python3",
    "plan_root": "/opt/llmfleet",
    "plan_router_args": {},
    "plan_router_version": _engine.DEFAULT_ROUTER,
    "plan_served_model_name": "",
    "plan_sysfs_root": "/sys",
    "plan_transfer_backend": "mooncake",
}
# Variables of other roles that the plan has to know: their ports may not collide with an instance's.
NEIGHBOURS: Mapping[str, Any] = {
    "gpu_exporter_listen_address": "127.0.0.1",
    "gpu_exporter_port": 9101,
    "prometheus_port": 9090,
}
INSTANCE_KEYS = (
    "args",
    "bootstrap_port",
    "environment",
    "gpus",
    "group",
    "host",
    "metrics_port",
    "name",
    "numa_nodes",
    "port",
    "role",
    "tp_size",
)
SERVICE_USER = "llmfleet"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_FLAG = re.compile(r"[a-z][a-z0-9-]*")
_TRUE = ("true", "yes")
_FALSE = ("false", "no")


class RefusalError(Exception):
    """One thing the plan cannot accept, with all that a person needs: found, expected, cure."""

    def __init__(self, code: str, found: str, expected: str, cure: str) -> None:
        super().__init__(f"{found}; expected {expected}")
        self.code, self.found, self.expected, self.cure = code, found, expected, cure

    def on(self, host: str) -> dict[str, str]:
        return {"code": self.code, "host": host, "found": self.found, "expected": self.expected, "cure": self.cure}


@dataclass
class Instance:
    """One service of a host, as the operator asked for it, with defaults filled in and types made sure of."""

    name: str
    role: str
    group: str
    host: str
    port: int
    bootstrap_port: int | None
    metrics_port: int | None
    gpus: list[int]
    numa_nodes: list[int] | None
    tp_size: int
    args: dict[str, Any]
    environment: dict[str, str]

    @property
    def unit(self) -> str:
        return f"llmfleet-{self.name}.service"

    @property
    def ports(self) -> dict[str, int]:
        """Every TCP port the instance will listen on, by purpose."""
        found = {"http": self.port, "bootstrap": self.bootstrap_port, "metrics": self.metrics_port}
        return {purpose: port for purpose, port in found.items() if port is not None}


@dataclass
class Wants:
    """The variables of one inventory host, parsed. ``refusals`` holds what could not be understood."""

    host: str
    variables: dict[str, Any]
    instances: list[Instance] = field(default_factory=list)
    refusals: list[RefusalError] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]

    @property
    def address(self) -> str:
        return str(self["plan_address"] or self.variables.get("ansible_host") or self.host)


# ---------------------------------------------------------------------------------------------------- small things


def canonical(data: Any) -> str:
    """The one JSON text of some data: sorted keys, no spaces; what hashes are taken over."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(data: Any, length: int) -> str:
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:length]


def bracketed(address: str) -> str:
    """An address as it stands in a URL: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_wildcard(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def _integer(value: Any, what: str) -> int:
    """An int, also from a string of digits, since extra variables and INI inventories only know strings."""
    if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value).strip()):
        raise RefusalError("type", f"{what} is {value!r}", "a whole number", f"write {what} as a number")
    return int(value)


def _port(value: Any, what: str) -> int:
    port = _integer(value, what)
    if not 1 <= port <= 65535:
        raise RefusalError("port", f"{what} is {port}", "a TCP port from 1 to 65535", f"give {what} a valid port")
    return port


def _integers(value: Any, what: str) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RefusalError(
            "type", f"{what} is {value!r}", "a list of whole numbers", f"write {what} as a list, such as [0, 1]"
        )
    return [_integer(item, what) for item in value]


def _text(value: Any, what: str) -> str:
    """Text; a bare version such as 0.5 arrives as a number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RefusalError("type", f"{what} is {value!r}", "text", f"write {what} as text")
    return str(value)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RefusalError("type", f"{what} is {value!r}", "a mapping", f"write {what} as 'name: value' lines")
    return {str(key): item for key, item in value.items()}


def flag_value(value: Any) -> Any:
    """A flag's value with text booleans understood, since ``-e flag=false`` arrives as the text "false"."""
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    return value


def render_flags(flags: Mapping[str, Any]) -> list[str]:
    """``{"tp-size": 4, "enable-metrics": true}`` -> ``["--enable-metrics", "--tp-size", "4"]``, sorted by name.

    true is a bare flag, false and null leave the flag out, a list repeats the values behind one flag, a mapping is
    written as JSON.
    """
    argv: list[str] = []
    for name in sorted(flags):
        value = flag_value(flags[name])
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if isinstance(value, Mapping):
            argv.append(canonical(value))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            argv.extend(str(item) for item in value)
        elif value is not True:
            argv.append(str(value))
    return argv


# ------------------------------------------------------------------------------------------------------ the inventory


def _flags(value: Any, what: str, owned: Sequence[str]) -> dict[str, Any]:
    flags = _mapping(value, what)
    for name in flags:
        if not _FLAG.fullmatch(name):
            raise RefusalError(
                "flag",
                f"{what} names {name!r}",
                "a full flag name without leading dashes, such as context-length",
                f"rename it in {what}",
            )
        if name in owned:
            raise RefusalError(
                "flag_owned",
                f"{what} sets {name}",
                "flags that the plan does not write itself",
                f"remove {name} from {what}: the plan derives it from the instance",
            )
    if str(flags.get("max-queued-requests")) == "0":
        raise RefusalError(
            "queue_bound",
            f"{what} sets max-queued-requests to 0",
            "1 or more, or no such flag",
            "0 rejects every request: raise it or leave it out",
        )
    return flags


def _environment(value: Any, what: str) -> dict[str, str]:
    return {name: str(item) for name, item in _mapping(value, what).items()}


def parse_instance(raw: Any, number: int, host: str) -> Instance:
    """One entry of plan_instances of ``host``. Raises RefusalError at the first thing that is wrong with it."""
    entry = _mapping(raw, f"plan_instances[{number}]")
    what = f"instance {entry.get('name', number)!r}"
    unknown = sorted(set(entry) - set(INSTANCE_KEYS))
    if unknown:
        raise RefusalError(
            "instance_key",
            f"{what} has the key {unknown[0]!r}",
            f"one of {', '.join(INSTANCE_KEYS)}",
            "correct its spelling",
        )
    name, role = str(entry.get("name", "")), str(entry.get("role", ""))
    if not _NAME.fullmatch(name):
        raise RefusalError(
            "name",
            f"plan_instances[{number}] is named {name!r}",
            "lower case letters, digits and hyphens, at most 40, a letter first (it becomes the unit's name)",
            "give the instance such a name",
        )
    if role not in ROLES:
        raise RefusalError("role", f"{what} has the role {role!r}", f"one of {', '.join(ROLES)}", "correct the role")
    if "port" not in entry:
        raise RefusalError("port", f"{what} has no port", "the TCP port of its HTTP API", "set port")
    if role == "prefill" and entry.get("bootstrap_port") is None:
        raise RefusalError(
            "bootstrap_port",
            f"{what} is a prefill without bootstrap_port",
            "the port on which decode servers find it",
            "set bootstrap_port (8998 is the engine's default), a different one for each prefill of a host",
        )
    if role == "router" and entry.get("metrics_port") is None:
        raise RefusalError(
            "metrics_port",
            f"{what} is a router without metrics_port",
            "the port of its Prometheus metrics, which the API port does not carry",
            "set metrics_port (29000 is the router's default)",
        )
    gpus = _integers(entry.get("gpus", []), f"gpus of {what}")
    nodes = entry.get("numa_nodes")
    owned = _engine.ROUTER_OWNED_FLAGS if role == "router" else _engine.ENGINE_OWNED_FLAGS
    return Instance(
        name=name,
        role=role,
        group=str(entry.get("group", host)),
        host=str(entry.get("host", "127.0.0.1")),
        port=_port(entry["port"], f"port of {what}"),
        bootstrap_port=_port(entry["bootstrap_port"], f"bootstrap_port of {what}") if role == "prefill" else None,
        metrics_port=_port(entry["metrics_port"], f"metrics_port of {what}") if role == "router" else None,
        gpus=gpus,
        numa_nodes=None if nodes is None else _integers(nodes, f"numa_nodes of {what}"),
        tp_size=_integer(entry.get("tp_size", len(gpus) or 1), f"tp_size of {what}"),
        args=_flags(entry.get("args", {}), f"args of {what}", owned),
        environment=_environment(entry.get("environment", {}), f"environment of {what}"),
    )


def parse_wants(host: str, variables: Mapping[str, Any]) -> Wants:
    """The variables of one host; what cannot be understood is collected, not raised, so that all is told at once."""
    known = {name: variables.get(name, default) for name, default in {**DEFAULTS, **NEIGHBOURS}.items()}
    if "ansible_host" in variables:
        known["ansible_host"] = variables["ansible_host"]
    wants = Wants(host, known)

    def attempt(parse: Any, *arguments: Any) -> Any:
        try:
            return parse(*arguments)
        except RefusalError as refused:
            wants.refusals.append(refused)
            return None

    for name, default in DEFAULTS.items():
        if isinstance(default, str):
            known[name] = attempt(_text, known[name], name)
    for name, owned in (
        ("plan_engine_args", _engine.ENGINE_OWNED_FLAGS),
        ("plan_router_args", _engine.ROUTER_OWNED_FLAGS),
    ):
        known[name] = attempt(_flags, known[name], name, owned) or {}
    known["plan_environment"] = attempt(_environment, known["plan_environment"], "plan_environment") or {}
    for name in ("gpu_exporter_port", "prometheus_port"):
        known[name] = attempt(_port, known[name], name)

    raw = variables.get("plan_instances") or []
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        wants.refusals.append(
            RefusalError(
                "no_instances",
                f"plan_instances is {raw!r}" if raw else "no instance",
                "a list with at least one prefill, decode or router",
                "set plan_instances for this host, or take the host out of the group sglang",
            )
        )
        return wants
    for number, entry in enumerate(raw):
        instance = attempt(parse_instance, entry, number, host)
        if instance is not None:
            wants.instances.append(instance)
    return wants


def _choice(wants: Wants, name: str, allowed: Iterable[str]) -> None:
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


def check_host(wants: Wants) -> list[RefusalError]:
    """What is wrong with one host's wants, whatever the host is like."""
    refused = list(wants.refusals)

    def attempt(check: Any, *arguments: Any) -> None:
        try:
            check(*arguments)
        except RefusalError as error:
            refused.append(error)

    attempt(_choice, wants, "plan_engine_version", _engine.ENGINES)
    attempt(_choice, wants, "plan_router_version", _engine.ROUTERS)
    attempt(_choice, wants, "plan_numa_policy", NUMA_POLICIES)
    engine = _engine.ENGINES.get(wants["plan_engine_version"])
    if engine is not None:
        attempt(_choice, wants, "plan_device", engine.devices)
        attempt(_choice, wants, "plan_transfer_backend", engine.transfer_backends)
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
    for instance in wants.instances:
        names.setdefault(instance.name, []).append(f"a {instance.role}")
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
    refused += _clash("name", names, "give each instance its own name")
    refused += _clash("port", ports, "give each service its own port")
    refused += _clash("gpu", gpus, "give each GPU to one instance")
    return refused


Member = tuple[Wants, Instance]


def _members(fleet: Mapping[str, Wants], group: str, role: str) -> list[Member]:
    """The instances of a PD group in a fixed order, wherever they run: order of the inventory must not matter."""
    found = [(wants, i) for wants in fleet.values() for i in wants.instances if i.group == group and i.role == role]
    return sorted(found, key=lambda member: (member[0].host, member[1].name))


def advertised(member: Member, seen_from: str) -> str:
    """The host part under which ``seen_from`` reaches an instance. Raises RefusalError where it cannot."""
    wants, instance = member
    if is_loopback(instance.host):
        if wants.host != seen_from:
            raise RefusalError(
                "loopback",
                f"{instance.name} on {wants.host} listens on {instance.host}, and {seen_from} has to reach it",
                f"an address that {seen_from} can reach",
                f"set host of {instance.name} to the address of {wants.host} on the private network",
            )
        return instance.host
    return wants.address if is_wildcard(instance.host) else instance.host


def check_group(fleet: Mapping[str, Wants], group: str, host: str) -> list[RefusalError]:
    """What is wrong with a PD group as seen from one of its hosts."""
    refused = []
    for role in ROLES:
        if not _members(fleet, group, role):
            refused.append(
                RefusalError(
                    "group_incomplete",
                    f"group {group} has no {role}",
                    "at least one prefill, one decode and one router in each group",
                    f"add a {role} to the group, or correct the group's name on its instances",
                )
            )
    for name in (
        "plan_engine_version",
        "plan_device",
        "plan_transfer_backend",
        "plan_model_path",
        "plan_served_model_name",
    ):
        values: dict[str, list[str]] = {}
        for role in ENGINE_ROLES:
            for wants, _instance in _members(fleet, group, role):
                values.setdefault(str(wants[name]), []).append(wants.host)
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
    routers = {wants.host for wants, _instance in _members(fleet, group, "router")}
    for member in (*_members(fleet, group, "prefill"), *_members(fleet, group, "decode")):
        peers = (
            routers if member[1].role == "decode" else routers | {w.host for w, _i in _members(fleet, group, "decode")}
        )
        for peer in sorted(peers):
            if host in (peer, member[0].host):
                try:
                    advertised(member, peer)
                except RefusalError as error:
                    refused.append(error)
    return refused


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


# --------------------------------------------------------------------------------------------------------- rendering


def release_id(wants: Wants, lines: Sequence[str]) -> str:
    """The name of a release: a hash over its exact requirements and the interpreter they are installed for."""
    return digest({"requirements": sorted(lines), "python": wants["plan_python"]}, 12)


def _release(wants: Wants, artefacts: Mapping[str, Any], kind: str) -> dict[str, str]:
    if kind == "router":
        version, name, folder = wants["plan_router_version"], "router", "router"
    else:
        version, folder = wants["plan_engine_version"], "releases"
        name = f"engine-{version}-{wants['plan_device']}"
    try:
        lines = requirements(artefacts, name)
    except UnknownSetError as error:
        raise RefusalError(
            "artefacts",
            f"the artefact manifest has no set {name}",
            f"one of {', '.join(wheel_sets(artefacts))}",
            "choose a version and device the manifest has, or add the set to files/artefacts.yml with its digests",
        ) from error
    release = release_id(wants, lines)
    path = f"{wants['plan_root']}/{folder}/{release}"
    return {
        "version": version,
        "release": release,
        "dir": path,
        "set": name,
        "python": f"{path}/venv/bin/python",
        "base_python": wants["plan_python"],
    }


def _effective_flags(wants: Wants, instance: Instance) -> dict[str, Any]:
    """An engine's flags that do not name an address: the device's, then the host's, then the instance's own."""
    device = _engine.ENGINES[wants["plan_engine_version"]].devices[wants["plan_device"]]
    return {
        **device.flags.get("", {}),
        **device.flags.get(instance.role, {}),
        **wants["plan_engine_args"],
        **instance.args,
        "device": wants["plan_device"],
        "disaggregation-mode": instance.role,
        "disaggregation-transfer-backend": wants["plan_transfer_backend"],
        "enable-metrics": True,
        "model-path": wants["plan_model_path"],
        "served-model-name": served_name(wants),
        "tp-size": instance.tp_size,
    }


def served_name(wants: Wants) -> str:
    return str(wants["plan_served_model_name"] or wants["plan_model_path"].rstrip("/").rsplit("/", 1)[-1])


def engine_argv(wants: Wants, instance: Instance, python: str) -> list[str]:
    flags = _effective_flags(wants, instance) | {"host": instance.host, "port": instance.port}
    if instance.bootstrap_port is not None:
        flags["disaggregation-bootstrap-port"] = instance.bootstrap_port
    return [python, "-m", _engine.ENGINES[wants["plan_engine_version"]].module, *render_flags(flags)]


def _metrics_port(instance: Instance) -> int:
    return instance.metrics_port or instance.port


def metrics_host(wants: Wants, instance: Instance, monitor: str) -> str:
    """Where an instance serves its metrics: an engine beside its API; a router, whose clients need no metrics, on
    loopback unless Prometheus runs elsewhere."""
    return "127.0.0.1" if instance.role == "router" and monitor == wants.host else instance.host


def router_argv(wants: Wants, instance: Instance, fleet: Mapping[str, Wants], folder: str, monitor: str) -> list[str]:
    """``smg launch`` for one PD group: its workers from the whole inventory, in a fixed order."""
    flags = {
        **_engine.ROUTERS[wants["plan_router_version"]].flags,
        **wants["plan_router_args"],
        **instance.args,
        "host": instance.host,
        "port": instance.port,
        "prometheus-host": metrics_host(wants, instance, monitor),
        "prometheus-port": instance.metrics_port,
    }
    workers: list[str] = []
    for role in ENGINE_ROLES:
        for member in _members(fleet, instance.group, role):
            workers += [f"--{role}", url(member, wants.host)]
            if role == "prefill":
                workers.append(str(member[1].bootstrap_port))
    return [f"{folder}/venv/bin/smg", "launch", "--pd-disaggregation", *workers, *render_flags(flags)]


def url(member: Member, seen_from: str) -> str:
    return f"http://{bracketed(advertised(member, seen_from))}:{member[1].port}"


def group_revision(fleet: Mapping[str, Wants], group: str, artefacts: Mapping[str, Any]) -> str:
    """A hash over what the members of a PD group must agree on: releases, model, and each role's flags."""
    members = [member for role in ENGINE_ROLES for member in _members(fleet, group, role)]
    agreed = {
        "releases": sorted({_release(wants, artefacts, "engine")["release"] for wants, _i in members}),
        "flags": sorted({canonical(_effective_flags(wants, instance)) for wants, instance in members}),
        "environment": sorted({canonical(wants["plan_environment"] | i.environment) for wants, i in members}),
    }
    return digest(agreed, 12)


def node_set(wants: Wants, instance: Instance, topology: Mapping[str, Any]) -> list[int]:
    """The NUMA nodes an instance is bound to: those asked for, else those of its GPUs, else none (not bound)."""
    known = [node["id"] for node in topology["nodes"]]
    if instance.numa_nodes is not None:
        missing = [node for node in instance.numa_nodes if node not in known]
        if missing:
            raise RefusalError(
                "numa_node",
                f"numa_nodes of {instance.name} names node {missing[0]}",
                f"nodes of this host: {', '.join(map(str, known))}",
                "correct numa_nodes, or leave it out to have it read from the GPUs",
            )
        return sorted(set(instance.numa_nodes))
    by_index = {gpu["index"]: gpu for gpu in topology["gpus"]}
    nodes = set()
    for index in instance.gpus:
        gpu = by_index.get(index)
        if gpu is None:
            raise RefusalError(
                "gpu_missing",
                f"{instance.name} asks for GPU {index}",
                f"GPUs of this host: {', '.join(map(str, sorted(by_index))) or 'none on the PCI bus'}",
                "correct gpus; `nvidia-smi -L` on the host lists them",
            )
        if gpu["numa_node"] is None and wants["plan_numa_policy"] != "none":
            raise RefusalError(
                "numa_unknown",
                f"the firmware does not say to which NUMA node GPU {index} ({gpu['pci']}) belongs",
                "a node for each GPU",
                f"set numa_nodes of {instance.name}, or plan_numa_policy: none",
            )
        if gpu["numa_node"] is not None:
            nodes.add(gpu["numa_node"])
    return sorted(nodes)


def binding(wants: Wants, nodes: Sequence[int]) -> list[str]:
    """The numactl prefix of a command line; empty where nothing is bound."""
    if not nodes or wants["plan_numa_policy"] == "none":
        return []
    listed = ",".join(map(str, nodes))
    if wants["plan_numa_policy"] == "preferred":
        # numactl takes one preferred node; the others of the set are still allowed.
        return [wants["plan_numactl"], f"--cpunodebind={listed}", f"--preferred={nodes[0]}"]
    return [wants["plan_numactl"], f"--cpunodebind={listed}", f"--membind={listed}"]


def _instance_environment(wants: Wants, instance: Instance) -> dict[str, str]:
    """The environment of a unit, its fingerprint not yet in it. Cache folders are the instance's own: HOME is made by
    systemd (CacheDirectory=), and the metrics folder is emptied at each start (RuntimeDirectory=)."""
    cache = f"/var/cache/llmfleet/{instance.name}"
    found = {"HOME": cache, "LLMFLEET_INSTANCE": instance.name}
    if instance.role in ENGINE_ROLES:
        engine = _engine.ENGINES[wants["plan_engine_version"]]
        found |= engine.environment
        found |= engine.devices[wants["plan_device"]].environment
        found["PROMETHEUS_MULTIPROC_DIR"] = f"/run/llmfleet/{instance.name}/metrics"
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
            found[name] = f"{cache}/{name.lower().split('_', 1)[0]}"
        if instance.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, instance.gpus))
        found |= wants["plan_environment"]
    return found | instance.environment


def _instance_plan(
    wants: Wants,
    instance: Instance,
    fleet: Mapping[str, Wants],
    artefacts: Mapping[str, Any],
    nodes: list[int],
    monitor: str,
) -> dict[str, Any]:
    release = _release(wants, artefacts, "router" if instance.role == "router" else "engine")
    if instance.role == "router":
        argv = router_argv(wants, instance, fleet, release["dir"], monitor)
    else:
        argv = engine_argv(wants, instance, release["python"])
    revision = group_revision(fleet, instance.group, artefacts)
    bind = binding(wants, nodes)
    environment = _instance_environment(wants, instance) | {"LLMFLEET_REVISION": revision}
    fingerprint = digest({"argv": bind + argv, "environment": environment}, 16)
    return {
        "name": instance.name,
        "role": instance.role,
        "group": instance.group,
        "unit": instance.unit,
        "gpus": instance.gpus,
        "nodes": nodes,
        "binding": bind,
        "argv": argv,
        "environment": environment | {"LLMFLEET_FINGERPRINT": fingerprint},
        "host": instance.host,
        "port": instance.port,
        "bootstrap_port": instance.bootstrap_port,
        "url": f"http://{bracketed(local_address(instance.host))}:{instance.port}",
        "metrics": {
            "host": metrics_host(wants, instance, monitor),
            "port": _metrics_port(instance),
            "path": "/metrics",
        },
        "ports": instance.ports,
        "release_dir": release["dir"],
        "fingerprint": fingerprint,
        "revision": revision,
    }


def local_address(address: str) -> str:
    """Where this host itself reaches what listens on an address: a wildcard is not one to connect to."""
    if not is_wildcard(address):
        return address
    return "::1" if ":" in address else "127.0.0.1"


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
            for wants, instance in _members(fleet, group, role)
        ]
    return members


# ----------------------------------------------------------------------------------------------------------- scraping


def scrape_targets(fleet: Mapping[str, Wants], monitor: str) -> list[dict[str, Any]]:
    """What Prometheus on ``monitor`` scrapes: every instance and exporter of the whole inventory.

    Raises RefusalError where a target listens on another host's loopback.
    """
    jobs: dict[str, list[dict[str, Any]]] = {"sglang": [], "router": [], "gpu_exporter": []}
    for wants in sorted(fleet.values(), key=lambda item: item.host):
        for instance in sorted(wants.instances, key=lambda item: item.name):
            served = replace(instance, host=metrics_host(wants, instance, monitor))
            jobs["router" if instance.role == "router" else "sglang"].append(
                {
                    "address": f"{bracketed(advertised((wants, served), monitor))}:{_metrics_port(served)}",
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


# -------------------------------------------------------------------------------------------------- what the host says


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
        if _release(wants, artefacts, kind)["dir"] not in facts["releases"]:
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
    """A port has to be free, or held by the very unit that is to use it."""
    refused = []
    for instance in wants.instances:
        for purpose, port in instance.ports.items():
            holder = facts["ports"].get(str(port))
            if holder is not None and holder["unit"] != instance.unit:
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


# ----------------------------------------------------------------------------------------------------------- the plan


def make_plan(
    host: str,
    fleet: Mapping[str, Mapping[str, Any]],
    artefacts: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    monitor: str | None = None,
) -> dict[str, Any]:
    """The plan of one host; see the module's text and ``docs/architecture.md``.

    With refusals the plan is not to be applied; ``instances`` and ``groups`` are then left empty.
    ``facts``: ``{os {distribution, major, arch}, topology, ports, paths, releases[], model_source | None}``.
    """
    wanted = {name: parse_wants(name, variables) for name, variables in fleet.items()}
    wants = wanted[host]
    refused = check_host(wants)
    groups = sorted({instance.group for instance in wants.instances})
    for group in groups:
        refused += check_group(wanted, group, host)
    refused += check_peers(wanted, groups, host)
    if facts is not None:
        refused += check_platform(facts)
    plan: dict[str, Any] = {
        "schema": SCHEMA,
        "host": host,
        "address": wants.address,
        "engine": {},
        "router": {},
        "model": {"path": wants["plan_model_path"], "served_name": ""},
        "gpus": []
        if facts is None
        else [{"index": gpu["index"], "pci": gpu["pci"]} for gpu in facts["topology"]["gpus"]],
        "instances": [],
        "groups": {},
        "scrape": [],
        "warnings": [],
        "refusals": [],
    }
    if not refused:
        refused += _fill(plan, wanted, wants, artefacts, facts, monitor or host)
    plan["refusals"] = [error.on(host) for error in refused]
    if refused:
        plan |= {"instances": [], "groups": {}, "scrape": []}
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
        plan["engine"] = _release(wants, artefacts, "engine") | {
            "device": wants["plan_device"],
            "readiness_route": engine.readiness_route,
        }
        plan["router"] = _release(wants, artefacts, "router")
        plan["scrape"] = scrape_targets(fleet, monitor)
        groups = sorted({instance.group for instance in wants.instances})
        plan["groups"] = {group: _group_plan(fleet, group, artefacts) for group in groups}
    except RefusalError as error:
        return [error]
    plan["model"]["served_name"] = served_name(wants)
    for instance in wants.instances:
        try:
            nodes = [] if facts is None else node_set(wants, instance, facts["topology"])
            plan["instances"].append(_instance_plan(wants, instance, fleet, artefacts, nodes, monitor))
        except RefusalError as error:
            refused.append(error)
    plan["warnings"] = _warnings(wants)
    if facts is not None:
        refused += check_model(wants, facts) + check_disk(wants, artefacts, facts) + check_ports(wants, facts)
    return refused


def _warnings(wants: Wants) -> list[str]:
    found = []
    for instance in wants.instances:
        if instance.role in ENGINE_ROLES and "max-queued-requests" in wants["plan_engine_args"] | instance.args:
            found.append(
                f"{instance.name}: max-queued-requests has no effect on a {instance.role} server of SGLang "
                f"{wants['plan_engine_version']}; bound the queue at the router with max-concurrent-requests "
                "and queue-size"
            )
    return found


def refusal_text(refusals: Iterable[Mapping[str, str]]) -> str:
    """Refusals for a person to read: one block each."""
    return "\n".join(
        f"{entry['host']}: found {entry['found']}\n  expected: {entry['expected']}\n  to do: {entry['cure']}"
        for entry in refusals
    )
