# SPDX-License-Identifier: Apache-2.0
"""Send many requests at once to a prefill/decode pair whose queues are bounded, and watch what becomes of them.

    python burst.py --prefill URL --decode URL --bootstrap-port PORT [--router URL] --requests 30 --bound 2

Without ``--router`` the pair is sent by this program, both halves at once, as a router would. Prints JSON; exit status
1 and the broken rules in it (``broken``) unless all of these hold:

- no bounded gauge of a stage, and no sum of its two, was ever above the bound;
- every request was either served or rejected with 503, the rejected ones before anything was streamed, with
  ``Retry-After`` (a router may drop that header) and within ``--within`` seconds;
- the other half of a rejected pair was gone within ``--within`` seconds;
- each engine counted a request at most once, and no more failed transfers than there were such halves;
- /health answered 200 throughout, and every gauge was 0 again at the end;
- exactly the stages named by ``--rejecting`` rejected anything, and something was served where only one of them did
  (two full stages choose for themselves, and may choose different requests).

Standard library only: it runs on a host with any Python from 3.11.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

FULL = "The request queue is full."
OUTRANKED = "The request is aborted by a higher priority request."
BOUNDED = {
    "prefill": ("num_prefill_bootstrap_queue_reqs", "num_queue_reqs"),
    "decode": ("num_decode_prealloc_queue_reqs", "num_queue_reqs"),
}
IDLE = {
    "prefill": (*BOUNDED["prefill"], "num_prefill_inflight_queue_reqs", "num_running_reqs"),
    "decode": (*BOUNDED["decode"], "num_decode_transfer_queue_reqs", "num_running_reqs"),
}
LOADS = {"prefill": "prefill_bootstrap_queue_reqs", "decode": "decode_prealloc_queue_reqs"}
COUNTED = {
    "llmfleet_admission_accepted_total": "accepted",
    "llmfleet_admission_rejected_total": "rejected",
    "sglang:num_bootstrap_failed_reqs_total": "bootstrap_failed",
    "sglang:num_transfer_failed_reqs_total": "transfer_failed",
}
SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
Metrics = dict[str, dict[str, float]]


@contextmanager
def connected(url: str, timeout: float) -> Iterator[tuple[http.client.HTTPConnection, str]]:
    """A connection to the server of ``url``, and the path in it."""
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.netloc, timeout=timeout)
    try:
        yield connection, parts.path or "/"
    finally:
        connection.close()


def get(url: str, timeout: float) -> tuple[int, str]:
    with connected(url, timeout) as (connection, path):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def metrics(url: str, timeout: float) -> Metrics:
    """``{name: {labels: value}}``."""
    found: Metrics = {}
    for name, labels, value in SAMPLE.findall(get(f"{url}/metrics", timeout)[1]):
        found.setdefault(name, {})[labels] = float(value)
    return found


class Watch(threading.Thread):
    """Samples one server until told to stop: the highest value of each bounded gauge (of any rank), and health."""

    def __init__(self, stage: str, url: str, timeout: float) -> None:
        super().__init__(daemon=True)
        self.stage, self.url, self.timeout = stage, url, timeout
        self.done = threading.Event()
        self.highest: dict[str, float] = dict.fromkeys((*BOUNDED[stage], "sum"), 0.0)
        self.samples = 0
        self.health: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self) -> None:
        health = threading.Thread(target=self._check_health, daemon=True)
        health.start()
        while not self.done.wait(0.02):
            try:
                now = metrics(self.url, self.timeout)
            except OSError as error:
                self.errors.append(f"{self.stage} /metrics: {error!r}")
                continue
            self._note_loads()
            first, second = (now.get(f"sglang:{name}", {}) for name in BOUNDED[self.stage])
            self._note(BOUNDED[self.stage][0], first.values())
            self._note(BOUNDED[self.stage][1], second.values())
            self._note("sum", (value + second.get(labels, 0) for labels, value in first.items()))
            self.samples += 1
        health.join()

    def _note_loads(self) -> None:
        """The same queues as the scheduler counts them; the gauges are only written now and then."""
        status, text = get(f"{self.url}/v1/loads?include=disagg,queues", self.timeout)
        for load in json.loads(text)["loads"] if status == 200 else []:
            if "disaggregation" in load and "queues" in load:
                queued = load["disaggregation"][LOADS[self.stage]], load["queues"]["waiting"]
                self._note(BOUNDED[self.stage][0], queued[:1])
                self._note(BOUNDED[self.stage][1], queued[1:])
                self._note("sum", [sum(queued)])

    def _note(self, name: str, values: Any) -> None:
        self.highest[name] = max([self.highest[name], *values])

    def _check_health(self) -> None:
        while not self.done.is_set():
            try:
                self.health[str(get(f"{self.url}/health", self.timeout)[0])] += 1
            except OSError as error:
                self.health[repr(error)] += 1


class Sent(threading.Thread):
    """One HTTP request; ``answer`` has what came back and after how many seconds."""

    def __init__(self, url: str, body: dict[str, Any], start: threading.Barrier, timeout: float) -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.start_line, self.timeout = url, json.dumps(body), start, timeout
        self.answer: dict[str, Any] = {}

    def run(self) -> None:
        self.start_line.wait()
        began = time.monotonic()
        try:
            with connected(self.url, self.timeout) as (connection, path):
                connection.request("POST", path, self.body, {"content-type": "application/json"})
                response = connection.getresponse()
                headers_s = time.monotonic() - began
                text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self.answer = {"status": 0, "outcome": "error", "error": repr(error), "ended_s": time.monotonic() - began}
            return
        self.answer = {
            "status": response.status,
            "outcome": outcome(response.status, text),
            "retry_after": response.headers.get("retry-after"),
            "headers_s": headers_s,
            "ended_s": time.monotonic() - began,
            "text": text,
        }


def outcome(status: int, text: str) -> str:
    """``served``, ``rejected``, ``late`` (rejected or aborted after status 200) or ``error``."""
    if status == 503:
        return "rejected"
    if status != 200:
        return "error"
    return (
        "late"
        if FULL in text or OUTRANKED in text or re.search(r'"(type|finish_reason)": ?"abort"', text)
        else "served"
    )


def request_body(arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    prompt = f"hello node {number} " + "the first page of the queue " * arguments.prompt_repeats
    sampling = {"temperature": 0, "ignore_eos": True}
    if arguments.endpoint == "/generate":
        body = {"text": prompt, "sampling_params": {**sampling, "max_new_tokens": arguments.tokens}}
    elif arguments.endpoint == "/v1/completions":
        body = {"prompt": prompt, "max_tokens": arguments.tokens, **sampling}
    else:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": arguments.tokens, **sampling}
    if arguments.endpoint != "/generate":
        body["model"] = arguments.model
    if arguments.priorities:
        body["priority"] = random.randrange(arguments.priorities)
    return {**body, "stream": arguments.stream}


def send_all(arguments: argparse.Namespace) -> list[dict[str, Sent]]:
    """Send every request at the same moment and wait for all answers; each as ``{"prefill", "decode"}`` or
    ``{"router"}``."""
    targets = {"router": arguments.router} if arguments.router else {}
    targets = targets or {"prefill": arguments.prefill, "decode": arguments.decode}
    barrier = threading.Barrier(arguments.requests * len(targets))
    requests = []
    for number in range(arguments.requests):
        body = request_body(arguments, number)
        if not arguments.router:
            body |= {
                "bootstrap_host": urlsplit(arguments.prefill).hostname,
                "bootstrap_port": arguments.bootstrap_port,
                "bootstrap_room": random.getrandbits(62),
            }
        requests.append(
            {name: Sent(url + arguments.endpoint, body, barrier, arguments.timeout) for name, url in targets.items()}
        )
    for halves in requests:
        for half in halves.values():
            half.start()
    for halves in requests:
        for half in halves.values():
            half.join()
    return requests


def verdict(halves: dict[str, Sent]) -> str:
    """Of a whole request: served when every half was, rejected when every half was, else what went wrong."""
    outcomes = {half.answer["outcome"] for half in halves.values()}
    return outcomes.pop() if len(outcomes) == 1 else "/".join(sorted(outcomes))


def totals(now: Metrics) -> dict[str, float]:
    """Of each counter, the highest of any rank: each rank of a group counts the same failed transfer."""
    return {name: max(now.get(metric, {}).values(), default=0.0) for metric, name in COUNTED.items()}


def idle(servers: dict[str, str], timeout: float, within: float) -> dict[str, dict[str, float]]:
    """The gauges once they are all 0, or as they are when that has not come within the time."""
    until = time.monotonic() + within
    while True:
        gauges = {}
        for stage, url in servers.items():
            now = metrics(url, timeout)
            gauges[stage] = {name: sum(now.get(f"sglang:{name}", {}).values()) for name in IDLE[stage]}
        if not any(any(values.values()) for values in gauges.values()) or time.monotonic() > until:
            return gauges
        time.sleep(0.2)


def burst(arguments: argparse.Namespace) -> dict[str, Any]:
    servers = {"prefill": arguments.prefill, "decode": arguments.decode}
    before = {stage: totals(metrics(url, arguments.timeout)) for stage, url in servers.items()}
    watches = {stage: Watch(stage, url, arguments.timeout) for stage, url in servers.items()}
    for watch in watches.values():
        watch.start()
    requests = send_all(arguments)
    at_the_end = idle(servers, arguments.timeout, arguments.idle_within)
    for watch in watches.values():
        watch.done.set()
        watch.join()
    after = {stage: totals(metrics(url, arguments.timeout)) for stage, url in servers.items()}
    counted = {stage: {key: after[stage][key] - before[stage][key] for key in after[stage]} for stage in servers}

    verdicts = Counter(verdict(halves) for halves in requests)
    answers = [half.answer for halves in requests for half in halves.values()]
    rejections = [answer for answer in answers if answer["outcome"] == "rejected"]
    apart = [abs(a.answer["ended_s"] - b.answer["ended_s"]) for a, b in map(tuple, pairs_rejected(requests))]
    result = {
        "endpoint": arguments.endpoint,
        "stream": arguments.stream,
        "sent": len(requests),
        "verdicts": dict(verdicts),
        "statuses": {
            name: dict(Counter(str(halves[name].answer["status"]) for halves in requests)) for name in requests[0]
        },
        "highest": {stage: watch.highest for stage, watch in watches.items()},
        "samples": {stage: watch.samples for stage, watch in watches.items()},
        "slowest_rejection_s": round(max((answer["ended_s"] for answer in rejections), default=0.0), 3),
        "slowest_twin_s": round(max(apart, default=0.0), 3),
        "retry_after": dict(Counter(str(answer.get("retry_after")) for answer in rejections)),
        "messages": dict(Counter(answer["text"][:160] for answer in rejections)),
        "counted": counted,
        "at_the_end": at_the_end,
        "health": {stage: dict(watch.health) for stage, watch in watches.items()},
        "errors": [error for watch in watches.values() for error in watch.errors]
        + [
            str(answer.get("error", answer.get("text")))[:300]
            for answer in answers
            if answer["outcome"] in ("error", "late")
        ],
    }
    return {**result, "broken": broken_rules(arguments, result, rejections)}


def pairs_rejected(requests: list[dict[str, Sent]]) -> list[tuple[Sent, ...]]:
    return [
        tuple(halves.values())
        for halves in requests
        if len(halves) == 2 and any(half.answer["outcome"] == "rejected" for half in halves.values())
    ]


def broken_rules(arguments: argparse.Namespace, result: dict[str, Any], rejections: list[dict[str, Any]]) -> list[str]:
    broken = []
    bounds = {"prefill": arguments.bound, "decode": arguments.decode_bound}
    for stage, highest in result["highest"].items():
        broken += [f"{stage}: {name} was {value}" for name, value in highest.items() if value > bounds[stage]]
    if set(result["verdicts"]) - {"served", "rejected"}:
        broken.append(f"neither served nor rejected: {result['verdicts']}")
    served = result["verdicts"].get("served", 0)
    if not served and len(arguments.rejecting) < 2:
        broken.append("nothing was served")
    if not arguments.router:
        wrong = [
            answer
            for answer in rejections
            if not answer["retry_after"] or json.loads(answer["text"])["message"] not in (FULL, OUTRANKED)
        ]
        broken += [f"a rejection without Retry-After or the engine's words: {wrong[0]}"] if wrong else []
    for name in ("slowest_rejection_s", "slowest_twin_s"):
        if result[name] > arguments.within:
            broken.append(f"{name} was {result[name]}")
    for stage, counted in result["counted"].items():
        if not served <= counted["accepted"] <= result["sent"] - counted["rejected"]:
            broken.append(f"{stage} counted {counted} of {result['sent']} sent and {served} served")
        if (counted["rejected"] > 0) != (stage in arguments.rejecting):
            broken.append(f"{stage} rejected {counted['rejected']}; rejecting is {arguments.rejecting}")
    failed = sum(counted["bootstrap_failed"] + counted["transfer_failed"] for counted in result["counted"].values())
    if failed > sum(counted["rejected"] for counted in result["counted"].values()):
        broken.append(f"{failed} failed transfers")
    broken += [
        f"{stage} is not idle: {gauges}" for stage, gauges in result["at_the_end"].items() if any(gauges.values())
    ]
    broken += [f"{stage} /health: {seen}" for stage, seen in result["health"].items() if set(seen) != {"200"}]
    return broken + (["errors"] if result["errors"] else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    parser.add_argument("--router", help="URL of a router in front of them; without one, pairs are sent")
    parser.add_argument("--bootstrap-port", type=int, required=True, help="of the prefill server")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--bound", type=int, required=True, help="--max-queued-requests of the servers")
    parser.add_argument("--decode-bound", type=int, help="that of decode, where it differs")
    parser.add_argument("--rejecting", nargs="*", default=["prefill", "decode"], help="stages that have to reject some")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--endpoint", default="/v1/completions", help="/generate, /v1/completions, /v1/chat/completions"
    )
    parser.add_argument(
        "--priorities", type=int, default=0, help="how many to draw from (--enable-priority-scheduling)"
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each request")
    parser.add_argument("--prompt-repeats", type=int, default=20, help="length of the prompts")
    parser.add_argument("--within", type=float, default=10.0, help="seconds for a rejection and for its twin")
    parser.add_argument("--idle-within", type=float, default=60.0, help="seconds until all gauges have to be 0")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one HTTP answer")
    arguments = parser.parse_args()
    if arguments.decode_bound is None:
        arguments.decode_bound = arguments.bound
    result = burst(arguments)
    print(json.dumps(result, indent=1))
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
