# SPDX-License-Identifier: Apache-2.0
"""Which back-ends of an engine version a GPU can run, and which driver the engine's CUDA needs. PRIVATE.

The engine accepts many a back-end that the GPU has no kernel for, and fails when it first calls one: at the end of a
long start, or at the first request. The rules below are read in the sources of each version, in its kernel packages and
in their issues; ``source`` names the place. ``docs/capability.md`` is made from them. What no rule forbids is allowed.

Capability 12.0 (RTX PRO 6000, RTX 50) is not 10.0 (B200): it has neither tensor memory nor tcgen05, and 99 KiB of
shared memory a block instead of 227, so kernels made for one do not run on the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

CAPABILITIES: Mapping[str, str] = {
    "9.0": "H100, H200",
    "10.0": "B200",
    "10.3": "B300",
    "12.0": "RTX PRO 6000, RTX 50",
    "12.1": "GB10",
}
_HOPPER = ("9.0",)
_SM100 = ("10.0", "10.3")
_SM120 = ("12.0", "12.1")
_BLACKWELL = _SM100 + _SM120

#: The oldest driver branch of CUDA 13, which both versions are built for; newer drivers run it too. Source:
#: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1.
DRIVER_BRANCH = 580
_CUDA = "CUDA 13.0"

# What chooses the indexer: a flag and two variables of the engine.
_FP4_INDEXER = "enable-deepseek-v4-fp4-indexer"
_TILELANG, _TORCH = "SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"

# What the routed experts of a checkpoint are stored in, as far as a rule asks. Hybrid: the other weights are FP8.
NVFP4, NVFP4_HYBRID, MXFP4 = "NVFP4", "NVFP4 hybrid", "MXFP4"


@dataclass(frozen=True)
class Kind:
    """A choice the engine makes. The first of ``flags`` that is set names the back-end; none: the environment does."""

    title: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """``backend`` runs only ``on`` some capabilities. ``experts`` limits the rule to checkpoints with such experts."""

    backend: str
    on: tuple[str, ...]
    reason: str
    source: str
    experts: tuple[str, ...] = ()

    def forbids(self, capability: str, experts: str) -> bool:
        return capability not in self.on and (not self.experts or experts in self.experts)


KINDS: Mapping[str, Kind] = {
    "prefill_attention": Kind("attention of prefill", ("prefill-attention-backend", "attention-backend")),
    "decode_attention": Kind("attention of decode", ("decode-attention-backend", "attention-backend")),
    "dsv4_attention": Kind("attention of DeepSeek V4", ("dsv4-attn-backend",)),
    "indexer": Kind("indexer of DeepSeek V4", ()),
    "moe_runner": Kind("MoE runner", ("moe-runner-backend",)),
    "moe_a2a": Kind("MoE exchange between ranks", ("moe-a2a-backend",)),
    "fp8_gemm": Kind("FP8 GEMM", ("fp8-gemm-backend",)),
    "kv_cache": Kind("KV cache", ("kv-cache-dtype",)),
    "speculative": Kind("speculative decoding", ("speculative-algorithm",)),
}

_ATTENTION = ("dsv4", "triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla")
_MOE = (
    "auto",
    "triton",
    "marlin",
    "cutlass",
    "deep_gemm",
    "flashinfer_cutlass",
    "flashinfer_mxfp4",
    "flashinfer_cutedsl",
    "flashinfer_trtllm",
    "flashinfer_trtllm_routed",
    "experimental_sgl_trtllm",
)
_BOTH: Mapping[str, tuple[str, ...]] = {
    "indexer": ("deep_gemm", "tilelang", "torch", "fp4"),
    "fp8_gemm": (
        "auto",
        "triton",
        "cutlass",
        "deep_gemm",
        "flashinfer_cutlass",
        "flashinfer_deepgemm",
        "flashinfer_trtllm",
    ),
    "kv_cache": ("auto", "bfloat16", "fp8_e4m3", "mxfp8", "nvfp4"),
    "speculative": ("DSPARK", "EAGLE", "NEXTN"),
}
#: version -> kind -> the back-ends that are judged. Others are left to the engine.
BACKENDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "0.5.16": {
        **_BOTH,
        "prefill_attention": (*_ATTENTION, "cutlass_mla"),
        "decode_attention": (*_ATTENTION, "cutlass_mla"),
        "moe_runner": _MOE,
        "moe_a2a": ("none", "megamoe"),
    },
    "0.5.23": {
        **_BOTH,
        "prefill_attention": (*_ATTENTION, "hpc_ops"),
        "decode_attention": (*_ATTENTION, "hpc_ops"),
        "dsv4_attention": ("auto", "flashmla", "flashmla_mega", "trtllm"),
        "moe_runner": (*_MOE, "flashinfer_megamoe", "hpc_ops"),
        "moe_a2a": ("none", "megamoe", "flashinfer_megamoe"),
    },
}

_NO_TRTLLM_MOE = "the TRT-LLM MoE kernels exist for 10.x only"
_TRTLLM_MOE_SOURCE = "flashinfer#2045, flashinfer#3670"
_FA3 = Rule("fa3", _HOPPER, "FlashAttention 3 ends at 9.0", "attention_registry.py")
_CUTEDSL_MLA = "its kernel needs tcgen05, and the engine refuses it elsewhere"
_CUTEDSL_SOURCE = "arg_groups/overrides.py, _cutedsl_prefill_backend_fill"
_ANY_NVFP4 = (NVFP4, NVFP4_HYBRID)
_NO_NVFP4 = "the engine has no path for NVFP4 experts in it"
_NVFP4_SOURCE = "quantization/modelopt_quant.py"
_NO_DRAFT = (
    "the experts of the draft layer are MXFP4 and are not routed to a kernel that 12.x has; seen to fail on 12.0, and "
    "not known to work"
)
_COMMON: Mapping[str, tuple[Rule, ...]] = {
    "prefill_attention": (
        _FA3,
        Rule(
            "trtllm_mla",
            _SM100,
            "the TRT-LLM prefill kernel exists for 10.x only: 'TllmGenFmhaRunner: Unsupported architecture'",
            "sglang#24633",
        ),
        Rule("cutedsl_mla", _SM100, _CUTEDSL_MLA, _CUTEDSL_SOURCE),
    ),
    "decode_attention": (
        _FA3,
        Rule("trtllm_mla", _BLACKWELL, "it needs Blackwell", "arg_groups/overrides.py, _mla_kv_cache_dtype_checks"),
        Rule("cutedsl_mla", _SM100, _CUTEDSL_MLA, _CUTEDSL_SOURCE),
    ),
    "moe_runner": (
        Rule(
            "auto",
            _SM100,
            "the engine takes flashinfer_trtllm_routed for a hybrid FP8 and NVFP4 checkpoint whatever the GPU is",
            "_deepseek_v4_overrides",
            (NVFP4_HYBRID,),
        ),
        Rule("flashinfer_trtllm", _SM100, _NO_TRTLLM_MOE, _TRTLLM_MOE_SOURCE),
        Rule("flashinfer_trtllm_routed", _SM100, _NO_TRTLLM_MOE, _TRTLLM_MOE_SOURCE),
        Rule("experimental_sgl_trtllm", _SM100, _NO_TRTLLM_MOE, _TRTLLM_MOE_SOURCE),
        Rule("flashinfer_cutedsl", _SM100, "its grouped FP4 GEMM needs tcgen05", "flashinfer/cute_dsl"),
        Rule(
            "marlin",
            _HOPPER + _SM120,
            "Marlin takes MXFP4 experts on 9.0 and 12.x only",
            "quantization/mxfp4_marlin_moe.py",
            (MXFP4,),
        ),
        Rule(
            "flashinfer_cutlass",
            _BLACKWELL,
            "9.0 has no FP4 tensor cores: NVFP4 experts run in Marlin there",
            _NVFP4_SOURCE,
            _ANY_NVFP4,
        ),
        *(
            Rule(backend, (), _NO_NVFP4, _NVFP4_SOURCE, _ANY_NVFP4)
            for backend in ("triton", "cutlass", "deep_gemm", "flashinfer_mxfp4")
        ),
    ),
    "moe_a2a": (Rule("megamoe", _HOPPER + _SM100, "its kernels exist for 9.0 and 10.x only", "moe/mega_moe.py"),),
    "fp8_gemm": (
        Rule("cutlass", _SM120, "the engine takes it on 12.x only", "quantization/fp8_utils.py"),
        Rule("flashinfer_cutlass", _BLACKWELL, "it needs Blackwell", "quantization/fp8_utils.py"),
        Rule("flashinfer_deepgemm", _HOPPER, "it needs Hopper", "quantization/fp8_utils.py"),
        Rule("flashinfer_trtllm", _SM100, "its kernels exist for 10.x only", "quantization/fp8_utils.py"),
    ),
    "kv_cache": (
        Rule("mxfp8", _BLACKWELL, "block-scaled operands need Blackwell", "_handle_mxfp8_kv_cache_compatibility"),
        Rule("nvfp4", _BLACKWELL, "it needs Blackwell", "_handle_kv4_compatibility"),
    ),
    "speculative": tuple(
        Rule(algorithm, _HOPPER + _SM100, _NO_DRAFT, "RTX PRO 6000", (MXFP4, NVFP4_HYBRID))
        for algorithm in ("DSPARK", "EAGLE", "NEXTN")
    ),
}
_NO_DEEP_GEMM = "sgl-deep-gemm 0.1.4.post1 has no kernels for 12.x"
_DEEP_GEMM_SOURCE = "sglang#23657, deepseek-ai/DeepGEMM#317"
_NO_SWITCH = "the engine sets its switches itself on 12.x, and takes TileLang"
_OWN: Mapping[str, Mapping[str, tuple[Rule, ...]]] = {
    "0.5.16": {
        "prefill_attention": (
            Rule("trtllm_mha", _SM100, "the engine refuses it elsewhere", "server_args.py"),
            Rule("cutlass_mla", ("10.0",), "its kernel is made for 10.0, and was wrong on 10.3", "sglang#10058"),
            Rule("tokenspeed_mla", _BLACKWELL, "it needs Blackwell", "arg_groups/overrides.py"),
        ),
        "decode_attention": (
            Rule("cutlass_mla", ("10.0",), "its kernel is made for 10.0, and was wrong on 10.3", "sglang#10058"),
            Rule("tokenspeed_mla", _BLACKWELL, "it needs Blackwell", "arg_groups/overrides.py"),
        ),
        "indexer": (
            Rule("deep_gemm", _HOPPER + _SM100, f"{_NO_DEEP_GEMM}, and {_NO_SWITCH}", _DEEP_GEMM_SOURCE),
            Rule("torch", _HOPPER + _SM100, _NO_SWITCH, "server_args.py, DeepseekV4ForCausalLM"),
            Rule("fp4", _SM100, "the engine refuses it elsewhere", "server_args.py, enable_deepseek_v4_fp4_indexer"),
        ),
        "moe_runner": (Rule("deep_gemm", _HOPPER + _SM100, _NO_DEEP_GEMM, _DEEP_GEMM_SOURCE),),
        "fp8_gemm": (Rule("deep_gemm", _HOPPER + _SM100, _NO_DEEP_GEMM, _DEEP_GEMM_SOURCE),),
    },
    "0.5.23": {
        "prefill_attention": (
            Rule("tokenspeed_mla", _SM100, f"an old name of cutedsl_mla: {_CUTEDSL_MLA}", "serving_hook.py"),
            Rule("hpc_ops", _HOPPER, "its kernels are built for 9.0 only", "attention/hpc_ops_backend.py"),
        ),
        "decode_attention": (
            Rule("tokenspeed_mla", _SM100, f"an old name of cutedsl_mla: {_CUTEDSL_MLA}", "serving_hook.py"),
            Rule("hpc_ops", _HOPPER, "its kernels are built for 9.0 only", "attention/hpc_ops_backend.py"),
        ),
        "dsv4_attention": (
            Rule("flashmla_mega", _SM100, "the engine refuses it elsewhere", "arg_groups/deepseek_v4_hook.py"),
            Rule("trtllm", (), "it needs 10.x, and does not serve prefill and decode apart", "sglang#37838"),
        ),
        "indexer": (Rule("fp4", _BLACKWELL, "the engine refuses it elsewhere", "arg_groups/serving_hook.py"),),
        "moe_runner": (
            Rule("flashinfer_megamoe", _SM100, "the engine refuses it elsewhere", "arg_groups/moe_hook.py"),
            Rule("hpc_ops", _HOPPER, "its kernels are built for 9.0 only", "moe/moe_runner/runner.py"),
            Rule("hpc_ops", (), _NO_NVFP4, _NVFP4_SOURCE, _ANY_NVFP4),
        ),
        "moe_a2a": (Rule("flashinfer_megamoe", _SM100, "the engine refuses it elsewhere", "arg_groups/moe_hook.py"),),
    },
}
#: version -> kind -> rules
RULES: Mapping[str, Mapping[str, tuple[Rule, ...]]] = {
    version: {kind: (*_COMMON.get(kind, ()), *_OWN[version].get(kind, ())) for kind in BACKENDS[version]}
    for version in BACKENDS
}


def _known(capability: str) -> str:
    """The capability in the table's spelling. Raises RefusalError for one that is not there."""
    if capability not in CAPABILITIES:
        raise RefusalError(
            "gpu_capability",
            f"compute capability {capability!r}",
            f"one of {', '.join(CAPABILITIES)}",
            "set plan_gpu_capability to what nvidia-smi --query-gpu=compute_cap says; other GPUs are not supported",
        )
    return capability


def refusal(version: str, capability: str, kind: str, backend: str, experts: str = "") -> Rule | None:
    """The rule that forbids a back-end, None where none does. ``experts`` as ``experts_of`` tells them.

    Raises RefusalError for a capability that is not in the table.
    """
    capability = _known(capability)
    rules = RULES[version].get(kind, ())
    return next((r for r in rules if r.backend == backend and r.forbids(capability, experts)), None)


def allowed(version: str, capability: str, kind: str, experts: str = "") -> tuple[str, ...]:
    """The judged back-ends of ``kind`` that the GPU can run, in the table's order; empty for a kind the version lacks.

    Raises RefusalError for a capability that is not in the table.
    """
    capability = _known(capability)
    judged = BACKENDS[version].get(kind, ())
    return tuple(name for name in judged if refusal(version, capability, kind, name, experts) is None)


def _is_v4(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "deepseek_v4"


def experts_of(model_config: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None) -> str:
    """How a checkpoint stores its routed experts, from its ``config.json``: ``NVFP4``; of a DeepSeek V4
    ``NVFP4_HYBRID`` or ``MXFP4``; else, and where the config does not tell, the empty text.
    """
    config = model_config or {}
    found = config.get("quantization_config")
    quantization: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    algorithm, experts = (str(quantization.get(name, "")).upper() for name in ("quant_algo", "moe_quant_algo"))
    if algorithm == "MIXED_PRECISION" and experts == "NVFP4":
        return NVFP4_HYBRID if _is_v4(config) else NVFP4
    if algorithm == "NVFP4":
        return NVFP4
    if _is_v4(config):
        told = (environment or {}).get("SGLANG_DSV4_FP4_EXPERTS")
        packed = config.get("expert_dtype") == "fp4" if told is None else _is_on(told)
        return MXFP4 if packed else ""
    return ""


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "yes", "y", "on")


def _indexer(capability: str, flags: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The reader that flags and variables ask for. On 12.x the engine turns two switches on that are off elsewhere."""

    def switched(name: str) -> bool:
        return _is_on(environment[name]) if name in environment else capability in _SM120

    if _is_on(flags.get(_FP4_INDEXER, False)):
        return "fp4"
    if switched(_TILELANG):
        return "tilelang"
    return "torch" if switched(_TORCH) else "deep_gemm"


def _refused(kind: str, capability: str, asked: str, rule: Rule, others: tuple[str, ...], cure: str) -> RefusalError:
    return RefusalError(
        f"capability_{kind}",
        f"{asked} on compute capability {capability}: {rule.reason} ({rule.source})",
        f"{KINDS[kind].title}: {' or '.join(others) or 'none'}",
        cure,
    )


def check(
    version: str,
    capability: str,
    flags: Mapping[str, Any],
    model_config: Mapping[str, Any] | None,
    features: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> list[RefusalError]:
    """What a server asks for that its GPU cannot run; empty where nothing is, and where the capability is not known.

    ``capability`` is a text such as ``"12.0"``, or empty. ``flags`` are those of the server without their dashes,
    ``features`` those of the plugin that are on, ``environment`` the unit's variables. ``model_config`` is the
    checkpoint's ``config.json``, None where it cannot be read.
    """
    if not capability:
        return []
    try:
        capability = _known(capability)
    except RefusalError as error:
        return [error]
    variables = environment or {}
    experts = experts_of(model_config, variables)
    refused: list[RefusalError] = []
    told: set[tuple[str, str]] = set()
    for kind in (name for name in KINDS if name in BACKENDS[version]):
        flag = next((name for name in KINDS[kind].flags if flags.get(name) is not None), None)
        default = "auto" if kind == "moe_runner" else None
        backend = str(flags[flag]) if flag else default
        rule = refusal(version, capability, kind, backend, experts) if backend else None
        if rule is None or (flag or "", rule.reason) in told:
            continue
        flag = flag or KINDS[kind].flags[0]
        told.add((flag, rule.reason))
        others = tuple(name for name in allowed(version, capability, kind, experts) if name != "auto")
        cure = f"set {flag} in plan_engine_args to one of them" if others else f"leave {flag} out"
        refused.append(_refused(kind, capability, f"{flag} is {backend}", rule, others, cure))
    if _is_v4(model_config or {}):
        refused += _check_indexer(version, capability, flags, features, variables)
    if version == "0.5.16" and capability == "12.1" and _is_on(variables.get("SGLANG_ENABLE_JIT_DEEPGEMM", "1")):
        refused.append(
            RefusalError(
                "capability_deep_gemm",
                f"DeepGEMM is on: 0.5.16 turns it off on 12.0 and not on 12.1, and {_NO_DEEP_GEMM} "
                "(layers/deep_gemm_wrapper/configurer.py)",
                "SGLANG_ENABLE_JIT_DEEPGEMM=0 on 12.1",
                "set SGLANG_ENABLE_JIT_DEEPGEMM: '0' in plan_environment, or use 0.5.23",
            )
        )
    return refused


def _check_indexer(
    version: str, capability: str, flags: Mapping[str, Any], features: Mapping[str, str], variables: Mapping[str, str]
) -> list[RefusalError]:
    """The reader of the index keys. The plugin's own (``indexer_logits``) runs on every GPU, but has no FP4 keys."""
    reader = _indexer(capability, flags, variables)
    own = "indexer_logits" in features
    rule = refusal(version, capability, "indexer", reader)
    if reader != "fp4":
        if own or rule is None:
            return []
        others = allowed(version, capability, "indexer")
        cure = f"leave {_TILELANG} and {_TORCH} out of plan_environment, or set indexer_logits: triton in plan_features"
        return [_refused("indexer", capability, f"{_TILELANG} and {_TORCH} ask for {reader}", rule, others, cure)]
    cure = f"leave {_FP4_INDEXER} out"
    if rule is not None:
        others = allowed(version, capability, "indexer")
        return [_refused("indexer", capability, _FP4_INDEXER, rule, others, cure)]
    if own:
        found = f"{_FP4_INDEXER} and indexer_logits: {features['indexer_logits']} of plan_features"
        expected = "one of the two, since the plugin's kernel reads FP8 and BF16 keys"
        return [RefusalError("capability_indexer", found, expected, f"{cure}, or set indexer_logits: off")]
    if _indexer(capability, {}, variables) == "tilelang":
        found = (
            f"{_FP4_INDEXER} on compute capability {capability} with TileLang on, which fails at the first request: "
            "'DeepSeek V4 FP4 indexer requires DeepGEMM indexer' (dsv4/indexer.py)"
        )
        expected = f"{_TILELANG}=0 with FP4 index keys"
        return [RefusalError("capability_indexer", found, expected, f"set {_TILELANG}: '0', or {cure}")]
    return []


def check_driver(version: str, driver_version: str) -> list[RefusalError]:
    """Whether the NVIDIA driver (``"580.65.06"``) is new enough for the CUDA that a version is built with.

    Within one major release of CUDA any driver from its first branch on runs every minor release.
    """
    if version not in BACKENDS:
        raise ValueError(f"{version!r} is not an engine version; expected one of {', '.join(BACKENDS)}")
    cure = f"install a driver of branch {DRIVER_BRANCH} or newer, and reboot"
    matched = re.match(r"(\d+)(\.\d+)*\Z", driver_version.strip())
    if matched is None:
        found = f"driver version {driver_version!r}"
        return [RefusalError("driver_version", found, "digits and dots, such as 580.65.06", cure)]
    if int(matched.group(1)) < DRIVER_BRANCH:
        return [
            RefusalError(
                "driver_version",
                f"driver {driver_version.strip()}; SGLang {version} is built for {_CUDA}",
                f"driver branch {DRIVER_BRANCH} or newer, the oldest that runs CUDA 13",
                cure,
            )
        ]
    return []
