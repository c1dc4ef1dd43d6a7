# SPDX-License-Identifier: Apache-2.0
"""Read what a host is made of: NUMA nodes, GPUs, and the limits its services live under.

Everything is read below ``sysfs_root`` and ``proc_root``, so a captured tree answers as the live host does. Nothing is
written and no program is started. PRIVATE to the collection.

Amounts that stay (``mem_total``, hugepage totals, limits) are what budgets are made from; amounts that move
(``mem_free``, ``mem_available``, free hugepages) only ever gate a start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

NVIDIA_VENDOR = "10de"
# PCI base class 03 is "display controller": 0300 is VGA, 0302 a 3D controller without outputs (data centre GPUs).
GPU_CLASSES = ("0300", "0302")
KIB = 1024
PAGE_SIZES = (4 * KIB, 16 * KIB, 64 * KIB)
# A cgroup v1 that is not limited shows the largest page-aligned number, whatever the page size is.
UNLIMITED_V1 = 2**62


class TopologyError(Exception):
    """The tree under sysfs_root or proc_root is not one that a Linux kernel shows."""


def parse_cpulist(text: str) -> list[int]:
    """``"0-2,8"`` -> ``[0, 1, 2, 8]``; an empty list is a node without CPUs. Raises TopologyError on anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        # No kernel is built for more CPUs than five digits can count.
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            raise TopologyError(f"{text!r} is not a kernel CPU list such as '0-3,8'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise TopologyError(f"{text!r} is not a kernel CPU list: {part!r} runs backwards")
        cpus.update(range(first, last + 1))
    return sorted(cpus)


def format_cpulist(cpus: Sequence[int]) -> str:
    """``[0, 1, 2, 8]`` -> ``"0-2,8"``, the form that numactl and systemd take."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


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


def _number(path: str, least: int = 0) -> int:
    text = _read(path).strip()
    if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < least:
        raise TopologyError(f"{path} is {text!r}: expected a whole number, {least} or more")
    return int(text)


def _hexadecimal(path: str) -> str:
    """``0x10DE`` -> ``10de``."""
    text = _read(path).strip().lower()
    if not re.fullmatch(r"0x[0-9a-f]{4,8}", text):
        raise TopologyError(f"{path} is {text!r}: expected a hexadecimal number such as 0x10de")
    return text[2:]


def _cpulist(path: str, text: str | None = None) -> list[int]:
    """The list in a file, or in a part of it that was cut out already."""
    listed = _read(path) if text is None else text
    try:
        return parse_cpulist(listed)
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from error


# --------------------------------------------------------------------------------------------------------- the memory


def _meminfo(text: str, path: str) -> dict[str, int]:
    """The fields of a node's meminfo, in bytes where the kernel prints kB (which are KiB)."""
    found: dict[str, int] = {}
    for key, value, unit in re.findall(r"Node \d+ ([\w()]+):\s+(\d{1,18})( kB)?\b", text):
        found[key] = int(value) * (KIB if unit else 1)
    for key in ("MemTotal", "MemFree"):
        if key not in found:
            raise TopologyError(f"{path} has no {key}: the tree is truncated")
    return found


def _hugepages(path: str, meminfo: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Hugepage pools of a node by page size in bytes (as text, since JSON has no other keys): ``{total, free}`` pages.

    Read from every pool: meminfo shows the default size only.
    """
    base = os.path.join(path, "hugepages")
    pools = {}
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        match = re.fullmatch(r"hugepages-(\d{1,12})kB", name)
        if match is not None:
            pools[str(int(match[1]) * KIB)] = {
                "total": _number(os.path.join(base, name, "nr_hugepages")),
                "free": _number(os.path.join(base, name, "free_hugepages")),
            }
    if not pools and meminfo.get("HugePages_Total", 0):
        raise TopologyError(f"{path}/meminfo counts hugepages and {base} has no pool: the tree is truncated")
    return pools


def parse_zoneinfo(text: str, path: str = "zoneinfo") -> dict[int, dict[str, int]]:
    """Pages by node: ``{managed, low, kept}``.

    ``kept`` is what the kernel does not give to a process: of each zone its high watermark and the largest of its
    lowmem reserves, at most all of it (``calculate_totalreserve_pages`` in mm/page_alloc.c). Without that cap, the
    reserve that a 15 MiB DMA zone claims against a large node would count as gigabytes. Raises TopologyError.
    """
    found: dict[int, dict[str, int]] = {}
    for node, name, body in re.findall(r"^Node (\d{1,5}), zone +(\w+)\n((?:[ \t]+.*\n?)*)", text, flags=re.MULTILINE):
        zone = {key: int(value) for key, value in re.findall(r"^\s+(low|high|managed) +(\d{1,18})$", body, re.M)}
        protection = re.search(r"^\s+protection: \((\d{1,18}(?:, \d{1,18})*)\)$", body, re.M)
        if len(zone) != 3 or protection is None:
            raise TopologyError(f"{path} does not tell low, high, managed and protection of node {node}, zone {name}")
        reserve = max(int(value) for value in protection[1].split(","))
        entry = found.setdefault(int(node), {"managed": 0, "low": 0, "kept": 0})
        entry["managed"] += zone["managed"]
        entry["low"] += zone["low"]
        entry["kept"] += min(zone["managed"], zone["high"] + reserve)
    if not found:
        raise TopologyError(f"{path} has no zone of any node")
    return found


def available(meminfo: Mapping[str, int], zone: Mapping[str, int] | None) -> int:
    """Bytes that processes could still get on a node without swapping, by the kernel's formula for MemAvailable.

    The kernel computes it for the machine only (``si_mem_available`` in mm/show_mem.c): free pages less what it keeps,
    plus file pages and reclaimable slab, of each of which it leaves half, or the low watermark if that is less. Without
    zoneinfo the watermarks count as 0.
    """
    low = kept = 0
    if zone is not None:
        # The page size is not in the tree; a node's MemTotal is what its zones manage.
        size = min(PAGE_SIZES, key=lambda size: abs(zone["managed"] * size - meminfo["MemTotal"]))
        low, kept = zone["low"] * size, zone["kept"] * size
    cache = meminfo.get("Active(file)", 0) + meminfo.get("Inactive(file)", 0)
    slab = meminfo.get("KReclaimable", meminfo.get("SReclaimable", 0))
    return max(0, meminfo["MemFree"] - kept + sum(part - min(part // 2, low) for part in (cache, slab)))


def read_nodes(sysfs_root: str, proc_root: str = "/proc") -> list[dict[str, Any]]:
    """The NUMA nodes in order of id; memory in bytes.

    ``{id, cpus[], mem_total, mem_free, mem_available, hugepages{size: {total, free}}, distances[]}``; ``distances`` is
    the kernel's row, one entry per node in order of id. Raises TopologyError where something is missing or malformed.
    """
    base = os.path.join(sysfs_root, "devices/system/node")
    try:
        names = os.listdir(base)
    except OSError as error:
        raise TopologyError(f"cannot list {base}: {error.strerror}") from error
    ids = sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d{1,5}", name))
    if not ids:
        raise TopologyError(f"{base} has no node directory: the tree is truncated")
    online = os.path.join(base, "online")
    if os.path.exists(online) and _cpulist(online) != ids:
        raise TopologyError(f"{online} is {_read(online).strip()!r} and the node directories are {ids}: truncated tree")
    zoneinfo = os.path.join(proc_root, "zoneinfo")
    zones = parse_zoneinfo(_read(zoneinfo), zoneinfo) if os.path.exists(zoneinfo) else {}
    nodes = []
    for node in ids:
        path = os.path.join(base, f"node{node}")
        meminfo = _meminfo(_read(os.path.join(path, "meminfo")), os.path.join(path, "meminfo"))
        distances = _read(os.path.join(path, "distance")).split()
        if len(distances) != len(ids) or not all(re.fullmatch(r"\d{1,9}", value) for value in distances):
            raise TopologyError(f"{path}/distance is {' '.join(distances)!r}: expected {len(ids)} numbers")
        nodes.append(
            {
                "id": node,
                "cpus": _cpulist(os.path.join(path, "cpulist")),
                "mem_total": meminfo["MemTotal"],
                "mem_free": meminfo["MemFree"],
                "mem_available": available(meminfo, zones.get(node)),
                "hugepages": _hugepages(path, meminfo),
                "distances": [int(value) for value in distances],
            }
        )
    return nodes


# ----------------------------------------------------------------------------------------------------------- the GPUs


def read_gpus(sysfs_root: str, extra_ids: Sequence[str] | None = None) -> list[dict[str, Any]]:
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
    addresses = {}
    for name in os.listdir(base):
        try:
            addresses[normalise_pci(name)] = os.path.join(base, name)
        except TopologyError as error:
            raise TopologyError(f"{base}: {error}") from error
    gpus: list[dict[str, Any]] = []
    # A domain can have more than four digits (Intel VMD), so the longer address is the greater one.
    for pci, path in sorted(addresses.items(), key=lambda item: (len(item[0]), item[0])):
        vendor, device = (_hexadecimal(os.path.join(path, key)) for key in ("vendor", "device"))
        display = _hexadecimal(os.path.join(path, "class"))[:4] in GPU_CLASSES
        if not ((vendor == NVIDIA_VENDOR and display) or f"{vendor}:{device}" in wanted):
            continue
        node = _number(os.path.join(path, "numa_node"), least=-1)
        gpus.append(
            {
                "index": len(gpus),
                "pci": pci,
                "vendor": vendor,
                "device": device,
                "numa_node": node if node >= 0 else None,
                "cpus": _cpulist(os.path.join(path, "local_cpulist")),
            }
        )
    return gpus


# --------------------------------------------------------------------------------------------------------- the limits


def slice_folders(unit: str) -> list[str]:
    """The cgroup folders from the root to a slice: ``a-b.slice`` lies in ``a.slice`` -> ``["", "a.slice",
    "a.slice/a-b.slice"]``; ``-.slice`` is the root. Raises TopologyError for what systemd takes for no slice."""
    if unit == "-.slice":
        return [""]
    if re.fullmatch(r"[^/-]+(-[^/-]+)*\.slice", unit) is None:
        raise TopologyError(f"{unit!r} is not the name of a slice such as llmfleet.slice")
    folders, path = [""], ""
    parts = unit[: -len(".slice")].split("-")
    for count in range(1, len(parts) + 1):
        path = os.path.join(path, f"{'-'.join(parts[:count])}.slice")
        folders.append(path)
    return folders


def read_limits(sysfs_root: str, unit: str) -> list[dict[str, Any]]:
    """The memory limits on the way from the cgroup root to a slice: ``[{path, file, limit}]``, bytes.

    Only what limits is listed. cgroup v2 (``memory.max``, ``memory.high``) and v1 (``memory.limit_in_bytes``); a slice
    that does not exist yet limits nothing.
    """
    base = os.path.join(sysfs_root, "fs/cgroup")
    files: tuple[str, ...] = ("memory.max", "memory.high")
    v1 = os.path.join(base, "memory")
    # The root of a v2 hierarchy could have a group called "memory".
    if os.path.isdir(v1) and not os.path.exists(os.path.join(base, "cgroup.controllers")):
        base, files = v1, ("memory.limit_in_bytes",)
    limits = []
    for folder in slice_folders(unit):
        for name in files:
            path = os.path.join(base, folder, name)
            if not os.path.exists(path):
                continue
            text = _read(path).strip()
            if text == "max":
                continue
            if re.fullmatch(r"\d{1,20}", text) is None:
                raise TopologyError(f"{path} is {text!r}: expected bytes or max")
            if int(text) < UNLIMITED_V1:
                limits.append({"path": f"/{folder}", "file": name, "limit": int(text)})
    return limits


def read_mems_allowed(proc_root: str) -> list[int] | None:
    """The nodes that a process may have memory from (cpuset); None where the tree does not tell."""
    path = os.path.join(proc_root, "self/status")
    match = re.search(r"^Mems_allowed_list:(.*)$", _read(path) if os.path.exists(path) else "", flags=re.MULTILINE)
    return _cpulist(path, match[1]) if match else None


def read_driver(sysfs_root: str) -> str | None:
    """The version of the NVIDIA driver that is loaded; None where none is."""
    path = os.path.join(sysfs_root, "module/nvidia/version")
    return _read(path).strip() or None if os.path.exists(path) else None


def read_topology(
    sysfs_root: str, extra_gpu_ids: Sequence[str] | None = None, proc_root: str = "/proc", unit: str = "llmfleet.slice"
) -> dict[str, Any]:
    """``{nodes[], gpus[], driver, mems_allowed, limits[]}`` of the host mounted or captured at the two roots."""
    return {
        "nodes": read_nodes(sysfs_root, proc_root),
        "gpus": read_gpus(sysfs_root, extra_gpu_ids),
        "driver": read_driver(sysfs_root),
        "mems_allowed": read_mems_allowed(proc_root),
        "limits": read_limits(sysfs_root, unit),
    }
