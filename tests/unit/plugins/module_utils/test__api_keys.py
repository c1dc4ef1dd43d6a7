# SPDX-License-Identifier: Apache-2.0
"""API keys: what one looks like, what a plan tells of them, and that nothing that is told has one in it."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _api_keys, _plan
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st

from .plan_cases import ARTEFACTS, HOST, decode, prefill, router, variables

PLUGIN = Path(__file__).parents[4] / "files" / "plugin"
OWN, NEXT, CLIENT = "the-fleets-own-key", "the-fleets-next-key", "the-key-of-clients"


def planned(*keys: str, **changes: Any) -> dict[str, Any]:
    return _plan.make_plan(HOST, {HOST: variables(plan_api_keys=list(keys), **changes)}, ARTEFACTS)


def fingerprints(plan: dict[str, Any]) -> list[str]:
    return [instance["fingerprint"] for instance in plan["instances"]]


def codes(plan: dict[str, Any]) -> list[str]:
    return [refusal["code"] for refusal in plan["refusals"]]


def test_a_key_is_what_the_plugin_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(PLUGIN), *sys.path])
    from llmfleet_plugin import api_keys

    assert api_keys.KEY.pattern == _api_keys.KEY.pattern


@given(st.lists(st.from_regex(_api_keys.KEY, fullmatch=True), unique=True, max_size=_api_keys.MOST))
def test_sound_keys_are_taken_in_their_order(keys: list[str]) -> None:
    assert _api_keys.parse_api_keys(keys) == keys
    assert _api_keys.credential(keys).splitlines() == keys


# Of letters that no message is made of.
@given(
    st.one_of(st.text("QXZ#", min_size=1, max_size=15), st.from_regex(r"[QXZ]{16}[\n é][QXZ]", fullmatch=True)),
    st.booleans(),
)
def test_a_refusal_tells_a_keys_place_and_not_the_key(key: str, follows: bool) -> None:
    with pytest.raises(RefusalError) as caught:
        _api_keys.parse_api_keys([OWN, key] if follows else [key])
    told = json.dumps(caught.value.on(HOST), ensure_ascii=False)
    assert f"key {1 + follows} of plan_api_keys has {len(key)} characters" in told
    assert key not in told
    assert set("QXZ#") & set(told) == set()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (OWN, "plan_api_keys is no list"),
        ({"own": OWN}, "plan_api_keys is no list"),
        ([12345678901234567890], "key 1 of plan_api_keys is no text"),
        ([OWN, CLIENT, OWN], "key 3 of plan_api_keys is key 1 again"),
        ([f"{number:020}" for number in range(65)], "plan_api_keys has 65 keys"),
    ],
)
def test_what_is_no_list_of_keys(value: Any, why: str) -> None:
    with pytest.raises(RefusalError) as caught:
        _api_keys.parse_api_keys(value)
    assert caught.value.found.startswith(why)
    assert OWN not in str(caught.value.on(HOST))


def test_a_plan_tells_how_many_and_turns_the_feature_on() -> None:
    plan = planned(OWN, CLIENT)
    assert [instance["api_keys"] for instance in plan["instances"]] == [2, 2, 2]
    assert [instance["features"].get("api_keys") for instance in plan["instances"]] == ["on", "on", None]
    assert [instance["environment"].get("LLMFLEET_API_KEYS") for instance in plan["instances"]] == ["on", "on", None]
    assert [key in json.dumps(plan) for key in (OWN, CLIENT)] == [False, False]


def test_without_keys_nothing_asks_for_one() -> None:
    plan = planned()
    assert [instance["api_keys"] for instance in plan["instances"]] == [0, 0, 0]
    assert ["api_keys" in instance["features"] for instance in plan["instances"]] == [False] * 3
    unset = _plan.make_plan(HOST, {HOST: variables()}, ARTEFACTS)
    assert plan == unset


def test_each_step_of_a_rotation_restarts_every_member_and_changes_no_revision() -> None:
    steps = [planned(OWN), planned(NEXT, OWN), planned(NEXT)]
    members = [fingerprints(step) for step in steps]
    assert len({fingerprint for step in members for fingerprint in step}) == 9
    assert len({step["groups"][HOST]["revision"] for step in steps}) == 1
    assert members[0] == fingerprints(planned(OWN))


@pytest.mark.parametrize("name", ["api-key", "admin-api-key", "tenant-api-key", "control-plane-api-keys"])
@pytest.mark.parametrize("where", ["plan_engine_args", "plan_router_args", "args"])
def test_a_key_in_a_flag_is_refused(name: str, where: str) -> None:
    flags = {name: OWN}
    if where == "args":
        plan = _plan.make_plan(HOST, {HOST: variables(prefill(args=flags), decode(), router())}, ARTEFACTS)
    else:
        plan = _plan.make_plan(HOST, {HOST: variables(**{where: flags})}, ARTEFACTS)
    assert "flag_secret" in codes(plan)
    assert "plan_api_keys" in plan["refusals"][0]["cure"]
    assert OWN not in json.dumps(plan)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan_engine_args": {"tokenizer-worker-num": 2}},
        {"plan_engine_args": {"grpc-port": 50051}},
        {"plan_engine_args": {"smg-grpc-mode": True}},
        {"plan_environment": {"SGLANG_RUST_SERVER": "1"}},
    ],
)
def test_another_way_in_is_refused(changes: dict[str, Any]) -> None:
    assert codes(planned(OWN, **changes)) == ["api_keys_other_door"] * 2
    assert "api_keys_other_door" not in codes(planned(**changes))


def test_one_tokenizer_is_no_other_way_in() -> None:
    assert codes(planned(OWN, plan_engine_args={"tokenizer-worker-num": "1", "smg-grpc-mode": False})) == []


@pytest.mark.parametrize("value", [True, False])
def test_the_feature_follows_from_the_keys(value: bool) -> None:
    assert codes(planned(OWN, plan_features={"api_keys": value})) == ["feature_owned"]


@pytest.mark.parametrize(
    ("theirs", "agree"),
    [([OWN, CLIENT], True), ([CLIENT, OWN], False), ([OWN], False), ([], False)],
    ids=["same", "other order", "fewer", "none"],
)
def test_a_group_has_the_same_keys(theirs: list[str], agree: bool) -> None:
    fleet = {
        "gpu1": variables(prefill(group="main"), decode(group="main"), plan_api_keys=[OWN, CLIENT]),
        "gpu2": variables(router(group="main"), plan_api_keys=theirs, ansible_host="192.0.2.12"),
    }
    for instance in fleet["gpu1"]["plan_instances"]:
        instance["host"] = "0.0.0.0"
    plan = _plan.make_plan("gpu1", fleet, ARTEFACTS)
    assert ("api_keys_disagree" not in codes(plan)) == agree
    assert [key in json.dumps(plan) for key in (OWN, CLIENT)] == [False, False]


def test_our_own_requests_show_what_the_host_has() -> None:
    text = base64.b64encode(_api_keys.credential([OWN, CLIENT]).encode()).decode()
    read = {"results": [{"item": {"name": "a"}, "content": text}, {"item": {"name": "b"}, "skipped": True}]}
    assert _api_keys.authorization(read, "a") == {"Authorization": f"Bearer {OWN}"}
    assert _api_keys.authorization(read, "b") == {}
    assert _api_keys.authorization({"skipped": True}, "a") == {}
