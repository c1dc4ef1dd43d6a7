# SPDX-License-Identifier: Apache-2.0
"""What the host says of a unit: systemd's counters, its processes, who holds its ports and its GPUs.

``_ports`` is the collection's ``plugins/module_utils/_ports.py``; it is installed beside these modules.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import _ports

#: How long the driver may take to answer; a stuck one must not hold a start for ever.
NVML_TIMEOUT_S = 30
COMMAND_LENGTH = 200

# Runs under an interpreter that has nvidia-ml-py, in a child that can be left behind when the driver does not answer.
# Prints {"<index>": {"pids": [..], "used": bytes}} of every GPU that answers.
NVML_PROGRAM = """
import json, sys
try:
    import pynvml
    pynvml.nvmlInit()
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
            found[index] = {"pids": pids, "used": pynvml.nvmlDeviceGetMemoryInfo(gpu).used}
        except pynvml.NVMLError as error:
            print(f"GPU {index}: {error}", file=sys.stderr)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("\\n" + json.dumps(found))
"""


class NvmlError(Exception):
    """NVML could not be asked; the text says why."""


@dataclass(frozen=True)
class Process:
    """A running process; ``unit`` is empty where it belongs to none, ``command`` where it cannot be read."""

    pid: int
    unit: str
    command: str

    def __str__(self) -> str:
        return f"PID {self.pid} of {self.unit or 'no unit'}: {self.command or 'command unknown'}"


@dataclass(frozen=True)
class Gpu:
    """PIDs of the compute processes on a GPU, and the bytes of its memory that are in use."""

    pids: tuple[int, ...]
    used: int


def process(pid: int, proc: str = "/proc") -> Process | None:
    """The process, or None when it is gone or a zombie, which holds nothing any more."""
    # The name in stat may hold spaces and brackets; the state follows its last bracket.
    state = _ports.read_text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    if not state or state[0] in ("Z", "X"):
        return None
    command = _ports.read_text(f"{proc}/{pid}/cmdline").replace("\0", " ").strip()[:COMMAND_LENGTH]
    return Process(pid, _ports.unit_of_cgroup(_ports.read_text(f"{proc}/{pid}/cgroup")), command)


def processes_of(unit: str, proc: str = "/proc") -> list[Process]:
    """The living processes of a unit, by PID."""
    found = (process(int(name), proc) for name in os.listdir(proc) if name.isdigit())
    return sorted((one for one in found if one is not None and one.unit == unit), key=lambda one: one.pid)


def listeners(ports: Iterable[int], proc: str = "/proc") -> dict[int, Process]:
    """Who listens on each of the ports; a port that is free is left out. PID 0 is an owner that cannot be seen."""
    table: Mapping[str, Mapping[str, Any]] = _ports.read_ports(proc)
    return {
        port: Process(int(held["pid"]), str(held["unit"]), str(held["command"]))
        for port in ports
        if (held := table.get(str(port))) is not None
    }


def read_gpus(python: str, timeout_s: float = NVML_TIMEOUT_S) -> dict[int, Gpu]:
    """Index -> GPU, as NVML counts them. ``python`` is an interpreter with nvidia-ml-py. Raises NvmlError."""
    try:
        child = subprocess.Popen(
            [python, "-I", "-c", NVML_PROGRAM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise NvmlError(f"cannot run {python}: {error.strerror}") from error
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        # Not waited for: a child that waits in the driver goes when the driver lets it.
        child.kill()
        raise NvmlError(f"the driver did not answer within {timeout_s:g} s: try nvidia-smi") from error
    if child.returncode != 0:
        raise NvmlError(" ".join(err.split())[-COMMAND_LENGTH:] or f"{python} ended with {child.returncode}")
    told: Mapping[str, Any] = json.loads(out.strip().splitlines()[-1])
    return {int(index): Gpu(tuple(gpu["pids"]), int(gpu["used"])) for index, gpu in told.items()}


def unit_counters(unit: str) -> tuple[int, int]:
    """systemd's ``NRestarts`` (automatic restarts since somebody started the unit), and the monotonic time in
    microseconds at which it last became active, 0 for never. Raises OSError and subprocess.SubprocessError where
    systemd does not answer."""
    names = ("NRestarts", "ActiveEnterTimestampMonotonic")
    command: Sequence[str] = ["systemctl", "show", f"--property={','.join(names)}", "--", unit]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=NVML_TIMEOUT_S).stdout
    told = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    return int(told["NRestarts"]), int(told["ActiveEnterTimestampMonotonic"])
