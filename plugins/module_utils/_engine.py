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
    # Whether a decode goes on with the ports of a prefill that was restarted, so that it has to be restarted too.
    decode_keeps_prefill_ports: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    # Metrics and labels of the default release that this one does not have.
    missing_metrics: frozenset[str] = frozenset()
    missing_labels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Router:
    """One release of the router. ``flags`` are those that no one prefill and one decode can be run safely without,
    ``pair_flags`` replace some of them in a group that has no more than these two."""

    version: str
    flags: Mapping[str, Any]
    pair_flags: Mapping[str, Any]
    release_bytes: int
    # Served names for which it asks the servers for thinking where a request does not say; it has no flag for it.
    thinking_models: frozenset[str] = frozenset()


# A release that is only counted with, and not built.
NO_DEVICE = Device(flags={}, environment={}, release_bytes=0)

# The CPU device runs the engine's own torch paths. float32 and CUDA kernels are out of the question, and the parts of
# the decode server that would back up retracted requests through CUDA host memory use a CPU tensor instead.
_CPU_FLAGS: Mapping[str, Any] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "disable-overlap-schedule": True,
    # Without it the scheduler spins: an idle CPU host would use a core per instance.
    "sleep-on-idle": True,
}
_CPU_0_5_16 = Device(
    # It always backs up retracted requests through a CPU tensor, and has no flag for it.
    flags={"": _CPU_FLAGS},
    environment={"SGLANG_USE_CPU_ENGINE": "1"},
    release_bytes=4 * GIB,
)
_CPU_0_5_23 = Device(
    flags={"": _CPU_FLAGS, "decode": {"disaggregation-decode-retraction-backup": "cpu_tensor"}},
    environment={"SGLANG_USE_CPU_ENGINE": "1"},
    release_bytes=4 * GIB,
)
_CUDA = Device(
    flags={"": {}},
    # CUDA's own default order is "fastest first"; the plan's GPU numbers are the PCI order that NVML uses too.
    environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    release_bytes=16 * GIB,
)

_TRANSFER_BACKENDS = ("mooncake", "mooncake_tcp", "nixl")
_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # The unit binds the process to its NUMA nodes; a second binding by the engine would replace ours.
    "SGLANG_AUTO_NUMA_BIND": "0",
}
# observability/metrics_collector.py of 0.5.23 less that of 0.5.16.
_METRICS_SINCE_0_5_16 = frozenset(
    f"sglang:{name}"
    for name in [
        "decode_deferred_kv_release_seconds",
        "decode_deferred_kv_release_total",
        "dp_attention_pairs_total",
        "dp_attention_steps_total",
        "dp_attention_sync_wait_seconds",
        "dp_attention_token_imbalance_ratio",
        "dp_attention_tokens_total",
        "graph_memory_usage_gb",
        "hicache_backup_bytes_total",
        "hicache_backup_dropped_tokens_total",
        "hicache_backup_duration_seconds",
        "hicache_backup_tokens_total",
        "hicache_dropped_tokens_total",
        "hicache_host_mamba_total_states",
        "hicache_host_mamba_used_states",
        "hicache_prefetch_aux_alloc_failed_tokens_total",
        "kv_cache_memory_usage_gb",
        "load_back_bytes_total",
        "max_total_num_tokens_swa",
        "num_decode_deferred_kv_release_reqs",
        "num_decode_host_receive_queue_reqs",
        "num_decode_host_receive_reqs_total",
        "prealloc_full_token_usage",
        "prealloc_swa_token_usage",
        "prefill_effective_tokens_total",
        "request_time_per_output_token_seconds",
        "scheduler_idle_seconds_total",
        "scheduler_process_cpu_seconds_total",
        "scheduler_stage_seconds_total",
        "startup_cuda_graph_time_seconds",
        "startup_time_seconds",
        "storage_prefetch_deferred_tokens_total",
        "storage_prefetch_hit_tokens_total",
        "storage_prefetch_unfulfilled_tokens_total",
        "weight_memory_usage_gb",
    ]
)

ENGINES: Mapping[str, Engine] = {
    "0.5.16": Engine(
        version="0.5.16",
        # It has no /ready. This one says 503 while it starts and while it drains, and else only 200 when the scheduler
        # answers a request for one token within 20 s; a failed warm-up is not ready until the scheduler does. Unlike
        # /health it does so whatever SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION is. It takes a second.
        readiness_route="/health_generate",
        module="sglang.launch_server",
        devices={"cpu": _CPU_0_5_16, "cuda": _CUDA},
        transfer_backends=_TRANSFER_BACKENDS,
        # disaggregation/common/conn.py:1225 takes them from a cache that only two missed heartbeats empty (:917).
        decode_keeps_prefill_ports=True,
        environment=_ENVIRONMENT,
        missing_metrics=_METRICS_SINCE_0_5_16,
        missing_labels=frozenset({"is_streaming"}),
    ),
    "0.5.23": Engine(
        version="0.5.23",
        # 200 only when the server is up and not draining, and no GPU work; /health generates a token each time.
        readiness_route="/ready",
        module="sglang.launch_server",
        devices={"cpu": _CPU_0_5_23, "cuda": _CUDA},
        transfer_backends=_TRANSFER_BACKENDS,
        # disaggregation/common/conn.py:2688 empties that cache for the peer at the first message that fails (:2668).
        decode_keeps_prefill_ports=False,
        environment=_ENVIRONMENT,
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
            # It would avoid a server with 8 requests waiting, whatever the server's own bound is.
            "disable-worker-overload-protection": True,
            "health-check-interval-secs": 5,
            "policy": "cache_aware",
        },
        # Nothing is to be chosen, and cache_aware keeps the prompts that it has seen: 5 to 9 KB for each short one, up
        # to 67 million characters: at 5 prompts/s of 100 characters 2 GB a day, and 3 GB in the end.
        pair_flags={"policy": "round_robin"},
        release_bytes=GIB // 4,
        thinking_models=frozenset({"deepseek-flash", "deepseek-v4-flash", "deepseek-v4-pro"}),
    ),
}

DEFAULT_ENGINE = "0.5.23"
DEFAULT_ROUTER = "1.13.0"

# The address at which the ranks of prefill and decode reach each other (utils/network.py, get_local_ip_auto). Without
# it an engine takes that of its route to the internet, IPv4 first, else what the host's own name stands for: on Debian
# 127.0.1.1.
HOST_IP = "SGLANG_HOST_IP"

# Where the engine's parts keep what they compile at run time: variable -> folder in the release's cache.
CACHES: Mapping[str, str] = {
    "CUDA_CACHE_PATH": "cuda",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
}

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
