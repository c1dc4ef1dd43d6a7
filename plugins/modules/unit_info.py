#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read the state of systemd units."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_info
short_description: Read the state of systemd units, and what their running process was started with
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Reads unit properties, the fingerprint that the unit's start has left in its runtime directory, and what a server's
    processes report there about the features of the engine's plugin.
  - A unit that does not exist is reported as not loaded, so that an empty host can be read too.
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
  - llmfleet.sglang.units
"""

EXAMPLES = r"""
- name: Read what runs
  llmfleet.sglang.unit_info:
    units: [llmfleet-prefill.service]
  register: running
"""

RETURN = r"""
units:
  description: State by unit name.
  returned: success
  type: dict
  sample:
    llmfleet-prefill.service:
      active_state: active
      enabled: true
      fingerprint: 0123456789abcdef
      loaded: true
      main_pid: 4711
      needs_daemon_reload: false
      path: /etc/systemd/system/llmfleet-prefill.service
      reports:
        tp0-pp0-dp0: {features: {queue_bound: {value: "on"}}, pid: 4790, process: tp0-pp0-dp0, version: 0.5.23}
      restarts: 0
      result: success
      started_monotonic_us: 81234567
      sub_state: running
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._systemd import SHOW_PROPERTIES, parse_show, unit_state


def read_text(path: str) -> str:
    """The text of a file; nothing if it is not there, for a unit may stop while it is looked at."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return ""


def read_reports(folder: str) -> dict[str, object]:
    """The reports in a folder, by the process that wrote them. They are written whole or not at all."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return {}
    texts = {name.removesuffix(".json"): read_text(os.path.join(folder, name)) for name in names}
    return {name: json.loads(text) for name, text in texts.items() if text}


def main() -> None:
    module = AnsibleModule(
        argument_spec={"units": {"type": "list", "elements": "str", "required": True}}, supports_check_mode=True
    )
    units = {}
    for unit in module.params["units"]:
        command = ["systemctl", "show", f"--property={','.join(SHOW_PROPERTIES)}", "--", unit]
        _rc, out, _err = module.run_command(command, check_rc=True)
        units[unit] = unit_state(parse_show(out)[0], read_text, read_reports)
    module.exit_json(changed=False, units=units)


if __name__ == "__main__":
    main()
