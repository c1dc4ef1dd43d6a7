# SPDX-License-Identifier: Apache-2.0
"""Shape of a launch of the indexer logits kernel: arithmetic only, so it needs neither a GPU, PyTorch nor Triton.

A page holds the keys of 64 compressed tokens. Page layouts (SGLang's ``DeepSeekV4IndexerPool`` for fp8; bf16 keys take
256 bytes a token and need no scale)::

    fp8   64 x 128 float8_e4m3fn, then 64 float32 scales    8,448 bytes
    bf16  64 x 128 bfloat16                                16,384 bytes
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 64
"""Compressed tokens in a page."""
KEY_DIM = 128
"""Elements of an index key."""
WARPS = 4
"""One warpgroup: on sm_90 a page is the 64 rows of one ``wgmma``."""
RESERVED_BYTES = 1024
"""Shared memory that the driver takes for each resident program; a multiprocessor of sm_90 and of sm_120 has exactly
this much more than one program may ask for (CUDA programming guide, technical specifications per compute capability).
"""
SCRATCH_BYTES = 1024
"""Upper bound of what Triton adds for conversions between layouts."""
MAX_BUFFERS = 5
ENOUGH_IN_FLIGHT = 96 << 10
"""Key bytes on their way from memory to a multiprocessor past which no shape became faster on an H200; bandwidth times
latency asks for some 36 KiB there (4.8 TB/s over 132 multiprocessors, about 1 us).
"""
PLANNED_ROWS = (256, 1024)
"""Numbers of rows that the kernel is compiled for when each program finds its share in the lengths of all rows."""


@dataclass(frozen=True)
class KeyFormat:
    """How the keys of a page are stored."""

    name: str
    element_bytes: int
    scale_bytes: int
    """Bytes of scale for each key."""

    @property
    def page_bytes(self) -> int:
        return PAGE * (KEY_DIM * self.element_bytes + self.scale_bytes)


BF16 = KeyFormat("bf16", element_bytes=2, scale_bytes=0)
FP8 = KeyFormat("fp8", element_bytes=1, scale_bytes=4)


def key_format(page_bytes: int) -> KeyFormat:
    """Format of the keys in a pool whose pages have ``page_bytes`` bytes; ``ValueError`` for any other size."""
    for known in (BF16, FP8):
        if known.page_bytes == page_bytes:
            return known
    raise ValueError(
        f"index key pages have {page_bytes} bytes, expected {BF16.page_bytes} (bf16) or {FP8.page_bytes} (fp8): "
        f"view the pool as [pages, bytes of a page]"
    )


@dataclass(frozen=True)
class Tile:
    """How one program works: ``buffers`` pages are in shared memory at once, one being computed, the others loading."""

    buffers: int
    shared_bytes: int
    """Upper bound of the shared memory of a program."""
    programs: int
    """Programs resident in a multiprocessor, by shared memory."""

    @property
    def stages(self) -> int:
        """``num_stages`` for Triton: the key's address comes from the page table, so each buffer takes two stages."""
        return 2 * self.buffers


def shared_bytes(keys: KeyFormat, heads: int, buffers: int) -> int:
    """Upper bound of a program's shared memory: the query (sm_120 keeps it in registers), key tiles, page numbers."""
    query = heads * KEY_DIM * keys.element_bytes
    page_number = 8
    return query + buffers * (keys.page_bytes + page_number) + SCRATCH_BYTES


def choose_tile(keys: KeyFormat, heads: int, shared_limit: int) -> Tile:
    """The tile that keeps most key bytes in flight, up to ``ENOUGH_IN_FLIGHT``; of equals the one with more programs.

    ``shared_limit`` is what one program may ask for (``cudaDevAttrMaxSharedMemoryPerBlockOptin``, bytes).
    ``ValueError`` where not even two buffers fit.
    """
    tiles = []
    for buffers in range(2, MAX_BUFFERS + 1):
        size = shared_bytes(keys, heads, buffers)
        if size <= shared_limit:
            programs = (shared_limit + RESERVED_BYTES) // (size + RESERVED_BYTES)
            tiles.append(Tile(buffers, size, programs))
    if not tiles:
        raise ValueError(
            f"the indexer logits of {heads} heads with {keys.name} keys need {shared_bytes(keys, heads, 2)} bytes of "
            f"shared memory, the device allows {shared_limit}"
        )
    page = PAGE * KEY_DIM * keys.element_bytes
    return max(
        tiles, key=lambda tile: (min(ENOUGH_IN_FLIGHT, (tile.buffers - 1) * tile.programs * page), tile.programs)
    )


def choose_grid(rows: int, multiprocessors: int, tile: Tile) -> tuple[int, int]:
    """Programs to start, and the number of rows to compile for (0: one program a row, whatever the lengths).

    Up to 1,024 rows the programs that fill the device are dealt out by length: with p programs, n rows and t pages in
    all, a program gets at most c = ceil(t / (p - n)) pages of one row, which takes sum(ceil(pages / c)) <= p programs.
    Beyond, there are more rows than programs at once and the device's own order evens them out. Depends on shapes and
    the device alone, so that a captured graph stays valid whatever the lengths.
    """
    for planned in PLANNED_ROWS:
        if rows <= planned:
            return max(multiprocessors * tile.programs, 2 * rows), planned
    return rows, 0
