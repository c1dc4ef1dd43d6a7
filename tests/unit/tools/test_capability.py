# SPDX-License-Identifier: Apache-2.0
"""The page of back-ends and GPUs is what its table says."""

from __future__ import annotations

from tools import capability


def test_the_page_is_up_to_date() -> None:
    assert capability.PATH.read_text() == capability.text(), "run: python -m tools.capability"


def test_a_row_tells_marks_and_reasons() -> None:
    assert capability.row("0.5.16", "prefill_attention", "cutlass_mla") == (
        "| `cutlass_mla` | no | yes | no | no | no "
        "| its kernel is made for 10.0, and was wrong on 10.3 (sglang#10058) |\n"
    )
    assert capability.row("0.5.23", "moe_runner", "marlin") == (
        "| `marlin` | yes | yes | yes | yes | yes | MXFP4 experts on 9.0, 12.0, 12.1 only: "
        "Marlin takes MXFP4 experts on 9.0 and 12.x only (quantization/mxfp4_marlin_moe.py) |\n"
    )
