# SPDX-License-Identifier: Apache-2.0
"""One fault on a host that serves, and what clients saw of it. Runs on that host, as root; ``tools/faults`` calls it.

    python3 inject.py --fault kill-decode-scheduler --result row.json

Four clients ask the router for streamed completions without a pause, before, during and after the fault. A request is

    whole     200, every token that was asked for, and [DONE]
    refused   not let in: no connection, 429 or 503 before the answer has begun
    failed    another status, before the answer has begun
    broken    200 and then not whole: an accepted request that was lost

The row says how many of each, how long nobody was served, which units were started anew, and which of the expectations
of the fault did not hold. Exit status 1 when one did not.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUTER = 30001
SERVERS = {"prefill": 30000, "decode": 30002}
UNITS = ("prefill", "decode", "router")
TOKENS = 16
CLIENTS = 4
#: Answers that have to come whole before a fault, and after it.
STEADY = 8
#: Longest that a recovery may take before it counts as one that needs a human. The slowest is of a server that hangs:
#: liveness waits for 180 s, the stop for 120 s, and the start takes a minute or two on a busy machine.
RECOVERY_S = 900
#: Gauges of requests that a server has, whatever it does with them.
GAUGES = re.compile(r"^sglang:num_(?:running|queue|\w+_queue)_reqs\{[^}]*\} (\S+)$", re.MULTILINE)
NUMBER = itertools.count()


# ------------------------------------------------------------------------------------------------- clients


@dataclass
class Answer:
    """One request and what became of it."""

    began: float
    ended: float
    outcome: str
    detail: str = ""


def begin(prompt: str, tokens: int, timeout: float) -> http.client.HTTPConnection:
    """A connection on which the router was asked for a streamed completion. Raises OSError, HTTPException."""
    body = {
        "model": "tiny-qwen2",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", ROUTER, timeout=timeout)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def ask(prompt: str, tokens: int = TOKENS, timeout: float = 400) -> Answer:
    began = time.monotonic()

    def ended(outcome: str, detail: str = "") -> Answer:
        return Answer(began, time.monotonic(), outcome, detail[:200])

    try:
        connection = begin(prompt, tokens, timeout)
    except (OSError, http.client.HTTPException) as error:
        return ended("refused", type(error).__name__)
    with closing(connection):
        try:
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            return ended("refused", type(error).__name__)
        try:
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return ended("broken", type(error).__name__)
    if response.status != 200:
        return ended("refused" if response.status in (429, 503) else "failed", f"{response.status} {text}")
    finished = '"finish_reason":"length"' in text.replace(" ", "")
    return ended("whole") if finished and text.rstrip().endswith("data: [DONE]") else ended("broken", text[-200:])


class Load:
    """Clients that ask until they are told to end."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.told = threading.Event()
        self.threads = [threading.Thread(target=self._client) for _number in range(CLIENTS)]

    def _client(self) -> None:
        while not self.told.is_set():
            answer = ask(f"request {next(NUMBER)}")
            self.answers.append(answer)
            if answer.outcome != "whole":
                self.told.wait(0.5)

    def whole_since(self, moment: float) -> list[Answer]:
        return [answer for answer in list(self.answers) if answer.outcome == "whole" and answer.began >= moment]

    def wait_whole(self, count: int, since: float, within: float) -> None:
        wait(lambda: len(self.whole_since(since)) >= count, f"{count} whole answers", within)


@contextmanager
def clients() -> Iterator[Load]:
    load = Load()
    for thread in load.threads:
        thread.start()
    try:
        yield load
    finally:
        load.told.set()
        for thread in load.threads:
            thread.join()


# ------------------------------------------------------------------------------------------------- the host


def wait(condition: Callable[[], bool], what: str, within: float) -> None:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {within:.0f} s")
        time.sleep(0.2)


def unit(name: str) -> dict[str, str]:
    asked = ["systemctl", "show", f"llmfleet-{name}.service", "--property=ActiveState,MainPID,NRestarts"]
    shown = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    return dict(line.split("=", 1) for line in shown.splitlines())


def read(path: Path) -> str:
    """The text of a file in /proc; nothing where the process has ended."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def members(name: str) -> list[int]:
    """Every process in the control group of a unit, whichever hierarchy the host has."""
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if any(line.endswith(f"/llmfleet-{name}.service") for line in read(folder / "cgroup").splitlines())
    ]


def processes(name: str) -> dict[str, int]:
    """Processes of a unit by the title that they gave themselves; its main process is "main"."""
    pids = {"main": int(unit(name)["MainPID"])}
    for pid in members(name):
        title = read(Path(f"/proc/{pid}/cmdline")).split("\0")[0]
        if title.startswith("sglang::"):
            pids[title.removeprefix("sglang::").split("_")[0].split(" ")[0]] = pid
    return pids


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def healthy() -> bool:
    """Every unit is active, which means ready, and the router takes both servers."""
    if any(unit(name)["ActiveState"] != "active" for name in UNITS):
        return False
    try:
        workers = json.loads(get(ROUTER, "/workers"))["workers"]
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return False
    return len(workers) == 2 and all(worker["is_healthy"] for worker in workers)


def requests_held() -> float:
    return sum(float(value) for port in SERVERS.values() for value in GAUGES.findall(get(port, "/metrics")))


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
    with clients() as load:
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
    row.rule(ask("after all").outcome == "whole", "the next request was not served")
    row.rule(healthy(), "not every unit is well")


def disconnect(row: Row) -> None:
    """40 clients go away after the first bytes of a long answer; nothing of their requests stays in a server."""
    for _round in range(10):
        connections = [begin(f"request {next(NUMBER)}", 1500, 60) for _client in range(4)]
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


def burst(row: Row, clients: int = 200) -> None:
    """200 clients ask at the same moment, each with a prompt of about 1,000 tokens."""
    answers: list[Answer] = []
    start = threading.Barrier(clients)

    def client(number: int) -> None:
        start.wait()
        answers.append(ask(f"{number} " + "the quick brown fox jumps over the lazy dog " * 100, TOKENS))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    row.outcomes = dict(collections.Counter(answer.outcome for answer in answers))
    row.details = sorted({answer.detail for answer in answers if answer.detail})[:6]
    rejected = sorted(answer.ended - answer.began for answer in answers if answer.outcome == "refused")
    if rejected:
        row.more["seconds of a rejection: median, 99th percentile, longest"] = [
            round(rejected[int(share * (len(rejected) - 1))], 2) for share in (0.5, 0.99, 1)
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
