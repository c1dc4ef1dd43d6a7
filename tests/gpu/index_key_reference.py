# SPDX-License-Identifier: Apache-2.0
"""Index keys in float64, and input for the kernels that store them. Needs PyTorch; any device."""

from __future__ import annotations

import math

import torch

KEY_DIM, ROPE_DIM = 128, 64
RATIO = 4
"""Tokens that one index key stands for."""
EPSILON = 1e-6
THETA = 160_000.0
"""Base of the rotary embedding of compressed keys in DeepSeek-V4 (``compress_rope_theta`` of its configuration)."""
UNWRITTEN = 0xA5
"""Byte that a pool is filled with: what is not stored stays."""
INVALID = 2**32 - 1
"""Length in a plan that stands for no key."""


def frequencies(positions: int, device: str = "cuda") -> torch.Tensor:
    """Cosine and sine of each pair of elements for each position: [positions, 64] float32, pairs interleaved."""
    rate = THETA ** (-torch.arange(0, ROPE_DIM, 2, dtype=torch.float64, device=device) / ROPE_DIM)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * rate
    return torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1).float()


def rotate(vectors: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply the last 32 pairs of [..., 128] as complex numbers with [..., 64] factors."""
    plain, pairs = vectors[..., :-ROPE_DIM], vectors[..., -ROPE_DIM:].unflatten(-1, (-1, 2))
    real, imaginary = factors.unflatten(-1, (-1, 2)).unbind(-1)
    x, y = pairs.unbind(-1)
    turned = torch.stack([x * real - y * imaginary, x * imaginary + y * real], dim=-1)
    return torch.cat([plain.expand(*turned.shape[:-2], plain.shape[-1]), turned.flatten(-2)], dim=-1)


def hadamard(vectors: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension (Sylvester's order)."""
    size = vectors.shape[-1]
    matrix = torch.ones(1, 1, dtype=vectors.dtype, device=vectors.device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return vectors @ matrix / math.sqrt(size)


def index_keys(inputs: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """What is to be stored, in float64: RMS norm, rotary embedding and Hadamard transform of [n, 128] inputs.

    ``weight`` [128] of the norm; ``factors`` [n, 64], the rows of ``frequencies`` for the position of each key.
    """
    inputs = inputs.double()
    norm = (inputs.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    return hadamard(rotate(inputs * norm * weight.double(), factors.double()))


def decode_plan(lengths: torch.Tensor) -> torch.Tensor:
    """Plan of a decode step, [rows, 16] uint8: a key is stored for each row whose length is a multiple of 4."""
    plan = torch.zeros(len(lengths), 4, dtype=torch.int64)
    plan[:, 0] = lengths.cpu()
    return _bytes(plan)


def extend_plan(requests: list[tuple[int, int]], padding: int = 0) -> tuple[torch.Tensor, list[int], list[int]]:
    """Plan of a prefill of requests that have a cached prefix and new tokens: (prefix, new) each.

    Returns the plan [keys + padding, 16] uint8, the length after the last token of each key, and the number of that
    token among all new ones, by which its place is looked up. Padding is in front, behind and between.
    """
    lengths, ragged, first = [], [], 0
    for prefix, new in requests:
        ends = [end for end in range(prefix + 1, prefix + new + 1) if end % RATIO == 0]
        lengths += ends
        ragged += [first + end - prefix - 1 for end in ends]
        first += new
    rows = torch.zeros(len(lengths) + padding, 4, dtype=torch.int64)
    rows[:, 0] = INVALID
    places = torch.randperm(len(rows))[: len(lengths)].sort().values
    rows[places, 0] = torch.tensor(lengths)
    rows[places, 1] = torch.tensor(ragged)
    return _bytes(rows), lengths, ragged


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """[n, 4] integers as uint32, little endian: [n, 16] uint8 on the GPU."""
    return words.to(torch.uint32).view(torch.uint8).reshape(len(words), 16).cuda()


def fp8_keys(pool: torch.Tensor, page: int = 64) -> torch.Tensor:
    """Keys of an fp8 pool [pages, 8448] uint8 with their scale applied: [slots, 128] float64."""
    values = pool[:, : page * KEY_DIM].contiguous().view(torch.float8_e4m3fn).double().view(-1, KEY_DIM)
    return values * pool[:, page * KEY_DIM :].contiguous().view(torch.float32).double().view(-1, 1)


def bf16_keys(pool: torch.Tensor) -> torch.Tensor:
    """Keys of a bf16 pool [pages, 16384] uint8: [slots, 128] float64."""
    return pool.view(torch.bfloat16).double().view(-1, KEY_DIM)
