# SPDX-License-Identifier: Apache-2.0
"""What a model's KV cache is made of: bytes per token on the device, pools on the host. PRIVATE to the collection.

Read from the checkpoint's ``config.json`` and the server's flags, never from a name. Everything is counted for one rank
(one tensor-parallel process); the sizes were read in the source of the named SGLang release and, for DeepSeek V4 on
0.5.16, in the log of the running engine. Four kinds:

=========  ==========================================================================================================
dsv4       DeepSeek V4: sliding-window KV of every layer, compressed KV of the layers with ratio 4 and 128, index keys
           and compression state of those with ratio 4
mha        one K and one V for each KV head and layer (MHA, GQA, MQA)
mla        one latent and one rotary part for each layer, whole on every rank
hybrid     mha for the full-attention layers, a recurrent state for each linear-attention layer and request slot
=========  ==========================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

# DeepSeek V4 is served in pages of 256 tokens, whatever --page-size says (model_overrides/deepseek_v4.py).
DSV4_PAGE = 256
# A latent slot is 448 fp8 values, 64 bf16 rotary values and 8 bytes of scales; FlashMLA wants pages in units of 576 B.
DSV4_SCALES, DSV4_PAGE_UNIT = 8, 576
DSV4_SWA_RATIO = Fraction(1, 10)
FLOAT32, BFLOAT16 = 4, 2
KV_BYTES = {"auto": None, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class HostPool:
    """One host pool of one rank: ``pages`` pages of ``item_bytes`` for each of ``layers`` layers.

    ``tokens`` is what the engine's log calls the pool's size; None for pools that it counts in pages only.
    """

    name: str
    layers: int
    pages: int
    item_bytes: int
    tokens: int | None = None

    @property
    def bytes(self) -> int:
        return self.layers * self.pages * self.item_bytes

    def data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layers": self.layers,
            "pages": self.pages,
            "item_bytes": self.item_bytes,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class Geometry:
    """The KV cache of one rank. ``bytes_per_token`` is the device's; ``page`` the tokens of one page.

    ``takes_size``: whether --hicache-size sizes it by a rule that does not depend on the device's pool.
    """

    kind: str
    layers: int
    page: int
    bytes_per_token: Fraction
    takes_size: bool

    def aligned(self, tokens: int) -> int:
        """The tokens that the engine makes of --max-total-tokens: whole pages."""
        return tokens // self.page * self.page

    def fixed_bytes(self, _slots: int) -> int:
        """Device bytes that depend on the number of request slots and not on the tokens."""
        return 0

    def host_pools(self, tokens: int, ratio: float | None = None, size_gb: int | None = None) -> list[HostPool]:
        """The pools for ``ratio`` times the device's ``tokens``, or for ``size_gb`` (decimal GB for each rank)."""
        raise NotImplementedError

    def host_tokens(self, tokens: int, ratio: float | None = None, size_gb: int | None = None) -> dict[str, int]:
        """What can be found again in the host pools, in tokens: ``{all, window}``.

        A prefix can be reused only while its sliding-window part is in the host pool too, so for a model with one the
        smaller of the two numbers bounds reuse (seen with DeepSeek V4: of prompts of 30,000 tokens in a host pool of
        524,288 only the last three came back; its window pool held 52,224).
        """
        return {"all": sum(pool.tokens or 0 for pool in self.host_pools(tokens, ratio, size_gb) if pool.name == "kv")}


def _only_ratio(ratio: float | None, size_gb: int | None) -> float:
    if ratio is None or size_gb is not None:
        raise ValueError("this kind of model takes a ratio only")
    return ratio


# ---------------------------------------------------------------------------------------------------------- deepseek v4


@dataclass(frozen=True)
class DeepSeekV4(Geometry):
    """See the module's text. ``ring``: rows of a request's ratio-4 state, 8, or 16 with speculative decoding."""

    swa_ratio: Fraction = DSV4_SWA_RATIO
    layers_c4: int = 0
    layers_c128: int = 0
    draft_layers: int = 0
    head_dim: int = 512
    slot_bytes: int = 584
    index_dim: int = 128
    index_bytes: int = 132
    ring: int = 8
    state_bytes: int = FLOAT32
    parts: Mapping[str, Fraction] = field(default_factory=dict)

    def page_bytes(self, slots: int) -> int:
        """One page of latent slots, padded to FlashMLA's unit."""
        return -(-slots * self.slot_bytes // DSV4_PAGE_UNIT) * DSV4_PAGE_UNIT

    def swa_tokens(self, tokens: int) -> int:
        """The sliding-window pool of the device (pool_configurator.py, _compute_dsv4_sizes)."""
        # The engine multiplies as floats; so do we, or a boundary would come out a page off.
        return int(self.aligned(tokens) * float(self.swa_ratio)) // self.page * self.page

    def fixed_bytes(self, slots: int) -> int:
        """The ratio-128 state: a ring of 128 rows for each request slot, one more ring, and one row, in whole 128s."""
        rows = -(-((slots + 1) * 128 + 1) // 128) * 128
        return rows * 2 * self.head_dim * self.state_bytes * self.layers_c128

    def host_pools(self, tokens: int, ratio: float | None = None, size_gb: int | None = None) -> list[HostPool]:
        ratio = _only_ratio(ratio, size_gb)
        # hybrid_pool_assembler.py, _deepseek_v4_num_host_pages: whole device pages, times the ratio, cut.
        full = int(self.aligned(tokens) // self.page * ratio)
        swa = int(self.swa_tokens(tokens) // self.page * ratio)
        state = self.ring * 4 * self.state_bytes
        pools = [
            HostPool("swa", self.layers + self.draft_layers, swa, self.page_bytes(self.page)),
            HostPool("deepseek_v4_c4", self.layers_c4, full, self.page_bytes(self.page // 4)),
            HostPool("deepseek_v4_c4_indexer", self.layers_c4, full, self.page // 4 * self.index_bytes),
            HostPool("deepseek_v4_c4_state", self.layers_c4, swa, state * self.head_dim),
            HostPool("deepseek_v4_c4_indexer_state", self.layers_c4, swa, state * self.index_dim),
            HostPool("deepseek_v4_c128", self.layers_c128, full, self.page_bytes(self.page // 128)),
        ]
        return [pool for pool in pools if pool.layers]

    def host_tokens(self, tokens: int, ratio: float | None = None, size_gb: int | None = None) -> dict[str, int]:
        ratio = _only_ratio(ratio, size_gb)
        return {
            "all": int(self.aligned(tokens) // self.page * ratio) * self.page,
            "window": int(self.swa_tokens(tokens) // self.page * ratio) * self.page,
        }


def index_key_bytes(index_dim: int, keys: str) -> int:
    """Bytes of one index key: fp8 with a float32 scale for each 128 values, fp4 with a byte for each 32, or bf16."""
    return {
        "fp8": index_dim + index_dim // 128 * 4,
        "fp4": index_dim // 2 + index_dim // 32,
        "bf16": index_dim * BFLOAT16,
    }[keys]


def _deepseek_v4(config: Mapping[str, Any], server: Server) -> DeepSeekV4:
    layers = _int(config, "num_hidden_layers")
    ratios = config["compress_ratios"]
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) < layers:
        raise _config_error("compress_ratios", ratios, f"a list with an entry for each of {layers} layers")
    # The entries behind the last layer belong to the draft layers.
    ratios = list(ratios[:layers])
    unknown = sorted({ratio for ratio in ratios if ratio not in (0, 4, 128)}, key=str)
    if unknown:
        raise _unmodelled(f"compress_ratios with {unknown[0]!r}", "0, 4 and 128")
    head_dim, rotary, index_dim = (_int(config, key) for key in ("head_dim", "qk_rope_head_dim", "index_head_dim"))
    if server.kv_dtype not in ("auto", "fp8_e4m3"):
        raise _unmodelled(f"kv-cache-dtype {server.kv_dtype} with DeepSeek V4", "fp8_e4m3, which is its default")
    keys = "fp4" if server.fp4_indexer else server.index_keys
    speculative = server.speculative
    slot = head_dim - rotary + rotary * BFLOAT16 + DSV4_SCALES
    c4, c128 = ratios.count(4), ratios.count(128)
    ring, state = 16 if speculative else 8, BFLOAT16 if server.bf16_state else FLOAT32
    swa_ratio = server.swa_ratio if server.swa_ratio is not None else DSV4_SWA_RATIO
    shape = DeepSeekV4(
        kind="dsv4",
        layers=layers,
        page=DSV4_PAGE,
        bytes_per_token=Fraction(0),
        takes_size=False,
        swa_ratio=swa_ratio,
        layers_c4=c4,
        layers_c128=c128,
        # 0.5.16 does not mirror the draft's window; 0.5.23 packs it behind the target's layers.
        draft_layers=_int(config, "num_nextn_predict_layers", 1) if speculative and server.traits.packs_draft else 0,
        head_dim=head_dim,
        slot_bytes=slot,
        index_dim=index_dim,
        index_bytes=index_key_bytes(index_dim, keys),
        ring=ring,
        state_bytes=state,
    )

    def per_token(slots: int) -> Fraction:
        """Latent bytes of one of ``slots`` slots: 0.5.23 counts the page's padding, 0.5.16 does not."""
        return Fraction(shape.page_bytes(slots), slots) if server.traits.counts_padding else Fraction(slot)

    # The device budgets fp4 keys as fp8 on NVIDIA (pool_configurator.py:1110); only the host pool is smaller.
    device_index = index_key_bytes(index_dim, "fp8" if keys == "fp4" else keys)
    state_window = DSV4_PAGE if server.traits.counts_padding else _int(config, "sliding_window", 128)
    parts = {
        "swa": swa_ratio * layers * per_token(DSV4_PAGE),
        "c4": c4 * per_token(DSV4_PAGE // 4) / 4,
        "c4_indexer": Fraction(c4 * device_index, 4),
        "c4_state": swa_ratio * c4 * Fraction(ring, state_window) * 4 * (head_dim + index_dim) * state,
        "c128": c128 * per_token(DSV4_PAGE // 128) / 128,
    }
    total = sum(parts.values(), Fraction(0))
    if speculative:
        total *= Fraction(layers + 1, layers)
    return _replace(shape, bytes_per_token=total, parts=parts)


def _replace(shape: DeepSeekV4, **changes: Any) -> DeepSeekV4:
    return DeepSeekV4(**{**shape.__dict__, **changes})


# ----------------------------------------------------------------------------------------------- attention and hybrids


@dataclass(frozen=True)
class Attention(Geometry):
    """mha and mla: the same bytes for every token, on the device and on the host (pool_host/base.py)."""

    def host_pools(self, tokens: int, ratio: float | None = None, size_gb: int | None = None) -> list[HostPool]:
        item = int(self.bytes_per_token)
        wanted = int(size_gb * 1e9 // item) if size_gb is not None else int(self.aligned(tokens) * (ratio or 0))
        # One page more than fits into it, whether it is needed or not.
        pages = wanted // self.page + 1
        return [HostPool("kv", 1, pages, item * self.page, pages * self.page)]


@dataclass(frozen=True)
class Hybrid(Attention):
    """Full attention beside recurrent state: ``slot_bytes`` for each of ``slots`` state slots of the device."""

    slots: int = 0
    slot_bytes: int = 0

    def fixed_bytes(self, _slots: int) -> int:
        return self.slots * self.slot_bytes

    def host_pools(self, tokens: int, ratio: float | None = None, size_gb: int | None = None) -> list[HostPool]:
        ratio = _only_ratio(ratio, size_gb)
        # pool_host/mamba.py: pages of one slot, and one more.
        slots = int(self.slots * ratio) + 1
        return [*super().host_pools(tokens, ratio), HostPool("mamba", 1, slots, self.slot_bytes, slots)]


def _kv_bytes(config: Mapping[str, Any], server: Server) -> int:
    if server.kv_dtype not in KV_BYTES:
        raise _unmodelled(f"kv-cache-dtype {server.kv_dtype}", ", ".join(KV_BYTES))
    fixed = KV_BYTES[server.kv_dtype]
    if fixed is not None:
        return fixed
    quantized = config.get("quantization_config") or {}
    if isinstance(quantized, Mapping) and any("kv_cache" in str(key) for key in quantized):
        raise _unmodelled("kv-cache-dtype auto with a quantized KV cache in config.json", "kv-cache-dtype said aloud")
    # The engine serves float32 checkpoints in 16 bits unless --dtype says otherwise.
    return FLOAT32 if server.dtype in ("float", "float32") else BFLOAT16


def _attention(config: Mapping[str, Any], server: Server, layers: int) -> int:
    """Bytes of one token of ``layers`` layers with K and V heads."""
    heads = _int(config, "num_attention_heads")
    kv_heads = _int(config, "num_key_value_heads", heads)
    head_dim = _int(config, "head_dim", _int(config, "hidden_size", heads) // heads)
    # With fewer heads than ranks each rank keeps one (model_config.py, get_num_kv_heads).
    own = max(1, kv_heads // server.attention_ranks)
    return own * (head_dim + _int(config, "v_head_dim", head_dim)) * layers * _kv_bytes(config, server)


def _plain(config: Mapping[str, Any], server: Server) -> Attention:
    layers = _int(config, "num_hidden_layers")
    kinds = config.get("layer_types") or []
    if "sliding_attention" in kinds or (config.get("sliding_window") and config.get("use_sliding_window") is not False):
        raise _unmodelled("a sliding window", "full attention in every layer, MLA, linear attention or DeepSeek V4")
    if server.speculative:
        raise _unmodelled("HiCache with a speculative draft", "no speculative-algorithm, except with DeepSeek V4")
    if server.page is None:
        raise RefusalError(
            "page_size",
            "HiCache is asked for and page-size is not set",
            "a page size that prefill and decode agree on: the host pool is counted in pages",
            "set page-size: 64 in plan_engine_args of the whole group",
        )
    if config.get("kv_lora_rank"):
        if config.get("index_topk") or config.get("index_head_dim"):
            raise _unmodelled("MLA with sparse index keys (DSA)", "MLA without index_topk, or DeepSeek V4")
        item = (_int(config, "kv_lora_rank") + _int(config, "qk_rope_head_dim")) * layers * _kv_bytes(config, server)
        return Attention("mla", layers, server.page, Fraction(item), takes_size=True)
    if "linear_attention" in kinds or config.get("linear_num_value_heads"):
        return _hybrid(config, server, layers)
    return Attention("mha", layers, server.page, Fraction(_attention(config, server, layers)), takes_size=True)


def _hybrid(config: Mapping[str, Any], server: Server, layers: int) -> Hybrid:
    """Gated delta net beside full attention (configs/qwen3_next.py, configs/mamba_utils.py)."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = _int(config, "full_attention_interval")
        kinds = ["full_attention" if (number + 1) % interval == 0 else "linear_attention" for number in range(layers)]
    full = list(kinds).count("full_attention")
    ranks = server.attention_ranks
    key_heads, value_heads, key_dim, value_dim, kernel = (
        _int(config, f"linear_{key}")
        for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    if key_heads % ranks or value_heads % ranks:
        raise _unmodelled(f"{key_heads} and {value_heads} linear heads over {ranks} ranks", "a divisor of both")
    if server.state_slots is None:
        raise RefusalError(
            "state_slots",
            "HiCache is asked for a model with recurrent state and max-mamba-cache-size is not set",
            "the number of state slots of the device: the engine would take what profiling leaves it",
            "set max-mamba-cache-size in args of the instance",
        )
    convolution = (2 * key_heads * key_dim + value_heads * value_dim) // ranks * (kernel - 1) * BFLOAT16
    state = value_heads // ranks * value_dim * key_dim * (BFLOAT16 if server.bf16_ssm else FLOAT32)
    return Hybrid(
        kind="hybrid",
        layers=layers,
        page=server.page or 1,
        bytes_per_token=Fraction(_attention(config, server, full)),
        takes_size=False,
        slots=server.state_slots,
        slot_bytes=(convolution + state) * (layers - full),
    )


# ----------------------------------------------------------------------------------------------------------- the reader


@dataclass(frozen=True)
class Traits:
    """How a release of SGLang counts; see the table in ``_hicache.py``."""

    counts_padding: bool
    packs_draft: bool


@dataclass(frozen=True)
class Server:
    """What a server's flags say about its KV cache. ``attention_ranks``: the ranks that share the KV heads."""

    traits: Traits
    ranks: int = 1
    attention_ranks: int = 1
    page: int | None = None
    kv_dtype: str = "auto"
    dtype: str = "auto"
    index_keys: str = "fp8"
    fp4_indexer: bool = False
    speculative: bool = False
    swa_ratio: Fraction | None = None
    state_slots: int | None = None
    bf16_state: bool = False
    bf16_ssm: bool = False


def parse_config(content: Any) -> Any:
    """The content of a ``config.json``: JSON text is parsed, and None is nothing. Raises RefusalError for other text.

    Data is taken as it is: older releases of Ansible turn text that looks like JSON into data on their own.
    """
    if content is not None and not isinstance(content, str):
        return content
    try:
        return json.loads(content or "")
    except ValueError as error:
        raise _config_error("its content", (content or "")[:40], f"a JSON object ({error})") from error


def read_geometry(content: Any, server: Server) -> Geometry:
    """The geometry of a checkpoint, from the content of its ``config.json`` (text or data; None where there is none).

    Raises RefusalError where it is malformed, or of a model whose pools are not known here.
    """
    config = parse_config(content)
    if not isinstance(config, Mapping) or not config:
        raise _config_error("its content", config, "an object with the model's dimensions")
    # Models with vision or audio keep the language model's dimensions in an object of their own.
    nested = config.get("text_config")
    shape = {**config, **nested} if isinstance(nested, Mapping) else config
    return _deepseek_v4(shape, server) if shape.get("compress_ratios") is not None else _plain(shape, server)


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _config_error(key, value, "a whole number, 1 or more")
    return value


def _config_error(key: str, value: Any, expected: str) -> RefusalError:
    shown = repr(value)
    return RefusalError(
        "model_config",
        f"config.json of the model: {key} is {shown if len(shown) < 80 else shown[:77] + '...'}",
        expected,
        "compare the file with the checkpoint's publisher: it may be cut or of another model",
    )


def _unmodelled(found: str, expected: str) -> RefusalError:
    return RefusalError(
        "geometry",
        f"{found}: the size of its host pools is not known here",
        expected,
        "set hicache: {enabled: false} for this instance",
    )
