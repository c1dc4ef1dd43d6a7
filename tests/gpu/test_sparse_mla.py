# SPDX-License-Identifier: Apache-2.0
"""The sparse-MLA kernel against float64 attention over the unpacked pages, on a CUDA device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from llmfleet_kernels.sparse_mla import KeyList, choose_tile, sparse_mla_decode  # noqa: E402
from llmfleet_kernels.sparse_mla_reference import attention, random_pages  # noqa: E402

SCALE = 512**-0.5
WINDOW_SLOTS, COMPRESSED_SLOTS = 256, 64


@pytest.fixture(scope="module")
def caches() -> tuple[Any, Any]:
    """Return the pages of a window cache and of a compressed cache, larger than any list."""
    torch.manual_seed(0)
    return random_pages(16, WINDOW_SLOTS), random_pages(64, COMPRESSED_SLOTS)


def keys(pages: Any, lengths: list[int], width: int) -> KeyList:
    """Return a list of distinct slots in random order over all pages; past its length each row names none."""
    slots = pages.shape[0] * pages.shape[1]
    indices = torch.stack([torch.randperm(slots, device="cuda")[:width] for _ in lengths]).int()
    counts = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    indices[torch.arange(width, device="cuda") >= counts[:, None]] = -1
    return KeyList(pages, indices.contiguous(), counts)


def query(rows: int, heads: int) -> Any:
    return torch.randn(rows, heads, 512, device="cuda", dtype=torch.bfloat16)


def check(found: Any, wanted: Any) -> None:
    """Hold the output to what bf16 weights and a bf16 result allow: 2^-8 of the norm."""
    assert torch.isfinite(found).all()
    assert (found.double() - wanted).norm() <= 2**-8 * wanted.norm()


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_full_lists(caches: tuple[Any, Any], rows: int, heads: int) -> None:
    window, compressed = keys(caches[0], [128] * rows, 128), keys(caches[1], [512] * rows, 512)
    q, sink = query(rows, heads), torch.randn(heads, device="cuda")
    found = sparse_mla_decode(q, window, compressed, sink, SCALE)
    check(found, attention(q, window, compressed, sink, SCALE))


@pytest.mark.parametrize("heads", [16, 64])
def test_every_pair_of_lengths_at_the_edges_of_tiles(caches: tuple[Any, Any], heads: int) -> None:
    pairs = list(product([0, 1, 15, 63, 64, 65, 127, 128], [0, 1, 31, 63, 64, 65, 511, 512]))
    window = keys(caches[0], [a for a, _ in pairs], 128)
    compressed = keys(caches[1], [b for _, b in pairs], 512)
    q, sink = query(len(pairs), heads), torch.randn(heads, device="cuda")
    wanted = attention(q, window, compressed, sink, SCALE)
    for splits in (None, 1, 2, 3, 40):
        found = torch.full((len(pairs), heads, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
        sparse_mla_decode(q, window, compressed, sink, SCALE, output=found, splits=splits)
        check(found, wanted)
        assert not found[0].any(), "the row without a slot"


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_tile_of_a_device_with_little_shared_memory(caches: tuple[Any, Any], rows: int, heads: int) -> None:
    window, compressed = keys(caches[0], [100, 128] * rows, 128), keys(caches[1], [512, 77] * rows, 512)
    q, sink = query(2 * rows, heads), torch.randn(heads, device="cuda")
    found = sparse_mla_decode(q, window, compressed, sink, SCALE, tile=choose_tile(heads, 101_376))
    check(found, attention(q, window, compressed, sink, SCALE))


def test_window_only(caches: tuple[Any, Any]) -> None:
    window = keys(caches[0], [128, 3, 0], 128)
    q, sink = query(3, 64), torch.randn(64, device="cuda")
    check(sparse_mla_decode(q, window, None, sink, SCALE), attention(q, window, None, sink, SCALE))


def test_pages_of_two_slots(caches: tuple[Any, Any]) -> None:
    """Layers of compression ratio 128 have two slots a 256-token page, and lists longer than 512."""
    window = keys(caches[0], [128, 128], 128)
    compressed = keys(random_pages(2000, 2), [2048, 1111], 2048)
    q, sink = query(2, 64), torch.randn(64, device="cuda")
    found = sparse_mla_decode(q, window, compressed, sink, SCALE)
    check(found, attention(q, window, compressed, sink, SCALE))


def test_indices_of_none_inside_a_list(caches: tuple[Any, Any]) -> None:
    window, compressed = keys(caches[0], [128, 128], 128), keys(caches[1], [512, 512], 512)
    window.indices[0, ::3] = -1
    compressed.indices[1, 64:448] = -1
    q, sink = query(2, 64), torch.randn(64, device="cuda")
    found = sparse_mla_decode(q, window, compressed, sink, SCALE)
    check(found, attention(q, window, compressed, sink, SCALE))


def test_slots_that_no_list_names_may_hold_anything(caches: tuple[Any, Any]) -> None:
    """Slot 0 of each cache is all ones: NaN as fp8 and as bf16."""
    pages = tuple(random_pages(*cache.shape[:2]) for cache in caches)
    lists = []
    for cache, length, width in zip(pages, (100, 300), (128, 512), strict=True):
        made = keys(cache, [length], width)
        made.indices[made.indices == 0] = 1
        cache.as_strided((576,), (1,)).fill_(0xFF)
        lists.append(made)
    q, sink = query(1, 64), torch.randn(64, device="cuda")
    check(sparse_mla_decode(q, lists[0], lists[1], sink, SCALE), attention(q, lists[0], lists[1], sink, SCALE))


def test_large_scores_and_sinks(caches: tuple[Any, Any]) -> None:
    """Scores in the thousands, one sink far above and one far below them, and no sink at all."""
    window, compressed = keys(caches[0], [128], 128), keys(caches[1], [512], 512)
    q = query(1, 64) * 100
    sink = torch.randn(64, device="cuda")
    sink[0], sink[1], sink[2] = 1e5, -1e5, float("-inf")
    wanted = attention(q, window, compressed, sink, SCALE)
    found = sparse_mla_decode(q, window, compressed, sink, SCALE)
    check(found, wanted)
    assert not found[0, 0].any(), "all weight is on the sink"


@pytest.mark.parametrize("exponents", [(90, 96), (130, 136)])
def test_scales_far_from_one(exponents: tuple[int, int]) -> None:
    pages = random_pages(4, WINDOW_SLOTS, exponents=exponents), random_pages(16, COMPRESSED_SLOTS, exponents=exponents)
    window, compressed = keys(pages[0], [128], 128), keys(pages[1], [512], 512)
    q, sink = query(1, 64), torch.randn(64, device="cuda")
    found = sparse_mla_decode(q, window, compressed, sink, SCALE)
    check(found, attention(q, window, compressed, sink, SCALE))


def test_every_fp8_value_comes_through_exactly() -> None:
    """One slot, no sink: the output is that slot's latent. Its 448 values are all finite e4m3 codes."""
    pages = random_pages(1, WINDOW_SLOTS)
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    pages.as_strided((448,), (1,), 5 * 576).copy_(codes.repeat(2)[:448])
    window = KeyList(
        pages,
        torch.full((1, 128), 5, device="cuda", dtype=torch.int32),
        torch.ones(1, device="cuda", dtype=torch.int32),
    )
    no_sink = torch.full((64,), float("-inf"), device="cuda")
    q = torch.zeros(1, 64, 512, device="cuda", dtype=torch.bfloat16)
    found = sparse_mla_decode(q, window, None, no_sink, SCALE)
    assert torch.equal(found.double(), attention(q, window, None, no_sink, SCALE))


def test_addresses_beyond_four_gibibytes() -> None:
    pages = torch.empty((33_000, 149_760), dtype=torch.uint8, device="cuda")
    small = random_pages(2, WINDOW_SLOTS)
    pages[-2:] = small.as_strided((2, 149_760), (149_760, 1))
    large = pages.as_strided((33_000, 256, 1, 584), (149_760, 584, 584, 1))
    near = keys(small, [128], 128)
    far = near._replace(pages=large, indices=near.indices + 32_998 * 256)
    q, sink = query(1, 64), torch.randn(64, device="cuda")
    assert torch.equal(sparse_mla_decode(q, far, None, sink, SCALE), sparse_mla_decode(q, near, None, sink, SCALE))


@pytest.mark.parametrize("rows", [1, 64])
def test_a_captured_graph_follows_lengths_and_slots(caches: tuple[Any, Any], rows: int) -> None:
    window, compressed = keys(caches[0], [128] * rows, 128), keys(caches[1], [512] * rows, 512)
    q, sink = query(rows, 64), torch.randn(64, device="cuda")
    found = torch.empty_like(q)
    sparse_mla_decode(q, window, compressed, sink, SCALE, output=found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla_decode(q, window, compressed, sink, SCALE, output=found)
    for first, second in ((0, 0), (1, 0), (65, 511), (128, 512), (0, 1)):
        window.lengths.fill_(first)
        compressed.lengths.fill_(second)
        window.indices.copy_(keys(caches[0], [128] * rows, 128).indices)
        q.copy_(query(rows, 64))
        found.fill_(float("nan"))
        graph.replay()
        wanted = attention(q, window, compressed, sink, SCALE)
        if first + second:
            check(found, wanted)
        else:
            assert not found.any()


def test_a_query_with_strides(caches: tuple[Any, Any]) -> None:
    """The engine pads 16 heads to 64 and may hand a slice."""
    window, compressed = keys(caches[0], [128] * 3, 128), keys(caches[1], [512] * 3, 512)
    q, sink = query(3, 64)[:, :16], torch.randn(16, device="cuda")
    found = sparse_mla_decode(q, window, compressed, sink, SCALE)
    check(found, attention(q, window, compressed, sink, SCALE))


def test_no_rows(caches: tuple[Any, Any]) -> None:
    window = KeyList(
        caches[0],
        torch.empty((0, 128), device="cuda", dtype=torch.int32),
        torch.empty(0, device="cuda", dtype=torch.int32),
    )
    assert sparse_mla_decode(query(0, 64), window, None, torch.zeros(64, device="cuda"), SCALE).shape == (0, 64, 512)
