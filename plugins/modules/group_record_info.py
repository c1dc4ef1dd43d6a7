#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read what PD groups were proven with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: group_record_info
short_description: Read what PD groups were proven with
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Reads the records that M(llmfleet.sglang.group_record) keeps, and whether an operator has taken a group out of
    service.
options:
  root:
    description: The folder of all groups.
    type: path
    default: /var/lib/llmfleet/groups
  groups:
    description: The PD groups.
    type: list
    elements: str
    required: true
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Read what can be gone back to
  llmfleet.sglang.group_record_info:
    groups: [a]
  register: records
"""

RETURN = r"""
groups:
  description: By group, its two records, each none where there is none, and whether it is drained.
  returned: success
  type: dict
  sample:
    a: {drained: false, good: {answers: {}, id: 0123456789ab, plan: {}, revision: ba9876543210}, previous: null}
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._records import load


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/llmfleet/groups"},
            "groups": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    found = {}
    for group in module.params["groups"]:
        folder = os.path.join(module.params["root"], group)
        try:
            found[group] = {**load(folder), "drained": os.path.exists(os.path.join(folder, "drained"))}
        except (OSError, ValueError) as error:
            module.fail_json(msg=f"the records of group {group} below {folder} cannot be read: {error}")
    module.exit_json(changed=False, groups=found)


if __name__ == "__main__":
    main()
