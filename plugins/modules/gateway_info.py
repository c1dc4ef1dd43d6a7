#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read what a running gateway knows."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_info
short_description: Read what a running gateway knows
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Asks the gateway's HAProxy which configuration it has loaded, and for the state of the routers behind it. That none
    answers is told, so that an empty host can be read too.
options:
  socket:
    description: The socket of HAProxy's master process.
    type: path
    default: /run/llmfleet/gateway/master.sock
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Read what the gateway knows
  llmfleet.sglang.gateway_info:
  register: gateway
"""

RETURN = r"""
running:
  description: Whether HAProxy answers.
  returned: success
  type: bool
  sample: true
why:
  description: Why it does not, nothing where it does.
  returned: success
  type: str
  sample: ""
digest:
  description: The description in the configuration that the gateway has loaded.
  returned: success
  type: str
  sample: 0123456789abcdef
servers:
  description: By name, whether a router is drained, whether it is ready, and the requests that it has.
  returned: success
  type: dict
  sample:
    a:gpu-01:router: {drained: false, sessions: 3, up: true}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils import _haproxy


def main() -> None:
    module = AnsibleModule(
        argument_spec={"socket": {"type": "path", "default": _haproxy.SOCKET}}, supports_check_mode=True
    )
    ask = _haproxy.asker(module.params["socket"])
    try:
        digest, servers, why = _haproxy.digest(ask), _haproxy.servers(ask), ""
    except _haproxy.RuntimeApiError as error:
        digest, servers, why = "", {}, str(error)
    module.exit_json(changed=False, running=not why, why=why, digest=digest, servers=servers)


if __name__ == "__main__":
    main()
