# SPDX-License-Identifier: Apache-2.0
"""Features of the engine's plugin: what may be asked for, what it means for the environment, what servers report.

The plugin itself is ``files/plugin``; a test holds this table against it. PRIVATE to the collection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

OFF = "off"
#: Where a server's processes report what is active in them; systemd empties it at each start.
FOLDER = "LLMFLEET_FEATURES_DIR"


@dataclass(frozen=True)
class Feature:
    """``variable`` turns the feature on by one of ``values``, on ``devices`` only, together with ``needs``."""

    variable: str
    values: tuple[str, ...]
    devices: tuple[str, ...]
    needs: Mapping[str, str] = field(default_factory=dict)


FEATURES: Mapping[str, Feature] = {
    "api_keys": Feature("LLMFLEET_API_KEYS", ("on",), ("cpu", "cuda")),
    "queue_bound": Feature("LLMFLEET_QUEUE_BOUND", ("on",), ("cpu", "cuda")),
    "index_keys": Feature("LLMFLEET_INDEX_KEYS", ("bf16",), ("cuda",), {"indexer_logits": "triton"}),
    "index_queries": Feature("LLMFLEET_INDEX_QUERIES", ("bf16",), ("cuda",), {"index_keys": "bf16"}),
    "indexer_logits": Feature("LLMFLEET_INDEXER_LOGITS", ("triton",), ("cuda",)),
    "sparse_mla": Feature("LLMFLEET_SPARSE_MLA", ("triton",), ("cuda",)),
}
#: What is on without being asked for: a server that sheds load is safer than one that drowns.
DEFAULT: Mapping[str, str] = {"queue_bound": "on"}


def parse_features(value: Any, what: str) -> dict[str, str]:
    """``plan_features`` -> ``{feature: value}`` of what is on. ``on`` and ``off`` may be YAML's booleans.

    Raises RefusalError for a feature or a value that there is not.
    """
    if not isinstance(value, Mapping):
        raise RefusalError(
            "type",
            f"{what} is {value!r}",
            "a mapping such as {queue_bound: on}",
            f"write {what} as 'name: value' lines",
        )
    found = dict(DEFAULT)
    for name, raw in value.items():
        feature = FEATURES.get(str(name))
        if feature is None:
            raise RefusalError(
                "feature", f"{what} names {name!r}", f"one of {', '.join(FEATURES)}", f"correct its spelling in {what}"
            )
        text = ("on" if raw else OFF) if isinstance(raw, bool) else str(raw)
        if text != OFF and text not in feature.values:
            raise RefusalError(
                "feature",
                f"{name} of {what} is {raw!r}",
                f"{OFF} or {' or '.join(feature.values)}",
                f"set {name} in {what} to one of them",
            )
        found[str(name)] = text
    return {name: text for name, text in sorted(found.items()) if text != OFF}


def check_features(features: Mapping[str, str], device: str) -> list[RefusalError]:
    """Features that the device does not have, or that lack another one."""
    refused = []
    for name, value in features.items():
        feature = FEATURES[name]
        if device not in feature.devices:
            refused.append(
                RefusalError(
                    "feature_device",
                    f"plan_features has {name}: {value} and plan_device is {device}",
                    f"{name} on {' or '.join(feature.devices)} only",
                    f"set {name}: {OFF} for this host",
                )
            )
        for other, wanted in feature.needs.items():
            if features.get(other, OFF) != wanted:
                refused.append(
                    RefusalError(
                        "feature_needs",
                        f"plan_features has {name}: {value} and {other}: {features.get(other, OFF)}",
                        f"{other}: {wanted} with it, since nothing else goes with that format",
                        f"set {other}: {wanted} too",
                    )
                )
    return refused


def environment(features: Mapping[str, str]) -> dict[str, str]:
    """The variables that turn features on."""
    return {FEATURES[name].variable: value for name, value in features.items()}


def findings(instances: Sequence[Mapping[str, Any]], observed: Mapping[str, Any]) -> list[dict[str, str]]:
    """Where a running server's features are not those of its plan; empty when every process has them.

    ``instances`` are the plan's; ``observed`` is what ``unit_info`` read, by unit, with ``reports`` as ``{process:
    {"pid", "features": {name: {"value", ..}}}}``. The server (``main``) and each of the plan's ``ranks`` must report.
    """
    found = []
    for instance in instances:
        if not instance["features"]:
            continue
        reports = observed.get(instance["unit"], {}).get("reports", {})
        ranks = sorted(name for name in reports if name != "main")
        if "main" not in reports or len(ranks) != instance["ranks"]:
            found.append(
                {
                    "instance": instance["name"],
                    "found": f"reports of {', '.join(sorted(reports)) or 'no process'}",
                    "expected": f"reports of main and of {instance['ranks']} ranks",
                    "cure": "a process without a report runs without the plugin; its log has 'Failed to load plugin'",
                }
            )
        for process, report in sorted(reports.items()):
            active = {name: str(told["value"]) for name, told in report["features"].items()}
            if active != dict(instance["features"]):
                found.append(
                    {
                        "instance": instance["name"],
                        "found": f"{process} (PID {report['pid']}) runs with {_told(active)}",
                        "expected": _told(instance["features"]),
                        "cure": "restart the unit; if it stays so, see its log for 'llmfleet'",
                    }
                )
    return found


def _told(features: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in sorted(features.items())) or "no feature"
