# SPDX-License-Identifier: Apache-2.0
"""The sparse-MLA kernels build for every GPU they are meant for, within its shared memory; no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from llmfleet_kernels.sparse_mla import _attend, _merge, choose_splits, choose_tile

from tests.unit.kernels.compiled import DEVICES, Resources, build, compare, resources

POINTERS = {
    "query": "*bf16",
    "window": "*u8",
    "window_indices": "*i32",
    "window_lengths": "*i32",
    "compressed": "*u8",
    "compressed_indices": "*i32",
    "compressed_lengths": "*i32",
    "sink": "*fp32",
    "partial": "*fp32",
    "maximum": "*fp32",
    "total": "*fp32",
    "output": "*bf16",
}


def build_aligned(kernel: Any, capability: int, constants: dict[str, int], *, warps: int) -> Any:
    """Return `kernel` compiled with the given constants; every pointer and stride of the query is a multiple of 16."""
    arguments = [name for name in kernel.arg_names if name not in constants]
    aligned = [name for name in arguments if name in POINTERS or name.startswith("query_")]
    return build(kernel, capability, {**POINTERS, "scale_log2": "fp32"}, constants, aligned, warps)


def measure(built: Any, folder: Path) -> Resources:
    """Return what a compiled kernel takes."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    ((_, machine_code),) = resources(cubin).items()
    return Resources(built.metadata.shared, machine_code.registers, machine_code.stack_bytes)


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("split", [False, True])
def test_attend(capability: int, heads: int, split: bool, tmp_path: Path) -> None:
    tile = choose_tile(heads, DEVICES[capability].shared_bytes)
    constants = {
        "WINDOW_PAGE_SLOTS": 256,
        "WINDOW_PAGE_BYTES": 149_760,
        "COMPRESSED_PAGE_SLOTS": 64,
        "COMPRESSED_PAGE_BYTES": 37_440,
        "HEADS": tile.heads,
        "SLOTS": tile.slots,
        "SPLIT": split,
        "STAGES": tile.stages,
    }
    built = build_aligned(_attend, capability, constants, warps=tile.warps)
    used = measure(built, tmp_path)
    assert used.shared_bytes <= DEVICES[capability].shared_bytes
    assert used.registers * 32 * tile.warps <= DEVICES[capability].registers
    # 64 heads take all 255 registers; what does not fit beside them differs between versions of Triton.
    assert used.stack_bytes == 0 or tile.heads == 64, "registers spill"
    instruction = "wgmma.mma_async" if capability == 90 and heads == 64 else "mma.sync"
    assert instruction in built.asm["ptx"], "on tensor cores"
    compare("triton", f"sparse MLA, {heads} heads, {'split' if split else 'whole'}, sm_{capability}", used)


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("columns", [128, 512])
def test_merge(capability: int, columns: int, tmp_path: Path) -> None:
    built = build_aligned(_merge, capability, {"SPLITS": 16, "COLUMNS": columns}, warps=columns // 128)
    used = measure(built, tmp_path)
    assert used.shared_bytes <= DEVICES[capability].shared_bytes
    assert used.stack_bytes == 0
    compare("triton", f"sparse MLA merge, {columns} columns, sm_{capability}", used)


@pytest.mark.parametrize("shared_bytes", [device.shared_bytes for device in DEVICES.values()])
@pytest.mark.parametrize(("heads", "block"), [(1, 16), (8, 16), (16, 16), (32, 32)])
def test_a_tile_holds_all_heads_up_to_32(shared_bytes: int, heads: int, block: int) -> None:
    assert choose_tile(heads, shared_bytes).heads == block


def test_a_tile_holds_64_heads_where_shared_memory_allows() -> None:
    assert choose_tile(64, DEVICES[90].shared_bytes).heads == 64
    assert choose_tile(128, DEVICES[90].shared_bytes).heads == 64


def test_splits_fill_the_card_and_no_more() -> None:
    tile = choose_tile(64, DEVICES[90].shared_bytes)
    most = -(-640 // tile.slots)
    assert choose_splits(1, 640, tile, 132) == most, "no program without a tile"
    assert choose_splits(64, 640, tile, 132) == 2, "as many as run at once"
    assert choose_splits(200, 640, tile, 132) == 1
