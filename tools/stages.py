# SPDX-License-Identifier: Apache-2.0
"""Run the test stages in order; ``tools/test`` calls it.

Runs under the system's Python with the standard library only, because its first stage is what makes the environment
that the other stages run in. The last line printed is ``N passed, N failed``: the tests of the stages that are made of
tests, and one for every other command. Exit status: 0 when nothing failed, 1 when something did, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tools import ROOT, cache_dir, source_files

TAIL_LINES = 60
HEARTBEAT_S = 60


@dataclass(frozen=True)
class Stage:
    """``commands`` run one after another, from the root of the repository.

    Neighbours that are ``beside`` each other run at the same time: the scenarios mostly wait for their hosts. A stage
    that is ``full`` runs with ``--full``, or when it is named.
    """

    name: str
    about: str
    commands: Sequence[Sequence[str]]
    beside: bool = False
    full: bool = False


@dataclass
class Result:
    """Outcome of one stage; ``minutes`` is wall time, ``commit`` what ran, nothing where the tree had changes."""

    name: str
    minutes: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    state: str = "not run"
    failures: list[str] = field(default_factory=list)
    commit: str = ""


def stages() -> list[Stage]:
    """All stages in the order in which they run: cheap ones first."""
    python = ["python"]
    return [
        Stage("setup", "packages, Python environment, wheel cache", [["tools/setup"]]),
        Stage(
            "lint",
            "yamllint, ruff, mypy --strict, ansible-lint, shellcheck, changelog",
            [
                ["yamllint", "--strict", "."],
                ["ruff", "check", "."],
                ["ruff", "format", "--check", "."],
                ["mypy", *_typed()],
                ["ansible-lint", "--offline", "--profile", "production"],
                ["shellcheck", "--external-sources", *_shell_scripts()],
                ["antsibull-changelog", "lint"],
            ],
        ),
        Stage("unit", "unit tests", [["pytest", "-q", "-n", "2", "tests/unit"]]),
        Stage("kernels", "every kernel compiled for sm_90 and sm_120, without a GPU", [["tools/kernels"]]),
        Stage("sanity", "ansible-test sanity on what the collection ships", [[*python, "-m", "tools.sanity"]]),
        Stage(
            "collection",
            "build, install, use from the clone and from the installed collection",
            [[*python, "-m", "tools.collection"], ["pytest", "-q", "tests/collection"]],
        ),
        Stage("fresh", "set-up and unit tests on a host on which nothing was installed", [["tools/fresh"]], full=True),
        _scenario("default", "the whole slice on an nspawn host", beside=True),
        _scenario("rollout", "PD groups changed one by one and brought back, on an nspawn host", beside=True),
        _scenario("numa", "topology and binding on a virtual machine", beside=True),
        _scenario("upgrade", "to the other engine version and back, on the host of molecule-default", full=True),
        _scenario(
            "gateway",
            "PD groups behind a gateway, a play that dies, and the fallback, on the host of molecule-rollout",
            full=True,
        ),
        _scenario(
            "topologies",
            "PD groups over several hosts, IPv6, several routers, --limit, on three nspawn hosts",
            full=True,
        ),
        _scenario(
            "outage",
            "a host that is cut off, starts anew or has a full disk in the middle of plays, on an nspawn host",
            full=True,
        ),
        _scenario("power", "reboot, power cut and a clock that is set, on a virtual machine", full=True),
    ]


def _scenario(name: str, about: str, *, beside: bool = False, full: bool = False) -> Stage:
    return Stage(f"molecule-{name}", about, [["molecule", "test", "-s", name]], beside=beside, full=full)


def _typed() -> list[str]:
    """What mypy checks; plugins by the name under which Ansible imports them."""
    plugins = ".collections/ansible_collections/llmfleet/sglang/plugins"
    wanted = ["tools", "testbed", "files/gpu_exporter", "files/kernels", "files/lifecycle", "files/plugin", plugins]
    return [path for path in wanted if any((ROOT / path).rglob("*.py"))]


def _shell_scripts() -> list[str]:
    return [
        str(name)
        for name in source_files()
        if _first_line(ROOT / name).startswith(("#!/bin/sh", "#!/bin/bash", "#!/usr/bin/env bash"))
    ]


def _first_line(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.readline(100).decode(errors="replace")


def environment(cache: Path) -> dict[str, str]:
    """The environment of every command: the controller's programs first, and all droppings in the cache."""
    env = dict(os.environ)
    env.pop("VIRTUAL_ENV", None)
    env.update(
        PATH=f"{cache / 'venv' / 'bin'}{os.pathsep}{env['PATH']}",
        LLMFLEET_CACHE=str(cache),
        ANSIBLE_HOME=str(cache / "ansible"),
        MYPY_CACHE_DIR=str(cache / "mypy"),
        RUFF_CACHE_DIR=str(cache / "ruff"),
        PYTHONPYCACHEPREFIX=str(cache / "pycache"),
        PYTHONUNBUFFERED="1",
    )
    if "UTF-8" not in env.get("LC_ALL", env.get("LANG", "")).upper().replace("UTF8", "UTF-8"):
        env["LC_ALL"] = "C.UTF-8"  # Ansible refuses to start in another encoding.
    return env


def counts(returncode: int, output: str) -> tuple[int, int, int]:
    """(passed, failed, skipped) of one command: pytest's own numbers where its summary line is there, else one."""
    summary = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, flags=re.MULTILINE)
    if not summary:
        return (0, 1, 0) if returncode else (1, 0, 0)
    number = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (\w+)", summary[-1])}
    failed = number.get("failed", 0) + number.get("error", 0)
    return number.get("passed", 0), max(failed, 1 if returncode else 0), number.get("skipped", 0)


def run_stage(stage: Stage, position: str, cache: Path) -> Result:
    """Run one stage to its end or to its first command that fails, with the output in ``logs/<stage>.log``."""
    log = cache / "logs" / f"{stage.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    result = Result(stage.name, state="ok")
    print(f"[{position}] {stage.name}: {stage.about}", flush=True)
    began = time.monotonic()
    with log.open("w") as out:
        for command in stage.commands:
            start, offset = time.monotonic(), log.stat().st_size
            out.write(f"$ {' '.join(command)}\n")
            out.flush()
            returncode = _run(command, stage.name, out.fileno(), log, cache)
            output = log.read_bytes()[offset:].decode(errors="replace")
            passed, failed, skipped = counts(returncode, output)
            result.passed, result.failed, result.skipped = (
                result.passed + passed,
                result.failed + failed,
                result.skipped + skipped,
            )
            shown = " ".join(command)
            shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
            print(
                f"    {'ok    ' if not returncode else 'FAILED'} {time.monotonic() - start:6.0f} s  {shown}", flush=True
            )
            if returncode:
                result.state = "FAILED"
                result.failures.append(f"{shown} (exit status {returncode})")
                print(
                    "".join(f"    | {line}\n" for line in output.splitlines()[-TAIL_LINES:]) + f"    log: {log}",
                    flush=True,
                )
                if stage.name != "lint":  # The linters are independent of one another: show what each has to say.
                    break
    result.minutes = (time.monotonic() - began) / 60
    return result


def _run(command: Sequence[str], name: str, out: int, log: Path, cache: Path) -> int:
    """Run a command; while it runs, print its last line of output now and then."""
    env = environment(cache)
    program = command[0] if "/" in command[0] else shutil.which(command[0], path=env["PATH"])
    if program is None:
        os.write(out, f"{command[0]}: not found; tools/setup installs it\n".encode())
        return 127
    done = threading.Event()

    def beat() -> None:
        start = time.monotonic()
        while not done.wait(HEARTBEAT_S):
            lines = log.read_bytes()[-4000:].decode(errors="replace").splitlines()
            print(
                f"    ...    {time.monotonic() - start:6.0f} s  {name}: {lines[-1][:90] if lines else ''}", flush=True
            )

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        return subprocess.run(
            [program, *command[1:]], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
        ).returncode
    finally:
        done.set()
        thread.join()


def chosen(everything: Sequence[Stage], only: str | None, start: str | None, full: bool = False) -> list[Stage]:
    """The stages that ``--only A,B`` or ``--from A`` name, in order, else all that run with or without ``--full``;
    raises ValueError for a name that is none."""
    names = [stage.name for stage in everything]
    wanted = only.split(",") if only else [stage.name for stage in everything if full or not stage.full]
    for name in [*wanted, *([start] if start else [])]:
        if name not in names:
            raise ValueError(f"unknown stage {name!r}; expected one of {', '.join(names)}")
    first = names.index(start) if start else 0
    return [stage for stage in everything[first:] if stage.name in wanted]


def batches(todo: Sequence[Stage]) -> list[list[Stage]]:
    """The stages in order, those that run at the same time together."""
    found: list[list[Stage]] = []
    for stage in todo:
        if found and stage.beside and found[-1][-1].beside:
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def commit_of(root: Path) -> str:
    """The commit that is checked out in ``root``; nothing where files differ from it, or there is none."""

    def git(*arguments: str) -> str | None:
        ended = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return None if ended.returncode else ended.stdout.strip()

    commit = git("rev-parse", "--verify", "HEAD")
    return commit if commit and git("status", "--porcelain") == "" else ""


def recorded(report: Path) -> list[Result]:
    """What the last runs have written; nothing where there is no such file, or another version wrote it."""
    try:
        entries: list[dict[str, Any]] = json.loads(report.read_text())
        return [Result(**entry) for entry in entries]
    except (OSError, ValueError, TypeError):
        return []


def passed_before(report: Path, commit: str) -> dict[str, Result]:
    """By stage, what has passed on this very commit; nothing on a tree with changes, whose commit is not known."""
    return {found.name: found for found in recorded(report) if commit and (found.commit, found.state) == (commit, "ok")}


def record(report: Path, results: Mapping[str, Result]) -> None:
    """Write what became of the stages, whole or not at all: a run may be killed at any time."""
    report.parent.mkdir(parents=True, exist_ok=True)
    partial = report.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(result) for result in results.values()], indent=1) + "\n")
    partial.replace(report)


def table(results: Iterable[Result]) -> str:
    """Summary, one line a stage."""
    lines = [f"{'stage':<19} {'minutes':>7} {'passed':>7} {'failed':>7} {'skipped':>7}  state"]
    lines += [f"{r.name:<19} {r.minutes:7.1f} {r.passed:7} {r.failed:7} {r.skipped:7}  {r.state}" for r in results]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``tools/test``."""
    parser = argparse.ArgumentParser(
        prog="tools/test", description="Run the test stages in order; stop at the first that fails."
    )
    parser.add_argument("--list", action="store_true", help="list the stages and leave")
    parser.add_argument("--only", metavar="STAGE[,STAGE...]", help="run only these")
    parser.add_argument("--from", dest="start", metavar="STAGE", help="leave out what comes before this one")
    parser.add_argument("--keep-going", action="store_true", help="go on after a stage that failed")
    parser.add_argument("--full", action="store_true", help="the long stages too, marked in --list")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what has passed on this commit; only in a tree without changes"
    )
    args = parser.parse_args(arguments)
    everything = stages()
    if args.list:
        print("\n".join(f"{stage.name:<19} {stage.about}{' (--full)' if stage.full else ''}" for stage in everything))
        return 0
    try:
        wanted = chosen(everything, args.only, args.start, args.full)
    except ValueError as error:
        parser.error(str(error))
    cache = cache_dir()
    report = cache / "logs" / "stages.json"
    commit = commit_of(ROOT)
    known = passed_before(report, commit)
    resumed = {stage.name: known[stage.name] for stage in wanted if args.resume and stage.name in known}
    if args.resume:
        told = f"passed before on {commit[:12]}: {', '.join(resumed) or 'none'}" if commit else "the tree has changes"
        print(f"--resume: {told}", flush=True)
    results = {stage.name: Result(stage.name) for stage in wanted} | resumed
    todo = [stage for stage in wanted if stage.name not in resumed]
    began = time.monotonic()
    try:
        done = 0
        for batch in batches(todo):
            with ThreadPoolExecutor(len(batch)) as pool:
                positions = [f"{done + number}/{len(todo)}" for number in range(1, len(batch) + 1)]
                ended = list(pool.map(run_stage, batch, positions, [cache] * len(batch)))
            done += len(batch)
            # Who has changed the tree meanwhile has not tested the commit.
            tested = commit if commit_of(ROOT) == commit else ""
            of_batch = {result.name: replace(result, commit=tested) for result in ended}
            results |= of_batch
            # After each, so that a run that is killed can be resumed; what passed on the commit before is kept.
            known |= of_batch
            record(report, known)
            if any(result.failed for result in ended) and not args.keep_going:
                break
    finally:
        failed = sum(result.failed for result in results.values())
        print(f"\n{table(results.values())}\n{'total':<19} {(time.monotonic() - began) / 60:7.1f}   ({report})")
        for result in results.values():
            for failure in result.failures:
                print(f"failed: {result.name}: {failure}")
        print(f"{sum(result.passed for result in results.values())} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
