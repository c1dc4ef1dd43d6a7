# SPDX-License-Identifier: Apache-2.0
"""Index keys of DeepSeek-V4 stored as bf16: 256 bytes a key instead of 132, from the store to every peer.

A page of the pool holds 64 keys. The patched ``fused_norm_rope_v2.cuh`` stores them, ``indexer_logits`` reads them; the
hooks here see to it that pool and budget count them, that prefill and decode with unlike keys refuse each other at
their handshake, and that HiCache copies whole pages only. What would mix them with fp8 keys is refused: flags at start,
a storage of HiCache also when it is attached to a running server.

Without ``index_queries`` the query stays fp8: its scale is in the weights, and the logits kernel widens it without
loss.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfleet_plugin._feature import Context, Feature, FeatureError
from llmfleet_plugin._hooks import Hooks
from llmfleet_plugin.indexer_logits import whole_pages

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("llmfleet")

#: A key is 128 values: bf16, or fp8 and a float32 scale. The engine is built for keys of this length alone.
KEY_BYTES, FP8_KEY_BYTES = 256, 132
PAGE_KEYS = 64
#: How peers name these keys.
LAYOUT = "index_keys:bf16"
#: The patched source of the store, by version: its path in the package and its SHA-256, as in files/engine/.
PATCHED = {
    "0.5.16": (
        "jit_kernel/csrc/deepseek_v4/fused_norm_rope_v2.cuh",
        "656beb545b6e41aecfca2378da14453fb5223282bd43de61a492acdf98cd8df4",
    ),
    "0.5.23": (
        "kernels/jit/csrc/deepseek_v4/fused_norm_rope_v2.cuh",
        "97930cafc5440ad184de90d281bbcc54568adfe80abdd688c824ff1a3187c112",
    ),
}
#: Flags that cannot be had with these keys, and why.
REFUSED_FLAGS = {
    "enable_deepseek_v4_fp4_indexer": "it stores index keys as fp4",
    "enable_hisparse": "it copies single fp8 keys with their scales",
    "hicache_storage_backend": "not every storage tells pages of bf16 keys from those of fp8 keys",
    "enable_lmcache": "its storage does not tell pages of bf16 keys from those of fp8 keys",
    "enable_unified_cache_external_linker": "its storage does not tell pages of bf16 keys from those of fp8 keys",
}

_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_BUDGET = "sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator._get_bytes_per_full_token"
_STORE = "sglang.srt.layers.attention.dsv4.compressor_v2.CompressorBackendMixin._forward_compress_all_in_one"
_STORE_ARGUMENTS = (
    "self, *, kv_score_buffer, kv_score_input, ape, head_dim, norm, freqs_cis_cache, kv_cache, is_indexer, rotate, "
    "compress_ratio, page_size, out_loc, use_fp4_indexer=, bf16_store="
)
_PEER = "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__"
_REGIONS = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler._dsv4_indexer_regions"
#: What a scheduler does when an operator attaches a storage to HiCache (``PUT /hicache/storage-backend``).
_ATTACH = "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped"
_COMMON = {
    _ATTACH: "(self, recv_req)",
    f"{_POOL}.DeepSeekV4IndexerPool._create_buffer": "(self)",
    f"{_POOL}.DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer": "(self, layer_id)",
}
HOOKS = {
    "0.5.16": {
        **_COMMON,
        f"{_POOL}.DeepSeekV4IndexerPool.get_bytes_per_token": "(self)",
        _BUDGET: "(self)",
        _STORE: f"({_STORE_ARGUMENTS})",
        _PEER: "(self, args, disaggregation_mode, server_args, is_mla_backend=)",
    },
    "0.5.23": {
        **_COMMON,
        f"{_POOL}.get_dsv4_indexer_bytes_per_token": "(index_head_dim, use_fp4_indexer)",
        _STORE: f"({_STORE_ARGUMENTS}, kv_scale_cache=, rope_cache=, kv_layout=, fp8_2buff=, kv_cache_rope=)",
        f"{_POOL}.DeepSeekV4TokenToKVPool.pd_kv_layout": "(self)",
        _REGIONS: "(kvcache, page_size)",
    },
}


def install(context: Context, hooks: Hooks) -> dict[str, Any]:
    check_patched(Path(find_package("sglang")), context.version)
    hooks.replace(_ATTACH, _refuse_storage)
    hooks.around(f"{_POOL}.DeepSeekV4IndexerPool._create_buffer", _create_pool)
    hooks.after(f"{_POOL}.DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer", _show_reader)
    hooks.around(_STORE, _store)
    if context.version == "0.5.16":
        hooks.after(f"{_POOL}.DeepSeekV4IndexerPool.get_bytes_per_token", _count_key)
        hooks.after(_BUDGET, _count_budget)
        hooks.around(_PEER, _announce)
    else:
        hooks.after(f"{_POOL}.get_dsv4_indexer_bytes_per_token", _count_shared)
        hooks.after(f"{_POOL}.DeepSeekV4TokenToKVPool.pd_kv_layout", _announce_layout)
        hooks.after(_REGIONS, _move_whole_pages)
    return {"bytes_per_key": KEY_BYTES}


def find_package(name: str) -> str:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FeatureError(f"the package {name} is not installed; expected it beside the plugin; rebuild the release")
    return spec.submodule_search_locations[0]


def check_patched(package: Path, version: str) -> None:
    """Raise FeatureError unless the source of the store in ``package`` is the patched one."""
    name, expected = PATCHED[version]
    try:
        found = hashlib.sha256((package / name).read_bytes()).hexdigest()
    except OSError as error:
        found = str(error)
    if found != expected:
        raise FeatureError(
            f"{package / name} is not patched for bf16 index keys (SHA-256 {found}); expected {expected}; "
            "build the release with its patches, or turn index_keys off"
        )


def refuse_flags(server_args: Any) -> None:
    """Raise FeatureError for a flag that cannot be had with bf16 keys. A version need not have every flag."""
    for name, why in REFUSED_FLAGS.items():
        if getattr(server_args, name, False):
            raise FeatureError(
                f"--{name.replace('_', '-')} is given and index_keys is bf16: {why}; expected one of the two; "
                "leave the flag out or turn index_keys off"
            )


def _refuse_storage(_scheduler: Any, _request: Any) -> Any:
    """Instead of attaching a storage to HiCache: the reason, which the caller gets with HTTP 400."""
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    reason = (
        f"index_keys is bf16: {REFUSED_FLAGS['hicache_storage_backend']}; expected HiCache in host memory alone; "
        "attach no storage or turn index_keys off"
    )
    logger.warning("llmfleet: a HiCache storage is not attached: %s", reason)
    return AttachHiCacheStorageReqOutput(success=False, message=reason)


def _create_pool(original: Callable[..., None], pool: Any) -> None:
    """Refuse, make the pool, and see that its pages have the size that store and reader take."""
    from sglang.srt.runtime_context import get_server_args

    refuse_flags(get_server_args())
    if pool.use_fp4_indexer:
        raise FeatureError(
            "the model stores index keys as fp4 and index_keys is bf16; expected DeepSeek-V4; turn index_keys off"
        )
    original(pool)
    for pages in pool.index_k_with_scale_buffer[:1]:
        if pages.shape[1] != PAGE_KEYS * KEY_BYTES:
            raise FeatureError(
                f"a page of index keys has {pages.shape[1]} bytes; expected {PAGE_KEYS * KEY_BYTES} "
                f"({PAGE_KEYS} keys of 128 bf16 values); turn index_keys off"
            )
        logger.info(
            "llmfleet: index keys are bf16: layers %d, pages %d of %d bytes, %d bytes a key",
            len(pool.index_k_with_scale_buffer),
            pages.shape[0],
            pages.shape[1],
            pages.shape[1] // pool.page_size,
        )


def _show_reader(pages: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """As much of each page as fp8 keys would take, so that the engine's view of them fits.

    Store and kernel take the whole pages from it (``whole_pages``); nobody reads through the view.
    """
    return pages[:, : PAGE_KEYS * FP8_KEY_BYTES]


def _store(original: Callable[..., None], backend: Any, **arguments: Any) -> None:
    if arguments["is_indexer"]:
        arguments |= {"kv_cache": whole_pages(arguments["kv_cache"]), "bf16_store": True}
    original(backend, **arguments)


def _count_key(_fp8: int, _pool: Any) -> int:
    return KEY_BYTES


def _count_budget(per_token: float, budget: Any) -> float:
    """0.5.16 counts the key once more where it divides the memory: one key for 4 tokens in each layer of ratio 4."""
    return per_token + float(budget.num_layers_ca4 / 4 * (KEY_BYTES - FP8_KEY_BYTES))


def _count_shared(fp8_or_fp4: int, *_args: Any, **_kwargs: Any) -> int:
    """DeepSeek-V4.1 has fp4 pools beside; they are refused when they are made, so what they take does not matter."""
    return KEY_BYTES if fp8_or_fp4 == FP8_KEY_BYTES else fp8_or_fp4


def _announce(
    original: Callable[..., None], manager: Any, args: Any, mode: Any, server_args: Any, *more: Any, **options: Any
) -> None:
    """0.5.16 compares page size and KV dtype at the handshake, so the dtype names the keys; for the peers alone."""
    announced = copy.copy(server_args)
    announced.kv_cache_dtype = f"{server_args.kv_cache_dtype},{LAYOUT}"
    original(manager, args, mode, announced, *more, **options)


def _announce_layout(layout: str, _pool: Any) -> str:
    return f"{layout},{LAYOUT}"


def _move_whole_pages(regions: list[Any], *_args: Any, **_kwargs: Any) -> list[Any]:
    """The engine's copy of single tokens knows where an fp8 key and its scale lie, nothing else."""
    return [dataclasses.replace(region, page_aligned_only=True) for region in regions]


FEATURE = Feature(
    name="index_keys",
    variable="LLMFLEET_INDEX_KEYS",
    values=("bf16",),
    hooks=HOOKS,
    install=install,
    needs={"indexer_logits": "triton"},
)
