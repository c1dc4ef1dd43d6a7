#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: wait until servers have no request left."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wait_idle
short_description: Wait until servers have no request left
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Reads the metrics of SGLang servers until none of them has a request that runs, waits or is in transfer, or until
    the time is up. That time is up is no failure, it is told. A server that does not answer is not waited for.
options:
  urls:
    description: Where the metrics of each server are.
    type: list
    elements: str
    required: true
  timeout:
    description: Seconds to wait at most. 0 looks once.
    type: int
    default: 120
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Wait until the servers are idle
  llmfleet.sglang.wait_idle:
    urls: [http://127.0.0.1:30000/metrics, http://127.0.0.1:30002/metrics]
    timeout: 60
"""

RETURN = r"""
left:
  description: By URL, the requests that are left by queue, or why the server could not be asked.
  returned: success
  type: dict
  sample:
    http://127.0.0.1:30002/metrics: {num_running_reqs: 2}
seconds:
  description: How long it took.
  returned: success
  type: float
  sample: 4.1
"""

import time
import urllib.error

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.llmfleet.sglang.plugins.module_utils._gauges import wait_idle


def read(url: str) -> str:
    try:
        with open_url(url, timeout=10, use_proxy=False) as response:
            return str(response.read().decode(errors="replace"))
    except (urllib.error.URLError, ValueError) as error:
        raise OSError(str(error)) from error


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "urls": {"type": "list", "elements": "str", "required": True},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    left, seconds = wait_idle(read, module.params["urls"], time.monotonic, time.sleep, module.params["timeout"])
    module.exit_json(changed=False, left=left, seconds=round(seconds, 1))


if __name__ == "__main__":
    main()
