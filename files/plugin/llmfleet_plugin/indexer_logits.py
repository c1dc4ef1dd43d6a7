# SPDX-License-Identifier: Apache-2.0
"""Logits of the DeepSeek-V4 indexer from the kernel in ``llmfleet_kernels.logits``, in prefill and in decode.

For each call the engine takes one of several functions, by environment variables that it reads anew every time. One of
them, its PyTorch fallback, is called with just what the kernel needs, and choosing it also turns off what goes past
the paged logits: the prefill path that gathers the keys of one request, and DeepGEMM's schedule. So the fallback is
chosen, after the engine has set its own defaults for the device, and the kernel stands in its place.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmfleet_plugin._feature import Context, Feature, FeatureError
from llmfleet_plugin._hooks import Hooks, check_targets

if TYPE_CHECKING:
    import torch

_INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
_METADATA = "sglang.srt.layers.attention.dsv4.metadata"
_FALLBACK = "(q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, clean_logits=)"
_FALLBACKS = {
    f"{_INDEXER}.fp8_paged_mqa_logits_torch": _FALLBACK,
    f"{_INDEXER}.fp8_paged_mqa_logits_torch_sm120": _FALLBACK,
}
HOOKS = {
    "0.5.16": {
        **_FALLBACKS,
        f"{_INDEXER}.C4Indexer.__init__": (
            "(self, config, layer_id, freqs_cis, quant_config=, prefix=, alt_streams=, rotary_emb=)"
        ),
    },
    "0.5.23": {
        **_FALLBACKS,
        f"{_INDEXER}.C4Indexer.__init__": (
            "(self, config, layer_id, freqs_cis, quant_config=, prefix=, alt_streams=, rotary_emb=, fp4_cos=, fp4_sin=)"
        ),
        f"{_METADATA}.PagedIndexerMetadata.__post_init__": "(self)",
    },
}
#: What the hooks call without hooking it, by version.
CALLS: Mapping[str, Mapping[str, str]] = {
    "0.5.16": {},
    "0.5.23": {
        f"{_METADATA}.plan_indexer_row_chunks": "(*, num_rows, num_cols, budget_bytes, sm120_row_cap)",
        f"{_METADATA}.PagedIndexerMetadata._mqa_logits_budget": "(self, *, num_rows)",
    },
}
#: The engine's switches, tested in this order, that choose the fallback.
SWITCHES = {
    "SGLANG_OPT_USE_TILELANG_INDEXER": False,
    "SGLANG_OPT_USE_AITER_INDEXER": False,
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": True,
}


def refuse_other_kernels(environment: Mapping[str, str]) -> None:
    """Raise FeatureError where the operator's environment asks for another kernel of the indexer."""
    for name, value in SWITCHES.items():
        if not value and environment.get(name, "").lower() in ("1", "true", "y", "yes"):
            raise FeatureError(
                f"{name} is {environment[name]} and indexer_logits is triton; expected one kernel for the indexer; "
                "unset the variable or turn indexer_logits off"
            )


def whole_pages(view: torch.Tensor) -> torch.Tensor:
    """[pages, bytes of a page], the pool behind a view of it, whatever the view shows of each page."""
    return view.as_strided((view.shape[0], view.stride(0)), (view.stride(0), 1))


def install(context: Context, hooks: Hooks) -> dict[str, Any]:
    from llmfleet_kernels.logits import paged_logits

    # Only here is the environment the operator's: the engine puts its own defaults into that of the schedulers.
    if multiprocessing.parent_process() is None:
        refuse_other_kernels(os.environ)
    check_targets(CALLS[context.version])

    def logits(
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        lengths: torch.Tensor,
        page_table: torch.Tensor,
        _schedule: Any,
        max_len: int,
        _clean: bool,
    ) -> torch.Tensor:
        return paged_logits(q.squeeze(1), whole_pages(keys), weights, lengths.reshape(-1), page_table, max_len)

    for target in _FALLBACKS:
        hooks.replace(target, logits)
    hooks.after(f"{_INDEXER}.C4Indexer.__init__", _choose_fallback)
    if context.version == "0.5.23":
        hooks.after(f"{_METADATA}.PagedIndexerMetadata.__post_init__", _split_rows)
    return {"kernel": "llmfleet_kernels.logits"}


def _choose_fallback(_result: None, indexer: Any, *_args: Any, **_kwargs: Any) -> None:
    """When an indexer has been made, at start, refuse what the kernel cannot do and set the switches."""
    from sglang.srt.environ import envs
    from sglang.srt.utils import is_cuda

    if not is_cuda():
        raise FeatureError("indexer_logits is triton on a device without CUDA; expected CUDA; turn indexer_logits off")
    if indexer.use_fp4_indexer:
        raise FeatureError(
            "--enable-deepseek-v4-fp4-indexer is given and indexer_logits is triton; expected fp8 or bf16 index keys; "
            "leave the flag out or turn indexer_logits off"
        )
    for name, value in SWITCHES.items():
        getattr(envs, name).set(value)


def _split_rows(_result: None, metadata: Any) -> None:
    """Keep the engine's bound on the memory of the logits of a long prefill, which goes with DeepGEMM's schedule."""
    from sglang.srt.layers.attention.dsv4.metadata import plan_indexer_row_chunks

    if metadata.deep_gemm_metadata is not None:
        return
    rows = metadata.compressed_seq_lens.shape[0]
    metadata.rows_per_chunk = plan_indexer_row_chunks(
        num_rows=rows,
        num_cols=metadata.max_compressed_seq_len,
        budget_bytes=metadata._mqa_logits_budget(num_rows=rows),
        sm120_row_cap=None,
    )
    if metadata.rows_per_chunk is not None:
        metadata.deep_gemm_metadata = [None] * -(-rows // metadata.rows_per_chunk)


FEATURE = Feature(
    name="indexer_logits",
    variable="LLMFLEET_INDEXER_LOGITS",
    values=("triton",),
    hooks=HOOKS,
    install=install,
)
