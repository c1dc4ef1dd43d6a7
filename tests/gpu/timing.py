# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks time a call: a replayed CUDA graph of it, with the L2 cache flushed before each replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from triton.testing import do_bench

Call = Callable[[], Any]


def graph(call: Call) -> Call:
    """A replay of the call, captured in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    replay: Call = captured.replay
    return replay


def microseconds(call: Call, rep: int = 100) -> float:
    """Median time of a call, repeated for about ``rep`` milliseconds."""
    milliseconds: float = do_bench(call, warmup=20, rep=rep, return_mode="median")
    return milliseconds * 1e3


def in_turns(calls: Mapping[str, Call], rounds: int, rep: int = 100) -> dict[str, list[float]]:
    """Microseconds of each call in each round: what changes while they are timed changes for all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(microseconds(call, rep))
    return times


def copy_bandwidth(rep: int = 100) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (microseconds(partial(target.copy_, source), rep) * 1e-6)
