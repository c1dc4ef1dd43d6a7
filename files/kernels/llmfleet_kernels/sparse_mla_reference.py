# SPDX-License-Identifier: Apache-2.0
"""Random DeepSeek-V4 caches and the float64 attention that the sparse-MLA kernel is held against."""

from __future__ import annotations

import torch

from .sparse_mla import KeyList

DATA_BYTES = 576
SCALE_BYTES = 8
SLOT_BYTES = DATA_BYTES + SCALE_BYTES


def page_bytes(page_slots: int) -> int:
    """Return the size of a page: the slots, padded to a multiple of 576 bytes as the engine does."""
    return -(-page_slots * SLOT_BYTES // DATA_BYTES) * DATA_BYTES


def random_pages(pages: int, page_slots: int, *, exponents: tuple[int, int] = (122, 127)) -> torch.Tensor:
    """Return a cache as the engine shows it, [pages, page_slots, 1, 584] uint8: normal values in every slot.

    `exponents` bounds the ue8m0 bytes, both ends included. Padding bytes are 0xFF, which no reader may touch.
    """
    size = page_bytes(page_slots)
    raw = torch.full((pages, size), 0xFF, dtype=torch.uint8, device="cuda")
    data = raw[:, : page_slots * DATA_BYTES].view(pages, page_slots, DATA_BYTES)
    values = torch.randn(pages, page_slots, 448, device="cuda", dtype=torch.bfloat16) * 16
    data[..., :448] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    rotary = torch.randn(pages, page_slots, 64, device="cuda", dtype=torch.bfloat16)
    data[..., 448:] = rotary.view(torch.uint8).view(pages, page_slots, 128)
    scales = raw[:, page_slots * DATA_BYTES : page_slots * SLOT_BYTES].view(pages, page_slots, SCALE_BYTES)
    low, high = exponents
    scales[..., :7] = torch.randint(low, high + 1, (pages, page_slots, 7), device="cuda", dtype=torch.uint8)
    return raw.as_strided((pages, page_slots, 1, SLOT_BYTES), (size, SLOT_BYTES, SLOT_BYTES, 1))


def unpack(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the latents of `slots`, [n] int64, as [n, 512] float64: read byte by byte as the layout says."""
    count, page_slots = pages.shape[:2]
    raw = pages.as_strided((count, pages.stride(0)), (pages.stride(0), 1))
    page, slot = (slots // page_slots)[:, None], (slots % page_slots)[:, None]
    data = raw[page, slot * DATA_BYTES + torch.arange(DATA_BYTES, device="cuda")]
    scale = raw[page, page_slots * DATA_BYTES + slot * SCALE_BYTES + torch.arange(7, device="cuda")]
    values = data[:, :448].contiguous().view(torch.float8_e4m3fn).double().view(-1, 7, 64)
    values = values * torch.exp2(scale.double() - 127)[..., None]
    rotary = data[:, 448:].contiguous().view(torch.bfloat16).double()
    return torch.cat([values.view(-1, 448), rotary], 1)


def attention(
    query: torch.Tensor, window: KeyList, compressed: KeyList | None, sink: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Return what the kernel computes, [rows, heads, 512] float64, row by row from the definition."""
    output = torch.zeros(query.shape, dtype=torch.float64, device="cuda")
    for row in range(len(query)):
        latents = []
        for keys in (window, compressed):
            if keys is not None:
                slots = keys.indices[row, : max(0, int(keys.lengths[row]))].long()
                latents.append(unpack(keys.pages, slots[slots >= 0]))
        latent = torch.cat(latents)
        if len(latent):
            score = query[row].double() @ latent.T * softmax_scale
            weight = torch.cat([score, sink.double()[:, None]], 1).softmax(1)[:, :-1]
            output[row] = weight @ latent
    return output
