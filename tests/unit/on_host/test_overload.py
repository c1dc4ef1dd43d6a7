# SPDX-License-Identifier: Apache-2.0
"""Figures and rules of the load, of made-up requests and samples."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from typing import Any

import overload
import pytest
from clients import Answer
from overload import Asked

ADMISSION = {
    "a": {
        "bounds": {"prefill": 32, "decode": 33, "unbounded": None},
        "routers": {"router": {"max-concurrent-requests": 4, "queue-size": 16}},
    }
}


def whole(due: float, number: int = 0, took: float = 2.0, text: str = " free in") -> Asked:
    return Asked(due, number, Answer(due + 0.5, due + took, "whole", status=200, first=due + 1.0, text=text))


def refused(due: float, took: float = 0.1, retry_after: str | None = "2", status: int = 429) -> Asked:
    detail = f"{status} full"
    return Asked(due, 99, Answer(due, due + took, "refused", detail, status=status, retry_after=retry_after))


def sample(at: float, queued: float = 3, memory: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"at": at, "queues": {"router queued": queued}, "load_average": 2.0}
    return found if memory is None else found | {"memory_mib": {"decode": memory}}


# --- requests -----------------------------------------------------------------------------------------------------


def test_a_half_of_the_prompts_is_of_the_fixed_set_and_no_other_comes_twice() -> None:
    prompts = overload.Prompts()
    numbers = [prompts.next() for _number in range(1000)]
    fixed = [number for number in numbers if number < overload.FIXED]
    others = [number for number in numbers if number >= overload.FIXED]
    assert 400 < len(fixed) < 600
    assert set(fixed) == set(range(overload.FIXED))
    assert others == list(range(overload.FIXED, overload.FIXED + len(others)))


def test_prompts_are_of_four_lengths_and_begin_each_otherwise() -> None:
    texts = [overload.prompt(number) for number in range(8)]
    assert [text.count("fox") for text in texts] == [1, 4, 16, 64, 1, 4, 16, 64]
    assert len({text.split()[0] for text in texts}) == 8


def test_tokens_of_an_answer_are_told_apart() -> None:
    assert overload.tokens(" GPU<|im_end|> in<|im_end|><|im_end|> a") == [
        "GPU",
        "<|im_end|>",
        "in",
        "<|im_end|>",
        "<|im_end|>",
        "a",
    ]


def test_requests_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered when 20 have arrived: a client that waited for the one before it would wait for ever."""
    together = threading.Barrier(20)
    told = threading.Event()
    count = itertools.count(1)

    def ask(_port: int, _prompt: str) -> Answer:
        began = time.monotonic()
        if next(count) == 20:
            told.set()
        together.wait(timeout=30)
        return Answer(began, time.monotonic(), "whole")

    monkeypatch.setattr(overload, "ask", ask)
    # No more than 20 arrive, however late this thread is told.
    monkeypatch.setattr(overload.random.Random, "expovariate", lambda _self, _rate: 0.01 if next(rate) < 20 else 60.0)
    rate = itertools.count()
    asked = overload.overload(1, 100.0, overload.Prompts(), told)
    assert len(asked) == 20
    assert all(one.answer.began >= one.due for one in asked)


def test_unloaded_answers_have_to_be_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = itertools.count()
    words = " ".join(["in"] * overload.TOKENS)
    monkeypatch.setattr(overload, "ask", lambda _port, _prompt: Answer(0, 1, "whole", text=words))
    assert len(overload.unloaded(1)) == overload.FIXED
    monkeypatch.setattr(
        overload, "ask", lambda _port, _prompt: Answer(0, 1, "whole", text=f"{next(drawn)} {words[3:]}")
    )
    with pytest.raises(SystemExit, match=r"prompt 0 .* twice the same"):
        overload.unloaded(1)
    monkeypatch.setattr(overload, "ask", lambda _port, _prompt: Answer(0, 1, "whole", text="in in"))
    with pytest.raises(SystemExit, match="expected 16 tokens"):
        overload.unloaded(1)


# --- figures --------------------------------------------------------------------------------------------------------


def test_bounds_are_those_of_the_plan() -> None:
    assert overload.bounds(ADMISSION) == {
        "prefill queued": 32,
        "decode queued": 33,
        "router in flight": 4,
        "router queued": 16,
    }
    assert overload.taken(ADMISSION) == 20


def test_queues_are_named_as_their_bounds() -> None:
    router = {"admission_inflight": 4.0, "admission_queue_depth": 2.0, "other": 1.0}
    prefill = {"num_prefill_bootstrap_queue_reqs": 2.0, "num_queue_reqs": 1.0, "num_running_reqs": 9.0}
    assert overload.queues("router", "router", router) == {"router in flight": 4.0, "router queued": 2.0}
    assert overload.queues("prefill", "prefill", prefill) == {"prefill queued": 3.0}
    assert overload.queues("decode", "decode", prefill) == {}


def test_times_count_from_when_a_request_was_due() -> None:
    asked = [whole(0.0, took=2.0), whole(1.0, took=4.0), refused(2.0, took=0.25), refused(3.0, retry_after=None)]
    asked.append(Asked(4.0, 1, Answer(4.0, 5.0, "broken", "IncompleteRead", status=200)))
    assert overload.of_requests(asked, 4.0) == {
        "seconds": 4.0,
        "requests": 5,
        "outcomes": {"broken": 1, "refused": 2, "whole": 2},
        "statuses": {"200": 3, "429": 2},
        "whole_per_s": 0.5,
        "whole_s": {"p50": 2.0, "p99": 2.0, "longest": 4.0},
        "first_token_s": {"p50": 1.0, "p99": 1.0, "longest": 1.0},
        "refused_s": {"p50": 0.1, "p99": 0.1, "longest": 0.25},
        "refused_retry_after": {"2": 1, "None": 1},
        "refused_with": ["429 full"],
        "lost_with": ["IncompleteRead"],
        "sent_late_s": {"p50": 0.0, "p99": 0.5, "longest": 0.5},
    }


def test_answers_of_the_fixed_set_are_compared_token_by_token() -> None:
    known = [whole(0, text=" free in").answer, whole(0, text=" full in").answer]
    asked = [whole(1, 0, text=" free in"), whole(2, 1, text=" full on"), whole(3, 7, text=" new"), refused(4)]
    assert overload.of_answers(asked, known) == {
        "compared": 2,
        "prompts": 2,
        "unequal": 1,
        "examples": [[1, " full in", " full on"]],
    }


def test_a_queue_is_as_long_as_the_most_that_was_seen() -> None:
    samples = [sample(0, 3), sample(2, 17), {"at": 4, "queues": {}, "load_average": 1.0}]
    assert overload.of_queues(samples, {"router queued": 16, "decode queued": 33}) == {
        "decode queued": {"bound": 33, "highest": 0, "samples": 0},
        "router queued": {"bound": 16, "highest": 17, "samples": 2},
    }


def test_memory_is_compared_by_thirds_after_the_warm_up() -> None:
    warm = overload.MEMORY_WARM_S
    samples = [sample(10.0 + at, memory=50.0) for at in range(0, warm, 10)]
    samples += [sample(10.0 + warm + at, memory=100.0 if at < 100 else 103.0) for at in range(0, 300, 10)]
    samples.append(sample(15.0 + warm))
    samples.append(sample(1000.0, memory=900.0))
    found = overload.of_memory(samples, 10.0, 10.0 + warm + 300)
    assert found == {"decode": {"first_mib": 100.0, "last_mib": 103.0, "ratio": 1.03}}
    assert overload.of_memory(samples[:3], 10.0, 10.0 + warm + 300) == {}


def test_the_timeline_has_a_row_for_every_ten_seconds() -> None:
    asked = [whole(100.0), refused(109.9), whole(125.0)]
    rows = overload.timeline(asked, [sample(101, 3), sample(103, 5, memory=7.0), sample(121, 1)], 100.0)
    told = [(row["s"], row["arrived"], row["whole"], row["refused"], row["queues"], row["memory_mib"]) for row in rows]
    assert told == [
        (0, 2, 1, 1, {"router queued": 5}, {"decode": 7.0}),
        (10, 0, 0, 0, {}, {}),
        (20, 1, 1, 0, {"router queued": 1}, {}),
    ]


# --- rules ------------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "load": {
        "outcomes": {"whole": 100, "refused": 90},
        "refused_s": {"p50": 0.1, "p99": 0.4, "longest": 2.0},
        "refused_retry_after": {"2": 90},
        "lost_with": [],
    },
    "answers": {"compared": 50, "prompts": 16, "unequal": 0, "examples": []},
    "queues": {"router queued": {"bound": 16, "highest": 16, "samples": 300}},
    "memory": {"decode": {"first_mib": 100.0, "last_mib": 105.0, "ratio": 1.05}},
    "units": {"before": {"decode": ("7", 0)}, "after": {"decode": ("7", 0)}},
    "after": {"idle": True, "outcome": "whole", "equal": True},
}


def test_a_good_run_breaks_no_rule() -> None:
    assert overload.broken_rules(GOOD, rollout=False) == []


@pytest.mark.parametrize(
    ("path", "value", "broken"),
    [
        (("load", "outcomes"), {"whole": 1}, "nothing was refused: this was no overload"),
        (("load", "outcomes"), {"refused": 1, "failed": 1, "broken": 2}, "3 accepted requests were lost: []"),
        (("load", "refused_s"), {"p99": 1.0}, "a refusal took {'p99': 1.0} s"),
        (
            ("load", "refused_retry_after"),
            {"2": 89, "None": 1},
            "1 of 90 refused requests have no Retry-After: {'2': 89, 'None': 1}",
        ),
        (("answers", "compared"), 0, "no answer could be compared"),
        (("answers", "unequal"), 1, "1 answers are not the unloaded ones: []"),
        (("queues", "router queued", "highest"), 17, "router queued: 17, bound 16"),
        (("queues", "router queued", "samples"), 0, "router queued: nothing was read"),
        (("memory", "decode", "ratio"), 1.06, "decode has grown from 100.0 to 105.0 MiB"),
        (("memory",), {}, "no memory was read in two thirds of the time after 60 s"),
        (("units", "after", "decode"), ("8", 0), "decode was replaced"),
        (("units", "after", "decode"), ("7", 1), "decode was restarted by itself"),
        (("after", "idle"), False, "requests are left 120 s after the last one was answered"),
        (("after", "equal"), False, "the next request: whole"),
    ],
)
def test_each_rule_can_be_broken(path: tuple[str, ...], value: object, broken: str) -> None:
    result = copy.deepcopy(GOOD)
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert overload.broken_rules(result, rollout=False) == [broken]


def test_a_rollout_replaces_every_server_and_leaves_the_gateway() -> None:
    units = {
        "before": {"decode": ("7", 1), "gateway": ("9", 0)},
        "after": {"decode": ("8", 0), "gateway": ("9", 0)},
    }
    # A server that was replaced has another memory.
    grown = {"decode": {"first_mib": 100.0, "last_mib": 0.0, "ratio": 0.0}}
    assert overload.broken_rules(GOOD | {"units": units, "memory": grown}, rollout=True) == []
    units["after"] = {"decode": ("7", 1), "gateway": ("10", 0)}
    assert overload.broken_rules(GOOD | {"units": units}, rollout=True) == [
        "decode was not replaced",
        "decode was restarted by itself",
        "gateway was replaced",
    ]
