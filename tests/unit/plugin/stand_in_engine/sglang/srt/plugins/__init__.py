# SPDX-License-Identifier: Apache-2.0
"""Stand-in for SGLang's plugin loader: whatever a plugin raises is logged, and the engine goes on without it."""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry

logger = logging.getLogger(__name__)


def load_plugins() -> None:
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    for point in entry_points(group="sglang.srt.plugins"):
        if allowed and point.name not in allowed:
            continue
        try:
            point.load()()
        except Exception:
            logger.exception("Failed to load plugin %s", point.name)
    HookRegistry.apply_hooks()
