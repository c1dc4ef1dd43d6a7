# SPDX-License-Identifier: Apache-2.0
"""The engine's store of index keys, stock and patched, against float64 on a CUDA device."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests import index_key_store as store

torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if not (ENGINES := store.engines()):
    pytest.skip(f"no SGLang with a known store is here: name its folder in {store.TREES}", allow_module_level=True)

from tests.gpu import index_key_reference as reference  # noqa: E402
from tests.gpu.index_key_reference import EPSILON, KEY_DIM, RATIO, UNWRITTEN  # noqa: E402

PAGE_BYTES = {"fp8": store.PAGE * (KEY_DIM + 4), "bf16": store.PAGE * KEY_DIM * 2}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
POSITIONS = 1 << 17


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: engine.version)
def engine(request: pytest.FixtureRequest) -> store.Engine:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    engine: store.Engine = request.param
    return engine


@pytest.fixture(scope="module")
def patched(engine: store.Engine) -> Any:
    return tvm_ffi.load_module(str(store.library(engine, patched=True)))


@pytest.fixture(scope="module")
def stock(engine: store.Engine) -> Any:
    return tvm_ffi.load_module(str(store.library(engine, patched=False)))


@pytest.fixture(scope="module")
def factors() -> Any:
    return reference.frequencies(POSITIONS)


class Case:
    """Input of one launch: ``slots[i]`` is where the key of row ``i`` of ``stored`` goes, ``places`` what is passed."""

    def __init__(
        self, plan: Any, lengths: Any, stored: Any, slots: Any, places: Any, factors: Any, *, decode: bool
    ) -> None:
        self.plan, self.lengths, self.stored, self.slots, self.places = plan, lengths, stored, slots, places
        self.factors, self.decode = factors, decode
        self.pages = -(-int(slots.max()) // store.PAGE) + 2
        self.inputs = torch.randn(len(plan), KEY_DIM, device="cuda")
        self.weight = 1 + torch.randn(KEY_DIM, device="cuda") / 4

    def run(self, module: Any, keys: str, dtype: str) -> Any:
        """The pool after the launch."""
        pool = torch.full((self.pages, PAGE_BYTES[keys]), UNWRITTEN, dtype=torch.uint8, device="cuda")
        cast = DTYPES[dtype]
        module[f"{keys}_{dtype}"](
            self.inputs.to(cast),
            self.plan,
            self.weight.to(cast),
            EPSILON,
            self.factors,
            self.places,
            pool,
            self.decode,
            RATIO,
        )
        return pool

    def expected(self, dtype: str) -> Any:
        cast = DTYPES[dtype]
        position = self.lengths - RATIO
        inputs = self.inputs[self.stored].to(cast)
        return reference.index_keys(inputs, self.weight.to(cast), self.factors[position])

    def check_bf16(self, pool: Any, dtype: str) -> None:
        """Every key is right and in its place, and nothing else was written."""
        found, wanted = reference.bf16_keys(pool)[self.slots], self.expected(dtype)
        assert ((found - wanted).norm() / wanted.norm()).item() <= 2e-3
        # Rounding to 8 bits, of a float32 whose error is that of sums of keys of norm 11.
        assert bool(((found - wanted).abs() <= 2**-8 * wanted.abs() + 2e-5).all())
        rest = torch.ones(pool.shape[0] * store.PAGE, dtype=torch.bool, device="cuda")
        rest[self.slots] = False
        assert bool((pool.view(-1, 2 * KEY_DIM)[rest] == UNWRITTEN).all()), "a slot that no key belongs to was written"


def decode_case(lengths: Any, factors: Any) -> Case:
    """A decode step of rows of these lengths; slots are in random order over pages in random order."""
    lengths = lengths.cuda()
    stored = (lengths % RATIO == 0).nonzero().squeeze(1)
    places = torch.randperm(2 * len(lengths) + 70, device="cuda")[: len(lengths)]
    plan = reference.decode_plan(lengths)
    return Case(plan, lengths[stored], stored, places[stored], places, factors, decode=True)


def extend_case(requests: list[tuple[int, int]], factors: Any, padding: int) -> Case:
    plan, lengths, ragged = reference.extend_plan(requests, padding)
    tokens = sum(new for _, new in requests)
    places = torch.randperm(2 * max(tokens, len(plan)) + 70, device="cuda")[: max(tokens, len(plan))]
    stored = (plan.view(torch.int32)[:, 0] != -1).nonzero().squeeze(1)
    slots = places[torch.tensor(ragged, device="cuda")]
    return Case(plan, torch.tensor(lengths, device="cuda"), stored, slots, places, factors, decode=False)


def cases(factors: Any) -> dict[str, Case]:
    every_residue = [(prefix, new) for prefix in (0, 4, 5, 6, 7, 1000) for new in (1, 2, 3, 4, 63, 64, 65, 257)]
    return {
        "decode_every_length_to_4096": decode_case(torch.arange(1, 4097), factors),
        "decode_one_row": decode_case(torch.tensor([128]), factors),
        "decode_far_positions": decode_case(torch.tensor([4, 65_536, POSITIONS, POSITIONS - 1]), factors),
        "extend_every_residue": extend_case(every_residue, factors, padding=13),
        "extend_from_nothing": extend_case([(0, 8192), (0, 4), (0, 8191)], factors, padding=0),
    }


@pytest.fixture(scope="module")
def inputs(factors: Any) -> dict[str, Case]:
    torch.manual_seed(0)
    return cases(factors)


NAMES = [
    "decode_every_length_to_4096",
    "decode_one_row",
    "decode_far_positions",
    "extend_every_residue",
    "extend_from_nothing",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_bf16_keys(patched: Any, inputs: dict[str, Case], name: str, dtype: str) -> None:
    case = inputs[name]
    case.check_bf16(case.run(patched, "bf16", dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_fp8_keys_are_those_of_the_stock_kernel(
    stock: Any, patched: Any, inputs: dict[str, Case], name: str, dtype: str
) -> None:
    case = inputs[name]
    before, after = case.run(stock, "fp8", dtype), case.run(patched, "fp8", dtype)
    assert torch.equal(before, after)
    found, wanted = reference.fp8_keys(after)[case.slots], case.expected(dtype)
    assert 1e-2 < ((found - wanted).norm() / wanted.norm()).item() < 4e-2, "fp8 keeps 4 bits"


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_size_of_the_input_does_not_matter(patched: Any, factors: Any, scale: float) -> None:
    """The norm takes the size out; an input of zeros is a key of zeros."""
    case = decode_case(torch.arange(4, 4 * 200, 4), factors)
    case.inputs *= scale
    pool = case.run(patched, "bf16", "f32")
    if scale:
        case.check_bf16(pool, "f32")
    else:
        assert not reference.bf16_keys(pool)[case.slots].any()


def test_no_rows(patched: Any, factors: Any) -> None:
    case = decode_case(torch.tensor([128]), factors)
    case.plan, case.inputs, case.places = case.plan[:0], case.inputs[:0], case.places[:0]
    assert bool((case.run(patched, "bf16", "f32") == UNWRITTEN).all())


def test_pool_of_the_other_format_is_refused(patched: Any, factors: Any) -> None:
    case = decode_case(torch.tensor([128, 4]), factors)
    for keys, other in (("bf16", "fp8"), ("fp8", "bf16")):
        pool = torch.zeros(case.pages, PAGE_BYTES[other], dtype=torch.uint8, device="cuda")
        with pytest.raises(RuntimeError, match=r"[Ss]tride"):
            patched[f"{keys}_f32"](
                case.inputs, case.plan, case.weight, EPSILON, factors, case.places, pool, True, RATIO
            )


def test_graph_replay(patched: Any, factors: Any) -> None:
    """Plans are read on the device: a replay stores what the plan of the moment says."""
    case = decode_case(torch.arange(1, 257), factors)
    pool = torch.full((2 * 256 // store.PAGE + 4, PAGE_BYTES["bf16"]), UNWRITTEN, dtype=torch.uint8, device="cuda")

    def launch() -> None:
        patched["bf16_f32"](case.inputs, case.plan, case.weight, EPSILON, factors, case.places, pool, True, RATIO)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for shift in (0, 1, 2, 3):
        lengths = torch.arange(1, 257) + shift
        replayed = decode_case(lengths, factors)
        case.plan.copy_(replayed.plan)
        case.inputs.copy_(replayed.inputs)
        case.places.copy_(replayed.places)
        pool.fill_(UNWRITTEN)
        graph.replay()
        replayed.weight = case.weight
        replayed.check_bf16(pool, "f32")
