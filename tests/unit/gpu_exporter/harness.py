# SPDX-License-Identifier: Apache-2.0
"""Runs the real exporter process against the compiled NVML stand-in and reads what it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "files" / "gpu_exporter"
STAND_IN = ROOT / "testbed" / "stand_ins" / "nvml"
EXAMPLE = STAND_IN / "eight_gpus.state"

# Far above what any step takes: reached only when the step never happens.
DEADLINE_SECONDS = 60.0

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def build_stand_in(folder: Path, *options: str) -> None:
    """Compiles the stand-in. A missing gcc is an error, not a reason to skip."""
    subprocess.run([str(STAND_IN / "build.sh"), str(folder), *options], check=True)


class Metrics:
    """One scrape, parsed by the Prometheus client's own parser."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"twice: {key}"
                self.samples[key] = sample.value

    def get(self, name: str, /, **labels: str) -> float | None:
        """The value of the only series with that name and at least these labels; None without one."""
        found = [
            value
            for (other, all_labels), value in self.samples.items()
            if other == name and labels.items() <= all_labels
        ]
        assert len(found) <= 1, f"{len(found)} series of {name} {labels}"
        return found[0] if found else None

    def all(self, name: str) -> list[dict[str, str]]:
        """The labels of every series with that name."""
        return [dict(labels) for other, labels in self.samples if other == name]

    @property
    def down_reason(self) -> str:
        """The reason of `llmfleet_nvml_up`, "" when it is 1."""
        (labels,) = self.all("llmfleet_nvml_up")
        assert self.get("llmfleet_nvml_up") == (0.0 if labels["reason"] else 1.0)
        return labels["reason"]


class Exporter:
    """An exporter process with its own library folder, state file and plan file."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "lib"
        self.library.mkdir()
        self.plan = folder / "plan.json"
        self.pci_devices = folder / "pci"
        self.probes = folder / "probes"
        self._state = folder / "state"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.set_state({})

    def set_state(self, changes: dict[str, str | bytes | None]) -> None:
        """The example state with some keys changed or (None) taken out, put in place at once."""
        lines = [
            line
            for line in EXAMPLE.read_bytes().splitlines()
            if line.partition(b"=")[0].decode() not in changes and not line.startswith(b"#")
        ]
        for key, value in changes.items():
            if value is not None:
                lines.append(key.encode() + b"=" + (value.encode() if isinstance(value, str) else value))
        # Any call from two threads at once aborts the process, in every test.
        lines.append(b"exclusive=1")
        new = self._state.with_suffix(".new")
        new.write_bytes(b"\n".join(lines) + b"\n")
        new.rename(self._state)

    def start(self, listen: str = "127.0.0.1:0", interval: str = "0.2", fresh_intervals: str = "1000") -> None:
        """Starts the process and waits until it says where it listens.

        Unless a test is about staleness, readings stay fresh for longer than it takes: a busy machine is no failure.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": str(self.library),
            "NVML_STAND_IN_STATE": str(self._state),
        }
        command = [sys.executable, "-m", "llmfleet_gpu_exporter", "--listen", listen, "--interval", interval]
        command += ["--fresh-intervals", fresh_intervals]
        command += ["--plan", str(self.plan), "--pci-devices", str(self.pci_devices), "--probes", str(self.probes)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stderr=log)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while "INFO listening on " not in self.log():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)
        self.address = self.log().partition("INFO listening on ")[2].splitlines()[0]

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def scrape(self) -> Metrics:
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=DEADLINE_SECONDS) as answer:
            assert answer.status == 200
            return Metrics(answer.read().decode("utf-8"))

    def until(self, condition: Callable[[Metrics], bool]) -> Metrics:
        """Scrapes until the condition holds; every scrape on the way must be answered and parse."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition(metrics := self.scrape()):
            assert time.monotonic() < deadline, f"never happened; last scrape:\n{metrics.text}\nlog:\n{self.log()}"
            time.sleep(0.02)
        return metrics

    def end(self) -> int:
        """Sends SIGTERM and returns the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=DEADLINE_SECONDS)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
