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
from fractions import Fraction
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _budget, _engine, _hicache, _nodes
from ansible_collections.llmfleet.sglang.plugins.module_utils._artefacts import (
    UnknownSetError,
    requirements,
    wheel_sets,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._geometry import Geometry, read_geometry
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._size import (
    GIB,
    parse_share,
    parse_size,
    show_binary,
    show_both,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import TopologyError, normalise_pci

SCHEMA = 1
ENGINE_ROLES = ("prefill", "decode")
ROLES = (*ENGINE_ROLES, "router")

# The defaults of the role ``plan``; they are needed here because a peer's role defaults cannot be read in Ansible.
DEFAULTS: Mapping[str, Any] = {
    "plan_address": "",
    "plan_capture": "",
    "plan_device": "cuda",
    "plan_engine_args": {},
    "plan_engine_version": _engine.DEFAULT_ENGINE,
    "plan_environment": {},
    "plan_gpu_memory": "",
    "plan_gpu_numa_nodes": {},
    "plan_gpu_pci_ids": [],
    "plan_hicache": {},
    "plan_hicache_like": "",
    "plan_memory_nodes": [],
    "plan_model_path": "",
    "plan_numa_binder": "numactl",
    "plan_numa_policy": "strict",
    "plan_numactl": "/usr/bin/numactl",
    "plan_nvml_environment": {},
    "plan_proc_root": "/proc",
    "plan_python": "/usr/bin/python3",
    "plan_reserve_engine_check": "10GiB",
    "plan_reserve_growth": 0.28,
    "plan_reserve_nodes": {},
    "plan_reserve_os": "4GiB",
    "plan_reserve_page_cache": "8GiB",
    "plan_reserve_process": "4GiB",
    "plan_reserve_services": "2GiB",
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
    "hicache",
    "host",
    "metrics_port",
    "name",
    "numa_nodes",
    "port",
    "role",
    "tp_size",
)
SERVICE_USER = "llmfleet"
# CUDA's context and libraries on each GPU, which no flag counts.
DEVICE_OVERHEAD = 2 * GIB
_NOTHING = _budget.Demand("")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_FLAG = re.compile(r"[a-z][a-z0-9-]*")
_TRUE = ("true", "yes")
_FALSE = ("false", "no")


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
    hicache: _budget.Demand | None = None

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
    hicache: _budget.Demand | None = None
    reserves: _budget.Reserves = field(default_factory=_budget.Reserves)
    gpu_memory: int | None = None
    gpu_nodes: dict[str, int] = field(default_factory=dict)

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
    found = {name: str(item) for name, item in _mapping(value, what).items()}
    for name in _engine.ENGINE_OWNED_ENVIRONMENT:
        if name in found:
            raise RefusalError(
                "environment_owned",
                f"{what} sets {name}",
                "one owner of the NUMA policy: the unit binds, and the engine stays out",
                f"remove {name}, and say what you want with plan_numa_policy and numa_nodes",
            )
    return found


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
    hicache = _budget.parse_demand(entry.get("hicache"), f"hicache of {what}")
    if hicache is not None and hicache.kind != "none" and role == "router":
        raise RefusalError("hicache", f"{what} is a router with hicache", "hicache on a prefill", "remove hicache")
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
        hicache=hicache,
    )


def _reserves(known: Mapping[str, Any]) -> _budget.Reserves:
    """The memory that an operator keeps back. Raises RefusalError at the first that is no amount."""
    growth = parse_share(_numeral(known["plan_reserve_growth"]), "plan_reserve_growth", zero=True)
    if growth > 0.9:
        raise RefusalError(
            "share",
            f"plan_reserve_growth is {growth}",
            "at most 0.9",
            "keep back a smaller share for growth under load",
        )
    nodes = _mapping(known["plan_reserve_nodes"], "plan_reserve_nodes")
    return _budget.Reserves(
        **{
            name: parse_size(known[f"plan_reserve_{variable}"], f"plan_reserve_{variable}", zero=True)
            for name, variable in (
                ("os", "os"),
                ("page_cache", "page_cache"),
                ("services", "services"),
                ("process", "process"),
                ("check", "engine_check"),
            )
        },
        growth=Fraction(str(growth)),
        nodes={
            _integer(node, "a node of plan_reserve_nodes"): parse_size(size, f"plan_reserve_nodes[{node}]", zero=True)
            for node, size in nodes.items()
        },
    )


def _numeral(value: Any) -> Any:
    """A number also where an INI inventory or ``-e`` made it text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value) else value


def _gpu_nodes(value: Any) -> dict[str, int]:
    """plan_gpu_numa_nodes: PCI address -> node. Raises RefusalError."""
    found = {}
    for address, node in _mapping(value, "plan_gpu_numa_nodes").items():
        try:
            found[normalise_pci(address)] = _integer(node, f"plan_gpu_numa_nodes[{address}]")
        except TopologyError as error:
            raise RefusalError(
                "type",
                f"plan_gpu_numa_nodes names {address!r}",
                "PCI addresses, such as 0000:17:00.0",
                "`nvidia-smi -q` and `lspci -D` print them",
            ) from error
    return found


def named_groups(host: str, variables: Mapping[str, Any]) -> set[str]:
    """The PD groups that a host's instances name, without looking at anything else of them."""
    raw = variables.get("plan_instances")
    entries = raw if isinstance(raw, Sequence) and not isinstance(raw, str) else []
    return {str(entry.get("group", host)) for entry in entries if isinstance(entry, Mapping)}


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
        if isinstance(default, str) and not name.startswith("plan_reserve_"):
            known[name] = attempt(_text, known[name], name)
    for name, owned in (
        ("plan_engine_args", _engine.ENGINE_OWNED_FLAGS),
        ("plan_router_args", _engine.ROUTER_OWNED_FLAGS),
    ):
        known[name] = attempt(_flags, known[name], name, owned) or {}
    for name in ("plan_environment", "plan_nvml_environment"):
        known[name] = attempt(_environment, known[name], name) or {}
    for name in ("plan_gpu_pci_ids", "plan_memory_nodes"):
        if not isinstance(known[name], Sequence) or isinstance(known[name], str):
            attempt(_integers, known[name], name)
            known[name] = []
    known["plan_memory_nodes"] = attempt(_integers, known["plan_memory_nodes"], "plan_memory_nodes") or []
    wants.hicache = attempt(_budget.parse_demand, known["plan_hicache"], "plan_hicache")
    wants.reserves = attempt(_reserves, known) or _budget.Reserves()
    wants.gpu_nodes = attempt(_gpu_nodes, known["plan_gpu_numa_nodes"]) or {}
    if known["plan_gpu_memory"] not in ("", None):
        wants.gpu_memory = attempt(parse_size, known["plan_gpu_memory"], "plan_gpu_memory")
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
    attempt(_choice, wants, "plan_numa_policy", _nodes.POLICIES)
    attempt(_choice, wants, "plan_numa_binder", _nodes.BINDERS)
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
    engine = _engine.ENGINES.get(wants["plan_engine_version"])
    device = engine.devices[wants["plan_device"]] if engine else _engine.NO_DEVICE
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


def engine_argv(wants: Wants, instance: Instance, python: str, cache: Mapping[str, Any]) -> list[str]:
    """The command line of a server; ``cache`` are the flags of its part of the HiCache budget."""
    flags = _effective_flags(wants, instance) | {**cache, "host": instance.host, "port": instance.port}
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


def node_set(wants: Wants, instance: Instance, topology: Mapping[str, Any]) -> _nodes.NodeSet:
    """The NUMA nodes an instance is bound to; see ``_nodes.py``. Raises RefusalError."""
    found = _nodes.node_set(
        instance.name,
        instance.gpus,
        instance.numa_nodes,
        topology,
        wants["plan_numa_policy"],
        wants.gpu_nodes,
        wants["plan_memory_nodes"],
    )
    _nodes.check_allowed(instance.name, found, topology, wants["plan_numa_policy"])
    return found


def binding(wants: Wants, found: _nodes.NodeSet) -> list[str]:
    """The numactl prefix of a command line; empty where nothing is bound, or systemd does it."""
    if wants["plan_numa_binder"] == "systemd":
        return []
    return _nodes.numactl_argv(wants["plan_numactl"], found, wants["plan_numa_policy"])


def unit_settings(wants: Wants, found: _nodes.NodeSet, memory_max: int | None) -> dict[str, str]:
    """Settings of the unit's [Service] that the plan decides: its memory limit, and the binding if systemd does it."""
    settings = {} if memory_max is None else {"MemoryMax": str(memory_max)}
    if wants["plan_numa_binder"] == "systemd":
        settings |= _nodes.systemd_properties(found, wants["plan_numa_policy"])
    return settings


def bound_text(wants: Wants, found: _nodes.NodeSet) -> str:
    """How a server is bound, for a person."""
    policy = wants["plan_numa_policy"]
    if policy == "none" or not found:
        return f"not bound ({'plan_numa_policy is none' if policy == 'none' else 'no GPUs and no numa_nodes'})"
    cpus, memory = (", ".join(map(str, nodes)) for nodes in (found.nodes, found.memory_nodes))
    kept = "only" if policy == "strict" else "first"
    return f"CPUs of node {cpus}, memory of node {memory} {kept} ({policy}, by {wants['plan_numa_binder']})"


# ------------------------------------------------------------------------------------------------------ the host cache


def _number_flag(flags: Mapping[str, Any], name: str) -> int | None:
    value = flags.get(name)
    return None if value is None else _integer(value, name)


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
        share = Fraction(str(parse_share(_numeral(fraction), "mem-fraction-static")))
        room = int(wants.gpu_memory * share) - model_size // instance.tp_size - DEVICE_OVERHEAD - fixed
        found["largest_tokens"] = geometry.aligned(max(0, int(room / geometry.bytes_per_token)))
    return found


def host_budget(
    wants: Wants,
    topology: Mapping[str, Any],
    config: str | None,
    model_size: int | None = None,
) -> tuple[dict[str, Any], list[RefusalError]]:
    """The HiCache budget of a host and what its servers' KV caches cost on the device; see ``_budget.py``.

    ``config``: the text of the model's config.json, needed where HiCache is asked for. ``model_size`` in bytes. The
    node sets have to be sound (``node_set`` refuses). Result: the budget, with ``device`` for each server in it.
    """
    version = wants["plan_engine_version"]
    servers = [instance for instance in wants.instances if instance.role in ENGINE_ROLES]
    asked = {
        item.name: (item.hicache or wants.hicache) is not None and (item.hicache or _NOTHING).kind != "none"
        for item in servers
    }
    refused: list[RefusalError] = []
    consumers: list[_budget.Consumer] = []
    device: dict[str, Any] = {}
    release = _hicache.RELEASES[_engine.DEFAULT_ENGINE]
    if any(asked.values()):
        try:
            version, release = _hicache.release_of(version, wants["plan_hicache_like"])
        except RefusalError as error:
            return {}, [error]
    for instance in servers:
        flags = _effective_flags(wants, instance)
        environment = wants["plan_environment"] | instance.environment
        found = node_set(wants, instance, topology)
        consumer = _budget.Consumer(
            name=instance.name,
            role=instance.role,
            unit=instance.unit,
            ranks=instance.tp_size,
            memory_nodes=found.memory_nodes,
            policy=wants["plan_numa_policy"],
            demand=instance.hicache if asked[instance.name] else None,
            hugepage=_hicache.HUGEPAGES.get(environment.get("SGLANG_HUGEPAGE_SIZE", "").strip().upper()),
        )
        consumers.append(consumer)
        if (instance.hicache or _NOTHING).kind == "none":
            consumer.none_because = "disabled by the operator"
        request = _hicache.Request(instance.role, wants["plan_device"], flags, environment)
        try:
            # A server that takes none whatever its model is needs no model to be read.
            takes = asked[instance.name] and not _takes_none(consumer, instance, request, version)
            geometry = _geometry_of(wants, instance, flags, environment, config, release, takes)
            if geometry is not None:
                with_bf16 = _geometry_of(wants, instance, flags, environment, config, release, False, "bf16")
                other = with_bf16 if geometry.kind == "dsv4" else None
                device[instance.name] = device_memory(wants, instance, geometry, other, flags, model_size)
                consumer.geometry = geometry
                consumer.tokens = _number_flag(flags, "max-total-tokens") or device[instance.name]["largest_tokens"]
            if takes and geometry is not None:
                _hicache_rules(consumer, instance, replace(request, kind=geometry.kind), version)
        except RefusalError as error:
            refused.append(error)
    if refused:
        return {}, refused
    budget, refused = _budget.make_budget(
        topology, consumers, wants.hicache, wants.reserves, release, wants["plan_memory_nodes"]
    )
    return budget | {"device": device}, refused


def budget_of(
    host: str,
    variables: Mapping[str, Any],
    topology: Mapping[str, Any],
    config: str | None,
    model_size: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The HiCache budget of one host from its variables and its topology alone, with its refusals as data.

    For budgets without a plan: no peers, no artefacts, no disks, and releases that this collection cannot build but
    knows the rules of (``_hicache.RELEASES``).
    """
    wants = parse_wants(host, variables)
    refused = list(wants.refusals)
    for name, allowed in (("plan_numa_policy", _nodes.POLICIES), ("plan_numa_binder", _nodes.BINDERS)):
        try:
            _choice(wants, name, allowed)
        except RefusalError as error:
            refused.append(error)
    if not refused:
        for instance in wants.instances:
            try:
                node_set(wants, instance, topology)
            except RefusalError as error:
                refused.append(error)
    budget: dict[str, Any] = {}
    if not refused:
        budget, refused = host_budget(wants, topology, config, model_size)
    return budget, [error.on(host) for error in refused]


def _geometry_of(
    wants: Wants,
    instance: Instance,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config: str | None,
    release: _hicache.Release,
    asked: bool,
    index_keys: str | None = None,
) -> Geometry | None:
    """The geometry of a server's KV cache. Where no HiCache is asked for it only informs, and may be unknown."""
    engine = _engine.ENGINES.get(wants["plan_engine_version"])
    keys = index_keys or (engine.index_keys if engine else "fp8")
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
    nodes: _nodes.NodeSet,
    cache: Mapping[str, Any] | None,
    monitor: str,
) -> dict[str, Any]:
    """One instance; ``cache`` is its part of the host's budget, None where there is none."""
    release = _release(wants, artefacts, "router" if instance.role == "router" else "engine")
    if instance.role == "router":
        argv = router_argv(wants, instance, fleet, release["dir"], monitor)
    else:
        argv = engine_argv(wants, instance, release["python"], cache["flags"] if cache else {})
    revision = group_revision(fleet, instance.group, artefacts)
    bind = binding(wants, nodes)
    settings = unit_settings(wants, nodes, cache["memory_max"] if cache else None)
    environment = _instance_environment(wants, instance) | {"LLMFLEET_REVISION": revision}
    # Settings only where there are some: a host without HiCache keeps the fingerprint it has always had.
    ran_with = {"argv": bind + argv, "environment": environment} | ({"settings": settings} if settings else {})
    fingerprint = digest(ran_with, 16)
    return {
        "name": instance.name,
        "role": instance.role,
        "group": instance.group,
        "unit": instance.unit,
        "gpus": instance.gpus,
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
    """What Prometheus on ``monitor`` scrapes: every instance and exporter of the given hosts.

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
    ``facts``: ``{os {distribution, major, arch}, topology, ports, paths, releases[], model_source | None, model_config
    (text | None), memory {unit: {by_node}}}``; of a captured host there are ``topology`` and ``model_config`` only.
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
        "budget": {},
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
        plan["scrape"] = scrape_targets({wants.host: wants}, monitor)
        groups = sorted({instance.group for instance in wants.instances})
        plan["groups"] = {group: _group_plan(fleet, group, artefacts) for group in groups}
    except RefusalError as error:
        return [error]
    plan["model"]["served_name"] = served_name(wants)
    sets: dict[str, _nodes.NodeSet] = {}
    for instance in wants.instances:
        try:
            sets[instance.name] = (
                _nodes.NodeSet([], []) if facts is None else node_set(wants, instance, facts["topology"])
            )
        except RefusalError as error:
            refused.append(error)
    if facts is not None:
        refused += _check_facts(wants, artefacts, facts)
        if not refused:
            plan["budget"], refused = host_budget(
                wants, facts["topology"], facts.get("model_config"), _model_size(wants, facts)
            )
    if refused:
        return refused
    caches = {entry["name"]: entry for entry in plan["budget"].get("instances", [])}
    for instance in wants.instances:
        try:
            plan["instances"].append(
                _instance_plan(
                    wants, instance, fleet, artefacts, sets[instance.name], caches.get(instance.name), monitor
                )
            )
        except RefusalError as error:
            refused.append(error)
    plan["warnings"] = [*_warnings(wants), *plan["budget"].get("warnings", [])]
    if facts is not None and not refused:
        refused = check_memory(plan["budget"], facts)
    return refused


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


def check_memory(budget: Mapping[str, Any], facts: Mapping[str, Any]) -> list[RefusalError]:
    """A gate, not a budget: what is planned has to be there now, or be held by the very unit that is to have it.

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
