# SPDX-License-Identifier: Apache-2.0
"""What a host runs, asked on that host as root: its instances by its plan, their units, processes, gauges and memory.

For programs that tests run there, with the host's own Python: standard library only.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAN = Path("/etc/llmfleet/plan.json")
#: Requests that a server has, whatever it does with them.
HELD = re.compile(r"num_(?:running|queue|\w+_queue)_reqs")
#: Requests that a router has.
ROUTED = ("admission_inflight", "admission_queue_depth")
SAMPLE = re.compile(r"^(?:sglang:|smg_)(\w+)(?:\{[^}\n]*\})? (\S+)$", re.MULTILINE)


def becomes(condition: Callable[[], bool], within: float) -> bool:
    """Whether it holds before that many seconds have passed."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def wait(condition: Callable[[], bool], what: str, within: float) -> None:
    if not becomes(condition, within):
        raise SystemExit(f"{what}: not within {within:.0f} s")


def plan() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PLAN.read_text(encoding="utf-8"))
    return found


def read(path: Path) -> str:
    """The text of a file in /proc; nothing where the process has ended."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------- units


def unit(name: str) -> dict[str, str]:
    asked = ["systemctl", "show", f"llmfleet-{name}.service", "--property=ActiveState,MainPID,NRestarts"]
    shown = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    return dict(line.split("=", 1) for line in shown.splitlines())


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


def memory_mib(name: str) -> float:
    """Memory of a unit's processes, a page that several of them share counted once (Pss). No cgroup is asked: one of
    version 1 is not there in every host, and one of version 2 counts the page cache, too."""
    rolled = (read(Path(f"/proc/{pid}/smaps_rollup")) for pid in members(name))
    return round(sum(int(kib) for text in rolled for kib in re.findall(r"^Pss:\s+(\d+) kB$", text, re.M)) / 1024, 1)


# ------------------------------------------------------------------------------------------------- requests


def healthy() -> bool:
    """Every unit of the plan is active, which means ready, and each router takes all servers of its group."""
    instances = plan()["instances"]
    if any(unit(instance["name"])["ActiveState"] != "active" for instance in instances):
        return False
    groups = [instance["group"] for instance in instances if instance["role"] != "router"]
    for router in instances:
        if router["role"] != "router":
            continue
        try:
            workers = json.loads(get(router["port"], "/workers"))["workers"]
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False
        if len(workers) != groups.count(router["group"]) or not all(worker["is_healthy"] for worker in workers):
            return False
    return True


def gauges(instance: dict[str, Any]) -> dict[str, float]:
    """What an instance of the plan says of itself, by the names of its metrics without ``sglang:`` and ``smg_``. Ranks
    of one server tell of the same requests: the most counts. Raises OSError, HTTPException."""
    found: dict[str, float] = {}
    for name, value in SAMPLE.findall(get(instance["metrics"]["port"], instance["metrics"]["path"])):
        found[name] = max(float(value), found.get(name, 0.0))
    return found


def requests_held() -> float:
    """Requests in the servers of the host, and in its routers."""
    return sum(
        value
        for instance in plan()["instances"]
        for name, value in gauges(instance).items()
        if HELD.fullmatch(name) or name in ROUTED
    )
