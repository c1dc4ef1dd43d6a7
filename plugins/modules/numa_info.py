#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read NUMA nodes and GPUs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: numa_info
short_description: Read a host's NUMA nodes and GPUs
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Reads NUMA nodes and GPUs from sysfs. Changes nothing and starts no program.
options:
  sysfs_root:
    description: Where sysfs is mounted, or where a captured tree lies.
    type: path
    default: /sys
  gpu_pci_ids:
    description: More devices to count as GPUs, as C(vendor:device), beside NVIDIA's display controllers.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Read the topology
  llmfleet.sglang.numa_info:
  register: topology
"""

RETURN = r"""
nodes:
  description: NUMA nodes by id, memory in bytes.
  returned: success
  type: list
  elements: dict
  sample: [{"id": 0, "cpus": [0, 1], "mem_total": 8589934592, "mem_free": 4294967296, "distances": [10, 21]}]
gpus:
  description: GPUs in PCI order; C(numa_node) is null where the firmware does not say.
  returned: success
  type: list
  elements: dict
  sample: [{"index": 0, "pci": "0000:17:00.0", "vendor": "10de", "device": "2335", "numa_node": 0, "cpus": [0, 1]}]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import TopologyError, read_topology


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sysfs_root": {"type": "path", "default": "/sys"},
            "gpu_pci_ids": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        topology = read_topology(module.params["sysfs_root"], module.params["gpu_pci_ids"])
    except TopologyError as error:
        module.fail_json(msg=f"{error}. Expected a complete sysfs tree at sysfs_root={module.params['sysfs_root']}.")
    module.exit_json(changed=False, **topology)


if __name__ == "__main__":
    main()
