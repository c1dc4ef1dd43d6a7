# SPDX-License-Identifier: Apache-2.0
"""The collector's thread against an NVML made of Python: what takes minutes with a real clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmfleet_gpu_exporter import collector as collector_module
from llmfleet_gpu_exporter.collector import Collector
from llmfleet_gpu_exporter.nvml import GpuLostError, Handle, LibraryError, Nvml, UnansweredError
from llmfleet_gpu_exporter.plan import PlanFile

from tests.unit.gpu_exporter.harness import DEADLINE_SECONDS


class OneGpu(Nvml):
    """One GPU that, once lost, is lost until the library is initialised anew, as with a real driver."""

    def __init__(self) -> None:
        self.is_open = False
        self.opens = 0
        self.unloads = 0
        self.on_bus = True
        self.lost = False
        self.failure: Exception | None = None

    def open(self) -> None:
        self.opens += 1
        self.is_open = True
        self.lost = not self.on_bus

    def close(self) -> None:
        self.is_open = False

    def unload(self) -> None:
        self.unloads += 1
        self.close()

    def count(self) -> int:
        if self.failure is not None:
            raise self.failure
        return 1

    def handle(self, index: int) -> Handle:
        self.lost = self.lost or not self.on_bus
        if self.lost:
            raise GpuLostError("gpu_is_lost")
        return Handle(index)

    def call(self, function: str, *_: object) -> Any:
        if function == "nvmlDeviceGetUUID":
            return "GPU-a"
        raise UnansweredError("not_supported")

    def constant(self, name: str) -> object:
        raise UnansweredError(name)


def start(nvml: Nvml, folder: Path) -> Collector:
    collector = Collector(0.01, PlanFile(folder / "none"), folder, nvml)
    collector.start()
    return collector


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_gpu_that_came_back_is_found_by_a_new_initialisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "_LONGEST_BACKOFF", 0.0)
    nvml = OneGpu()
    collector = start(nvml, tmp_path)
    until(lambda: [gpu.up for gpu in collector.snapshot.gpus] == [True])
    opens = nvml.opens
    nvml.on_bus = False
    until(lambda: [gpu.up for gpu in collector.snapshot.gpus] == [False] and nvml.opens > opens)
    assert collector.snapshot.failure == ""
    nvml.on_bus = True
    until(lambda: [gpu.up for gpu in collector.snapshot.gpus] == [True])
    collector.end()
    collector.join(DEADLINE_SECONDS)
    assert not collector.is_alive()
    assert not nvml.is_open
    assert nvml.unloads == 0


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(LibraryError("driver_not_loaded"), "driver_not_loaded"), (ZeroDivisionError(), "ZeroDivisionError")],
)
def test_thread_outlives_failures_of_the_library_and_our_own(tmp_path: Path, failure: Exception, reason: str) -> None:
    nvml = OneGpu()
    collector = start(nvml, tmp_path)
    until(lambda: collector.snapshot.failure == "")
    nvml.failure = failure
    until(lambda: collector.snapshot.failure == reason)
    assert [(gpu.uuid, gpu.up) for gpu in collector.snapshot.gpus] == [("GPU-a", False)]
    nvml.failure = None
    until(lambda: collector.snapshot.failure == "")
    assert nvml.unloads > 0
    collector.end()
    collector.join(DEADLINE_SECONDS)
