# SPDX-License-Identifier: Apache-2.0
"""Cases of the index query kernel and their check against float64, on a GPU or in Triton's interpreter.

In the interpreter Triton has to be imported with ``TRITON_INTERPRET=1``, which is why a process of its own runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from llmfleet_kernels.index_query import (
    ROPE_DIM,
    VECTORS,
    WARPS,
    index_query,
    index_query_kernel,
    reference_query,
)
from llmfleet_kernels.logits_tile import KEY_DIM

ROUNDING = 2.0**-8
"""Largest relative error of rounding to the nearest bf16; twice that of cutting off, as the interpreter does."""
SUMS = 1e-6
"""Largest error of a float32 result, of the norm of its input: 10 operations in a row of 2^-24 each are 6e-7."""
POSITIONS = 1 << 12
THETA = 160_000.0
POISON = -12345.0


@dataclass
class Case:
    """Arguments of ``index_query``."""

    q: torch.Tensor
    weights: torch.Tensor
    weight_scale: float
    factors: torch.Tensor
    positions: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor]:
        return self.q, self.weights, self.weight_scale, self.factors, self.positions


def frequencies(positions: int, device: str) -> torch.Tensor:
    """The engine's table for compressed keys, without the stretching of long contexts: [positions, 32] complex64."""
    rate = THETA ** (-torch.arange(0, ROPE_DIM, 2, dtype=torch.float64, device=device) / ROPE_DIM)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * rate
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def random(rows: int, heads: int, device: str, *, positions: torch.dtype = torch.int64) -> Case:
    """Random input; positions are in no order and come again."""
    generator = torch.Generator().manual_seed(1000 * rows + heads)
    return Case(
        torch.randn(rows, heads, KEY_DIM, generator=generator).bfloat16().to(device),
        torch.randn(rows, heads, generator=generator).bfloat16().to(device),
        KEY_DIM**-0.5 * heads**-0.5,
        frequencies(POSITIONS, device),
        torch.randint(POSITIONS, (rows,), generator=generator).to(positions).to(device),
    )


def one_hot(device: str, size: float, position: int) -> Case:
    """A row for each element: by linearity they say all about the transform and about the turning at a position."""
    case = random(KEY_DIM, 1, device)
    q = torch.eye(KEY_DIM, device=device).bfloat16()[:, None, :] * size
    return replace(case, q=q.contiguous(), positions=torch.full_like(case.positions, position))


def cancelling(device: str) -> Case:
    """Rows of the transform itself at position 0: all that one element gets, the others lose again, to exactly 0."""
    signs = reference_query(*one_hot(device, 1.0, 0).arguments)[0].sign().bfloat16().contiguous()
    return replace(one_hot(device, 1.0, 0), q=signs)


def sized(device: str, size: float) -> Case:
    case = random(5, 3, device)
    return replace(case, q=(case.q.float() * size).bfloat16())


def sliced_weights(device: str) -> Case:
    """The engine may hand over columns of a wider projection, which start anywhere."""
    case = random(5, 3, device)
    wide = torch.full((5, 3 + 4), POISON, dtype=torch.bfloat16, device=device)
    wide[:, 1:4] = case.weights
    return replace(case, weights=wide[:, 1:4])


def ends_of_the_table(device: str) -> Case:
    case = random(3, 3, device)
    return replace(case, positions=torch.tensor([0, POSITIONS - 1, 1], device=device))


CASES: dict[str, Callable[[str], Case]] = {
    **{f"{rows}_rows_of_1": partial(random, rows, 1) for rows in range(1, 2 * VECTORS + 2)},
    **{f"3_rows_of_{heads}": partial(random, 3, heads) for heads in (3, 16, 64, 128)},
    "int32_positions": lambda device: random(7, 3, device, positions=torch.int32),
    "float32_weights": lambda device: replace(case := random(7, 3, device), weights=case.weights.float() / 3),
    "sliced_weights": sliced_weights,
    "ends_of_the_table": ends_of_the_table,
    "one_hot": lambda device: one_hot(device, 1.0, 0),
    "one_hot_turned": lambda device: one_hot(device, -3.0, 1234),
    "cancelling": cancelling,
    "zeros": lambda device: sized(device, 0.0),
    "huge": lambda device: sized(device, 2.0**120),
    "tiny": lambda device: sized(device, 2.0**-110),
}


def exact(case: Case) -> torch.Tensor:
    """The kernel's query before it is rounded to bf16, float32: nothing past the last vector is written, either."""
    rows, heads, _dim = case.q.shape
    vectors = rows * heads
    query = torch.full((vectors + VECTORS, KEY_DIM), POISON, device=case.q.device)
    weights = torch.full((vectors + VECTORS,), POISON, device=case.q.device)
    index_query_kernel[(-(-vectors // VECTORS),)](
        case.q,
        case.weights,
        torch.view_as_real(case.factors),
        case.positions,
        query,
        weights,
        case.weight_scale,
        vectors,
        case.weights.stride(0),
        HEADS=heads,
        VECTORS=VECTORS,
        KEY_DIM=KEY_DIM,
        ROPE_DIM=ROPE_DIM,
        STAGES=7,
        num_warps=WARPS,
    )
    written = (query != POISON).any(dim=1)
    assert bool(written[:vectors].all()), "a vector was not written"
    assert not bool(written[vectors:].any()), "a vector past the last was written"
    assert bool((weights[vectors:] == POISON).all()), "a weight past the last was written"
    return query[:vectors].view(rows, heads, KEY_DIM)


def worst(found: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor) -> float:
    """The largest error as a share of what is allowed; infinite for what is not finite."""
    found = found.double()
    if not bool(found.isfinite().all()):
        return float("inf")
    share = (found - wanted).abs() / allowed
    return float(torch.where(found == wanted, 0.0, share).max())


def errors(name: str, device: str, rounding: float) -> dict[str, float]:
    """Largest error as a share of what is allowed: query before and after it is rounded to bf16, and weights."""
    case = CASES[name](device)
    wanted, wanted_weights = reference_query(*case.arguments)
    size = case.q.double().norm(dim=-1, keepdim=True).expand_as(wanted)
    query, weights = index_query(*case.arguments)
    return {
        "float32": worst(exact(case), wanted, SUMS * size),
        "bf16": worst(query, wanted, rounding * wanted.abs() + SUMS * size),
        "weights": worst(weights, wanted_weights, 2.0**-23 * wanted_weights.abs()),
    }


def score_error(query: list[float], key: list[float], here: int, there: int, device: str) -> float:
    """How far the score of a query at ``here`` and a key at ``there`` is from the one without any transform.

    Both are turned to their positions in float64; the score with the kernel's bf16 query and a transformed key is
    compared with theirs, as a share of the product of their norms.
    """
    q = torch.tensor(query, device=device).bfloat16().view(1, 1, KEY_DIM)
    k = torch.tensor(key, device=device).bfloat16().view(1, 1, KEY_DIM)
    one = torch.ones(1, 1, device=device)
    factors = frequencies(POSITIONS, device)
    found, _weights = index_query(q, one, 1.0, factors, torch.tensor([here], device=device))
    transformed, _weights = reference_query(k, one, 1.0, factors, torch.tensor([there], device=device))
    turned = []
    for vector, position in ((q, here), (k, there)):
        pairs = torch.view_as_complex(vector.double().view(KEY_DIM // 2, 2).contiguous())
        pairs[(KEY_DIM - ROPE_DIM) // 2 :] *= factors[position].to(torch.complex128)
        turned.append(torch.view_as_real(pairs).flatten())
    difference = (found.double() * transformed).sum() - turned[0] @ turned[1]
    size = turned[0].norm() * turned[1].norm()
    return float(difference.abs() / size) if size else float(difference.abs())


def special_values(device: str) -> tuple[list[bool], list[bool]]:
    """Which of three vectors come out finite, and which not a number: infinity is in the first, NaN in the third."""
    case = random(3, 1, device)
    case.q[0, 0, 5] = torch.inf
    case.q[2, 0, 77] = torch.nan
    query, _weights = index_query(*case.arguments)
    return query.isfinite().all(-1).flatten().tolist(), query.isnan().all(-1).flatten().tolist()


def refused(device: str) -> dict[str, str]:
    """What ``index_query`` says to each argument that it cannot take; "taken" where it does not refuse."""
    case = random(4, 16, device)
    wrong = {
        "q of float32": replace(case, q=case.q.float()),
        "q of 64 elements": replace(case, q=case.q[..., :64].contiguous()),
        "q with heads and rows exchanged": replace(case, q=case.q.transpose(0, 1)),
        "weights of one head too few": replace(case, weights=case.weights[:, 1:]),
        "weights transposed": replace(case, weights=case.weights.T.contiguous().T),
        "factors of 16 pairs": replace(case, factors=case.factors[:, :16].contiguous()),
        "factors as real numbers": replace(case, factors=torch.view_as_real(case.factors).flatten(1)),
        "positions of one row too few": replace(case, positions=case.positions[1:]),
        "positions of float32": replace(case, positions=case.positions.float()),
    }
    said = {}
    for name, each in wrong.items():
        try:
            index_query(*each.arguments)
        except ValueError as error:
            said[name] = str(error)
        else:
            said[name] = "taken"
    return said


def shapes_without_rows(device: str) -> tuple[list[int], list[int]]:
    case = random(2, 16, device)
    none = replace(case, q=case.q[:0], weights=case.weights[:0], positions=case.positions[:0])
    query, weights = index_query(*none.arguments)
    return list(query.shape), list(weights.shape)
