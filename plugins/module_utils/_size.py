# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory: text to bytes and back, shares of a whole. PRIVATE to the collection.

Everything inside the collection counts whole bytes. GiB is 1024^3 bytes and GB is 10^9: the kernel counts in the first,
SGLang's ``--hicache-size`` and its log lines in the second, and 300 of the one are 22 GB more than 300 of the other. So
a bare number is refused, and whatever is printed names its unit.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

KIB, MIB, GIB, TIB = (1024**power for power in (1, 2, 3, 4))
UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}
# More than any machine has; a typing error such as 300000GiB is told as one.
LARGEST = 2**60


def parse_size(value: Any, what: str, zero: bool = False) -> int:
    """``"300GiB"`` -> bytes. 0 needs no unit and is accepted where ``zero`` says so.

    Raises RefusalError for anything else than a positive number and a unit, and for more than 1 EiB.
    """
    least = "0, or a number" if zero else "a number above 0"
    expected = f"{least} and a unit, such as 300GiB (units: {', '.join(UNITS)})"

    def refused(found: str) -> RefusalError:
        return RefusalError("size", f"{what} is {found}", expected, f"write {what} as a number with its unit")

    if zero and value in (0, "0") and not isinstance(value, bool):
        return 0
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise refused(repr(value))
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2] not in UNITS:
        raise refused(f"{value!r}, which has no unit" if match and not match[2] else repr(value))
    whole, _point, part = match[1].partition(".")
    # Exact where a float would not be: 0.1GB is 100000000 bytes.
    size: int = int(whole + part) * UNITS[match[2]] // 10 ** len(part)
    if size == 0 and not zero:
        raise refused(f"{value!r}, which is nothing")
    if size > LARGEST:
        raise refused(f"{value!r}, which is more than 1 EiB")
    return size


def parse_share(value: Any, what: str, zero: bool = False) -> float:
    """A share of a whole: above 0 (or from 0 on, where ``zero`` says so) and at most 1. Raises RefusalError."""
    number = parse_number(value, what)
    if number > 1 or number < 0 or (number == 0 and not zero):
        raise RefusalError(
            "share",
            f"{what} is {value!r}",
            f"a number {'from 0' if zero else 'above 0'} to 1",
            f"write {what} as a share of the whole: 0.6 for sixty per cent",
        )
    return number


def parse_number(value: Any, what: str) -> float:
    """A finite number that is written as one: text is refused, since "2,0" and "2x" are text too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RefusalError(
            "number", f"{what} is {value!r}", "a number without quotes", f"write {what} as a number, such as 2.0"
        )
    return float(value)


def show(size: int) -> str:
    """Bytes for a person: ``150.0 GB``."""
    for unit in ("TB", "GB", "MB"):
        if abs(size) >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size} B"


def show_binary(size: int) -> str:
    """Bytes in the kernel's units, whole: ``2 MiB``, for page sizes."""
    unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB", "B") if size % UNITS[unit] == 0)
    return f"{size // UNITS[unit]} {unit}"


def show_both(size: int) -> str:
    """``150.0 GB (139.7 GiB)``: what an operator asked in, and what the kernel counts in."""
    return f"{show(size)} ({size / GIB:.1f} GiB)"
