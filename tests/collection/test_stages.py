# SPDX-License-Identifier: Apache-2.0
"""The stage runner: a green line must mean that everything ran and nothing failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import stages
from tools.stages import Stage


@pytest.mark.parametrize(
    ("returncode", "output", "expected"),
    [
        (0, "anything", (1, 0, 0)),
        (1, "anything", (0, 1, 0)),
        (0, "....\n37 passed, 1 warning in 0.71s\n", (37, 0, 0)),
        (1, "1 failed, 2 passed, 3 skipped in 80.84s (0:01:20)\n", (2, 1, 3)),
        (1, "=== 1 failed, 4 passed, 2 errors in 1.00s ===\n", (4, 3, 0)),
        (2, "5 passed in 1.00s\n", (5, 1, 0)),
    ],
)
def test_counts_of_a_command(returncode: int, output: str, expected: tuple[int, int, int]) -> None:
    assert stages.counts(returncode, output) == expected


ALL = [Stage(name, "", [[name]]) for name in ("a", "b", "c")]


@pytest.mark.parametrize(
    ("only", "start", "expected"),
    [(None, None, "abc"), ("c,a", None, "ac"), (None, "b", "bc"), ("a,c", "b", "c")],
)
def test_chosen_stages_keep_their_order(only: str | None, start: str | None, expected: str) -> None:
    assert "".join(stage.name for stage in stages.chosen(ALL, only, start)) == expected


def test_neighbours_that_are_beside_each_other_run_together() -> None:
    plan = [Stage("a", "", []), Stage("b", "", [], beside=True), Stage("c", "", [], beside=True), Stage("d", "", [])]
    assert [[stage.name for stage in batch] for batch in stages.batches(plan)] == [["a"], ["b", "c"], ["d"]]


def test_stages_beside_each_other_really_run_at_the_same_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of the two waits for a file that the other one makes: one after the other, neither would end well.
    wait = (
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "deadline = time.monotonic() + 30\n"
        "while not pathlib.Path(sys.argv[2]).exists():\n"
        "    assert time.monotonic() < deadline\n"
        "    time.sleep(0.01)\n"
    )
    one, two = str(cache / "one"), str(cache / "two")
    plan = [
        Stage("first", "", [[*fake(wait), one, two]], beside=True),
        Stage("second", "", [[*fake(wait), two, one]], beside=True),
    ]
    monkeypatch.setattr(stages, "stages", lambda: plan)
    assert stages.main([]) == 0


def test_an_unknown_stage_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown stage 'd'; expected one of a, b, c"):
        stages.chosen(ALL, "a,d", None)


def fake(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMFLEET_CACHE", str(tmp_path))
    return tmp_path


def test_a_failure_stops_the_run_and_shows_the_tail(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [
        Stage("one", "", [fake("print('fine')")]),
        Stage("two", "", [fake("import sys; print('the reason'); sys.exit(3)"), fake("open('never', 'w')")]),
        Stage("three", "", [fake("pass")]),
    ]
    monkeypatch.setattr(stages, "stages", lambda: plan)
    assert stages.main([]) == 1
    shown = capsys.readouterr().out
    assert "    | the reason" in shown
    assert str(cache / "logs/two.log") in shown
    assert shown.splitlines()[-1] == "1 passed, 1 failed"
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("three")] == ["run"]


def test_keep_going_runs_the_rest(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [Stage("one", "", [["no-such-program"]]), Stage("two", "", [fake("pass")])]
    monkeypatch.setattr(stages, "stages", lambda: plan)
    assert stages.main(["--keep-going"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed"
    assert "no-such-program: not found; tools/setup installs it" in (cache / "logs/one.log").read_text()
    assert "not found" not in (cache / "logs/two.log").read_text()
