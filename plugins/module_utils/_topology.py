# SPDX-License-Identifier: Apache-2.0
"""Read a host's NUMA nodes and GPUs from sysfs.

Everything is read below ``sysfs_root`` and ``proc_root``, so a captured tree answers as the live host does. Nothing is
written and no program is started. PRIVATE to the collection.
"""

from __future__ import annotations

import os
import re
from typing import Any

NVIDIA_VENDOR = "10de"
# PCI base class 03 is "display controller": 0300 is VGA, 0302 a 3D controller without outputs (data centre GPUs).
GPU_CLASSES = ("0300", "0302")


class TopologyError(Exception):
    """The tree under sysfs_root is not one that a Linux kernel shows."""


def parse_cpulist(text: str) -> list[int]:
    """``"0-2,8"`` -> ``[0, 1, 2, 8]``; an empty list is a node without CPUs. Raises TopologyError on anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise TopologyError(f"{text!r} is not a kernel CPU list such as '0-3,8'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise TopologyError(f"{text!r} is not a kernel CPU list: {part!r} runs backwards")
        cpus.update(range(first, last + 1))
    return sorted(cpus)


def normalise_pci(address: str) -> str:
    """``00000000:17:00.0`` (NVML) and ``17:00.0`` -> ``0000:17:00.0`` (sysfs), lower case."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", address.strip().lower())
    if match is None:
        raise TopologyError(f"{address!r} is not a PCI address such as 0000:17:00.0")
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2]}:{match[3]}.{match[4]}"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError as error:
        raise TopologyError(f"cannot read {path}: {error.strerror}") from error


def _meminfo(text: str, path: str) -> dict[str, int]:
    """The fields of a node's meminfo in bytes (the kernel prints kB, which are KiB)."""
    found = {key: int(value) * 1024 for key, value in re.findall(r"Node \d+ (\w+):\s+(\d+) kB", text)}
    for key in ("MemTotal", "MemFree"):
        if key not in found:
            raise TopologyError(f"{path} has no {key}: the tree is truncated")
    return found


def read_nodes(sysfs_root: str) -> list[dict[str, Any]]:
    """The NUMA nodes in order of id: ``{id, cpus, mem_total, mem_free, distances}``; memory in bytes.

    ``distances`` is the kernel's row, one entry per node in order of id. A kernel built without NUMA shows no node
    directory; such a host is one node holding every CPU that is online.
    """
    base = os.path.join(sysfs_root, "devices/system/node")
    try:
        names = os.listdir(base)
    except OSError as error:
        raise TopologyError(f"cannot list {base}: {error.strerror}") from error
    ids = sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name))
    if not ids:
        raise TopologyError(f"{base} has no node directory: the tree is truncated")
    nodes = []
    for node in ids:
        path = os.path.join(base, f"node{node}")
        memory = _meminfo(_read(os.path.join(path, "meminfo")), os.path.join(path, "meminfo"))
        nodes.append(
            {
                "id": node,
                "cpus": parse_cpulist(_read(os.path.join(path, "cpulist"))),
                "mem_total": memory["MemTotal"],
                "mem_free": memory["MemFree"],
                "distances": [int(value) for value in _read(os.path.join(path, "distance")).split()],
            }
        )
    return nodes


def read_gpus(sysfs_root: str, extra_ids: list[str] | None = None) -> list[dict[str, Any]]:
    """The GPUs in PCI order, which is the order of CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Each is ``{index, pci, vendor, device, numa_node, cpus}``; ``numa_node`` is None where the firmware does not say
    (sysfs shows -1). A GPU is an NVIDIA display controller, or any device named in ``extra_ids`` as "vendor:device".
    """
    wanted = {entry.strip().lower() for entry in extra_ids or []}
    for entry in wanted:
        if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}", entry) is None:
            raise TopologyError(f"{entry!r} is not a PCI id of the form vendor:device, such as 10de:2335")
    base = os.path.join(sysfs_root, "bus/pci/devices")
    if not os.path.isdir(base):  # a machine without a PCI bus has no GPU
        return []
    gpus: list[dict[str, Any]] = []
    for name in sorted(os.listdir(base), key=normalise_pci):
        path = os.path.join(base, name)
        vendor, device = (
            _read(os.path.join(path, key)).strip().lower().removeprefix("0x") for key in ("vendor", "device")
        )
        pci_class = _read(os.path.join(path, "class")).strip().lower().removeprefix("0x")
        if not ((vendor == NVIDIA_VENDOR and pci_class[:4] in GPU_CLASSES) or f"{vendor}:{device}" in wanted):
            continue
        node = int(_read(os.path.join(path, "numa_node")))
        gpus.append(
            {
                "index": len(gpus),
                "pci": normalise_pci(name),
                "vendor": vendor,
                "device": device,
                "numa_node": node if node >= 0 else None,
                "cpus": parse_cpulist(_read(os.path.join(path, "local_cpulist"))),
            }
        )
    return gpus


def read_topology(sysfs_root: str, extra_gpu_ids: list[str] | None = None) -> dict[str, Any]:
    """``{nodes, gpus}`` of the host whose sysfs is mounted or captured at ``sysfs_root``."""
    return {"nodes": read_nodes(sysfs_root), "gpus": read_gpus(sysfs_root, extra_gpu_ids)}
