# SPDX-License-Identifier: Apache-2.0
"""``--max-queued-requests`` enforced on prefill and decode servers.

The engine looks at its bound only outside prefill/decode disaggregation. With the feature on and a bound N
(``--max-queued-requests``), each scheduler (every data-parallel rank has one) admits a request when, as it arrives:

prefill
    ``bootstrap + waiting + 1 <= N``
    (gauges ``num_prefill_bootstrap_queue_reqs`` and ``num_queue_reqs``). A request that is being computed or
    transferred (in flight) does not count: it never comes back to a queue.

decode
    ``prealloc + waiting + 1 <= N`` and ``prealloc + waiting + coming + 1 <= N + free``
    (gauges ``num_decode_prealloc_queue_reqs`` and ``num_queue_reqs``). ``coming`` are the requests that will still
    enter the waiting queue: in transfer (prefill queues or computes them), retracted, or held until a pause ends.
    ``free = max(0, --max-running-requests - running)`` are the slots that take that many of them at once. The second
    condition keeps the waiting queue within N when everything in transfer arrives together.

So no gauge above and no sum of a stage's two exceeds N, with one exception: a request that was let in is never turned
away again, so a retracted request of a model that computes its KV anew (DeepSeek V4) passes the prealloc queue of
decode and the bootstrap queue of prefill on top of N, and so does an optimistic prefill that is taken back. Health
checks and warm-up requests are let in without being asked, by their id or their made-up bootstrap host; the engine
itself drops health checks while it is busy.

Two full stages choose for themselves, and of a burst that reaches both at once they may choose different requests, of
which none is served. So decode is best given the larger bound, and prefill decides: at least what prefill may queue,
compute and transfer together.

With ``--enable-priority-scheduling`` the worst queued request, the newest of equals, is evicted for a strictly better
one, as outside disaggregation: on prefill out of either queue, on decode out of the prealloc queue only, since what
lies behind has KV that prefill computed. Retracted requests are never evicted.

What a client sees is in ``_admission_http.py``, what becomes of the twin on the other stage in ``_admission_twins.py``.
Counted by ``llmfleet_admission_accepted_total`` and ``llmfleet_admission_rejected_total`` (label ``stage``); an evicted
request counts as rejected and its place as accepted once, so the two sum up to the requests asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llmfleet_plugin._admission_http import add_middleware, watch
from llmfleet_plugin._admission_queues import ENGINES, RECOMPUTE, Admission
from llmfleet_plugin._admission_twins import Twins, add_route
from llmfleet_plugin._feature import Context, Feature
from llmfleet_plugin._hooks import Hooks

SCHEDULER_STARTS = "sglang.srt.managers.scheduler.Scheduler.init_disaggregation"
#: Called for every request on its way to a queue, in every mode; False turns it away.
REQUEST_ARRIVES = "sglang.srt.managers.scheduler.Scheduler._set_or_validate_priority"
RECOMPUTE_ASKED = "sglang.srt.managers.schedule_batch.Req.build_rebootstrap_payload"
REQUEST_ANSWERED = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
BOOTSTRAP_STARTS = "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes"
SERVER_STARTS = "fastapi.applications.FastAPI.build_middleware_stack"

_TARGETS = {
    SCHEDULER_STARTS: "(self)",
    REQUEST_ARRIVES: "(self, req)",
    RECOMPUTE_ASKED: "(self)",
    REQUEST_ANSWERED: "(self, obj, request=)",
    BOOTSTRAP_STARTS: "(self)",
    SERVER_STARTS: "(self)",
}


def install(context: Context, hooks: Hooks) -> dict[str, Any]:
    # Also hooked where no bound is set: SGLang loads plugins before it reads its flags, and a flag may stand in a file
    # (--config). The engine imports all of it by itself, but for the tokenizer manager in a scheduler (0.1 s of 30).
    engine = ENGINES[context.version]
    twins = Twins(_default_port if context.version == "0.5.23" else _default_port_0_5_16)

    def start(_result: None, scheduler: Any) -> None:
        bounded = scheduler.max_queued_requests is not None and scheduler.disaggregation_mode.value != "null"
        scheduler.llmfleet_admission = Admission(engine, scheduler) if bounded else None

    def arrive(original: Callable[[Any, Any], bool], scheduler: Any, req: Any) -> bool:
        if not original(scheduler, req):
            return False
        admission: Admission | None = scheduler.llmfleet_admission
        return admission is None or admission.admits(req)

    def ask_recompute(payload: dict[str, Any], _req: Any) -> dict[str, Any]:
        return {**payload, "rid": RECOMPUTE + payload["rid"]}

    def serve(_result: None, bootstrap_server: Any) -> None:
        add_route(twins, bootstrap_server)

    hooks.after(SCHEDULER_STARTS, start)
    hooks.around(REQUEST_ARRIVES, arrive)
    hooks.after(RECOMPUTE_ASKED, ask_recompute)
    hooks.around(REQUEST_ANSWERED, partial(watch, twins))
    hooks.after(BOOTSTRAP_STARTS, serve)
    hooks.around(SERVER_STARTS, add_middleware)
    return {}


def _default_port(_manager: Any) -> int:
    from sglang.srt.runtime_context import get_disagg

    return int(get_disagg().disaggregation_bootstrap_port)


def _default_port_0_5_16(manager: Any) -> int:
    return int(manager.server_args.disaggregation_bootstrap_port)


FEATURE = Feature(
    name="queue_bound",
    variable="LLMFLEET_QUEUE_BOUND",
    values=("on",),
    hooks={"0.5.16": _TARGETS, "0.5.23": _TARGETS},
    install=install,
)
