# SPDX-License-Identifier: Apache-2.0
"""The queue bound without an engine: the rule, the door of a scheduler, the twins, and what a client is answered."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmfleet_plugin import _admission_queues, queue_bound
from llmfleet_plugin._admission import OUTRANKED, QUEUE_FULL, Load, Verdict, decide
from llmfleet_plugin._admission_http import SCOPE_KEY, RejectionMiddleware, watch
from llmfleet_plugin._admission_queues import ORDER, Admission, Engine
from llmfleet_plugin._admission_twins import REMEMBERED_S, Pair, Rooms, Twins
from llmfleet_plugin._feature import VERSIONS, Context, FeatureError

# The rule


@given(
    bound=st.integers(0, 5),
    slots=st.integers(1, 5),
    events=st.lists(st.sampled_from(["arrive", "allocate", "transferred", "finish", "retract", "resume"]), max_size=80),
)
def test_decode_queues_never_exceed_the_bound(bound: int, slots: int, events: list[str]) -> None:
    # Requests by where they are; an event moves one, and waiting ones start as soon as a slot is free.
    at = dict.fromkeys(["prealloc", "transfer", "waiting", "running", "retracted"], 0)
    moves = {
        "allocate": ("prealloc", "transfer"),
        "transferred": ("transfer", "waiting"),
        "retract": ("running", "retracted"),
        "resume": ("retracted", "waiting"),
    }
    for event in events:
        if event == "arrive":
            coming = at["transfer"] + at["retracted"]
            load = Load(at["prealloc"] + at["waiting"], coming, free=slots - at["running"])
            at["prealloc"] += decide(load, bound).accepted
        elif event == "finish":
            at["running"] -= at["running"] > 0
        else:
            source, target = moves[event]
            moved = at[source] > 0
            at[source] -= moved
            at[target] += moved
        started = min(at["waiting"], slots - at["running"])
        at["waiting"] -= started
        at["running"] += started
        assert at["prealloc"] + at["waiting"] <= bound


@given(bound=st.integers(0, 5), arrivals=st.lists(st.booleans(), max_size=40))
def test_prefill_queues_fill_up_to_the_bound_and_no_further(bound: int, arrivals: list[bool]) -> None:
    queued = 0
    for arrives in arrivals:
        if arrives:
            accepted = decide(Load(queued), bound).accepted
            assert accepted == (queued < bound)
            queued += accepted
        else:
            queued -= queued > 0


@given(
    bound=st.integers(1, 4),
    over=st.integers(0, 2),
    rank=st.integers(-3, 3),
    ranks=st.lists(st.integers(-3, 3), max_size=6),
)
def test_only_the_worst_is_evicted_for_a_strictly_better_one(
    bound: int, over: int, rank: int, ranks: list[int]
) -> None:
    candidates = [(each, order) for order, each in enumerate(ranks)]
    verdict = decide(Load(bound + over), bound, rank, candidates)
    if over or not ranks or rank >= max(ranks):
        assert verdict == Verdict(accepted=False)  # one eviction does not make room, or nobody is worse
    else:
        assert verdict.accepted
        assert verdict.evicted == max(order for order, each in enumerate(ranks) if each == max(ranks))


def test_nobody_is_evicted_while_there_is_room() -> None:
    assert decide(Load(1), 2, rank=0, candidates=[(9, 1)]) == Verdict(accepted=True)


def test_free_slots_hold_what_is_in_transfer() -> None:
    assert decide(Load(queued=0, coming=5, free=4), bound=2).accepted
    assert not decide(Load(queued=0, coming=6, free=4), bound=2).accepted
    assert not decide(Load(queued=2, coming=0, free=9), bound=2).accepted


# The door of a scheduler


class End:
    """Of a transfer, on either side."""

    def __init__(self, room: int) -> None:
        self.bootstrap_room = room
        self.kv_mgr = SimpleNamespace(failure_lock=threading.Lock(), failure_records={room: "Aborted by AbortReq."})
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")

    def clear(self) -> None:
        self.calls.append("clear")


def request(room: int = 1, **changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "rid": f"request-{room}",
            "bootstrap_host": "192.0.2.1",
            "bootstrap_room": room,
            "priority": None,
            "is_retracted": False,
            "output_ids": [],
            "time_stats": SimpleNamespace(trace_ctx=SimpleNamespace(abort=lambda **_why: None)),
            **changes,
        }
    )


def scheduler(mode: str, bound: int | None = 2, **settings: Any) -> Any:
    fixed = {"pp_size": 1, "tokenizer_worker_num": 1, "enable_metrics": False}
    manager = SimpleNamespace(transfer_infos={}, req_to_decode_prefix_len={}, request_status={})
    return SimpleNamespace(
        server_args=SimpleNamespace(**fixed | settings),
        disaggregation_mode=SimpleNamespace(value=mode),
        max_queued_requests=bound,
        max_running_requests=4,
        running_batch=SimpleNamespace(reqs=[]),
        waiting_queue=[],
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[], kv_manager=manager),
        disagg_decode_prealloc_queue=SimpleNamespace(
            queue=[], pending_reqs=[], retracted_queue=[], held_rebootstrap_reqs=[]
        ),
        disagg_decode_transfer_queue=SimpleNamespace(queue=[]),
    )


class Door:
    """An Admission on a stand-in scheduler, and what it did."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.answered: list[tuple[str, int, str]] = []
        self.forgotten: list[str] = []
        engine = Engine(
            ranks=lambda _scheduler: SimpleNamespace(attn_tp_rank=0),
            abort=lambda _scheduler, req, why: self.answered.append((req.rid, why["status_code"], why["message"])),
            forget=lambda _scheduler, req: self.forgotten.append(req.rid),
            leave_waiting=lambda _scheduler, _req: None,
        )
        self.admission = Admission(engine, scheduler)

    def arrive(self, req: Any) -> bool:
        """As the engine does: what is let in joins the queue of its stage."""
        if not self.admission.admits(req):
            return False
        if self.admission.stage == "prefill":
            self.scheduler.disagg_prefill_bootstrap_queue.queue.append(req)
        else:
            entry = SimpleNamespace(req=req, is_rebootstrap=False, kv_receiver=End(req.bootstrap_room))
            self.scheduler.disagg_decode_prealloc_queue.queue.append(entry)
            self.scheduler.disagg_decode_prealloc_queue.pending_reqs.append(entry)
        return True


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_full_queue_answers_503_in_the_engines_words(mode: str) -> None:
    door = Door(scheduler(mode))
    assert [door.arrive(request(room)) for room in range(4)] == [True, True, False, False]
    assert door.answered == [("request-2", 503, QUEUE_FULL), ("request-3", 503, QUEUE_FULL)]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_waiting_queue_counts_with_the_first_one(mode: str) -> None:
    door = Door(scheduler(mode))
    door.scheduler.waiting_queue = [request(8)]
    assert [door.arrive(request(room)) for room in range(2)] == [True, False]


@pytest.mark.parametrize(
    "exempt",
    [
        request(rid="HEALTH_CHECK_17"),
        request(bootstrap_host="2.2.2.2"),
        request(rid="llmfleet-recompute-request-1"),
        request(**{ORDER: 3}),
    ],
    ids=["health check", "warm-up", "KV of a retracted request computed again", "let in before"],
)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_exempt_requests_pass_a_full_queue(mode: str, exempt: Any) -> None:
    door = Door(scheduler(mode, bound=0))
    assert not door.arrive(request(5))
    assert door.arrive(exempt)


def test_a_better_request_takes_the_place_of_the_worst_queued_one() -> None:
    door = Door(scheduler("decode"))
    door.scheduler.enable_priority_scheduling = True
    assert door.arrive(request(1, priority=1))
    assert door.arrive(request(2, priority=1))
    victim = door.scheduler.disagg_decode_prealloc_queue.queue[1]
    assert not door.arrive(request(3, priority=1))  # not strictly better
    assert door.arrive(request(4, priority=2))
    assert door.answered == [("request-3", 503, QUEUE_FULL), ("request-2", 503, OUTRANKED)]
    assert door.forgotten == ["request-2"]
    assert victim.kv_receiver.calls == ["clear"]
    assert victim.kv_receiver.kv_mgr.failure_records == {}
    prealloc = door.scheduler.disagg_decode_prealloc_queue
    for entries in (prealloc.queue, prealloc.pending_reqs):
        assert [entry.req.rid for entry in entries] == ["request-1", "request-4"]


def test_smaller_numbers_are_better_where_the_engine_says_so() -> None:
    door = Door(scheduler("decode", bound=1))
    door.scheduler.enable_priority_scheduling = door.scheduler.schedule_low_priority_values_first = True
    assert door.arrive(request(1, priority=5))
    assert not door.arrive(request(2, priority=6))
    assert door.arrive(request(3, priority=4))


def test_a_retracted_request_is_not_evicted() -> None:
    door = Door(scheduler("decode", bound=1))
    door.scheduler.enable_priority_scheduling = True
    assert door.arrive(request(1, priority=1))
    door.scheduler.disagg_decode_prealloc_queue.queue[0].is_rebootstrap = True
    assert not door.arrive(request(2, priority=9))


def test_rooms_of_rejected_requests_are_dropped_once_nothing_comes_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(_admission_queues, "time", SimpleNamespace(monotonic=lambda: now))
    door = Door(scheduler("prefill", bound=0))
    manager = door.scheduler.disagg_prefill_bootstrap_queue.kv_manager
    for room in (1, 2):
        door.arrive(request(room))
        manager.transfer_infos[room] = manager.request_status[room] = "from decode"
    now += _admission_queues.ROOM_FORGOTTEN_S - 1
    door.arrive(request(2))  # in use again
    assert set(manager.transfer_infos) == {1, 2}
    now += 2
    door.arrive(request(3))
    assert set(manager.transfer_infos) == set(manager.request_status) == {2}


@pytest.mark.parametrize("settings", [{"pp_size": 2}, {"tokenizer_worker_num": 2}])
def test_settings_that_cannot_be_bounded_are_refused_at_start(settings: dict[str, int]) -> None:
    with pytest.raises(FeatureError, match="expected 1 and 1"):
        Door(scheduler("prefill", **settings))


def installed(version: str) -> dict[str, Callable[..., Any]]:
    """The hooks by their targets."""
    hooked: dict[str, Callable[..., Any]] = {}

    class Recorder:
        def around(self, target: str, hook: Callable[..., Any]) -> None:
            hooked[target] = hook

        after = around

    queue_bound.install(Context(version), Recorder())  # type: ignore[arg-type]
    return hooked


@pytest.mark.parametrize("version", VERSIONS)
def test_every_target_of_the_table_is_hooked(version: str) -> None:
    assert set(installed(version)) == set(queue_bound.FEATURE.hooks[version])


@pytest.mark.parametrize(("mode", "bound"), [("null", 0), ("prefill", None), ("decode", None)])
def test_without_a_bound_or_disaggregation_the_engine_decides_alone(mode: str, bound: int | None) -> None:
    hooks = installed("0.5.16")
    engine = scheduler(mode, bound, pp_size=2)
    hooks[queue_bound.SCHEDULER_STARTS](None, engine)
    for says in (True, False):
        assert hooks[queue_bound.REQUEST_ARRIVES](lambda _engine, _req, says=says: says, engine, request()) is says


def test_what_the_engine_turns_away_itself_is_not_counted() -> None:
    hooks = installed("0.5.16")
    engine = scheduler("prefill", bound=1)
    engine.ps = SimpleNamespace(attn_tp_rank=0)
    hooks[queue_bound.SCHEDULER_STARTS](None, engine)
    assert hooks[queue_bound.REQUEST_ARRIVES](lambda _engine, _req: False, engine, request(1)) is False
    assert engine.llmfleet_admission.admitted == 0
    assert hooks[queue_bound.REQUEST_ARRIVES](lambda _engine, _req: True, engine, request(1)) is True
    assert engine.llmfleet_admission.admitted == 1


# The twins


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pair(*rooms: int) -> Pair:
    return Pair(rooms, "192.0.2.1:8998", abort=lambda: None)


def test_a_waiting_twin_is_found() -> None:
    rooms = Rooms(Clock())
    twin, other = pair(1, 2), pair(3)
    rooms.enter(twin)
    rooms.enter(other)
    assert rooms.told([1, 2]) == [twin]
    assert rooms.told([1, 2]) == []  # it is being dropped already
    assert (twin.rejected_by_twin, other.rejected_by_twin) == (True, False)


def test_a_twin_that_comes_later_is_refused_once() -> None:
    rooms = Rooms(Clock())
    rooms.told([1])
    first, again = pair(1), pair(1)
    rooms.enter(first)
    rooms.enter(again)
    assert (first.rejected_by_twin, again.rejected_by_twin) == (True, False)


def test_the_word_about_a_rejection_is_forgotten() -> None:
    clock = Clock()
    rooms = Rooms(clock)
    rejected, late = pair(1), pair(2)
    rooms.reject(rejected)
    rooms.told([2])
    assert rooms.rejected_of([1, 2]) == [1]
    clock.now = REMEMBERED_S + 1
    rooms.enter(late)
    assert rooms.rejected_of([1]) == []
    assert not late.rejected_by_twin
    rooms.reject(pair(3))
    assert set(rooms.rejected_here) == {3}  # and takes no memory any more


def test_a_room_used_again_is_a_new_request() -> None:
    rooms = Rooms(Clock())
    first = pair(1)
    rooms.enter(first)
    rooms.reject(first)
    rooms.leave(first)
    rooms.enter(pair(1))
    assert rooms.rejected_of([1]) == []


def test_a_request_that_both_stages_rejected_leaves_nothing_behind() -> None:
    rooms = Rooms(Clock())
    first, again = pair(1), pair(1)
    rooms.enter(first)
    rooms.reject(first)
    rooms.leave(first)
    rooms.told([1])
    rooms.enter(again)
    assert not again.rejected_by_twin


def test_a_pair_that_left_is_not_found() -> None:
    rooms = Rooms(Clock())
    gone = pair(1)
    rooms.enter(gone)
    rooms.leave(gone)
    assert rooms.told([1]) == []


# What a client is answered

STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream; x")]}


def answer(app: Callable[[Any, Any, Any], Any]) -> list[dict[str, Any]]:
    """What reaches the client of an application behind the middleware."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(RejectionMiddleware(app)({"type": "http"}, None, send))  # type: ignore[arg-type]
    return sent


def body(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def test_a_stream_that_is_rejected_by_its_first_event_is_answered_503() -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send(STREAM)
        scope[SCOPE_KEY].message = QUEUE_FULL
        await send(body("data: aborted\n\n"))
        await send(body("data: [DONE]\n\n", more=False))

    start, content = answer(app)
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"2")
    assert json.loads(content["body"]) == {
        "object": "error",
        "message": QUEUE_FULL,
        "type": "503",
        "param": None,
        "code": 503,
    }
    assert not content.get("more_body")


def test_a_stream_that_is_refused_by_an_exception_is_answered_503() -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send(STREAM)
        scope[SCOPE_KEY].message = QUEUE_FULL
        raise RuntimeError("no handler may answer any more")

    assert answer(app)[0]["status"] == 503


def test_other_exceptions_are_left_to_the_engine() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(STREAM)
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        answer(app)


def test_an_accepted_stream_passes_unchanged() -> None:
    messages = [STREAM, body("data: 1\n\n"), body("", more=False)]

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    assert answer(app) == messages


def test_an_eviction_after_the_first_event_stays_in_the_stream() -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send(STREAM)
        await send(body("data: 1\n\n"))
        scope[SCOPE_KEY].message = OUTRANKED
        await send(body("data: aborted\n\n", more=False))

    assert [message.get("status") for message in answer(app)] == [200, None, None]


@pytest.mark.parametrize(
    ("status", "message", "expected"), [(503, QUEUE_FULL, b"2"), (503, None, None), (200, None, None)]
)
def test_retry_after_is_on_rejections_only(status: int, message: str | None, expected: bytes | None) -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        scope[SCOPE_KEY].message = message
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
        await send(body("", more=False))

    assert dict(answer(app)[0]["headers"]).get(b"retry-after") == expected


class RefusedError(Exception):
    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(detail)
        self.status_code = status_code
        self.detail = detail


def aborted(message: str) -> dict[str, Any]:
    return {"meta_info": {"finish_reason": {"type": "abort", "status_code": 503, "message": message}}}


OUTPUT = {"text": "page", "meta_info": {"finish_reason": {"type": "length"}}}


class Server:
    """A tokenizer manager of prefill that answers with ``outputs``, an exception among them being raised."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs
        self.disaggregation_mode = SimpleNamespace(value="prefill")
        self.twins = Twins(lambda _manager: 8998)
        self.aborted: list[str] = []
        self.before: Callable[[], Any] = lambda: None

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    async def generate(self, _manager: Any, _obj: Any, _request: Any) -> AsyncIterator[Any]:
        self.before()
        for output in self.outputs:
            if isinstance(output, Exception):
                raise output
            yield output

    def serve(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, list[Any], int | None]:
        """The rejection noted, the outputs, and the status of the exception that ended them."""
        monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=RefusedError))
        obj = SimpleNamespace(
            **{
                "rid": "a",
                "stream": False,
                "is_single": True,
                "bootstrap_host": "192.0.2.1",
                "bootstrap_port": None,
                "bootstrap_room": 7,
                **changes,
            }
        )
        rejection = SimpleNamespace(message=None)
        found: list[Any] = []

        async def consume() -> int | None:
            web = SimpleNamespace(scope={SCOPE_KEY: rejection})
            try:
                async for output in watch(self.twins, self.generate, self, obj, web):
                    found.append(output)
            except RefusedError as error:
                return error.status_code
            return None

        status = asyncio.run(consume())
        return rejection.message, found, status


def test_a_rejection_is_noted_and_its_room_kept_for_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(RefusedError(503, QUEUE_FULL))
    assert server.serve(monkeypatch) == (QUEUE_FULL, [], 503)
    assert server.twins.rooms.rejected_of([7]) == [7]
    assert server.twins.rooms.present == {}


def test_a_streamed_rejection_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(aborted(QUEUE_FULL))
    assert server.serve(monkeypatch, stream=True) == (QUEUE_FULL, [aborted(QUEUE_FULL)], None)
    assert server.twins.rooms.rejected_of([7]) == [7]


def test_the_rest_of_a_batch_goes_with_the_one_that_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(RefusedError(503, QUEUE_FULL))
    server.serve(monkeypatch, is_single=False, rid=["a", "b"], bootstrap_room=[7, 8])
    assert server.aborted == ["a", "b"]
    assert server.twins.rooms.rejected_of([7, 8]) == [7, 8]


@pytest.mark.parametrize("ending", [aborted("Aborted by AbortReq."), RefusedError(500, "Prefill bootstrap failed")])
def test_the_abort_of_a_twin_is_answered_as_a_rejection(monkeypatch: pytest.MonkeyPatch, ending: Any) -> None:
    server = Server(ending)
    server.before = lambda: server.twins.rooms.told([7])
    assert server.serve(monkeypatch) == (QUEUE_FULL, [], 503)
    assert server.twins.rooms.rejected_of([7]) == []  # decode knows


def test_a_twin_that_comes_later_does_not_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(OUTPUT)
    server.twins.told([7])
    assert server.serve(monkeypatch) == (QUEUE_FULL, [], 503)
    assert server.twins.rooms.present == {}
    assert server.serve(monkeypatch) == (None, [OUTPUT], None)


@pytest.mark.parametrize(
    "changes", [{"bootstrap_host": "2.2.2.2"}, {"bootstrap_room": None}], ids=["warm-up", "not disaggregated"]
)
def test_requests_without_a_twin_leave_no_trace(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    server = Server(RefusedError(503, QUEUE_FULL))
    assert server.serve(monkeypatch, **changes)[2] == 503
    assert server.twins.rooms.rejected_of([7]) == []


def test_other_errors_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(RefusedError(500, "Internal server error"))
    noted, _found, status = server.serve(monkeypatch)
    assert (noted, status) == (None, 500)
    assert server.twins.rooms.rejected_of([7]) == []
