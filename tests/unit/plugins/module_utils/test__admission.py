# SPDX-License-Identifier: Apache-2.0
"""How many requests a PD group takes in: the worked example, what is refused, and what holds for all figures."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _admission
from ansible_collections.llmfleet.sglang.plugins.module_utils._admission import (
    Admission,
    Demand,
    Figures,
    Router,
    Server,
    admit,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st

# 20 requests with 220,000 tokens, at 3,300 tokens/s.
REFERENCE = {"prefill_tokens_per_s": 3300, "prompt_tokens": 11000, "ttft_s": 110}
PREFILL, DECODE, ROUTER = Server("prefill"), Server("decode", slots=64), Router("router")


def admission(
    demand: dict[str, Any] | None = None,
    prefill: tuple[Server, ...] = (PREFILL,),
    decode: tuple[Server, ...] = (DECODE,),
    routers: tuple[Router, ...] = (ROUTER,),
) -> Admission:
    return admit(_admission.parse_demand(demand, "plan_admission"), prefill, decode, routers)


def codes(refused: list[RefusalError]) -> list[str]:
    return [error.code for error in refused]


# ---------------------------------------------------------------------------------------------------------- the example


def test_the_worked_example() -> None:
    found = admission(REFERENCE)
    # (110 s - 11,000 / 3,300 s) x 3,300 / 11,000 = 32 requests, of 107 s.
    assert found.bounds == {"prefill": 32}
    assert (found.taken, found.in_flight, found.queued) == (33, 33, 0)
    assert found.decode_bound == 33
    assert found.gate is None
    assert found.queue_timeout == 106
    assert found.router_flags() == {
        "max-concurrent-requests": 33,
        "queue-size": 0,
        "queue-timeout-secs": 106,
        "request-timeout-secs": 1800,
    }


def test_requests_that_are_generated_let_others_in_behind_a_gate() -> None:
    found = admission(REFERENCE | {"decode_s": 60})
    # 0.3 requests/s x 60 s.
    assert found.decoding == 18
    assert found.in_flight == found.decode_bound == 51
    assert found.router_flags()["prefill-max-inflight-requests-per-worker"] == 33
    assert found.router_flags()["prefill-queue-size"] == 0


def test_what_decode_has_no_slot_for_waits_in_the_router() -> None:
    found = admission(REFERENCE, decode=(Server("decode", slots=8),))
    # Eight that are generated and one that prefill computes.
    assert (found.in_flight, found.queued) == (9, 24)


def test_without_figures_32_may_wait() -> None:
    found = admission()
    assert found.bounds == {"prefill": 32}
    assert (found.in_flight, found.queue_timeout, found.engine_timeout) == (33, 60, 300)


def test_a_bound_by_hand_wins_and_the_rest_follows_it() -> None:
    found = admission(REFERENCE, prefill=(Server("prefill", bound=7, by_hand=True),))
    assert found.in_flight == 8
    assert found.engine_bound(found.prefill[0], "prefill") is None
    assert found.engine_bound(DECODE, "decode") == 8


def test_a_server_that_heeds_no_bound_gets_none_and_is_counted() -> None:
    found = admission(prefill=(replace(PREFILL, enforced=False),))
    assert found.engine_bound(found.prefill[0], "prefill") is None
    assert found.in_flight == 33
    assert "not enforced" in _admission.describe(found)["steps"][0]["how"]


def test_each_data_parallel_rank_has_a_queue_and_its_part_of_the_rate() -> None:
    found = admission(REFERENCE, prefill=(Server("prefill", queues=4),))
    # A rank computes a prompt in 13.3 s, so 7 wait for it: four ranks take 32 where one took 33.
    assert found.bounds == {"prefill": 7}
    assert found.taken == 32


def test_routers_share() -> None:
    found = admission(REFERENCE, routers=(Router("a"), Router("b")))
    assert found.router_flags()["max-concurrent-requests"] == 16


def test_timeouts_follow_a_long_time_to_the_first_token() -> None:
    found = admission(REFERENCE | {"ttft_s": 1200})
    assert (found.engine_timeout, found.request_timeout) == (2400, 4800)


def test_numbers_of_a_table() -> None:
    text = _admission.table({"pd0": _admission.describe(admission(REFERENCE))})
    assert text.splitlines()[:2] == [
        "group pd0",
        "  waiting for prefill     32  (110 s accepted - 3.3 s own prefill) / 3.3 s each, at least 1",
    ]
    assert text.splitlines()[-1] == (
        "  seconds: client 1907 or more > request 1800 > waiting 300 >= bootstrap 300 > queue 106"
    )


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("value", "code", "told"),
    [
        ({"tokens": 1}, "admission", "prefill_tokens_per_s"),
        ([], "admission", "a mapping"),
        ({"prefill_tokens_per_s": 1}, "admission", "prompt_tokens and ttft_s"),
        ({"decode_s": 1}, "admission", "prefill_tokens_per_s and prompt_tokens and ttft_s"),
        (REFERENCE | {"ttft_s": 0}, "number", "ttft_s"),
        (REFERENCE | {"ttft_s": "soon"}, "number", "'soon'"),
        (REFERENCE | {"prompt_tokens": -1}, "number", "prompt_tokens"),
        (REFERENCE | {"decode_s": -1}, "number", "decode_s"),
        (REFERENCE | {"ttft_s": 3}, "admission_ttft", "11000 tokens alone is computed in 3.3 s"),
        ({"allow": "retries"}, "admission", "circuit-breaker"),
        ({"allow": ["retry"]}, "admission", "circuit-breaker"),
    ],
)
def test_a_demand_that_is_none_is_refused(value: Any, code: str, told: str) -> None:
    if value == []:
        assert _admission.parse_demand({}, "plan_admission") == Demand()
        value = ["x"]
    with pytest.raises(RefusalError) as refused:
        _admission.parse_demand(value, "plan_admission")
    assert refused.value.code == code
    assert told in f"{refused.value.found}, {refused.value.expected}"


def test_the_defaults_are_in_order() -> None:
    assert _admission.check_timeouts("pd0", admission()) == []
    assert _admission.check_timeouts("pd0", admission(REFERENCE | {"ttft_s": 5000})) == []


def test_a_bootstrap_timeout_above_the_routers_is_refused() -> None:
    found = admission(
        prefill=(replace(PREFILL, timeout=600),),
        decode=(replace(DECODE, timeout=600),),
        routers=(Router("router", {"request-timeout-secs": 300}),),
    )
    (refused,) = _admission.check_timeouts("pd0", found)
    assert refused.code == "timeout_order"
    assert refused.found == (
        "request-timeout-secs of router is 300 and SGLANG_DISAGGREGATION_WAITING_TIMEOUT of decode is 600 in group pd0"
    )
    assert refused.cure == (
        "raise request-timeout-secs of router, or lower SGLANG_DISAGGREGATION_WAITING_TIMEOUT of decode"
    )


@pytest.mark.parametrize(
    ("bootstrap", "waiting", "whole", "queue", "low"),
    [
        (600, None, None, None, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT of decode is 300 (the default)"),
        (None, 200, None, None, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT of decode is 200"),
        (None, None, 300, None, "request-timeout-secs of router is 300"),
        (None, None, None, 300, "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT of prefill is 300 (the default)"),
        (60, None, None, None, "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT of prefill is 60"),
        (400, 400, 401, 399, None),
        (61, 61, 62, None, None),
    ],
)
def test_timeouts_are_in_order(
    bootstrap: int | None, waiting: int | None, whole: int | None, queue: int | None, low: str | None
) -> None:
    numbers = {"request-timeout-secs": whole, "queue-timeout-secs": queue}
    router = Router("router", {name: value for name, value in numbers.items() if value is not None})
    found = admission(None, (replace(PREFILL, timeout=bootstrap),), (replace(DECODE, timeout=waiting),), (router,))
    refused = _admission.check_timeouts("pd0", found)
    assert codes(refused) == ([] if low is None else ["timeout_order"])
    if low is not None:
        assert refused[0].found.startswith(low)


def test_a_waiting_timeout_below_the_accepted_time_is_refused() -> None:
    found = admission(REFERENCE, (replace(PREFILL, timeout=107),), (replace(DECODE, timeout=108),))
    assert codes(_admission.check_timeouts("pd0", found)) == ["timeout_ttft"]


@pytest.mark.parametrize(
    ("prefill", "decode", "allow", "refused"),
    [
        (1, 1, [], ["router_safeguard"] * 2),
        (2, 1, [], ["router_safeguard"] * 2),
        (1, 2, ["retries"], ["router_safeguard"]),
        (1, 1, ["retries", "circuit-breaker"], []),
        (2, 2, [], []),
    ],
)
def test_retries_and_breakers_need_two_of_each(prefill: int, decode: int, allow: list[str], refused: list[str]) -> None:
    found = admission(
        {"allow": allow},
        tuple(Server(f"p{number}") for number in range(prefill)),
        tuple(Server(f"d{number}") for number in range(decode)),
    )
    assert codes(_admission.check_safeguards("pd0", found, {"router": ["retries", "circuit-breaker"]})) == refused


# ------------------------------------------------------------------------------------------------------------- warnings


def test_a_bound_that_breaks_the_accepted_time_is_warned_about() -> None:
    found = admission(REFERENCE, prefill=(Server("prefill", bound=64, by_hand=True),), decode=(Server("decode"),))
    assert ["the last request that it takes waits 217 s" in text for text in _admission.warnings("pd0", found)] == [
        True
    ]


def test_a_cap_above_what_prefill_takes_is_warned_about() -> None:
    found = admission(routers=(Router("router", {"max-concurrent-requests": 64, "queue-size": 32}),))
    assert ["takes 33 at once" in text for text in _admission.warnings("pd0", found)] == [True]
    assert found.decode_bound == 64


@pytest.mark.parametrize("cap", [0, -1])
def test_a_router_without_a_cap_is_warned_about(cap: int) -> None:
    found = admission(routers=(Router("router", {"max-concurrent-requests": cap}),))
    assert ["bounds nothing" in text for text in _admission.warnings("pd0", found)] == [True]


def test_slots_that_stay_empty_are_warned_about() -> None:
    assert ["has 64 slots" in text for text in _admission.warnings("pd0", admission())] == [True]
    assert _admission.warnings("pd0", admission(REFERENCE | {"decode_s": 240})) == []


# ------------------------------------------------------------------------------------------- what holds for all figures


def figures() -> st.SearchStrategy[Figures]:
    def build(own: Fraction, prompt: int, times: Fraction, decode: int) -> Figures:
        return Figures(Fraction(prompt) / own, Fraction(prompt), own * times, Fraction(decode))

    return st.builds(
        build,
        st.fractions(Fraction(1, 1000), 1000, max_denominator=1000),
        st.integers(1, 10**6),
        st.fractions(Fraction(101, 100), 500, max_denominator=100),
        st.integers(0, 10**4),
    )


def servers(role: str) -> st.SearchStrategy[tuple[Server, ...]]:
    bound = st.none() | st.integers(1, 500)
    made = st.builds(
        lambda bound, queues, slots: Server(role, bound, bound is not None, True, queues, slots),
        bound if role == "prefill" else st.none(),
        st.integers(1, 8),
        st.none() | st.integers(1, 512),
    )
    return st.lists(made, min_size=1, max_size=4).map(
        lambda found: tuple(replace(server, name=f"{role}{number}") for number, server in enumerate(found))
    )


GROUPS = (
    servers("prefill"),
    servers("decode"),
    st.integers(1, 4).map(lambda n: tuple(Router(f"r{i}") for i in range(n))),
)


@given(figures(), *GROUPS)
def test_routers_let_in_no_more_than_the_stages_take(
    demand: Figures, prefill: tuple[Server, ...], decode: tuple[Server, ...], routers: tuple[Router, ...]
) -> None:
    found = admit(Demand(demand), prefill, decode, routers)
    flags = found.router_flags()
    total = flags["max-concurrent-requests"] * len(routers)
    takes = {server.name: (found.bounds[server.name] + 1) * server.queues for server in prefill}
    assert total <= max(found.in_flight, len(routers))
    # In flight and queued together are what prefill takes, and what has left it.
    assert total + flags["queue-size"] * len(routers) <= max(sum(takes.values()) + found.decoding, len(routers))
    if found.decoding or len(prefill) > 1:
        # More may be sent to a server than it takes, so each router stops before.
        assert flags["prefill-max-inflight-requests-per-worker"] * len(routers) <= max(
            min(takes.values()), len(routers)
        )
    # No decode server ever rejects: even all that is in flight may wait for one of its schedulers.
    assert found.decode_bound >= found.in_flight
    assert found.decode_bound > sum(found.bounds[server.name] * server.queues for server in prefill)
    if found.slots is not None:
        assert found.decoding <= found.slots


@given(figures(), *GROUPS)
def test_nothing_is_ever_bounded_by_0(
    demand: Figures, prefill: tuple[Server, ...], decode: tuple[Server, ...], routers: tuple[Router, ...]
) -> None:
    found = admit(Demand(demand), prefill, decode, routers)
    flags = found.router_flags()
    assert min(*found.bounds.values(), found.decode_bound, flags["max-concurrent-requests"]) >= 1
    assert flags["queue-size"] >= 0
    assert flags.get("prefill-max-inflight-requests-per-worker", 1) >= 1
    assert flags["queue-timeout-secs"] >= 1


@given(figures(), st.integers(1, 8))
def test_the_last_that_waits_is_in_time(demand: Figures, queues: int) -> None:
    own, waiting = demand.own_s(queues), demand.waiting(queues)
    # One that waits may be late where not even one more than the own prompt is accepted.
    assert (waiting + 1) * own <= demand.ttft_s or waiting == 1
    assert (waiting + 2) * own > demand.ttft_s


@given(figures(), *GROUPS, st.fractions(1, 10, max_denominator=100))
def test_faster_or_more_patient_takes_no_less(
    demand: Figures,
    prefill: tuple[Server, ...],
    decode: tuple[Server, ...],
    routers: tuple[Router, ...],
    factor: Fraction,
) -> None:
    base = admit(Demand(demand), prefill, decode, routers)
    for better in (
        replace(demand, prefill_tokens_per_s=demand.prefill_tokens_per_s * factor),
        replace(demand, ttft_s=demand.ttft_s * factor),
        replace(demand, prompt_tokens=demand.prompt_tokens / factor),
    ):
        found = admit(Demand(better), prefill, decode, routers)
        assert all(found.bounds[name] >= bound for name, bound in base.bounds.items())
        assert found.accepted >= base.accepted
        assert found.in_flight >= base.in_flight


@given(figures(), *GROUPS)
def test_computed_timeouts_are_in_order_and_longer_than_the_accepted_time(
    demand: Figures, prefill: tuple[Server, ...], decode: tuple[Server, ...], routers: tuple[Router, ...]
) -> None:
    found = admit(Demand(demand), prefill, decode, routers)
    assert _admission.check_timeouts("pd0", found) == []
    assert found.engine_timeout > demand.ttft_s
