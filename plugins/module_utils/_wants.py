# SPDX-License-Identifier: Apache-2.0
"""What an operator wants of a host: its ``plan_*`` variables, with types made sure of. PRIVATE to the collection.

Nothing is refused halfway: what cannot be understood is collected in ``Wants.refusals``, so that all of it is told at
once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import (
    _admission,
    _api_keys,
    _budget,
    _engine,
    _features,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._overlay import GENERATION_KEYS
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._size import parse_share, parse_size
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import TopologyError, normalise_pci

ENGINE_ROLES = ("prefill", "decode")
ROLES = (*ENGINE_ROLES, "router")
# One server without disaggregation that stands by, to serve in the place of its group's instances of the host.
FALLBACK = "server"
# The defaults of the role ``plan``; they are needed here because a peer's role defaults cannot be read in Ansible.
DEFAULTS: Mapping[str, Any] = {
    "plan_address": "",
    "plan_admission": {},
    "plan_api_keys": [],
    "plan_capture": "",
    "plan_device": "cuda",
    "plan_engine_args": {},
    "plan_engine_files": "",
    "plan_engine_version": _engine.DEFAULT_ENGINE,
    "plan_environment": {},
    "plan_features": {},
    "plan_generation_config": {},
    "plan_gpu_capability": "",
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
    def is_engine(self) -> bool:
        return self.role in (*ENGINE_ROLES, FALLBACK)

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
    """The variables of one inventory host, parsed. ``refusals`` holds what could not be understood.

    ``fallbacks`` are kept apart from ``instances``, which are what runs: whoever counts, starts or watches those never
    has to leave out what only stands by.
    """

    host: str
    variables: dict[str, Any]
    instances: list[Instance] = field(default_factory=list)
    fallbacks: list[Instance] = field(default_factory=list)
    refusals: list[RefusalError] = field(default_factory=list)
    admission: _admission.Demand = field(default_factory=_admission.Demand)
    hicache: _budget.Demand | None = None
    reserves: _budget.Reserves = field(default_factory=_budget.Reserves)
    gpu_memory: int | None = None
    gpu_nodes: dict[str, int] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)
    # Kept out of ``variables`` and of what is printed: nothing that is written may hold a key.
    api_keys: list[str] = field(default_factory=list, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]

    @property
    def address(self) -> str:
        return str(self["plan_address"] or self.variables.get("ansible_host") or self.host)

    def displaced(self, fallback: Instance) -> list[Instance]:
        """The instances of the host that do not run while a fallback does: all of its group."""
        return [instance for instance in self.instances if instance.group == fallback.group]


def integer(value: Any, what: str) -> int:
    """An int, also from a string of digits, since extra variables and INI inventories only know strings."""
    if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value).strip()):
        raise RefusalError("type", f"{what} is {value!r}", "a whole number", f"write {what} as a number")
    return int(value)


def _port(value: Any, what: str) -> int:
    port = integer(value, what)
    if not 1 <= port <= 65535:
        raise RefusalError("port", f"{what} is {port}", "a TCP port from 1 to 65535", f"give {what} a valid port")
    return port


def _integers(value: Any, what: str) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RefusalError(
            "type", f"{what} is {value!r}", "a list of whole numbers", f"write {what} as a list, such as [0, 1]"
        )
    return [integer(item, what) for item in value]


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


def _flags(value: Any, what: str, owned: Sequence[str]) -> dict[str, Any]:
    flags = _mapping(value, what)
    _api_keys.check_flags(flags, what)
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
    bound = flags.get("max-queued-requests")
    if bound is not None and not re.fullmatch(r"[1-9]\d*", str(bound)):
        raise RefusalError(
            "queue_bound",
            f"{what} sets max-queued-requests to {bound!r}",
            "a whole number, 1 or more, or no such flag",
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
    known_roles = (*ROLES, FALLBACK)
    if role not in known_roles:
        raise RefusalError(
            "role", f"{what} has the role {role!r}", f"one of {', '.join(known_roles)}", "correct the role"
        )
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
        tp_size=integer(entry.get("tp_size", len(gpus) or 1), f"tp_size of {what}"),
        args=_flags(entry.get("args", {}), f"args of {what}", owned),
        environment=_environment(entry.get("environment", {}), f"environment of {what}"),
        hicache=hicache,
    )


def _in_place_of_router(entry: Any, entries: Sequence[Any], host: str) -> Any:
    """An entry of plan_instances; a fallback that names no port with port and address of its group's router on the host
    (the first by name), so that clients and gateways need not know who serves."""
    if not isinstance(entry, Mapping) or entry.get("role") != FALLBACK or "port" in entry:
        return entry
    routers = [
        other
        for other in entries
        if isinstance(other, Mapping)
        and other.get("role") == "router"
        and str(other.get("group", host)) == str(entry.get("group", host))
    ]
    if not routers:
        return entry
    router = min(routers, key=lambda other: str(other.get("name", "")))
    return {**{key: router[key] for key in ("host", "port") if key in router}, **entry}


def _reserves(known: Mapping[str, Any]) -> _budget.Reserves:
    """The memory that an operator keeps back. Raises RefusalError at the first that is no amount."""
    growth = parse_share(numeral(known["plan_reserve_growth"]), "plan_reserve_growth", zero=True)
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
            integer(node, "a node of plan_reserve_nodes"): parse_size(size, f"plan_reserve_nodes[{node}]", zero=True)
            for node, size in nodes.items()
        },
    )


def numeral(value: Any) -> Any:
    """A number also where an INI inventory or ``-e`` made it text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value) else value


def _parse_admission(value: Any) -> _admission.Demand:
    """plan_admission, whose numbers may be text. Raises RefusalError."""
    if isinstance(value, Mapping):
        value = {name: numeral(item) for name, item in value.items()}
    return _admission.parse_demand(value, "plan_admission")


def _generation(value: Any) -> dict[str, float]:
    """plan_generation_config: name -> number. Raises RefusalError."""
    found = {}
    for name, raw in _mapping(value, "plan_generation_config").items():
        number = numeral(raw)
        if name not in GENERATION_KEYS or isinstance(number, bool) or not isinstance(number, (int, float)):
            raise RefusalError(
                "generation_config",
                f"plan_generation_config has {name}: {raw!r}",
                f"numbers for {', '.join(GENERATION_KEYS)}",
                "correct it; what else a checkpoint's generation_config.json holds stays as it is",
            )
        found[name] = number
    return found


def _features_of(value: Any, api_keys: Sequence[str]) -> dict[str, str]:
    """plan_features, and the feature that follows from plan_api_keys. Raises RefusalError."""
    if isinstance(value, Mapping) and _api_keys.FEATURE in value:
        raise RefusalError(
            "feature_owned",
            f"plan_features names {_api_keys.FEATURE}",
            f"{_api_keys.VARIABLE} alone to decide whether servers ask for a key",
            f"remove {_api_keys.FEATURE} from plan_features and set {_api_keys.VARIABLE}",
        )
    features = _features.parse_features(value, "plan_features")
    return dict(sorted((features | ({_api_keys.FEATURE: "on"} if api_keys else {})).items()))


def _gpu_nodes(value: Any) -> dict[str, int]:
    """plan_gpu_numa_nodes: PCI address -> node. Raises RefusalError."""
    found = {}
    for address, node in _mapping(value, "plan_gpu_numa_nodes").items():
        try:
            found[normalise_pci(address)] = integer(node, f"plan_gpu_numa_nodes[{address}]")
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
    wants.admission = attempt(_parse_admission, known["plan_admission"]) or _admission.Demand()
    wants.hicache = attempt(_budget.parse_demand, known["plan_hicache"], "plan_hicache")
    wants.reserves = attempt(_reserves, known) or _budget.Reserves()
    wants.gpu_nodes = attempt(_gpu_nodes, known["plan_gpu_numa_nodes"]) or {}
    if known["plan_gpu_memory"] not in ("", None):
        wants.gpu_memory = attempt(parse_size, known["plan_gpu_memory"], "plan_gpu_memory")
    known["plan_generation_config"] = attempt(_generation, known["plan_generation_config"]) or {}
    wants.api_keys = attempt(_api_keys.parse_api_keys, known.pop("plan_api_keys")) or []
    wants.features = attempt(_features_of, known["plan_features"], wants.api_keys) or {}
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
        instance = attempt(parse_instance, _in_place_of_router(entry, raw, host), number, host)
        if instance is not None:
            (wants.fallbacks if instance.role == FALLBACK else wants.instances).append(instance)
    return wants
