#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: compute the HiCache budget of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hicache_budget
short_description: Compute how much host memory each server's HiCache may take, by NUMA node
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Counts what each NUMA node of the host has, what is kept back, and what the servers ask for; gives each server the
    flags that bring it that much and no more, and fails with every reason where it does not fit.
  - Reads the host's topology and the model's C(config.json). Free memory of the moment is not looked at, so the result
    is the same before the servers run and while they do.
  - The plan of a host has the same budget in C(plan_host.budget); this module is for a budget without a plan.
options:
  instances:
    description: All servers of the host, as in C(plan_instances).
    type: list
    elements: dict
    required: true
  model_path:
    description: The folder of the model; its C(config.json) is read.
    type: path
    required: true
  settings:
    description:
      - Any other variables of the role P(llmfleet.sglang.plan#role) by their full name, such as C(plan_hicache),
        C(plan_reserve_os) and C(plan_engine_version). Releases whose rules the collection knows without being able to
        build them are accepted here.
    type: dict
    default: {}
  gpu_pci_ids:
    description: More devices to count as GPUs, as C(vendor:device), beside NVIDIA's display controllers.
    type: list
    elements: str
    default: []
  sysfs_root:
    description: Where sysfs is mounted, or where a captured tree lies.
    type: path
    default: /sys
  proc_root:
    description: Where procfs is mounted, or where a captured tree lies.
    type: path
    default: /proc
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: See what 300 GiB of HiCache would be
  llmfleet.sglang.hicache_budget:
    model_path: /srv/models/DeepSeek-V4-Flash-NVFP4
    settings:
      plan_hicache: {total: 300GiB}
    instances:
      - name: prefill
        role: prefill
        gpus: [0, 1, 2, 3]
        port: 30000
        bootstrap_port: 8998
        args: {max-total-tokens: 1000192}
      - {name: decode, role: decode, gpus: [4, 5, 6, 7], port: 30002}
  register: computed

- name: Show the table
  ansible.builtin.debug:
    msg: "{{ computed.table }}"
"""

RETURN = r"""
budget:
  description:
    - What each node has and gives, what each server gets and with which flags, and every step of the arithmetic. The
      shape is in docs/hicache.md.
  returned: always
  type: dict
table:
  description: The same for people.
  returned: when there is a budget
  type: str
refusals:
  description: What cannot be, each with C(code), C(host), C(found), C(expected) and C(cure).
  returned: always
  type: list
  elements: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._budget import table
from ansible_collections.llmfleet.sglang.plugins.module_utils._host_budget import budget_of
from ansible_collections.llmfleet.sglang.plugins.module_utils._plan import refusal_text
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import TopologyError, read_topology


def _config(path: str) -> str | None:
    """The text of a model's config.json; None where there is none."""
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "dict", "required": True},
            "model_path": {"type": "path", "required": True},
            "settings": {"type": "dict", "default": {}},
            "gpu_pci_ids": {"type": "list", "elements": "str", "default": []},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    asked = module.params
    variables = {
        **asked["settings"],
        "plan_instances": asked["instances"],
        "plan_model_path": asked["model_path"],
    }
    try:
        topology = read_topology(asked["sysfs_root"], asked["gpu_pci_ids"], asked["proc_root"])
        config = _config(os.path.join(asked["model_path"], "config.json"))
    except (TopologyError, OSError) as error:
        module.fail_json(msg=f"{error}. Expected readable trees and a readable config.json.", budget={}, refusals=[])
    budget, refusals = budget_of(os.uname().nodename, variables, topology, config)
    if refusals:
        module.fail_json(msg=refusal_text(refusals), budget=budget, refusals=refusals)
    module.exit_json(changed=False, budget=budget, table=table(budget), refusals=[])


if __name__ == "__main__":
    main()
