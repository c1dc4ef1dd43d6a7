# SPDX-License-Identifier: Apache-2.0
"""SGLang's store of index keys (``fused_norm_rope_v2.cuh``), stock and patched, compiled outside the engine.

The sources come from unpacked or installed releases of SGLang, never from this repository: ``LLMFLEET_ENGINE_TREES``
names the folders that hold the package ``sglang`` (separated by colons); without it the SGLang that Python would import
is taken, if any. Which version a folder holds is known by the digest of the file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.llmfleet.sglang.plugins.module_utils import _patch

TREES = "LLMFLEET_ENGINE_TREES"
ENGINE_FILES = Path(__file__).parents[1] / "files" / "engine"
PATCH = "fused_norm_rope_v2.patch"
PAGE = 64
"""Keys in a page of the indexer's pool."""
DTYPES = {"f32": "fp32_t", "bf16": "bf16_t"}
"""Types of the compressor's output; the engine has float32."""
# Template arguments of FusedNormRopeKernel, in each version's order; the last word but layout is whether programmatic
# dependent launch is on, which it is from sm_90.
ARGUMENTS = {
    "0.5.16": "{dtype}, {head_dim}, 64, {page}, true, {bf16}",
    "0.5.23": "{dtype}, {head_dim}, 64, {page}, 0, {bf16}, V4, true",
}
# As SGLang's loader compiles it (jit_kernel/utils, kernels/jit/utils).
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr"]


@dataclass(frozen=True, eq=False)
class Engine:
    """A folder that holds SGLang, with this version's patch of the store."""

    version: str
    root: Path
    entry: Mapping[str, str]
    patch: str

    @property
    def include(self) -> Path:
        """Headers beside the kernels, which are in ``csrc/deepseek_v4``."""
        return (self.root / self.entry["file"]).parents[2] / "include"

    def source(self, folder: Path, *, patched: bool) -> Path:
        """Write the store's source into a folder, with or without the patch, whichever the engine has."""
        target = folder / self.entry["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / self.entry["file"], target)
        (_patch.apply if patched else _patch.revert)(str(folder), self.entry, self.patch)
        return target


def patches() -> dict[str, tuple[Mapping[str, str], str]]:
    """Entry of the manifest and text of the patch, by version of SGLang."""
    found = {}
    for manifest in sorted(ENGINE_FILES.glob("*/manifest.json")):
        for entry in json.loads(manifest.read_text(encoding="utf-8"))["patches"]:
            if entry["patch"] == PATCH:
                found[manifest.parent.name] = (entry, (manifest.parent / PATCH).read_text(encoding="utf-8"))
    return found


def engines() -> list[Engine]:
    """Every SGLang there is here whose store is known, with or without the patch."""
    if names := os.environ.get(TREES):
        roots = [Path(name) for name in names.split(os.pathsep)]
    else:
        spec = importlib.util.find_spec("sglang")
        roots = [Path(spec.origin).parents[1]] if spec and spec.origin else []
    return [
        Engine(version, root, entry, patch)
        for root in roots
        for version, (entry, patch) in patches().items()
        if _patch.state(str(root), entry) in (_patch.BEFORE, _patch.AFTER)
    ]


def kernel(version: str, dtype: str, *, bf16: bool, head_dim: int = 128, page: int = PAGE) -> str:
    """The C++ class that stores inputs of a type (a key of ``DTYPES``) as bf16 or as fp8."""
    arguments = ARGUMENTS[version].format(
        dtype=DTYPES[dtype], head_dim=head_dim, page=page, bf16="true" if bf16 else "false"
    )
    return f"FusedNormRopeKernel<{arguments}>"


def translation_unit(source: Path, functions: Mapping[str, str]) -> str:
    """A .cu file that exports functions (name: ``Class<...>::function``) of the store's source for apache-tvm-ffi."""
    # 0.5.16 keeps its kernels in a namespace without a name, 0.5.23 in sglang: the lines hold for both.
    lines = [f'#include "{source}"', "namespace sglang {}", "using namespace sglang;"]
    for name, qualified in functions.items():
        kind, _, function = qualified.rpartition("::")
        lines.append(f"using Kernel_{name} = {kind};")  # a macro's argument must not have a comma
        lines.append(f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, Kernel_{name}::{function});")
    return "\n".join([*lines, ""])


def exports(version: str, *, patched: bool) -> dict[str, str]:
    """Functions to compile from one source: the stores of index keys for each type of input."""
    formats = {"fp8": False, "bf16": True} if patched else {"fp8": False}
    return {
        f"{name}_{dtype}": f"{kernel(version, dtype, bf16=bf16)}::forward"
        for dtype in DTYPES
        for name, bf16 in formats.items()
    }


def nvcc(engine: Engine, unit: Path, output: Path, capability: int, *options: str) -> list[str]:
    """Command line that compiles a unit for one compute capability (90, 120) as the engine does."""
    import tvm_ffi.libinfo

    target = f"-gencode=arch=compute_{capability}a,code=sm_{capability}a"
    headers = [f"-I{engine.include}", *(f"-I{path}" for path in tvm_ffi.libinfo.include_paths())]
    return ["nvcc", *FLAGS, target, f"-DSGL_CUDA_ARCH={capability}0", *headers, *options, "-o", str(output), str(unit)]


def shared_library(engine: Engine, kept: str, matter: object, text: Callable[[Path], str], capability: int) -> Path:
    """Shared library of the .cu file whose text is made for the folder it is built in; built once and kept in
    ``LLMFLEET_CACHE/<kept>`` under the digest of all that matters."""
    import tvm_ffi.libinfo

    cache = Path(os.environ.get("LLMFLEET_CACHE") or Path.home() / ".cache" / "llmfleet") / kept
    built = cache / f"{hashlib.sha256(repr((matter, FLAGS, capability)).encode()).hexdigest()[:16]}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            unit = Path(name) / "unit.cu"
            unit.write_text(text(unit.parent), encoding="utf-8")
            link = ["-shared", "-Xcompiler=-fPIC", f"-L{Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"]
            subprocess.run(nvcc(engine, unit, unit.with_suffix(".so"), capability, *link), check=True)
            unit.with_suffix(".so").replace(built)
    return built


@functools.cache
def library(engine: Engine, *, patched: bool, capability: int = 90) -> Path:
    """Shared library with ``exports``."""
    functions = exports(engine.version, patched=patched)

    def text(folder: Path) -> str:
        return translation_unit(engine.source(folder, patched=patched), functions)

    matter = (engine.entry["after" if patched else "before"], sorted(functions.items()))
    return shared_library(engine, "index_key_store", matter, text, capability)
