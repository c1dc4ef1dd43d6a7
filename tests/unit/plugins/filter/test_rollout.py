# SPDX-License-Identifier: Apache-2.0
"""The filters around a rollout, where they do more than to call a function."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.llmfleet.sglang.plugins.filter.rollout import FilterModule

FILTERS = FilterModule().filters()
HOSTS: dict[str, Any] = {
    "h1": {"plan_instances": [{"role": "prefill", "group": "a"}], "__rollout_records": {"a": {"good": None}}},
    "h2": {"plan_instances": [{"role": "prefill", "group": "b"}]},
}


def test_the_order_is_that_of_the_named_hosts_whoever_else_has_variables() -> None:
    hosts = {**HOSTS, "monitor": {"plan_instances": [{"role": "prefill", "group": "z"}]}}
    assert [group["name"] for group in FILTERS["rollout_order"](hosts, ["h1", "h2"])] == ["a", "b"]


def test_a_wrong_canary_is_an_error_that_says_what_to_do() -> None:
    hosts = {host: {**variables, "rollout_canary": "c"} for host, variables in HOSTS.items()}
    with pytest.raises(AnsibleFilterError, match="found rollout_canary is 'c'\n  expected: one of a, b"):
        FILTERS["rollout_order"](hosts, ["h1", "h2"])


def test_a_host_that_was_not_read_counts_as_proven() -> None:
    order = FILTERS["rollout_order"](HOSTS, ["h1", "h2"])
    assert FILTERS["proven_groups"](order, HOSTS) == ["b"]


def test_answers_are_gathered_with_what_was_asked_and_whom() -> None:
    item = [{"name": "router"}, {"prompt": "Hello"}]
    results = [{"item": item, "json": {"choices": []}}, {"item": item, "status": 503}]
    assert FILTERS["gathered_answers"](results) == [
        {"router": "router", "prompt": "Hello", "answer": {"choices": []}},
        {"router": "router", "prompt": "Hello", "answer": {}},
    ]
