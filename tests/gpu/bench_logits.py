# SPDX-License-Identifier: Apache-2.0
"""Time the indexer logits kernel.

    python tests/gpu/bench_logits.py [--engine indexer.py] [--tilelang tilelang_kernel.py] [--output FILE]

Prints a table and writes JSON. Every figure is the median of replays of a CUDA graph that holds one launch for each of
several page tables, whose pages together exceed the L2 cache, divided by the number of launches: keys come from device
memory, and the gap between launches counts. "share" is the bytes of the keys within the rows' lengths over the time,
as a share of a large device-to-device copy (bytes read and written) measured in the same process.

Peers, where they are there, all with fp8 keys, in the same run and timed in the same way: DeepGEMM's
``fp8_paged_mqa_logits``; SGLang's TileLang indexer, from the file ``--tilelang``
(``kernels/ops/attention/dsa/tilelang_kernel.py`` of its source); the PyTorch fallback that SGLang has for sm_120, from
the file ``--engine`` (``srt/layers/attention/dsv4/indexer.py``).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[2] / "files" / "kernels"))

from llmfleet_kernels import __version__
from llmfleet_kernels.logits import paged_logits, reference_logits
from llmfleet_kernels.logits_tile import BF16, FP8, KEY_DIM, PAGE, KeyFormat, choose_tile

HEADS = 64
POOL_BYTES = 1 << 30
SHAPES = [  # rows, length of each row, window (all in compressed tokens)
    (1, 128, 131072),
    (32, 128, 8192),
    (32, 128, 32768),
    (32, 128, 131072),
    (8, 4096, 32768),
    (1, 131072, 131072),
    (8, 32768, 32768),
    (32, 16384, 32768),
]
SKEWED = ("one row of 32768 among 31 of 512", [32768] + [512] * 31, 32768)
FALLBACK = "fp8_paged_mqa_logits_torch_sm120"


def graph_time(launches: Sequence[Callable[[], object]], replays: int = 40) -> float:
    """Median microseconds of one launch, over replays of a graph that holds all of them."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 4 GiB: not in a graph, where it can be left to a copy engine."""
    source = torch.randint(0, 255, (1 << 32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    size: int = source.numel()
    milliseconds: float = triton.testing.do_bench(partial(target.copy_, source), return_mode="median")
    return 2 * size / (milliseconds * 1e-3)


def pool(keys_format: KeyFormat) -> torch.Tensor:
    pages = POOL_BYTES // keys_format.page_bytes
    values = torch.randn(pages, PAGE * KEY_DIM, device="cuda")
    if keys_format == BF16:
        return values.bfloat16().view(torch.uint8)
    scales = torch.rand(pages, PAGE, device="cuda") + 0.1
    return torch.cat([values.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)], dim=1)


def page_tables(pages: int, lengths: list[int], window: int) -> list[torch.Tensor]:
    """2 to 16 tables of distinct pages in random order."""
    width, used = -(-window // PAGE), [-(-length // PAGE) for length in lengths]
    order = torch.randperm(pages, device="cuda", dtype=torch.int32)
    tables = []
    for number in range(min(16, pages // sum(used))):
        table = torch.zeros(len(lengths), width, device="cuda", dtype=torch.int32)
        start = number * sum(used)
        for row, count in enumerate(used):
            table[row, :count] = order[start : start + count]
            start += count
        tables.append(table)
    return tables


def engine_fallback(path: Path) -> Callable[..., torch.Tensor]:
    """SGLang's fallback, alone, from its source file: the file's imports need the whole engine."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FALLBACK]
    if not wanted:
        raise SystemExit(f"{path} has no function {FALLBACK}")
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "Any": Any, "FP8_DTYPE": torch.float8_e4m3fn}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), names)
    function: Callable[..., torch.Tensor] = names[FALLBACK]
    return function


def tilelang_indexer(path: Path) -> Callable[..., torch.Tensor]:
    """SGLang's TileLang indexer from its source file, which asks two modules of the engine about AMD's devices."""
    utils, fp8_kernel = ModuleType("sglang.srt.utils"), ModuleType("sglang.kernels.ops.quantization.fp8_kernel")
    for module, names in ((utils, ("is_hip", "is_gfx95_supported")), (fp8_kernel, ("is_fp8_fnuz",))):
        for name in names:
            setattr(module, name, lambda: False)
        parts = module.__name__.split(".")
        for depth in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        sys.modules.setdefault(module.__name__, module)
    spec = importlib.util.spec_from_file_location("tilelang_indexer", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    function: Callable[..., torch.Tensor] = loaded.tilelang_fp8_paged_mqa_logits
    return function


def deep_gemm_module() -> Any:
    try:
        import deep_gemm
    except ImportError:
        return None
    return deep_gemm


def measure(
    lengths: list[int],
    window: int,
    pools: dict[str, torch.Tensor],
    copy: float,
    engine: Callable[..., Any] | None,
    tilelang: Callable[..., Any] | None,
) -> dict[str, Any]:
    """Figures of one shape; peers are timed with the fp8 input of the kernel."""
    rows = len(lengths)
    length = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    weights = torch.randn(rows, HEADS, device="cuda")
    out = torch.empty(rows, window, device="cuda")
    result: dict[str, Any] = {"rows": rows, "length": max(lengths), "window": window}
    for keys_format in (BF16, FP8):
        keys = pools[keys_format.name]
        kind = torch.float8_e4m3fn if keys_format == FP8 else torch.bfloat16
        q = torch.randn(rows, HEADS, KEY_DIM, device="cuda").to(kind)
        tables = page_tables(keys.shape[0], lengths, window)
        paged_logits(q, keys, weights, length, tables[0], window, out)
        expected = reference_logits(q, keys, weights, length, tables[0], window)
        below = expected.isfinite()
        error = ((out.double() - expected)[below].norm() / expected[below].norm()).item()
        time = graph_time([partial(paged_logits, q, keys, weights, length, table, window, out) for table in tables])
        size = sum(lengths) * (KEY_DIM * keys_format.element_bytes + keys_format.scale_bytes)
        result[keys_format.name] = {
            "us": time,
            "floor_us": size / copy * 1e6,
            "share": size / (time * 1e-6) / copy,
            "relative_error": error,
        }
    query, cache, column = q.unsqueeze(1), keys.view(-1, PAGE, 1, KEY_DIM + 4), length.view(-1, 1)
    if engine is not None:
        run = partial(engine, query, cache, weights, length, deep_gemm_metadata=None, clean_logits=False)
        two = [partial(run, page_table=table, max_seq_len=window) for table in (tables[0], tables[-1])]
        result["torch_fallback_us"] = graph_time(two, replays=10)
    if tilelang is not None:
        call = partial(tilelang, query, cache, weights, length, clean_logits=False, deep_gemm_metadata=None)
        calls = [partial(call, page_table=table, max_seq_len=window) for table in tables]
        result["tilelang_us"] = graph_time(calls)
        found = calls[0]().double()
        result["tilelang_relative_error"] = ((found - expected)[below].norm() / expected[below].norm()).item()
    if (library := deep_gemm_module()) is not None:
        plan = library.get_paged_mqa_logits_metadata(column, PAGE, library.get_num_sms())
        call = partial(library.fp8_paged_mqa_logits, query, cache, weights, column)
        result["deep_gemm_us"] = graph_time(
            [partial(call, table, plan, window, clean_logits=False) for table in tables]
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--engine", type=Path, help="SGLang's srt/layers/attention/dsv4/indexer.py")
    parser.add_argument("--tilelang", type=Path, help="SGLang's kernels/ops/attention/dsa/tilelang_kernel.py")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    properties = torch.cuda.get_device_properties(0)
    engine = engine_fallback(arguments.engine) if arguments.engine else None
    tilelang = tilelang_indexer(arguments.tilelang) if arguments.tilelang else None
    pools = {keys_format.name: pool(keys_format) for keys_format in (BF16, FP8)}
    shapes: list[tuple[str | None, list[int], int]] = [
        (None, [length] * rows, window) for rows, length, window in SHAPES
    ]
    results = []
    print(f"{properties.name}, copy {copy / 1e12:.2f} TB/s; microseconds")
    print("rows length window |  bf16 share error  |  fp8 share error  | DeepGEMM  TileLang  torch fallback")
    for title, lengths, window in [*shapes, SKEWED]:
        measured = measure(lengths, window, pools, copy, engine, tilelang)
        if title:
            measured["title"] = title
        results.append(measured)
        columns = [
            f"{m['us']:7.1f} {m['share']:5.2f} {m['relative_error']:.1e}" for m in (measured["bf16"], measured["fp8"])
        ]
        peers = [
            f"{measured.get(peer, float('nan')):9.1f}" for peer in ("deep_gemm_us", "tilelang_us", "torch_fallback_us")
        ]
        print(f"{measured['rows']:4} {measured['length']:6} {window:6} | {' | '.join(columns)} | {' '.join(peers)}")
    report = {
        "device": properties.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "llmfleet_kernels": __version__,
        "heads": HEADS,
        "copy_bytes_per_second": copy,
        "tiles": {
            keys_format.name: asdict(choose_tile(keys_format, HEADS, properties.shared_memory_per_block_optin))
            for keys_format in (BF16, FP8)
        },
        "results": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
