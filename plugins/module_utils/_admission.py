# SPDX-License-Identifier: Apache-2.0
"""How many requests a PD group takes in, and for how long each part of it waits. PRIVATE to the collection.

Pure arithmetic over one group; ``_group_admission.py`` fills it from an inventory. What an operator set by hand is
never replaced: figures that depend on it are computed from it. ``docs/admission.md`` has the formulas with an example.

Symbols, of a PD group:

    rate      tokens/s that one prefill server computes, measured
    prompt    tokens of a prompt that are not cached
    ttft      seconds to the first token that are accepted
    decode    seconds that a request is then generated
    queues    of a server: each data-parallel rank has one, its own scheduler, and its part of the rate
    own       = prompt x queues / rate     seconds that a prompt is computed when nothing waits before it
    waiting   = (ttft - own) / own         requests that may wait for a scheduler, so that the last one is in time
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._size import parse_number

#: Requests that wait for a scheduler where no figures are given: a cap of 32 answered bursts of 20 prompts of 11,000
#: tokens at 3,300 tokens/s, for which clients had waited for minutes and given up.
DEFAULT_WAITING = 32
#: Seconds in the router's queue where no figures are given; the router's own default.
DEFAULT_QUEUE_TIMEOUT = 60
#: Seconds; the defaults of the engine and of the router.
ENGINE_TIMEOUT = 300
REQUEST_TIMEOUT = 1800

FIGURES = ("prefill_tokens_per_s", "prompt_tokens", "ttft_s")
KEYS = (*FIGURES, "decode_s", "allow")
#: What ``allow`` may name, and the router's flag that turns it off.
SAFEGUARDS: Mapping[str, str] = {"retries": "disable-retries", "circuit-breaker": "disable-circuit-breaker"}

BOUND = "max-queued-requests"
CAP = "max-concurrent-requests"
QUEUE = "queue-size"
QUEUE_TIMEOUT = "queue-timeout-secs"
REQUEST = "request-timeout-secs"
GATE = "prefill-max-inflight-requests-per-worker"
GATE_QUEUE = "prefill-queue-size"
OVERLOAD = "worker-overload-waiting-requests"
#: The router's numbers that this module reads, and what the router does where one is left out.
ROUTER_DEFAULTS: Mapping[str, int] = {
    CAP: -1,
    QUEUE: 100,
    QUEUE_TIMEOUT: DEFAULT_QUEUE_TIMEOUT,
    REQUEST: REQUEST_TIMEOUT,
    GATE: -1,
    GATE_QUEUE: 100,
    OVERLOAD: 8,
}
BOOTSTRAP = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
WAITING = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
TIMEOUT_VARIABLES = (BOOTSTRAP, WAITING)


@dataclass(frozen=True)
class Figures:
    """What the operator measured, and accepts. All above 0, ``decode_s`` may be 0."""

    prefill_tokens_per_s: Fraction
    prompt_tokens: Fraction
    ttft_s: Fraction
    decode_s: Fraction

    def own_s(self, queues: int) -> Fraction:
        """``prompt x queues / rate``: seconds that a prompt is computed by the scheduler of one of the ``queues``."""
        return self.prompt_tokens * queues / self.prefill_tokens_per_s

    def waiting(self, queues: int) -> int:
        """``floor((ttft - own) / own)``, at least 1: requests that may wait for a scheduler.

        The same as ``waiting x servers x queues x prompt / (rate x servers) <= ttft - own`` of the whole stage.
        Never 0: that would reject what arrives while one is computed.
        """
        own = self.own_s(queues)
        return max(1, math.floor((self.ttft_s - own) / own))

    def decoding(self, servers: int) -> int:
        """``floor(rate x servers / prompt x decode)``: requests that are being generated when prefill is busy."""
        return math.floor(self.prefill_tokens_per_s * servers / self.prompt_tokens * self.decode_s)


@dataclass(frozen=True)
class Demand:
    """``plan_admission``, parsed. ``figures`` is None where none are given."""

    figures: Figures | None = None
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """A prefill or decode server.

    ``bound``: requests that may wait for each of its schedulers, None for no bound; ``by_hand``: the operator said so.
    ``enforced``: the server heeds a bound at all. ``slots``: requests that run at once in all of it, None where the
    engine decides. ``timeout``: seconds, where the operator set the one that the server reads.
    """

    name: str
    bound: int | None = None
    by_hand: bool = False
    enforced: bool = True
    queues: int = 1
    slots: int | None = None
    timeout: int | None = None


@dataclass(frozen=True)
class Router:
    """A router and the flags among ``ROUTER_DEFAULTS`` that the operator set."""

    name: str
    flags: Mapping[str, int] = field(default_factory=dict)


def parse_demand(value: Any, what: str) -> Demand:
    """``{prefill_tokens_per_s, prompt_tokens, ttft_s[, decode_s][, allow]}`` or nothing. Raises RefusalError."""
    if value in (None, "", {}):
        return Demand()
    if not isinstance(value, Mapping) or set(value) - set(KEYS):
        raise RefusalError(
            "admission",
            f"{what} is {value!r}",
            f"a mapping with {', '.join(KEYS)}",
            f"correct {what}; what is set by hand is set as a flag, in args, plan_router_args or plan_environment",
        )
    allow = value.get("allow") or []
    if not isinstance(allow, Sequence) or isinstance(allow, str) or set(map(str, allow)) - set(SAFEGUARDS):
        raise RefusalError(
            "admission", f"{what}.allow is {allow!r}", f"a list of {', '.join(SAFEGUARDS)}", f"correct {what}.allow"
        )
    given = [name for name in (*FIGURES, "decode_s") if value.get(name) is not None]
    missing = [name for name in FIGURES if name not in given]
    if given and missing:
        raise RefusalError(
            "admission",
            f"{what} has {' and '.join(given)} without {' and '.join(missing)}",
            f"all of {', '.join(FIGURES)}, or none of them",
            "add what is missing: what a prefill server computes, measured, and what a client accepts",
        )
    return Demand(_figures(value, what) if given else None, tuple(sorted(map(str, allow))))


def _figures(value: Mapping[str, Any], what: str) -> Figures:
    numbers = {name: _positive(value[name], f"{what}.{name}") for name in FIGURES}
    figures = Figures(**numbers, decode_s=_positive(value.get("decode_s") or 0, f"{what}.decode_s", zero=True))
    own = figures.own_s(1)
    if figures.ttft_s <= own:
        raise RefusalError(
            "admission_ttft",
            f"{what}.ttft_s is {seconds(figures.ttft_s)}, and a prompt of {float(figures.prompt_tokens):g} tokens "
            f"alone is computed in {seconds(own)}",
            "more time to the first token than one prompt takes on an idle server",
            f"accept more than {seconds(own)}, or correct prompt_tokens or prefill_tokens_per_s",
        )
    return figures


def _positive(value: Any, what: str, zero: bool = False) -> Fraction:
    number = parse_number(value, what)
    if number < 0 or (number == 0 and not zero):
        expected = f"a number {'from 0 on' if zero else 'above 0'}"
        raise RefusalError("number", f"{what} is {value!r}", expected, f"correct {what}")
    return Fraction(str(number))


def seconds(value: Fraction | float) -> str:
    """Seconds for a person: ``3.3 s``, ``107 s``."""
    return f"{float(value):.0f} s" if value >= 10 else f"{float(value):.1f} s"


@dataclass(frozen=True)
class Admission:
    """What a PD group takes in; all numbers are requests or seconds.

    ``bounds``: by prefill server, requests that may wait for each of its schedulers. ``taken``: what prefill takes at
    once, waiting and computed. ``decoding``: what has left prefill and is being generated. ``slots``: what decode runs
    at once, None where the engine decides. ``in_flight`` and ``queued``: of all routers together. ``decode_bound``: of
    each scheduler of a decode server. ``gate``: requests that one router may have at one prefill server, None for no
    gate.
    """

    demand: Demand
    prefill: tuple[Server, ...]
    decode: tuple[Server, ...]
    routers: tuple[Router, ...]
    bounds: Mapping[str, int]
    taken: int
    decoding: int
    slots: int | None
    in_flight: int
    queued: int
    decode_bound: int
    gate: int | None
    queue_timeout: int
    engine_timeout: int
    request_timeout: int

    @property
    def accepted(self) -> int:
        return self.taken + self.decoding

    def engine_bound(self, server: Server, role: str) -> int | None:
        """``max-queued-requests`` of a server; None where it is set by hand, or would not be heeded."""
        if server.by_hand or not server.enforced:
            return None
        return self.bounds[server.name] if role == "prefill" else self.decode_bound

    def router_flags(self) -> dict[str, int]:
        """The flags of each router, before the operator's: an equal part of the group's, and at least one request."""
        share = len(self.routers) or 1
        found = {
            CAP: max(1, self.in_flight // share),
            QUEUE: self.queued // share,
            QUEUE_TIMEOUT: self.queue_timeout,
            REQUEST: self.request_timeout,
        }
        if self.gate is not None:
            found |= {GATE: self.gate, GATE_QUEUE: 0}
        return found

    def flags_of(self, router: Router) -> dict[str, int]:
        """The same with the operator's in front."""
        return self.router_flags() | dict(router.flags)

    def timeout_of(self, server: Server) -> int:
        return self.engine_timeout if server.timeout is None else server.timeout


def admit(demand: Demand, prefill: Sequence[Server], decode: Sequence[Server], routers: Sequence[Router]) -> Admission:
    """The admission of a group with these members, of which there is at least one of each.

    prefill bound N    by hand, else ``waiting`` of the figures, else 32; for each scheduler
    taken              sum over schedulers of N + 1: those that wait, and one that is computed
    decoding           ``floor(rate x servers / prompt x decode)``, at most the slots of decode; 0 without decode_s
    in flight          min(taken + decoding, slots + schedulers of prefill): decode's slots, and one in each prefill
    queued             taken + decoding - in flight: what decode has no slot for yet waits in the router
    decode bound       the largest of what may be in flight, and of one more than prefill may queue: prefill decides
    gate               N + 1 of each scheduler of a prefill server, the least of them, where decoding is above 0 or
                       there is more than one: only then may a router send a prefill server more than it takes
    queue timeout      floor(ttft - own), at least 1, else 60: who waited that long is late even on an idle server
    engine timeouts    max(300, 2 x ttft): a request that is in time is never taken for one whose peer has died
    request timeout    max(1800, 2 x engine timeout): it covers the whole answer, a stream included

    Each router has an equal part of what is in flight, queued and at one prefill.
    """
    figures = demand.figures
    # A server without a bound, or that heeds none, is counted with the one that it should have.
    bounds = {
        server.name: server.bound
        if server.by_hand and server.bound is not None
        else (figures.waiting(server.queues) if figures else DEFAULT_WAITING)
        for server in prefill
    }
    takes = [(bounds[server.name] + 1) * server.queues for server in prefill]
    known = [server.slots for server in decode if server.slots is not None]
    slots = sum(known) if len(known) == len(decode) else None
    decoding = figures.decoding(len(prefill)) if figures else 0
    if slots is not None:
        decoding = min(decoding, slots)
    accepted = sum(takes) + decoding
    in_flight = accepted if slots is None else min(accepted, slots + sum(server.queues for server in prefill))
    by_hand = sum(max(0, router.flags.get(CAP, 0)) for router in routers)
    own = figures.own_s(max(server.queues for server in prefill)) if figures else Fraction(0)
    engine_timeout = max(ENGINE_TIMEOUT, 2 * math.ceil(figures.ttft_s)) if figures else ENGINE_TIMEOUT
    return Admission(
        demand=demand,
        prefill=tuple(prefill),
        decode=tuple(decode),
        routers=tuple(routers),
        bounds=bounds,
        taken=sum(takes),
        decoding=decoding,
        slots=slots,
        in_flight=in_flight,
        queued=accepted - in_flight,
        decode_bound=max(accepted, by_hand, sum(bounds[server.name] * server.queues for server in prefill) + 1),
        gate=max(1, min(takes) // (len(routers) or 1)) if decoding or len(prefill) > 1 else None,
        queue_timeout=max(1, math.floor(figures.ttft_s - own)) if figures else DEFAULT_QUEUE_TIMEOUT,
        engine_timeout=engine_timeout,
        request_timeout=max(REQUEST_TIMEOUT, 2 * engine_timeout),
    )


# -------------------------------------------------------------------------------------------------- what is wrong, told

_Timeout = tuple[int, str, bool]


def check_timeouts(group: str, admission: Admission) -> list[RefusalError]:
    """Router's request timeout > waiting timeout of decode >= bootstrap timeout of prefill > router's queue timeout.

    Each part gives up before the one that waits for it, so that who waits is told why. The waiting timeout also covers
    the time that prefill queues and computes, so it has to be longer than the accepted time to the first token.
    """
    requests, queues = (
        [
            (admission.flags_of(router)[flag], f"{flag} of {router.name}", flag in router.flags)
            for router in admission.routers
        ]
        for flag in (REQUEST, QUEUE_TIMEOUT)
    )
    waiting, bootstrap = (
        [(admission.timeout_of(server), f"{name} of {server.name}", server.timeout is not None) for server in servers]
        for name, servers in ((WAITING, admission.decode), (BOOTSTRAP, admission.prefill))
    )
    refused = []
    for longer, shorter, strict in ((requests, waiting, True), (waiting, bootstrap, False), (bootstrap, queues, True)):
        low, high = min(longer), max(shorter)
        if low[0] < high[0] or (strict and low[0] == high[0]):
            refused.append(
                RefusalError(
                    "timeout_order",
                    f"{_told(low)} and {_told(high)} in group {group}",
                    f"{low[1]} {'above' if strict else 'not below'} {high[1]}: client > router's request timeout > "
                    "waiting >= bootstrap > router's queue timeout",
                    _cure(low, high),
                )
            )
    figures, shortest = admission.demand.figures, min(waiting)
    if figures and shortest[0] <= figures.ttft_s:
        refused.append(
            RefusalError(
                "timeout_ttft",
                f"{_told(shortest)} in group {group}, and ttft_s of plan_admission is {seconds(figures.ttft_s)}",
                f"{shortest[1]} above ttft_s: it also counts what prefill queues and computes",
                f"raise {shortest[1]}, or leave it out",
            )
        )
    return refused


def _told(timeout: _Timeout) -> str:
    return f"{timeout[1]} is {timeout[0]}{'' if timeout[2] else ' (the default)'}"


def _cure(low: _Timeout, high: _Timeout) -> str:
    if not low[2]:
        return f"raise {low[1]} as well, or lower {high[1]}"
    return f"raise {low[1]}, or " + (f"lower {high[1]}" if high[2] else "leave it out")


def check_safeguards(group: str, admission: Admission, asked: Mapping[str, Sequence[str]]) -> list[RefusalError]:
    """Retries or circuit breakers in a group with one prefill or one decode. ``asked``: router -> what it turns on."""
    stages = (("prefill", admission.prefill), ("decode", admission.decode))
    single = [role for role, servers in stages if len(servers) == 1]
    return [
        RefusalError(
            "router_safeguard",
            f"{router} has {SAFEGUARDS[name]} off, and group {group} has one {' and one '.join(single)}",
            f"{SAFEGUARDS[name]}: a retry goes to the same full server, and each attempt counts as a failure of both "
            "stages: two rejected requests open both breakers, and every client is locked out for a minute",
            f"remove {SAFEGUARDS[name]} from the router's flags, or name it: plan_admission: {{allow: [{name}]}}",
        )
        for router, names in sorted(asked.items())
        for name in names
        if single and name not in admission.demand.allow
    ]


def warnings(group: str, admission: Admission) -> list[str]:
    """What is allowed and unwise in the figures of a group, or set by hand against them."""
    return [*_server_warnings(group, admission), *_router_warnings(group, admission)]


def _server_warnings(group: str, admission: Admission) -> list[str]:
    found = []
    figures = admission.demand.figures
    queued = sum(admission.bounds[server.name] * server.queues for server in admission.prefill)
    for server in admission.prefill:
        bound = admission.bounds[server.name]
        last = (bound + 1) * figures.own_s(server.queues) if figures else Fraction(0)
        if server.by_hand and server.bound is None:
            found.append(f"{server.name}: {BOUND} is left out by hand, so its queue is not bounded")
        elif figures and last > figures.ttft_s:
            found.append(
                f"{server.name}: with {BOUND} {bound} the last request that it takes waits {seconds(last)} for its "
                f"first token, and ttft_s is {seconds(figures.ttft_s)}"
            )
    for server in admission.decode:
        if server.by_hand and server.enforced and server.bound is not None and server.bound * server.queues <= queued:
            found.append(
                f"{server.name}: {BOUND} is {server.bound}, not more than the {queued} of the prefill servers of group "
                f"{group}: in a burst both stages reject, each other requests, and fewer are served than could be; let "
                "prefill decide, and give decode room for what prefill queues, computes and transfers"
            )
    return found


def _router_warnings(group: str, admission: Admission) -> list[str]:
    flags = {router.name: admission.flags_of(router) for router in admission.routers}
    unbounded = [name for name, told in flags.items() if told[CAP] <= 0]
    if unbounded:
        return [
            f"{' and '.join(unbounded)}: {CAP} bounds nothing, so a burst reaches the servers of group {group}; what "
            "they reject has no Retry-After"
        ]
    gated = all(told.get(GATE, -1) > 0 for told in flags.values())
    total = sum(told[CAP] for told in flags.values())
    if admission.slots is not None and total < admission.slots and not any(CAP in r.flags for r in admission.routers):
        return [
            f"group {group}: its routers let in {total} requests at once, and decode has {admission.slots} slots; give "
            "plan_admission the figures of a request, decode_s among them, or set " + CAP
        ]
    if total <= admission.accepted or gated:
        return []
    return [
        f"group {group}: {CAP} of its routers lets in {total} requests, and prefill takes {admission.taken} at once; "
        "the rest of a burst gets 503 of a server, without Retry-After, instead of 429 with it"
    ]


# ------------------------------------------------------------------------------------------------------------- as data


def describe(admission: Admission) -> dict[str, Any]:
    """The admission as data; shape in ``docs/admission.md``."""
    flags = {router.name: admission.flags_of(router) for router in admission.routers}
    figures = admission.demand.figures
    stages = (("prefill", admission.prefill), ("decode", admission.decode))
    return {
        "figures": {name: float(getattr(figures, name)) for name in (*FIGURES, "decode_s")} if figures else None,
        "allow": list(admission.demand.allow),
        "bounds": {
            server.name: server.bound if server.by_hand else admission.engine_bound(server, role)
            for role, servers in stages
            for server in servers
        },
        "routers": flags,
        "timeouts": {
            "client": max(told[REQUEST] + told[QUEUE_TIMEOUT] for told in flags.values()) + 1,
            "request": min(told[REQUEST] for told in flags.values()),
            "waiting": min(admission.timeout_of(server) for server in admission.decode),
            "bootstrap": max(admission.timeout_of(server) for server in admission.prefill),
            "queue": max(told[QUEUE_TIMEOUT] for told in flags.values()),
        },
        "steps": _steps(admission),
    }


def _steps(admission: Admission) -> list[dict[str, Any]]:
    """The arithmetic in order: ``{what, value, how}``."""
    steps = [_bound_step(admission, server) for server in admission.prefill]

    def step(what: str, value: int, how: str) -> None:
        steps.append({"what": what, "value": value, "how": how})

    step("taken by prefill", admission.taken, "those that wait and one that is computed, for each scheduler")
    figures = admission.demand.figures
    if figures:
        rate = float(len(admission.prefill) * figures.prefill_tokens_per_s / figures.prompt_tokens)
        how = f"{rate:.3g} requests/s x {seconds(figures.decode_s)} each, at most the slots of decode"
        step("being generated", admission.decoding, how)
    slots = "decides itself" if admission.slots is None else f"has {admission.slots} slots"
    step("in flight", admission.in_flight, f"of {admission.accepted} accepted; decode {slots}, and one in each prefill")
    step("queued by routers", admission.queued, "accepted, and decode has no slot for them yet")
    step("waiting for decode", admission.decode_bound, "all that may be in flight: prefill decides")
    if admission.gate is not None:
        step("at one prefill", admission.gate, "what it takes, by way of one router, which might send it more")
    return steps


def _bound_step(admission: Admission, server: Server) -> dict[str, Any]:
    figures = admission.demand.figures
    if server.by_hand and server.bound is not None:
        how = f"{BOUND}, by hand"
    elif figures:
        own = figures.own_s(server.queues)
        how = f"({seconds(figures.ttft_s)} accepted - {seconds(own)} own prefill) / {seconds(own)} each, at least 1"
    else:
        how = "no figures in plan_admission: the default"
    if server.queues > 1:
        how += f", for each of {server.queues} queues"
    if not server.enforced or (server.by_hand and server.bound is None):
        how += "; counted with, and not enforced by the server"
    return {"what": f"waiting for {server.name}", "value": admission.bounds[server.name], "how": how}


def table(admission: Mapping[str, Mapping[str, Any]]) -> str:
    """``plan.admission`` for a person: the arithmetic of each group, the flags it gives, and the timeouts in order."""
    lines = []
    for group, told in admission.items():
        width = max(len(step["what"]) for step in told["steps"])
        lines.append(f"group {group}")
        lines += [f"  {step['what']:<{width}}  {step['value']:>5}  {step['how']}" for step in told["steps"]]
        for name, flags in told["routers"].items():
            lines.append(f"  {name}: {', '.join(f'{flag} {value}' for flag, value in sorted(flags.items()))}")
        times = told["timeouts"]
        lines.append(
            f"  seconds: client {times['client']} or more > request {times['request']} > waiting {times['waiting']} >= "
            f"bootstrap {times['bootstrap']} > queue {times['queue']}"
        )
    return "\n".join(lines)
