# SPDX-License-Identifier: Apache-2.0
"""Recall of planted needles in the indexer's top 512, fp8 keys against bf16 keys, by context length; no model weights.

Each draw makes index keys of one context (a key stands for 4 tokens), stores them through the engine's own kernel (fp8:
stock, bf16: patched), scores them with ``llmfleet_kernels.logits`` and takes the 512 highest. The truth is the same in
float64 from the same inputs: norm, rotary embedding, Hadamard transform and score.

Distractors are hard: a direction that all keys of a draw share, plus noise of ``--spread`` times its size. Needles are
distractors moved towards the queries until their true score lies between those of two neighbouring distractors, so that
their true rank is one of the 8 from 128 (far within the 512), 448, 488 or 504 (at the cut). There is one of each of the
four at a random place in each eighth of the context. A needle is found when it is among the selected 512.

"overlap" is the share of the true top 512 that was selected. Combinations: fp8 keys and fp8 queries (one scale for each
head, as the engine quantises them), bf16 keys and fp8 queries, bf16 keys and bf16 queries.

    LLMFLEET_ENGINE_TREES=FOLDER python tests/gpu/bench_recall.py --output docs/benchmarks/recall_h200.json
    python tests/gpu/bench_recall.py --plot docs/benchmarks/recall_h200.json

The second prints a table and draws an SVG beside the JSON; it needs neither a GPU nor PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".collections"), str(ROOT / "files" / "kernels")]

if TYPE_CHECKING:
    import torch

TOP = 512
HEADS, KEY_DIM, RATIO, PAGE = 64, 128, 4, 64
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288)
RANKS = (128, 448, 488, 504)
STRETCHES = 8
QUERY_ALONG = 0.2
"""How much of the shared direction a query has, against noise of size 1."""
NAMES = {"fp8": "fp8 keys, fp8 queries", "bf16_fp8": "bf16 keys, fp8 queries", "bf16": "bf16 keys, bf16 queries"}
COLOURS = {"fp8": "#c0392b", "bf16_fp8": "#e69f00", "bf16": "#0072b2"}


class Draw:
    """Inputs of one context and the truth about it, on the GPU."""

    def __init__(self, tokens: int, spread: float, factors: torch.Tensor, generator: torch.Generator) -> None:
        import torch

        from tests.gpu import index_key_reference as reference

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.float64)

        self.reference = reference
        self.count = tokens // RATIO
        self.weight = (1 + normal(KEY_DIM) / 8).float()
        self.factors = factors[:tokens:RATIO].double()
        shared = normal(KEY_DIM)
        self.inputs = (shared + spread * normal(self.count, KEY_DIM)).float()
        here = factors[tokens - 1].double()
        self.query = reference.hadamard(reference.rotate(normal(HEADS, KEY_DIM) + QUERY_ALONG * shared, here))
        self.head_weight = normal(HEADS)
        self.needles, self.ranks = self._plant(generator)
        self.true_scores = self.score(self.inputs, slice(None))
        self.true_top = self.true_scores.topk(TOP).indices

    def score(self, inputs: torch.Tensor, where: Any) -> torch.Tensor:
        """True scores of [n, 128] inputs at the keys ``where``: [n] float64."""
        keys = self.reference.index_keys(inputs, self.weight, self.factors[where])
        return (keys @ self.query.T).relu() @ self.head_weight

    def _plant(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn some distractors into needles; where they are and the ranks they were made for."""
        import torch

        ranks = torch.tensor(RANKS, device="cuda").repeat(STRETCHES)
        stretch = torch.arange(STRETCHES, device="cuda").repeat_interleave(len(RANKS))
        width = self.count // STRETCHES
        within = torch.stack(
            [torch.randperm(width, device="cuda", generator=generator)[: len(RANKS)] for _ in range(STRETCHES)]
        ).flatten()
        places = stretch * width + within
        others = torch.ones(self.count, dtype=torch.bool, device="cuda")
        others[places] = False
        ordered = self.score(self.inputs, slice(None))[others].sort(descending=True).values
        # Of what is above a needle, the needles of lower ranks are not among the distractors.
        upper = ranks - 1 - (ranks[None, :] < ranks[:, None]).sum(1)
        target = (ordered[upper - 1] + ordered[upper]) / 2
        # Towards what the heads of positive weight ask for, undone for each place.
        wanted = (self.query * self.head_weight.relu()[:, None]).sum(0, keepdim=True)
        conjugate = self.factors[places].unflatten(-1, (-1, 2)) * torch.tensor([1.0, -1.0], device="cuda")
        back = self.reference.rotate(self.reference.hadamard(wanted), conjugate.flatten(-2)) / self.weight.double()
        back = back / back.norm(dim=-1, keepdim=True) * KEY_DIM**0.5
        start = self.inputs[places].double()
        # Away from the queries first, so that every needle begins below its target; then bisect between the two.
        low, high = torch.full_like(target, -8.0), torch.full_like(target, 8.0)
        for _ in range(48):
            middle = (low + high) / 2
            over = self.score((start + middle[:, None] * back).float(), places) > target
            low, high = torch.where(over, low, middle), torch.where(over, middle, high)
        self.inputs[places] = (start + high[:, None] * back).float()
        return places, ranks


class Scorer:
    """The engine's store and our logits for one context length."""

    def __init__(self, stock: Any, patched: Any, factors: torch.Tensor, tokens: int) -> None:
        import torch

        from tests.gpu import index_key_reference as reference

        self.stock, self.patched, self.factors, self.count = stock, patched, factors, tokens // RATIO
        self.plan = reference.decode_plan(torch.arange(RATIO, tokens + 1, RATIO))
        self.pages = -(-self.count // PAGE)
        self.order = torch.randperm(self.pages, device="cuda")
        position = torch.arange(self.count, device="cuda")
        self.places = self.order[position // PAGE] * PAGE + position % PAGE

    def store(self, draw: Draw, keys: str) -> torch.Tensor:
        import torch

        from tests.gpu.index_key_reference import EPSILON

        module = self.stock if keys == "fp8" else self.patched
        size = PAGE * (KEY_DIM + 4 if keys == "fp8" else 2 * KEY_DIM)
        pool = torch.zeros(self.pages, size, dtype=torch.uint8, device="cuda")
        module[f"{keys}_f32"](
            draw.inputs, self.plan, draw.weight, EPSILON, self.factors, self.places, pool, True, RATIO
        )
        return pool

    def selected(self, draw: Draw, name: str) -> torch.Tensor:
        """Keys in the top 512 of one combination."""
        import torch
        from llmfleet_kernels.logits import paged_logits

        pool = self.store(draw, "fp8" if name == "fp8" else "bf16")
        query, weight = draw.query.float(), draw.head_weight.float()
        if name == "bf16":
            quantised = query.bfloat16()
        else:
            scale = query.abs().amax(-1, keepdim=True) / 448
            quantised, weight = (query / scale).to(torch.float8_e4m3fn), weight * scale.squeeze(-1)
        length = torch.tensor([self.count], dtype=torch.int32, device="cuda")
        logits = paged_logits(
            quantised[None].contiguous(), pool, weight[None].contiguous(), length, self.order.int()[None], self.count
        )
        chosen: torch.Tensor = logits[0].topk(TOP).indices
        return chosen


def measure(tokens: int, spread: float, draws: int, stock: Any, patched: Any, factors: torch.Tensor) -> dict[str, Any]:
    """Found needles by rank and mean overlap of all draws of one context length."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(tokens)
    scorer = Scorer(stock, patched, factors, tokens)
    overlap = dict.fromkeys(NAMES, 0.0)
    found = {name: dict.fromkeys(RANKS, 0) for name in NAMES}
    misplaced = 0
    for _ in range(draws):
        draw = Draw(tokens, spread, factors, generator)
        truth = torch.zeros(draw.count, dtype=torch.bool, device="cuda")
        truth[draw.true_top] = True
        misplaced += int((~truth[draw.needles]).sum())
        for name in NAMES:
            chosen = torch.zeros_like(truth)
            chosen[scorer.selected(draw, name)] = True
            overlap[name] += (chosen & truth).sum().item() / TOP / draws
            for rank in RANKS:
                found[name][rank] += int(chosen[draw.needles[draw.ranks == rank]].sum())
    return {
        "context": tokens,
        "keys": tokens // RATIO,
        "spread": spread,
        "draws": draws,
        "needles_of_each_rank": draws * STRETCHES,
        "needles_outside_the_true_top": misplaced,
        "overlap": overlap,
        "found": {name: {str(rank): count for rank, count in ranks.items()} for name, ranks in found.items()},
    }


def run(output: Path, draws: int, spreads: list[float]) -> None:
    """Measure every context length and write JSON."""
    import torch
    import tvm_ffi
    from llmfleet_kernels import __version__

    from tests import index_key_store as store
    from tests.gpu import index_key_reference as reference

    if not (engines := store.engines()):
        raise SystemExit(f"no SGLang with a known store is here: name its folder in {store.TREES}")
    engine = engines[-1]
    stock, patched = (tvm_ffi.load_module(str(store.library(engine, patched=flag))) for flag in (False, True))
    factors = reference.frequencies(max(CONTEXTS))
    results = []
    for spread in spreads:
        for tokens in CONTEXTS:
            results.append(measure(tokens, spread, draws, stock, patched, factors))
            print(json.dumps(results[-1]), flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "llmfleet_kernels": __version__,
        "engine": engine.version,
        "store": dict(engine.entry),
        "heads": HEADS,
        "top": TOP,
        "stretches": STRETCHES,
        "query_along": QUERY_ALONG,
        "results": results,
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def table(report: dict[str, Any]) -> str:
    """Overlap, and share of the needles of each rank that were found, as a Markdown table."""
    head = ["context", "spread"] + [f"{part}: {name}" for name in NAMES.values() for part in ("overlap", "found")]
    lines = [head, ["---"] * len(head)]
    for entry in report["results"]:
        cells = [f"{entry['context']:,}", str(entry["spread"])]
        for name in NAMES:
            shares = [f"{count / entry['needles_of_each_rank']:.2f}" for count in entry["found"][name].values()]
            cells += [f"{entry['overlap'][name]:.3f}", " ".join(shares)]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(report: dict[str, Any]) -> str:
    """Two panels over the context length as SVG: the overlap, and the needles found at the third of the ranks."""
    rank = RANKS[2]
    panels = [
        ("share of the true top 512 that is selected", 0.9, lambda entry, name: entry["overlap"][name]),
        (
            f"share of the needles of true rank {rank} to {rank + STRETCHES - 1} that is found",
            0.5,
            lambda entry, name: entry["found"][name][str(rank)] / entry["needles_of_each_rank"],
        ),
    ]
    spreads = sorted({entry["spread"] for entry in report["results"]})
    contexts = sorted({entry["context"] for entry in report["results"]})
    width, height, left, top = 400, 260, 60, 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (width + left) + 20}" height="{height + top + 110}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, low, value) in enumerate(panels):
        x0 = left + number * (width + left)
        xs = {context: x0 + width * i / (len(contexts) - 1) for i, context in enumerate(contexts)}
        parts.append(f'<text x="{x0}" y="{top - 14}">{title}</text>')
        for step in range(6):
            share = low + (1 - low) * step / 5
            y = top + height * (1 - step / 5)
            parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + width}" y2="{y:.1f}" stroke="#dddddd"/>')
            parts.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.2f}</text>')
        for context, x in xs.items():
            label = f"{context // 1024}k"
            parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{label}</text>')
        for name in NAMES:
            for spread in spreads:
                line = " ".join(
                    f"{xs[entry['context']]:.1f},{top + height * (1 - (value(entry, name) - low) / (1 - low)):.1f}"
                    for entry in report["results"]
                    if entry["spread"] == spread
                )
                dash = "" if spread == spreads[0] else ' stroke-dasharray="5 4"'
                parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dash}/>')
        middle = x0 + width / 2
        parts.append(f'<text x="{middle}" y="{top + height + 38}" text-anchor="middle">context, tokens</text>')
    for number, (name, text) in enumerate(NAMES.items()):
        x, y = left + number * 230, top + height + 68
        parts.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" stroke="{COLOURS[name]}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{x + 34}" y="{y}">{text}</text>')
    shown = ", ".join(f"{'solid' if spread == spreads[0] else 'dashed'}: spread {spread}" for spread in spreads)
    parts += [f'<text x="{left}" y="{top + height + 92}">{shown}</text>', "</svg>", ""]
    return "\n".join(parts)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    parser.add_argument("--plot", type=Path, help="a JSON file to print as a table and to draw as SVG beside it")
    parser.add_argument("--draws", type=int, default=64, help="contexts of each length (default: %(default)s)")
    parser.add_argument("--spread", type=float, nargs="+", default=[0.3, 1.0], help="noise of the distractors")
    arguments = parser.parse_args()
    if arguments.output:
        run(arguments.output, arguments.draws, arguments.spread)
    if arguments.plot:
        report = json.loads(arguments.plot.read_text(encoding="utf-8"))
        print(table(report))
        arguments.plot.with_suffix(".svg").write_text(plot(report), encoding="utf-8")


if __name__ == "__main__":
    main()
