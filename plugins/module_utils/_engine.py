# SPDX-License-Identifier: Apache-2.0
"""What each pinned engine and router version can do, as tables. PRIVATE to the collection.

A version that is not here is refused: flags, routes and metric names move between releases, and a guess is found out
at night. Figures and routes are those of the named release, read in its source and seen to hold in a running engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """What a device asks of the engine: flags by role ("" for every role), environment, room for a release."""

    flags: Mapping[str, Mapping[str, Any]]
    environment: Mapping[str, str]
    release_bytes: int


@dataclass(frozen=True)
class Engine:
    """One SGLang release."""

    version: str
    readiness_route: str
    module: str
    devices: Mapping[str, Device]
    transfer_backends: tuple[str, ...]
    # How the release stores the 128-wide index keys of DeepSeek V4.
    index_keys: str = "fp8"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Router:
    """One release of the router. ``flags`` are those that no one prefill and one decode can be run safely without."""

    version: str
    flags: Mapping[str, Any]
    release_bytes: int


# A release that is only counted with, and not built.
NO_DEVICE = Device(flags={}, environment={}, release_bytes=0)

# The CPU device runs the engine's own torch paths. float32 and CUDA kernels are out of the question, and the parts of
# the decode server that would back up retracted requests through CUDA host memory use a CPU tensor instead.
_CPU_0_5_23 = Device(
    flags={
        "": {
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
            "disable-overlap-schedule": True,
            # Without it the scheduler spins: an idle CPU host would use a core per instance.
            "sleep-on-idle": True,
        },
        "decode": {"disaggregation-decode-retraction-backup": "cpu_tensor"},
    },
    environment={"SGLANG_USE_CPU_ENGINE": "1"},
    release_bytes=4 * GIB,
)
_CUDA_0_5_23 = Device(
    flags={"": {}},
    # CUDA's own default order is "fastest first"; the plan's GPU numbers are the PCI order that NVML uses too.
    environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    release_bytes=16 * GIB,
)

ENGINES: Mapping[str, Engine] = {
    "0.5.23": Engine(
        version="0.5.23",
        # 200 only when the server is up and not draining, and no GPU work; /health generates a token each time.
        readiness_route="/ready",
        module="sglang.launch_server",
        devices={"cpu": _CPU_0_5_23, "cuda": _CUDA_0_5_23},
        transfer_backends=("mooncake", "mooncake_tcp", "nixl"),
        environment={
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            # The unit binds the process to its NUMA nodes; a second binding by the engine would replace ours.
            "SGLANG_AUTO_NUMA_BIND": "0",
        },
    ),
}

ROUTERS: Mapping[str, Router] = {
    "1.13.0": Router(
        version="1.13.0",
        # With one prefill and one decode, two refused requests open both circuit breakers and lock every client out
        # for a minute, each retry counting once more; health checks every 5 s notice a restarted worker soon enough.
        flags={
            "disable-retries": True,
            "disable-circuit-breaker": True,
            "health-check-interval-secs": 5,
            "policy": "cache_aware",
        },
        release_bytes=GIB // 4,
    ),
}

DEFAULT_ENGINE = "0.5.23"
DEFAULT_ROUTER = "1.13.0"

# Flags that the plan writes itself. Setting one of them in plan_engine_args would contradict the plan.
ENGINE_OWNED_FLAGS = (
    "base-gpu-id",
    "device",
    "disaggregation-bootstrap-port",
    "disaggregation-mode",
    "disaggregation-transfer-backend",
    "enable-hicache",
    "enable-hierarchical-cache",
    "enable-metrics",
    "hicache-host-memory-fraction",
    "hicache-ratio",
    "hicache-size",
    "host",
    "model",
    "model-path",
    "numa-node",
    "port",
    "served-model-name",
    "tensor-parallel-size",
    "tp-size",
)
# Environment that would give the NUMA policy a second owner.
ENGINE_OWNED_ENVIRONMENT = ("SGLANG_AUTO_NUMA_BIND", "SGLANG_NUMA_BIND_V2")
ROUTER_OWNED_FLAGS = (
    "decode",
    "host",
    "pd-disaggregation",
    "port",
    "prefill",
    "prometheus-host",
    "prometheus-port",
    "worker-urls",
)

# Python >= 3.11 is what the engine's wheel asks for, so Ubuntu 22.04 (3.10) is not in the list.
PLATFORMS: Mapping[str, tuple[str, ...]] = {"Debian": ("12",), "Ubuntu": ("24",)}
ARCHITECTURES = ("x86_64",)
