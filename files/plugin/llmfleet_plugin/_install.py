# SPDX-License-Identifier: Apache-2.0
"""Install the features that the environment asks for, in the order of ``FEATURES``."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from typing import Any

from llmfleet_plugin import _report
from llmfleet_plugin._feature import Context, Feature, check_version, wanted
from llmfleet_plugin._features import FEATURES
from llmfleet_plugin._hooks import Hooks
from llmfleet_plugin._ranks import ranks

logger = logging.getLogger("llmfleet")

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
#: The signature of a scheduler's constructor, by version.
SCHEDULER_INIT: Mapping[str, str] = {
    "0.5.16": (
        "(self, server_args, port_args, gpu_id, tp_rank, moe_ep_rank, pp_rank, attn_cp_rank, moe_dp_rank, dp_rank)"
    ),
    "0.5.23": "(self, server_args, port_args)",
}


#: Processes that SGLang loads plugins in, and that no feature changes: importing every target there would only cost.
UNCHANGED = ("run_detokenizer_process",)


def install_wanted(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Install what the environment asks for; nothing when it asks for nothing. Raises FeatureError."""
    asked = wanted(FEATURES, environment)
    runs = getattr(multiprocessing.current_process(), "_target", None)
    if not asked or getattr(runs, "__name__", "") in UNCHANGED:
        return {}
    version = installed_version("sglang")
    check_version(version)
    return install(version, asked, FEATURES, environment)


def install(
    version: str, asked: Mapping[str, str], features: tuple[Feature, ...], environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Check every target of every feature asked for, then hook; so a refusal leaves the engine as it was."""
    chosen = [(feature, Hooks(feature.hooks[version])) for feature in features if feature.name in asked]
    active: dict[str, dict[str, Any]] = {}
    for feature, hooks in chosen:
        details = feature.install(Context(version), hooks)
        hooks.apply()
        active[feature.name] = {"value": asked[feature.name], **details}
        logger.info("llmfleet: feature %s=%s is active: %s", feature.name, asked[feature.name], details)
    report(version, active, environment)
    return active


def report(version: str, active: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """Let this process tell what is active: the server now, a scheduler once it has been made and knows its rank."""
    if multiprocessing.parent_process() is None:
        _report.write("main", version, active, environment)

    def tell(_result: None, scheduler: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
        place = ranks(version, scheduler)
        process = _report.rank_name(place.tp_rank, place.pp_rank, place.dp_rank)
        _report.write(process, version, active, environment)
        if server_args.enable_metrics:
            _report.count(process, active)

    hooks = Hooks({SCHEDULER: SCHEDULER_INIT[version]})
    hooks.after(SCHEDULER, tell)
    hooks.apply()
