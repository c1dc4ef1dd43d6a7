# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory: read exactly, refused without a unit, shown with one."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _size
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("300GiB", 322_122_547_200),
        ("300GB", 300_000_000_000),
        (" 1.5 TiB ", 1_649_267_441_664),
        ("0.1GB", 100_000_000),
        ("512 kB", 512_000),
        ("512KiB", 524_288),
        ("7B", 7),
    ],
)
def test_an_amount_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert _size.parse_size(text, "it") == size


@pytest.mark.parametrize(
    "value", ["300", "300 gigs", "300gib", "300G", "GiB", "", "-1GiB", "1,5GiB", "0x10GiB", True, None, [], 300]
)
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RefusalError, match="plan_hicache is") as caught:
        _size.parse_size(value, "plan_hicache")
    assert caught.value.expected.startswith("a number above 0 and a unit")


def test_nothing_needs_no_unit_where_it_is_allowed() -> None:
    assert [_size.parse_size(value, "it", zero=True) for value in (0, "0", "0GiB", "0.0MB")] == [0, 0, 0, 0]
    with pytest.raises(RefusalError, match="which is nothing"):
        _size.parse_size("0GiB", "it")
    with pytest.raises(RefusalError, match="which has no unit"):
        _size.parse_size("1", "it", zero=True)


@given(st.integers(1, 10**9), st.sampled_from(sorted(_size.UNITS)))
def test_whole_amounts_are_exact(number: int, unit: str) -> None:
    size = number * _size.UNITS[unit]
    if size > _size.LARGEST:
        with pytest.raises(RefusalError, match="more than 1 EiB"):
            _size.parse_size(f"{number}{unit}", "it")
    else:
        assert _size.parse_size(f"{number}{unit}", "it") == size


@given(st.integers(0, 2**60))
def test_what_is_shown_names_its_unit(size: int) -> None:
    number, unit = _size.show(size).split()
    assert abs(float(number) * _size.UNITS[unit] - size) <= _size.UNITS[unit] / 20
    assert _size.show_both(size).startswith(f"{number} {unit} (")
    assert int(_size.show_binary(size).split()[0]) * _size.UNITS[_size.show_binary(size).split()[1]] == size


@pytest.mark.parametrize("value", [0, -0.1, 1.01, "0.5", True, float("nan"), float("inf"), None])
def test_a_share_is_above_0_and_at_most_1(value: Any) -> None:
    with pytest.raises(RefusalError):
        _size.parse_share(value, "it")
    assert _size.parse_share(0, "it", zero=True) == 0
    assert _size.parse_share(1, "it") == 1
