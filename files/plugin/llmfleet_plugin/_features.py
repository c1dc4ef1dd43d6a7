# SPDX-License-Identifier: Apache-2.0
"""Every feature there is, in the order in which they are installed."""

from __future__ import annotations

from llmfleet_plugin import queue_bound
from llmfleet_plugin._feature import Feature

FEATURES: tuple[Feature, ...] = (queue_bound.FEATURE,)
