# SPDX-License-Identifier: Apache-2.0
"""What ``files/lifecycle`` says of GPUs, with a real driver: who is on them, and when their memory is given back.

Wants nvidia-ml-py in this interpreter and, for the control group of a unit, root and cgroup v2.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import start

torch = pytest.importorskip("torch")
pytest.importorskip("pynvml")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CGROUPS = Path("/sys/fs/cgroup")
UNIT = "llmfleet-identity-test.service"
#: Takes as much memory as a server would have for weights and cache, and says when it has it.
HOLDER = """
import sys, torch
held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _number in range(int(sys.argv[1]))]
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """The control group of a unit, as systemd would make it."""
    folder = CGROUPS / UNIT
    if not (CGROUPS / "cgroup.procs").exists() or os.geteuid() != 0:
        pytest.skip("no cgroup v2, or not root")
    folder.mkdir()
    yield folder
    folder.rmdir()


@contextmanager
def holder(group: Path | None, gib: int) -> Iterator[subprocess.Popen[str]]:
    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-c", HOLDER, str(gib)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=join
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def needs(*gpus: int) -> start.Needs:
    return start.Needs(UNIT, {}, gpus, sys.executable)


def test_a_free_gpu_is_free() -> None:
    assert start.taken_gpus(needs(0)) == []
    assert start.missing_gpus(needs(0)) == f"no process of {UNIT} is on GPU 0"


def test_a_foreign_process_is_named() -> None:
    with holder(None, 1) as process:
        (found,) = start.taken_gpus(needs(0))
        assert found.startswith(f"GPU 0 is used by PID {process.pid} of ")
        assert sys.executable in found
        assert start.missing_gpus(needs(0)).endswith(f"; expected {UNIT} alone")
    assert start.wait_free(lambda: start.taken_gpus(needs(0)), 60) == []


def test_a_unit_is_known_on_its_gpus_and_on_others(group: Path) -> None:
    with holder(group, 1) as process:
        assert start.missing_gpus(needs(0)) == ""
        found = start.missing_gpus(needs(1))
        assert found.startswith(f"GPU 0 is used by PID {process.pid} of {UNIT}: ")
        assert found.endswith("; its GPUs are 1")
    assert start.wait_free(lambda: start.taken_gpus(needs(0)), 60) == []


@pytest.mark.parametrize("gib", [1, 100])
def test_memory_is_given_back_after_a_kill(group: Path, gib: int, capsys: pytest.CaptureFixture[str]) -> None:
    with holder(group, gib) as process:
        used = start._gpus(needs(0))[0].used
        assert used > gib * 2**30
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        arguments = ["--unit", UNIT, "--gpu", "0", "--nvml-python", sys.executable, "--within", "60"]
        assert start.stopped(arguments) == 0
        seconds = time.monotonic() - killed
    assert start._gpus(needs(0))[0].used < start.IDLE_GPU_BYTES
    with capsys.disabled():
        print(f"\n{used / 2**30:.1f} GiB given back {seconds:.2f} s after SIGKILL, NVML asked in between")
