# SPDX-License-Identifier: Apache-2.0
"""Stand-in for SGLang's scheduler: it knows its rank, and where a request goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Scheduler:
    def __init__(
        self,
        server_args: Any,
        port_args: Any,
        gpu_id: int,
        tp_rank: int,
        moe_ep_rank: int,
        pp_rank: int,
        attn_cp_rank: int,
        moe_dp_rank: int,
        dp_rank: int | None,
    ) -> None:
        self.ps = SimpleNamespace(tp_rank=tp_rank, pp_rank=pp_rank, dp_rank=dp_rank)
        self.told = (server_args, port_args, gpu_id, moe_ep_rank, attn_cp_rank, moe_dp_rank)

    def add(self, request: str, *, urgent: bool = False) -> str:
        return f"{request} {'first' if urgent else 'queued'}"
