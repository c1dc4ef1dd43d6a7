# SPDX-License-Identifier: Apache-2.0
"""Stand-in for /sys/devices/system/node of a machine with two NUMA nodes.

Laid over the real directory in an nspawn host, whose kernel is the build machine's and usually has one node. CPUs and
memory are the machine's own, split in two; on a machine with one CPU both nodes list it, which no real machine does.

It is a still picture: free memory and counters are those of the moment it was made, nothing can be written, and the
kernel does not know node 1, so memory policies that name it fail with "Invalid argument" (see bin/numactl).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DISTANCE_LOCAL, DISTANCE_REMOTE = 10, 21
HUGEPAGE_SIZES_KB = (2048, 1048576)


def cpu_list(cpus: Sequence[int]) -> str:
    """CPUs in the kernel's list format: ``0-3,8``."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def cpu_mask(cpus: Sequence[int], possible: int) -> str:
    """CPUs in the kernel's mask format: comma-separated 32-bit words, as many as ``possible`` CPUs need."""
    bits = sum(1 << cpu for cpu in cpus)
    if possible <= 32:
        return f"{bits:0{max(1, (possible + 3) // 4)}x}"
    words = (possible + 31) // 32
    return ",".join(f"{(bits >> (32 * word)) & 0xFFFFFFFF:08x}" for word in reversed(range(words)))


def split_cpus(cpus: Sequence[int]) -> tuple[list[int], list[int]]:
    """The lower half of the CPUs and the upper; a single CPU is in both."""
    ordered = sorted(cpus)
    if len(ordered) == 1:
        return ordered, ordered
    half = (len(ordered) + 1) // 2
    return ordered[:half], ordered[half:]


def tree(cpus: Sequence[int], meminfo: Mapping[str, int]) -> dict[str, str]:
    """Every file of the two-node tree: relative path -> content.

    ``cpus`` are the online CPUs, ``meminfo`` the keys of /proc/meminfo with their values in kB.
    """
    files = {
        "has_cpu": "0-1\n",
        "has_generic_initiator": "\n",
        "has_memory": "0-1\n",
        "has_normal_memory": "0-1\n",
        "online": "0-1\n",
        "possible": "0-1\n",
    }
    possible = max(cpus) + 1
    # Node 0 gets the odd page, so that the two add up to the machine's.
    total, free = meminfo["MemTotal"] // 4, min(meminfo["MemFree"], meminfo["MemTotal"]) // 4
    for node, own in enumerate(split_cpus(cpus)):
        total_kb, free_kb = ((pages // 2 if node else pages - pages // 2) * 4 for pages in (total, free))
        distances = [DISTANCE_LOCAL if other == node else DISTANCE_REMOTE for other in (0, 1)]
        values = {"MemTotal": total_kb, "MemFree": free_kb, "MemUsed": total_kb - free_kb, "FilePages": 0}
        lines = [f"Node {node} {key + ':':<15} {value:8d} kB\n" for key, value in values.items()]
        pools = ("HugePages_Total", "HugePages_Free", "HugePages_Surp")
        lines += [f"Node {node} {key + ':':<15} {0:8d}\n" for key in pools]
        files[f"node{node}/cpulist"] = f"{cpu_list(own)}\n"
        files[f"node{node}/cpumap"] = f"{cpu_mask(own, possible)}\n"
        files[f"node{node}/distance"] = f"{' '.join(map(str, distances))}\n"
        files[f"node{node}/meminfo"] = "".join(lines)
        counters = ("numa_hit", "numa_miss", "numa_foreign", "interleave_hit", "local_node", "other_node")
        files[f"node{node}/numastat"] = "".join(f"{counter} 0\n" for counter in counters)
        files[f"node{node}/vmstat"] = f"nr_free_pages {free_kb // 4}\n"
        for size in HUGEPAGE_SIZES_KB:
            for key in ("nr_hugepages", "free_hugepages", "surplus_hugepages"):
                files[f"node{node}/hugepages/hugepages-{size}kB/{key}"] = "0\n"
    return files


def status(cpus: Sequence[int]) -> str:
    """What /proc/self/status says of a process that may use both nodes; the kernel names the node that it has."""
    return f"Cpus_allowed_list:\t{cpu_list(cpus)}\nMems_allowed_list:\t0-1\n"


def links(cpus: Sequence[int]) -> dict[str, str]:
    """The symbolic links of the tree: relative path -> target."""
    return {f"node{node}/cpu{cpu}": f"../../cpu/cpu{cpu}" for node, own in enumerate(split_cpus(cpus)) for cpu in own}
