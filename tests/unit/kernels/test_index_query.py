# SPDX-License-Identifier: Apache-2.0
"""The index query kernel against its float64 reference, in Triton's interpreter on the CPU.

The interpreter cuts float32 off where it makes bf16 of it; hence twice the error of rounding. That the machine code
rounds is seen in ``test_compile_index_query``, and measured in ``tests/gpu``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests import index_query as cases

CUT_OFF = 2 * cases.ROUNDING
VALUES = st.lists(st.floats(-(2.0**30), 2.0**30, width=32), min_size=128, max_size=128)
POSITION = st.integers(0, cases.POSITIONS - 1)

Interpret = Callable[..., Any]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    """Runs a function in a process whose Triton interprets its kernels, which is settled when it is imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(cases.shapes_without_rows, "cpu").result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.mark.parametrize("name", cases.CASES)
def test_parity(interpret: Interpret, name: str) -> None:
    found = interpret(cases.errors, name, "cpu", CUT_OFF)
    assert set(found) == {"float32", "bf16", "weights"}
    assert max(found.values()) <= 1, found


@settings(max_examples=40, deadline=None)
@given(query=VALUES, key=VALUES, here=POSITION, there=POSITION)
def test_the_transform_changes_no_score(
    interpret: Interpret, query: list[float], key: list[float], here: int, there: int
) -> None:
    assert interpret(cases.score_error, query, key, here, there, "cpu") <= CUT_OFF


def test_what_is_not_finite_stays_in_its_vector(interpret: Interpret) -> None:
    finite, not_a_number = interpret(cases.special_values, "cpu")
    assert finite == [False, True, False]
    assert not_a_number[2]


def test_wrong_arguments_are_refused(interpret: Interpret) -> None:
    said = interpret(cases.refused, "cpu")
    assert len(said) == 9
    for name, message in said.items():
        assert re.match(rf"{name.split()[0]} is \[.*, expected \[.*contiguous", message), (name, message)


def test_no_rows(interpret: Interpret) -> None:
    assert interpret(cases.shapes_without_rows, "cpu") == ([0, 16, 128], [0, 16])
