# SPDX-License-Identifier: Apache-2.0
"""Twice the capacity of a deployment with the real engine, and what became of the requests; ``tools/load`` calls it.

Without ``--rollout`` it is the demo's deployment, which has to be up (``make demo``). With ``--rollout`` it is two PD
groups behind a gateway, of ``tests/load/inventory``, on a host of its own that is made and deployed first and stays
(``python -m testbed down load1``); while they are asked, ``playbooks/upgrade.yml`` changes every server of both.
``tests/load/overload.py`` runs on the host and says what is measured, and by which rules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools import ROOT, cache_dir, demo, on_host

HOST, INDEX = "load1", 61
INVENTORY = "tests/load/inventory"
GATEWAY = 8000
ROUTER = 30001
#: Seconds under load before the play and after it.
BEFORE_S = AFTER_S = 30


def measure(host: str, arguments: str, meanwhile: Callable[[], None]) -> dict[str, Any]:
    """What the program on the host has found. ``meanwhile`` is called when the load has begun; then it is told to end
    where it waits for that."""
    if problem := on_host.copy_programs(host):
        raise demo.DemoError(f"{problem}. It has to be up and deployed, see `tools/load --help`.")
    command = on_host.line(host, f"python3 {on_host.TESTS}/load/overload.py {arguments}")
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin
        assert program.stdout
        for last in program.stdout:
            if not last.startswith("{"):
                print(f"{time.strftime('%H:%M:%S')} {last}", end="", flush=True)
            if last.startswith("load: "):
                meanwhile()
                program.stdin.close()
    try:
        found: dict[str, Any] = json.loads(last)
    except ValueError as error:
        raise demo.DemoError(f"{host} has given no result; its own message is above.") from error
    return found


class Rollout:
    """A change of every server of both groups by ``playbooks/upgrade.yml``."""

    def __init__(self) -> None:
        # Any other value than the one that runs: the engine does not know this variable.
        self.command = [
            "ansible-playbook",
            "playbooks/upgrade.yml",
            "-i",
            INVENTORY,
            "-e",
            f"load_turn={time.time():.0f}",
        ]
        self.found: dict[str, Any] = {}

    def __call__(self) -> None:
        begin = time.monotonic()
        time.sleep(BEFORE_S)
        began = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} play: {' '.join(self.command)}", flush=True)
        ran = subprocess.run(self.command, cwd=ROOT, check=False, capture_output=True, text=True)
        ended = time.monotonic()
        log = cache_dir() / "logs" / "load-rollout.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(ran.stdout + ran.stderr, encoding="utf-8")
        print(
            f"{time.strftime('%H:%M:%S')} play: status {ran.returncode} after {ended - began:.0f} s, {log}", flush=True
        )
        self.found = {"status": ran.returncode, "began_s": round(began - begin), "ended_s": round(ended - begin)}
        time.sleep(AFTER_S)


def deploy() -> None:
    demo.run([sys.executable, "-m", "testbed", "model"], "Run `make setup` first.")
    demo.run([sys.executable, "-m", "testbed", "up", HOST, "--index", str(INDEX)], f"Run `testbed down {HOST}` first.")
    demo.run(["ansible-playbook", "site.yml", "-i", INVENTORY], "Mend what it names, then run it again.")


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each figure that a rule is about."""
    capacity, load, answers = result["capacity"], result["load"], result["answers"]
    outcomes, refused = load["outcomes"], load["refused_s"]
    lost = outcomes.get("failed", 0) + outcomes.get("broken", 0)
    retry_after = ", ".join(f"{count} x {told}" for told, count in sorted(load["refused_retry_after"].items()))
    lines = [
        ("capacity", f"{capacity['whole_per_s']} requests/s ({capacity['clients']} clients)"),
        (
            "asked, for " + f"{load['seconds'] / 60:.1f} minutes",
            f"{load['requests']} requests, {load['asked_per_s']}/s",
        ),
        ("served whole", f"{outcomes.get('whole', 0)} ({load['whole_per_s']}/s)"),
        ("refused", f"{outcomes.get('refused', 0)}"),
        ("accepted and lost", f"{lost}"),
        ("Retry-After of the refused", retry_after),
        ("seconds to a refusal: median, p99, longest", of_spread(refused)),
        ("seconds to the first token, unloaded", of_spread(result["unloaded"]["first_token_s"])),
        ("seconds to the first token, served", of_spread(load["first_token_s"])),
        ("seconds to the whole answer, unloaded", of_spread(result["unloaded"]["whole_s"])),
        ("seconds to the whole answer, served", of_spread(load["whole_s"])),
        ("answers that are not the unloaded one", f"{answers['unequal']} of {answers['compared']}"),
    ]
    lines += [
        (f"{name}: highest, bound", f"{queue['highest']:.0f}, {queue['bound']}")
        for name, queue in result["queues"].items()
    ]
    lines += [
        (
            f"memory of {name}: first third, last third",
            f"{memory['first_mib']}, {memory['last_mib']} MiB ({memory['ratio']})",
        )
        for name, memory in result["memory"].items()
    ]
    return "\n".join(["| figure | seen |", "|---|---|", *(f"| {name} | {told} |" for name, told in lines)])


def of_spread(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.2f}" for value in spread.values()) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/load", description="Load a deployment with twice its capacity.")
    parser.add_argument("--minutes", type=float, default=10, help="of load; a rollout lasts as long as it lasts")
    parser.add_argument("--rollout", action="store_true", help="two PD groups that are changed meanwhile")
    parser.add_argument("--deployed", action="store_true", help="with --rollout: by a run before, so not again")
    parser.add_argument("--output", type=Path, help="JSON with all figures")
    options = parser.parse_args()
    os.environ["PATH"] = f"{cache_dir() / 'venv' / 'bin'}:{os.environ['PATH']}"
    told = f"--minutes {options.minutes:g}"
    try:
        if options.rollout:
            if not options.deployed:
                deploy()
            rollout = Rollout()
            result = measure(HOST, f"--port {GATEWAY} --until-told", rollout)
            result["play"] = {"command": " ".join(rollout.command), **rollout.found}
            if rollout.found["status"] != 0:
                result["broken_rules"].append("the play has failed")
        else:
            result = measure(demo.HOST, f"--port {ROUTER} {told}", lambda: None)
    except demo.DemoError as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    result = {"command": f"tools/load {'--rollout' if options.rollout else told}", **result}
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(result)}\n\n" + ("\n".join(result["broken_rules"]) or "every rule holds"))
    return 1 if result["broken_rules"] else 0


if __name__ == "__main__":
    sys.exit(main())
