# SPDX-License-Identifier: Apache-2.0
"""The patched store of index keys compiles for sm_90 and sm_120, and the patch leaves the other kernels alone.

Needs nvcc, apache-tvm-ffi, Triton (its cuobjdump) and the engine's sources; ``tools/kernels`` brings all of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import index_key_store as store

pytest.importorskip("tvm_ffi")
pytest.importorskip("triton")
if shutil.which("nvcc") is None:
    pytest.skip("nvcc is not on PATH", allow_module_level=True)
if not (ENGINES := store.engines()):
    pytest.skip(f"no SGLang with a known store is here: name its folder in {store.TREES}", allow_module_level=True)

from tests.unit.kernels.compiled import DEVICES, TOOLS, compare, resources

THREADS = 256
"""Threads of a block, ``kBlockSize`` in the source."""
BLOCKS = 8
"""Blocks that the source wants resident, ``__launch_bounds__``."""
EACH_ENGINE = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.version)


def functions(version: str, *, patched: bool) -> dict[str, str]:
    """All that the engine launches of this source: index keys, and the latent of head dimension 512 (pages of 1)."""
    found = {
        "fp8": store.kernel(version, "f32", bf16=False) + "::forward",
        "fp4": store.kernel(version, "f32", bf16=False) + "::forward_fp4",
        "latent_fp8": store.kernel(version, "f32", bf16=False, head_dim=512) + "::forward",
        "latent_bf16": store.kernel(version, "f32", bf16=True, head_dim=512, page=1) + "::forward",
    }
    return found | ({"bf16": store.kernel(version, "f32", bf16=True) + "::forward"} if patched else {})


def compiled(engine: store.Engine, folder: Path, capability: int, *, patched: bool) -> Path:
    """A cubin of all kernels."""
    unit, cubin = folder / f"unit_{patched}.cu", folder / f"unit_{patched}.cubin"
    source = engine.source(folder / str(patched), patched=patched)
    unit.write_text(store.translation_unit(source, functions(engine.version, patched=patched)), encoding="utf-8")
    done = subprocess.run(
        store.nvcc(engine, unit, cubin, capability, "-cubin"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return cubin


def readable(name: str) -> str:
    """``kernel<template arguments>`` of a mangled name: the mode as a word, then numbers in the source's order."""
    kernel, rest = re.findall(r"\d(fused_norm_rope_[a-z0-9_]+?)I(.*)", name)[0]
    mode, *arguments = re.findall(r"L(?:N.*?E|[a-z])(\d+)E", rest)
    return f"{kernel}<{', '.join(['decode' if mode == '1' else 'extend', *arguments])}>"


def machine_code(cubin: Path) -> dict[str, str]:
    """Instructions of each kernel, by its readable name."""
    listing = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"\n\s*Function : (\S+)\n", listing)
    return {readable(name): body for name, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("capability", DEVICES)
@EACH_ENGINE
def test_patched_store_keeps_within_the_device(engine: store.Engine, capability: int, tmp_path: Path) -> None:
    found = resources(compiled(engine, tmp_path, capability, patched=True))
    assert len(found) == 2 * len(functions(engine.version, patched=True)), "extend and decode of each"
    device = DEVICES[capability]
    resident = min(BLOCKS, device.threads // THREADS)
    for name, used in found.items():
        assert used.shared_bytes <= device.shared_bytes
        assert used.stack_bytes == 0, "registers spill"
        assert used.registers * THREADS * resident <= device.registers, "registers keep blocks out"
        compare("nvcc", f"SGLang {engine.version} {readable(name)}, sm_{capability}", used)


@EACH_ENGINE
def test_the_patch_changes_no_other_kernel(engine: store.Engine, tmp_path: Path) -> None:
    """Of what the stock source has, each kernel is the same machine code in the patched one."""
    before, after = (machine_code(compiled(engine, tmp_path, 90, patched=patched)) for patched in (False, True))
    assert len(before) == 8
    assert len(after) == 10
    assert sorted(before.values()) == sorted(body for body in after.values() if body in before.values())
