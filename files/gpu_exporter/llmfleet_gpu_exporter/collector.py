# SPDX-License-Identifier: Apache-2.0
"""The thread that owns NVML: on a timer it makes a snapshot, and nobody else ever enters the library."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from llmfleet_gpu_exporter.identity import identify
from llmfleet_gpu_exporter.metrics import READINGS
from llmfleet_gpu_exporter.nvml import GpuLostError, Handle, LibraryError, Nvml, UnansweredError
from llmfleet_gpu_exporter.plan import PlanFile
from llmfleet_gpu_exporter.snapshot import Gpu, Key, Snapshot

_log = logging.getLogger(__name__)

# Longest wait between two tries to initialise NVML, and between two looks for lost GPUs by a fresh initialisation.
_LONGEST_BACKOFF = 60.0


class Collector(threading.Thread):
    """Reads NVML every `interval` seconds into `snapshot`.

    A daemon: a call that never returns must not keep the process from ending. Readers use `snapshot` and `busy_since`
    (monotonic start of the pass in progress, None between passes); both are replaced whole, never changed.
    """

    def __init__(self, interval: float, plan: PlanFile, pci_devices: Path, nvml: Nvml) -> None:
        super().__init__(name="collector", daemon=True)
        self.snapshot = Snapshot(taken=time.monotonic())
        self.busy_since: float | None = None
        self._interval = interval
        self._plan = plan
        self._pci_devices = pci_devices
        self._nvml = nvml
        self._opened = 0.0
        self._driver = ""
        self._known: dict[str, Gpu] = {}  # by UUID
        self._logged: set[tuple[str, str]] = set()
        self._ending = threading.Event()

    def end(self) -> None:
        """Asks the thread to stop after the pass in progress."""
        self._ending.set()

    def run(self) -> None:
        failures = 0
        delay = 0.0
        while not self._ending.wait(delay):
            started = time.monotonic()
            self.busy_since = started
            self.snapshot = self._pass(started)
            self.busy_since = None
            failures = failures + 1 if self.snapshot.failure else 0
            backoff = min(self._interval * 2 ** min(failures - 1, 16), max(_LONGEST_BACKOFF, self._interval))
            delay = backoff if failures else max(0.0, self._interval - (time.monotonic() - started))
        self._nvml.close()

    def _pass(self, started: float) -> Snapshot:
        plan = self._plan.read()
        failure = ""
        present: dict[str, Mapping[Key, object]] = {}
        count = 0
        try:
            if not self._nvml.is_open:
                self._open()
            count = self._nvml.count()
            for index in range(count):
                answer = self._read_gpu(index)
                if answer is not None:
                    uuid, values = answer
                    present[uuid] = values
        except LibraryError as error:
            failure = error.reason
            present = {}
        except Exception as error:  # a defect of ours must not end the thread: it shows as nvml_up 0
            _log.exception("pass failed")
            failure = type(error).__name__
            present = {}
        if failure != self.snapshot.failure:
            if failure:
                _log.error("NVML does not answer: %s; trying again with growing pauses", failure)
            else:
                _log.info("NVML answers: driver %s, %d GPUs", self._driver, count)
        gpus = self._gpus(count, present, plan or {})
        ended = time.monotonic()
        if failure:
            self._nvml.unload()
        elif not all(gpu.up for gpu in gpus) and ended - self._opened > _LONGEST_BACKOFF:
            # A GPU that came back after a reset is seen only by a library that is initialised after it.
            self._nvml.close()
        return Snapshot(
            taken=ended,
            duration=ended - started,
            failure=failure,
            driver=self._driver,
            gpus=gpus,
            expected=None if plan is None else len(plan),
        )

    def _open(self) -> None:
        self._nvml.open()
        self._opened = time.monotonic()
        try:
            self._driver = str(self._nvml.call("nvmlSystemGetDriverVersion"))
        except (GpuLostError, UnansweredError):
            self._driver = ""

    def _read_gpu(self, index: int) -> tuple[str, Mapping[Key, object]] | None:
        """UUID and raw values of a GPU that answers, None of one that does not. Raises LibraryError."""
        try:
            handle = self._nvml.handle(index)
            uuid = str(self._nvml.call("nvmlDeviceGetUUID", handle))
            if uuid not in self._known:
                self._known[uuid] = identify(self._nvml, handle, index, uuid, self._pci_devices)
            values = self._read_values(handle, uuid)
        except (GpuLostError, UnansweredError) as error:
            self._log_once(f"GPU {index}", "answer", str(error))
            return None
        self._logged.discard((f"GPU {index}", "answer"))  # being lost again is news
        return uuid, values

    def _read_values(self, handle: Handle, uuid: str) -> Mapping[Key, object]:
        values: dict[Key, object] = {}
        for reading in READINGS:
            try:
                values.update(reading.read(self._nvml, handle))
            except UnansweredError as error:
                self._log_once(f"GPU {self._known[uuid].index} ({uuid})", reading.name, str(error))
        return MappingProxyType(values)

    def _log_once(self, gpu: str, field: str, problem: str) -> None:
        if (gpu, field) not in self._logged:
            self._logged.add((gpu, field))
            _log.warning("%s: no %s: %s", gpu, field, problem)

    def _gpus(
        self, count: int, present: Mapping[str, Mapping[Key, object]], plan: Mapping[int, str]
    ) -> tuple[Gpu, ...]:
        """Every GPU there is reason to know of: seen by this process, counted by NVML, or used by the plan."""
        known = sorted(self._known.values(), key=lambda gpu: gpu.index)
        unseen = (set(range(count)) | set(plan)) - {gpu.index for gpu in known}
        return tuple(
            replace(
                gpu,
                instance=plan.get(gpu.index, ""),
                up=gpu.uuid in present,
                values=present.get(str(gpu.uuid), MappingProxyType({})),
            )
            for gpu in [*known, *(Gpu(index) for index in sorted(unseen))]
        )
