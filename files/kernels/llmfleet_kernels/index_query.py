# SPDX-License-Identifier: Apache-2.0

"""Query of the paged indexer of DeepSeek-V4 in bf16, in Triton: rotary embedding and Hadamard transform in one launch.

For each of the vectors ``x`` of 128 elements (one for each head of each row), with ``p`` the position of its row::

    x[64 + 2j] + i x[65 + 2j]  is multiplied by  factors[p, j]    for j from 0 to 31: the last 64 elements are turned
    query[n] = 128 ** -0.5 * sum_m (-1) ** popcount(m & n) * x[m]  for n from 0 to 127: orthonormal, Sylvester's order
    scaled_weights[b, h] = weight_scale * weights[b, h]

This is what SGLang's ``fused_q_indexer_rope_hadamard_quant`` computes (``main_norm_rope.cuh``, the same in 0.5.16 and
in 0.5.23), and ``query`` is rounded to bf16, where that one divides it by ``scale = max(1e-4, max |query|) / 448``,
rounds it to fp8 and multiplies the weight by ``scale``. Everything before the rounding is float32. The index keys are
turned and transformed alike when they are stored, so that the transform changes no product of query and key: it
spreads large elements for fp8, and with bf16 it is there because the keys have it.

A stage of the transform adds and subtracts elements that differ in one bit of their number. Each stage here takes the
lowest bit and puts it on top, so that all stages are the same code, and after seven of them every bit is back in its
place. One warp works on four vectors and waits for no other. Positions are read on the device: a captured CUDA graph
stays valid when they change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .logits import _require
from .logits_tile import KEY_DIM

if TYPE_CHECKING:  # PyTorch is imported where it is used: compiling the kernel for a device that is absent needs none
    import torch

ROPE_DIM = 64
"""Elements that the rotary embedding turns, the last of a vector."""
VECTORS = 4
"""Vectors of a program. 8 take 7 % less time for 8,192 rows of 64 heads, and 8 % more for one, which decode waits for
(``docs/benchmarks/index_query_h200.json``, with the times of other numbers).
"""
WARPS = 1


@triton.jit  # type: ignore[untyped-decorator]
def _neighbours(value, VECTORS: tl.constexpr, KEY_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of even and of odd number, [VECTORS, KEY_DIM / 2] each."""
    return tl.split(tl.reshape(value, (VECTORS, KEY_DIM // 2, 2)))


@triton.jit  # type: ignore[untyped-decorator]
def _stage(even, odd, VECTORS: tl.constexpr, KEY_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of neighbours, then their differences: [VECTORS, KEY_DIM]."""
    return tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (VECTORS, KEY_DIM))


# Neither numbers, strides nor addresses of slices are specialised on: a server would compile again when they change.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["vectors", "weights_stride"],
    do_not_specialize_on_alignment=["weights", "positions"],
)
def index_query_kernel(  # type: ignore[no-untyped-def]
    q,
    weights,
    factors,
    positions,
    query,
    scaled_weights,
    weight_scale,
    vectors,
    weights_stride,
    HEADS: tl.constexpr,
    VECTORS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``index_query`` says what the arguments are; ``vectors`` is rows times heads, ``STAGES`` log2 of ``KEY_DIM``."""
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    exists = vector < vectors
    row = vector // HEADS
    element = tl.arange(0, KEY_DIM)[None, :]
    # 64 bits: a long prefill has more than 2^31 elements.
    offset = vector.to(tl.int64)[:, None] * KEY_DIM + element
    value = tl.load(q + offset, mask=exists[:, None], other=0.0).to(tl.float32)
    even, odd = _neighbours(value, VECTORS, KEY_DIM)

    # Factors in the shape of the vectors, 1 and 0 for what is not turned: each thread loads those of its own elements,
    # and nothing is exchanged for them.
    turned = element - (KEY_DIM - ROPE_DIM)
    position = tl.load(positions + row, mask=exists, other=0).to(tl.int64)[:, None]
    factor = tl.load(factors + position * ROPE_DIM + turned, mask=exists[:, None] & (turned >= 0), other=0.0)
    factor = tl.where(turned >= 0, factor, (1 - element % 2).to(tl.float32))
    real, imaginary = _neighbours(factor, VECTORS, KEY_DIM)
    value = _stage(even * real - odd * imaginary, even * imaginary + odd * real, VECTORS, KEY_DIM)
    for _stage_number in tl.static_range(1, STAGES):
        even, odd = _neighbours(value, VECTORS, KEY_DIM)
        value = _stage(even, odd, VECTORS, KEY_DIM)
    tl.store(query + offset, (value * KEY_DIM**-0.5).to(query.dtype.element_ty), mask=exists[:, None])

    weight = tl.load(weights + row * weights_stride + vector % HEADS, mask=exists, other=0.0).to(tl.float32)
    tl.store(scaled_weights + vector, weight * weight_scale, mask=exists)


def index_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    factors: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and weights as ``logits.paged_logits`` takes them with bf16 keys; see the module for the formula.

    ``q``             [rows, heads, 128] bfloat16, contiguous: the projection, before the rotary embedding
    ``weights``       [rows, heads] bfloat16 or float32, last dimension contiguous: the weight of each head
    ``weight_scale``  what the weights are multiplied by: softmax scale and scale of the heads (the engine has
                      128 ** -0.5 * heads ** -0.5)
    ``factors``       [positions, 32] complex64, contiguous: cosine and sine of each pair for each position
    ``positions``     [rows] int32 or int64, contiguous: from 0, below the length of ``factors``, which is not checked

    Returns the query [rows, heads, 128] bfloat16 and the scaled weights [rows, heads] float32, both contiguous. Reads
    nothing back from the device, so it can be captured in a CUDA graph. ``ValueError`` for any other shape, type or
    layout.
    """
    import torch

    rows, heads = q.shape[0], q.shape[1]
    _require("q", q, (rows, heads, KEY_DIM), (torch.bfloat16,))
    _require("weights", weights, (rows, heads), (torch.bfloat16, torch.float32), last_only=True)
    _require("factors", factors, (factors.shape[0], ROPE_DIM // 2), (torch.complex64,))
    _require("positions", positions, (rows,), (torch.int32, torch.int64))
    query = torch.empty_like(q)
    scaled_weights = weights.new_empty((rows, heads), dtype=torch.float32)
    vectors = rows * heads
    if vectors == 0:
        return query, scaled_weights
    index_query_kernel[(triton.cdiv(vectors, VECTORS),)](
        q,
        weights,
        torch.view_as_real(factors),
        positions,
        query,
        scaled_weights,
        weight_scale,
        vectors,
        weights.stride(0),
        HEADS=heads,
        VECTORS=VECTORS,
        KEY_DIM=KEY_DIM,
        ROPE_DIM=ROPE_DIM,
        STAGES=KEY_DIM.bit_length() - 1,
        num_warps=WARPS,
    )
    return query, scaled_weights


def reference_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    factors: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, by the formula, on any device: [rows, heads, 128] and [rows, heads] float64.

    Arguments as for ``index_query``.
    """
    import torch

    plain = q[..., : KEY_DIM - ROPE_DIM].double()
    pairs = torch.view_as_complex(q[..., KEY_DIM - ROPE_DIM :].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * factors[positions.long()].to(torch.complex128)[:, None, :]).flatten(-2)
    signs = [[1 - 2 * ((m & n).bit_count() % 2) for n in range(KEY_DIM)] for m in range(KEY_DIM)]
    transform = torch.tensor(signs, dtype=torch.float64, device=q.device) * KEY_DIM**-0.5
    return torch.cat([plain, turned], dim=-1) @ transform, weights.double() * weight_scale
