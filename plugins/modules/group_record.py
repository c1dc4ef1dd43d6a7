#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: keep what a PD group was proven with, and put it back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: group_record
short_description: Keep what a PD group was proven with, and put it back
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - A record of a PD group on a host is its plan, what it answered, and copies of its unit and environment files. The
    host has two, the one that was proven last (C(good)) and the one before (C(previous)).
options:
  root:
    description: The folder of all groups.
    type: path
    default: /var/lib/llmfleet/groups
  group:
    description: The PD group.
    type: str
    required: true
  state:
    description:
      - C(good) makes O(record) with copies of O(files) the good one, and what was good the previous one.
      - C(restored) puts the files of the record O(which) back, and removes those of O(files) that it lacks.
    type: str
    choices: [good, restored]
    required: true
  record:
    description: A mapping with at least C(plan).
    type: dict
  files:
    description: Absolute paths of the group's files.
    type: list
    elements: path
    default: []
  which:
    description: The record to put back.
    type: str
    choices: [good, previous]
    default: good
attributes:
  check_mode:
    support: full
    description: Says what would change.
  diff_mode:
    support: none
    description: The files may hold secrets.
"""

EXAMPLES = r"""
- name: Keep what was proven
  llmfleet.sglang.group_record:
    group: a
    state: good
    record: {plan: "{{ plan_host }}"}
    files: [/etc/systemd/system/llmfleet-prefill.service, /etc/llmfleet/prefill.env]
"""

RETURN = r"""
restored:
  description: Files that were put back or removed.
  returned: when O(state=restored)
  type: list
  elements: str
  sample: [/etc/llmfleet/prefill.env]
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._records import keep, restore


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/llmfleet/groups"},
            "group": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["good", "restored"], "required": True},
            "record": {"type": "dict"},
            "files": {"type": "list", "elements": "path", "default": []},
            "which": {"type": "str", "choices": ["good", "previous"], "default": "good"},
        },
        required_if=[("state", "good", ["record"])],
        supports_check_mode=True,
    )
    wanted = module.params
    folder = os.path.join(wanted["root"], wanted["group"])
    try:
        if wanted["state"] == "good":
            module.exit_json(changed=keep(folder, wanted["record"], wanted["files"], dry=module.check_mode))
        restored = restore(folder, wanted["which"], wanted["files"], dry=module.check_mode)
    except FileNotFoundError as error:
        module.fail_json(msg=f"{error}; expected the group's files or its record: deploy the group first")
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"the record of group {wanted['group']} below {folder} cannot be used: {error}")
    module.exit_json(changed=bool(restored), restored=restored)


if __name__ == "__main__":
    main()
