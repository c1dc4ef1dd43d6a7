# SPDX-License-Identifier: Apache-2.0
"""One fault on a host that serves, and what clients saw of it. Runs on that host, as root; ``tools/faults`` calls it.

    python3 tests/faults/inject.py --fault kill-decode-scheduler --result row.json

Four clients ask the router for streamed completions without a pause, before, during and after the fault. The row says
how many requests were whole, refused, failed or broken (``tests/on_host/clients.py`` says which is which), how long
nobody was served, which units were started anew, and which of the expectations of the fault did not hold. Exit status 1
when one did not.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "on_host"))
from clients import Answer, ask, begin, clients, quantile
from deployment import healthy, members, processes, requests_held, unit, wait

ROUTER = 30001
UNITS = ("prefill", "decode", "router")
CLIENTS = 4
#: Answers that have to come whole before a fault, and after it.
STEADY = 8
#: Longest that a recovery may take before it counts as one that needs a human. The slowest is of a server that hangs:
#: liveness waits for 180 s, the stop for 120 s, and the start takes a minute or two on a busy machine.
RECOVERY_S = 900
NUMBER = itertools.count()


# ------------------------------------------------------------------------------------------------- faults


@dataclass
class Row:
    """What is kept of a fault. Times in seconds since it."""

    fault: str
    about: str
    outcomes: dict[str, int] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    unserved_s: float = 0.0
    healthy_s: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    broken_rules: list[str] = field(default_factory=list)

    def rule(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken_rules.append(otherwise)


def under_load(row: Row, inject: Callable[[], None], restarted: dict[str, int]) -> None:
    """Inject a fault among requests; everything has to come back by itself, with no more restarts than these."""
    before = {name: int(unit(name)["NRestarts"]) for name in UNITS}
    main = {name: unit(name)["MainPID"] for name in UNITS}
    with clients(CLIENTS, lambda: ask(ROUTER, f"request {next(NUMBER)}")) as load:
        load.wait_whole(STEADY, 0, RECOVERY_S)
        moment = time.monotonic()
        inject()
        load.wait_whole(STEADY, moment + 1, RECOVERY_S)
        wait(healthy, "every unit ready, and both servers with the router", RECOVERY_S)
        row.healthy_s = round(time.monotonic() - moment, 1)
        well = time.monotonic()
        load.wait_whole(STEADY, well, RECOVERY_S)
    during = [answer for answer in load.answers if answer.ended >= moment]
    row.outcomes = dict(collections.Counter(answer.outcome for answer in during))
    row.details = sorted({answer.detail for answer in during if answer.detail})[:6]
    ends = sorted([moment, *(answer.ended for answer in during if answer.outcome == "whole")])
    row.unserved_s = round(max(later - earlier for earlier, later in itertools.pairwise(ends)), 1)
    row.restarts = {name: int(unit(name)["NRestarts"]) - before[name] for name in UNITS}
    row.more["main process replaced"] = [name for name in UNITS if unit(name)["MainPID"] != main[name]]
    late = [answer for answer in during if answer.began >= well and answer.outcome != "whole"]
    row.rule(not late, f"{len(late)} requests failed after everything was ready again")
    begun = [answer for answer in during if answer.outcome == "broken" and answer.began > moment + 1]
    row.rule(not begun, f"{len(begun)} requests were let in after the fault, and lost")
    row.rule(row.more["main process replaced"] == sorted(restarted), f"expected {sorted(restarted)} to be replaced")
    row.rule(all(row.restarts[name] <= most for name, most in restarted.items()), f"expected restarts {restarted}")


def hit(name: str, process: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Row], None]:
    """A signal to one process of a unit, which is started anew once."""

    def inject() -> None:
        found = processes(name)
        if process not in found:
            raise SystemExit(f"llmfleet-{name} has no process {process}, only {found}")
        os.kill(found[process], number)

    return lambda row: under_load(row, inject, {name: 1})


def stop_all(name: str) -> None:
    """SIGSTOP, to every process of a unit: it holds its ports and answers nothing."""
    for pid in members(name):
        os.kill(pid, signal.SIGSTOP)


def rules_after(row: Row) -> None:
    """What holds after a fault that no unit may notice."""
    row.rule(ask(ROUTER, "after all").outcome == "whole", "the next request was not served")
    row.rule(healthy(), "not every unit is well")


def disconnect(row: Row) -> None:
    """40 clients go away after the first bytes of a long answer; nothing of their requests stays in a server."""
    for _round in range(10):
        connections = [begin(ROUTER, f"request {next(NUMBER)}", 1500, 60) for _client in range(4)]
        for connection in connections:
            response = connection.getresponse()
            outcome = "left" if response.status == 200 and response.read(1) else "failed"
            row.outcomes[outcome] = row.outcomes.get(outcome, 0) + 1
            connection.close()
    moment = time.monotonic()
    wait(lambda: requests_held() == 0, "no request is left in a server", 120)
    row.more["seconds until no server had a request"] = round(time.monotonic() - moment, 1)
    row.rule(row.outcomes == {"left": 40}, "expected 40 requests to be let in")
    rules_after(row)


def burst(row: Row, count: int = 200) -> None:
    """200 clients ask at the same moment, each with a prompt of about 1,000 tokens."""
    answers: list[Answer] = []
    start = threading.Barrier(count)

    def client(number: int) -> None:
        start.wait()
        answers.append(ask(ROUTER, f"{number} " + "the quick brown fox jumps over the lazy dog " * 100))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    row.outcomes = dict(collections.Counter(answer.outcome for answer in answers))
    row.details = sorted({answer.detail for answer in answers if answer.detail})[:6]
    rejected = sorted(answer.ended - answer.began for answer in answers if answer.outcome == "refused")
    if rejected:
        row.more["seconds of a rejection: median, 99th percentile, longest"] = [
            round(quantile(rejected, share), 2) for share in (0.5, 0.99, 1)
        ]
    wait(lambda: requests_held() == 0, "no request is left in a server", 120)
    row.rule(set(row.outcomes) <= {"whole", "refused"}, "expected every request to be served whole or refused")
    rules_after(row)


FAULTS: dict[str, tuple[str, Callable[[Row], None]]] = {
    "burst": ("200 prompts of about 1,000 tokens at once", burst),
    "disconnect": ("40 clients go away in the middle of a stream", disconnect),
    "kill-router": ("kill -9 of the router", hit("router", "main")),
    "kill-decode": ("kill -9 of decode's main process", hit("decode", "main")),
    "kill-decode-scheduler": ("kill -9 of decode's scheduler", hit("decode", "scheduler")),
    "kill-decode-detokenizer": ("kill -9 of decode's detokenizer", hit("decode", "detokenizer")),
    "kill-prefill": ("kill -9 of prefill's main process, among transfers", hit("prefill", "main")),
    "kill-prefill-scheduler": ("kill -9 of prefill's scheduler, among transfers", hit("prefill", "scheduler")),
    "stop-decode-scheduler": ("SIGSTOP of decode's scheduler", hit("decode", "scheduler", signal.SIGSTOP)),
    "stop-decode": (
        "SIGSTOP of all of decode's processes",
        lambda row: under_load(row, lambda: stop_all("decode"), {"decode": 1}),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject one fault and tell what clients saw of it.")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list or not options.fault:
        print("\n".join(FAULTS))
        return 0
    wait(healthy, "a deployment that serves", RECOVERY_S)
    about, inject = FAULTS[options.fault]
    row = Row(options.fault, about)
    inject(row)
    if options.result:
        options.result.write_text(json.dumps(vars(row), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(vars(row)))
    return 1 if row.broken_rules else 0


if __name__ == "__main__":
    sys.exit(main())
