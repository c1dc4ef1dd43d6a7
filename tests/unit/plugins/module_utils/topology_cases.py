# SPDX-License-Identifier: Apache-2.0
"""Hosts to read and to plan: as files in the shape of sysfs and procfs, and as what reading them gives.

``tests/fixtures/topologies/*.json`` hold real shapes as ``{path: content}``, below ``sys/`` and ``proc/``:

- ``four_nodes_two_without_memory``: NPS4 with half of the memory slots filled; nodes 0 and 3 have CPUs and no memory
- ``gpu_memory_as_nodes``: one CPU node, the GPU's HBM as node 1, nodes 2 to 8 set aside for it and empty
- ``thirty_four_nodes``: two CPU nodes, four GPUs whose HBM are nodes 2, 10, 18 and 26, the rest empty
- ``eight_gpus_two_nodes``: sysfs knows every GPU's node; zoneinfo, limits and a cpuset are there
- ``gpus_without_node``: two nodes, two GPUs of which the firmware does not say where they are
- ``hugepages_of_two_sizes``: two nodes with pools of 2 MiB and 1 GiB pages; meminfo counts the former only
- ``unequal_nodes``: 1970 MiB and 669 MiB
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import format_cpulist, read_topology

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "topologies"
GIB = 1024**3

Files = dict[str, str]


def load(name: str) -> Files:
    """The files of a fixture."""
    files: Files = json.loads((FIXTURES / f"{name}.json").read_text())
    return files


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Lay files below a folder; returns it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def read(root: Path, **options: Any) -> dict[str, Any]:
    """What reading a tree gives that ``write`` has laid down."""
    return read_topology(str(root / "sys"), proc_root=str(root / "proc"), **options)


def node_files(
    number: int,
    cpus: Sequence[int],
    total_kib: int,
    distances: Sequence[int],
    pools: Mapping[int, tuple[int, int]] | None = None,
    **meminfo: int,
) -> Files:
    """The files of a node. ``pools``: page size in KiB -> (pages, free pages); ``meminfo``: more fields in KiB."""
    base = f"sys/devices/system/node/node{number}"
    fields = {"MemTotal": total_kib, "MemFree": total_kib // 2, **meminfo}
    text = "".join(f"Node {number} {key + ':':<15} {value:8d} kB\n" for key, value in fields.items())
    total, free = (pools or {}).get(2048, (0, 0))
    text += f"Node {number} HugePages_Total: {total:5d}\nNode {number} HugePages_Free:  {free:5d}\n"
    files = {
        f"{base}/cpulist": f"{format_cpulist(cpus)}\n",
        f"{base}/distance": f"{' '.join(map(str, distances))}\n",
        f"{base}/meminfo": text,
    }
    for size, (pages, unused) in (pools or {2048: (0, 0)}).items():
        files[f"{base}/hugepages/hugepages-{size}kB/nr_hugepages"] = f"{pages}\n"
        files[f"{base}/hugepages/hugepages-{size}kB/free_hugepages"] = f"{unused}\n"
    return files


def gpu_files(
    address: str, node: int, cpus: Sequence[int], identity: str = "10de:2335", pci_class: str = "030200"
) -> Files:
    """The files of a PCI device; ``node`` is -1 where the firmware does not say."""
    vendor, device = identity.split(":")
    base = f"sys/bus/pci/devices/{address}"
    return {
        f"{base}/vendor": f"0x{vendor}\n",
        f"{base}/device": f"0x{device}\n",
        f"{base}/class": f"0x{pci_class}\n",
        f"{base}/numa_node": f"{node}\n",
        f"{base}/local_cpulist": f"{format_cpulist(cpus)}\n",
    }


def square_host(count: int, gpus: int) -> Files:
    """The files of a host of ``count`` equal nodes of four CPUs and 64 GiB, with GPUs dealt to the last node first."""
    cpus = [list(range(4 * node, 4 * node + 4)) for node in range(count)]
    files = {"sys/devices/system/node/online": f"{format_cpulist(range(count))}\n"}
    for node in range(count):
        distances = [10 if other == node else 21 for other in range(count)]
        files |= node_files(node, cpus[node], 64 * 1024**2, distances)
    for index in range(gpus):
        node = count - 1 - index % count
        files |= gpu_files(f"0000:{index + 1:02x}:00.0", node, cpus[node])
    return files


def node(number: int, cpus: Sequence[int], memory: int, distances: Sequence[int]) -> dict[str, Any]:
    """A node as it is read."""
    return {
        "id": number,
        "cpus": list(cpus),
        "mem_total": memory,
        "mem_free": memory // 2,
        "mem_available": memory // 2,
        "hugepages": {},
        "distances": list(distances),
    }


def gpu(index: int, numa_node: int | None, nvml: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A GPU as it is read and merged with NVML's facts; the address follows from the index."""
    address = f"0000:{index + 1:02x}:00.0"
    known = {"index": index, "pci": address, "vendor": "10de", "device": "2335", "numa_node": numa_node, "cpus": []}
    return {**known, "nvml": dict(nvml) if nvml is not None else None, **more}


def host(nodes: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
    """A topology as it is read; every node's memory may be used unless ``mems_allowed`` says otherwise."""
    return {"nodes": list(nodes), "gpus": list(gpus), "mems_allowed": None, "limits": [], **more}
