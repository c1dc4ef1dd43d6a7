# SPDX-License-Identifier: Apache-2.0
"""Filters around a rollout: its order, what changes, answers, and the table of what runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llmfleet.sglang.plugins.module_utils import _answers, _plan, _rollout, _status
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

_VARIABLES = ("plan_instances", "rollout_canary")


def rollout_order(hostvars: Mapping[str, Any], hosts: Sequence[str]) -> list[dict[str, Any]]:
    fleet = {host: {name: hostvars[host][name] for name in _VARIABLES if name in hostvars[host]} for host in hosts}
    try:
        return _rollout.rollout_order(fleet)
    except RefusalError as refused:
        raise AnsibleFilterError(_plan.refusal_text([refused.on("the inventory")])) from refused


def gathered_answers(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"router": result["item"][0]["name"], "prompt": result["item"][1]["prompt"], "answer": result.get("json", {})}
        for result in results
    ]


def proven_groups(order: Sequence[Mapping[str, Any]], hostvars: Mapping[str, Any]) -> list[str]:
    records = {
        host: hostvars[host].get("__rollout_records") for group in order for host in group["hosts"] if host in hostvars
    }
    return _rollout.proven_groups(order, records)


class FilterModule:
    """The filters of this file, for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "answer_findings": _answers.answer_findings,
            "answer_texts": _answers.answer_texts,
            "fallback_plan": _rollout.fallback_plan,
            "gathered_answers": gathered_answers,
            "group_plan": _rollout.group_plan,
            "proven_groups": proven_groups,
            "rollout_changes": _rollout.rollout_changes,
            "rollout_order": rollout_order,
            "status_rows": _status.status_rows,
            "status_table": _status.status_table,
        }
