#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read who listens on TCP ports."""

from __future__ import annotations

DOCUMENTATION = r"""
module: port_info
short_description: Read which process and unit listens on each TCP port
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Reads the kernel's socket tables from /proc. Needs root to see the owners of other users' sockets.
options: {}
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Read the listeners
  llmfleet.sglang.port_info:
  register: listeners
"""

RETURN = r"""
ports:
  description: The listener of each port; C(unit) is empty for a process that belongs to no systemd unit.
  returned: success
  type: dict
  sample:
    "22":
      addresses: ["0.0.0.0", "::"]
      command: "sshd: /usr/sbin/sshd -D"
      pid: 311
      unit: ssh.service
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._ports import read_ports


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, ports=read_ports())


if __name__ == "__main__":
    main()
