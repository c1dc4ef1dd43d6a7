# SPDX-License-Identifier: Apache-2.0
"""Command line: serves /metrics until SIGTERM or SIGINT, then ends with exit status 0."""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import prometheus_client
from prometheus_client.core import Metric
from prometheus_client.registry import Collector as RegistryCollector
from prometheus_client.registry import CollectorRegistry

from llmfleet_gpu_exporter import __version__
from llmfleet_gpu_exporter.collector import Collector
from llmfleet_gpu_exporter.nvml import Nvml
from llmfleet_gpu_exporter.plan import PlanFile
from llmfleet_gpu_exporter.probes import ProbeFiles
from llmfleet_gpu_exporter.render import render

_log = logging.getLogger("llmfleet_gpu_exporter")

# How long to wait, at the end, for the pass in progress. A hung NVML call is left behind.
_END_SECONDS = 2.0


class SnapshotCollector(RegistryCollector):
    """Renders the collector's last snapshot: a scrape never waits for NVML."""

    def __init__(self, collector: Collector, max_age: float) -> None:
        self._collector = collector
        self._max_age = max_age

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return render(self._collector.snapshot, self._collector.busy_since, time.monotonic(), self._max_age)


def parse_listen(text: str) -> tuple[str, int]:
    """`127.0.0.1:9101` or `[::1]:9101` -> address, port. Raises argparse.ArgumentTypeError."""
    address, colon, port = text.rpartition(":")
    bracketed = address.startswith("[") and address.endswith("]")
    if bracketed:
        address = address[1:-1]
    well_formed = bool(address) and (":" in address) == bracketed and not set(address) & set("[]")
    if not colon or not well_formed or not port.isascii() or not port.isdigit():
        raise argparse.ArgumentTypeError(f"expected ADDRESS:PORT, or [ADDRESS]:PORT for IPv6, found {text!r}")
    if int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port up to 65535, found {port}")
    return address, int(port)


def parse_interval(text: str) -> float:
    """Seconds between two passes, above zero. Raises argparse.ArgumentTypeError."""
    try:
        interval = float(text)
    except ValueError:
        interval = math.nan
    if not 0 < interval <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 3600, found {text!r}")
    return interval


def parse_fresh_intervals(text: str) -> int:
    """Number of intervals, 2 or more: with 1, a reading would be stale before the next. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or not 2 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"expected a number from 2 to 1000, found {text!r}")
    return int(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llmfleet_gpu_exporter", description="Prometheus exporter for NVIDIA GPUs.")
    parser.add_argument("--listen", type=parse_listen, default="127.0.0.1:9101", metavar="ADDRESS:PORT")
    parser.add_argument("--interval", type=parse_interval, default="5", metavar="SECONDS")
    parser.add_argument(
        "--fresh-intervals",
        type=parse_fresh_intervals,
        default="3",
        metavar="N",
        help="readings older than this many intervals are stale and not served",
    )
    parser.add_argument("--plan", type=Path, default=Path("/etc/llmfleet/plan.json"), metavar="FILE")
    parser.add_argument("--pci-devices", type=Path, default=Path("/sys/bus/pci/devices"), metavar="FOLDER")
    parser.add_argument("--probes", type=Path, default=Path("/run/llmfleet/probe"), metavar="FOLDER")
    parser.add_argument("--version", action="version", version=__version__)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    address, port = options.listen
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")

    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_arguments: end.set())

    collector = Collector(options.interval, PlanFile(options.plan), options.pci_devices, Nvml())
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(collector, options.fresh_intervals * options.interval))
    registry.register(ProbeFiles(options.probes))
    prometheus_client.ProcessCollector(registry=registry)
    try:
        server, _thread = prometheus_client.start_http_server(port, address, registry)
    except OSError as error:
        _log.error("cannot listen on %s port %d: %s", address, port, error)
        return 1
    shown = f"[{address}]" if ":" in address else address
    _log.info("listening on %s:%d", shown, server.server_port)

    collector.start()
    end.wait()
    server.shutdown()
    collector.end()
    collector.join(_END_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
