# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA without an engine: which servers and models are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llmfleet_plugin import sparse_mla
from llmfleet_plugin._feature import VERSIONS, FeatureError

V4 = SimpleNamespace(model_type="deepseek_v4")


def server(**flags: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"kv_cache_dtype": "auto", **flags})


@pytest.mark.parametrize(
    "flags",
    [
        {},  # 0.5.16 has no such flag
        {"dsv4_attn_backend": "auto"},
        {"dsv4_attn_backend": "flashmla", "kv_cache_dtype": "fp8_e4m3"},
    ],
)
def test_server_that_calls_the_paged_kernel_is_taken(flags: dict[str, str]) -> None:
    sparse_mla.refuse(server(**flags), V4)


@pytest.mark.parametrize(
    ("flags", "model", "found"),
    [
        ({"dsv4_attn_backend": "trtllm"}, V4, "--dsv4-attn-backend is trtllm"),
        ({"dsv4_attn_backend": "flashmla_mega"}, V4, "--dsv4-attn-backend is flashmla_mega"),
        ({"kv_cache_dtype": "bfloat16"}, V4, "--kv-cache-dtype is bfloat16"),
        ({}, SimpleNamespace(model_type="deepseek_v41"), "the model is a deepseek_v41"),
    ],
)
def test_server_that_goes_past_the_paged_kernel_is_refused(flags: dict[str, str], model: Any, found: str) -> None:
    with pytest.raises(FeatureError, match=rf"{found}.*turn sparse_mla off"):
        sparse_mla.refuse(server(**flags), model)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_has_one_paged_kernel_and_none_is_hooked_early(version: str) -> None:
    assert len(sparse_mla.KERNELS[version]) == len(sparse_mla.KERNELS_SM120) == 1
    assert not set(sparse_mla.KERNELS[version]) & set(sparse_mla.HOOKS[version])
