# SPDX-License-Identifier: Apache-2.0
"""Which NUMA nodes an instance is bound to, and how: plain topology in, plain data out. PRIVATE to the collection.

The unit of binding is a **node set**, since sub-NUMA clustering (SNC, NPS) gives a GPU's socket several nodes:

- a *host node* has CPUs and memory. Nodes with memory only are a GPU's HBM or a CXL expander; they count as host memory
  only where the operator names them, since a NUMA policy that reaches HBM takes it from the GPU;
- a node with CPUs and no memory (NPS4 with half-filled slots) borrows the memory of the nearest host nodes;
- a GPU's node is what sysfs says; where sysfs shows -1 or a node without CPUs, what the CPUs next to the GPU say
  (sysfs, then NVML), then NVML's memory affinity; the only node with CPUs, where there is one; then what the operator
  says. Otherwise nobody knows, and a guess would be found out at night. An operator who contradicts what the host says
  is refused, not ignored.

Nothing here depends on the order of nodes and GPUs in what is read, and nothing enumerates sets of nodes: a host can
have 34 of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import (
    TopologyError,
    format_cpulist,
    normalise_pci,
)

POLICIES = ("strict", "preferred", "none")
BINDERS = ("numactl", "systemd")


@dataclass
class NodeSet:
    """What an instance is bound to: nodes whose CPUs it runs on and nodes it has memory from. Empty: not bound."""

    nodes: list[int]
    memory_nodes: list[int]
    cpus: list[int] = field(default_factory=list)
    # CPUs are named one by one where a node has no memory: numactl refuses to be told such a node (numactl#165).
    by_cpu: bool = False

    def __bool__(self) -> bool:
        return bool(self.nodes)

    @property
    def preferred(self) -> int:
        """The node to ask for memory first: one that the set runs on, before one that is only memory to it."""
        return next((node for node in self.memory_nodes if node in self.nodes), self.memory_nodes[0])


def host_nodes(topology: Mapping[str, Any], memory_only: Sequence[int] = ()) -> list[int]:
    """The nodes whose memory is the host's, in order of id: those with CPUs, and the operator's ``memory_only``."""
    return sorted(
        node["id"]
        for node in topology["nodes"]
        if node["mem_total"] > 0 and (node["cpus"] or node["id"] in memory_only)
    )


def nearest(topology: Mapping[str, Any], node: int, candidates: Sequence[int]) -> list[int]:
    """The candidates at the least distance from a node; all of them where several are equally near."""
    rows = {entry["id"]: entry["distances"] for entry in topology["nodes"]}
    # The kernel's row has one entry for each node in order of id.
    distance = {other: rows[node][position] for position, other in enumerate(sorted(rows))}
    least = min((distance[other] for other in candidates), default=None)
    return [other for other in candidates if distance[other] == least]


def gpu_node(gpu: Mapping[str, Any], topology: Mapping[str, Any], mapping: Mapping[str, int]) -> int | None:
    """The node with CPUs that a GPU belongs to, or None where nobody says. ``mapping``: PCI address -> node, the
    operator's word; raises RefusalError where that is no such node, or not the one that the host itself tells.

    ``gpu`` may carry ``nvml``: ``{memory_affinity[], cpu_affinity[]}`` (node ids and CPUs), each empty or missing where
    NVML does not support the question. NVML's own NUMA id of a GPU is not asked: it names the GPU's HBM.
    """
    told, found = _told_node(gpu, mapping), _found_node(gpu, topology)
    if told is None:
        return found
    with_cpus = sorted(node["id"] for node in topology["nodes"] if node["cpus"])
    if isinstance(told, bool) or not isinstance(told, int) or told not in with_cpus:
        raise RefusalError(
            "numa_mapping",
            f"plan_gpu_numa_nodes says {told!r} for {gpu['pci']}",
            f"one of the nodes with CPUs: {', '.join(map(str, with_cpus))}",
            f"correct the entry of {gpu['pci']} in plan_gpu_numa_nodes",
        )
    if found not in (None, told):
        raise RefusalError(
            "numa_mapping",
            f"plan_gpu_numa_nodes says node {told} for {gpu['pci']}, and the host itself says node {found}",
            "the operator's word only where the host does not know",
            f"take {gpu['pci']} out of plan_gpu_numa_nodes; where the firmware is wrong, use plan_numa_policy: none",
        )
    return told


def _found_node(gpu: Mapping[str, Any], topology: Mapping[str, Any]) -> int | None:
    """What the host itself tells about a GPU: sysfs, the CPUs next to it, NVML's affinities."""
    cpus_of = {node["id"]: set(node["cpus"]) for node in topology["nodes"] if node["cpus"]}
    said = gpu["numa_node"]
    if said in cpus_of:
        return int(said)
    nvml = gpu.get("nvml") or {}
    # Only one node is an answer: sysfs lists every CPU for a device without a node, and NVML those of a whole socket.
    answers = [
        {node for node, own in cpus_of.items() if not own.isdisjoint(gpu.get("cpus") or [])},
        {node for node, own in cpus_of.items() if not own.isdisjoint(nvml.get("cpu_affinity") or [])},
        set(nvml.get("memory_affinity") or []) & set(cpus_of),
        set(cpus_of),
    ]
    return next((answer.pop() for answer in answers if len(answer) == 1), None)


def _told_node(gpu: Mapping[str, Any], mapping: Mapping[str, int]) -> Any:
    """The operator's word about a GPU, however they spell its address; None where they say nothing."""
    for address, node in mapping.items():
        try:
            if normalise_pci(str(address)) == gpu["pci"]:
                return node
        except TopologyError as error:
            raise RefusalError(
                "numa_mapping",
                f"plan_gpu_numa_nodes names {address!r}",
                "PCI addresses such as 0000:17:00.0",
                "write it in quotes, as `lspci -D` on the host shows it",
            ) from error
    return None


def node_set(
    name: str,
    gpus: Sequence[int],
    asked: Sequence[int] | None,
    topology: Mapping[str, Any],
    policy: str = "strict",
    mapping: Mapping[str, int] | None = None,
    memory_only: Sequence[int] = (),
) -> NodeSet:
    """The node set of an instance: the nodes asked for, else those of its GPUs, else none (it is not bound).

    ``gpus`` are indices into the host's GPUs in PCI order; ``mapping`` is the operator's PCI address -> node, and
    ``memory_only`` the nodes without CPUs whose memory the operator counts as the host's (an instance gets such memory
    only where ``asked`` names it). Raises RefusalError for a node or GPU that the host has not, for nodes none of which
    has CPUs, for a GPU outside the nodes asked for, for a GPU of which nobody says where it is (policy none: not
    needed), and for a set that no memory is near to.
    """
    nodes = {node["id"]: node for node in topology["nodes"]}
    by_index = {gpu["index"]: gpu for gpu in topology["gpus"]}
    usable = host_nodes(topology, memory_only)
    with_cpus = sorted(number for number, node in nodes.items() if node["cpus"])
    for index in gpus:
        if index not in by_index:
            raise RefusalError(
                "gpu_missing",
                f"{name} asks for GPU {index}",
                f"GPUs of this host: {', '.join(map(str, sorted(by_index))) or 'none on the PCI bus'}",
                "correct gpus; `nvidia-smi -L` on the host lists them",
            )
    for number in asked or ():
        if number not in nodes:
            raise RefusalError(
                "numa_node",
                f"numa_nodes of {name} names node {number}",
                f"nodes of this host: {', '.join(map(str, sorted(nodes)))}",
                "correct numa_nodes, or leave it out to have it read from the GPUs",
            )
        if not nodes[number]["cpus"] and number not in usable:
            kind = "memory of a GPU or an expander" if nodes[number]["mem_total"] else "nothing in it"
            raise RefusalError(
                "numa_node",
                f"numa_nodes of {name} names node {number}, which has no CPUs ({kind})",
                f"nodes with CPUs: {', '.join(map(str, with_cpus))}",
                "name the nodes of the CPUs; one with memory only can be named beside them if plan_memory_nodes has it",
            )
    if asked is not None and not set(asked) & set(with_cpus):
        raise RefusalError(
            "numa_node",
            f"numa_nodes of {name} is {list(asked)}: no node whose CPUs it could run on",
            f"at least one of the nodes with CPUs: {', '.join(map(str, with_cpus))}",
            "add the node of its GPUs, or leave numa_nodes out",
        )
    where = {index: gpu_node(by_index[index], topology, mapping or {}) for index in gpus}
    for index, node in where.items():
        pci = by_index[index]["pci"]
        if node is None and asked is None and policy != "none":
            raise RefusalError(
                "numa_unknown",
                f"neither sysfs nor NVML says to which NUMA node GPU {index} ({pci}) belongs",
                "a node for each GPU",
                f"set plan_gpu_numa_nodes: {{'{pci}': NODE}} for this host, or numa_nodes of {name}, "
                "or plan_numa_policy: none",
            )
        if node is not None and asked is not None and node not in asked:
            raise RefusalError(
                "numa_split",
                f"{name} is bound to node {', '.join(map(str, sorted(asked)))} and its GPU {index} is on node {node}",
                "every GPU of an instance on a node that it is bound to",
                f"add node {node} to numa_nodes of {name}, leave numa_nodes out, or give it GPUs of one node",
            )
    known = {node for node in where.values() if node is not None}
    chosen = sorted(known if asked is None else set(asked))
    bound = [number for number in chosen if nodes[number]["cpus"]]
    memory = set(chosen) & set(usable)
    for number in bound:
        if number not in usable:
            memory.update(nearest(topology, number, [other for other in usable if nodes[other]["cpus"]]))
    if bound and not memory:
        raise RefusalError(
            "numa_memory",
            f"node {', '.join(map(str, bound))} of {name} has no memory, and no other node has CPUs and memory",
            "a node with CPUs and memory",
            "look at the host's memory slots, or name a node with memory in plan_memory_nodes and in numa_nodes",
        )
    return NodeSet(
        nodes=bound,
        memory_nodes=sorted(memory),
        cpus=sorted(cpu for number in bound for cpu in nodes[number]["cpus"]),
        by_cpu=any(number not in usable for number in bound),
    )


def check_allowed(name: str, found: NodeSet, topology: Mapping[str, Any], policy: str) -> None:
    """Raise RefusalError where the kernel keeps this host's processes off a node that a policy would name (cpuset)."""
    allowed = topology.get("mems_allowed")
    missing = [node for node in found.memory_nodes if allowed is not None and node not in allowed]
    if missing and policy != "none":
        raise RefusalError(
            "numa_not_allowed",
            f"{name} is to have memory of node {missing[0]}, and Mems_allowed of this host is "
            f"{format_cpulist(allowed or [])}",
            "a cpuset that allows every node of the plan",
            "widen the cpuset (AllowedMemoryNodes= of the slice, or the container's), or set plan_numa_policy: none",
        )


def numactl_argv(program: str, found: NodeSet, policy: str) -> list[str]:
    """The numactl prefix that binds a command; empty where nothing is bound."""
    if not found or policy == "none":
        return []
    cpus = f"--physcpubind={format_cpulist(found.cpus)}" if found.by_cpu else f"--cpunodebind={_listed(found.nodes)}"
    if policy == "preferred":
        # numactl takes one preferred node; the others of the set are still allowed.
        return [program, cpus, f"--preferred={found.preferred}"]
    return [program, cpus, f"--membind={_listed(found.memory_nodes)}"]


def systemd_properties(found: NodeSet, policy: str) -> dict[str, str]:
    """The unit settings that bind a service, for hosts where systemd and not numactl does it; empty: not bound."""
    if not found or policy == "none":
        return {}
    memory = _listed(found.memory_nodes) if policy == "strict" else str(found.preferred)
    return {
        "CPUAffinity": format_cpulist(found.cpus),
        "NUMAPolicy": "bind" if policy == "strict" else "preferred",
        "NUMAMask": memory,
    }


def _listed(nodes: Sequence[int]) -> str:
    return ",".join(map(str, nodes))
