# SPDX-License-Identifier: Apache-2.0
"""Time the index query kernel and the engine's fp8 kernel, in one run on a CUDA device.

Writes JSON: median microseconds of a replayed CUDA graph of one launch with the L2 cache flushed before each replay, in
turns, five times. "floor" is the bytes of queries read and written over the bandwidth of a large copy.

    LLMFLEET_ENGINE_TREES=FOLDERS python tests/gpu/bench_index_query.py --output FILE [--tile VECTORS,WARPS ...]

``--tile`` times the kernel with other numbers of vectors and warps of a program than its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".collections"), str(ROOT / "files" / "kernels")]

import torch  # noqa: E402
import triton  # noqa: E402
from llmfleet_kernels import index_query as kernel  # noqa: E402

from tests import index_key_store as store  # noqa: E402
from tests import index_query as cases  # noqa: E402
from tests.gpu.index_query_engine import engine_query  # noqa: E402
from tests.gpu.timing import copy_bandwidth, graph, in_turns  # noqa: E402

ROWS = (1, 64, 8192)
HEADS = 64
ROUNDS = 5
REP = 60
"""Milliseconds that each kernel is repeated for in a round."""


def measure(rows: int, tiles: list[tuple[int, int]], bandwidth: float) -> list[dict[str, Any]]:
    """Times and errors of every kernel for one number of rows; errors are norms, of the query over what weighs it."""
    case = cases.random(rows, HEADS, "cuda")
    wanted, wanted_weights = kernel.reference_query(*case.arguments)
    calls: dict[str, Callable[[], Any]] = {}
    entries: dict[str, dict[str, Any]] = {}

    def add(name: str, call: Callable[[], tuple[torch.Tensor, torch.Tensor]], **about: Any) -> None:
        query, weights = call()
        # The scale of fp8 is in the weights.
        found = query.double() * (weights.double() / wanted_weights)[..., None]
        size = (query.element_size() + case.q.element_size()) * case.q.numel()
        entries[name] = {
            "rows": rows,
            "heads": HEADS,
            **about,
            "relative_error": ((found - wanted).norm() / wanted.norm()).item(),
            "floor_microseconds": size / bandwidth * 1e6,
        }
        calls[name] = graph(call)

    for engine in store.engines():
        add(f"engine {engine.version}", partial(engine_query, engine, case), kernel="fp8", engine=engine.version)
    for vectors, warps in tiles:
        kernel.VECTORS, kernel.WARPS = vectors, warps
        about = {"kernel": "bf16", "vectors": vectors, "warps": warps}
        add(f"{vectors},{warps}", partial(kernel.index_query, *case.arguments), **about)
    for name, found in in_turns(calls, ROUNDS, REP).items():
        entries[name] |= {"microseconds": statistics.median(found), "rounds": found}
    return list(entries.values())


def tile(text: str) -> tuple[int, int]:
    vectors, warps = text.split(",")
    return int(vectors), int(warps)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--tile", type=tile, nargs="+", default=[(kernel.VECTORS, kernel.WARPS)], metavar="V,W")
    arguments = parser.parse_args()
    if not store.engines():
        raise SystemExit(f"no SGLang with a known store is here: name its folder in {store.TREES}")
    bandwidth = copy_bandwidth(REP)
    results = [entry for rows in ROWS for entry in measure(rows, arguments.tile, bandwidth)]
    for entry in results:
        print(json.dumps({name: value for name, value in entry.items() if name != "rounds"}), flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_second": bandwidth,
        "results": results,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
