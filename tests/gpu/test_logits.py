# SPDX-License-Identifier: Apache-2.0
"""Parity of the indexer logits kernel with its float64 reference, on random and on hostile input."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from llmfleet_kernels.logits import paged_logits, reference_logits  # noqa: E402
from llmfleet_kernels.logits_tile import BF16, FP8, KEY_DIM, PAGE, KeyFormat  # noqa: E402

HEADS = 64
POISON = -12345.0
FORMATS = pytest.mark.parametrize("keys_format", [BF16, FP8], ids=lambda keys_format: keys_format.name)
# fp8 products are summed by the tensor cores of sm_90 with 14 bits; bf16 products are exact and summed in float32.
TOLERANCE = {"bf16": 1e-6, "fp8": 1e-3}


def page_pool(pages: int, keys_format: KeyFormat, spread: float = 1.0) -> Any:
    """A pool of random keys; with fp8 keys each key has its own scale."""
    values = torch.randn(pages, PAGE * KEY_DIM, device="cuda") * spread
    if keys_format == BF16:
        return values.bfloat16().view(torch.uint8)
    scales = torch.rand(pages, PAGE, device="cuda") + 0.01
    return torch.cat([values.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)], dim=1)


class Case:
    """Inputs for rows of the given lengths: pages out of order, none shared, all other entries of the table invalid."""

    def __init__(self, lengths: list[int], max_len: int, keys_format: KeyFormat, heads: int = HEADS) -> None:
        rows, width = len(lengths), -(-max_len // PAGE)
        used = [-(-length // PAGE) for length in lengths]
        self.keys_format, self.max_len = keys_format, max_len
        self.keys = page_pool(sum(used) + 3, keys_format)
        order = torch.randperm(self.keys.shape[0], device="cuda", dtype=torch.int32)
        self.page_table = torch.full((rows, width), 1 << 30, device="cuda", dtype=torch.int32)
        start = 0
        for row, count in enumerate(used):
            self.page_table[row, :count] = order[start : start + count]
            start += count
        q = torch.randn(rows, heads, KEY_DIM, device="cuda")
        self.q = q.to(torch.float8_e4m3fn if keys_format == FP8 else torch.bfloat16)
        self.weights = torch.randn(rows, heads, device="cuda")
        self.lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        self.out = torch.full((rows, max_len), POISON, device="cuda")

    def run(self) -> Any:
        return paged_logits(self.q, self.keys, self.weights, self.lengths, self.page_table, self.max_len, out=self.out)

    def check(self) -> None:
        """Everything below a row's length is right, everything from it on is as it was."""
        expected = reference_logits(self.q, self.keys, self.weights, self.lengths, self.page_table, self.max_len)
        # Heads of either sign cancel: errors are measured against the sum of what they add and take away.
        magnitude = reference_logits(self.q, self.keys, self.weights.abs(), self.lengths, self.page_table, self.max_len)
        below = torch.arange(self.max_len, device="cuda")[None, :] < self.lengths[:, None]
        assert bool((self.out[~below] == POISON).all()), "a value at or past a row's length was written"
        got, wanted, scale = self.out[below].double(), expected[below], magnitude[below]
        assert bool(got.isfinite().all())
        error = ((got - wanted).norm() / scale.norm()).item() if wanted.numel() else 0.0
        assert error <= TOLERANCE[self.keys_format.name], f"relative error {error:.2e}"


@FORMATS
def test_lengths_at_page_edges(keys_format: KeyFormat) -> None:
    case = Case([1, 63, 64, 65, 127, 128, 129, 0, 4096, 2, 1023], 4096, keys_format)
    case.run()
    case.check()


@FORMATS
@pytest.mark.parametrize("residue", range(4))
def test_every_residue_up_to_4096(keys_format: KeyFormat, residue: int) -> None:
    case = Case(list(range(residue, 4097, 52)), 4096, keys_format)
    case.run()
    case.check()


@FORMATS
def test_long_row_among_short_ones(keys_format: KeyFormat) -> None:
    case = Case([131072, 5, 0, 700], 131072, keys_format)
    case.run()
    case.check()


@FORMATS
@pytest.mark.parametrize("rows", [1, 2, 33, 256, 257, 1024, 1025, 3000])
def test_any_number_of_rows(keys_format: KeyFormat, rows: int) -> None:
    case = Case([(37 * row) % 513 for row in range(1, rows + 1)], 513, keys_format)
    case.run()
    case.check()


@pytest.mark.parametrize("heads", [16, 32, 64])
@FORMATS
def test_number_of_heads(keys_format: KeyFormat, heads: int) -> None:
    case = Case([200, 64], 256, keys_format, heads)
    case.run()
    case.check()


def test_fp8_query_with_bf16_keys() -> None:
    case = Case([1000, 64, 3], 1024, BF16)
    case.q = case.q.to(torch.float8_e4m3fn)
    case.run()
    case.check()


@FORMATS
def test_no_row_is_long_enough(keys_format: KeyFormat) -> None:
    case = Case([0, 0, 0], 256, keys_format)
    case.run()
    assert bool((case.out == POISON).all())


@FORMATS
def test_no_rows(keys_format: KeyFormat) -> None:
    case = Case([64], 64, keys_format)
    none = slice(0, 0)
    got = paged_logits(case.q[none], case.keys, case.weights[none], case.lengths[none], case.page_table[none], 64)
    assert got.shape == (0, 64)


@FORMATS
def test_not_a_number_in_slots_past_the_length_stays_there(keys_format: KeyFormat) -> None:
    """A page handed out again holds whatever was in it."""
    case = Case([65, 10], 128, keys_format)
    for row, length in enumerate((65, 10)):
        page, slot = case.page_table[row, length // PAGE].item(), length % PAGE
        width = KEY_DIM * keys_format.element_bytes
        case.keys[page, slot * width : PAGE * width] = 0xFF
    case.run()
    case.check()


@FORMATS
def test_length_beyond_the_window_is_cut(keys_format: KeyFormat) -> None:
    case = Case([100, 100], 100, keys_format)
    case.lengths += 1_000_000
    case.run()
    case.lengths.fill_(100)
    case.check()


@FORMATS
def test_zero_weights_and_negative_products(keys_format: KeyFormat) -> None:
    """All that ReLU and the weights remove is exactly 0."""
    case = Case([300, 64], 320, keys_format)
    case.weights[0] = 0.0
    q, keys = torch.ones_like(case.q.float()), case.keys
    case.q = q.to(case.q.dtype)
    values = PAGE * KEY_DIM * keys_format.element_bytes
    keys[:, :values] = (
        (-torch.ones(keys.shape[0], PAGE * KEY_DIM, device="cuda"))
        .to(torch.float8_e4m3fn if keys_format == FP8 else torch.bfloat16)
        .view(torch.uint8)
    )
    case.run()
    assert bool((case.out[0, :300] == 0).all())
    assert bool((case.out[1, :64] == 0).all())


@FORMATS
def test_largest_values(keys_format: KeyFormat) -> None:
    """The largest fp8 values: sums of 128 products of 448 x 448, all of one sign."""
    case = Case([130, 64], 192, keys_format)
    kind = torch.float8_e4m3fn if keys_format == FP8 else torch.bfloat16
    case.q = torch.full(case.q.shape, 448.0, device="cuda").to(kind)
    values = PAGE * KEY_DIM * keys_format.element_bytes
    case.keys[:, :values] = (
        torch.full((case.keys.shape[0], PAGE * KEY_DIM), 448.0, device="cuda").to(kind).view(torch.uint8)
    )
    case.run()
    case.check()


@FORMATS
def test_page_past_two_gigabytes(keys_format: KeyFormat) -> None:
    """Offsets of elements and of bytes do not fit 32 bits."""
    pages = (1 << 32) // keys_format.page_bytes * (2 if keys_format == BF16 else 1) + 2
    keys = torch.empty(pages, keys_format.page_bytes, dtype=torch.uint8, device="cuda")
    case = Case([PAGE], PAGE, keys_format)
    keys[-1] = case.keys[case.page_table[0, 0].long()]
    case.keys = keys
    case.page_table.fill_(pages - 1)
    case.run()
    case.check()


@FORMATS
def test_table_and_result_with_longer_rows(keys_format: KeyFormat) -> None:
    """SGLang hands over slices of tables that are wider than the step needs."""
    case = Case([500, 64, 129], 512, keys_format)
    wide = torch.full((3, 8 + 5), 1 << 30, device="cuda", dtype=torch.int32)
    wide[:, :8] = case.page_table
    case.page_table = wide[:, :8]
    case.out = torch.full((3, 517), POISON, device="cuda")[:, :512]
    case.run()
    case.check()


@FORMATS
def test_graph_replay_with_changing_lengths(keys_format: KeyFormat) -> None:
    case = Case([4096] * 5, 4096, keys_format)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for lengths in ([1, 63, 64, 65, 4096], [0, 0, 0, 0, 1], [4096] * 5, [4095, 2, 1000, 0, 128]):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        case.out.fill_(POISON)
        graph.replay()
        case.check()


@FORMATS
def test_runs_are_identical(keys_format: KeyFormat) -> None:
    """Each logit is the work of one program: no order of additions is left to chance."""
    case = Case([8192, 3000, 65], 8192, keys_format)
    first = case.run().clone()
    for _ in range(20):
        case.out.fill_(POISON)
        assert torch.equal(case.run(), first)


def test_wrong_arguments_are_refused() -> None:
    case = Case([64], 64, BF16)
    arguments = {
        "q": case.q,
        "keys": case.keys,
        "weights": case.weights,
        "lengths": case.lengths,
        "page_table": case.page_table,
        "max_len": 64,
    }
    for name, value, message in (
        ("keys", case.keys[:, :8192], "index key pages have 8192 bytes, expected 16384"),
        ("keys", page_pool(2, FP8), "q is .*bfloat16.*expected .*float8_e4m3fn"),
        ("q", case.q[:, :48].contiguous(), r"weights is \[1, 64\]"),
        ("q", case.q.transpose(1, 2), "q is .*expected"),
        ("weights", case.weights.bfloat16(), "weights is .*bfloat16.*expected .*float32"),
        ("lengths", case.lengths.long(), "lengths is .*int64.*expected .*int32"),
        ("page_table", case.page_table.long(), "page_table is .*int64.*expected .*int32"),
        ("out", torch.empty(1, 65, device="cuda"), r"out is \[1, 65\]"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_logits(**{**arguments, name: value})
    with pytest.raises(ValueError, match="48 heads, expected a power of two"):
        paged_logits(**{**arguments, "q": case.q[:, :48].contiguous(), "weights": case.weights[:, :48].contiguous()})
