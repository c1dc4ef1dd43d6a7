# SPDX-License-Identifier: Apache-2.0
"""What a gateway is told: routers, weights and seconds of the whole inventory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.llmfleet.sglang.plugins.module_utils import _gateway
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import parse_wants
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.plan_cases import decode, fallback, prefill, router, variables

ADMISSION = {"prefill_tokens_per_s": 3300, "prompt_tokens": 11000, "ttft_s": 110}
ROLE = Path(__file__).resolve().parents[4] / "roles" / "gateway"


def fleet(**changes: dict[str, Any]) -> dict[str, Any]:
    """Two hosts, each a PD group named by its host."""
    hosts = {
        "gpu1": variables(ansible_host="192.0.2.11"),
        "gpu2": variables(
            prefill(),
            decode(),
            router(host="::", args={"max-concurrent-requests": 10, "queue-size": 6}),
            ansible_host="2001:db8::2",
        ),
    }
    return {host: parse_wants(host, of_host | changes.get(host, {})) for host, of_host in hosts.items()}


def refused(*arguments: Any) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        _gateway.gateway_plan(*arguments)
    return caught.value


def test_it_is_told_every_router_as_it_reaches_it() -> None:
    told = _gateway.gateway_plan("gw", fleet())
    assert told["models"] == ["flash"]
    assert [(server["name"], server["address"]) for server in told["servers"]] == [
        ("gpu1:gpu1:router", "192.0.2.11:30001"),
        ("gpu2:gpu2:router", "[2001:db8::2]:30001"),
    ]
    # 33 in flight and none queued by what 32 may wait for; 10 and 6 by hand: 256 x 16 / 33 = 124.1.
    assert [(server["takes"], server["weight"]) for server in told["servers"]] == [(33, 256), (16, 124)]
    # The router's 1800 s and 60 s in its queue, and one more.
    assert told["seconds"] == {"answer": 1861, "full": 2, "none": 10}


def test_seconds_come_from_the_figures_of_the_slowest_group() -> None:
    told = _gateway.gateway_plan("gw", fleet(gpu1={"plan_admission": ADMISSION}))
    # 11,000 / 3,300 = 3.33 s for the next place; floor(110 - 3.33) = 106 s in the queue and 1800 s of answer.
    assert told["seconds"] == {"answer": 1907, "full": 4, "none": 10}


def test_only_the_groups_that_are_named_are_behind_it() -> None:
    told = _gateway.gateway_plan("gw", fleet(), ["gpu2"])
    assert [server["group"] for server in told["servers"]] == ["gpu2"]
    assert refused("gw", fleet(), ["gpu3"]).found == "gateway_groups names gpu3"


def test_a_router_without_a_bound_makes_all_equal() -> None:
    unbound = [prefill(), decode(), router(host="::", args={"max-concurrent-requests": -1})]
    told = _gateway.gateway_plan("gw", fleet(gpu2={"plan_instances": unbound}))
    assert [(server["takes"], server["weight"]) for server in told["servers"]] == [(33, 1), (None, 1)]


def test_a_router_on_loopback_is_reached_from_its_own_host_only() -> None:
    local = {"plan_instances": [prefill(), decode(), router(host="127.0.0.1")]}
    assert refused("gw", fleet(gpu1=local)).code == "loopback"
    assert _gateway.gateway_plan("gpu1", fleet(gpu1=local))["servers"][0]["address"] == "127.0.0.1:30001"


@pytest.mark.parametrize(
    ("changes", "asked", "code"),
    [
        ({"gpu2": {"plan_model_path": "/srv/models/other"}}, [], "gateway_models"),
        ({"gpu2": {"plan_model_path": "/srv/models/other"}}, ["gpu1"], None),
        ({"gpu2": {"plan_instances": [prefill(), decode()]}}, [], "group_incomplete"),
        ({"gpu2": {"plan_instances": [prefill(), decode(port="x"), router()]}}, [], "type"),
        (
            {"gpu2": {"plan_instances": [prefill(group="a b"), decode(group="a b"), router(group="a b")]}},
            [],
            "gateway_name",
        ),
        ({"gpu1": {"plan_instances": [prefill(), decode(), router(name="gateway")]}}, [], "gateway_unit"),
    ],
)
def test_what_it_cannot_serve_is_refused(changes: dict[str, Any], asked: list[str], code: str | None) -> None:
    if code is None:
        assert _gateway.gateway_plan("gpu1", fleet(**changes), asked)["models"] == ["flash"]
    else:
        assert refused("gpu1", fleet(**changes), asked).code == code


@pytest.mark.parametrize(
    ("host", "ports", "found"),
    [
        ("gpu1", {"clients": 30001}, "port 30001 of gpu1 is asked for by the gateway (clients) and router (http)"),
        ("gpu1", {"metrics": 9101}, "port 9101 of gpu1 is asked for by the gateway (metrics) and gpu_exporter"),
        (
            "gw",
            {"clients": 80, "metrics": 80},
            "port 80 of gw is asked for by the gateway (clients) and the gateway (metrics)",
        ),
    ],
)
def test_each_port_has_one_owner(host: str, ports: dict[str, int], found: str) -> None:
    assert refused(host, fleet(), [], ports).found == found


def test_ports_of_other_hosts_are_free() -> None:
    assert len(_gateway.gateway_plan("gw", fleet(), [], {"clients": 30001})["servers"]) == 2


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=20))
def test_weights_are_in_proportion_and_such_as_haproxy_takes(takes: list[int]) -> None:
    found = _gateway.weights(takes)
    assert max(found) == 256
    for take, weight in zip(takes, found, strict=True):
        assert 1 <= weight <= 256
        assert weight == 1 or abs(weight - 256 * take / max(takes)) <= 0.5


@given(st.permutations(["gpu1", "gpu2"]))
def test_the_order_of_the_inventory_does_not_matter(order: list[str]) -> None:
    hosts = fleet()
    assert _gateway.gateway_plan("gw", {host: hosts[host] for host in order}) == _gateway.gateway_plan("gw", hosts)


def test_its_metrics_are_scraped_where_they_are_told() -> None:
    gateways = {
        "gw2": {"ansible_host": "2001:db8::7", "gateway_metrics_listen_address": "::", "gateway_metrics_port": "8500"},
        "mon": {},
    }
    assert _gateway.scrape_targets(gateways, "mon") == [
        {
            "job": "gateway",
            "targets": [
                {"address": "[2001:db8::7]:8500", "path": "/metrics", "labels": {"host": "gw2"}},
                {"address": "127.0.0.1:8405", "path": "/metrics", "labels": {"host": "mon"}},
            ],
        }
    ]
    assert _gateway.scrape_targets({}, "mon") == []
    with pytest.raises(RefusalError, match=r"the gateway on mon listens on 127\.0\.0\.1"):
        _gateway.scrape_targets(gateways, "other")


def test_the_defaults_are_those_of_the_role() -> None:
    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    assert {name: defaults[name] for name in _gateway.DEFAULTS} == _gateway.DEFAULTS


def test_what_a_fallback_answers_in_the_place_of_its_router_counts_as_ready() -> None:
    assert _gateway.gateway_plan("gw", fleet())["ready"] == [200]
    with_fallback = fleet(gpu2=variables(prefill(), decode(), router(), fallback()))
    told = _gateway.gateway_plan("gw", with_fallback)
    assert told["ready"] == [200, 401, 404]
    assert [server["name"] for server in told["servers"]] == ["gpu1:gpu1:router", "gpu2:gpu2:router"]
    assert _gateway.gateway_plan("gw", with_fallback, ["gpu1"])["ready"] == [200]
