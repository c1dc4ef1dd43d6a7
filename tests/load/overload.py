# SPDX-License-Identifier: Apache-2.0
"""Twice as many requests as a deployment can serve, and what became of them. Runs on its host, as root;
``tools/load`` calls it.

    python3 tests/load/overload.py --port 30001 --minutes 10

1. A fixed set of prompts is asked, one at a time, each twice: the unloaded answers.
2. The capacity: clients that ask again as soon as they were answered, one fewer than the routers let in and queue
   (the place that is left is for the probe), so that the deployment is always busy and refuses nobody. What is served
   whole in a minute, after a while to warm up.
3. Twice that rate, as requests arrive that do not wait for each other: a Poisson process. A half of them is drawn from
   the fixed set, the others are prompts of the same lengths that nobody has asked before.
4. The end: everybody was answered, the queues are empty, and the next request is served.

With ``--until-told`` step 3 lasts until standard input ends, and every server and router has to be replaced meanwhile,
as a rollout does; a gateway has not. Prints a line for each step and the result as JSON, the last line. Exit status 1
when one of its rules is broken.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "on_host"))
from clients import TOKENS, Answer, ask, clients, quantile
from deployment import becomes, gauges, healthy, memory_mib, plan, read, requests_held, unit, wait

#: Prompts of the fixed set; the same numbers are in every run.
FIXED = 16
SENTENCE = "the quick brown fox jumps over the lazy dog "
#: Sentences of a prompt, by its number: about 10, 40, 160 and 640 tokens.
SIZES = (1, 4, 16, 64)
OVERLOAD = 2
WARM_S = 20
CAPACITY_S = 60
GAUGES_EVERY_S = 2
#: Reading the memory of every process takes long enough to be felt by what is measured.
MEMORY_EVERY = 5
TIMELINE_S = 10
#: Memory counts from here on: the first answers fill caches and arenas.
MEMORY_WARM_S = 60
#: Last third against first third of the time. What each request leaves behind adds up over thousands of them, while
#: what allocators do by themselves stays below this.
GROWTH = 1.05
REFUSED_P99_S = 1.0
STARTS_S = 900
ENDS_S = 120
#: What a queue of each stage is made of; ``max-queued-requests`` bounds the sum.
QUEUED = {
    "prefill": ("num_prefill_bootstrap_queue_reqs", "num_queue_reqs"),
    "decode": ("num_decode_prealloc_queue_reqs", "num_queue_reqs"),
}


def say(text: str) -> None:
    print(text, flush=True)


# ------------------------------------------------------------------------------------------------- requests


@dataclass
class Asked:
    """A request that was due at a moment, and may have been sent later: what is late counts from when it was due."""

    due: float
    number: int
    answer: Answer


class Prompts:
    """Numbers of prompts: a half of the fixed set, the others never asked before. The same in every run."""

    def __init__(self) -> None:
        self.draw = random.Random(1)
        self.new = itertools.count(FIXED)
        self.lock = threading.Lock()

    def next(self) -> int:
        with self.lock:
            return self.draw.randrange(FIXED) if self.draw.random() < 0.5 else next(self.new)


def prompt(number: int) -> str:
    return f"{number} " + SENTENCE * SIZES[number % len(SIZES)]


def tokens(text: str) -> list[str]:
    """The tokens of an answer. The tiny model's are words and names between bars, so its text has all of them."""
    return re.findall(r"<\|\w+\|>|[^\s<]+", text)


def unloaded(port: int) -> list[Answer]:
    """The answer to each prompt of the fixed set, which is the same twice."""
    found = []
    for number in range(FIXED):
        twice = [ask(port, prompt(number)) for _time in range(2)]
        told = [(answer.outcome, tokens(answer.text)) for answer in twice]
        if told[0] != told[1] or told[0][0] != "whole" or len(told[0][1]) != TOKENS:
            raise SystemExit(f"unloaded, prompt {number} has got {told}; expected {TOKENS} tokens, twice the same")
        found.append(twice[1])
    return found


def capacity(port: int, count: int, prompts: Prompts) -> dict[str, Any]:
    """What ``count`` clients were served that ask again and again."""
    with clients(count, lambda: ask(port, prompt(prompts.next()))) as asking:
        time.sleep(WARM_S)
        begin = time.monotonic()
        time.sleep(CAPACITY_S)
        end = time.monotonic()
    answers = [answer for answer in asking.answers if begin <= answer.ended < end]
    whole = [answer for answer in answers if answer.outcome == "whole"]
    quarters = collections.Counter(int(4 * (answer.ended - begin) / (end - begin)) for answer in whole)
    return {
        "clients": count,
        "seconds": round(end - begin, 1),
        "outcomes": dict(collections.Counter(answer.outcome for answer in answers)),
        "whole_per_s": round(len(whole) / (end - begin), 3),
        "whole_per_s_by_quarter": [round(4 * quarters[number] / (end - begin), 2) for number in range(4)],
        "whole_s": spread(answer.ended - answer.began for answer in whole),
        "first_token_s": spread(answer.first - answer.began for answer in whole if answer.first),
    }


def overload(port: int, per_s: float, prompts: Prompts, told: threading.Event) -> list[Asked]:
    """Requests that arrive at this rate until told, each answered before this returns."""
    arrivals = random.Random(2)
    asked: list[Asked] = []

    def client(due: float, number: int) -> None:
        asked.append(Asked(due, number, ask(port, prompt(number))))

    threads = []
    due = time.monotonic()
    while True:
        due += arrivals.expovariate(per_s)
        if told.wait(max(0.0, due - time.monotonic())):
            break
        threads.append(threading.Thread(target=client, args=(due, prompts.next())))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return asked


# ------------------------------------------------------------------------------------------------- the host


class Sampler(threading.Thread):
    """Reads gauges and memory until told to end; what does not answer is left out of a sample."""

    def __init__(self, instances: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.instances = instances
        self.samples: list[dict[str, Any]] = []
        self.told = threading.Event()

    def run(self) -> None:
        for number in itertools.count():
            sample: dict[str, Any] = {"at": time.monotonic(), "queues": {}, "load_average": os.getloadavg()[0]}
            for instance in self.instances:
                try:
                    sample["queues"].update(queues(instance["name"], instance["role"], gauges(instance)))
                except (OSError, http.client.HTTPException):
                    continue
            if number % MEMORY_EVERY == 0:
                sample["memory_mib"] = {instance["name"]: memory_mib(instance["name"]) for instance in self.instances}
            self.samples.append(sample)
            if self.told.wait(GAUGES_EVERY_S):
                return


def queues(name: str, role: str, told: Mapping[str, float]) -> dict[str, float]:
    """What an instance has waiting, by the names that ``bounds`` has; nothing where it does not say."""
    if role == "router":
        gauges_of = {"in flight": "admission_inflight", "queued": "admission_queue_depth"}
        return {f"{name} {what}": told[gauge] for what, gauge in gauges_of.items() if gauge in told}
    waiting = QUEUED[role]
    return {f"{name} queued": sum(told[gauge] for gauge in waiting)} if set(waiting) <= set(told) else {}


def bounds(admission: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """What the plan lets each instance take in."""
    found: dict[str, int] = {}
    for group in admission.values():
        found |= {f"{server} queued": bound for server, bound in group["bounds"].items() if bound is not None}
        for router, flags in group["routers"].items():
            found[f"{router} in flight"] = flags["max-concurrent-requests"]
            found[f"{router} queued"] = flags["queue-size"]
    return found


def taken(admission: Mapping[str, Mapping[str, Any]]) -> int:
    """Requests that the routers let in and queue, all of them together."""
    flags = [flags for group in admission.values() for flags in group["routers"].values()]
    return sum(told["max-concurrent-requests"] + told["queue-size"] for told in flags)


def idle() -> bool:
    try:
        return requests_held() == 0
    except (OSError, http.client.HTTPException):
        return False


def started(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """The main process of each unit, and how often it was restarted by itself."""
    return {name: (told["MainPID"], int(told["NRestarts"])) for name in names for told in [unit(name)]}


def machine() -> dict[str, Any]:
    def first(pattern: str, path: str) -> str:
        found = re.search(pattern, read(Path(path)), re.MULTILINE)
        return found[1] if found else ""

    systemd = subprocess.run(["systemctl", "--version"], check=True, capture_output=True, text=True).stdout
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": first(r"^model name\s*: (.*)$", "/proc/cpuinfo"),
        "memory_gib": round(int(first(r"^MemTotal:\s+(\d+) kB$", "/proc/meminfo")) / 2**20, 1),
        "kernel": os.uname().release,
        "systemd": systemd.split()[1],
        "python": sys.version.split()[0],
        "load_average_before": os.getloadavg(),
    }


# ------------------------------------------------------------------------------------------------- figures


def spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
    return {name: round(quantile(ordered, share), 3) for name, share in shares.items()} if ordered else {}


def of_requests(asked: Sequence[Asked], seconds: float) -> dict[str, Any]:
    by_outcome: dict[str, list[Asked]] = collections.defaultdict(list)
    for one in asked:
        by_outcome[one.answer.outcome].append(one)
    whole, refused = by_outcome["whole"], by_outcome["refused"]
    lost = by_outcome["failed"] + by_outcome["broken"]
    return {
        "seconds": round(seconds, 1),
        "requests": len(asked),
        "outcomes": {outcome: len(found) for outcome, found in sorted(by_outcome.items()) if found},
        "statuses": {
            str(status): count for status, count in sorted(collections.Counter(a.answer.status for a in asked).items())
        },
        "whole_per_s": round(len(whole) / seconds, 3),
        "whole_s": spread(one.answer.ended - one.due for one in whole),
        "first_token_s": spread(one.answer.first - one.due for one in whole if one.answer.first),
        "refused_s": spread(one.answer.ended - one.due for one in refused),
        "refused_retry_after": dict(collections.Counter(str(one.answer.retry_after) for one in refused)),
        "refused_with": sorted({one.answer.detail for one in refused})[:6],
        "lost_with": sorted({one.answer.detail for one in lost})[:6],
        "sent_late_s": spread(one.answer.began - one.due for one in asked),
    }


def of_answers(asked: Sequence[Asked], known: Sequence[Answer]) -> dict[str, Any]:
    """Answers of the fixed set beside the unloaded ones."""
    compared = [one for one in asked if one.number < len(known) and one.answer.outcome == "whole"]
    unequal = [one for one in compared if tokens(one.answer.text) != tokens(known[one.number].text)]
    return {
        "compared": len(compared),
        "prompts": len({one.number for one in compared}),
        "unequal": len(unequal),
        "examples": [[one.number, known[one.number].text, one.answer.text] for one in unequal[:3]],
    }


def of_queues(samples: Sequence[Mapping[str, Any]], bounds: Mapping[str, int]) -> dict[str, Any]:
    """The bound of each queue, the most that any sample has seen in it, and how many samples have seen it."""
    seen = {name: [sample["queues"][name] for sample in samples if name in sample["queues"]] for name in bounds}
    return {
        name: {"bound": bounds[name], "highest": max(values, default=0), "samples": len(values)}
        for name, values in sorted(seen.items())
    }


def of_memory(samples: Sequence[Mapping[str, Any]], begin: float, end: float) -> dict[str, Any]:
    """Of each unit the median of the first and of the last third of the time, after the warm-up; nothing where there
    is no sample in each of both."""
    third = (end - begin - MEMORY_WARM_S) / 3
    inside = [s for s in samples if "memory_mib" in s and begin + MEMORY_WARM_S <= s["at"] <= end]
    first = [sample["memory_mib"] for sample in inside if sample["at"] < end - 2 * third]
    last = [sample["memory_mib"] for sample in inside if sample["at"] >= end - third]
    if not first or not last:
        return {}
    found = {}
    for name in sorted(first[0]):
        before, after = (statistics.median(sample[name] for sample in part) for part in (first, last))
        found[name] = {"first_mib": before, "last_mib": after, "ratio": round(after / before, 4) if before else 0.0}
    return found


def timeline(asked: Sequence[Asked], samples: Sequence[Mapping[str, Any]], begin: float) -> list[dict[str, Any]]:
    """What happened in every TIMELINE_S seconds: requests by when they were due, the highest of each gauge."""
    rows = []
    for start in range(0, 1 + int(max((one.due for one in asked), default=begin) - begin), TIMELINE_S):
        since, until = begin + start, begin + start + TIMELINE_S
        here = [one for one in asked if since <= one.due < until]
        seen = [sample for sample in samples if since <= sample["at"] < until]
        whole = [one for one in here if one.answer.outcome == "whole"]
        refused = [one for one in here if one.answer.outcome == "refused"]
        highest: dict[str, float] = {}
        for name, value in (item for sample in seen for item in sample["queues"].items()):
            highest[name] = max(value, highest.get(name, 0))
        rows.append(
            {
                "s": start,
                "arrived": len(here),
                "whole": len(whole),
                "refused": len(refused),
                "whole_s": spread(one.answer.ended - one.due for one in whole),
                "first_token_s": spread(one.answer.first - one.due for one in whole if one.answer.first),
                "refused_s": spread(one.answer.ended - one.due for one in refused),
                "queues": dict(sorted(highest.items())),
                "memory_mib": next((s["memory_mib"] for s in reversed(seen) if "memory_mib" in s), {}),
                "load_average": round(max((sample["load_average"] for sample in seen), default=0.0), 2),
            }
        )
    return rows


def broken_rules(result: Mapping[str, Any], rollout: bool) -> list[str]:
    """What did not hold, of the figures of a run."""
    load, answers, after = result["load"], result["answers"], result["after"]
    refused = load["outcomes"].get("refused", 0)
    lost = sum(load["outcomes"].get(outcome, 0) for outcome in ("failed", "broken"))
    bare = sum(count for told, count in load["refused_retry_after"].items() if not told.isdigit())
    broken = []

    def rule(holds: bool, otherwise: str) -> None:
        if not holds:
            broken.append(otherwise)

    for name, queue in result["queues"].items():
        rule(queue["samples"] > 0, f"{name}: nothing was read")
        rule(queue["highest"] <= queue["bound"], f"{name}: {queue['highest']}, bound {queue['bound']}")
    rule(refused > 0, "nothing was refused: this was no overload")
    rule(load["refused_s"].get("p99", 0) < REFUSED_P99_S, f"a refusal took {load['refused_s']} s")
    rule(bare == 0, f"{bare} of {refused} refused requests have no Retry-After: {load['refused_retry_after']}")
    rule(lost == 0, f"{lost} accepted requests were lost: {load['lost_with']}")
    rule(answers["compared"] > 0, "no answer could be compared")
    rule(answers["unequal"] == 0, f"{answers['unequal']} answers are not the unloaded ones: {answers['examples']}")
    rule(after["idle"], f"requests are left {ENDS_S} s after the last one was answered")
    rule(after["equal"], f"the next request: {after['outcome']}")
    if not rollout:
        rule(bool(result["memory"]), f"no memory was read in two thirds of the time after {MEMORY_WARM_S} s")
    for name, memory in {} if rollout else result["memory"].items():
        rule(0 < memory["ratio"] <= GROWTH, f"{name} has grown from {memory['first_mib']} to {memory['last_mib']} MiB")
    for name, unit_before in result["units"]["before"].items():
        expected = rollout and name != "gateway"
        replaced = result["units"]["after"][name][0] != unit_before[0]
        rule(replaced == expected, f"{name} was {'' if replaced else 'not '}replaced")
        rule(
            result["units"]["after"][name][1] == (0 if expected else unit_before[1]), f"{name} was restarted by itself"
        )
    return broken


# ------------------------------------------------------------------------------------------------- the run


def tell_at_end_of_input(told: threading.Event) -> None:
    sys.stdin.read()
    told.set()


def measure(port: int, minutes: float | None) -> dict[str, Any]:
    """``minutes`` None: until told."""
    told = threading.Event()
    planned = plan()
    instances, bound = planned["instances"], bounds(planned["admission"])
    count = taken(planned["admission"]) - 1
    names = [instance["name"] for instance in instances]
    if unit("gateway")["ActiveState"] == "active":
        names.append("gateway")
    result: dict[str, Any] = {"machine": machine()}
    result["versions"] = {"engine": planned["engine"]["version"], "router": planned["router"]["version"]}
    prompts = Prompts()
    say(f"unloaded: {FIXED} prompts")
    known = unloaded(port)
    result["unloaded"] = {
        "whole_s": spread(answer.ended - answer.began for answer in known),
        "first_token_s": spread(answer.first - answer.began for answer in known if answer.first),
    }
    say(f"capacity: {count} clients for {WARM_S + CAPACITY_S} s")
    result["capacity"] = capacity(port, count, prompts)
    per_s = round(OVERLOAD * result["capacity"]["whole_per_s"], 3)
    result["units"] = {"before": started(names)}
    sampler = Sampler(instances)
    sampler.start()
    say(f"load: {per_s} requests/s, {OVERLOAD} x {result['capacity']['whole_per_s']}")
    stop: threading.Thread | threading.Timer = threading.Thread(target=tell_at_end_of_input, args=(told,))
    if minutes is not None:
        stop = threading.Timer(60 * minutes, told.set)
    begin = time.monotonic()
    stop.start()
    asked = overload(port, per_s, prompts, told)
    stop.join()
    end = max(one.due for one in asked)
    sampler.told.set()
    sampler.join()
    say("end: waiting until no request is left")
    ended = becomes(idle, ENDS_S)
    last = ask(port, prompt(0))
    result["load"] = {"asked_per_s": per_s, **of_requests(asked, end - begin)}
    result["answers"] = of_answers(asked, known)
    result["queues"] = of_queues(sampler.samples, bound)
    result["memory"] = of_memory(sampler.samples, begin, end)
    result["units"]["after"] = started(names)
    result["after"] = {
        "idle": ended,
        "outcome": last.outcome,
        "equal": last.outcome == "whole" and tokens(last.text) == tokens(known[0].text),
    }
    result["broken_rules"] = broken_rules(result, rollout=minutes is None)
    result["timeline"] = timeline(asked, sampler.samples, begin)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Load a deployment with twice its capacity.")
    parser.add_argument("--port", type=int, required=True, help="of the router, or of the gateway")
    lasts = parser.add_mutually_exclusive_group(required=True)
    lasts.add_argument("--minutes", type=float)
    lasts.add_argument("--until-told", action="store_true", help="until standard input ends")
    options = parser.parse_args()
    wait(healthy, "a deployment that serves", STARTS_S)
    result = measure(options.port, None if options.until_told else options.minutes)
    say(json.dumps(result))
    return 1 if result["broken_rules"] else 0


if __name__ == "__main__":
    sys.exit(main())
