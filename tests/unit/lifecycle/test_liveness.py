# SPDX-License-Identifier: Apache-2.0
"""When a server is restarted, and above all when it is not: the decision alone, and whole looks at a stub server."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import liveness
import probe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from liveness import EXCUSED, IDLE, MOVING, SERVING, SILENT, WAITING, Answers, Limits, Metrics, Observation, Unit

from tests.unit.lifecycle.stub import CHAT, WHOLE, Answer, Stub, hangs, serving, status, stream

STATES = (EXCUSED, MOVING, SERVING, IDLE, SILENT, WAITING)
LIMITS = Limits(flat=180.0, stuck=600.0, interval=30.0, max_restarts=3)


# --- the decision ---------------------------------------------------------------------------------------------------


def looks(states: list[str], interval: float = 30.0) -> list[Observation]:
    return [Observation(number * interval, state) for number, state in enumerate(states)]


def decide(states: list[str], interval: float = 30.0) -> bool:
    observations = looks(states, interval)
    return liveness.decide(observations, [], observations[-1].at, LIMITS).restart


@pytest.mark.parametrize(
    ("states", "restart"),
    [
        ([SILENT] * 6, False),  # 150 s
        ([SILENT] * 7, True),  # 180 s
        ([MOVING, *[SILENT] * 6], False),
        ([SILENT] * 7 + [MOVING], False),
        ([WAITING] * 20, False),  # 570 s
        ([WAITING] * 21, True),  # 600 s
        ([WAITING] * 15 + [SILENT] * 6, True),  # 600 s of either
        ([WAITING, SILENT] * 10, False),
        ([SILENT, IDLE] * 20, False),
    ],
)
def test_how_long_it_takes(states: list[str], restart: bool) -> None:
    assert decide(states) is restart


def test_looks_that_are_too_few_or_too_far_apart_say_nothing() -> None:
    assert not liveness.decide([], [], 0.0, LIMITS).restart
    # Nobody looked between them: a machine that slept, a timer that was stopped.
    assert not decide([SILENT] * 9, interval=91.0)
    assert decide([SILENT] * 9, interval=90.0)
    two = [Observation(0.0, SILENT), Observation(90.0, SILENT)]
    assert not liveness.decide(two, [], 90.0, Limits(60.0, 600.0, 30.0, 3)).restart


SEQUENCES = st.lists(st.tuples(st.sampled_from(STATES), st.floats(1.0, 200.0)), min_size=1, max_size=60)


def spaced(steps: list[tuple[str, float]]) -> list[Observation]:
    at = 0.0
    found = []
    for state, gap in steps:
        at += gap
        found.append(Observation(at, state))
    return found


@given(SEQUENCES, st.sampled_from([EXCUSED, MOVING, SERVING, IDLE]))
def test_never_after_a_good_look(steps: list[tuple[str, float]], state: str) -> None:
    """A server whose counters move, that serves, that is idle, starts or compiles: whatever was before."""
    seen = spaced(steps)
    seen.append(Observation(seen[-1].at + 30, state))
    assert not liveness.decide(seen, [], seen[-1].at, LIMITS).restart


@given(SEQUENCES)
def test_only_after_bad_looks_for_the_whole_time(steps: list[tuple[str, float]]) -> None:
    seen = spaced(steps)
    now = seen[-1].at
    if liveness.decide(seen, [], now, LIMITS).restart:
        late = [one.state for one in seen if one.at > now - LIMITS.flat]
        assert set(late) <= {SILENT, WAITING}
        if set(late) != {SILENT}:
            assert {one.state for one in seen if one.at > now - LIMITS.stuck} <= {SILENT, WAITING}


@given(SEQUENCES, st.lists(st.floats(1.0, 90.0), min_size=3, max_size=30))
def test_always_after_silence_for_long_enough(steps: list[tuple[str, float]], gaps: list[float]) -> None:
    """Whatever was before, and unless it was restarted too often."""
    seen = spaced([*steps, *((SILENT, gap) for gap in gaps)])
    length = sum(gaps[1:])
    verdict = liveness.decide(seen, [], seen[-1].at, LIMITS)
    if length >= LIMITS.flat:
        assert verdict.restart
        limited = liveness.decide(seen, [seen[-1].at - 1] * LIMITS.max_restarts, seen[-1].at, LIMITS)
        assert not limited.restart
        assert "not restarted, since it was 3 times within an hour" in limited.reason


@given(
    st.lists(st.tuples(st.sampled_from([SILENT, SILENT, SILENT, WAITING, MOVING]), st.floats(10.0, 60.0)), max_size=400)
)
def test_never_more_often_than_the_limit(steps: list[tuple[str, float]]) -> None:
    """As ``main`` does it: a restart is noted and the looks begin anew."""
    limits = Limits(flat=60.0, stuck=120.0, interval=30.0, max_restarts=2)
    at = 0.0
    seen: list[Observation] = []
    restarts: list[float] = []
    for state, gap in steps:
        at += gap
        seen.append(Observation(at, state))
        if liveness.decide(seen, restarts, at, limits).restart:
            restarts.append(at)
            seen = []
    assert all(later - earlier >= 3600 for earlier, later in zip(restarts, restarts[2:], strict=False))


# --- one look -------------------------------------------------------------------------------------------------------


@dataclass
class FakeServer:
    """Answers for ``observe``."""

    running: list[str] = field(default_factory=list)
    first: Metrics | None = None
    answers: Answers = field(default_factory=lambda: Answers(False, probe.Result(probe.TIMEOUT), None))

    def compilers(self) -> list[str]:
        return self.running

    def metrics(self) -> Metrics | None:
        return self.first

    def ask(self) -> Answers:
        return self.answers


NOW = 5000.0


def observe(server: FakeServer, known: float | None, peers: int = 0, active: str = "active") -> Observation:
    last = Observation(NOW - 30, MOVING, known)
    return liveness.observe(cast("liveness.Server", server), Unit(active, 0.0), last, peers, lambda: NOW)[0]


RESULTS = st.sampled_from([probe.Result(reason) for reason in probe.REASONS])
COUNTS = st.none() | st.builds(Metrics, st.integers(0, 3).map(float), st.integers(0, 2).map(float), st.just(""))
SERVERS = st.builds(FakeServer, first=COUNTS, answers=st.builds(Answers, st.booleans(), RESULTS, COUNTS))


@given(SERVERS, st.floats(0, 3), st.integers(0, 2))
def test_a_server_whose_counters_move_is_never_dead(server: FakeServer, known: float, peers: int) -> None:
    seen = [metrics.tokens for metrics in (server.first, server.answers.during) if metrics]
    state = observe(server, known, peers).state
    if any(tokens != known for tokens in seen):
        assert state == MOVING
    else:
        assert state in (SERVING, IDLE, SILENT, WAITING)


@given(SERVERS, st.none() | st.floats(0, 3), st.integers(0, 2))
def test_whoever_starts_or_compiles_is_excused(server: FakeServer, known: float | None, peers: int) -> None:
    compiling = FakeServer(**{**vars(server), "running": ["nvcc"]})
    assert observe(compiling, known, peers).state == EXCUSED
    for active in ("activating", ""):
        assert observe(server, known, peers, active).state == EXCUSED


@given(SERVERS, st.integers(0, 2))
def test_rejections_say_nothing_about_a_server(server: FakeServer, peers: int) -> None:
    """A probe that is shed and one that is not answered lead to the same."""
    shed, timed_out = (
        FakeServer(
            **{**vars(server), "answers": Answers(server.answers.own, probe.Result(reason), server.answers.during)}
        )
        for reason in (probe.SHED, probe.TIMEOUT)
    )
    assert observe(shed, 1.0, peers).state == observe(timed_out, 1.0, peers).state


FLAT = Metrics(7.0, 0.0, "")
BUSY = Metrics(7.0, 4.0, "")
OK, FAILED = probe.Result(probe.OK), probe.Result(probe.TIMEOUT)


@pytest.mark.parametrize(
    ("first", "answers", "peers", "state"),
    [
        (FLAT, Answers(True, OK, FLAT), 0, SERVING),
        (FLAT, Answers(False, OK, FLAT), 0, SERVING),  # only this server can have served it
        (FLAT, Answers(False, OK, FLAT), 1, SILENT),  # its peer has
        (FLAT, Answers(True, FAILED, FLAT), 0, IDLE),  # the router is at fault, or nobody sent anything
        (FLAT, Answers(True, FAILED, BUSY), 0, WAITING),  # it was given the probe, and did nothing with it
        (BUSY, Answers(True, FAILED, FLAT), 0, WAITING),
        (BUSY, Answers(False, FAILED, BUSY), 0, SILENT),
        (FLAT, Answers(False, FAILED, FLAT), 0, SILENT),
        (None, Answers(False, FAILED, None), 0, SILENT),
        (None, Answers(True, FAILED, None), 0, WAITING),
    ],
)
def test_what_a_server_without_progress_is(first: Metrics | None, answers: Answers, peers: int, state: str) -> None:
    found = observe(FakeServer(first=first, answers=answers), 7.0, peers)
    assert (found.state, found.tokens) == (state, 7.0)


def test_metrics_are_summed_over_ranks_and_modes() -> None:
    text = """\
# HELP sglang:realtime_tokens_total Tokens.
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 10.0
sglang:realtime_tokens_total{mode="prefill_cache",tp_rank="0"} 2.5
sglang:realtime_tokens_total_created{mode="prefill_cache",tp_rank="0"} 1e9
sglang:num_running_reqs{tp_rank="0"} 2.0
sglang:num_queue_reqs 1.0
sglang:num_queue_reqs{tp_rank="1"} NaN
sglang:http_requests_active{endpoint="/metrics",method="GET"} 1.0
sglang:http_requests_active{endpoint="/health_generate",method="GET"} 1.0
sglang:http_requests_active{endpoint="/v1/chat/completions",method="POST"} 4.0
sglang:num_retracted_reqs 8.0
not a sample
"""
    work = ["sglang:num_running_reqs", "sglang:num_queue_reqs"]
    found = liveness.parse_metrics(text, ["sglang:realtime_tokens_total"], work, "sglang:http_requests_active")
    assert (found.tokens, found.work, found.text) == (12.5, 7.0, text)


@given(st.text(max_size=100))
def test_any_text_can_be_read_as_metrics(text: str) -> None:
    found = liveness.parse_metrics(text, ["a"], ["b"], "c")
    assert found.tokens == found.tokens  # a number
    assert found.work >= 0


# --- whole runs -----------------------------------------------------------------------------------------------------

UNIT = "llmfleet-decode.service"


class Host:
    """A server, its router and its systemd. Each ``look`` is a run of the program, ``interval`` seconds later."""

    def __init__(self, folder: Path, engine: Stub, router: Stub) -> None:
        self.folder, self.engine, self.router = folder, engine, router
        self.clock = 10_000.0
        self.since = 0.0
        self.active = "active"
        self.tokens = 7.0
        self.queued = 0.0
        self.refusing = False
        for path in ("state", "proc", "evidence"):
            (folder / path).mkdir()
        engine.routes |= {
            "/metrics": lambda handler: status(200, self.metrics())(handler),
            "/health": status(200),
            "/health_generate": status(200),
        }
        router.routes[CHAT] = stream(*WHOLE)

    def metrics(self) -> str:
        return f'sglang:realtime_tokens_total{{mode="decode"}} {self.tokens}\nsglang:num_queue_reqs {self.queued}\n'

    def run(self, command: list[str]) -> str:
        """systemctl and journalctl."""
        if command[:2] == ["systemctl", "show"]:
            return f"ActiveState={self.active}\nActiveEnterTimestampMonotonic={self.since * 1e6:.0f}\n"
        with (self.folder / "commands").open("a") as commands:
            commands.write(" ".join(command) + "\n")
        if command[0] == "systemctl":
            if self.refusing:
                raise liveness.CommandError("systemctl kill ended with 1: Refused.")
            self.since, self.tokens = self.clock, 0.0
        return "the journal's end\n"

    @property
    def restarts(self) -> list[str]:
        commands = self.folder / "commands"
        return [
            line
            for line in (commands.read_text() if commands.exists() else "").splitlines()
            if line.startswith("systemctl")
        ]

    @property
    def state(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder / "state" / "decode.json").read_text())
        return found

    def look(self, times: int = 1, moving: float = 0.0, interval: float = 30.0) -> int:
        """The last run's exit status. ``moving``: tokens between two looks."""
        code = 0
        for _look in range(times):
            self.clock += interval
            self.tokens += moving
            code = liveness.main(self.arguments(), lambda: self.clock)
        return code

    def arguments(self) -> list[str]:
        given = {
            "instance": "decode",
            "unit": UNIT,
            "url": self.engine.url,
            "health-route": "/health_generate",
            "router": self.router.url,
            "model": "tiny",
            "progress": "sglang:realtime_tokens_total",
            "work": "sglang:num_queue_reqs",
            "active": "sglang:http_requests_active",
            "flat": LIMITS.flat,
            "stuck": LIMITS.stuck,
            "max-restarts": LIMITS.max_restarts,
            "interval": LIMITS.interval,
            "timeout": self.timeout,
            "state": self.folder / "state",
            "evidence": self.folder / "evidence",
            "proc-root": self.folder / "proc",
        }
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    timeout = 60.0
    """Far above what an answer takes. Tests with answers that hang wait for it at each look."""

    def silence(self, *routes: str) -> None:
        """From now on these routes of the engine hang, and so does the router."""
        self.timeout = 0.2
        self.engine.routes |= dict.fromkeys(routes, hangs)
        self.router.routes[CHAT] = hangs


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with serving() as engine, serving() as router:
        found = Host(tmp_path, engine, router)
        monkeypatch.setattr(liveness, "run", found.run)
        monkeypatch.setattr(liveness, "_METRICS_SECONDS", 60.0)
        yield found


def test_a_busy_server_that_fails_its_health_check_is_left_alone(host: Host) -> None:
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(500)
    host.look(times=12, moving=1.0)
    assert host.restarts == []
    assert host.state["state"] == MOVING
    assert host.engine.asked("/health_generate") == 0


def test_the_same_without_progress_is_restarted_once(host: Host) -> None:
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(500)
    host.look(times=9)  # the first has nothing to compare with, the last is the first after the restart
    assert host.restarts == [f"systemctl kill --signal=SIGKILL -- {UNIT}"]
    assert host.state["state"] == MOVING


@pytest.mark.parametrize("answer", [status(429), status(503, Retry_After="1")])
def test_a_dead_server_behind_a_router_that_rejects_is_restarted(host: Host, answer: Answer) -> None:
    """What a dead server holds fills the router, so that nothing comes through any more."""
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = answer
    host.look(times=8)
    assert len(host.restarts) == 1


@pytest.mark.parametrize("answer", [status(429), status(503, Retry_After="1")])
def test_a_full_router_is_no_reason(host: Host, answer: Answer) -> None:
    host.queued = 32
    host.router.routes[CHAT] = answer
    host.look(times=40, moving=100.0)
    assert host.restarts == []


def test_a_dead_scheduler_behind_a_health_route_that_says_200(host: Host) -> None:
    host.look()
    host.silence("/health_generate", CHAT)
    host.look(times=8)
    assert len(host.restarts) == 1
    assert host.engine.asked("/health") == 0  # says 200 all the while, and nobody asks it


def test_a_stopped_server_answers_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.look()
    monkeypatch.setattr(liveness, "_METRICS_SECONDS", 0.1)
    host.silence("/metrics", "/health_generate", CHAT)
    host.look(times=6)
    assert host.restarts == []
    host.look()
    assert len(host.restarts) == 1
    assert (next((host.folder / "evidence").iterdir()) / "metrics.txt").read_text() == "no answer\n"


@pytest.mark.parametrize("answer", [status(500), status(429)])
def test_a_stuck_queue_is_given_the_longer_time(host: Host, answer: Answer) -> None:
    """Deadlocked ranks behind a health route that says 200, which no probe comes through."""
    host.queued = 7
    host.router.routes[CHAT] = answer
    host.look(times=21)
    assert host.restarts == []
    host.look()
    assert len(host.restarts) == 1


def test_a_server_that_waits_for_a_dead_peer_is_left_alone(host: Host) -> None:
    """Its requests are given up by the engine before the longer time is over."""
    host.queued = 7
    host.router.routes[CHAT] = status(503)
    host.look(times=11)
    host.queued = 0
    host.look(times=40)
    assert host.restarts == []
    assert host.state["state"] == IDLE


def test_an_idle_fleet_is_left_alone(host: Host) -> None:
    host.look(times=40)
    assert host.restarts == []
    assert host.state["state"] == SERVING


def test_an_idle_server_behind_a_dead_router_is_left_alone(host: Host) -> None:
    host.router.routes[CHAT] = status(500)
    host.look(times=40)
    assert host.restarts == []
    assert host.state["state"] == IDLE


@pytest.mark.parametrize("active", ["activating", "deactivating", "failed", "inactive", ""])
def test_a_unit_that_does_not_run_is_not_asked(host: Host, active: str) -> None:
    host.active = active
    host.engine.routes["/health_generate"] = status(503)
    host.look(times=40)
    assert host.restarts == []
    assert host.engine.requests == []


def test_looks_at_processes_that_have_ended_do_not_count(host: Host) -> None:
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(503)
    host.look(times=7)
    # Restarted by somebody, between two looks. The first look has nothing to compare with.
    host.since = host.clock + 1
    host.look(times=7)
    assert host.restarts == []
    host.look()
    assert len(host.restarts) == 1


def process(proc: Path, pid: int, unit: str, comm: str) -> None:
    """A process with one thread, as /proc shows it."""
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::/llmfleet.slice/{unit}\n")
    (folder / "stat").write_text(f"{pid} ({comm}) S 1 1\n")
    (folder / "cmdline").write_text(f"{comm}\0")
    (folder / "comm").write_text(f"{comm}\n")
    told = f"Name:\t{comm}\nState:\tT (stopped)\nvoluntary_ctxt_switches:\t12\n"
    (folder / "task" / str(pid) / "status").write_text(told)
    (folder / "task" / str(pid) / "wchan").write_text("do_signal_stop")


def test_a_server_that_compiles_is_left_alone(host: Host) -> None:
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(503)
    process(host.folder / "proc", 41, "llmfleet-prefill.service", "cicc")
    host.look(times=7)
    process(host.folder / "proc", 42, UNIT, "cicc")
    host.look(times=40)
    assert host.restarts == []
    assert host.state["state"] == EXCUSED


def test_restarts_are_limited_and_the_rest_is_said(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(503)
    for _restart in range(3):
        host.look(times=8)
    assert len(host.restarts) == 3
    host.look(times=20)
    assert len(host.restarts) == 3
    assert "not restarted, since it was 3 times within an hour" in capsys.readouterr().err
    # The oldest is more than an hour ago.
    host.look(times=86)
    assert len(host.restarts) == 4


def test_evidence_is_saved_before_the_restart(host: Host) -> None:
    process(host.folder / "proc", 42, UNIT, "sglang::schedul")
    host.look()
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(500, "down")
    host.look(times=7)
    commands = (host.folder / "commands").read_text().splitlines()
    assert [line.split()[0] for line in commands] == ["journalctl", "systemctl"]
    assert f"--unit {UNIT}" in commands[0]
    (folder,) = (host.folder / "evidence").iterdir()
    assert folder.name.startswith("decode-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "sglang:realtime_tokens_total" in (folder / "metrics.txt").read_text()
    assert (folder / "journal.txt").read_text() == "the journal's end\n"
    assert "42 42 sglang::schedul | T (stopped) | 12 | do_signal_stop" in (folder / "threads.txt").read_text()
    seen = json.loads((folder / "observations.json").read_text())
    assert [one["state"] for one in seen] == [MOVING, *[SILENT] * 7]
    assert seen[-1]["detail"] == "probe: status; own answer: False; work: False"
    assert (host.state["state"], host.state["observations"]) == ("restarted", [])
    assert host.state["restarts"] == [host.clock]


@pytest.mark.parametrize("year", [2000, 2999])
def test_only_the_newest_evidence_of_a_server_is_kept(host: Host, year: int) -> None:
    """The new one too where the clock was set back, and those before it are of its future."""
    evidence = host.folder / "evidence"
    for name in ("decode", "decode-b"):
        for day in range(10, 30):
            (evidence / f"{name}-{year}11{day}T000000Z").mkdir()
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(500)
    host.look(times=8)
    left = sorted(path.name for path in evidence.iterdir() if not path.name.startswith("decode-b"))
    assert [name for name in left if name.startswith(f"decode-{year}")] == [
        f"decode-{year}11{day}T000000Z" for day in range(21, 30)
    ]
    assert len(left) == 10
    assert len(list(evidence.glob("decode-b*"))) == 20


def test_a_full_disk_does_not_keep_a_dead_server_dead(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    (host.folder / "evidence").rmdir()
    (host.folder / "evidence").write_text("no folder")
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(500)
    host.look(times=8)
    assert len(host.restarts) == 1
    assert "no evidence saved" in capsys.readouterr().err


def test_a_restart_that_systemd_refuses_is_an_error_and_counts(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(500)
    host.refusing = True
    assert host.look(times=8) == 1
    assert "found systemctl kill ended with 1: Refused." in capsys.readouterr().err
    assert host.state["restarts"] == [host.clock]


@pytest.mark.parametrize("change", [{"active": "inactive"}, {"since": 10_240.0}])
def test_a_unit_that_changed_while_it_was_asked_is_left_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    """Stopped or restarted by a person or a play."""
    host.engine.routes["/health_generate"] = status(503)
    host.router.routes[CHAT] = status(500)
    host.look(times=7)
    decide = liveness.decide

    def changed(*arguments: object) -> liveness.Verdict:
        vars(host).update(change)
        return decide(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(liveness, "decide", changed)
    host.look()
    assert host.restarts == []
    assert host.state["verdict"] == {
        "restart": False,
        "reason": "no progress and no answer of its own for 180 s; somebody else has stopped it",
    }


@pytest.mark.parametrize("text", ["", "{", "[]", '{"observations": [{"at": 1}], "restarts": []}', "null"])
def test_a_broken_state_file_is_begun_anew(host: Host, text: str) -> None:
    (host.folder / "state" / "decode.json").write_text(text)
    assert host.look() == 0
    assert [one["state"] for one in host.state["observations"]] == [MOVING]  # type: ignore[attr-defined]


def test_the_state_file_does_not_grow(host: Host) -> None:
    host.look(times=130, moving=1.0)
    assert len(host.state["observations"]) == 100  # type: ignore[arg-type]


def test_a_run_ends_at_its_deadlines(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything hangs; what bounds the run is added up."""
    monkeypatch.setattr(liveness, "_METRICS_SECONDS", 0.2)
    host.silence("/metrics", "/health_generate", CHAT)
    assert host.look() == 0
    assert host.state["state"] == SILENT
    assert not host.engine.ending.is_set()


# --- programs of the host -------------------------------------------------------------------------------------------


def test_a_program_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "systemctl"
    script.write_text('#!/bin/sh\necho "Unit $2 not found." >&2\nexit 5\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(liveness.CommandError, match="systemctl restart x ended with 5: Unit x not found"):
        liveness.run(["systemctl", "restart", "x"])
    with pytest.raises(liveness.CommandError, match="none-such: "):
        liveness.run(["none-such"])
    monkeypatch.setattr(liveness, "_COMMAND_SECONDS", 0.1)
    with pytest.raises(liveness.CommandError, match="timed out"):
        liveness.run(["sleep", "60"])


def test_what_systemd_says_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    server = liveness.Server(argparse.Namespace(unit=UNIT), "")
    monkeypatch.setattr(
        liveness, "run", lambda _command: "ActiveState=active\nActiveEnterTimestampMonotonic=81234567\n"
    )
    assert server.unit() == Unit("active", 81.234567)
    monkeypatch.setattr(liveness, "run", lambda _command: "ActiveState=inactive\n")
    assert server.unit() == Unit("inactive", 0.0)


def test_the_clock_is_the_one_of_systemd() -> None:
    """Its monotonic timestamps are those of the same clock, which no change of the time moves."""
    assert time.get_clock_info("monotonic").implementation == "clock_gettime(CLOCK_MONOTONIC)"
