# SPDX-License-Identifier: Apache-2.0
"""Time the sparse-MLA kernel by replaying a CUDA graph, with FlashMLA beside it where `sgl_kernel` can be imported.

Every row attends to 128 window slots and 512 compressed slots, drawn at random from caches of 0.3 GB each, far more
than the L2 cache, which is flushed before every replay (`triton.testing.do_bench`). Writes JSON: microseconds.

    python tests/gpu/bench_sparse_mla.py --output docs/benchmarks/sparse_mla_h200.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files" / "kernels")]

import torch  # noqa: E402
import triton  # noqa: E402
from llmfleet_kernels.sparse_mla import HEAD_DIM, KeyList, sparse_mla_decode  # noqa: E402
from llmfleet_kernels.sparse_mla_reference import attention, random_pages  # noqa: E402

from tests.gpu.timing import graph, microseconds  # noqa: E402

BATCHES = (1, 4, 16, 32, 64)
HEADS = (64, 16)
WINDOW, COMPRESSED = 128, 512
SCALE = HEAD_DIM**-0.5


def flash_mla(
    query: torch.Tensor, window: KeyList, compressed: KeyList, sink: torch.Tensor
) -> Callable[[], Any] | None:
    """Return a call of FlashMLA on the same input, or None where it is not installed or has other head counts."""
    try:
        from sgl_kernel.flash_mla import (  # type: ignore[import-not-found]
            flash_mla_with_kvcache,
            get_mla_metadata,
        )
    except ImportError:
        return None
    if query.shape[1] != 64:
        return None
    metadata = get_mla_metadata()[0]
    return lambda: flash_mla_with_kvcache(
        q=query[:, None],
        k_cache=window.pages.view(torch.float8_e4m3fn),
        head_dim_v=HEAD_DIM,
        block_table=None,
        cache_seqlens=None,
        tile_scheduler_metadata=metadata,
        softmax_scale=SCALE,
        is_fp8_kvcache=True,
        indices=window.indices[:, None],
        topk_length=window.lengths,
        attn_sink=sink,
        extra_k_cache=compressed.pages.view(torch.float8_e4m3fn),
        extra_indices_in_kvcache=compressed.indices[:, None],
        extra_topk_length=compressed.lengths,
    )[0]


def random_keys(pages: torch.Tensor, rows: int, width: int) -> KeyList:
    """Return full lists of `width` random slots a row."""
    slots = pages.shape[0] * pages.shape[1]
    return KeyList(
        pages,
        torch.randint(0, slots, (rows, width), device="cuda", dtype=torch.int32),
        torch.full((rows,), width, device="cuda", dtype=torch.int32),
    )


def measure() -> list[dict[str, Any]]:
    """Return one entry a head count and batch: time, error against float64 (norm over norm), FlashMLA's time."""
    window_pages, compressed_pages = random_pages(2048, 256), random_pages(8192, 64)
    results = []
    for heads in HEADS:
        for rows in BATCHES:
            query = torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            window = random_keys(window_pages, rows, WINDOW)
            compressed = random_keys(compressed_pages, rows, COMPRESSED)
            sink = torch.randn(heads, device="cuda")
            wanted = attention(query, window, compressed, sink, SCALE)
            found = sparse_mla_decode(query, window, compressed, sink, SCALE).double()
            entry: dict[str, Any] = {
                "heads": heads,
                "batch": rows,
                "microseconds": microseconds(graph(lambda: sparse_mla_decode(query, window, compressed, sink, SCALE))),  # noqa: B023
                "relative_error": ((found - wanted).norm() / wanted.norm()).item(),
            }
            peer = flash_mla(query, window, compressed, sink)
            if peer is not None:
                entry["flash_mla_microseconds"] = microseconds(graph(peer))
                entry["flash_mla_relative_error"] = ((peer()[:, 0].double() - wanted).norm() / wanted.norm()).item()
            results.append(entry)
            print(json.dumps(entry), flush=True)
    return results


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "slots": {"window": WINDOW, "compressed": COMPRESSED},
        "results": measure(),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
