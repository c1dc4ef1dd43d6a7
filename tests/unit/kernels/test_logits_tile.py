# SPDX-License-Identifier: Apache-2.0
"""Tiles and grid of the indexer logits kernel for the limits of sm_90 and sm_120, and rules for any limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmfleet_kernels.logits_tile import (
    BF16,
    ENOUGH_IN_FLIGHT,
    FP8,
    KEY_DIM,
    MAX_BUFFERS,
    PAGE,
    RESERVED_BYTES,
    KeyFormat,
    Tile,
    choose_grid,
    choose_tile,
    key_format,
    shared_bytes,
)

SM_90, SM_120 = 232_448, 101_376
FORMATS = st.sampled_from([BF16, FP8])
HEADS = st.sampled_from([16, 32, 64, 128])


def test_page_sizes_are_those_of_the_pool() -> None:
    assert (BF16.page_bytes, FP8.page_bytes) == (16_384, 8_448)
    assert key_format(16_384) is BF16
    assert key_format(8_448) is FP8


def test_a_page_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"have 132 bytes, expected 16384 \(bf16\) or 8448 \(fp8\): view the pool as"):
        key_format(132)


@pytest.mark.parametrize(
    ("keys", "shared_limit", "buffers", "programs"),
    [(BF16, SM_90, 3, 3), (BF16, SM_120, 5, 1), (FP8, SM_90, 3, 6), (FP8, SM_120, 4, 2)],
)
def test_tile_of_each_architecture(keys: KeyFormat, shared_limit: int, buffers: int, programs: int) -> None:
    tile = choose_tile(keys, 64, shared_limit)
    assert (tile.buffers, tile.programs) == (buffers, programs)
    assert tile.shared_bytes == shared_bytes(keys, 64, buffers) <= shared_limit


def test_a_device_with_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"64 heads with bf16 keys need 50192 bytes .* the device allows 49152"):
        choose_tile(BF16, 64, 49_152)


@given(keys=FORMATS, heads=HEADS, shared_limit=st.integers(0, 1 << 20))
def test_a_tile_fits_or_none_would(keys: KeyFormat, heads: int, shared_limit: int) -> None:
    if shared_limit < shared_bytes(keys, heads, 2):
        with pytest.raises(ValueError, match=f"the device allows {shared_limit}$"):
            choose_tile(keys, heads, shared_limit)
        return
    tile = choose_tile(keys, heads, shared_limit)
    assert 2 <= tile.buffers <= MAX_BUFFERS
    assert tile.programs >= 1
    assert tile.programs * (tile.shared_bytes + RESERVED_BYTES) <= shared_limit + RESERVED_BYTES
    page = PAGE * KEY_DIM * keys.element_bytes
    in_flight = [
        (buffers - 1)
        * page
        * ((shared_limit + RESERVED_BYTES) // (shared_bytes(keys, heads, buffers) + RESERVED_BYTES))
        for buffers in range(2, MAX_BUFFERS + 1)
    ]
    assert (tile.buffers - 1) * page * tile.programs >= min(ENOUGH_IN_FLIGHT, max(in_flight))


@pytest.mark.parametrize(
    ("rows", "programs", "planned_rows"),
    [
        (1, 396, 256),
        (32, 396, 256),
        (198, 396, 256),
        (256, 512, 256),
        (257, 514, 1024),
        (1024, 2048, 1024),
        (1025, 1025, 0),
    ],
)
def test_programs_fill_the_device_and_outnumber_the_rows(rows: int, programs: int, planned_rows: int) -> None:
    assert choose_grid(rows, 132, Tile(buffers=3, shared_bytes=66_584, programs=3)) == (programs, planned_rows)


@given(lengths=st.lists(st.integers(0, 131_072), min_size=1, max_size=1024), multiprocessors=st.integers(1, 200))
def test_programs_suffice_for_any_lengths(lengths: list[int], multiprocessors: int) -> None:
    """The rule that the kernel follows on the device: no page is left without a program."""
    rows = len(lengths)
    programs, _ = choose_grid(rows, multiprocessors, Tile(buffers=3, shared_bytes=66_584, programs=3))
    pages = [-(-length // PAGE) for length in lengths]
    share = max(1, -(-sum(pages) // (programs - rows)))
    assert sum(-(-count // share) for count in pages) <= programs
