# SPDX-License-Identifier: Apache-2.0
"""The indexer logits kernel compiles for sm_90 and sm_120 without a GPU and keeps within what they allow.

Needs Triton, not PyTorch.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from llmfleet_kernels.logits import paged_logits_kernel
from llmfleet_kernels.logits_tile import (
    BF16,
    FP8,
    KEY_DIM,
    PAGE,
    PLANNED_ROWS,
    WARPS,
    KeyFormat,
    choose_tile,
)

from tests.unit.kernels.compiled import DEVICES, Resources, build, compare, resources

HEADS = 64
TYPES = {"bf16": "*bf16", "fp8": "*fp8e4nv"}


@functools.cache
def compile_logits(capability: int, keys: KeyFormat, query: KeyFormat, stages: int, planned_rows: int = 256) -> Any:
    """The kernel as ``paged_logits`` launches it, for a device of this compute capability."""
    constants = {
        "PLANNED_ROWS": planned_rows,
        "HEADS": HEADS,
        "KEY_DIM": KEY_DIM,
        "PAGE": PAGE,
        "PAGE_ELEMENTS": keys.page_bytes // keys.element_bytes,
        "SCALED": keys == FP8,
        "STAGES": stages,
    }
    pointers = {
        "q": TYPES[query.name],
        "keys": TYPES[keys.name],
        "scales": "*fp32",
        "weights": "*fp32",
        "lengths": "*i32",
        "page_table": "*i32",
        "logits": "*fp32",
    }
    # The other pointers are not specialised on.
    aligned = ("q", "keys", "scales", "weights")
    return build(paged_logits_kernel, capability, pointers, constants, aligned, WARPS)


@pytest.mark.parametrize("planned_rows", [0, *PLANNED_ROWS])
@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(("keys", "query"), [(BF16, BF16), (BF16, FP8), (FP8, FP8)], ids=lambda kind: kind.name)
def test_kernel_keeps_within_the_device(
    capability: int, keys: KeyFormat, query: KeyFormat, planned_rows: int, tmp_path: Path
) -> None:
    device = DEVICES[capability]
    tile = choose_tile(keys, HEADS, device.shared_bytes)
    kernel = compile_logits(capability, keys, query, tile.stages, planned_rows)
    cubin = tmp_path / "logits.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    ((_, machine_code),) = resources(cubin).items()
    used = Resources(kernel.metadata.shared, machine_code.registers, machine_code.stack_bytes)
    assert used.shared_bytes <= tile.shared_bytes <= device.shared_bytes
    assert used.stack_bytes == 0, "registers spill"
    # With one program a row, the rest of the rows wait for their turn whatever the number of resident programs.
    resident = tile.programs if planned_rows else 1
    assert used.registers * 32 * WARPS * resident <= device.registers, "registers keep programs out"
    name = f"logits, {keys.name} keys, {query.name} query, {planned_rows} planned rows, sm_{capability}"
    compare("triton", name, used)


@pytest.mark.parametrize("keys", [BF16, FP8], ids=lambda kind: kind.name)
def test_pipeline_has_the_buffers_it_is_asked_for(keys: KeyFormat) -> None:
    """One more buffer takes one more page of shared memory: the page table's indirection takes two stages each."""
    sizes = [compile_logits(90, keys, keys, 2 * buffers).metadata.shared for buffers in (3, 4, 5)]
    steps = {after - before for before, after in itertools.pairwise(sizes)}
    assert steps == {keys.page_bytes + 4}, sizes


def test_matrix_units_do_the_products() -> None:
    for keys in (BF16, FP8):
        assert "wgmma.mma_async" in compile_logits(90, keys, keys, 8).asm["ptx"]
        assert "mma.sync.aligned" in compile_logits(120, keys, keys, 8).asm["ptx"]
