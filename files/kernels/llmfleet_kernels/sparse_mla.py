# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA decode attention over DeepSeek-V4's paged KV caches, on tensor cores.

Every query row attends to the slots that two index lists name: the sliding window and the compressed cache's top k.
Key and value are the same latent of 512 numbers, so a slot is read once for both, and all heads of a row share it:

    score[h, t] = scale * sum_d(query[h, d] * latent[t, d])
    output[h]   = sum_t(exp(score[h, t]) * latent[t]) / (exp(sink[h]) + sum_t(exp(score[h, t])))

The sink is a logit without a value: it only adds to the denominator. The whole latent is the value, its rotary part
included; the engine undoes the rotation on the output.

Layout of a page of n slots (SGLang's `dsv4` KV layout V4; the engine pads a page to a multiple of 576 bytes):

    bytes                        what
    slot * 576 ... + 448         448 fp8 numbers (e4m3), in 7 blocks of 64
    slot * 576 + 448 ... + 128   64 bf16 numbers, the rotary part
    n * 576 + slot * 8 ... + 7   one power-of-two exponent (ue8m0: 2^(byte - 127)) a block
    n * 576 + slot * 8 + 7       unused

The two lists are read as one, window first, in tiles of slots. `_attend` splits the tiles of a row over `splits`
programs, so that a small batch fills the card, and `_merge` joins their partial softmaxes (flash decoding). How many
slots a row has is read on the device, so a captured CUDA graph stays right when lengths change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

HEAD_DIM = 512
SLOT_BYTES = 584
LOG2_E = tl.constexpr(1.4426950408889634)
"""Softmax is computed with powers of two: exp(x) = 2^(x * LOG2_E)."""


class KeyList(NamedTuple):
    """The slots of one paged cache that each query row attends to.

    pages:   [pages, slots a page, 1, 584], one byte an element (uint8 or fp8), as the engine hands its caches to
             attention. Only the shape, the stride between pages (a multiple of 16 bytes) and the address are used:
             inside a page the bytes lie as the module says.
    indices: [rows, width] int32, slot numbers (page * slots a page + slot in the page) in any order; -1 means none.
    lengths: [rows] int32, 0 or more: how many of a row's indices count, from the first; more than width means width.
    """

    pages: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor


class Tile(NamedTuple):
    """What one program works on at a time: `heads` by `slots`, with `warps` warps and `stages` tiles in flight."""

    heads: int
    slots: int
    warps: int
    stages: int


def choose_tile(heads: int, shared_bytes: int) -> Tile:
    """Return the tile for `heads` query heads on a device with `shared_bytes` of shared memory a block.

    Measured on an H200: 64 heads are one wgmma and keep its shared memory to themselves; fewer heads leave room to copy
    the next tile meanwhile. Where 64 heads do not fit (sm_120), 32 do without spilling registers.
    """
    block = min(max(triton.next_power_of_2(heads), 16), 64)
    if shared_bytes < 200_000:
        return Tile(min(block, 32), slots=32, warps=8, stages=1)
    return Tile(block, slots=64, warps=8, stages=1 if block == 64 else 2)


def tested_tiles() -> set[Tile]:
    """Every tile that `choose_tile` can return. Others are not taken: 16 heads by 16 slots with 4 warps gave wrong sums
    under Triton 3.6 on an H200, and why is not known."""
    return {choose_tile(heads, shared_bytes) for heads in (16, 32, 64) for shared_bytes in (101_376, 232_448)}


def choose_splits(programs: int, width: int, tile: Tile, processors: int) -> int:
    """Return over how many programs to split a row.

    `programs` is how many there are before the split (rows times blocks of heads), `width` the most slots a row can
    have, `processors` the device's multiprocessors. One program each at most; of the numbers that leave the longest
    program as long, the smallest, because every program's sums are written and read again.
    """
    tiles = max(1, triton.cdiv(width, tile.slots))
    most = min(tiles, max(1, processors // programs))
    return int(triton.cdiv(tiles, triton.cdiv(tiles, most)))


@triton.jit  # type: ignore[untyped-decorator]
def _block(data, valid, word, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load fp8 block `BLOCK` of each slot: [slots, 64] bf16, exact; zero where not valid.

    data:  [slots] pointers to uint8, where each slot's data starts.
    word:  [slots] int64, each slot's scale bytes.

    An e4m3 number is a bf16 number with its exponent and mantissa shifted by 4 bits, times 2^120 (the difference of
    the exponents' biases), subnormals included; the NaN codes are not kept. The hardware's own way leads through fp16
    and fp32, at four times the instructions. A ue8m0 byte is the exponent field of a bf16 number.
    """
    codes = tl.load(data[:, None] + (BLOCK * 64 + tl.arange(0, 64))[None, :], mask=valid[:, None], other=0)
    values = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, sign, factor;
        mov.b32 factor, 0x7B807B80;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        and.b32 low, low, 0x7F007F00;
        shr.b32 low, low, 4;
        or.b32 low, low, sign;
        mul.bf16x2 $0, low, factor;
        and.b32 sign, high, 0x80008000;
        and.b32 high, high, 0x7F007F00;
        shr.b32 high, high, 4;
        or.b32 high, high, sign;
        mul.bf16x2 $1, high, factor;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )
    scale = (((word >> (BLOCK * 8)) & 0xFF) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values * scale[:, None]


@triton.jit
def _beside(left, right):  # type: ignore[no-untyped-def]
    """Return [rows, 2 n] from two [rows, n]; every thread keeps what it has."""
    pair = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(pair, [left.shape[0], 2 * left.shape[1]])


# Neither the lists' addresses and widths nor splits are specialised on: a server would compile again when they change.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window_width", "window_stride", "compressed_width", "compressed_stride", "splits"],
    do_not_specialize_on_alignment=[
        "window_indices",
        "window_lengths",
        "compressed_indices",
        "compressed_lengths",
        "sink",
    ],
)
def _attend(  # type: ignore[no-untyped-def]
    query,
    window,
    window_indices,
    window_lengths,
    compressed,
    compressed_indices,
    compressed_lengths,
    sink,
    partial,
    maximum,
    total,
    output,
    scale_log2,
    heads,
    query_row_stride,
    query_head_stride,
    window_width,
    window_stride,
    compressed_width,
    compressed_stride,
    splits,
    WINDOW_PAGE_SLOTS: tl.constexpr,
    WINDOW_PAGE_BYTES: tl.constexpr,
    COMPRESSED_PAGE_SLOTS: tl.constexpr,
    COMPRESSED_PAGE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend one row's heads to one share of its slots; grid: rows, splits, blocks of heads.

    With SPLIT, writes what `_merge` reads: the sums relative to the share's largest score, [rows, splits, heads, 512],
    that score (times log2 e) and the sum of the weights, [rows, splits, heads], all fp32. Without, writes the output.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    head_valid = head < heads

    window_length = tl.minimum(tl.load(window_lengths + row), window_width)
    length = window_length + tl.minimum(tl.load(compressed_lengths + row), compressed_width)
    tiles = tl.cdiv(length, SLOTS)
    first_tile = split * tiles // splits
    last_tile = (split + 1) * tiles // splits

    dimension = tl.arange(0, 512)
    head_query = tl.load(
        query + row * query_row_stride + head[:, None] * query_head_stride + dimension[None, :],
        mask=head_valid[:, None],
        other=0.0,
    )
    running_maximum = tl.full([HEADS], float("-inf"), tl.float32)
    running_total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, 512], tl.float32)

    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        position = tile * SLOTS + tl.arange(0, SLOTS)
        in_window = position < window_length
        window_index = tl.load(window_indices + row * window_stride + position, mask=in_window, other=-1)
        compressed_index = tl.load(
            compressed_indices + row * compressed_stride + position - window_length,
            mask=(position >= window_length) & (position < length),
            other=-1,
        )
        index = tl.where(in_window, window_index, compressed_index)
        valid = index >= 0
        index = tl.where(valid, index, 0)
        page_slots = tl.where(in_window, WINDOW_PAGE_SLOTS, COMPRESSED_PAGE_SLOTS)
        page = tl.where(in_window, index // WINDOW_PAGE_SLOTS, index // COMPRESSED_PAGE_SLOTS)
        slot = index - page * page_slots
        page_bytes = tl.where(in_window, WINDOW_PAGE_BYTES, COMPRESSED_PAGE_BYTES).to(tl.int64)
        page_start = tl.where(in_window, window, compressed) + page * page_bytes
        # The compiler cannot see through the choice of a cache that 16 bytes can be loaded at once.
        data = tl.multiple_of(page_start + slot * 576, 16)
        scales = tl.multiple_of(page_start + page_slots * 576 + slot * 8, 8)

        word = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
        rotary = tl.load(
            (data + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        # A thread's share of every block lies in the same slot, so that it finds few addresses; hence no wider loads.
        left = _beside(
            _beside(_block(data, valid, word, 0), _block(data, valid, word, 1)),
            _beside(_block(data, valid, word, 2), _block(data, valid, word, 3)),
        )
        right = _beside(
            _beside(_block(data, valid, word, 4), _block(data, valid, word, 5)),
            _beside(_block(data, valid, word, 6), rotary),
        )
        latent = _beside(left, right)

        score = tl.dot(head_query, tl.trans(latent))
        score = tl.where(valid[None, :], score * scale_log2, float("-inf"))

        new_maximum = tl.maximum(running_maximum, tl.max(score, 1))
        # Nothing seen yet: any finite number will do, -inf - -inf would not.
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(score - finite_maximum[:, None])
        decay = tl.exp2(running_maximum - finite_maximum)
        running_total = running_total * decay + tl.sum(weight, 1)
        running_maximum = new_maximum
        sums = tl.dot(weight.to(tl.bfloat16), latent, sums * decay[:, None])

    if SPLIT:
        statistic = (row * splits + split) * heads + head
        tl.store(maximum + statistic, running_maximum, mask=head_valid)
        tl.store(total + statistic, running_total, mask=head_valid)
        target = partial + statistic[:, None] * 512
        # A program without a tile leaves its sums unwritten: `_merge` does not read them.
        written = head_valid[:, None] & (first_tile < last_tile)
    else:
        logit = tl.load(sink + head, mask=head_valid, other=float("-inf")) * LOG2_E
        new_maximum = tl.maximum(running_maximum, logit)
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(running_maximum - finite_maximum)
        denominator = running_total * decay + tl.exp2(logit - finite_maximum)
        norm = tl.where(denominator > 0.0, decay / denominator, 0.0)[:, None]
        sums *= norm
        target = output + (row * heads + head[:, None]) * 512
        written = head_valid[:, None]
    tl.store(target + dimension[None, :], sums.to(target.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["sink"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    partial, maximum, total, sink, output, heads, splits, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Join the shares of a row and head, and the sink; grid: rows, heads, 512 / COLUMNS. SPLITS: splits, padded."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.arange(0, SPLITS)
    statistic = (row * splits + split) * heads + head

    peak = tl.load(maximum + statistic, mask=split < splits, other=float("-inf"))
    logit = tl.load(sink + head) * LOG2_E
    overall = tl.maximum(tl.max(peak, 0), logit)
    overall = tl.where(overall == float("-inf"), 0.0, overall)
    weight = tl.exp2(peak - overall)
    share = weight * tl.load(total + statistic, mask=split < splits, other=0.0)
    denominator = tl.sum(share, 0) + tl.exp2(logit - overall)

    sums = tl.load(partial + statistic[:, None] * 512 + column[None, :], mask=(share > 0.0)[:, None], other=0.0)
    result = tl.sum(sums * weight[:, None], 0)
    result = tl.where(denominator > 0.0, result / denominator, 0.0)
    tl.store(output + (row * heads + head) * 512 + column, result.to(tl.bfloat16))


def sparse_mla_decode(
    query: torch.Tensor,
    window: KeyList,
    compressed: KeyList | None,
    sink: torch.Tensor,
    softmax_scale: float,
    *,
    output: torch.Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Return the attention of each query row to the slots of both lists: [rows, heads, 512] bf16.

    query:         [rows, heads, 512] bf16, the last dimension contiguous.
    window:        the sliding window's cache and slots.
    compressed:    the compressed cache's; None for a layer that has the window only.
    sink:          [heads] fp32, a logit a head that takes weight and adds nothing; -inf is no sink.
    softmax_scale: what scores are multiplied by, usually 512 ** -0.5.
    output:        where to write, contiguous; allocated where it is None.
    tile, splits:  as `choose_tile` and `choose_splits` return them; chosen for the device where they are None.

    A row without a slot gets zeros. Safe to capture in a CUDA graph. Raises ValueError for an argument that the kernel
    would misread; index values are not checked.
    """
    _check(query, window, compressed, sink, output)
    rows, heads, _dim = query.shape
    if output is None:
        output = torch.empty((rows, heads, HEAD_DIM), dtype=torch.bfloat16, device=query.device)
    if rows == 0:
        return output
    window_width = window.indices.shape[1]
    compressed_width = 0 if compressed is None else compressed.indices.shape[1]
    # A list of width 0 is never read, so any addresses will do.
    second = window if compressed is None else compressed

    if tile is None:
        tile = choose_tile(heads, _shared_bytes(query.device))
    elif tile not in tested_tiles():
        raise ValueError(f"{tile} is not one of the tiles that are tested: {sorted(tested_tiles())}")
    head_blocks = triton.cdiv(heads, tile.heads)
    if splits is None:
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        splits = choose_splits(rows * head_blocks, window_width + compressed_width, tile, processors)
    partial = maximum = total = output
    if splits > 1:
        partial = torch.empty((rows, splits, heads, HEAD_DIM), dtype=torch.float32, device=query.device)
        maximum = torch.empty((rows, splits, heads), dtype=torch.float32, device=query.device)
        total = torch.empty_like(maximum)

    _attend[(rows, splits, head_blocks)](
        query,
        window.pages.view(torch.uint8),
        window.indices,
        window.lengths,
        second.pages.view(torch.uint8),
        second.indices,
        second.lengths,
        sink,
        partial,
        maximum,
        total,
        output,
        softmax_scale * LOG2_E.value,
        heads,
        query.stride(0),
        query.stride(1),
        window_width,
        window.indices.stride(0),
        compressed_width,
        second.indices.stride(0),
        splits,
        WINDOW_PAGE_SLOTS=window.pages.shape[1],
        WINDOW_PAGE_BYTES=window.pages.stride(0),
        COMPRESSED_PAGE_SLOTS=second.pages.shape[1],
        COMPRESSED_PAGE_BYTES=second.pages.stride(0),
        HEADS=tile.heads,
        SLOTS=tile.slots,
        SPLIT=splits > 1,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if splits > 1:
        # Few long rows of partials want many programs, many short ones want little work each.
        columns = 128 if rows < 8 else HEAD_DIM
        _merge[(rows, heads, HEAD_DIM // columns)](
            partial,
            maximum,
            total,
            sink,
            output,
            heads,
            splits,
            SPLITS=triton.next_power_of_2(splits),
            COLUMNS=columns,
            num_warps=columns // 128,
        )
    return output


def _shared_bytes(device: torch.device) -> int:
    """Return how much shared memory a block may have on `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _check(
    query: torch.Tensor, window: KeyList, compressed: KeyList | None, sink: torch.Tensor, output: torch.Tensor | None
) -> None:
    """Raise ValueError for what `sparse_mla_decode` cannot take."""
    if query.dim() != 3 or query.shape[2] != HEAD_DIM or query.dtype != torch.bfloat16 or query.stride(2) != 1:
        raise ValueError(
            f"query must be [rows, heads, {HEAD_DIM}] bf16, contiguous in the last dimension: {_say(query)}"
        )
    rows, heads, _dim = query.shape
    if sink.shape != (heads,) or sink.dtype != torch.float32 or not sink.is_contiguous():
        raise ValueError(f"sink must be [{heads}] fp32, contiguous: {_say(sink)}")
    if output is not None and (
        output.shape != query.shape or output.dtype != torch.bfloat16 or not output.is_contiguous()
    ):
        raise ValueError(f"output must be {list(query.shape)} bf16, contiguous: {_say(output)}")
    for name, keys in (("window", window), ("compressed", compressed)):
        if keys is None:
            continue
        pages, indices, lengths = keys
        if pages.dim() != 4 or pages.shape[2:] != (1, SLOT_BYTES) or pages.element_size() != 1:
            raise ValueError(
                f"{name}.pages must be [pages, slots a page, 1, {SLOT_BYTES}] of one-byte elements: {_say(pages)}"
            )
        if pages.stride(0) < pages.shape[1] * SLOT_BYTES or pages.stride(0) % 16 or pages.data_ptr() % 16:
            raise ValueError(
                f"{name}.pages must start at a multiple of 16 bytes and hold {SLOT_BYTES} bytes a slot in pages of a "
                f"multiple of 16 bytes: {_say(pages)}"
            )
        if indices.dim() != 2 or len(indices) != rows or indices.dtype != torch.int32 or indices.stride(1) != 1:
            raise ValueError(
                f"{name}.indices must be [{rows}, width] int32, contiguous in the last dimension: {_say(indices)}"
            )
        if lengths.shape != (rows,) or lengths.dtype != torch.int32 or not lengths.is_contiguous():
            raise ValueError(f"{name}.lengths must be [{rows}] int32, contiguous: {_say(lengths)}")


def _say(tensor: torch.Tensor) -> str:
    """Return what an error says of a tensor."""
    return f"found {list(tensor.shape)} {tensor.dtype}, strides {list(tensor.stride())}"
