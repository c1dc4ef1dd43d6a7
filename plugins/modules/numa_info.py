#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read NUMA nodes, GPUs and the limits of services."""

from __future__ import annotations

DOCUMENTATION = r"""
module: numa_info
short_description: Read a host's NUMA nodes and GPUs, and the memory limits its services live under
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Reads NUMA nodes, GPUs, cgroup limits and the cpuset from sysfs and procfs, of the live host or of a captured tree.
  - Changes nothing. Starts no program either, unless O(nvml_python) names one.
options:
  sysfs_root:
    description: Where sysfs is mounted, or where a captured tree of it lies.
    type: path
    default: /sys
  proc_root:
    description: Where procfs is mounted, or where a captured tree of it lies.
    type: path
    default: /proc
  gpu_pci_ids:
    description: More devices to count as GPUs, as C(vendor:device), beside NVIDIA's display controllers.
    type: list
    elements: str
    default: []
  slice:
    description: The systemd slice that services run in. Limits are read from the root of the cgroups down to it.
    type: str
    default: llmfleet.slice
  nvml_python:
    description:
      - A Python interpreter that has nvidia-ml-py, such as that of the engine's virtual environment. NVML is asked
        through it for what sysfs does not tell.
      - Where the file does not exist, NVML is not asked, and that is no error.
    type: path
  nvml_environment:
    description: Environment variables for that interpreter, beside those the module runs with.
    type: dict
    default: {}
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Read the topology
  llmfleet.sglang.numa_info:
  register: topology

- name: Read the topology of a captured host
  llmfleet.sglang.numa_info:
    sysfs_root: "{{ inventory_dir }}/captures/{{ inventory_hostname }}/sys"
    proc_root: "{{ inventory_dir }}/captures/{{ inventory_hostname }}/proc"
  delegate_to: localhost
  register: topology
"""

RETURN = r"""
nodes:
  description: NUMA nodes in order of id.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: The kernel's number of the node.
      type: int
    cpus:
      description: CPUs that are online; none on a node that is memory only.
      type: list
      elements: int
    mem_total:
      description: Bytes of memory. Does not move while the host is up, hugepages included.
      type: int
    mem_free:
      description: Bytes that nothing uses at the moment.
      type: int
    mem_available:
      description:
        - Bytes that processes could get without swapping at the moment, an estimate by the kernel's formula for
          MemAvailable, which it computes for the whole machine only.
      type: int
    hugepages:
      description: Pages in the pool of each page size (bytes, as text), as C(total) and C(free).
      type: dict
    distances:
      description: The kernel's distances to every node, in order of id.
      type: list
      elements: int
  sample:
    - id: 0
      cpus: [0, 1]
      mem_total: 8589934592
      mem_free: 4294967296
      mem_available: 6442450944
      hugepages: {"2097152": {"total": 512, "free": 512}}
      distances: [10, 21]
gpus:
  description: GPUs in PCI order, the order of CUDA_DEVICE_ORDER=PCI_BUS_ID.
  returned: success
  type: list
  elements: dict
  contains:
    index:
      description: Place in this order.
      type: int
    pci:
      description: PCI address.
      type: str
    vendor:
      description: PCI vendor id.
      type: str
    device:
      description: PCI device id.
      type: str
    numa_node:
      description: Node of the PCI device; null where the firmware does not say.
      type: int
    cpus:
      description: CPUs next to the device, every CPU where the firmware does not say.
      type: list
      elements: int
    nvml:
      description: What NVML says of the GPU; null where it was not asked, could not be asked, or does not know the GPU.
      type: dict
      contains:
        pci:
          description: PCI address.
          type: str
        uuid:
          description: UUID of the GPU.
          type: str
        name:
          description: Product name.
          type: str
        memory_total:
          description: Bytes of the GPU's memory; null where NVML does not support the question, as do all that follow.
          type: int
        memory_affinity:
          description: Nodes whose memory is near to the GPU; empty where NVML does not support the question.
          type: list
          elements: int
        cpu_affinity:
          description: CPUs near to the GPU; empty where NVML does not support the question.
          type: list
          elements: int
        numa_node:
          description: The node that is the GPU's own memory, on hosts that show it as a node.
          type: int
        capability:
          description: The compute capability, major and minor.
          type: str
        driver:
          description: Version of the driver.
          type: str
  sample:
    - index: 0
      pci: "0000:17:00.0"
      vendor: 10de
      device: "2335"
      numa_node: 0
      cpus: [0, 1]
      nvml:
        pci: "0000:17:00.0"
        uuid: GPU-5eed0000-0000-4000-8000-000000000000
        name: NVIDIA H200
        memory_total: 150754820096
        memory_affinity: [0]
        cpu_affinity: [0, 1]
        numa_node: null
        capability: "9.0"
        driver: 580.95.05
driver:
  description: The version of the NVIDIA driver that is loaded; null where none is.
  returned: success
  type: str
  sample: 580.95.05
mems_allowed:
  description: Nodes that the module's own process may have memory from (cpuset); null where the kernel does not tell.
  returned: success
  type: list
  elements: int
  sample: [0, 1]
limits:
  description: Memory limits from the root of the cgroups down to the slice; only those that limit.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: The cgroup.
      type: str
    file:
      description: The file that says so, C(memory.max), C(memory.high) or, with cgroup v1, C(memory.limit_in_bytes).
      type: str
    limit:
      description: Bytes.
      type: int
  sample: [{"path": "/llmfleet.slice", "file": "memory.max", "limit": 429496729600}]
nvml_error:
  description: Why NVML could not be asked; null where it was asked, or where there was nobody to ask.
  returned: success
  type: str
  sample: null
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._nvml import NvmlError, merge, read_nvml
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import TopologyError, read_topology


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sysfs_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "gpu_pci_ids": {"type": "list", "elements": "str", "default": []},
            "slice": {"type": "str", "default": "llmfleet.slice"},
            "nvml_python": {"type": "path"},
            "nvml_environment": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    wants = module.params
    try:
        topology = read_topology(wants["sysfs_root"], wants["gpu_pci_ids"], wants["proc_root"], wants["slice"])
    except TopologyError as error:
        module.fail_json(msg=f"{error} (read with sysfs_root={wants['sysfs_root']}, proc_root={wants['proc_root']})")
    nvml, nvml_error = [], None
    if wants["nvml_python"] and os.path.exists(wants["nvml_python"]):
        environment = {key: str(value) for key, value in wants["nvml_environment"].items()}
        try:
            nvml = read_nvml(wants["nvml_python"], environment)
        except NvmlError as error:
            nvml_error = str(error)
    topology["gpus"] = merge(topology["gpus"], nvml)
    module.exit_json(changed=False, nvml_error=nvml_error, **topology)


if __name__ == "__main__":
    main()
