# SPDX-License-Identifier: Apache-2.0
"""Is this server alive? One look at it; when it has been dead for long enough, one restart of its unit.

    python3 lifecycle liveness --instance decode --unit llmfleet-decode.service --url http://127.0.0.1:30002 ...

Run by a timer. Each run is one observation, and the run of observations decides (``decide``). What counts is the
server's own progress: a busy server fails its health checks and a dead one may pass them. So it is asked, in this
order, and the first good answer ends the look:

    excused   its unit is not active, which for a server that starts means not ready yet, or it compiles
    moving    its token counters have moved since the last look
    serving   its group's router has served a completion, and no other server can have done so in its place
    idle      it answers a request of its own, and has no work

What remains has work that does not move, and is one of two:

    silent    it does not answer a request of its own either: dead
    waiting   it answers by itself: it waits for a peer, or its queues are stuck

A silent server is restarted after ``--flat`` seconds, a waiting one after ``--stuck``. The second is longer than the
engine's own time limits for a lost peer (300 s), after which the work of a server that only waits is gone. A rejection
by the router (429, or 503 with Retry-After) is no completion, and no sign of death: the counters decide.

Metrics that are not answered count as not moving. The peers of a group are told apart by their own counters and their
own answers; where all move and the probe fails, nothing is restarted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import host
import probe
from credentials import read_api_keys
from probe import WARNING

T = TypeVar("T")

EXCUSED = "excused"
MOVING = "moving"
SERVING = "serving"
IDLE = "idle"
SILENT = "silent"
WAITING = "waiting"

# Two looks can fall into one pause; three cannot.
FEWEST_OBSERVATIONS = 3
# Programs that only compile: a server that runs one is not dead, however long it takes.
COMPILERS = frozenset(
    ["cc1", "cc1plus", "cicc", "clang", "clang++", "cudafe++", "fatbinary", "g++", "ninja", "nvcc", "ptxas"]
)
# Routes whose open requests are work. Scheduler gauges stand still with the scheduler; these are the HTTP server's.
GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions")

_HOUR = 3600.0
_KEPT_OBSERVATIONS = 100
_KEPT_EVIDENCE = 10
_METRICS_SECONDS = 5.0
_COMMAND_SECONDS = 15.0
# When, within a question's deadline, the metrics are read that show what was asked as work.
_UNDER_WAY = 0.8
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Observation:
    """One look at a server. ``at`` is the machine's monotonic clock in seconds; ``tokens`` None without an answer."""

    at: float
    state: str
    tokens: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Limits:
    """When to restart. Seconds, but for ``max_restarts``, which is a number within any hour."""

    flat: float
    stuck: float
    interval: float
    max_restarts: int


@dataclass(frozen=True)
class Verdict:
    """``restart`` or not, and why."""

    restart: bool
    reason: str


@dataclass
class History:
    """What earlier runs saw and did; kept in a file, which goes with the machine's boot as its clock does."""

    observations: list[Observation] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)


def decide(observations: Sequence[Observation], restarts: Sequence[float], now: float, limits: Limits) -> Verdict:
    """Whether to restart, from what was seen so far (oldest first) and when it was restarted (monotonic seconds)."""
    silent = _length(observations, (SILENT,), limits)
    dead = _length(observations, (SILENT, WAITING), limits)
    if silent >= limits.flat:
        reason = f"no progress and no answer of its own for {silent:.0f} s"
    elif dead >= limits.stuck:
        reason = f"work and no progress for {dead:.0f} s"
    else:
        return Verdict(False, observations[-1].state if observations else "not seen yet")
    lately = sum(1 for at in restarts if now - _HOUR < at <= now)
    if lately >= limits.max_restarts:
        return Verdict(False, f"{reason}; not restarted, since it was {lately} times within an hour")
    return Verdict(True, reason)


def _length(observations: Sequence[Observation], states: Sequence[str], limits: Limits) -> float:
    """Seconds for which the server has been in one of ``states`` without a break; -1 where that was seen too seldom.

    A gap in which nobody looked (a suspended machine, a stopped timer) is a break.
    """
    run: list[Observation] = []
    for observation in reversed(observations):
        gap = run[-1].at - observation.at if run else 0.0
        if observation.state not in states or not 0 <= gap <= FEWEST_OBSERVATIONS * limits.interval:
            break
        run.append(observation)
    return run[0].at - run[-1].at if len(run) >= FEWEST_OBSERVATIONS else -1.0


@dataclass(frozen=True)
class Metrics:
    """What a server's /metrics say: tokens so far, and pieces of work that wait or run."""

    tokens: float
    work: float
    text: str


def parse_metrics(text: str, progress: Sequence[str], work: Sequence[str], active: str) -> Metrics:
    """Sums over all series of the named metrics; of ``active``, those of routes that generate."""
    tokens = waiting = 0.0
    for name, labels, raw in _SAMPLE.findall(text):
        try:
            value = float(raw)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if name in progress:
            tokens += value
        elif name in work or (name == active and any(f'endpoint="{route}"' in labels for route in GENERATING)):
            waiting += max(0.0, value)
    return Metrics(tokens, waiting, text)


@dataclass(frozen=True)
class Unit:
    """What systemd says of the unit. ``since`` is the monotonic time at which it became active, in seconds."""

    active: str
    since: float


@dataclass(frozen=True)
class Answers:
    """``own``: it served a request of its own; ``probe``: the best of its group's routers; ``during``: its metrics
    while that was under way, since only then does a server with a dead scheduler show that it was given work."""

    own: bool
    probe: probe.Result
    during: Metrics | None


class Server:
    """The server as this program sees it; each method is one question, with its own deadline, and does not raise."""

    def __init__(self, options: argparse.Namespace, api_key: str) -> None:
        self._options = options
        self._api_key = api_key

    def unit(self) -> Unit:
        names = ("ActiveState", "ActiveEnterTimestampMonotonic")
        text = run(["systemctl", "show", f"--property={','.join(names)}", "--", self._options.unit])
        found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        since = found.get("ActiveEnterTimestampMonotonic", "")
        return Unit(found.get("ActiveState", ""), int(since) / 1e6 if since.isdigit() else 0.0)

    def _pids(self) -> list[int]:
        return [process.pid for process in host.processes_of(self._options.unit, str(self._options.proc_root))]

    def compilers(self) -> list[str]:
        """Names of the compilers that the unit runs."""
        return sorted({read(self._options.proc_root / str(pid) / "comm").strip() for pid in self._pids()} & COMPILERS)

    def metrics(self) -> Metrics | None:
        try:
            status, text = probe.get(f"{self._options.url}/metrics", _METRICS_SECONDS)
        except (OSError, http.client.HTTPException):
            return None
        options = self._options
        return parse_metrics(text, options.progress, options.work, options.active) if status == 200 else None

    def threads(self) -> str:
        """For each thread of the unit: name, state and the kernel function that it waits in."""
        lines = []
        for pid in self._pids():
            for task in sorted((self._options.proc_root / str(pid) / "task").glob("[0-9]*")):
                status = dict(line.split(":\t", 1) for line in read(task / "status").splitlines() if ":\t" in line)
                told = (status.get(key, "?") for key in ("Name", "State", "voluntary_ctxt_switches"))
                lines.append(f"{pid} {task.name} {' | '.join(told)} | {read(task / 'wchan') or '?'}")
        return "\n".join(["PID TID name | state | voluntary switches | waits in", *lines, ""])

    def ask(self) -> Answers:
        """A request of its own and a completion through each router of its group, all at once."""
        own = _Asked(self._answers)
        routed = [_Asked(partial(self._complete, url)) for url in self._options.router]
        deadline = time.monotonic() + self._options.timeout * _UNDER_WAY
        for asked in routed:
            asked.thread.join(max(0.0, deadline - time.monotonic()))
        during = self.metrics()
        results = [asked.result() for asked in routed]
        best = next((result for result in results if result.success), results[0])
        return Answers(own.result(), best, during)

    def _answers(self) -> bool:
        try:
            return probe.get(f"{self._options.url}{self._options.health_route}", self._options.timeout)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _complete(self, router: str) -> probe.Result:
        options = self._options
        return probe.ask(probe.Question(router, options.model, options.timeout, api_key=self._api_key))


class _Asked(Generic[T]):
    """A question that is being asked in a thread of its own."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._found: list[T] = []
        self.thread = threading.Thread(target=lambda: self._found.append(question()), daemon=True)
        self.thread.start()

    def result(self) -> T:
        self.thread.join()
        return self._found[0]


def observe(
    server: Server, unit: Unit, last: Observation | None, peers: int, now: Callable[[], float]
) -> tuple[Observation, Metrics | None]:
    """One look, and the metrics that it is based on. ``last`` is the look before it at the same processes, ``peers``
    the number of servers that may have served a completion in this one's place."""

    def excused(why: str) -> tuple[Observation, None]:
        return Observation(now(), EXCUSED, None, why), None

    if unit.active != "active":
        return excused(f"the unit is {unit.active or 'unknown'}")
    compilers = server.compilers()
    if compilers:
        return excused(f"runs {', '.join(compilers)}")
    # What it said last, even if it has been silent since; without that, this look is the first to compare with.
    known = last.tokens if last else None
    metrics = server.metrics()
    if metrics and metrics.tokens != known:
        return Observation(now(), MOVING, metrics.tokens), metrics
    answers = server.ask()
    during = answers.during or metrics
    if answers.during and answers.during.tokens != known:
        return Observation(now(), MOVING, answers.during.tokens), during
    # Unanswered metrics hide the work; whoever does not answer them is not idle.
    works = metrics is None or metrics.work > 0 or answers.during is None or answers.during.work > 0
    if answers.probe.success and (answers.own or not peers):
        state = SERVING
    elif not answers.own:
        state = SILENT
    else:
        state = WAITING if works else IDLE
    detail = f"probe: {answers.probe.reason}; own answer: {answers.own}; work: {works}"
    return Observation(now(), state, known, detail), during


def save_evidence(server: Server, options: argparse.Namespace, history: History, metrics: Metrics | None) -> Path:
    """What is gone after the restart: metrics, the journal's end, and what each thread of the unit waits in.

    Raises OSError. Only the newest folders of an instance are kept.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = Path(options.evidence) / f"{options.instance}-{stamp}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = [asdict(observation) for observation in history.observations]
    (folder / "observations.json").write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    (folder / "metrics.txt").write_text(metrics.text if metrics else "no answer\n", encoding="utf-8")
    (folder / "threads.txt").write_text(server.threads(), encoding="utf-8")
    journal = ["journalctl", "--unit", options.unit, "--lines", "300", "--no-pager", "--output", "short-precise"]
    (folder / "journal.txt").write_text(run(journal), encoding="utf-8")
    # After a clock that was set back this one is not the last by name.
    kept = set(Path(options.evidence).glob(f"{options.instance}-{'[0-9]' * 8}T*Z")) - {folder}
    for old in sorted(kept)[: 1 - _KEPT_EVIDENCE]:
        shutil.rmtree(old)
    return folder


class CommandError(Exception):
    """A program of the host failed or did not end; the text says which and how."""


def run(command: Sequence[str]) -> str:
    """The output of a program, which has a quarter of a minute. Raises CommandError."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise CommandError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def read(path: Path) -> str:
    """The file's text, nothing if it is gone: processes end while they are being looked at."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def load_history(path: Path) -> History:
    """What earlier runs left; empty where there is nothing that can be understood."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        observations = [Observation(**entry) for entry in found["observations"]]
        return History(observations, [float(at) for at in found["restarts"]])
    except (OSError, ValueError, TypeError, KeyError):
        return History()


def store_history(path: Path, history: History, verdict: Verdict, now: float) -> None:
    """Raises OSError."""
    told: Mapping[str, Any] = {
        "checked": datetime.now(UTC).isoformat(timespec="seconds"),
        # The looks begin anew with a restart.
        "state": history.observations[-1].state if history.observations else "restarted",
        "verdict": asdict(verdict),
        "observations": [asdict(observation) for observation in history.observations[-_KEPT_OBSERVATIONS:]],
        "restarts": [at for at in history.restarts if at > now - _HOUR],
    }
    probe.write_atomically(path, json.dumps(told, sort_keys=True, indent=1) + "\n")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lifecycle liveness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--instance", required=True, help="name of the server, which names the files")
    add("--unit", required=True, help="its unit, which is restarted")
    add("--url", required=True, help="of the server, without a path")
    add("--health-route", required=True, help="route on which it serves a request of its own")
    add("--router", required=True, action="append", help="URL of a router of its group; once for each")
    add("--model", required=True, help="name under which the model is served")
    add("--peers", type=int, default=0, help="other servers of its role in its group")
    add("--progress", required=True, action="append", help="counter of tokens; once for each")
    add("--work", required=True, action="append", help="gauge of requests that wait or run; once for each")
    add("--active", required=True, help="gauge of open HTTP requests, with a label `endpoint`")
    add("--flat", type=float, required=True, help="seconds without progress and answer before a restart")
    add("--stuck", type=float, required=True, help="seconds with work and without progress before a restart")
    add("--max-restarts", type=int, required=True, help="restarts within an hour")
    add("--interval", type=float, required=True, help="seconds between two looks")
    add("--timeout", type=float, required=True, help="seconds for each question")
    add("--state", type=Path, required=True, help="folder of what was seen and done")
    add("--evidence", type=Path, required=True, help="folder for what is saved before a restart")
    add("--proc-root", type=Path, default=Path("/proc"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str], now: Callable[[], float] = time.monotonic) -> int:
    options = _arguments(argv)
    limits = Limits(options.flat, options.stuck, options.interval, options.max_restarts)
    path = options.state / f"{options.instance}.json"
    try:
        server = Server(options, next(iter(read_api_keys()), ""))
        history = load_history(path)
        unit = server.unit()
        # What was seen before it became active was seen of other processes.
        history.observations = [seen for seen in history.observations if seen.at >= unit.since]
        last = history.observations[-1] if history.observations else None
        observation, metrics = observe(server, unit, last, options.peers, now)
        history.observations.append(observation)
        verdict = decide(history.observations, history.restarts, now(), limits)
        print(f"{options.instance}: {observation.state} {observation.detail}".rstrip())
        if verdict.restart:
            _restart(server, unit, options, history, verdict, metrics, path, now)
        else:
            if verdict.reason != observation.state:
                print(f"{WARNING}{options.instance}: {verdict.reason}", file=sys.stderr)
            store_history(path, history, verdict, now())
    except (OSError, CommandError) as error:
        print(
            f"{WARNING}{options.instance}: found {error}; expected systemctl to answer and "
            f"{options.state} to be writable; see journalctl -u {options.unit}",
            file=sys.stderr,
        )
        return 1
    return 0


def _restart(
    server: Server,
    unit: Unit,
    options: argparse.Namespace,
    history: History,
    verdict: Verdict,
    metrics: Metrics | None,
    path: Path,
    now: Callable[[], float],
) -> None:
    """Raises OSError and CommandError."""
    if server.unit() != unit:
        # Somebody has stopped or restarted it while it was being asked.
        store_history(path, history, Verdict(False, f"{verdict.reason}; somebody else has stopped it"), now())
        return
    print(f"{WARNING}{options.instance}: restarting {options.unit}: {verdict.reason}", file=sys.stderr)
    try:
        folder = save_evidence(server, options, history, metrics)
        print(f"{WARNING}{options.instance}: evidence in {folder}", file=sys.stderr)
    except (OSError, CommandError) as error:
        # A full disk must not keep a dead server dead.
        print(f"{WARNING}{options.instance}: no evidence saved: {error}", file=sys.stderr)
    # Written down before it is done: one that is not could be repeated without limit.
    store_history(path, History([], [*history.restarts, now()]), verdict, now())
    # The unit starts it anew, as after any other death. Nothing is waited for: no stream of it can end, and a process
    # that was stopped would not even see a SIGTERM.
    run(["systemctl", "kill", "--signal=SIGKILL", "--", options.unit])
