# SPDX-License-Identifier: Apache-2.0
"""What a model's KV cache is made of, against the figures of the engine itself."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _hicache, _proof
from ansible_collections.llmfleet.sglang.plugins.module_utils._geometry import Geometry, read_geometry
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.plan_cases import FLASH

STARTS = json.loads((Path(__file__).parents[3] / "fixtures/engine/starts_0.5.16.json").read_text())["starts"]
SMALL = {**FLASH, "num_hidden_layers": 6, "compress_ratios": [0, 0, 4, 128, 4, 128, 0]}


def geometry(
    config: Any = FLASH,
    version: str = "0.5.23",
    ranks: int = 4,
    keys: str = "fp8",
    environment: Any = None,
    **flags: Any,
) -> Geometry:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    server = _hicache.server_of(_hicache.RELEASES[version], named, environment or {}, ranks, keys)
    return read_geometry(config if isinstance(config, str) or config is None else json.dumps(config), server)


# --------------------------------------------------------------------------------------------- the running engine


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start["about"])
def test_pools_are_those_that_the_running_engine_made(start: dict[str, Any]) -> None:
    flags = dict(start["flags"])
    ratio, size = flags.pop("hicache-ratio", None), flags.pop("hicache-size", None)
    # Where no page size is given these models are served in pages of one token.
    shape = geometry(
        start["config"], "0.5.16", ranks=1, **{"page_size": 1, **{k.replace("-", "_"): v for k, v in flags.items()}}
    )
    assert shape.aligned(flags["max-total-tokens"]) == start["tokens"]
    pools = shape.host_pools(flags["max-total-tokens"], ratio, size)
    assert [pool.bytes for pool in pools] == start["pool_bytes"]
    told = _proof.parse_log("\n".join(start["log"]))
    assert told["max_total_tokens"] == start["tokens"]
    (logged,) = told["ranks"].values()
    assert [pool["name"] for pool in logged] == [pool.name for pool in pools]
    for line, pool in zip(logged, pools, strict=True):
        assert abs(line["bytes"] - pool.bytes) <= (0 if line["exact"] else 5_000_000)


def test_bytes_per_token_are_those_of_the_running_engine() -> None:
    line = next(line for line in STARTS[0]["log"] if "bytes_per_full_token" in line)
    assert "bytes_per_full_token=845.53," in line
    assert round(float(geometry(SMALL, "0.5.16").bytes_per_token), 2) in (845.52, 845.53)


# ----------------------------------------------------------------------------------------------- deepseek v4, 43 layers


def test_device_bytes_of_a_token() -> None:
    assert geometry().bytes_per_token == Fraction("7086.75")
    assert geometry(keys="bf16").bytes_per_token == Fraction("7737.75")
    # The device budgets fp4 keys as fp8 ones.
    assert geometry(enable_deepseek_v4_fp4_indexer=True).bytes_per_token == Fraction("7086.75")


def test_a_window_of_512k_costs_3_7_gb_and_bf16_index_keys_a_third_of_a_gb_more() -> None:
    fp8, bf16 = (int(524_288 * geometry(keys=keys).bytes_per_token) for keys in ("fp8", "bf16"))
    assert (fp8, bf16 - fp8) == (3_715_497_984, 341_311_488)


def test_request_slots_cost_what_they_do_on_the_device() -> None:
    # 64 requests and the one slot more: 0.70 GB; 256: 2.72 GB.
    assert geometry().fixed_bytes(65) == 702_545_920
    assert geometry().fixed_bytes(257) == 2_715_811_840


def test_host_bytes_of_a_page() -> None:
    def page_bytes(keys: str) -> tuple[int, int]:
        pools = geometry(keys=keys).host_pools(2560, ratio=1.0)
        window = sum(pool.bytes // pool.pages for pool in pools if pool.name == "swa" or pool.name.endswith("state"))
        return sum(pool.bytes // pool.pages for pool in pools) - window, window

    assert page_bytes("fp8") == (998_208, 8_160_000)
    assert page_bytes("bf16") == (1_164_864, 8_160_000)
    assert page_bytes("fp4") == (998_208 - 21 * 64 * (132 - 68), 8_160_000)


def test_a_ratio_of_two_on_a_million_tokens() -> None:
    shape = geometry()
    by_rank = sum(pool.bytes for pool in shape.host_pools(1_000_192, ratio=2.0))
    assert by_rank == 14_164_797_312
    assert shape.host_tokens(1_000_192, ratio=2.0) == {"all": 2_000_384, "window": 199_680}


def test_speculative_decoding_widens_the_ring_and_mirrors_the_draft() -> None:
    pools = {pool.name: pool for pool in geometry(speculative_algorithm="EAGLE").host_pools(256_000, ratio=1.0)}
    assert pools["swa"].layers == 44
    assert pools["deepseek_v4_c4_state"].item_bytes == 2 * 65_536
    assert pools["deepseek_v4_c4_indexer_state"].item_bytes == 2 * 16_384
    older = {
        pool.name: pool for pool in geometry(FLASH, "0.5.16", speculative_algorithm="EAGLE").host_pools(256_000, 1.0)
    }
    assert older["swa"].layers == 43


def test_half_size_state() -> None:
    pools = geometry(environment={"SGLANG_DSV4_COMPRESS_STATE_DTYPE": "bf16"}).host_pools(256_000, ratio=1.0)
    assert {pool.item_bytes for pool in pools if pool.name.endswith("state")} == {32_768, 8_192}


def test_the_window_follows_its_flag() -> None:
    assert geometry(swa_full_tokens_ratio=0.5).host_tokens(256_000, ratio=1.0) == {"all": 256_000, "window": 128_000}


# --------------------------------------------------------------------------------------------------------- other models

GQA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
MLA = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
HYBRID = {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def test_bytes_of_a_token_by_kind() -> None:
    assert geometry(GQA, ranks=1, page_size=64).bytes_per_token == 2 * 8 * 128 * 32 * 2
    assert geometry(GQA, ranks=4, page_size=64).bytes_per_token == 2 * 2 * 128 * 32 * 2
    # With fewer heads than ranks each rank keeps one.
    assert geometry(GQA, ranks=16, page_size=64).bytes_per_token == 2 * 1 * 128 * 32 * 2
    assert geometry(GQA, ranks=8, attn_dp_size=4, page_size=64).bytes_per_token == 2 * 4 * 128 * 32 * 2
    assert geometry(GQA, ranks=1, page_size=64, kv_cache_dtype="fp8_e4m3").bytes_per_token == 2 * 8 * 128 * 32
    assert geometry(GQA, ranks=1, page_size=64, dtype="float32").bytes_per_token == 2 * 8 * 128 * 32 * 4
    # A latent is whole on every rank.
    assert geometry(MLA, ranks=4, page_size=64).bytes_per_token == 576 * 27 * 2


def test_a_page_more_than_the_ratio_asks_for() -> None:
    """100 device tokens at ratio 3 in pages of 16 are 304 host tokens."""
    shape = geometry(GQA, ranks=1, page_size=16)
    (pool,) = shape.host_pools(100, ratio=3)
    assert (pool.tokens, pool.pages) == (304, 19)
    # The device's pool is cut to whole pages before it is multiplied.
    assert shape.aligned(100) == 96
    (exact,) = shape.host_pools(96, ratio=1)
    assert exact.tokens == 96 + 16


def test_a_size_is_decimal_gigabytes_for_each_rank() -> None:
    (pool,) = geometry(GQA, ranks=1, page_size=1).host_pools(0, size_gb=100)
    assert 100_000_000_000 <= pool.bytes + 131_072 < 100_000_000_000 + 2 * 131_072 + 131_072
    assert pool.bytes < 107_374_182_400


def test_a_hybrid_takes_no_size_since_releases_count_it_once_for_each_pool() -> None:
    shape = geometry(HYBRID, ranks=1, page_size=1, max_mamba_cache_size=40)
    assert shape.takes_size is False
    with pytest.raises(ValueError, match="takes a ratio only"):
        shape.host_pools(50_000, size_gb=20)
    pools = {pool.name: pool for pool in shape.host_pools(50_000, ratio=2.0)}
    assert pools["mamba"].pages == 81
    assert pools["mamba"].item_bytes == 12_877_824
    listed = {**HYBRID, "layer_types": ["linear_attention", "full_attention"] * 4}
    assert geometry(listed, ranks=1, page_size=1, max_mamba_cache_size=40).bytes_per_token == 4 * 2 * 512 * 2


def test_the_language_model_of_a_larger_one_is_read() -> None:
    assert geometry({"model_type": "some_vl", "text_config": GQA}, page_size=64).bytes_per_token == 32_768


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "flags", "code", "found"),
    [
        (None, {}, "model_config", "its content"),
        ("", {}, "model_config", "its content"),
        ('{"num_hidden_layers": 4', {}, "model_config", "its content is '{\"num_hidden_layers\": 4'"),
        ("[1, 2]", {}, "model_config", "its content"),
        ("null", {}, "model_config", "its content"),
        ({}, {}, "model_config", "its content"),
        ({**FLASH, "num_hidden_layers": "43"}, {}, "model_config", "num_hidden_layers is '43'"),
        ({**FLASH, "num_hidden_layers": 0}, {}, "model_config", "num_hidden_layers is 0"),
        ({**FLASH, "head_dim": None}, {}, "model_config", "head_dim is None"),
        ({**FLASH, "compress_ratios": [4, 128]}, {}, "model_config", "compress_ratios is [4, 128]"),
        ({**FLASH, "compress_ratios": "4"}, {}, "model_config", "compress_ratios is '4'"),
        ({**FLASH, "compress_ratios": [2] * 43}, {}, "geometry", "compress_ratios with 2"),
        (FLASH, {"kv_cache_dtype": "bfloat16"}, "geometry", "kv-cache-dtype bfloat16"),
        (GQA, {}, "page_size", "page-size is not set"),
        ({**GQA, "num_key_value_heads": -1}, {"page_size": 64}, "model_config", "num_key_value_heads is -1"),
        ({**GQA, "sliding_window": 4096}, {"page_size": 64}, "geometry", "sliding window"),
        ({**GQA, "layer_types": ["sliding_attention"]}, {"page_size": 64}, "geometry", "sliding window"),
        ({**MLA, "index_topk": 2048}, {"page_size": 64}, "geometry", "sparse index keys"),
        (GQA, {"page_size": 64, "speculative_algorithm": "EAGLE"}, "geometry", "speculative"),
        (GQA, {"page_size": 64, "kv_cache_dtype": "nvfp4"}, "geometry", "kv-cache-dtype nvfp4"),
        (GQA, {"page_size": "64k"}, "flag_value", "page-size is '64k'"),
        (GQA, {"page_size": 0}, "flag_value", "page-size is 0"),
        ({**GQA, "quantization_config": {"kv_cache_scheme": {}}}, {"page_size": 64}, "geometry", "quantized KV cache"),
        (HYBRID, {"page_size": 1}, "state_slots", "max-mamba-cache-size is not set"),
        (HYBRID, {"page_size": 1, "max_mamba_cache_size": 8, "attn_dp_size": 1}, "geometry", "over 3 ranks"),
    ],
)
def test_what_is_malformed_or_not_known_is_refused(config: Any, flags: dict[str, Any], code: str, found: str) -> None:
    with pytest.raises(RefusalError) as caught:
        geometry(config, ranks=3 if "over 3" in found else 4, **flags)
    assert caught.value.code == code
    assert found in caught.value.found


def test_qwen2s_unused_window_is_no_window() -> None:
    assert geometry({**GQA, "sliding_window": 4096, "use_sliding_window": False}, page_size=64).kind == "mha"


# ------------------------------------------------------------------------------------------- what holds for every model

SHAPES = (
    geometry(),
    geometry(SMALL, "0.5.16"),
    geometry(GQA, page_size=64),
    geometry(MLA, page_size=1),
    geometry(HYBRID, page_size=1, max_mamba_cache_size=40),
)


@given(st.sampled_from(SHAPES), st.integers(0, 10**7), st.integers(1, 10**5), st.integers(0, 10**5))
def test_pools_grow_with_the_ratio(shape: Geometry, tokens: int, thousandths: int, more: int) -> None:
    small = shape.host_pools(tokens, thousandths / 1000)
    large = shape.host_pools(tokens, (thousandths + more) / 1000)
    assert [pool.name for pool in small] == [pool.name for pool in large]
    assert all(one.bytes <= other.bytes for one, other in zip(small, large, strict=True))


@given(st.sampled_from(SHAPES), st.integers(0, 10**7))
def test_whole_pages(shape: Geometry, tokens: int) -> None:
    assert 0 <= tokens - shape.aligned(tokens) < shape.page
    assert shape.aligned(tokens) % shape.page == 0


@given(
    st.sampled_from(SHAPES), st.integers(1, 10**7), st.integers(1, 10**12), st.sampled_from([None, 2 << 20, 1 << 30])
)
def test_the_largest_sizing_fits_and_the_next_does_not(
    shape: Geometry, tokens: int, room: int, page: int | None
) -> None:
    found = _hicache.largest(shape, tokens, page, lambda sized: sized.backed <= room)
    if found is None:
        return
    assert found.backed <= room
    more = _hicache.sizing(shape, tokens, page, ratio=(round(found.value * 1000) + 1) / 1000)
    assert more.backed >= found.backed
    assert more.backed > room or found.value >= _hicache.LARGEST_RATIO
