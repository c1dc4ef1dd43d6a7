# SPDX-License-Identifier: Apache-2.0
"""Features: what may be asked for, on what, and whether every process of a server has them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _features
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

PLUGIN = Path(__file__).parents[4] / "files" / "plugin"


def test_the_table_is_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(PLUGIN), *sys.path])
    from llmfleet_plugin._features import FEATURES
    from llmfleet_plugin._report import FOLDER

    plugin = {item.name: (item.variable, item.values, dict(item.needs or {})) for item in FEATURES}
    assert plugin == {name: (item.variable, item.values, dict(item.needs)) for name, item in _features.FEATURES.items()}
    assert FOLDER == _features.FOLDER


@pytest.mark.parametrize(
    ("asked", "features"),
    [
        ({}, {"queue_bound": "on"}),
        ({"queue_bound": True}, {"queue_bound": "on"}),
        ({"queue_bound": False}, {}),
        ({"queue_bound": "off", "sparse_mla": "triton"}, {"sparse_mla": "triton"}),
        ({"sparse_mla": False}, {"queue_bound": "on"}),
    ],
)
def test_what_is_asked_for(asked: dict[str, Any], features: dict[str, str]) -> None:
    assert _features.parse_features(asked, "plan_features") == features


@pytest.mark.parametrize("asked", [["queue_bound"], "on", {"queue_bounds": "on"}, {"index_keys": "fp4"}, {"x": 1}])
def test_what_there_is_not_is_refused(asked: Any) -> None:
    with pytest.raises(RefusalError):
        _features.parse_features(asked, "plan_features")


def test_kernels_are_refused_without_cuda_and_bf16_keys_without_their_reader() -> None:
    codes = [error.code for error in _features.check_features({"index_keys": "bf16", "queue_bound": "on"}, "cpu")]
    assert codes == ["feature_device", "feature_needs"]
    assert _features.check_features({"index_keys": "bf16", "indexer_logits": "triton"}, "cuda") == []


PLANNED = {"name": "decode", "unit": "llmfleet-decode.service", "features": {"queue_bound": "on"}, "ranks": 2}


def reports(*processes: str, **features: str) -> dict[str, Any]:
    told = {name: {"value": value} for name, value in (features or {"queue_bound": "on"}).items()}
    return {PLANNED["unit"]: {"reports": {name: {"pid": 7, "features": told} for name in processes}}}


def test_every_rank_has_to_report() -> None:
    assert _features.findings([PLANNED], reports("main", "tp0-pp0-dp0", "tp1-pp0-dp0")) == []
    (missing,) = _features.findings([PLANNED], reports("main", "tp0-pp0-dp0"))
    assert missing["expected"] == "reports of main and of 2 ranks"
    assert _features.findings([PLANNED], {})[0]["found"] == "reports of no process"


def test_a_process_with_other_features_is_named() -> None:
    seen = reports("main", "tp0-pp0-dp0", "tp1-pp0-dp0", sparse_mla="triton")
    found = _features.findings([PLANNED], seen)
    assert [entry["found"] for entry in found] == [
        f"{name} (PID 7) runs with sparse_mla: triton" for name in ("main", "tp0-pp0-dp0", "tp1-pp0-dp0")
    ]
    assert found[0]["expected"] == "queue_bound: on"


def test_a_server_without_features_has_nothing_to_report() -> None:
    assert _features.findings([PLANNED | {"features": {}}], {}) == []
