# SPDX-License-Identifier: Apache-2.0
"""The stage runner: a green line must mean that everything ran and nothing failed."""

from __future__ import annotations

import subprocess
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


FULL = ["fresh", *(f"molecule-{name}" for name in ("upgrade", "gateway", "topologies", "outage", "power"))]
WITH_FULL = [*ALL, Stage("d", "", [["d"]], full=True)]


@pytest.mark.parametrize(
    ("only", "start", "full", "expected"),
    [
        (None, None, False, "abc"),
        (None, None, True, "abcd"),
        ("d", None, False, "d"),
        (None, "c", True, "cd"),
        (None, "d", False, ""),
    ],
)
def test_a_full_stage_runs_with_full_or_by_its_name(
    only: str | None, start: str | None, full: bool, expected: str
) -> None:
    assert "".join(stage.name for stage in stages.chosen(WITH_FULL, only, start, full)) == expected


def test_what_is_for_full_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert [stage.name for stage in stages.stages() if stage.full] == FULL
    assert stages.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed if line.endswith(" (--full)")] == FULL
    assert len(listed) == len(stages.stages())


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


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, in the place of this one."""
    root = tmp_path_factory.mktemp("tree")
    (root / "file").write_text("one\n")
    git(root, "init", "--quiet")
    commit(root)
    monkeypatch.setattr(stages, "ROOT", root)
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Change")


def test_resume_leaves_out_what_has_passed_on_this_commit(
    cache: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write('x')"
    fails = "import pathlib, sys; sys.exit(not pathlib.Path(sys.argv[1]).exists())"
    plan = [
        Stage("one", "", [[*fake(count), str(cache / "one")]]),
        Stage("two", "", [[*fake(fails), str(cache / "mended")]]),
        Stage("three", "", [[*fake(count), str(cache / "three")]]),
    ]
    monkeypatch.setattr(stages, "stages", lambda: plan)

    def runs() -> str:
        return " ".join((cache / name).read_text() if (cache / name).exists() else "-" for name in ("one", "three"))

    assert (stages.main([]), runs()) == (1, "x -")
    (cache / "mended").touch()
    # A stage that is run alone does not make the others forgotten.
    assert (stages.main(["--only", "three"]), runs()) == (0, "x x")
    assert (stages.main(["--resume"]), runs()) == (0, "x x")
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "3 passed, 0 failed"
    assert any(line.startswith("--resume: passed before on ") and line.endswith(": one, three") for line in shown)
    assert (stages.main([]), runs()) == (0, "xx xx")
    # Whatever is not the commit is tested anew: a change, and another commit.
    (tree / "file").write_text("two\n")
    assert (stages.main(["--resume"]), runs()) == (0, "xxx xxx")
    assert "--resume: the tree has changes" in capsys.readouterr().out
    assert (stages.main(["--resume"]), runs()) == (0, "xxxx xxxx")
    commit(tree)
    assert (stages.main(["--resume"]), runs()) == (0, "xxxxx xxxxx")
    assert (stages.main(["--resume"]), runs()) == (0, "xxxxx xxxxx")


def test_what_ran_while_the_tree_was_changed_has_not_passed_on_the_commit(
    cache: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('two\\n')"
    monkeypatch.setattr(stages, "stages", lambda: [Stage("one", "", [[*fake(change), str(tree / "file")]])])
    assert stages.main([]) == 0
    assert [(found.name, found.commit) for found in stages.recorded(cache / "logs/stages.json")] == [("one", "")]


def test_a_report_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text('[{"name": "one", "state": "ok", "another": 1}]')
    assert stages.recorded(tmp_path / "stages.json") == stages.recorded(tmp_path / "none.json") == []
