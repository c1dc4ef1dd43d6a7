# SPDX-License-Identifier: Apache-2.0
"""The per-GPU metrics and the NVML calls that they come from: the two tables to extend when a field is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from llmfleet_gpu_exporter.nvml import Handle, Nvml, UnansweredError
from llmfleet_gpu_exporter.snapshot import Key


@dataclass(frozen=True)
class Metric:
    """How a raw value becomes a sample: multiplied by `scale` into a base unit, dropped when above `maximum`."""

    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    label: str = ""
    scale: float = 1.0
    maximum: float = float("inf")


DEVICE_METRICS = (
    Metric(
        "llmfleet_gpu_utilization_ratio",
        "Share of the last sample period in which a kernel ran on the GPU.",
        scale=0.01,
        maximum=1.0,
    ),
    Metric(
        "llmfleet_gpu_memory_utilization_ratio",
        "Share of the last sample period in which GPU memory was read or written.",
        scale=0.01,
        maximum=1.0,
    ),
    Metric("llmfleet_gpu_memory_total_bytes", "GPU memory."),
    Metric(
        "llmfleet_gpu_memory_used_bytes", "GPU memory in use; contains the driver's reserve where that is not known."
    ),
    Metric("llmfleet_gpu_memory_reserved_bytes", "GPU memory that the driver keeps for itself."),
    Metric("llmfleet_gpu_temperature_celsius", "Temperature of the GPU die.", maximum=1000.0),
    Metric("llmfleet_gpu_power_watts", "Power drawn by the board.", scale=1e-3),
    Metric("llmfleet_gpu_power_limit_watts", "Power limit in force.", scale=1e-3),
    Metric("llmfleet_gpu_energy_joules_total", "Energy used since the driver was loaded.", kind="counter", scale=1e-3),
    Metric("llmfleet_gpu_clock_hertz", "Current clock.", label="clock", scale=1e6),
    Metric(
        "llmfleet_gpu_ecc_errors_total",
        "ECC errors since the driver was loaded.",
        kind="counter",
        label="type",
    ),
    Metric("llmfleet_gpu_pcie_link_generation", "PCIe generation that the link runs at."),
    Metric("llmfleet_gpu_pcie_link_max_generation", "PCIe generation that GPU and slot could run at."),
    Metric("llmfleet_gpu_pcie_link_width_lanes", "PCIe lanes in use."),
    Metric("llmfleet_gpu_pcie_link_max_width_lanes", "PCIe lanes that GPU and slot could use."),
)


@dataclass(frozen=True)
class Reading:
    """One field of the log: a function that asks one GPU and returns raw values by metric and label."""

    name: str
    read: Callable[[Nvml, Handle], Mapping[Key, object]]


def _one(metric: str, function: str, *arguments: object, label: str = "") -> Reading:
    name = f"{metric}{{{label}}}" if label else metric
    return Reading(name, lambda nvml, gpu: {(metric, label): nvml.call(function, gpu, *arguments)})


def _utilization(nvml: Nvml, gpu: Handle) -> Mapping[Key, object]:
    rates = nvml.call("nvmlDeviceGetUtilizationRates", gpu)
    return {
        ("llmfleet_gpu_utilization_ratio", ""): rates.gpu,
        ("llmfleet_gpu_memory_utilization_ratio", ""): rates.memory,
    }


def _memory(nvml: Nvml, gpu: Handle) -> Mapping[Key, object]:
    values: dict[Key, object] = {}
    try:
        memory = nvml.call("nvmlDeviceGetMemoryInfo", gpu, nvml.constant("nvmlMemory_v2"))
        values["llmfleet_gpu_memory_reserved_bytes", ""] = memory.reserved
    except UnansweredError:
        memory = nvml.call("nvmlDeviceGetMemoryInfo", gpu)
    values["llmfleet_gpu_memory_total_bytes", ""] = memory.total
    values["llmfleet_gpu_memory_used_bytes", ""] = memory.used
    return values


def _temperature(nvml: Nvml, gpu: Handle) -> Mapping[Key, object]:
    try:
        value = nvml.call("nvmlDeviceGetTemperatureV", gpu, nvml.constant("NVML_TEMPERATURE_GPU"))
    except UnansweredError:
        value = nvml.call("nvmlDeviceGetTemperature", gpu, nvml.constant("NVML_TEMPERATURE_GPU"))
    return {("llmfleet_gpu_temperature_celsius", ""): value}


# Numbers of NVML's enumerations, which are part of its ABI.
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_ECC_CORRECTED, _ECC_UNCORRECTED = 0, 1
_ECC_VOLATILE = 0

READINGS = (
    Reading("utilization", _utilization),
    Reading("memory", _memory),
    Reading("temperature", _temperature),
    _one("llmfleet_gpu_power_watts", "nvmlDeviceGetPowerUsage"),
    _one("llmfleet_gpu_power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit"),
    _one("llmfleet_gpu_energy_joules_total", "nvmlDeviceGetTotalEnergyConsumption"),
    _one("llmfleet_gpu_clock_hertz", "nvmlDeviceGetClockInfo", _CLOCK_SM, label="sm"),
    _one("llmfleet_gpu_clock_hertz", "nvmlDeviceGetClockInfo", _CLOCK_MEMORY, label="memory"),
    _one(
        "llmfleet_gpu_ecc_errors_total", "nvmlDeviceGetTotalEccErrors", _ECC_CORRECTED, _ECC_VOLATILE, label="corrected"
    ),
    _one(
        "llmfleet_gpu_ecc_errors_total",
        "nvmlDeviceGetTotalEccErrors",
        _ECC_UNCORRECTED,
        _ECC_VOLATILE,
        label="uncorrected",
    ),
    _one("llmfleet_gpu_pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _one("llmfleet_gpu_pcie_link_max_generation", "nvmlDeviceGetMaxPcieLinkGeneration"),
    _one("llmfleet_gpu_pcie_link_width_lanes", "nvmlDeviceGetCurrPcieLinkWidth"),
    _one("llmfleet_gpu_pcie_link_max_width_lanes", "nvmlDeviceGetMaxPcieLinkWidth"),
)
