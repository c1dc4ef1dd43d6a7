# SPDX-License-Identifier: Apache-2.0
"""What the probes of this host's routers wrote: one Prometheus text file for each router, read at each scrape.

A file says how often it is written (``llmfleet_probe_interval_seconds``), and when, in seconds since the machine's boot
(``llmfleet_probe_ended_since_boot_seconds``): a clock that is set makes no probe older. One older than a few intervals
is stale: of its series only the labels and the last success are still true, and it counts as no success.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_log = logging.getLogger(__name__)

_PREFIX = "llmfleet_probe_"
_INTERVAL = "llmfleet_probe_interval_seconds"
_SUCCESS = "llmfleet_probe_success"
_REASON = "llmfleet_probe_reason"
_LAST_SUCCESS = "llmfleet_probe_last_success_timestamp_seconds"
_ENDED = "llmfleet_probe_ended_since_boot_seconds"
_AGE = "llmfleet_probe_age_seconds"
# Longer than a probe and two intervals can take.
_FRESH_INTERVALS = 4


def since_boot() -> float:
    """Seconds since the machine's boot, with those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ProbeFiles(Collector):
    """The probes' series, and the age of each file. A file that cannot be read is logged once and left out."""

    def __init__(self, folder: Path, now: Callable[[], float] = since_boot) -> None:
        self._folder = folder
        self._now = now
        self._problems: dict[Path, str] = {}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        for path in sorted(self._folder.glob("*.prom")):
            for text, sample in self._read(path):
                key = (sample.name, frozenset(sample.labels.items()))
                # Prometheus refuses a scrape with the same series twice.
                if key not in seen:
                    seen.add(key)
                    family = families.setdefault(sample.name, GaugeMetricFamily(sample.name, text))
                    family.samples.append(sample)
        return list(families.values())

    def _read(self, path: Path) -> list[tuple[str, Sample]]:
        try:
            text = path.read_text(encoding="utf-8")
            samples = list(_parse(text, self._now()))
        except (OSError, ValueError) as error:
            if self._problems.get(path) != str(error):
                self._problems[path] = str(error)
                _log.warning("no series of a probe: %s: %s", path, error)
            return []
        self._problems.pop(path, None)
        return samples


def _parse(text: str, now: float) -> Iterator[tuple[str, Sample]]:
    """Help text and sample, for each series of one file. ``now`` in seconds since boot. Raises ValueError."""
    found = [
        (family.documentation, sample)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(_PREFIX)
    ]
    told = {sample.name: sample for _help, sample in found if sample.name in (_INTERVAL, _ENDED)}
    for name in (_INTERVAL, _ENDED):
        if name not in told:
            raise ValueError(f"expected the series {name}, as `lifecycle probe` writes it")
    interval = told[_INTERVAL]
    age = now - told[_ENDED].value
    stale = age > _FRESH_INTERVALS * interval.value
    for documentation, sample in found:
        if not stale or sample.name in (_INTERVAL, _ENDED, _LAST_SUCCESS):
            yield documentation, sample
        elif sample.name == _SUCCESS:
            yield documentation, sample._replace(value=0.0)
        elif sample.name == _REASON:
            yield documentation, sample._replace(labels={**sample.labels, "reason": "stale"})
    yield "Time since the last probe ended.", Sample(_AGE, interval.labels, age)
