# SPDX-License-Identifier: Apache-2.0
"""What runs beside what is planned, as a table for a person. PRIVATE to the collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._gauges import WAITING
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import FALLBACK

STATUS_COLUMNS = (
    "host",
    "group",
    "instance",
    "role",
    "state",
    "running",
    "planned",
    "ready",
    "queue",
    "GPUs",
    "nodes",
    "restarts",
    "uptime",
)


def _uptime(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}min"
    return f"{hours}h" if hours < 48 else f"{hours // 24}d"


def status_rows(
    host: str,
    instances: Sequence[Mapping[str, Any]],
    running: Mapping[str, Any],
    ready: Sequence[str],
    left: Mapping[str, Any],
    records: Mapping[str, Any],
    now_us: int,
) -> list[dict[str, str]]:
    """One row for each instance of a host, all text.

    ``running`` is what ``unit_info`` tells; ``ready`` the names of those that said so; ``left`` what ``wait_idle``
    tells of the servers; ``records`` the groups' records; ``now_us`` microseconds since the host has booted. The
    queue counts what does not run yet. A revision that neither the plan nor a record names is shown as ``?`` and the
    start of its fingerprint. A fallback that does not run stands by, which is as it should be.
    """
    known = {instance["fingerprint"]: instance["revision"] for instance in instances}
    for of_group in records.values():
        for name in ("good", "previous"):
            for instance in (of_group.get(name) or {}).get("plan", {}).get("instances", []):
                known.setdefault(instance["fingerprint"], instance["revision"])
    rows = []
    for instance in instances:
        unit, queues = running[instance["unit"]], left.get(f"{instance['url']}/metrics", {})
        up = int(unit["main_pid"]) > 0
        queue = "-"
        if up and instance["role"] != "router":
            queue = str(sum(queues.get(name, 0) for name in WAITING)) if isinstance(queues, Mapping) else "?"
        fingerprint = str(unit["fingerprint"])
        revision = known.get(fingerprint, f"?{fingerprint[:8]}") if fingerprint else "-"
        if fingerprint and fingerprint != instance["fingerprint"] and revision == instance["revision"]:
            # A port or a router's flag moves no revision, and yet it does not run what is planned.
            revision += "*"
        state = str(unit["active_state"]) if unit["loaded"] else "absent"
        rows.append(
            {
                "host": host,
                "group": str(instance["group"]),
                "instance": str(instance["name"]),
                "role": str(instance["role"]),
                "state": "standby" if instance["role"] == FALLBACK and state == "inactive" else state,
                "running": revision,
                "planned": str(instance["revision"]),
                "ready": ("yes" if instance["name"] in ready else "no") if up else "-",
                "queue": queue,
                "GPUs": ",".join(map(str, instance["gpus"])) or "-",
                "nodes": ",".join(map(str, instance["nodes"])) or "-",
                "restarts": str(unit["restarts"]) if up else "-",
                "uptime": _uptime((now_us - int(unit["started_monotonic_us"])) / 1e6 if up else None),
            }
        )
    return rows


def status_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows for a person to read, under their headings; columns as wide as what is in them."""
    lines = [{column: column for column in STATUS_COLUMNS}, *rows]
    widths = {column: max(len(line[column]) for line in lines) for column in STATUS_COLUMNS}
    return "\n".join("  ".join(line[c].ljust(widths[c]) for c in STATUS_COLUMNS).rstrip() for line in lines)
