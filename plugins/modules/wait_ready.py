#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: wait until a unit's service is ready."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wait_ready
short_description: Wait until a service is ready, or until it cannot become so
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Asks a URL until it answers with status 200 and the unit is active, with nothing left for systemd to do with it.
  - A unit that has failed, or that dies again and again, ends the wait at once; the message has the end of its journal.
options:
  unit:
    description: The systemd unit that serves the URL.
    type: str
    required: true
  url:
    description: The URL to ask.
    type: str
    required: true
  timeout:
    description: Seconds to wait at most.
    type: int
    default: 900
  interval:
    description: Seconds between two looks.
    type: int
    default: 2
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Wait for prefill
  llmfleet.sglang.wait_ready:
    unit: llmfleet-prefill.service
    url: http://127.0.0.1:30000/ready
"""

RETURN = r"""
seconds:
  description: How long it took.
  returned: always
  type: float
  sample: 41.2
"""

import time
import urllib.error

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.llmfleet.sglang.plugins.module_utils._readiness import wait
from ansible_collections.llmfleet.sglang.plugins.module_utils._systemd import SHOW_PROPERTIES, parse_show, unit_state


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 900},
            "interval": {"type": "int", "default": 2},
        },
        supports_check_mode=True,
    )
    unit, url = module.params["unit"], module.params["url"]

    def probe() -> str:
        try:
            with open_url(url, timeout=10, use_proxy=False) as response:
                return "" if response.status == 200 else f"status {response.status}"
        except urllib.error.HTTPError as error:
            return f"status {error.code}"
        except (OSError, ValueError) as error:
            return str(error)

    def state() -> dict[str, object]:
        command = ["systemctl", "show", f"--property={','.join([*SHOW_PROPERTIES, 'Job'])}", "--", unit]
        properties = parse_show(module.run_command(command, check_rc=True)[1])[0]
        # Without a job it is empty, left out, or 0, as versions differ.
        return unit_state(properties, lambda _path: "") | {"job": properties.get("Job", "") not in ("", "0")}

    outcome = wait(probe, state, time.monotonic, time.sleep, module.params["timeout"], module.params["interval"])
    seconds = round(outcome.seconds, 1)
    if outcome.reason:
        command = ["journalctl", "--unit", unit, "--lines", "40", "--no-pager", "--output", "cat"]
        journal = module.run_command(command)[1]
        module.fail_json(
            msg=f"{url} of {unit} is not ready: {outcome.reason}; the last answer was: {outcome.answer or 'ready'}. "
            f"Expected status 200 of an active unit. The end of its journal:\n{journal}",
            seconds=seconds,
        )
    module.exit_json(changed=False, seconds=seconds)


if __name__ == "__main__":
    main()
