# SPDX-License-Identifier: Apache-2.0
"""Time the engine's store of index keys, stock fp8 against patched bf16, in one run on a CUDA device.

Stores 2^18 keys from a decode plan to random places in a pool and writes JSON: median microseconds of a replayed CUDA
graph with the L2 cache flushed before each replay, in turns, five times. "floor" is the bytes of inputs, plan, places
and keys over the bandwidth of a large copy.

    LLMFLEET_ENGINE_TREES=FOLDER python tests/gpu/bench_index_key_store.py --output FILE
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
sys.path[:0] = [str(ROOT), str(ROOT / ".collections")]

import torch  # noqa: E402
import tvm_ffi  # noqa: E402

from tests import index_key_store as store  # noqa: E402
from tests.gpu import index_key_reference as reference  # noqa: E402
from tests.gpu.index_key_reference import EPSILON, KEY_DIM, RATIO  # noqa: E402
from tests.gpu.timing import copy_bandwidth, graph, in_turns  # noqa: E402

KEYS = 1 << 18
POSITIONS = 1 << 17
ROUNDS = 5
KEY_BYTES = {"fp8": KEY_DIM + 4, "bf16": 2 * KEY_DIM}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def measure(engine: store.Engine, dtype: str, bandwidth: float) -> dict[str, Any]:
    """Times and errors of the stores of one engine for one type of input."""
    stock, patched = (tvm_ffi.load_module(str(store.library(engine, patched=flag))) for flag in (False, True))
    lengths = (torch.arange(KEYS) % (POSITIONS // RATIO) + 1) * RATIO
    plan, factors = reference.decode_plan(lengths), reference.frequencies(POSITIONS)
    inputs = torch.randn(KEYS, KEY_DIM, device="cuda").to(DTYPES[dtype])
    weight = (1 + torch.randn(KEY_DIM, device="cuda") / 4).to(DTYPES[dtype])
    places = torch.randperm(KEYS, device="cuda")
    wanted = reference.index_keys(inputs, weight, factors[lengths.cuda() - RATIO])
    entry: dict[str, Any] = {"engine": engine.version, "input": dtype, "keys": KEYS}
    calls: dict[str, Callable[[], Any]] = {}
    for name, module, keys in (
        ("stock_fp8", stock, "fp8"),
        ("patched_fp8", patched, "fp8"),
        ("patched_bf16", patched, "bf16"),
    ):
        pool = torch.zeros(KEYS // store.PAGE, store.PAGE * KEY_BYTES[keys], dtype=torch.uint8, device="cuda")
        calls[name] = graph(
            partial(module[f"{keys}_{dtype}"], inputs, plan, weight, EPSILON, factors, places, pool, True, RATIO)
        )
        calls[name]()
        found = (reference.fp8_keys if keys == "fp8" else reference.bf16_keys)(pool)[places]
        traffic = KEYS * (KEY_DIM * inputs.element_size() + 16 + 8 + KEY_BYTES[keys])
        entry[name] = {
            "relative_error": ((found - wanted).norm() / wanted.norm()).item(),
            "floor_microseconds": traffic / bandwidth * 1e6,
        }
    for name, found in in_turns(calls, ROUNDS).items():
        entry[name] |= {"microseconds": statistics.median(found), "rounds": found}
    entry["bf16_over_stock_fp8"] = entry["patched_bf16"]["microseconds"] / entry["stock_fp8"]["microseconds"]
    return entry


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if not (engines := store.engines()):
        raise SystemExit(f"no SGLang with a known store is here: name its folder in {store.TREES}")
    bandwidth = copy_bandwidth()
    results = [measure(engine, dtype, bandwidth) for engine in engines for dtype in DTYPES]
    for entry in results:
        print(json.dumps(entry), flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_second": bandwidth,
        "results": results,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
