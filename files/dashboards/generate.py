# SPDX-License-Identifier: Apache-2.0
"""Writes the Grafana dashboards beside this file, one ``<name>.json`` for each entry of ``DASHBOARDS``.

    python3 files/dashboards/generate.py            # write
    python3 files/dashboards/generate.py --check    # exit 1 and name the files that differ

The JSON files are committed: roles copy them as they are, and a test compares them with what this program makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]

# Fixed uid of the data source that the role grafana provisions.
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
# Grafana's grid is 24 units wide.
GRID_WIDTH = 24
PANEL_HEIGHT = 8

# What a panel shows of which targets. The labels are those the plan gives to every scrape target.
SERVICE = 'host=~"$host"'
INSTANCE = 'group=~"$group", host=~"$host"'
PREFILL = f'role="prefill", {INSTANCE}'
DECODE = f'role="decode", {INSTANCE}'

GREEN, YELLOW, RED = "green", "yellow", "red"


def thresholds(*steps: tuple[float, str], base: str = GREEN) -> Json:
    """Colours by value: ``base`` below the first step, then each step's colour from its value on."""
    first: list[Json] = [{"color": base, "value": None}]
    return {"mode": "absolute", "steps": first + [{"color": color, "value": value} for value, color in steps]}


def target(expr: str, legend: str, *, instant: bool = False) -> Json:
    return {
        "datasource": DATASOURCE,
        "expr": expr,
        "legendFormat": legend,
        "instant": instant,
        "range": not instant,
        "editorMode": "code",
    }


def panel(
    kind: str, title: str, description: str, targets: list[Json], unit: str, width: int, defaults: Json, options: Json
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": [query | {"refId": chr(ord("A") + index)} for index, query in enumerate(targets)],
        "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": []},
        "options": options,
        "gridPos": {"w": width, "h": PANEL_HEIGHT},
    }


def timeseries(
    title: str,
    description: str,
    *targets: Json,
    unit: str,
    limits: Json | None = None,
    maximum: float | None = None,
    width: int = 8,
) -> Json:
    """A graph over time; ``limits`` are drawn as lines, ``maximum`` fixes the top of the axis."""
    defaults: Json = {
        "min": 0,
        "color": {"mode": "palette-classic"},
        "custom": {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False},
    }
    if maximum is not None:
        defaults["max"] = maximum
    if limits is not None:
        defaults["thresholds"] = limits
        defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, description, list(targets), unit, width, defaults, options)


def stat(
    title: str, description: str, query: Json, *, unit: str, limits: Json, width: int = 8, up_down: bool = False
) -> Json:
    """One coloured field per series with its last value; ``up_down`` writes 1 and 0 as Up and Down."""
    defaults: Json = {"thresholds": limits, "color": {"mode": "thresholds"}, "mappings": []}
    if up_down:
        defaults["mappings"] = [
            {"type": "value", "options": {"0": {"text": "Down", "color": RED}, "1": {"text": "Up", "color": GREEN}}}
        ]
    options = {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value_and_name",
    }
    return panel("stat", title, description, [query], unit, width, defaults, options)


def row(title: str, *panels: Json) -> list[Json]:
    heading = {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": GRID_WIDTH, "h": 1}}
    return [heading, *panels]


def variable(name: str, label: str, query: str) -> Json:
    """A choice of several values, all at first. "All" is ``.*``, which also matches series without the label."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def laid_out(panels: list[Json]) -> list[Json]:
    """The panels with ids and positions: left to right, a new line where the next one does not fit."""
    placed = []
    x = y = height = 0
    for number, item in enumerate(panels, start=1):
        size = item["gridPos"]
        if x + size["w"] > GRID_WIDTH:
            x, y = 0, y + height
            height = 0
        placed.append(item | {"id": number, "gridPos": size | {"x": x, "y": y}})
        x += size["w"]
        height = max(height, size["h"])
    return placed


def dashboard(
    uid: str, title: str, description: str, tags: list[str], variables: list[Json], panels: list[Json]
) -> Json:
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": tags,
        "schemaVersion": 41,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": variables},
        "links": [],
        "panels": laid_out(panels),
    }


def quantile(share: float, histogram: str, selector: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({histogram}_bucket{{{selector}}}[$__rate_interval])))"


def node_health() -> list[Json]:
    """What tells of an outage first, so it stands on top."""
    per_instance = "sum by (host, instance_name)"
    return row(
        "Node health",
        stat(
            "Services",
            "Whether Prometheus reached the service at its last scrape.",
            target(f'up{{{SERVICE}, job!="prometheus"}}', "{{job}} {{host}} {{instance_name}}", instant=True),
            unit="none",
            limits=thresholds((1, GREEN), base=RED),
            width=12,
            up_down=True,
        ),
        stat(
            "GPUs",
            "Whether the GPU answered the exporter. A GPU that fell off the bus is down.",
            target(f"llmfleet_gpu_up{{{SERVICE}}}", "{{host}} GPU {{gpu}}", instant=True),
            unit="none",
            limits=thresholds((1, GREEN), base=RED),
            width=12,
            up_down=True,
        ),
        timeseries(
            "Prefill bootstrap queue",
            "Requests that wait for prefill and decode to shake hands. Grows when decode is full or does not answer.",
            target(
                f"{per_instance} (sglang:num_prefill_bootstrap_queue_reqs{{{PREFILL}}})", "{{host}} {{instance_name}}"
            ),
            unit="short",
            limits=thresholds((8, YELLOW), (32, RED)),
        ),
        timeseries(
            "Decode KV cache in use",
            "Share of the decode engine's KV cache that running requests hold. Near 1 it starts to retract requests.",
            target(f"max by (host, instance_name) (sglang:token_usage{{{DECODE}}})", "{{host}} {{instance_name}}"),
            unit="percentunit",
            limits=thresholds((0.85, YELLOW), (0.95, RED)),
            maximum=1,
        ),
        timeseries(
            "Retracted and paused requests",
            "Requests that were put back for want of KV cache, and requests that are paused.",
            target(f"{per_instance} (sglang:num_retracted_reqs{{{INSTANCE}}})", "retracted {{host}} {{instance_name}}"),
            target(f"{per_instance} (sglang:num_paused_reqs{{{INSTANCE}}})", "paused {{host}} {{instance_name}}"),
            unit="short",
            limits=thresholds((1, YELLOW)),
        ),
        timeseries(
            "Router responses",
            "Responses a second, by status.",
            target(
                f"sum by (status_code) (rate(smg_http_responses_total{{{INSTANCE}}}[$__rate_interval]))",
                "{{status_code}}",
            ),
            unit="reqps",
        ),
        timeseries(
            "Router refusals (429)",
            "Requests a second that the router refused because its queue was full.",
            target(
                f'{per_instance} (rate(smg_http_responses_total{{status_code="429", {INSTANCE}}}[$__rate_interval]))',
                "{{host}} {{instance_name}}",
            ),
            unit="reqps",
            limits=thresholds((0.1, YELLOW), (1, RED)),
        ),
        timeseries(
            "Router admission",
            "Requests that the router has let in, and requests that wait in its queue.",
            target(f"{per_instance} (smg_admission_inflight{{{INSTANCE}}})", "in flight {{host}} {{instance_name}}"),
            target(f"{per_instance} (smg_admission_queue_depth{{{INSTANCE}}})", "queued {{host}} {{instance_name}}"),
            unit="short",
        ),
        timeseries(
            "GPU utilisation",
            "Share of the time in which the GPU ran a kernel.",
            target(f"llmfleet_gpu_utilization_ratio{{{SERVICE}}}", "{{host}} GPU {{gpu}}"),
            unit="percentunit",
            maximum=1,
            width=12,
        ),
        timeseries(
            "GPU memory in use",
            "Share of the GPU's memory that is in use.",
            target(
                f"llmfleet_gpu_memory_used_bytes{{{SERVICE}}} / llmfleet_gpu_memory_total_bytes{{{SERVICE}}}",
                "{{host}} GPU {{gpu}}",
            ),
            unit="percentunit",
            limits=thresholds((0.95, YELLOW), (0.98, RED)),
            maximum=1,
            width=12,
        ),
    )


def kv_cache() -> list[Json]:
    per_instance = "sum by (host, instance_name)"
    return row(
        "KV cache",
        timeseries(
            "KV cache tokens",
            "Tokens that running requests hold, that are cached and could be evicted, and that are free.",
            target(f"{per_instance} (sglang:kv_used_tokens{{{INSTANCE}}})", "used {{host}} {{instance_name}}"),
            target(
                f"{per_instance} (sglang:kv_evictable_tokens{{{INSTANCE}}})", "evictable {{host}} {{instance_name}}"
            ),
            target(f"{per_instance} (sglang:kv_available_tokens{{{INSTANCE}}})", "free {{host}} {{instance_name}}"),
            unit="short",
        ),
        timeseries(
            "Prefix cache hit ratio",
            "Share of the prompt tokens that prefill found in its cache, on the GPU or in host memory.",
            target(
                f"{per_instance} (rate(sglang:cached_tokens_total{{{PREFILL}}}[$__rate_interval]))"
                f" / {per_instance} (rate(sglang:prompt_tokens_total{{{PREFILL}}}[$__rate_interval]))",
                "{{host}} {{instance_name}}",
            ),
            unit="percentunit",
            maximum=1,
        ),
        timeseries(
            "KV transfer time",
            "How long one request's KV cache took from prefill to decode.",
            target(quantile(0.5, "sglang:kv_transfer_latency_ms", PREFILL, "group"), "p50 {{group}}"),
            target(quantile(0.95, "sglang:kv_transfer_latency_ms", PREFILL, "group"), "p95 {{group}}"),
            unit="ms",
        ),
        timeseries(
            "Prefill requests in transfer",
            "Requests whose prefill is done and whose KV cache is on its way.",
            target(
                f"{per_instance} (sglang:num_prefill_inflight_queue_reqs{{{PREFILL}}})", "{{host}} {{instance_name}}"
            ),
            unit="short",
        ),
        timeseries(
            "Decode queues",
            "Requests that wait for room in decode's KV cache, and requests that wait for their KV cache to arrive.",
            target(
                f"{per_instance} (sglang:num_decode_prealloc_queue_reqs{{{DECODE}}})",
                "waiting for room {{host}} {{instance_name}}",
            ),
            target(
                f"{per_instance} (sglang:num_decode_transfer_queue_reqs{{{DECODE}}})",
                "waiting for transfer {{host}} {{instance_name}}",
            ),
            unit="short",
        ),
        timeseries(
            "Decode running requests",
            "Requests in the decode engine's running batch.",
            target(f"{per_instance} (sglang:num_running_reqs{{{DECODE}}})", "{{host}} {{instance_name}}"),
            unit="short",
        ),
    )


def hicache() -> list[Json]:
    per_instance = "sum by (host, instance_name)"
    return row(
        "HiCache",
        timeseries(
            "Host tokens",
            "Tokens held in host memory and room for them. Empty where the hierarchical cache is off. "
            "A full pool says nothing about reuse: see the hit ratio.",
            target(
                f"{per_instance} (sglang:hicache_host_used_tokens{{{INSTANCE}}})", "used {{host}} {{instance_name}}"
            ),
            target(
                f"{per_instance} (sglang:hicache_host_total_tokens{{{INSTANCE}}})",
                "capacity {{host}} {{instance_name}}",
            ),
            unit="short",
        ),
        timeseries(
            "Host pool in use",
            "Share of the host pool that holds tokens. Empty where the hierarchical cache is off.",
            target(
                f"{per_instance} (sglang:hicache_host_used_tokens{{{INSTANCE}}})"
                f" / {per_instance} (sglang:hicache_host_total_tokens{{{INSTANCE}}})",
                "{{host}} {{instance_name}}",
            ),
            unit="percentunit",
            maximum=1,
        ),
        timeseries(
            "Host hit ratio",
            "Share of the prompt tokens that prefill loaded back from host memory. "
            "Empty where the hierarchical cache is off.",
            target(
                f'{per_instance} (rate(sglang:cached_tokens_total{{cache_source="host", {PREFILL}}}[$__rate_interval]))'
                f" / {per_instance} (rate(sglang:prompt_tokens_total{{{PREFILL}}}[$__rate_interval]))",
                "{{host}} {{instance_name}}",
            ),
            unit="percentunit",
            maximum=1,
        ),
    )


DASHBOARDS = {
    "pd-group": dashboard(
        uid="sglang-pd-group",
        title="PD groups",
        description="Prefill, decode, router and GPUs: what predicts an outage first, the caches below.",
        tags=["sglang"],
        variables=[
            variable("group", "PD group", 'label_values(up{job="sglang"}, group)'),
            variable("host", "Host", 'label_values(up{job!="prometheus"}, host)'),
        ],
        panels=[*node_health(), *kv_cache(), *hicache()],
    ),
}


def rendered() -> Iterator[tuple[str, str]]:
    """File name and content of every dashboard."""
    for name, content in DASHBOARDS.items():
        yield f"{name}.json", json.dumps(content, indent=2, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a file differs")
    check = parser.parse_args().check
    differing = 0
    for name, text in rendered():
        path = Path(__file__).with_name(name)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        differing += 1
        if check:
            print(f"{path} differs from what {Path(__file__).name} makes: run it and commit the file", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
