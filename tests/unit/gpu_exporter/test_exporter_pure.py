# SPDX-License-Identifier: Apache-2.0
"""The parts of the exporter that need neither NVML nor a process."""

from __future__ import annotations

import argparse
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmfleet_gpu_exporter import plan
from llmfleet_gpu_exporter.__main__ import parse_fresh_intervals, parse_interval, parse_listen
from llmfleet_gpu_exporter.metrics import DEVICE_METRICS, Metric
from llmfleet_gpu_exporter.render import clean_number, clean_text, render
from llmfleet_gpu_exporter.snapshot import STARTING, Gpu, Snapshot
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition, parser

from tests.unit.gpu_exporter.harness import Metrics

TEMPERATURE = ("llmfleet_gpu_temperature_celsius", "")
ONE_GPU = (Gpu(0, uuid="GPU-a", up=True, values={TEMPERATURE: 55}),)


class Rendered:
    def __init__(self, snapshot: Snapshot, busy_since: float | None, now: float) -> None:
        self._families = list(render(snapshot, busy_since, now, max_age=15))

    def collect(self) -> list[object]:
        return self._families  # type: ignore[return-value]


def scrape(snapshot: Snapshot, busy_since: float | None = None, now: float = 100.0) -> Metrics:
    """Renders in both formats that Prometheus asks for, and parses both."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Rendered(snapshot, busy_since, now))  # type: ignore[arg-type]
    open_metrics = exposition.generate_latest(registry).decode("utf-8")  # type: ignore[no-untyped-call]
    list(parser.text_string_to_metric_families(open_metrics))  # type: ignore[no-untyped-call]
    return Metrics(generate_latest(registry).decode("utf-8"))


def test_fresh_reading_is_served() -> None:
    metrics = scrape(Snapshot(taken=85.0, failure="", gpus=ONE_GPU))
    assert metrics.down_reason == ""
    assert metrics.get("llmfleet_gpu_up", gpu="0") == 1
    assert metrics.get(TEMPERATURE[0], gpu="0", uuid="GPU-a") == 55
    assert metrics.get("llmfleet_nvml_snapshot_age_seconds") == 15


def test_stale_reading_is_not_served() -> None:
    metrics = scrape(Snapshot(taken=84.0, failure="", gpus=ONE_GPU))
    assert metrics.down_reason == "stale"
    assert metrics.get("llmfleet_gpu_up", gpu="0") == 0
    assert metrics.get("llmfleet_gpus_visible") == 0
    assert metrics.get(TEMPERATURE[0]) is None


def test_before_the_first_pass() -> None:
    metrics = scrape(Snapshot(taken=100.0))
    assert metrics.down_reason == STARTING
    assert metrics.get("llmfleet_nvml_collect_duration_seconds") is None


def test_late_try_after_a_failure_keeps_its_reason() -> None:
    assert scrape(Snapshot(taken=50.0, failure="library_not_found")).down_reason == "library_not_found"


def test_same_labels_twice_are_one_series() -> None:
    gpu = Gpu(0, uuid="same", up=True, values={TEMPERATURE: 1})
    metrics = scrape(Snapshot(taken=100.0, failure="", gpus=(gpu, gpu)))
    assert metrics.get("llmfleet_gpus_visible") == 1


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (50, 0.5),
        (100, 1.0),
        (0, 0.0),
        (101, None),
        (-1, None),
        (2**32 - 1, None),
        (math.nan, None),
        (math.inf, None),
        (True, None),
        ("50", None),
        (None, None),
        (b"50", None),
        (10**400, None),
    ],
)
def test_clean_number(raw: object, expected: float | None) -> None:
    assert clean_number(raw, Metric("x", "x", scale=0.01, maximum=1.0)) == expected


def test_not_available_of_64_bits_is_dropped() -> None:
    assert clean_number(2**64 - 1, Metric("x", "x")) is None


def test_clean_text() -> None:
    assert clean_text("NVIDIA H200\u00e9") == "NVIDIA H200\u00e9"
    assert clean_text("a\nb\x00\ud800") == "a\ufffdb\ufffd\ufffd"
    assert clean_text(7) == ""


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.lists(st.text()),
)
KEYS = st.sampled_from([(metric.name, label) for metric in DEVICE_METRICS for label in ("", "sm", "corrected")])
GPUS = st.builds(
    Gpu,
    index=st.integers(0, 3),
    uuid=ANYTHING,
    pci_bus_id=ANYTHING,
    name=ANYTHING,
    numa_node=ANYTHING,
    instance=ANYTHING,
    up=st.booleans(),
    values=st.dictionaries(KEYS, ANYTHING),
)
SNAPSHOTS = st.builds(
    Snapshot,
    taken=st.just(100.0),
    failure=st.sampled_from(["", STARTING, "library_not_found"]),
    driver=ANYTHING,
    gpus=st.lists(GPUS, max_size=4).map(tuple),
    expected=st.none() | st.integers(0, 16),
)


@given(SNAPSHOTS)
def test_any_value_from_nvml_leaves_a_valid_exposition(snapshot: Snapshot) -> None:
    metrics = scrape(snapshot)
    device = {metric.name for metric in DEVICE_METRICS}
    assert all(math.isfinite(value) and value >= 0 for value in metrics.samples.values())
    assert snapshot.failure == "" or not device & {name for name, _ in metrics.samples}
    assert metrics.down_reason == snapshot.failure
    pairs = [(labels["gpu"], labels["uuid"]) for labels in metrics.all("llmfleet_gpu_up")]
    assert set(pairs) == {(str(gpu.index), clean_text(gpu.uuid)) for gpu in snapshot.gpus}


def test_only_counters_end_in_total_and_names_are_distinct() -> None:
    assert [
        metric.name for metric in DEVICE_METRICS if metric.name.endswith("_total") != (metric.kind == "counter")
    ] == []
    assert len({metric.name for metric in DEVICE_METRICS}) == len(DEVICE_METRICS)


def test_plan_gives_the_instance_of_each_gpu() -> None:
    text = json.dumps({"instances": [{"name": "p", "gpus": [0, 2]}, {"name": "r"}, {"name": "d", "gpus": [1]}]})
    assert dict(plan.parse(text)) == {0: "p", 2: "p", 1: "d"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"instances": {}}',
        '{"instances": [1]}',
        '{"instances": [{"gpus": [0]}]}',
        '{"instances": [{"name": "p", "gpus": 1}]}',
        '{"instances": [{"name": "p", "gpus": ["0"]}]}',
        '{"instances": [{"name": "p", "gpus": [true]}]}',
        '{"instances": [{"name": "p", "gpus": [-1]}]}',
    ],
)
def test_broken_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        plan.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:9101", ("127.0.0.1", 9101)), ("[::1]:9101", ("::1", 9101)), ("localhost:0", ("localhost", 0))],
)
def test_listen_address(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    "text", ["9101", ":9101", "::1:9101", "[::1]", "[127.0.0.1:9101", "a:b", "a:65536", "a:-1", "a:²"]
)
def test_bad_listen_address_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_listen(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "3601"])
def test_bad_interval_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_interval(text)


def test_number_of_fresh_intervals() -> None:
    assert parse_fresh_intervals("2") == 2


@pytest.mark.parametrize("text", ["0", "1", "1001", "-3", "2.5", "many"])
def test_bad_number_of_fresh_intervals_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_fresh_intervals(text)
