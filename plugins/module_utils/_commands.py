# SPDX-License-Identifier: Apache-2.0
"""What a service is started with: release, command line, environment, binding, and the hashes over them.

Everything here follows from the inventory, the node set of the host and its part of the budget; nothing from what
moves. PRIVATE to the collection.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _engine, _features, _nodes
from ansible_collections.llmfleet.sglang.plugins.module_utils._addresses import (
    group_members,
    metrics_host,
    own_ip,
    url,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._admission import (
    BOOTSTRAP,
    BOUND,
    TIMEOUT_VARIABLES,
    WAITING,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._artefacts import (
    UnknownSetError,
    requirements,
    wheel_sets,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import (
    ENGINE_ROLES,
    FALLBACK,
    Instance,
    Wants,
    flag_value,
    integer,
)


def canonical(data: Any) -> str:
    """The one JSON text of some data: sorted keys, no spaces; what hashes are taken over."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(data: Any, length: int) -> str:
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:length]


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


def release_id(wants: Wants, lines: Sequence[str], sources: str = "") -> str:
    """The name of a release: a hash over its exact requirements, the interpreter they are installed for, and the
    plugin, kernels and patches (``sources``, their digest)."""
    return digest({"requirements": sorted(lines), "python": wants["plan_python"], "sources": sources}, 12)


def _sources(wants: Wants, artefacts: Mapping[str, Any]) -> str:
    """The digest of the engine's plugin, kernels and patches. Raises RefusalError where they cannot be read."""
    read = artefacts.get("sources", {}).get(wants["plan_engine_files"], {}).get(wants["plan_engine_version"], {})
    if "error" in read:
        raise RefusalError(
            "engine_files",
            f"plan_engine_files {wants['plan_engine_files']!r}: {read['error']}",
            "a folder like files/ of this collection, on the controller",
            "correct plan_engine_files, or leave it out to use the collection's own",
        )
    return str(read.get("digest", ""))


def release_plan(wants: Wants, artefacts: Mapping[str, Any], kind: str) -> dict[str, str]:
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
    release = release_id(wants, lines, _sources(wants, artefacts) if kind == "engine" else "")
    path = f"{wants['plan_root']}/{folder}/{release}"
    return {
        "version": version,
        "release": release,
        "dir": path,
        "set": name,
        "python": f"{path}/venv/bin/python",
        "base_python": wants["plan_python"],
        "cache": f"/var/cache/llmfleet/releases/{release}",
    }


def effective_flags(wants: Wants, instance: Instance) -> dict[str, Any]:
    """An engine's flags that do not name an address: the device's, then the host's, then the instance's own. Those of
    disaggregation are left out for a server without it."""
    engine = _engine.ENGINES.get(wants["plan_engine_version"])
    device = engine.devices[wants["plan_device"]] if engine else _engine.NO_DEVICE
    flags = {
        **device.flags.get("", {}),
        **device.flags.get(instance.role, {}),
        **wants["plan_engine_args"],
        **instance.args,
        "disaggregation-mode": instance.role,
        "disaggregation-transfer-backend": wants["plan_transfer_backend"],
    }
    if instance.role == FALLBACK:
        flags = {name: value for name, value in flags.items() if not name.startswith("disaggregation-")}
    return flags | {
        "device": wants["plan_device"],
        "enable-metrics": True,
        "model-path": served_path(wants),
        "served-model-name": served_name(wants),
        "tp-size": instance.tp_size,
    }


def ranks(wants: Wants, instance: Instance) -> int:
    """How many scheduler processes a server has: each pipeline stage of each replica has ``tp-size`` of them. Attention
    in data parallel groups divides those, and adds none."""
    if not instance.is_engine:
        return 0
    flags = effective_flags(wants, instance)
    stages = integer(flags.get("pp-size", flags.get("pipeline-parallel-size", 1)), "pp-size")
    replicas = integer(flags.get("dp-size", flags.get("data-parallel-size", 1)), "dp-size")
    divided = flag_value(flags.get("enable-dp-attention")) is True or "attn-dp-size" in flags
    return instance.tp_size * stages * (1 if divided else replicas)


def served_path(wants: Wants) -> str:
    """The folder that servers load: the model's, or its overlay with the operator's generation defaults, which is named
    by what is in it, so that another one never changes under a running server."""
    if not wants["plan_generation_config"]:
        return str(wants["plan_model_path"])
    name = digest({"model": wants["plan_model_path"], "generation_config": wants["plan_generation_config"]}, 12)
    return f"{wants['plan_root']}/overlays/{name}"


def served_name(wants: Wants) -> str:
    return str(wants["plan_served_model_name"] or wants["plan_model_path"].rstrip("/").rsplit("/", 1)[-1])


def engine_argv(
    wants: Wants, instance: Instance, python: str, cache: Mapping[str, Any], bound: int | None = None
) -> list[str]:
    """The command line of a server; ``cache`` are the flags of its part of the HiCache budget, ``bound`` is what the
    group's admission lets wait on it, None where it says nothing or the operator did."""
    flags = {} if bound is None else {BOUND: bound}
    flags |= effective_flags(wants, instance) | {**cache, "host": instance.host, "port": instance.port}
    if instance.bootstrap_port is not None:
        flags["disaggregation-bootstrap-port"] = instance.bootstrap_port
    return [python, "-m", _engine.ENGINES[wants["plan_engine_version"]].module, *render_flags(flags)]


def router_argv(
    wants: Wants,
    instance: Instance,
    fleet: Mapping[str, Wants],
    folder: str,
    monitor: str,
    admission: Mapping[str, Any],
) -> list[str]:
    """``smg launch`` for one PD group: its workers from the whole inventory, in a fixed order; ``admission`` are the
    flags of its part of the group's admission."""
    servers = {role: group_members(fleet, instance.group, role) for role in ENGINE_ROLES}
    router = _engine.ROUTERS[wants["plan_router_version"]]
    flags = {
        **router.flags,
        **(router.pair_flags if all(len(members) == 1 for members in servers.values()) else {}),
        **admission,
        **wants["plan_router_args"],
        **instance.args,
        "host": instance.host,
        "port": instance.port,
        "prometheus-host": metrics_host(wants, instance, monitor),
        "prometheus-port": instance.metrics_port,
    }
    workers: list[str] = []
    for role, members in servers.items():
        for member in members:
            workers += [f"--{role}", url(member, wants.host)]
            if role == "prefill":
                workers.append(str(member[1].bootstrap_port))
    return [f"{folder}/venv/bin/smg", "launch", "--pd-disaggregation", *workers, *render_flags(flags)]


def group_revision(fleet: Mapping[str, Wants], group: str, artefacts: Mapping[str, Any]) -> str:
    """A hash over what the members of a PD group must agree on: releases, model, and each role's flags. How many
    requests a server lets wait, and for how long, is its own matter."""
    members = [member for role in ENGINE_ROLES for member in group_members(fleet, group, role)]
    agreed = {
        "releases": sorted({release_plan(wants, artefacts, "engine")["release"] for wants, _i in members}),
        "flags": sorted(
            {canonical(_without(effective_flags(wants, instance), (BOUND,))) for wants, instance in members}
        ),
        "environment": sorted(
            {canonical(_without(wants["plan_environment"] | i.environment, TIMEOUT_VARIABLES)) for wants, i in members}
        ),
        "features": sorted({canonical(wants.features) for wants, _i in members}),
    }
    return digest(agreed, 12)


def _without(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


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


def instance_environment(
    wants: Wants,
    instance: Instance,
    release: Mapping[str, str],
    jobs: int | None,
    timeouts: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a unit, its fingerprint not yet in it. ``timeouts`` are those that a server reads.

    HOME is the instance's own, made by systemd (CacheDirectory=), and the metrics folder is emptied at each start
    (RuntimeDirectory=). What the release compiles is kept with the release, for all its servers. ``jobs`` is how many
    compilers one server may run at once, None where it is not known.
    """
    found = {"HOME": f"/var/cache/llmfleet/{instance.name}", "LLMFLEET_INSTANCE": instance.name}
    if instance.is_engine:
        found |= engine_environment(wants, release)
        found |= timeouts or {}
        if instance.role in ENGINE_ROLES and (address := own_ip((wants, instance))):
            found[_engine.HOST_IP] = address
        found["PROMETHEUS_MULTIPROC_DIR"] = f"/run/llmfleet/{instance.name}/metrics"
        if jobs is not None and wants["plan_device"] == "cuda":
            found["MAX_JOBS"] = str(jobs)
        if instance.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, instance.gpus))
        found |= operators_environment(wants, instance)
        found[_features.FOLDER] = f"/run/llmfleet/{instance.name}/features"
        found |= _features.environment(wants.features)
    return found | instance.environment


def timeout_variables(wants: Wants, instance: Instance) -> tuple[str, ...]:
    """The timeouts of a transfer that a server reads: a prefill that of bootstrapping, a decode that of waiting."""
    if instance.role == "decode":
        return (WAITING,)
    if instance.role != "prefill":
        return ()
    policy = effective_flags(wants, instance).get("disaggregation-decode-allocation-policy")
    return TIMEOUT_VARIABLES if policy == "prefill_complete" else (BOOTSTRAP,)


def operators_environment(wants: Wants, instance: Instance) -> dict[str, str]:
    """plan_environment less the timeouts that the server does not read: a changed one restarts only who heeds it."""
    unread = set(TIMEOUT_VARIABLES) - set(timeout_variables(wants, instance))
    return _without(wants["plan_environment"], tuple(unread))


def engine_environment(wants: Wants, release: Mapping[str, str]) -> dict[str, str]:
    """What every process of the engine needs, a server's as well as a check's: the version's and the device's
    variables, and where the release keeps what it compiles and finds its compilers."""
    engine = _engine.ENGINES[wants["plan_engine_version"]]
    found = {**engine.environment, **engine.devices[wants["plan_device"]].environment}
    found |= {name: f"{release['cache']}/{folder}" for name, folder in sorted(_engine.CACHES.items())}
    if wants["plan_device"] == "cuda":
        folder = release["dir"]
        found["CUDA_HOME"] = f"{folder}/cuda"
        found["PATH"] = f"{folder}/venv/bin:{folder}/cuda/bin:/usr/local/bin:/usr/bin:/bin"
    return found
