# SPDX-License-Identifier: Apache-2.0
"""What the table of engine versions says, against what the sources of each version were found to hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _engine, _hicache
from ansible_collections.llmfleet.sglang.plugins.module_utils._engine import ENGINES

ROOT = Path(__file__).parents[4]


def metrics(version: str) -> set[str]:
    """Metrics in the source of a version; tests/contract/check_metrics.py compares the list with an installed one."""
    lines = (ROOT / "tests/fixtures/engine" / f"metrics_{version}.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_every_version_is_known_by_its_own_name() -> None:
    assert {name: engine.version for name, engine in ENGINES.items()} == {"0.5.16": "0.5.16", "0.5.23": "0.5.23"}
    assert _engine.DEFAULT_ENGINE == "0.5.23"


def test_every_version_has_a_hierarchical_cache_table() -> None:
    assert set(ENGINES) <= set(_hicache.RELEASES)


@pytest.mark.parametrize(("version", "route"), [("0.5.16", "/health_generate"), ("0.5.23", "/ready")])
def test_readiness_route(version: str, route: str) -> None:
    assert ENGINES[version].readiness_route == route


def test_the_older_version_has_no_flag_for_the_backup_of_retracted_requests() -> None:
    cpu = {version: engine.devices["cpu"].flags for version, engine in ENGINES.items()}
    assert "decode" not in cpu["0.5.16"]
    assert cpu["0.5.23"]["decode"] == {"disaggregation-decode-retraction-backup": "cpu_tensor"}
    assert cpu["0.5.16"][""] == cpu["0.5.23"][""]


@pytest.mark.parametrize("version", sorted(ENGINES))
def test_missing_metrics_are_those_of_the_default_version_that_the_source_lacks(version: str) -> None:
    assert ENGINES[version].missing_metrics == metrics(_engine.DEFAULT_ENGINE) - metrics(version)


def test_the_versions_differ_by_35_metrics() -> None:
    assert len(ENGINES["0.5.16"].missing_metrics) == 35
    assert "sglang:kv_cache_memory_usage_gb" in ENGINES["0.5.16"].missing_metrics
    assert ENGINES["0.5.16"].missing_labels == {"is_streaming"}


def test_the_dashboard_works_with_every_version() -> None:
    dashboard = json.dumps(json.loads((ROOT / "files/dashboards/pd-group.json").read_text()))
    used = set(re.findall(r"sglang:[a-z0-9_]+", dashboard))
    assert len(used) > 10
    for engine in ENGINES.values():
        assert not used & engine.missing_metrics
        assert not any(label in dashboard for label in engine.missing_labels)
