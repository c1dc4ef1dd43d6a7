# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA attention of DeepSeek-V4 from the kernel in ``llmfleet_kernels.sparse_mla``, wherever the engine calls
FlashMLA's paged kernel: decode, and what else reads the paged caches directly. Long prefills keep the engine's own
kernel, which reads a copy of the KV that was widened to bf16.

The kernel the engine calls can only be imported where it can run, so it is hooked when the attention back-end is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmfleet_plugin._feature import Context, Feature, FeatureError
from llmfleet_plugin._hooks import Hooks

if TYPE_CHECKING:
    import torch

_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend.__init__"
_BACKEND_INIT = "(self, model_runner, skip_prefill=, speculative_step_id=, topk=, speculative_num_steps=)"
HOOKS = {"0.5.16": {_BACKEND: _BACKEND_INIT}, "0.5.23": {_BACKEND: _BACKEND_INIT}}
_FLASH_MLA = (
    "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=, softmax_scale=, "
    "causal=, descale_q=, descale_k=, is_fp8_kvcache=, indices=, attn_sink=, extra_k_cache=, "
    "extra_indices_in_kvcache=, topk_length=, extra_topk_length="
)
#: The paged kernel that the engine calls, by version; sm_120 has one of its own.
KERNELS: Mapping[str, Mapping[str, str]] = {
    "0.5.16": {"sgl_kernel.flash_mla.flash_mla_with_kvcache": f"({_FLASH_MLA})"},
    "0.5.23": {
        "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache": (
            f"({_FLASH_MLA}, kv_format=, *, use_legacy=)"
        ),
    },
}
KERNELS_SM120 = {"sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120": "(**kwargs)"}
#: The values of --dsv4-attn-backend with which the engine calls that kernel; 0.5.16 has no such flag.
PAGED_BACKENDS = (None, "auto", "flashmla")
#: The values of --kv-cache-dtype that give the layout the kernel reads; for DeepSeek-V4 auto is fp8_e4m3.
KV_DTYPES = ("auto", "fp8_e4m3")


def install(context: Context, hooks: Hooks) -> dict[str, Any]:
    import llmfleet_kernels.sparse_mla  # noqa: F401 - a kernel that cannot be imported is refused before the start

    hooked: list[int] = []

    def hook(original: Callable[..., None], backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_parallel, get_server_args

        refuse(get_server_args(), model_runner.model_config.hf_text_config)
        heads = model_runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        if not hooked:  # before the back-end takes a reference to the engine's kernel
            _hook_kernel(context.version, heads)
            hooked.append(heads)
        if hooked != [heads]:
            raise FeatureError(
                f"two models of one server have {hooked[0]} and {heads} query heads a rank and sparse_mla is triton; "
                "expected one number; turn sparse_mla off"
            )
        original(backend, model_runner, *args, **kwargs)

    hooks.around(_BACKEND, hook)
    return {"kernel": "llmfleet_kernels.sparse_mla"}


def refuse(server_args: Any, model: Any) -> None:
    """Raise FeatureError where the engine would attend with another kernel, or to another layout."""
    backend = getattr(server_args, "dsv4_attn_backend", None)
    if backend not in PAGED_BACKENDS:
        raise FeatureError(
            f"--dsv4-attn-backend is {backend} and sparse_mla is triton; expected auto or flashmla; "
            "change the flag or turn sparse_mla off"
        )
    if server_args.kv_cache_dtype not in KV_DTYPES:
        raise FeatureError(
            f"--kv-cache-dtype is {server_args.kv_cache_dtype} and sparse_mla is triton; expected fp8_e4m3 or auto; "
            "change the flag or turn sparse_mla off"
        )
    if model.model_type != "deepseek_v4":
        raise FeatureError(
            f"the model is a {model.model_type} and sparse_mla is triton; expected deepseek_v4; turn sparse_mla off"
        )


def _hook_kernel(version: str, heads: int) -> None:
    """Put our kernel in the place of the engine's, in a process whose rank has ``heads`` query heads."""
    from llmfleet_kernels.sparse_mla import KeyList, sparse_mla_decode
    from sglang.srt.utils import is_cuda
    from sglang.srt.utils.common import is_sm120_supported

    if not is_cuda():
        raise FeatureError("sparse_mla is triton on a device without CUDA; expected CUDA; turn sparse_mla off")

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        *,
        softmax_scale: float,
        indices: torch.Tensor,
        topk_length: torch.Tensor,
        attn_sink: torch.Tensor,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: Any = None,
        extra_topk_length: Any = None,
        **_for_flash_mla: Any,
    ) -> tuple[torch.Tensor, None]:
        rows, _one, padded_heads, dim = q.shape
        output = room(q, rows, padded_heads, dim)
        compressed = None
        if extra_k_cache is not None:
            compressed = KeyList(extra_k_cache, extra_indices_in_kvcache.squeeze(1), extra_topk_length)
        sparse_mla_decode(
            q[:, 0, :heads],
            KeyList(k_cache, indices.squeeze(1), topk_length),
            compressed,
            attn_sink[:heads],
            softmax_scale,
            output=output[:, :heads],
        )
        return output.unsqueeze(1), None

    def room(q: torch.Tensor, rows: int, padded_heads: int, dim: int) -> torch.Tensor:
        """[rows, padded heads, dim] to write the first ``heads`` heads of each row in, one row after the other.

        The engine pads a rank's heads to the number that FlashMLA wants, takes an output of that shape, and reads the
        real heads alone. The padding needs no memory of its own: it lies over the heads of the rows that follow.
        """
        memory = q.new_empty((rows * heads + padded_heads - heads) * dim)
        return memory.as_strided((rows, padded_heads, dim), (heads * dim, dim, 1))

    kernels = KERNELS_SM120 if is_sm120_supported() else KERNELS[version]
    hooks = Hooks(kernels)
    for target in kernels:
        hooks.replace(target, attend)
    hooks.apply()


FEATURE = Feature(
    name="sparse_mla",
    variable="LLMFLEET_SPARSE_MLA",
    values=("triton",),
    hooks=HOOKS,
    install=install,
)
