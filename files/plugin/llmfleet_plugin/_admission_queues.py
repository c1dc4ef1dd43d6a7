# SPDX-License-Identifier: Apache-2.0
"""The rule of ``queue_bound`` in a scheduler: what its queues hold, how a request is turned away or evicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

from llmfleet_plugin._admission import OUTRANKED, QUEUE_FULL, Load, decide
from llmfleet_plugin._feature import FeatureError
from llmfleet_plugin._ranks import ranks

#: What the engine puts before the id of a request that only looks whether it is alive.
HEALTH_CHECK = "HEALTH_CHECK"
#: What the plugin puts before the id of a request by which decode has prefill compute the KV of a retracted one again.
RECOMPUTE = "llmfleet-recompute-"
#: Where the engine's warm-up and health requests say that the KV comes from.
FAKE_HOST = "2.2.2.2"
#: Seconds after which no message about the room of a rejected request is on its way any more.
ROOM_FORGOTTEN_S = 60.0

#: Set on every request that was let in, to the order in which it was.
ORDER = "llmfleet_admission"


@dataclass(frozen=True)
class Engine:
    """What differs between versions. ``ranks(scheduler)`` has the ``attn_tp_rank``; ``abort(scheduler, req, reason)``
    answers the client; ``forget(scheduler, req)`` drops what caches keep for a request that was never computed;
    ``leave_waiting(scheduler, req)`` gives back what a request holds that has left prefill's waiting queue."""

    ranks: Callable[[Any], Any]
    abort: Callable[[Any, Any, Mapping[str, Any]], None]
    forget: Callable[[Any, Any], None]
    leave_waiting: Callable[[Any, Any], None]


def _abort_request(req: Any, reason: Mapping[str, Any]) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=req.rid, finished_reason=reason)


def _forget_0_5_23(scheduler: Any, req: Any) -> None:
    scheduler._release_aborted_request(req)
    scheduler.beam_coordinator.retire_group(req)


def _forget_0_5_16(scheduler: Any, req: Any) -> None:
    if scheduler.enable_hicache_storage:
        scheduler.tree_cache.release_aborted_request(req.rid)
    elif scheduler.enable_hierarchical_cache:
        scheduler.tree_cache.terminate_prefetch(req.rid)


def _leave_waiting_0_5_16(scheduler: Any, req: Any) -> None:
    from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer
    from sglang.srt.mem_cache.common import release_kv_cache

    maybe_release_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)
    req.disagg_kv_sender.abort()
    if req.mamba_pool_idx is not None:
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)


ENGINES: Mapping[str, Engine] = {
    "0.5.16": Engine(
        ranks=partial(ranks, "0.5.16"),
        abort=lambda scheduler, req, reason: scheduler.ipc_channels.send_to_tokenizer.send_output(
            _abort_request(req, reason), req
        ),
        forget=_forget_0_5_16,
        leave_waiting=_leave_waiting_0_5_16,
    ),
    "0.5.23": Engine(
        ranks=partial(ranks, "0.5.23"),
        abort=lambda scheduler, req, reason: scheduler.send_abort_output(_abort_request(req, reason), req),
        forget=_forget_0_5_23,
        leave_waiting=lambda scheduler, req: scheduler.release_aborted_prefill_waiting_req(req),
    ),
}


class Admission:
    """The door of one scheduler. Every rank of a tensor-parallel group decides for itself and alike: requests reach
    all of them in one order, and what leaves a queue is agreed between them in every iteration."""

    def __init__(self, engine: Engine, scheduler: Any) -> None:
        settings = scheduler.server_args
        if settings.pp_size > 1 or settings.tokenizer_worker_num > 1:
            raise FeatureError(
                f"--max-queued-requests is set with --pp-size {settings.pp_size} and --tokenizer-worker-num "
                f"{settings.tokenizer_worker_num}; expected 1 and 1, since pipeline stages see the queues at different "
                "times and only one tokenizer knows all requests; set both to 1, or leave --max-queued-requests out"
            )
        self.engine = engine
        self.scheduler = scheduler
        self.bound: int = scheduler.max_queued_requests
        self.admitted = 0
        #: Room -> when it was rejected here, oldest first.
        self.rejected_rooms: dict[int, float] = {}
        place = engine.ranks(scheduler)
        counts = settings.enable_metrics and place.attn_tp_rank == 0 and getattr(place, "attn_cp_rank", 0) == 0
        self.accepted_total: Any = None
        self.rejected_total: Any = None
        if counts:
            self.accepted_total, self.rejected_total = _counters()
            for counter in (self.accepted_total, self.rejected_total):
                counter.labels(self.stage)

    @property
    def stage(self) -> str:
        """``prefill`` or ``decode``."""
        return str(self.scheduler.disaggregation_mode.value)

    def admits(self, req: Any) -> bool:
        """Let the request in, or answer its client. Evicts a worse one if that is what makes room."""
        if hasattr(req, ORDER) or _exempt(req):
            return True  # was let in before it was retracted, or asks nothing of the queues
        self._forget_rooms(req.bootstrap_room)
        candidates = list(self._candidates()) if self.scheduler.enable_priority_scheduling else []
        verdict = decide(
            self._load(),
            self.bound,
            self._rank(req) if candidates else 0,
            [(self._rank(candidate), getattr(candidate, ORDER)) for candidate, _leave in candidates],
        )
        if verdict.evicted is not None:
            victim, leave = candidates[verdict.evicted]
            leave()
            self.engine.forget(self.scheduler, victim)
            self._turn_away(victim, OUTRANKED)
        elif not verdict.accepted:
            self._turn_away(req, QUEUE_FULL)
        elif self.accepted_total is not None:
            self.accepted_total.labels(self.stage).inc()
        if verdict.accepted:
            self.admitted += 1
            setattr(req, ORDER, self.admitted)
        return verdict.accepted

    def _load(self) -> Load:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting_queue)
        if self.stage == "prefill":
            return Load(queued=len(scheduler.disagg_prefill_bootstrap_queue.queue) + waiting)
        prealloc = scheduler.disagg_decode_prealloc_queue
        return Load(
            queued=len(prealloc.queue) + waiting,
            coming=len(scheduler.disagg_decode_transfer_queue.queue)
            + len(prealloc.retracted_queue)
            + len(prealloc.held_rebootstrap_reqs),
            free=max(0, scheduler.max_running_requests - len(scheduler.running_batch.reqs)),
        )

    def _rank(self, req: Any) -> int:
        return int(req.priority if self.scheduler.schedule_low_priority_values_first else -req.priority)

    def _candidates(self) -> Iterator[tuple[Any, Callable[[], None]]]:
        """The requests that may be evicted, each with the function that takes it out of its queue: those for which
        nothing has been computed yet. On decode that is the prealloc queue only; behind it lies KV from prefill."""
        if self.stage == "prefill":
            for req in self.scheduler.disagg_prefill_bootstrap_queue.queue:
                if _evictable(req):
                    yield req, lambda req=req: self._leave_bootstrap(req)  # type: ignore[misc]
            for req in self.scheduler.waiting_queue:
                if _evictable(req):
                    yield req, lambda req=req: self._leave_waiting(req)  # type: ignore[misc]
        else:
            for entry in self.scheduler.disagg_decode_prealloc_queue.queue:
                if not entry.is_rebootstrap and _evictable(entry.req):
                    yield entry.req, lambda entry=entry: self._leave_prealloc(entry)  # type: ignore[misc]

    def _leave_bootstrap(self, req: Any) -> None:
        from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer

        bootstrap = self.scheduler.disagg_prefill_bootstrap_queue
        bootstrap.queue = [other for other in bootstrap.queue if other is not req]
        maybe_release_metadata_buffer(req, self.scheduler.req_to_metadata_buffer_idx_allocator)
        _close(req.disagg_kv_sender)

    def _leave_waiting(self, req: Any) -> None:
        self.scheduler.waiting_queue = [other for other in self.scheduler.waiting_queue if other is not req]
        self.engine.leave_waiting(self.scheduler, req)
        _close(req.disagg_kv_sender)

    def _leave_prealloc(self, entry: Any) -> None:
        prealloc = self.scheduler.disagg_decode_prealloc_queue
        prealloc.queue = [other for other in prealloc.queue if other is not entry]
        prealloc.pending_reqs = [other for other in prealloc.pending_reqs if other is not entry]
        # Not aborted: that would tell prefill of a failure, and its half of the request is to be answered with 503 too.
        _close(entry.kv_receiver)

    def _turn_away(self, req: Any, message: str) -> None:
        self.engine.abort(self.scheduler, req, {"type": "abort", "status_code": 503, "message": message})
        req.time_stats.trace_ctx.abort(abort_info={"reason": message})
        if self.stage == "prefill":
            self.rejected_rooms[req.bootstrap_room] = time.monotonic()
        if self.rejected_total is not None:
            self.rejected_total.labels(self.stage).inc()

    def _forget_rooms(self, arriving: int) -> None:
        """Drop what decode has told this rank of rooms that were rejected here: the engine keeps it until the room's
        sender is cleared, and a rejected request never has one. ``arriving`` is in use again."""
        self.rejected_rooms.pop(arriving, None)
        due = time.monotonic() - ROOM_FORGOTTEN_S
        for room, _since in list(takewhile(lambda item: item[1] <= due, self.rejected_rooms.items())):
            del self.rejected_rooms[room]
            manager = self.scheduler.disagg_prefill_bootstrap_queue.kv_manager
            for table in ("transfer_infos", "req_to_decode_prefix_len", "request_status"):
                getattr(manager, table, {}).pop(room, None)


def _exempt(req: Any) -> bool:
    return bool(req.bootstrap_host == FAKE_HOST or req.rid.startswith((HEALTH_CHECK, RECOMPUTE)))


def _evictable(req: Any) -> bool:
    return hasattr(req, ORDER) and not req.is_retracted and not req.output_ids


def _close(end: Any) -> None:
    """Forget the room of a sender or receiver that nothing was transferred through."""
    end.clear()
    with end.kv_mgr.failure_lock:
        end.kv_mgr.failure_records.pop(end.bootstrap_room, None)


@cache
def _counters() -> tuple[Any, Any]:
    """In the registry that the engine's ``/metrics`` collects (multiprocess files)."""
    from prometheus_client import Counter

    return (
        Counter("llmfleet_admission_accepted", "Requests let into the bounded queues.", ["stage"]),
        Counter("llmfleet_admission_rejected", "Requests turned away from or evicted out of them.", ["stage"]),
    )
