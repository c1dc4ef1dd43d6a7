# SPDX-License-Identifier: Apache-2.0
"""From a snapshot to Prometheus metrics: pure, and total. Whatever a snapshot holds, what comes out can be scraped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from llmfleet_gpu_exporter import __version__
from llmfleet_gpu_exporter.metrics import DEVICE_METRICS, Metric
from llmfleet_gpu_exporter.snapshot import STARTING, Gpu, Snapshot

Family = CounterMetricFamily | GaugeMetricFamily

# NVML's "not available" in an unsigned 32-bit and 64-bit answer.
_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)


def clean_number(raw: object, metric: Metric) -> float | None:
    """The value in the metric's unit, or None for what is no number, not finite, negative, or above the maximum."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or raw in _NOT_AVAILABLE:
        return None
    try:
        value = float(raw) * metric.scale
    except OverflowError:
        return None
    return value if math.isfinite(value) and 0 <= value <= metric.maximum else None


def clean_text(raw: object) -> str:
    """A label value: what is no text is "", and what is not printable (lone surrogates, control codes) is replaced."""
    if not isinstance(raw, str):
        return ""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in raw)


def render(snapshot: Snapshot, busy_since: float | None, now: float, max_age: float) -> Iterator[Family]:
    """All families but the process's own.

    `now`, `busy_since` and `snapshot.taken` are monotonic seconds. A snapshot older than `max_age` is not served:
    the series of its GPUs are left out and they count as not up.
    """
    age = max(0.0, now - snapshot.taken)
    stuck = busy_since is not None and now - busy_since > max_age
    failure = snapshot.failure
    if not failure or failure == STARTING:
        failure = "collector_stuck" if stuck else failure
        # A collector that backs off after a failure of the library is late on purpose; only good readings go stale.
        failure = failure or ("stale" if age > max_age else "")
    fresh = not failure
    gpus = _distinct(snapshot.gpus)

    yield _family("llmfleet_gpu_exporter_info", "Version of this exporter.", ["version"], [([__version__], 1)])
    yield _family(
        "llmfleet_nvml_up",
        "1 when NVML answered lately; otherwise 0, with the reason.",
        ["reason"],
        [([clean_text(failure)], float(fresh))],
    )
    yield _family("llmfleet_nvml_snapshot_age_seconds", "Time since the last pass over NVML ended.", [], [([], age)])
    yield _family(
        "llmfleet_nvml_collect_duration_seconds",
        "Time that the last pass over NVML took.",
        [],
        [([], snapshot.duration)] if snapshot.failure != STARTING else [],
    )
    yield _family(
        "llmfleet_nvml_collector_stuck",
        "1 when a pass over NVML is in progress for longer than readings stay fresh.",
        [],
        [([], float(stuck))],
    )
    if snapshot.expected is not None:
        yield _family(
            "llmfleet_gpus_expected", "GPUs that the plan of this host uses.", [], [([], float(snapshot.expected))]
        )
    yield _family(
        "llmfleet_gpus_visible",
        "GPUs that answered lately.",
        [],
        [([], float(sum(gpu.up for gpu in gpus) if fresh else 0))],
    )
    yield _family(
        "llmfleet_gpu_up",
        "1 when the GPU answered lately, 0 when it did not; uuid is empty while it never did.",
        ["gpu", "uuid"],
        [(_labels(gpu), float(fresh and gpu.up)) for gpu in gpus],
    )
    yield _family(
        "llmfleet_gpu_info",
        "What the GPU is and which instance of the plan uses it.",
        ["gpu", "uuid", "pci_bus_id", "name", "driver", "numa_node", "instance_name"],
        [
            (
                _labels(gpu)
                + [
                    clean_text(text)
                    for text in (gpu.pci_bus_id, gpu.name, snapshot.driver, gpu.numa_node, gpu.instance)
                ],
                1.0,
            )
            for gpu in gpus
        ],
    )
    if fresh:
        yield from (_device_family(metric, gpus) for metric in DEVICE_METRICS)


def _device_family(metric: Metric, gpus: Iterable[Gpu]) -> Family:
    samples = []
    for gpu in gpus:
        for (name, label), raw in gpu.values.items() if gpu.up else ():
            # A label where the metric has none, or none where it has one, would give the same series twice.
            own = name == metric.name and bool(label) == bool(metric.label)
            value = clean_number(raw, metric) if own else None
            if value is not None:
                samples.append((_labels(gpu) + ([label] if metric.label else []), value))
    labels = ["gpu", "uuid"] + ([metric.label] if metric.label else [])
    return _family(metric.name, metric.help, labels, samples, counter=metric.kind == "counter")


def _family(
    name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], float]], *, counter: bool = False
) -> Family:
    family = (CounterMetricFamily if counter else GaugeMetricFamily)(name, text, labels=labels)
    for label_values, value in samples:
        family.add_metric(label_values, value)
    return family


def _labels(gpu: Gpu) -> list[str]:
    return [str(gpu.index), clean_text(gpu.uuid)]


def _distinct(gpus: Iterable[Gpu]) -> list[Gpu]:
    """One GPU for each pair of labels: Prometheus refuses a scrape with the same series twice."""
    by_labels: dict[tuple[str, ...], Gpu] = {}
    for gpu in gpus:
        by_labels.setdefault(tuple(_labels(gpu)), gpu)
    return list(by_labels.values())
