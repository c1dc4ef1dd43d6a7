# SPDX-License-Identifier: Apache-2.0
"""The index query kernel compiles for sm_90 and sm_120 without a GPU and keeps within what they allow.

Needs Triton, not PyTorch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from llmfleet_kernels.index_query import ROPE_DIM, VECTORS, WARPS, index_query_kernel
from llmfleet_kernels.logits_tile import KEY_DIM

from tests.unit.kernels.compiled import DEVICES, Resources, build, compare, resources

HEADS = 64
BLOCKS = 32
"""Blocks that a multiprocessor of sm_90 has resident at most; one of sm_120 has 24."""


@functools.cache
def compile_query(capability: int, positions: str = "*i64") -> Any:
    """The kernel as ``index_query`` launches it, for a device of this compute capability."""
    constants = {"HEADS": HEADS, "VECTORS": VECTORS, "KEY_DIM": KEY_DIM, "ROPE_DIM": ROPE_DIM, "STAGES": 7}
    types = {
        "q": "*bf16",
        "weights": "*bf16",
        "factors": "*fp32",
        "positions": positions,
        "query": "*bf16",
        "scaled_weights": "*fp32",
        "weight_scale": "fp32",
    }
    # The other pointers are not specialised on.
    aligned = ("q", "factors", "query", "scaled_weights")
    return build(index_query_kernel, capability, types, constants, aligned, WARPS)


@pytest.mark.parametrize("positions", ["*i32", "*i64"])
@pytest.mark.parametrize("capability", DEVICES)
def test_kernel_keeps_within_the_device(capability: int, positions: str, tmp_path: Path) -> None:
    device = DEVICES[capability]
    kernel = compile_query(capability, positions)
    cubin = tmp_path / "index_query.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    ((_, machine_code),) = resources(cubin).items()
    used = Resources(kernel.metadata.shared, machine_code.registers, machine_code.stack_bytes)
    assert used.shared_bytes * BLOCKS <= device.shared_bytes
    assert used.stack_bytes == 0, "registers spill"
    assert used.registers * 32 * WARPS * BLOCKS <= device.registers, "registers keep programs out"
    compare("triton", f"index query, {positions[1:]} positions, sm_{capability}", used)


@pytest.mark.parametrize("capability", DEVICES)
def test_vectors_are_read_and_written_whole_and_rounded(capability: int) -> None:
    """16 bytes at once, and bf16 is the nearest: neither is seen in the interpreter."""
    ptx = compile_query(capability).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "cvt.rn.bf16x2.f32" in ptx
    assert "cvt.rz.bf16" not in ptx
