# SPDX-License-Identifier: Apache-2.0
"""Where a scheduler keeps its place among the ranks."""

from __future__ import annotations

from typing import Any


def ranks(version: str, scheduler: Any) -> Any:
    """The object that has a scheduler's ``tp_rank``, ``pp_rank``, ``dp_rank`` and ``attn_tp_rank``."""
    if version == "0.5.16":
        return scheduler.ps
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
