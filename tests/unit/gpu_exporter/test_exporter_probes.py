# SPDX-License-Identifier: Apache-2.0
"""The probes' files as the exporter serves them: fresh, stale, broken, and from several routers."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmfleet_gpu_exporter.probes import ProbeFiles
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from tests.unit.gpu_exporter.harness import ROOT, Exporter, Metrics

sys.path.insert(0, str(ROOT / "files" / "lifecycle"))

import probe

SERVED = probe.Result(probe.OK, "", 0.25, 0.75)
NOW = 1_800_000.0


def write(folder: Path, router: str, result: probe.Result = SERVED, at: float = NOW, group: str = "main") -> Path:
    """A file as the probe writes it every 30 s, last written that many seconds after the machine's boot."""
    path = folder / f"{router}.prom"
    probe.write_atomically(path, probe.exposition({"instance_name": router, "group": group}, result, 30.0, 1700.5, at))
    return path


def scrape(folder: Path, now: float = NOW) -> Metrics:
    registry = CollectorRegistry()
    registry.register(ProbeFiles(folder, lambda: now))
    return Metrics(generate_latest(registry).decode())


def test_a_fresh_file_is_served_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, "router", group='a "group"\\of\nlines')
    metrics = scrape(tmp_path, NOW + 120)
    labels = {"instance_name": "router", "group": 'a "group"\\of\nlines'}
    assert metrics.get("llmfleet_probe_success", **labels) == 1
    assert metrics.get("llmfleet_probe_reason", reason="ok", **labels) == 1
    assert metrics.get("llmfleet_probe_first_token_seconds", **labels) == 0.25
    assert metrics.get("llmfleet_probe_duration_seconds", **labels) == 0.75
    assert metrics.get("llmfleet_probe_last_success_timestamp_seconds", **labels) == 1700.5
    assert metrics.get("llmfleet_probe_interval_seconds", **labels) == 30
    assert metrics.get("llmfleet_probe_age_seconds", **labels) == 120


def test_a_stale_file_is_no_success(tmp_path: Path) -> None:
    write(tmp_path, "router")
    metrics = scrape(tmp_path, NOW + 121)
    assert metrics.get("llmfleet_probe_success", instance_name="router") == 0
    assert metrics.all("llmfleet_probe_reason") == [{"instance_name": "router", "group": "main", "reason": "stale"}]
    assert metrics.get("llmfleet_probe_age_seconds", instance_name="router") == 121
    assert metrics.get("llmfleet_probe_last_success_timestamp_seconds", instance_name="router") == 1700.5
    assert metrics.get("llmfleet_probe_first_token_seconds") is None
    assert metrics.get("llmfleet_probe_duration_seconds") is None


@pytest.mark.parametrize("day", [-86400, 86400])
def test_a_clock_that_is_set_makes_no_probe_older(tmp_path: Path, day: int) -> None:
    """Its age comes from the time since boot, whatever a file system and the clock say."""
    path = write(tmp_path, "router")
    os.utime(path, (time.time() + day, time.time() + day))
    metrics = scrape(tmp_path, NOW + 30)
    assert metrics.get("llmfleet_probe_age_seconds", instance_name="router") == 30
    assert metrics.get("llmfleet_probe_success", instance_name="router") == 1


def test_routers_share_families_and_the_same_series_is_served_once(tmp_path: Path) -> None:
    write(tmp_path, "router-a")
    write(tmp_path, "router-b", probe.Result(probe.SHED, "status 429", None, 0.01))
    write(tmp_path, "router-b").rename(tmp_path / "copy.prom")
    write(tmp_path, "router-b", probe.Result(probe.SHED, "status 429", None, 0.01))
    metrics = scrape(tmp_path)  # which fails on a series that is there twice
    assert metrics.text.count("# TYPE llmfleet_probe_success gauge") == 1
    assert metrics.get("llmfleet_probe_success", instance_name="router-a") == 1
    assert metrics.get("llmfleet_probe_first_token_seconds", instance_name="router-a") == 0.25


def test_foreign_series_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "router")
    path.write_text(path.read_text() + 'llmfleet_gpu_up{gpu="0"} 1\n')
    assert scrape(tmp_path).get("llmfleet_gpu_up") is None


def test_a_broken_file_is_logged_once_and_harms_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.prom").write_text("llmfleet_probe_success 1\n")
    write(tmp_path, "router")
    registry = CollectorRegistry()
    registry.register(ProbeFiles(tmp_path, lambda: NOW))
    with caplog.at_level(logging.WARNING):
        texts = {generate_latest(registry).decode() for _scrape in range(3)}
    assert [Metrics(text).get("llmfleet_probe_success", instance_name="router") for text in texts] == [1.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"no series of a probe: {tmp_path}/broken.prom: expected the series llmfleet_probe_interval_seconds, "
        "as `lifecycle probe` writes it"
    ]


@given(st.text(alphabet=st.sampled_from('llmfleet_probe_interval_seconds{}="\\,# TYPEHELP1.5e\n\x00é '), max_size=200))
def test_whatever_a_file_holds_the_scrape_is_answered(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "any.prom").write_text(
        "llmfleet_probe_interval_seconds 30\nllmfleet_probe_ended_since_boot_seconds 1\n" + text
    )
    write(folder, "router")
    assert scrape(folder).get("llmfleet_probe_success", instance_name="router") == 1


def test_the_process_serves_them(bare_exporter: Exporter, tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    folder.mkdir()
    bare_exporter.probes = folder
    bare_exporter.start()
    assert bare_exporter.scrape().get("llmfleet_probe_success") is None
    write(folder, "router", at=time.clock_gettime(time.CLOCK_BOOTTIME))
    assert bare_exporter.scrape().get("llmfleet_probe_success", instance_name="router") == 1
