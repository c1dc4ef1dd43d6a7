#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: drain routers at a gateway, and admit them again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_servers
short_description: Drain routers at a gateway, and admit them again
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Tells a gateway's HAProxy to send no more requests to some routers, and waits until those that it has sent have
    ended; or to send some again, and waits until the routers are ready. What is set holds over reloads and starts.
options:
  servers:
    description: The routers, as the filter P(llmfleet.sglang.gateway_servers#filter) names them.
    type: list
    elements: str
    required: true
  state:
    description:
      - C(drained) waits for the requests. That the time is up is no failure, it is told in RV(left).
      - C(ready) fails when a router is not ready in time.
    type: str
    choices: [drained, ready]
    required: true
  timeout:
    description: Seconds to wait at most. 0 looks once.
    type: int
    default: 30
  socket:
    description: The socket of HAProxy's master process.
    type: path
    default: /run/llmfleet/gateway/master.sock
  state_file:
    description: The file that HAProxy reads when it is started or reloaded.
    type: path
    default: /var/lib/llmfleet-gateway/servers
  configuration:
    description: The configuration of HAProxy.
    type: path
    default: /etc/llmfleet/gateway/haproxy.cfg
  program:
    description: The program that writes O(state_file).
    type: path
    default: /opt/llmfleet/gateway/keep_servers.py
attributes:
  check_mode:
    support: full
    description: Says what would change, and waits for nothing.
  diff_mode:
    support: full
    description: Shows which routers take requests.
"""

EXAMPLES = r"""
- name: Let the group take no more requests
  llmfleet.sglang.gateway_servers:
    servers: ["a:gpu-01:router"]
    state: drained
    timeout: 300
  delegate_to: gateway-01
"""

RETURN = r"""
left:
  description: The routers that still have requests when the time is up, by name.
  returned: success
  type: dict
  sample:
    a:gpu-01:router: {drained: true, sessions: 2, up: true}
unknown:
  description: Those of O(servers) that the gateway does not know; it sends them nothing.
  returned: success
  type: list
  elements: str
  sample: []
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils import _haproxy


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "servers": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["drained", "ready"], "required": True},
            "timeout": {"type": "int", "default": 30},
            "socket": {"type": "path", "default": _haproxy.SOCKET},
            "state_file": {"type": "path", "default": _haproxy.STATE_FILE},
            "configuration": {"type": "path", "default": _haproxy.CONFIGURATION},
            "program": {"type": "path", "default": _haproxy.KEEP_PROGRAM},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    names, drained = wanted["servers"], wanted["state"] == "drained"
    ask = _haproxy.asker(wanted["socket"])
    left = {}
    try:
        now = _haproxy.servers(ask)
        changes = _haproxy.changes(now, names, drained)
        if not module.check_mode:
            # All of them, not only the changes: a worker from before a reload may differ.
            _haproxy.set_drained(ask, [name for name in names if name in now], drained)
            argv = ["/usr/bin/python3", "-I", "-B", wanted["program"]]
            argv += [wanted["state_file"], wanted["configuration"], wanted["socket"]]
            status, _out, told = module.run_command(argv)
            if status:
                module.fail_json(msg=f"the state of the gateway's servers cannot be kept: {told.strip()}")
            left = _haproxy.wait(ask, names, drained, wanted["timeout"])
    except _haproxy.RuntimeApiError as error:
        module.fail_json(msg=str(error))
    if left and not drained:
        module.fail_json(
            msg=f"found {', '.join(left)} not ready for the gateway after {wanted['timeout']} s; expected 200 of its "
            "/readiness. See whether the gateway's host reaches the router",
            left=left,
        )
    module.exit_json(
        changed=bool(changes),
        left=left,
        unknown=[name for name in names if name not in now],
        diff={
            "before": dict.fromkeys(changes, "ready" if drained else "drained"),
            "after": dict.fromkeys(changes, wanted["state"]),
        },
    )


if __name__ == "__main__":
    main()
