# SPDX-License-Identifier: Apache-2.0
"""What is active, told by every rank: a file for the verification, a metric for the dashboard.

``$LLMFLEET_FEATURES_DIR/<process>.json`` holds ``{"process", "pid", "version", "features": {name: {"value", ...}}}``;
``process`` is ``main`` or ``tp0-pp0-dp0`` and so on. systemd empties the folder at each start, so a file is of the
running server. Without the variable nothing is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

FOLDER = "LLMFLEET_FEATURES_DIR"

Features = Mapping[str, Mapping[str, Any]]


def rank_name(tp_rank: int | None, pp_rank: int | None, dp_rank: int | None) -> str:
    return f"tp{tp_rank or 0}-pp{pp_rank or 0}-dp{dp_rank or 0}"


def write(process: str, version: str, features: Features, environment: Mapping[str, str]) -> None:
    """Write the file of this process, whole or not at all."""
    folder = environment.get(FOLDER)
    if not folder:
        return
    path = os.path.join(folder, f"{process}.json")
    with open(f"{path}.partial", "w", encoding="utf-8") as stream:
        json.dump(
            {"process": process, "pid": os.getpid(), "version": version, "features": features}, stream, sort_keys=True
        )
    os.replace(f"{path}.partial", path)


def count(process: str, features: Features) -> None:
    """The metric, in the registry that the engine's ``/metrics`` collects (multiprocess files)."""
    from prometheus_client import Gauge

    gauge = Gauge(
        "llmfleet_feature_active",
        "1 for each feature of the plugin that is active in this process.",
        ["feature", "value", "process"],
        multiprocess_mode="mostrecent",
    )
    for name, told in features.items():
        gauge.labels(name, told["value"], process).set(1)
