# SPDX-License-Identifier: Apache-2.0
"""The rules of a rollout: order, what changes, what a group's plan is, which groups were proven."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _rollout
from ansible_collections.llmfleet.sglang.plugins.module_utils._plan import make_plan
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.plan_cases import ARTEFACTS, HOST, decode, prefill, router, variables


def host(*groups: str, **more: Any) -> dict[str, Any]:
    return {"plan_instances": [{"role": "prefill", "group": group} for group in groups], **more}


def names(fleet: dict[str, dict[str, Any]]) -> list[str]:
    return [group["name"] for group in _rollout.rollout_order(fleet)]


def test_the_canary_comes_first_and_the_others_by_name() -> None:
    fleet = {"h1": host("c", "a", rollout_canary="b"), "h2": host("b", rollout_canary="b")}
    assert names(fleet) == ["b", "a", "c"]


def test_a_group_names_all_its_hosts_and_routers_as_their_own_host_reaches_them() -> None:
    router_entry = {"role": "router", "group": "a", "host": "::", "port": 30001}
    fleet = {"h2": {"plan_instances": [router_entry]}, "h1": host("a")}
    assert _rollout.rollout_order(fleet) == [
        {"name": "a", "hosts": ["h1", "h2"], "routers": [{"host": "h2", "url": "http://[::1]:30001"}]}
    ]


def test_an_instance_without_group_is_one_of_its_host() -> None:
    assert names({"h1": {"plan_instances": [{"role": "prefill"}]}}) == ["h1"]


def test_what_is_no_list_of_instances_has_no_groups() -> None:
    assert names({"h1": {"plan_instances": "prefill"}, "h2": {}, "h3": {"plan_instances": ["prefill"]}}) == []


def test_an_unknown_canary_is_refused() -> None:
    with pytest.raises(RefusalError) as error:
        names({"h1": host("a", "b", rollout_canary="x")})
    assert (error.value.found, error.value.expected) == ("rollout_canary is 'x'", "one of a, b, or nothing")


def test_two_canaries_are_refused() -> None:
    with pytest.raises(RefusalError, match="'a' and 'b', not the same"):
        names({"h1": host("a", rollout_canary="a"), "h2": host("b", rollout_canary="b")})


@given(
    st.dictionaries(st.sampled_from("uvwxyz"), st.lists(st.sampled_from("abcd"), min_size=1), min_size=1), st.randoms()
)
def test_every_host_gets_the_same_order_and_no_group_is_lost(fleet: dict[str, list[str]], shuffle: Any) -> None:
    hosts = list(fleet)
    shuffle.shuffle(hosts)
    raw = {name: host(*fleet[name]) for name in hosts}
    assert names(raw) == sorted({group for groups in fleet.values() for group in groups})


def two_groups() -> dict[str, Any]:
    instances = [
        prefill(name="prefill-a", group="a", gpus=[0]),
        decode(name="decode-a", group="a", gpus=[1]),
        router(name="router-a", group="a"),
        prefill(name="prefill-b", group="b", gpus=[2], port=31000, bootstrap_port=8999),
        decode(name="decode-b", group="b", gpus=[3], port=31002),
        router(name="router-b", group="b", port=31001, metrics_port=29001),
    ]
    plan = make_plan(HOST, {HOST: variables(*instances)}, ARTEFACTS)
    assert plan["refusals"] == []
    return plan


def test_the_plan_of_a_group_has_its_instances_only() -> None:
    plan = two_groups()
    plan["budget"] = {"instances": [{"name": "prefill-a"}, {"name": "prefill-b"}], "process": 1}
    found = _rollout.group_plan(plan, "b")
    assert [instance["name"] for instance in found["instances"]] == ["prefill-b", "decode-b", "router-b"]
    assert list(found["groups"]) == ["b"]
    assert found["budget"] == {"instances": [{"name": "prefill-b"}], "process": 1}
    assert len(plan["instances"]) == 6
    # A turn decides from it whether decodes are restarted with their prefill.
    assert found["engine"]["decode_keeps_prefill_ports"] is False


def test_the_plan_of_a_fallback_has_that_only() -> None:
    whole = {"name": "whole-b", "group": "b", "fingerprint": "2"}
    plan = two_groups() | {"fallbacks": [{"name": "whole-a", "group": "a", "fingerprint": "1"}, whole]}
    plan["budget"] = {"instances": [{"name": "prefill-b"}], "fallbacks": [{"name": "whole-a"}, {"name": "whole-b"}]}
    found = _rollout.group_plan(plan, "b")
    assert (len(found["instances"]), found["fallbacks"]) == (3, [whole])
    alone = _rollout.fallback_plan(found, ["2"])
    assert (alone["instances"], alone["fallbacks"]) == ([whole], [])
    assert alone["budget"] == {"instances": [{"name": "whole-b"}], "fallbacks": []}
    assert alone["model"] == plan["model"]
    # Files of another plan are none of this one.
    other = _rollout.fallback_plan(found, ["3"])
    assert (other["instances"], other["budget"]["instances"]) == ([], [])


def test_a_plan_from_before_there_were_fallbacks_has_none() -> None:
    stored = {name: value for name, value in two_groups().items() if name != "fallbacks"}
    found = _rollout.group_plan(stored, "b")
    assert (found["fallbacks"], _rollout.fallback_plan(found, ["1"])["instances"]) == ([], [])


def running(plan: dict[str, Any], **fingerprints: str) -> dict[str, Any]:
    return {
        instance["unit"]: {
            "main_pid": 7,
            "active_state": "active",
            "fingerprint": fingerprints.get(instance["name"], instance["fingerprint"]),
        }
        for instance in plan["instances"]
    }


def test_what_runs_as_planned_does_not_change() -> None:
    plan = _rollout.group_plan(two_groups(), "a")
    assert _rollout.rollout_changes(plan["instances"], running(plan)) == []


def test_what_runs_something_else_or_nothing_changes_and_it_is_told_why() -> None:
    plan = {"instances": [i for i in two_groups()["instances"] if i["name"] in ("prefill-a", "decode-a", "router-a")]}
    now = running(plan, **{"prefill-a": "old", "decode-a": ""})
    now["llmfleet-router-a.service"] |= {"main_pid": 0, "active_state": "failed"}
    found = _rollout.rollout_changes(plan["instances"], now)
    planned = plan["instances"][0]["fingerprint"]
    assert [(change["name"], change["role"], change["why"]) for change in found] == [
        ("prefill-a", "prefill", f"runs old, planned is {planned}"),
        ("decode-a", "decode", f"runs something unknown, planned is {plan['instances'][1]['fingerprint']}"),
        ("router-a", "router", "is failed"),
    ]


def test_a_group_is_proven_by_any_record_and_where_nothing_was_read() -> None:
    order = [{"name": name, "hosts": hosts} for name, hosts in (("a", ["h1", "h2"]), ("b", ["h2"]), ("c", ["h3"]))]
    records = {"h1": {"a": {"good": {"id": "1"}}}, "h2": {"a": {"good": None}, "b": {"good": None}}}
    assert _rollout.proven_groups(order, records) == ["a", "c"]
