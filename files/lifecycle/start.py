# SPDX-License-Identifier: Apache-2.0
"""What has to be free before a server starts, and what has to be there before it counts as started.

``before-start`` is an ExecStartPre= of the unit, ``ready`` its ExecStartPost=, so that systemd's own "active" means
ready; ``stopped`` is for whoever has stopped a unit. Nothing is ever killed here. Exit status 0, or 1 with what was
found, what was expected and what to do as the last line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import host

#: What a process that has just ended held, the kernel and the driver may take this long to give back.
SETTLE_S = 5
POLL_S = 1
#: SGLang's /health_generate waits 20 s for its scheduler before it answers.
ROUTE_TIMEOUT_S = 25
#: A GPU without processes has less than this in use: the driver's own share.
IDLE_GPU_BYTES = 2 * 1024**3

Clock = Callable[[], float]
Sleep = Callable[[float], None]


class Needs(NamedTuple):
    """What an instance needs for itself: ports by purpose, GPUs by NVML's index, and who can ask NVML."""

    unit: str
    ports: Mapping[str, int]
    gpus: Sequence[int]
    nvml_python: str


# --- before-start ---------------------------------------------------------------------------------------------------


def delay(failed: int, base: float, most: float) -> float:
    """Seconds before a start that follows ``failed`` failed ones: min(base * 2^failed, most), and none after none."""
    # Beyond 2^62 every bound is reached, and a float could overflow.
    return min(base * 2.0 ** min(failed, 62), most) if failed > 0 else 0.0


class Starts(NamedTuple):
    """The note between two starts: failed starts in a row, and systemd's time of becoming active that was seen last."""

    failed: int
    active_us: int


def next_starts(before: Starts | None, restarts: int, active_us: int) -> Starts:
    """The note for this start. ``restarts`` and ``active_us`` are ``host.unit_counters``.

    A start that somebody asked for (``restarts`` is 0, as after reset-failed and at boot) begins anew, and so does one
    that follows a start that became active; any other follows a failed one.
    """
    if before is None or restarts == 0 or active_us != before.active_us:
        return Starts(0, active_us)
    return Starts(before.failed + 1, active_us)


def read_starts(path: str) -> Starts | None:
    try:
        with open(path, encoding="ascii") as stream:
            failed, active_us = stream.read().split()
            return Starts(int(failed), int(active_us))
    except (OSError, ValueError):
        return None


def write_starts(path: str, starts: Starts) -> None:
    with open(f"{path}.partial", "w", encoding="ascii") as stream:
        stream.write(f"{starts.failed} {starts.active_us}\n")
    os.replace(f"{path}.partial", path)


def taken(needs: Needs, proc: str = "/proc") -> list[str]:
    """What the instance needs and somebody has, one text each; empty when all is free.

    The process that asks may be of the unit itself.
    """
    found = [
        f"{one} is left in the control group of {needs.unit}"
        for one in host.processes_of(needs.unit, proc)
        if one.pid != os.getpid()
    ]
    holders = host.listeners(needs.ports.values(), proc)
    found += [
        f"port {port} ({purpose}) is held by {holders[port]}"
        for purpose, port in sorted(needs.ports.items())
        if port in holders
    ]
    return found + taken_gpus(needs, proc)


def taken_gpus(needs: Needs, proc: str = "/proc") -> list[str]:
    """GPUs of the instance with a compute process on them, or with memory in use that no process has."""
    found = []
    gpus = _gpus(needs)
    for index in [index for index in needs.gpus if index in gpus]:
        gpu = gpus[index]
        found += [f"GPU {index} is used by {_known(pid, proc)}" for pid in gpu.pids]
        if not gpu.pids and gpu.used > IDLE_GPU_BYTES:
            found.append(f"GPU {index} has {gpu.used / 1024**3:.1f} GiB in use that no process has")
    return found


def _known(pid: int, proc: str) -> host.Process:
    return host.process(pid, proc) or host.Process(pid, "", "")


def _gpus(needs: Needs) -> dict[int, host.Gpu]:
    """The host's GPUs, where the instance has some; none where NVML cannot be asked, which is said."""
    if not needs.gpus:
        return {}
    try:
        return host.read_gpus(needs.nvml_python)
    except host.NvmlError as error:
        print(f"the GPUs are not checked: {error}", flush=True)
        return {}


def wait_free(
    look: Callable[[], list[str]], within: float, clock: Clock = time.monotonic, sleep: Sleep = time.sleep
) -> list[str]:
    """What is still taken after at most ``within`` seconds."""
    begin = clock()
    while (found := look()) and clock() - begin < within:
        sleep(POLL_S)
    return found


def refusal(unit: str, found: Sequence[str]) -> str:
    return (
        f"{unit} cannot have what it needs: found {'; '.join(found)}. Expected all of it free. To do: stop that "
        "process, or give the instance other ports or GPUs; nothing is killed for you"
    )


def before_start(arguments: Sequence[str]) -> int:
    """ExecStartPre=+, as root, since another user's process can only be named by root."""
    parser = _parser("before-start", "wait after failed starts, then check that ports and GPUs are free")
    parser.add_argument("--note", required=True, metavar="FILE", help="where the number of failed starts is kept")
    parser.add_argument("--delay", type=float, default=5, metavar="S", help="seconds that the delay grows from")
    parser.add_argument("--delay-max", type=float, default=300, metavar="S", help="seconds that it never exceeds")
    options = parser.parse_args(arguments)
    needs = _needs(options)
    try:
        restarts, active_us = host.unit_counters(needs.unit)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"systemd does not tell of {needs.unit}, so this start is not delayed: {error}", flush=True)
        restarts, active_us = 0, 0
    starts = next_starts(read_starts(options.note), restarts, active_us)
    write_starts(options.note, starts)
    seconds = delay(starts.failed, options.delay, options.delay_max)
    if seconds:
        print(
            f"failed starts in a row: {starts.failed}; waiting {seconds:g} s. At once: systemctl reset-failed "
            f"{needs.unit} && systemctl restart {needs.unit}",
            flush=True,
        )
        time.sleep(seconds)
    return _told(needs, wait_free(lambda: taken(needs), SETTLE_S))


def stopped(arguments: Sequence[str]) -> int:
    """For whoever has stopped a unit: wait until nothing of it is left."""
    parser = _parser("stopped", "wait until processes, ports and GPU memory of a stopped unit are given back")
    parser.add_argument("--within", type=float, default=30, metavar="S", help="seconds to wait at most")
    options = parser.parse_args(arguments)
    needs = _needs(options)
    return _told(needs, wait_free(lambda: taken(needs), options.within))


def _told(needs: Needs, found: Sequence[str]) -> int:
    if found:
        print(refusal(needs.unit, found), file=sys.stderr, flush=True)
        return 1
    return 0


# --- ready ----------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One condition of being ready; ``missing`` gives what is not so yet, nothing when it is."""

    name: str
    missing: Callable[[], str]


def missing_process(pid: int, proc: str = "/proc") -> str:
    return "" if host.process(pid, proc) else f"the main process (PID {pid}) has ended"


def missing_route(url: str) -> str:
    """Whether the URL answers with status 200; through no proxy, since it is a server of this host."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ROUTE_TIMEOUT_S) as response:
            return "" if response.status == http.client.OK else f"{url} answers with status {response.status}"
    except urllib.error.HTTPError as error:
        return f"{url} answers with status {error.code}"
    except urllib.error.URLError as error:
        return f"{url} does not answer: {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer: {error}"


def missing_features(features: Mapping[str, str], ranks: int, folder: str) -> str:
    """Whether the server and each of its ranks report exactly the features that are asked for.

    ``folder`` holds a file ``<process>.json`` of each process: ``{"pid", "features": {name: {"value"}}}``.
    """
    reports = {}
    for name in sorted(os.listdir(folder) if os.path.isdir(folder) else []):
        if name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as stream:
                reports[name.removesuffix(".json")] = json.load(stream)
    if "main" not in reports or len(reports) != ranks + 1:
        return f"features are reported by {', '.join(reports) or 'no process'}; expected main and {ranks} ranks"
    for name, report in reports.items():
        active = {feature: str(told["value"]) for feature, told in report["features"].items()}
        if active != dict(features):
            return f"{name} (PID {report['pid']}) runs with the features {active}; expected {dict(features)}"
    return ""


def missing_ports(needs: Needs, proc: str = "/proc") -> str:
    """Whether each port is held by a process of the unit; the bootstrap port of a prefill server is one of them."""
    holders = host.listeners(needs.ports.values(), proc)
    for purpose, port in sorted(needs.ports.items()):
        holder = holders.get(port)
        if holder is None:
            return f"nothing listens on port {port} ({purpose})"
        if holder.pid == 0:
            return f"port {port} ({purpose}) is held by a process of another user; expected one of {needs.unit}"
        if holder.unit != needs.unit:
            return f"port {port} ({purpose}) is held by {holder}; expected a process of {needs.unit}"
    return ""


def missing_gpus(needs: Needs, proc: str = "/proc") -> str:
    """Whether the unit has a process on each of its GPUs, nobody else has, and it has none on other GPUs."""
    for index, gpu in sorted(_gpus(needs).items()):
        for one in (_known(pid, proc) for pid in gpu.pids):
            if index in needs.gpus and one.unit != needs.unit:
                return f"GPU {index} is used by {one}; expected {needs.unit} alone"
            if index not in needs.gpus and one.unit == needs.unit:
                return f"GPU {index} is used by {one}; its GPUs are {', '.join(map(str, needs.gpus))}"
        if index in needs.gpus and not gpu.pids:
            return f"no process of {needs.unit} is on GPU {index}"
    return ""


def wait_ready(
    layers: Sequence[Layer],
    within: float,
    tell: Callable[[str], None],
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> str:
    """Wait until no layer misses anything; what is missing when there is no more hope, else nothing.

    The layers are asked in their order, up to the first that misses something. The first is the process: without it
    the wait ends at once, because systemd takes no notice of its end while this runs. ``tell`` is called whenever
    something else is missing.
    """
    begin = clock()
    told = ""
    while True:
        name, missing = next(((layer.name, text) for layer in layers if (text := layer.missing())), ("", ""))
        if not missing:
            return ""
        if name == layers[0].name:
            return missing
        if clock() - begin >= within:
            return f"not ready after {within:g} s: {missing}"
        if missing != told:
            told = missing
            tell(f"waiting: {missing}")
        sleep(POLL_S)


def ready(arguments: Sequence[str]) -> int:
    """ExecStartPost=, as the unit's user; a play asks it too, as root, of what runs."""
    parser = _parser("ready", "wait until a server is ready, layer by layer")
    parser.add_argument("--main-pid", type=int, default=os.environ.get("MAINPID"), metavar="PID", help="$MAINPID")
    parser.add_argument("--url", metavar="URL", help="what answers with status 200 when the server is ready")
    parser.add_argument("--features", type=json.loads, default={}, metavar="JSON", help="features, by name")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="processes that report them beside main")
    parser.add_argument("--reports", default="", metavar="FOLDER", help="where they report them")
    parser.add_argument("--within", type=float, default=900, metavar="S", help="seconds to wait at most")
    options = parser.parse_args(arguments)
    if options.main_pid is None:
        parser.error("found neither --main-pid nor MAINPID in the environment, which systemd sets for ExecStartPost=")
    needs = _needs(options)
    begin = time.monotonic()
    layers = [Layer("process", lambda: missing_process(options.main_pid))]
    if options.url:
        layers.append(Layer("route", lambda: missing_route(options.url)))
    if options.features:
        layers.append(Layer("features", lambda: missing_features(options.features, options.ranks, options.reports)))
    if needs.ports:
        layers.append(Layer("ports", lambda: missing_ports(needs)))
    if needs.gpus:
        layers.append(Layer("GPUs", lambda: missing_gpus(needs)))
    missing = wait_ready(layers, options.within, lambda text: print(text, flush=True))
    if missing:
        print(
            f"{needs.unit} is not ready: {missing}. Expected {', '.join(layer.name for layer in layers)} in order. "
            f"To do: see what the server itself says: journalctl --unit {needs.unit}",
            file=sys.stderr,
            flush=True,
        )
        return 1
    print(
        f"{needs.unit} is ready after {time.monotonic() - begin:.0f} s: "
        f"{', '.join(layer.name for layer in layers)} are as planned",
        flush=True,
    )
    return 0


# --- options that all three have ------------------------------------------------------------------------------------


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command, description=description, allow_abbrev=False)
    parser.add_argument("--unit", required=True, help="the unit")
    parser.add_argument("--port", type=_port, action="append", default=[], metavar="PURPOSE=N", help="repeatable")
    parser.add_argument("--gpu", type=int, action="append", default=[], metavar="N", help="NVML's index; repeatable")
    parser.add_argument("--nvml-python", default="", metavar="PATH", help="a Python with nvidia-ml-py")
    return parser


def _port(text: str) -> tuple[str, int]:
    purpose, equals, number = text.partition("=")
    if not equals or not number.isdecimal() or not 0 < int(number) < 65536:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected such as http=30000")
    return purpose, int(number)


def _needs(options: argparse.Namespace) -> Needs:
    return Needs(options.unit, dict(options.port), options.gpu, options.nvml_python)
