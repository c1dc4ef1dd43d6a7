# SPDX-License-Identifier: Apache-2.0
"""Compile each kernel for the visible GPU, run it, and compare its numbers: ``python -m llmfleet_kernels``.

A release is built with this, as the user of the services and with their cache folders, so that what is compiled here is
what they find. Exit status 0 when every kernel is within its bound, or when no GPU is visible (said so); else 1.
The parity tests proper are in ``tests/gpu``; this is the part of them that takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from .index_query import ROPE_DIM, index_query, reference_query
from .logits import paged_logits, reference_logits
from .logits_tile import BF16, FP8, KEY_DIM, PAGE, KeyFormat
from .sparse_mla import KeyList, sparse_mla_decode
from .sparse_mla_reference import attention, random_pages

LENGTHS = (1, 63, 64, 65, 0, 2048, 700, 129)
HEADS = (16, 64)


def logits_error(keys_format: KeyFormat) -> float:
    """Norm of the error of the indexer's logits, relative to the norm of what their heads add and take away."""
    rows, pages = len(LENGTHS), max(LENGTHS) // PAGE
    values = torch.randn(rows * pages, PAGE * KEY_DIM, device="cuda")
    if keys_format == BF16:
        keys = values.bfloat16().view(torch.uint8)
    else:
        scales = torch.rand(rows * pages, PAGE, device="cuda") + 0.01
        keys = torch.cat([values.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)], dim=1)
    table = torch.randperm(rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
    lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    weights = torch.randn(rows, 64, device="cuda")
    q = torch.randn(rows, 64, KEY_DIM, device="cuda").to(torch.float8_e4m3fn if keys_format == FP8 else torch.bfloat16)
    found = paged_logits(q, keys, weights, lengths, table, max(LENGTHS))
    wanted = reference_logits(q, keys, weights, lengths, table, max(LENGTHS))
    size = reference_logits(q, keys, weights.abs(), lengths, table, max(LENGTHS))
    below = torch.arange(max(LENGTHS), device="cuda")[None, :] < lengths[:, None]
    return float((found[below].double() - wanted[below]).norm() / size[below].norm())


def attention_error(heads: int) -> float:
    """Norm of the error of the decode attention, relative to the norm of the output."""
    window_pages, compressed_pages = random_pages(4, 256), random_pages(32, 64)
    lists = []
    for pages, counts, width in ((window_pages, (128, 3, 0), 128), (compressed_pages, (512, 65, 1), 512)):
        slots = pages.shape[0] * pages.shape[1]
        indices = torch.stack([torch.randperm(slots, device="cuda")[:width] for _count in counts]).int()
        lists.append(KeyList(pages, indices.contiguous(), torch.tensor(counts, device="cuda", dtype=torch.int32)))
    query = torch.randn(3, heads, 512, device="cuda", dtype=torch.bfloat16)
    sink = torch.randn(heads, device="cuda")
    found = sparse_mla_decode(query, lists[0], lists[1], sink, 512**-0.5)
    wanted = attention(query, lists[0], lists[1], sink, 512**-0.5)
    return float((found.double() - wanted).norm() / wanted.norm())


def query_error() -> float:
    """Norm of the error of the index query, relative to the norm of the query."""
    q = torch.randn(9, 64, KEY_DIM, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(9, 64, device="cuda", dtype=torch.bfloat16)
    angles = 2 * torch.pi * torch.rand(4096, ROPE_DIM // 2, device="cuda")
    factors = torch.polar(torch.ones_like(angles), angles)
    positions = torch.randint(len(factors), (len(q),), device="cuda")
    found, _weights = index_query(q, weights, KEY_DIM**-0.5, factors, positions)
    wanted, _weights = reference_query(q, weights, KEY_DIM**-0.5, factors, positions)
    return float((found.double() - wanted).norm() / wanted.norm())


def checks() -> Iterator[tuple[str, float, float]]:
    """Name, error and bound of each kernel. The bounds are those of ``tests/gpu``."""
    yield "indexer logits, bf16 keys", logits_error(BF16), 1e-6
    # Products of fp8 are summed with 14 bits by the tensor cores of sm_90.
    yield "indexer logits, fp8 keys", logits_error(FP8), 1e-3
    yield "index query", query_error(), 2e-3
    for heads in HEADS:
        yield f"sparse MLA, {heads} heads", attention_error(heads), 2**-8


def main() -> int:
    if not torch.cuda.is_available():
        print("kernels: no CUDA device is visible, so nothing was compiled and nothing compared")
        return 0
    torch.manual_seed(0)
    wrong = 0
    for name, error, bound in checks():
        # Not a number is wrong, too.
        right = error <= bound
        wrong += not right
        print(f"{name}: relative error {error:.1e}, at most {bound:.1e} expected: {'ok' if right else 'WRONG'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
