# SPDX-License-Identifier: Apache-2.0
"""The controller's part of the module ``play_lock``: who asks, and whether a holder that ran here is still there."""

from __future__ import annotations

import getpass
import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.llmfleet.sglang.plugins.module_utils._play_lock import controller, is_gone, started


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible has no types
    """Runs the module, and once more when the lock turns out to be that of a dead process of this controller."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        # Tasks run in children of ansible-playbook, and it is that one which has to live.
        pid = os.getppid()
        holder = {"controller": controller(), "pid": pid, "started": started(pid), "user": getpass.getuser()}
        arguments = {**self._task.args, "holder": holder}
        answer = self._execute_module(
            module_name="llmfleet.sglang.play_lock", module_args=arguments, task_vars=task_vars
        )
        held = answer.get("refused")
        if held is not None and is_gone(held):
            arguments["gone"] = held
            answer = self._execute_module(
                module_name="llmfleet.sglang.play_lock", module_args=arguments, task_vars=task_vars
            )
        result.update(answer)
        return result
