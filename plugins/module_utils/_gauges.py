# SPDX-License-Identifier: Apache-2.0
"""How many requests a server still has, from its Prometheus metrics. PRIVATE to the collection."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

# Where a request is in a server, running, queued or in transfer: the same names in SGLang 0.5.16 and 0.5.23. A server
# that has become idle publishes them within 30 s (managers/scheduler_components/metrics_reporter.py,
# _maybe_log_idle_metrics).
QUEUES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_grammar_queue_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
)
WAITING = tuple(name for name in QUEUES if name != "num_running_reqs")
_SAMPLE = re.compile(r"^sglang:(?P<name>[a-z_]+)(?:\{[^\n]*\})?\s+(?P<value>[0-9.eE+-]+)\s*$", re.MULTILINE)


def requests(text: str) -> dict[str, int]:
    """Requests by queue, of the queues that hold any. Ranks of one server report the same requests: the most counts."""
    found: dict[str, int] = {}
    for sample in _SAMPLE.finditer(text):
        name, value = sample["name"], round(float(sample["value"]))
        if name in QUEUES and value > 0:
            found[name] = max(value, found.get(name, 0))
    return found


def wait_idle(
    read: Callable[[str], str],
    urls: Sequence[str],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    timeout: float,
    interval: float = 1.0,
) -> tuple[dict[str, Mapping[str, int] | str], float]:
    """Wait until no server of ``urls`` has a request: ``(what is left by URL, seconds)``.

    ``read`` gives the metrics of a URL and raises OSError where none are to be had: what does not answer has nothing
    that could be waited for, and is left with the reason when it is still so at the end.
    """
    begin = clock()
    while True:
        left: dict[str, Mapping[str, int] | str] = {}
        dead = 0
        for url in urls:
            try:
                found = requests(read(url))
            except OSError as error:
                left[url], dead = str(error), dead + 1
                continue
            if found:
                left[url] = found
        seconds = clock() - begin
        if len(left) == dead or seconds >= timeout:
            return left, seconds
        sleep(interval)
