# SPDX-License-Identifier: Apache-2.0
"""What a GPU is, as opposed to what it does: read once for each GPU and remembered."""

from __future__ import annotations

from pathlib import Path

from llmfleet_gpu_exporter.nvml import Handle, Nvml, UnansweredError
from llmfleet_gpu_exporter.snapshot import Gpu

# Words of 64 bits to ask for: 1024 NUMA nodes, the most that Linux can be built for.
_NODE_SET_WORDS = 16
_SCOPE_NODE = 0


def identify(nvml: Nvml, handle: Handle, index: int, uuid: str, pci_devices: Path) -> Gpu:
    """Reads name, PCI address and NUMA node; what is not known is "". Raises GpuLostError or LibraryError."""
    try:
        name = str(nvml.call("nvmlDeviceGetName", handle))
    except UnansweredError:
        name = ""
    pci_bus_id = _pci_bus_id(nvml, handle)
    return Gpu(index, uuid, pci_bus_id, name, _numa_node(nvml, handle, pci_bus_id, pci_devices))


def _pci_bus_id(nvml: Nvml, handle: Handle) -> str:
    """The address as Linux writes it, 0000:17:00.0. A GPU is always function 0 of its device."""
    try:
        pci = nvml.call("nvmlDeviceGetPciInfo", handle)
    except UnansweredError:
        return ""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _numa_node(nvml: Nvml, handle: Handle, pci_bus_id: str, pci_devices: Path) -> str:
    """The node that the GPU hangs on: from the kernel, else the only node of NVML's memory affinity, else "".

    Not from nvmlDeviceGetNumaNodeId: that is the node that the GPU's own memory forms on coherent platforms.
    """
    if pci_bus_id:
        try:
            node = int((pci_devices / pci_bus_id / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            return str(node)
    try:
        words = nvml.call("nvmlDeviceGetMemoryAffinity", handle, _NODE_SET_WORDS, _SCOPE_NODE)
    except UnansweredError:
        return ""
    nodes = [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    return str(nodes[0]) if len(nodes) == 1 else ""
