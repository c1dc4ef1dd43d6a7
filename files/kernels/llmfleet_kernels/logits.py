# SPDX-License-Identifier: Apache-2.0

"""Logits of the paged indexer of DeepSeek-V4 for one decode step, in Triton.

For query row ``b`` and compressed token ``t`` below the row's length, where token ``t`` lies in slot ``t % 64`` of page
``page_table[b, t // 64]``::

    logits[b, t] = scale[t] * sum_h weights[b, h] * relu(q[b, h] . k[t])

This is the formula of DeepGEMM's ``fp8_paged_mqa_logits`` (one query a row) and of SGLang's fallbacks of the same name
(``srt/layers/attention/dsv4/indexer.py``). ``scale`` is the key's own for fp8 keys and 1 for bf16 keys; the scale of an
fp8 query and the softmax scale are in ``weights`` already. Nothing is written at or past a row's length: each top-k of
SGLang (``topk_transform_paged``, its second version, the PyTorch and the FlashInfer one) takes the lengths and selects
nothing past them, so filling the window with -inf would only cost the time that leaving early saves.

The grid follows from shapes alone, and each program reads the lengths on the device and finds its share: every n-th
page of one row, with n by the row's length, so that a long row among short ones is computed by the whole device
(``logits_tile.choose_grid``). A captured CUDA graph stays valid when lengths change; a program without a page ends at
once. All heads share each key tile: a page is read from memory once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .logits_tile import FP8, KEY_DIM, PAGE, WARPS, Tile, choose_grid, choose_tile, key_format

if TYPE_CHECKING:  # PyTorch is imported where it is used: compiling the kernel for a device that is absent needs none
    import torch


# Neither lengths, page tables nor strides are specialised on: a server would compile again when they change.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "limit", "page_table_stride", "logits_stride"],
    do_not_specialize_on_alignment=["lengths", "page_table", "logits"],
)
def paged_logits_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    scales,
    weights,
    lengths,
    page_table,
    logits,
    rows,
    limit,
    page_table_stride,
    logits_stride,
    PLANNED_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``paged_logits`` says what the arguments are; grid and PLANNED_ROWS: ``logits_tile.choose_grid``."""
    program = tl.program_id(0)
    if PLANNED_ROWS:
        index = tl.arange(0, PLANNED_ROWS)
        lengths_all = tl.load(lengths + index, mask=index < rows, other=0)
        pages_of = tl.cdiv(tl.maximum(tl.minimum(lengths_all, limit), 0), PAGE)
        share = tl.maximum(tl.cdiv(tl.sum(pages_of), tl.num_programs(0) - rows), 1)
        programs_of = tl.cdiv(pages_of, share)
        before = tl.cumsum(programs_of) <= program
        row = tl.sum(before.to(tl.int32)).to(tl.int64)
        if row >= rows:
            return
        first = program - tl.sum(tl.where(before, programs_of, 0))
        length = tl.minimum(tl.load(lengths + row), limit)
        pages = tl.cdiv(length, PAGE)
        step = tl.cdiv(pages, share)
    else:
        row = program.to(tl.int64)
        length = tl.minimum(tl.load(lengths + row), limit)
        pages = tl.cdiv(length, PAGE)
        first = 0
        step = 1
        if length <= 0:
            return
    head = tl.arange(0, HEADS)
    element = tl.arange(0, KEY_DIM)
    slot = tl.arange(0, PAGE)
    query = tl.load(q + (row * HEADS + head[:, None]) * KEY_DIM + element[None, :]).to(keys.dtype.element_ty)
    weight = tl.load(weights + row * HEADS + head)
    for page in tl.range(first, pages, step, num_stages=STAGES):
        # 64 bits: a pool has more than 2^31 elements.
        physical = tl.load(page_table + row * page_table_stride + page).to(tl.int64)
        key = tl.load(keys + physical * PAGE_ELEMENTS + slot[:, None] * KEY_DIM + element[None, :])
        # Keys are the rows of the product, so that the sum over heads stays within four neighbouring threads.
        score = tl.maximum(tl.dot(key, query.T), 0.0) * weight[None, :]
        result = tl.sum(score, axis=1)
        if SCALED:
            result *= tl.load(scales + (physical * PAGE_ELEMENTS + PAGE * KEY_DIM) // 4 + slot)
        token = page * PAGE + slot
        tl.store(logits + row * logits_stride + token, result, mask=token < length)


def paged_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    max_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of one query a row against the row's pages; see the module for the formula.

    ``q``           [rows, heads, 128] bfloat16 or float8_e4m3fn (with fp8 keys: float8_e4m3fn), contiguous; heads a
                    power of two from 16
    ``keys``        [pages, 16384] uint8 for bf16 keys, [pages, 8448] for fp8 keys (layouts in ``logits_tile``)
    ``weights``     [rows, heads] float32, contiguous
    ``lengths``     [rows] int32, compressed tokens of each row; 0 leaves the row as it is, more than ``max_len`` or the
                    table holds is cut to that
    ``page_table``  [rows, table width] int32, last dimension contiguous; entries past a row's last page are not read
    ``max_len``     width of the result
    ``out``         [rows, ``max_len``] float32, last dimension contiguous; made here where it is not given

    Returns [rows, ``max_len``] float32, undefined (in ``out``: unchanged) at and past each row's length. Reads nothing
    back from the device, so it can be captured in a CUDA graph. ``ValueError`` for any other shape, type or layout.
    """
    import torch

    keys_format = key_format(keys.shape[-1])
    rows, heads = q.shape[0], q.shape[1]
    if out is None:
        out = weights.new_empty((rows, max_len), dtype=torch.float32)
    query_types = (torch.float8_e4m3fn,) if keys_format == FP8 else (torch.bfloat16, torch.float8_e4m3fn)
    _require("q", q, (rows, heads, KEY_DIM), query_types)
    _require("keys", keys, (keys.shape[0], keys_format.page_bytes), (torch.uint8,))
    _require("weights", weights, (rows, heads), (torch.float32,))
    _require("lengths", lengths, (rows,), (torch.int32,))
    _require("page_table", page_table, (rows, page_table.shape[-1]), (torch.int32,), last_only=True)
    _require("out", out, (rows, max_len), (torch.float32,), last_only=True)
    if heads < 16 or heads & (heads - 1):
        raise ValueError(f"q has {heads} heads, expected a power of two from 16")
    if rows == 0:
        return out
    tile, multiprocessors = _device(q.device.index, keys_format.page_bytes, heads)
    values = keys.view(torch.float8_e4m3fn if keys_format == FP8 else torch.bfloat16)
    scales = keys.view(torch.float32)
    table_width = page_table.shape[1]
    programs, planned_rows = choose_grid(rows, multiprocessors, tile)
    paged_logits_kernel[(programs,)](
        q,
        values,
        scales,
        weights,
        lengths,
        page_table,
        out,
        rows,
        min(max_len, table_width * PAGE),
        page_table.stride(0),
        out.stride(0),
        PLANNED_ROWS=planned_rows,
        HEADS=heads,
        KEY_DIM=KEY_DIM,
        PAGE=PAGE,
        PAGE_ELEMENTS=values.shape[1],
        SCALED=keys_format == FP8,
        STAGES=tile.stages,
        num_warps=WARPS,
    )
    return out


def reference_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    max_len: int,
) -> torch.Tensor:
    """The same in float64, row by row, on any device: [rows, ``max_len``] float64, -inf at and past each row's length.

    Arguments as for ``paged_logits``; lengths within ``max_len`` and the table.
    """
    import torch

    keys_format = key_format(keys.shape[1])
    values_bytes = PAGE * KEY_DIM * keys_format.element_bytes
    element = torch.float8_e4m3fn if keys_format == FP8 else torch.bfloat16
    logits = torch.full((q.shape[0], max_len), -torch.inf, dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        pages = keys[page_table[row, : -(-length // PAGE)].long()]
        key = pages[:, :values_bytes].contiguous().view(element).double().view(-1, KEY_DIM)[:length]
        logit = (key @ q[row].double().T).relu() @ weights[row].double()
        if keys_format == FP8:
            logit *= pages[:, values_bytes:].contiguous().view(torch.float32).double().view(-1)[:length]
        logits[row, :length] = logit
    return logits


@functools.cache
def _device(index: int, page_bytes: int, heads: int) -> tuple[Tile, int]:
    """Tile and number of multiprocessors of a device."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    tile = choose_tile(key_format(page_bytes), heads, properties.shared_memory_per_block_optin)
    return tile, properties.multi_processor_count


def _require(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    types: tuple[torch.dtype, ...],
    last_only: bool = False,
) -> None:
    """Refuse a tensor of another shape, type or layout; ``last_only``: rows may be further apart than they are long."""
    contiguous = tensor.stride(-1) == 1 if last_only else tensor.is_contiguous()
    if tuple(tensor.shape) != shape or tensor.dtype not in types or not contiguous:
        expected = " or ".join(str(kind) for kind in types)
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}, expected {list(shape)} "
            f"{expected}, {'last dimension ' if last_only else ''}contiguous"
        )
