# SPDX-License-Identifier: Apache-2.0
"""What compiled kernels take of a GPU: read off the machine code, held to limits and to what was recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

RECORD = Path(__file__).parents[3] / "docs" / "benchmarks" / "compile.json"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Device:
    """Limits of a compute capability (CUDA programming guide, technical specifications per compute capability)."""

    shared_bytes: int
    """Shared memory that a block may have."""
    threads: int
    """Threads that are resident in a multiprocessor."""
    registers: int = 65_536
    """Registers of a multiprocessor."""


DEVICES = {90: Device(232_448, 2048), 120: Device(101_376, 1536)}


@dataclass(frozen=True)
class Resources:
    """``shared_bytes`` of a block, ``registers`` and ``stack_bytes`` (with what registers spill) of a thread."""

    shared_bytes: int
    registers: int
    stack_bytes: int


def build(
    kernel: Any,
    capability: int,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    aligned: Iterable[str],
    warps: int,
) -> Any:
    """A kernel of Triton for a device of this compute capability, as its launcher would build it.

    ``types`` are those of its arguments by name, int32 where it has none; ``aligned`` are the arguments of which the
    launcher sees that they are multiples of 16.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def resources(cubin: Path) -> dict[str, Resources]:
    """What each kernel of a cubin takes, by mangled name; shared memory that is asked for at a launch is not in it."""
    report = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = re.findall(r"Function (\S+?):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report.stdout)
    assert found, report.stdout
    return {
        name: Resources(int(shared), int(reg), int(stack) + int(local)) for name, reg, stack, shared, local in found
    }


def compare(compiler: str, name: str, used: Resources) -> None:
    """Hold a kernel to what ``docs/benchmarks/compile.json`` says of it, where its compiler has the recorded version.

    With ``LLMFLEET_COMPILE_RECORD`` (``tools/kernels --record``) write it into that folder instead.
    """
    if folder := os.environ.get("LLMFLEET_COMPILE_RECORD"):
        file = Path(folder) / f"{re.sub('[^a-z0-9]+', '-', name)}.json"
        assert not file.exists(), f"two kernels are called {name}"
        file.write_text(json.dumps({name: asdict(used)}), encoding="utf-8")
        return
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    package = {"triton": "triton", "nvcc": "nvidia-cuda-nvcc"}[compiler]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    if version == recorded["compilers"][compiler]:
        assert recorded["kernels"].get(name) == asdict(used), f"{name} changed: see it, then tools/kernels --record"
