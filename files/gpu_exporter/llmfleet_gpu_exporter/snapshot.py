# SPDX-License-Identifier: Apache-2.0
"""What one pass over NVML found: plain, immutable, made by the collector and printed by `render`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# (metric name, value of the metric's own label or ""). See `metrics.DEVICE_METRICS`.
Key = tuple[str, str]

# The failure of a snapshot taken before the first pass ended.
STARTING = "starting"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `values` holds what NVML said, in NVML's units and unchecked; it is empty unless `up`."""

    index: int
    """NVML's index when this process first saw the GPU: it stays the same when NVML counts anew without a lost one."""
    uuid: object = ""
    pci_bus_id: object = ""
    name: object = ""
    numa_node: object = ""
    instance: object = ""
    up: bool = False
    values: Mapping[Key, object] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Snapshot:
    """All GPUs at one time. `failure` is "" or why NVML as a whole did not answer; then every GPU is down."""

    taken: float
    """Monotonic time, in seconds, of the end of the pass."""
    duration: float = 0.0
    failure: str = STARTING
    driver: object = ""
    gpus: tuple[Gpu, ...] = ()
    expected: int | None = None
    """Number of GPUs that the plan uses; None without a readable plan."""
