# SPDX-License-Identifier: Apache-2.0
"""``--max-queued-requests`` enforced on prefill and decode servers."""

from __future__ import annotations

from typing import Any

from llmfleet_plugin._feature import Context, Feature
from llmfleet_plugin._hooks import Hooks


def install(context: Context, hooks: Hooks) -> dict[str, Any]:
    return {}


FEATURE = Feature(
    name="queue_bound",
    variable="LLMFLEET_QUEUE_BOUND",
    values=("on",),
    hooks={"0.5.16": {}, "0.5.23": {}},
    install=install,
)
