# SPDX-License-Identifier: Apache-2.0
"""What has to be free before a start, what has to be there after it, and how long failed starts wait."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import host
import pytest
import start
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.lifecycle.stub import Stub, serving, status

# No machine that runs the tests has it.
UNIT = "llmfleet-tested.service"


class FakeProc:
    """A /proc with processes that listen, as the kernel writes it."""

    def __init__(self, root: Path) -> None:
        self.root, self.rows, self.inode = root, ["  sl  local_address ..."], 100
        (root / "net").mkdir(parents=True)
        (root / "net/tcp").write_text(self.rows[0] + "\n")

    def add(self, pid: int, unit: str, command: str, ports: tuple[int, ...] = (), state: str = "S") -> None:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (a (strange) name) {state} 1 1 1 0 -1 4194560\n")
        (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (folder / "cgroup").write_text(f"0::/llmfleet.slice/{unit}\n" if unit else "0::/\n")
        for port in ports:
            self.inode += 1
            (folder / "fd" / str(self.inode)).symlink_to(f"socket:[{self.inode}]")
            self.listen(port, self.inode)

    def listen(self, port: int, inode: int) -> None:
        self.rows.append(f"   0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 00000000 990 0 {inode} 1 0 1 0 0 10 0")
        (self.root / "net/tcp").write_text("\n".join(self.rows) + "\n")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def nvml(tmp_path: Path) -> Callable[[dict[int, dict[str, object]]], str]:
    """Make an interpreter that answers as the one with nvidia-ml-py would."""

    def make(gpus: dict[int, dict[str, object]]) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho chatter\nprintf '%s' '{json.dumps(gpus)}'\n")
        path.chmod(0o755)
        return str(path)

    return make


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def needs(ports: dict[str, int] | None = None, gpus: list[int] | None = None, python: str = "") -> start.Needs:
    return start.Needs(UNIT, ports or {}, gpus or [], python)


# --- the delay between failed starts


def test_the_delay_doubles_up_to_its_bound() -> None:
    assert [start.delay(failed, 5, 300) for failed in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]


@given(failed=st.integers(0, 10**9), base=st.floats(0.1, 1000), most=st.floats(0.1, 10**6))
def test_the_delay_never_shrinks_nor_passes_its_bound(failed: int, base: float, most: float) -> None:
    assert 0 <= start.delay(failed, base, most) <= start.delay(failed + 1, base, most) <= most


def test_failed_starts_are_counted_until_one_becomes_active() -> None:
    seen = []
    note = None
    # NRestarts, and when the unit last became active, at each start: asked for, failed, failed, active, failed.
    for restarts, active_us in [(0, 0), (1, 0), (2, 0), (3, 77), (4, 77)]:
        note = start.next_starts(note, restarts, active_us)
        seen.append(note.failed)
    assert seen == [0, 1, 2, 0, 1]


def test_a_start_that_somebody_asks_for_is_not_delayed() -> None:
    assert start.next_starts(start.Starts(6, 77), 0, 77) == start.Starts(0, 77)


def test_the_note_survives_and_a_broken_one_counts_as_none(tmp_path: Path) -> None:
    path = str(tmp_path / "prefill.starts")
    assert start.read_starts(path) is None
    start.write_starts(path, start.Starts(3, 99))
    assert start.read_starts(path) == start.Starts(3, 99)
    Path(path).write_text("three\n")
    assert start.read_starts(path) is None
    assert os.listdir(tmp_path) == ["prefill.starts"]


# --- what is free before a start


def test_all_free(proc: FakeProc) -> None:
    proc.add(7, "ssh.service", "sshd", (22,))
    assert start.taken(needs({"http": 30000}), str(proc.root)) == []


def test_whoever_holds_a_port_is_named(proc: FakeProc) -> None:
    proc.add(41, "squatter.service", "python3 -m http.server 30000", (30000,))
    proc.add(42, "", "nc -l 8998", (8998,))
    assert start.taken(needs({"http": 30000, "bootstrap": 8998}), str(proc.root)) == [
        "port 8998 (bootstrap) is held by PID 42 of no unit: nc -l 8998",
        "port 30000 (http) is held by PID 41 of squatter.service: python3 -m http.server 30000",
    ]


def test_what_an_earlier_run_left_is_named_and_a_zombie_is_not(proc: FakeProc) -> None:
    proc.add(50, UNIT, "sglang::scheduler")
    proc.add(51, UNIT, "python", state="Z")
    proc.add(os.getpid(), UNIT, "before-start")
    assert start.taken(needs(), str(proc.root)) == [
        f"PID 50 of {UNIT}: sglang::scheduler is left in the control group of {UNIT}"
    ]


def test_whoever_uses_a_gpu_is_named(proc: FakeProc, nvml: Callable[[dict[int, dict[str, object]]], str]) -> None:
    proc.add(60, "train.service", "python train.py")
    python = nvml(
        {0: {"pids": [60, 61], "used": 10}, 1: {"pids": [], "used": 80 * 1024**3}, 2: {"pids": [60], "used": 9}}
    )
    assert start.taken_gpus(needs(gpus=[0, 1], python=python), str(proc.root)) == [
        "GPU 0 is used by PID 60 of train.service: python train.py",
        "GPU 0 is used by PID 61 of no unit: command unknown",
        "GPU 1 has 80.0 GiB in use that no process has",
    ]


def test_gpus_without_nvml_are_said_to_be_unchecked(proc: FakeProc, capsys: pytest.CaptureFixture[str]) -> None:
    assert start.taken_gpus(needs(gpus=[0], python="/nowhere/python"), str(proc.root)) == []
    assert (
        capsys.readouterr().out == "the GPUs are not checked: cannot run /nowhere/python: No such file or directory\n"
    )


def test_a_driver_that_does_not_answer_is_left_behind(tmp_path: Path) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 60\n")
    stuck.chmod(0o755)
    with pytest.raises(host.NvmlError, match=r"did not answer within 0\.2 s"):
        host.read_gpus(str(stuck), timeout_s=0.2)


def test_nvml_that_fails_says_why() -> None:
    """This machine's Python has no nvidia-ml-py, or no driver: either way it says so."""
    with pytest.raises(host.NvmlError, match=r"ModuleNotFoundError|NVMLError"):
        host.read_gpus(sys.executable)


def test_what_is_taken_for_a_moment_is_waited_for() -> None:
    time = Time()
    assert start.wait_free(lambda: ["port"] if time.now < 3 else [], 5, time.clock, time.sleep) == []
    assert time.now == 3


def test_what_stays_taken_is_told_after_the_time_allowed() -> None:
    time = Time()
    assert start.wait_free(lambda: ["port"], 5, time.clock, time.sleep) == ["port"]
    assert time.now == 5


def test_a_refusal_says_what_is_found_expected_and_to_do() -> None:
    text = start.refusal(UNIT, ["port 1 is held by x", "GPU 0 is used by y"])
    assert text.startswith(f"{UNIT} cannot have what it needs: found port 1 is held by x; GPU 0 is used by y. Expected")
    assert "To do: stop that process" in text


def test_before_start_names_a_squatter_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "unit_counters", lambda _unit: (0, 0))
    monkeypatch.setattr(start, "SETTLE_S", 0)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        arguments = ["--unit", UNIT, "--port", f"http={port}", "--note", str(tmp_path / "note")]
        assert start.before_start(arguments) == 1
    assert f"port {port} (http) is held by PID {os.getpid()} of" in capsys.readouterr().err
    assert start.before_start(arguments) == 0


def test_before_start_waits_longer_after_each_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter([(0, 0), (1, 0), (2, 0), (3, 0)])
    slept: list[float] = []
    monkeypatch.setattr(host, "unit_counters", lambda _unit: next(counters))
    monkeypatch.setattr(start.time, "sleep", slept.append)
    arguments = ["--unit", UNIT, "--note", str(tmp_path / "note"), "--delay", "2", "--delay-max", "5"]
    assert [start.before_start(arguments) for _ in range(4)] == [0, 0, 0, 0]
    assert slept == [4, 5, 5]


def test_before_start_goes_on_when_systemd_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(_unit: str) -> tuple[int, int]:
        raise FileNotFoundError("systemctl")

    monkeypatch.setattr(host, "unit_counters", silent)
    start.write_starts(str(tmp_path / "note"), start.Starts(9, 0))
    assert start.before_start(["--unit", UNIT, "--note", str(tmp_path / "note")]) == 0
    assert "this start is not delayed" in capsys.readouterr().out


def test_stopped_is_content_when_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        arguments = ["--unit", UNIT, "--port", f"http={port}", "--within", "0"]
        assert start.stopped(arguments) == 1
    assert f"port {port} (http) is held by" in capsys.readouterr().err
    assert start.stopped(arguments) == 0


# --- the layers of readiness


@pytest.fixture
def server() -> Iterator[Stub]:
    with serving() as stub:
        yield stub


def test_the_route_layer(server: Stub) -> None:
    url = f"{server.url}/ready"
    for code in (503, 404, 204):
        server.routes["/ready"] = status(code)
        assert start.missing_route(url) == f"{url} answers with status {code}"
    server.routes["/ready"] = status(200)
    assert start.missing_route(url) == ""


def test_the_route_layer_where_nobody_answers() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/ready"
        assert start.missing_route(url).startswith(f"{url} does not answer: ")


def report(folder: Path, process: str, **features: str) -> None:
    told = {"pid": 9, "features": {name: {"value": value} for name, value in features.items()}}
    (folder / f"{process}.json").write_text(json.dumps(told))


def test_the_features_layer(tmp_path: Path) -> None:
    wanted = {"queue_bound": "on"}
    missing = "features are reported by no process; expected main and 2 ranks"
    assert start.missing_features(wanted, 2, str(tmp_path / "none")) == missing
    report(tmp_path, "main", queue_bound="on")
    report(tmp_path, "tp0-pp0-dp0", queue_bound="on")
    missing = "features are reported by main, tp0-pp0-dp0; expected main and 2 ranks"
    assert start.missing_features(wanted, 2, str(tmp_path)) == missing
    report(tmp_path, "tp1-pp0-dp0")
    missing = "tp1-pp0-dp0 (PID 9) runs with the features {}; expected {'queue_bound': 'on'}"
    assert start.missing_features(wanted, 2, str(tmp_path)) == missing
    report(tmp_path, "tp1-pp0-dp0", queue_bound="on")
    assert start.missing_features(wanted, 2, str(tmp_path)) == ""


def test_the_ports_layer(proc: FakeProc) -> None:
    asked = needs({"http": 30000, "bootstrap": 8998})
    proc.add(70, UNIT, "sglang", (30000,))
    assert start.missing_ports(asked, str(proc.root)) == "nothing listens on port 8998 (bootstrap)"
    proc.add(71, UNIT, "sglang", (8998,))
    assert start.missing_ports(asked, str(proc.root)) == ""


def test_a_ports_owner_has_to_be_of_the_unit(proc: FakeProc) -> None:
    proc.add(72, "old.service", "sglang", (30000,))
    assert start.missing_ports(needs({"http": 30000}), str(proc.root)) == (
        f"port 30000 (http) is held by PID 72 of old.service: sglang; expected a process of {UNIT}"
    )
    proc.listen(30009, 9999)
    assert start.missing_ports(needs({"http": 30009}), str(proc.root)) == (
        f"port 30009 (http) is held by a process of another user; expected one of {UNIT}"
    )


@pytest.mark.parametrize(
    ("gpus", "missing"),
    [
        ({0: {"pids": [80], "used": 1}, 1: {"pids": [81], "used": 1}, 2: {"pids": [82], "used": 1}}, ""),
        ({0: {"pids": [80], "used": 1}, 1: {"pids": [], "used": 1}}, f"no process of {UNIT} is on GPU 1"),
        (
            {0: {"pids": [80], "used": 1}, 1: {"pids": [81, 82], "used": 1}},
            f"GPU 1 is used by PID 82 of train.service: train; expected {UNIT} alone",
        ),
        (
            {0: {"pids": [80], "used": 1}, 1: {"pids": [81], "used": 1}, 2: {"pids": [81], "used": 1}},
            f"GPU 2 is used by PID 81 of {UNIT}: rank 1; its GPUs are 0, 1",
        ),
    ],
)
def test_the_gpus_layer(
    proc: FakeProc,
    nvml: Callable[[dict[int, dict[str, object]]], str],
    gpus: dict[int, dict[str, object]],
    missing: str,
) -> None:
    proc.add(80, UNIT, "rank 0")
    proc.add(81, UNIT, "rank 1")
    proc.add(82, "train.service", "train")
    assert start.missing_gpus(needs(gpus=[0, 1], python=nvml(gpus)), str(proc.root)) == missing


def layers(process: list[str], route: list[str]) -> list[start.Layer]:
    """Layers that answer from a script, their last answer for ever."""

    def script(answers: list[str]) -> Callable[[], str]:
        return lambda: answers.pop(0) if len(answers) > 1 else answers[0]

    return [start.Layer("process", script(process)), start.Layer("route", script(route))]


def test_waiting_tells_each_thing_that_is_missing_once() -> None:
    time, told = Time(), list[str]()
    found = start.wait_ready(layers([""], ["refused", "refused", "503", ""]), 60, told.append, time.clock, time.sleep)
    assert (found, told, time.now) == ("", ["waiting: refused", "waiting: 503"], 3)


def test_waiting_ends_with_its_time() -> None:
    time = Time()
    found = start.wait_ready(layers([""], ["503"]), 10, lambda _text: None, time.clock, time.sleep)
    assert (found, time.now) == ("not ready after 10 s: 503", 10)


def test_waiting_ends_with_the_process() -> None:
    """systemd takes no notice of the main process's end while ExecStartPost= runs."""
    time = Time()
    gone = "the main process (PID 5) has ended"
    found = start.wait_ready(layers(["", "", gone], ["503"]), 900, lambda _text: None, time.clock, time.sleep)
    assert (found, time.now) == (gone, 2)


def test_ready_of_a_server_of_this_process(server: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = host._ports.unit_of_cgroup(Path("/proc/self/cgroup").read_text())
    report(tmp_path, "main", queue_bound="on")
    report(tmp_path, "tp0-pp0-dp0", queue_bound="on")
    url, port = f"{server.url}/ready", server.server_address[1]
    arguments = ["--unit", unit, "--main-pid", str(os.getpid()), "--url", url, "--port", f"http={port}"]
    arguments += ["--features", '{"queue_bound": "on"}', "--ranks", "1", "--reports", str(tmp_path), "--within", "0"]
    server.routes["/ready"] = status(503)
    assert start.ready(arguments) == 1
    assert f"not ready after 0 s: {url} answers with status 503" in capsys.readouterr().err
    server.routes["/ready"] = status(200)
    assert start.ready(arguments) == 0
    assert "process, route, features, ports are as planned" in capsys.readouterr().out


def test_ready_takes_the_main_process_from_systemd(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAINPID", str(os.getpid()))
    assert start.ready(["--unit", UNIT]) == 0
    monkeypatch.setenv("MAINPID", str(2**22 + 1))
    assert start.ready(["--unit", UNIT]) == 1
    assert f"the main process (PID {2**22 + 1}) has ended" in capsys.readouterr().err
    monkeypatch.delenv("MAINPID")
    with pytest.raises(SystemExit):
        start.ready(["--unit", UNIT])


@pytest.mark.parametrize("port", ["30000", "http=", "http=x", "http=0", "http=65536"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        start.stopped(["--unit", UNIT, "--port", port])
    assert "expected such as http=30000" in capsys.readouterr().err
