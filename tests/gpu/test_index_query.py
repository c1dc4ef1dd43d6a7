# SPDX-License-Identifier: Apache-2.0
"""Parity of the index query kernel with float64 and with the engine's fp8 kernel, on a CUDA device."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests import index_key_store as store

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from llmfleet_kernels.index_query import index_query, reference_query  # noqa: E402
from llmfleet_kernels.logits import reference_logits  # noqa: E402
from llmfleet_kernels.logits_tile import KEY_DIM, PAGE  # noqa: E402

from tests import index_query as cases  # noqa: E402

ENGINES = store.engines()


@pytest.mark.parametrize("name", cases.CASES)
def test_parity(name: str) -> None:
    found = cases.errors(name, "cuda", cases.ROUNDING)
    assert set(found) == {"float32", "bf16", "weights"}
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (64, 64), (511, 64), (4097, 64), (999, 16)])
def test_rows_of_decode_and_of_prefill(rows: int, heads: int) -> None:
    case = cases.random(rows, heads, "cuda")
    query, _weights = index_query(*case.arguments)
    wanted, _weights = reference_query(*case.arguments)
    size = case.q.double().norm(dim=-1, keepdim=True)
    assert cases.worst(query, wanted, cases.ROUNDING * wanted.abs() + cases.SUMS * size) <= 1
    assert ((query.double() - wanted).norm() / wanted.norm()).item() <= 2e-3


def test_more_than_two_gigabytes() -> None:
    """Offsets of elements and of bytes do not fit 32 bits."""
    rows = (1 << 31) // (64 * KEY_DIM) + 3
    case = cases.random(3, 64, "cuda")
    q = torch.zeros(rows, 64, KEY_DIM, dtype=torch.bfloat16, device="cuda")
    weights = torch.zeros(rows, 64, dtype=torch.bfloat16, device="cuda")
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    q[-3:], weights[-3:], positions[-3:] = case.q, case.weights, case.positions
    query, scaled = index_query(q, weights, case.weight_scale, case.factors, positions)
    wanted_query, wanted_scaled = index_query(*case.arguments)
    assert torch.equal(query[-3:], wanted_query)
    assert torch.equal(scaled[-3:], wanted_scaled)
    assert not query[:-3].any()


def test_the_transform_changes_no_score() -> None:
    generator = torch.Generator().manual_seed(0)
    for here, there in ((0, 0), (4095, 1), (1234, 1230)):
        query, key = (torch.randn(KEY_DIM, generator=generator).tolist() for _ in range(2))
        assert cases.score_error(query, key, here, there, "cuda") <= cases.ROUNDING


def test_graph_replay_with_changing_positions() -> None:
    case = cases.random(5, 64, "cuda")
    index_query(*case.arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query, weights = index_query(*case.arguments)
    for seed in range(3):
        other = cases.random(5, 64 + seed, "cuda")
        case.q.copy_(other.q[:, :64])
        case.weights.copy_(other.weights[:, :64])
        case.positions.copy_(other.positions)
        graph.replay()
        wanted_query, wanted_weights = index_query(*case.arguments)
        assert torch.equal(query, wanted_query)
        assert torch.equal(weights, wanted_weights)


def test_nothing_is_compiled_again_for_other_rows_and_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of heads is compiled once: not for each number of rows, nor for slices that start elsewhere."""
    first = cases.random(2, 32, "cuda")
    index_query(*first.arguments)
    compiled: list[str] = []

    def note(**what: Any) -> None:
        compiled.append(what["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for rows in (1, 3, 8, 16, 17, 64, 100):
        case = cases.random(rows + 1, 32, "cuda")
        index_query(*case.arguments)
        index_query(case.q[1:], case.weights[1:], case.weight_scale, case.factors, case.positions[1:])
        wide = torch.zeros(rows, 32 + 7, dtype=torch.bfloat16, device="cuda")
        index_query(case.q[1:], wide[:, 3:35], case.weight_scale, case.factors, case.positions[1:])
    assert compiled == []
    index_query(*cases.random(1, 5, "cuda").arguments)
    assert len(compiled) == 1, "the hook sees what is compiled"


def test_what_is_not_finite_stays_in_its_vector() -> None:
    finite, not_a_number = cases.special_values("cuda")
    assert finite == [False, True, False]
    assert not_a_number[2]


def test_wrong_arguments_are_refused() -> None:
    assert "taken" not in cases.refused("cuda").values()


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.version)
def engine(request: pytest.FixtureRequest) -> store.Engine:
    pytest.importorskip("tvm_ffi")
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    engine: store.Engine = request.param
    return engine


@pytest.mark.skipif(not ENGINES, reason=f"no SGLang with a known store is here: name its folder in {store.TREES}")
@pytest.mark.parametrize(
    "name",
    [f"{2 * cases.VECTORS + 1}_rows_of_1", "3_rows_of_64", "int32_positions", "sliced_weights", "one_hot_turned"],
)
def test_the_engine_computes_the_same_in_fp8(engine: store.Engine, name: str) -> None:
    """Its scale is in its weights: divided out, both queries differ by the rounding of fp8 and no more."""
    from tests.gpu.index_query_engine import engine_query

    case = cases.CASES[name]("cuda")
    coarse, weights = engine_query(engine, case)
    fine, scaled = index_query(*case.arguments)

    exact, _weights = reference_query(*case.arguments)
    scale = exact.abs().amax(-1).clamp(min=1e-4) / 448
    assert torch.allclose(weights.double(), scaled.double() * scale, rtol=1e-5, atol=0)
    # Half a step of e4m3: 2^-4 of the value, 2^-10 of the scale below its normal numbers.
    sums = cases.SUMS * case.q.double().norm(dim=-1, keepdim=True)
    coarsely = 2**-4 * exact.abs() + 2**-10 * scale[..., None] + sums
    finely = cases.ROUNDING * exact.abs() + sums
    dequantised = coarse.double() * scale[..., None]
    assert cases.worst(dequantised, exact, coarsely) <= 1
    assert cases.worst(fine, exact, finely) <= 1
    assert cases.worst(dequantised, fine.double(), coarsely + finely) <= 1

    # The same keys get the same logits from both, up to that rounding.
    keys = torch.randn(1, PAGE * KEY_DIM, device="cuda").bfloat16().view(torch.uint8)
    rows = len(case.q)
    pages = torch.zeros(rows, 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((rows,), PAGE, dtype=torch.int32, device="cuda")
    engine, ours = (
        reference_logits(q, keys, weight, lengths, pages, PAGE) for q, weight in ((coarse, weights), (fine, scaled))
    )
    size = reference_logits(fine, keys, scaled.abs(), lengths, pages, PAGE).norm()
    assert ((engine - ours).norm() / size).item() <= 0.05
