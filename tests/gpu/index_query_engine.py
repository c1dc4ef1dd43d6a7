# SPDX-License-Identifier: Apache-2.0
"""SGLang's fp8 kernel for index queries (``main_norm_rope.cuh``), compiled outside the engine for the visible GPU."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from tests import index_key_store as store
from tests.index_query import Case

# The second argument is programmatic dependent launch, which the engine has on from sm_90.
FUNCTION = {"query": "FusedQIndexerRopeHadamardQuantKernel<bf16_t, true>::forward"}


def library(engine: store.Engine, capability: int) -> Path:
    """Shared library with the kernel as ``query``."""
    source = (engine.root / engine.entry["file"]).with_name("main_norm_rope.cuh")
    matter = (hashlib.sha256(source.read_bytes()).hexdigest(), engine.version, FUNCTION)
    text = store.translation_unit(source, FUNCTION)
    return store.shared_library(engine, "index_query", matter, lambda _folder: text, capability)


@functools.cache
def module(engine: store.Engine) -> Any:
    """The library, loaded."""
    major, minor = torch.cuda.get_device_capability()
    return tvm_ffi.load_module(str(library(engine, 10 * major + minor)))


def engine_query(engine: store.Engine, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's query [rows, heads, 128] fp8 and its weights [rows, heads] float32, which have the scale of fp8."""
    query = torch.empty(case.q.shape, dtype=torch.float8_e4m3fn, device=case.q.device)
    weights = torch.empty(*case.q.shape[:2], 1, dtype=torch.float32, device=case.q.device)
    table = torch.view_as_real(case.factors).flatten(1)
    module(engine)["query"](case.q, query, case.weights, weights, case.weight_scale, table, case.positions)
    return query, weights.squeeze(-1)
