# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits without an engine: which settings are refused, which kernel is chosen, how rows are split."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from llmfleet_plugin import indexer_logits
from llmfleet_plugin._feature import VERSIONS, FeatureError


class Variables(dict[str, bool]):
    """The engine's registry of environment variables: ``envs.NAME.set(value)``."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(set=lambda value: self.__setitem__(name, value))


def engine(monkeypatch: pytest.MonkeyPatch, cuda: bool = True, plan: Any = None) -> Variables:
    """Stand in for the few modules of the engine that the hooks import."""
    variables = Variables()
    known: dict[str, dict[str, Any]] = {
        "environ": {"envs": variables},
        "utils": {"is_cuda": lambda: cuda},
        "layers.attention.dsv4.metadata": {"plan_indexer_row_chunks": plan},
    }
    for name, attributes in known.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    return variables


@pytest.mark.parametrize("name", ["SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_OPT_USE_AITER_INDEXER"])
@pytest.mark.parametrize("value", ["1", "true", "Yes"])
def test_another_kernel_in_the_environment_is_refused(name: str, value: str) -> None:
    with pytest.raises(FeatureError, match=f"{name} is {value}.*unset the variable"):
        indexer_logits.refuse_other_kernels({name: value})


@pytest.mark.parametrize(
    "environment", [{}, {"SGLANG_OPT_USE_TILELANG_INDEXER": "0"}, {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}]
)
def test_an_environment_without_another_kernel_is_taken(environment: dict[str, str]) -> None:
    indexer_logits.refuse_other_kernels(environment)


def test_the_fallback_is_chosen_whatever_the_engine_had_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = engine(monkeypatch)
    indexer_logits._choose_fallback(None, SimpleNamespace(use_fp4_indexer=False), "config", layer_id=2)
    assert variables == {
        "SGLANG_OPT_USE_TILELANG_INDEXER": False,
        "SGLANG_OPT_USE_AITER_INDEXER": False,
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": True,
    }


@pytest.mark.parametrize(
    ("cuda", "fp4", "found"), [(False, False, "without CUDA"), (True, True, "fp4-indexer is given")]
)
def test_what_the_kernel_cannot_do_is_refused_when_the_model_is_made(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, fp4: bool, found: str
) -> None:
    variables = engine(monkeypatch, cuda)
    with pytest.raises(FeatureError, match=found):
        indexer_logits._choose_fallback(None, SimpleNamespace(use_fp4_indexer=fp4))
    assert variables == {}


class Metadata:
    """Of a batch's metadata what the hook reads and writes."""

    max_compressed_seq_len = 32768

    def __init__(self, rows: int, schedule: Any = None) -> None:
        self.compressed_seq_lens = SimpleNamespace(shape=(rows,))
        self.deep_gemm_metadata = schedule
        self.rows_per_chunk: int | None = None

    def _mqa_logits_budget(self, *, num_rows: int) -> int:
        return 1000 + num_rows


@pytest.mark.parametrize(
    ("rows", "limit", "schedules"), [(8192, 3000, [None] * 3), (9000, 3000, [None] * 3), (4, None, None)]
)
def test_rows_are_split_as_the_engine_would(
    monkeypatch: pytest.MonkeyPatch, rows: int, limit: int | None, schedules: list[None] | None
) -> None:
    asked: list[dict[str, Any]] = []

    def plan(**arguments: Any) -> int | None:
        asked.append(arguments)
        return limit

    engine(monkeypatch, plan=plan)
    metadata = Metadata(rows)
    indexer_logits._split_rows(None, metadata)
    assert asked == [{"num_rows": rows, "num_cols": 32768, "budget_bytes": 1000 + rows, "sm120_row_cap": None}]
    assert (metadata.rows_per_chunk, metadata.deep_gemm_metadata) == (limit, schedules)


def test_a_batch_with_a_schedule_of_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch)
    metadata = Metadata(8192, schedule="DeepGEMM's")
    indexer_logits._split_rows(None, metadata)
    assert (metadata.rows_per_chunk, metadata.deep_gemm_metadata) == (None, "DeepGEMM's")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_called_is_checked_for_each_version(version: str) -> None:
    assert not set(indexer_logits.CALLS[version]) & set(indexer_logits.HOOKS[version])
