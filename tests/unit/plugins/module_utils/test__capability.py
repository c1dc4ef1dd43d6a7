# SPDX-License-Identifier: Apache-2.0
"""Back-ends by GPU: what is allowed, what is refused, and with which reason."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _capability, _engine
from ansible_collections.llmfleet.sglang.plugins.module_utils._capability import (
    MXFP4,
    NVFP4,
    NVFP4_HYBRID,
    allowed,
    check,
    check_driver,
    experts_of,
    refusal,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st

V4: dict[str, Any] = {"model_type": "deepseek_v4", "quantization_config": {"quant_method": "fp8"}}
#: The checkpoint of the reference deployment: NVFP4 experts, everything else FP8.
HYBRID = V4 | {"quantization_config": {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}}
FP4 = "enable-deepseek-v4-fp4-indexer"
TILELANG, TORCH = "SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"


def codes(refused: list[RefusalError]) -> list[str]:
    return [error.code for error in refused]


def test_the_table_has_the_versions_the_plan_knows() -> None:
    assert set(_capability.BACKENDS) == set(_engine.ENGINES)


def test_every_rule_is_about_a_judged_backend_and_known_capabilities() -> None:
    for version, kinds in _capability.RULES.items():
        for kind, rules in kinds.items():
            for rule in rules:
                assert rule.backend in _capability.BACKENDS[version][kind]
                assert set(rule.on) < set(_capability.CAPABILITIES)
                assert rule.reason
                assert rule.source


def test_every_choice_has_a_backend_on_every_gpu() -> None:
    for version, kinds in _capability.BACKENDS.items():
        for kind in kinds:
            for capability in _capability.CAPABILITIES:
                assert allowed(version, capability, kind)


@pytest.mark.parametrize(
    ("version", "capability", "fast"),
    [
        ("0.5.16", "9.0", ["fa3"]),
        ("0.5.16", "10.0", ["trtllm_mha", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "cutlass_mla"]),
        ("0.5.16", "10.3", ["trtllm_mha", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"]),
        ("0.5.16", "12.0", ["tokenspeed_mla"]),
        ("0.5.16", "12.1", ["tokenspeed_mla"]),
        ("0.5.23", "9.0", ["fa3", "trtllm_mha", "hpc_ops"]),
        ("0.5.23", "10.0", ["trtllm_mha", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"]),
        ("0.5.23", "10.3", ["trtllm_mha", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"]),
        ("0.5.23", "12.0", ["trtllm_mha"]),
        ("0.5.23", "12.1", ["trtllm_mha"]),
    ],
)
def test_attention_of_prefill(version: str, capability: str, fast: list[str]) -> None:
    everywhere = {"dsv4", "triton", "flashinfer", "fa4"}
    found = allowed(version, capability, "prefill_attention")
    assert everywhere <= set(found)
    assert [name for name in found if name not in everywhere] == fast


@pytest.mark.parametrize(
    ("capability", "dsv4", "mla"),
    [
        ("9.0", ("auto", "flashmla"), False),
        ("10.0", ("auto", "flashmla", "flashmla_mega"), True),
        ("10.3", ("auto", "flashmla", "flashmla_mega"), True),
        ("12.0", ("auto", "flashmla"), True),
        ("12.1", ("auto", "flashmla"), True),
    ],
)
def test_attention_of_deepseek_and_decode(capability: str, dsv4: tuple[str, ...], mla: bool) -> None:
    assert allowed("0.5.23", capability, "dsv4_attention") == dsv4
    assert ("trtllm_mla" in allowed("0.5.23", capability, "decode_attention")) is mla
    assert allowed("0.5.16", capability, "dsv4_attention") == ()


@pytest.mark.parametrize(
    ("capability", "hybrid", "mxfp4_in_marlin"),
    [
        ("9.0", ("marlin",), True),
        (
            "10.0",
            (
                "auto",
                "marlin",
                "flashinfer_cutlass",
                "flashinfer_cutedsl",
                "flashinfer_trtllm",
                "flashinfer_trtllm_routed",
                "experimental_sgl_trtllm",
            ),
            False,
        ),
        (
            "10.3",
            (
                "auto",
                "marlin",
                "flashinfer_cutlass",
                "flashinfer_cutedsl",
                "flashinfer_trtllm",
                "flashinfer_trtllm_routed",
                "experimental_sgl_trtllm",
            ),
            False,
        ),
        ("12.0", ("marlin", "flashinfer_cutlass"), True),
        ("12.1", ("marlin", "flashinfer_cutlass"), True),
    ],
)
def test_moe_runners_by_experts(capability: str, hybrid: tuple[str, ...], mxfp4_in_marlin: bool) -> None:
    assert allowed("0.5.16", capability, "moe_runner", NVFP4_HYBRID) == hybrid
    megamoe = ("flashinfer_megamoe",) if capability.startswith("10.") else ()
    assert allowed("0.5.23", capability, "moe_runner", NVFP4_HYBRID) == hybrid + megamoe
    assert ("marlin" in allowed("0.5.23", capability, "moe_runner", MXFP4)) is mxfp4_in_marlin
    assert "flashinfer_mxfp4" in allowed("0.5.23", capability, "moe_runner", MXFP4)


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [
        ("0.5.16", "9.0", ("deep_gemm", "tilelang", "torch")),
        ("0.5.16", "10.0", ("deep_gemm", "tilelang", "torch", "fp4")),
        ("0.5.16", "10.3", ("deep_gemm", "tilelang", "torch", "fp4")),
        ("0.5.16", "12.0", ("tilelang",)),
        ("0.5.16", "12.1", ("tilelang",)),
        ("0.5.23", "9.0", ("deep_gemm", "tilelang", "torch")),
        ("0.5.23", "10.0", ("deep_gemm", "tilelang", "torch", "fp4")),
        ("0.5.23", "10.3", ("deep_gemm", "tilelang", "torch", "fp4")),
        ("0.5.23", "12.0", ("deep_gemm", "tilelang", "torch", "fp4")),
        ("0.5.23", "12.1", ("deep_gemm", "tilelang", "torch", "fp4")),
    ],
)
def test_indexers(version: str, capability: str, expected: tuple[str, ...]) -> None:
    assert allowed(version, capability, "indexer") == expected


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
@pytest.mark.parametrize(("capability", "drafts"), [("9.0", 3), ("10.0", 3), ("10.3", 3), ("12.0", 0), ("12.1", 0)])
def test_drafts_of_a_deepseek_with_fp4_experts(version: str, capability: str, drafts: int) -> None:
    for experts in (MXFP4, NVFP4_HYBRID):
        assert len(allowed(version, capability, "speculative", experts)) == drafts
    # A draft model beside another checkpoint is no question of the GPU.
    for experts in ("", NVFP4):
        assert allowed(version, capability, "speculative", experts) == ("DSPARK", "EAGLE", "NEXTN")


@pytest.mark.parametrize("capability", ["8.9", "11.0", "12", "13.0", "sm_120", "12.0a"])
def test_another_gpu_is_refused(capability: str) -> None:
    for call in (lambda: allowed("0.5.23", capability, "indexer"), lambda: refusal("0.5.23", capability, "x", "y")):
        with pytest.raises(RefusalError) as caught:
            call()
        assert caught.value.code == "gpu_capability"
    (error,) = check("0.5.23", capability, {}, HYBRID, {})
    assert error.found == f"compute capability {capability!r}"
    assert error.expected == "one of 9.0, 10.0, 10.3, 12.0, 12.1"


class TestCheck:
    """What a server asks for, against its GPU."""

    def test_the_reference_deployment_is_accepted(self) -> None:
        flags = {"moe-runner-backend": "flashinfer_cutlass", "kv-cache-dtype": "auto", "max-running-requests": 64}
        for version in ("0.5.16", "0.5.23"):
            assert check(version, "12.0", flags, HYBRID, {"index_keys": "bf16", "indexer_logits": "triton"}) == []

    def test_without_a_capability_nothing_is_judged(self) -> None:
        flags = {"moe-runner-backend": "flashinfer_trtllm", "attention-backend": "fa3"}
        assert check("0.5.23", "", flags, HYBRID, {}) == []

    @pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
    def test_the_runner_has_to_be_named_for_a_hybrid_checkpoint(self, version: str) -> None:
        (error,) = check(version, "12.0", {}, HYBRID, {})
        assert error.code == "capability_moe_runner"
        assert error.found == (
            "moe-runner-backend is auto on compute capability 12.0: the engine takes flashinfer_trtllm_routed for a "
            "hybrid FP8 and NVFP4 checkpoint whatever the GPU is (_deepseek_v4_overrides)"
        )
        assert error.expected == "MoE runner: marlin or flashinfer_cutlass"
        assert error.cure == "set moe-runner-backend in plan_engine_args to one of them"
        assert check(version, "10.0", {}, HYBRID, {}) == []
        assert [e.expected for e in check(version, "9.0", {}, HYBRID, {})] == ["MoE runner: marlin"]

    def test_twelve_is_not_ten(self) -> None:
        flags = {"moe-runner-backend": "flashinfer_trtllm", "fp8-gemm-backend": "flashinfer_trtllm"}
        assert check("0.5.23", "10.0", flags, V4, {}) == []
        assert codes(check("0.5.23", "12.0", flags, V4, {})) == ["capability_moe_runner", "capability_fp8_gemm"]

    def test_trtllm_mla_decodes_and_does_not_prefill_on_twelve(self) -> None:
        assert codes(check("0.5.23", "12.0", {"attention-backend": "trtllm_mla"}, None, {})) == [
            "capability_prefill_attention"
        ]
        split = {"attention-backend": "trtllm_mla", "prefill-attention-backend": "flashinfer"}
        assert check("0.5.23", "12.0", split, None, {}) == []

    def test_one_flag_is_refused_once(self) -> None:
        (error,) = check("0.5.16", "12.0", {"attention-backend": "fa3"}, None, {})
        assert error.found == (
            "attention-backend is fa3 on compute capability 12.0: FlashAttention 3 ends at 9.0 (attention_registry.py)"
        )

    def test_a_backend_that_is_not_listed_is_left_to_the_engine(self) -> None:
        assert check("0.5.23", "12.0", {"attention-backend": "flex_attention"}, None, {}) == []

    def test_trtllm_attention_of_deepseek_does_not_serve_pd(self) -> None:
        (error,) = check("0.5.23", "10.0", {"dsv4-attn-backend": "trtllm"}, V4, {})
        assert error.code == "capability_dsv4_attention"
        assert error.expected == "attention of DeepSeek V4: flashmla or flashmla_mega"

    @pytest.mark.parametrize(
        ("model", "environment", "refused"),
        [
            (HYBRID, {}, True),
            (V4 | {"expert_dtype": "fp4"}, {}, True),
            (V4, {"SGLANG_DSV4_FP4_EXPERTS": "1"}, True),
            (V4 | {"expert_dtype": "fp4"}, {"SGLANG_DSV4_FP4_EXPERTS": "0"}, False),
            (V4, {}, False),
        ],
    )
    def test_speculative_decoding_on_twelve(self, model: Any, environment: dict[str, str], refused: bool) -> None:
        flags = {"speculative-algorithm": "EAGLE", "moe-runner-backend": "marlin"}
        expected = ["capability_speculative"] if refused else []
        assert codes(check("0.5.23", "12.0", flags, model, {}, environment)) == expected
        assert check("0.5.23", "9.0", flags, model, {}, environment) == []
        if refused:
            (error,) = check("0.5.23", "12.0", flags, model, {}, environment)
            assert error.expected == "speculative decoding: none"
            assert error.cure == "leave speculative-algorithm out"

    def test_no_deep_gemm_indexer_on_twelve_with_the_older_engine(self) -> None:
        switches = {TILELANG: "0", TORCH: "0"}
        (error,) = check("0.5.16", "12.0", {}, V4, {}, switches)
        assert error.code == "capability_indexer"
        assert "sgl-deep-gemm 0.1.4.post1 has no kernels for 12.x" in error.found
        assert error.expected == "indexer of DeepSeek V4: tilelang"
        # The plugin's kernel takes its place, the newer engine has kernels, and other GPUs always had.
        assert check("0.5.16", "12.0", {}, V4, {"indexer_logits": "triton"}, switches) == []
        assert check("0.5.23", "12.0", {}, V4, {}, switches) == []
        assert check("0.5.16", "9.0", {}, V4, {}, switches) == []
        # It is only asked of a model that has an indexer.
        assert check("0.5.16", "12.0", {}, {"model_type": "qwen2"}, {}, switches) == []

    def test_fp4_index_keys(self) -> None:
        assert codes(check("0.5.16", "9.0", {FP4: True}, V4, {})) == ["capability_indexer"]
        assert codes(check("0.5.16", "12.0", {FP4: True}, V4, {})) == ["capability_indexer"]
        assert check("0.5.16", "10.0", {FP4: True}, V4, {}) == []
        assert check("0.5.23", "12.0", {FP4: False}, V4, {}) == []

    def test_fp4_index_keys_need_tilelang_off_where_it_is_on(self) -> None:
        (error,) = check("0.5.23", "12.0", {FP4: True}, V4, {})
        assert error.expected == f"{TILELANG}=0 with FP4 index keys"
        assert check("0.5.23", "12.0", {FP4: True}, V4, {}, {TILELANG: "0"}) == []
        assert check("0.5.23", "10.0", {FP4: True}, V4, {}) == []
        assert codes(check("0.5.23", "10.0", {FP4: True}, V4, {}, {TILELANG: "1"})) == ["capability_indexer"]

    def test_the_plugins_indexer_has_no_fp4_keys(self) -> None:
        (error,) = check("0.5.23", "10.0", {FP4: True}, V4, {"indexer_logits": "triton"})
        assert error.found == f"{FP4} and indexer_logits: triton of plan_features"

    def test_gb10_needs_deep_gemm_off_with_the_older_engine(self) -> None:
        assert codes(check("0.5.16", "12.1", {}, None, {})) == ["capability_deep_gemm"]
        assert check("0.5.16", "12.1", {}, None, {}, {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}) == []
        assert check("0.5.23", "12.1", {}, None, {}) == []
        assert check("0.5.16", "12.0", {}, None, {}) == []

    @given(
        version=st.sampled_from(sorted(_capability.BACKENDS)),
        capability=st.sampled_from(sorted(_capability.CAPABILITIES)),
        kind=st.sampled_from(sorted(name for name, kind in _capability.KINDS.items() if kind.flags)),
        data=st.data(),
    )
    def test_what_is_allowed_is_accepted_and_nothing_else(
        self, version: str, capability: str, kind: str, data: st.DataObject
    ) -> None:
        judged = _capability.BACKENDS[version].get(kind, ())
        if not judged:
            return
        backend = data.draw(st.sampled_from(judged))
        flags = {_capability.KINDS[kind].flags[0]: backend}
        refused = check(version, capability, flags, None, {}, {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"})
        assert (refused == []) is (backend in allowed(version, capability, kind))


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (None, ""),
        ({}, ""),
        ({"quantization_config": None}, ""),
        (V4, ""),
        (V4 | {"expert_dtype": "fp4"}, MXFP4),
        (HYBRID, NVFP4_HYBRID),
        (HYBRID | {"model_type": "deepseek_v3"}, NVFP4),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, NVFP4),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ""),
    ],
)
def test_experts(config: Any, experts: str) -> None:
    assert experts_of(config) == experts


class TestDriver:
    """The driver's branch against the CUDA of the build."""

    @pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
    @pytest.mark.parametrize("driver", ["580.65.06", "580.126.20", "595.45.04", "610.43.02", "580"])
    def test_new_enough(self, version: str, driver: str) -> None:
        assert check_driver(version, driver) == []

    @pytest.mark.parametrize("driver", ["575.57.08", "570.195.03", "535.230.02", "99.9"])
    def test_too_old(self, driver: str) -> None:
        (error,) = check_driver("0.5.23", driver)
        assert error.code == "driver_version"
        assert error.found == f"driver {driver}; SGLang 0.5.23 is built for CUDA 13.0"
        assert error.expected == "driver branch 580 or newer, the oldest that runs CUDA 13"

    @pytest.mark.parametrize("driver", ["", "unknown", "[N/A]", "v580", "580.65.06-beta"])
    def test_unreadable(self, driver: str) -> None:
        (error,) = check_driver("0.5.23", driver)
        assert error.found == f"driver version {driver!r}"

    def test_unknown_engine(self) -> None:
        with pytest.raises(ValueError, match=r"'0\.5\.99' is not an engine version"):
            check_driver("0.5.99", "580.65.06")
