#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: one play at a time changes a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: play_lock
short_description: Let one play at a time change a host
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Takes a lock on the host for the running C(ansible-playbook), refuses when another one holds it, and gives it
    back. Taking it again says that the play still lives.
  - A lock is taken over when its process was one of this controller and is gone, and when nothing was heard of it for
    O(stale) seconds; a reboot of the host frees it.
options:
  state:
    description: Whether to hold the lock.
    type: str
    choices: [held, free]
    default: held
  path:
    description: The file of the lock.
    type: path
    default: /run/llmfleet/play.lock
  stale:
    description: Seconds after which a holder that is not heard of counts as dead. Longer than the longest step.
    type: int
    default: 7200
  holder:
    description: Who asks. Filled in on the controller.
    type: dict
  gone:
    description: A holder that is known to be dead. Filled in on the controller.
    type: dict
attributes:
  check_mode:
    support: full
    description: Nothing is changed, so nothing is taken.
  diff_mode:
    support: none
    description: Who holds it is told.
"""

EXAMPLES = r"""
- name: Be the only play that changes the host
  llmfleet.sglang.play_lock:
    state: held
"""

RETURN = r"""
refused:
  description: Who holds the lock instead, with the seconds since it was heard of.
  returned: when it is held by another play
  type: dict
  sample: {age: 12, controller: build1, pid: 4711, started: "81234567", user: root}
taken_over:
  description: The dead holder whose lock was taken over, or none.
  returned: success
  type: dict
  sample: {age: 7300, controller: build2, pid: 815, started: "71234567", user: root}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._play_lock import release, take


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "path": {"type": "path", "default": "/run/llmfleet/play.lock"},
            "stale": {"type": "int", "default": 7200},
            "holder": {"type": "dict"},
            "gone": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    if module.check_mode:
        module.exit_json(changed=False, taken_over=None)
    if wanted["holder"] is None:
        module.fail_json(msg="holder is missing: play_lock runs through its action plugin, in a play")
    # Holding a lock for the time of a play changes nothing of the host.
    try:
        if wanted["state"] == "free":
            release(wanted["path"], wanted["holder"])
            module.exit_json(changed=False, taken_over=None)
        refused, taken_over = take(wanted["path"], wanted["holder"], wanted["stale"], wanted["gone"])
    except OSError as error:
        module.fail_json(msg=f"the lock {wanted['path']} cannot be used: {error}")
    if refused is not None:
        where = refused["controller"].split()[0]
        module.fail_json(
            msg=f"another play changes this host: process {refused['pid']} of {refused['user']} on {where}, heard of "
            f"{refused['age']} s ago. Expected one play at a time. Wait until it has ended. If it is dead, run this "
            f"from {where}, where that can be seen, wait until nothing was heard of it for {wanted['stale']} s, or "
            f"empty {wanted['path']} on the host.",
            refused=refused,
        )
    module.exit_json(changed=False, taken_over=taken_over)


if __name__ == "__main__":
    main()
