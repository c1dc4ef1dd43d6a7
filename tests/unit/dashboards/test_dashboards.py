# SPDX-License-Identifier: Apache-2.0
"""The committed dashboards are what the generator makes, and ask only for series that the pinned programs expose."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest

ROOT = Path(__file__).resolve().parents[3]
DASHBOARDS = ROOT / "files" / "dashboards"
FILES = sorted(DASHBOARDS.glob("*.json"))

# What Prometheus and our own exporter add to the names in metric_names.txt.
OWN_NAMES = {
    "up",
    "llmfleet_gpu_up",
    "llmfleet_gpu_utilization_ratio",
    "llmfleet_gpu_memory_used_bytes",
    "llmfleet_gpu_memory_total_bytes",
}
# The labels that the plan gives to scrape targets, and those of the series themselves that a selector may name.
LABELS = {"job", "host", "group", "role", "instance_name", "status_code", "cache_source", "le"}

Json = dict[str, Any]


def known_names() -> set[str]:
    lines = Path(__file__).with_name("metric_names.txt").read_text(encoding="utf-8").splitlines()
    return OWN_NAMES | {line for line in lines if line and not line.startswith("#")}


def parsed(expr: str) -> promql_parser.Expr:
    """The expression with Grafana's own variables filled in: they are no PromQL."""
    return promql_parser.parse(expr.replace("$__rate_interval", "5m").replace("$group", ".*").replace("$host", ".*"))


def selectors(node: object) -> Iterator[promql_parser.VectorSelector]:
    """Every vector selector below a node of the syntax tree."""
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield from selectors(node.vector_selector)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from selectors(node.expr)
        case promql_parser.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            raise TypeError(f"{type(node).__name__} is a kind of expression this test does not know")


def load(path: Path) -> Json:
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    return content


def panels(dashboard: Json) -> list[Json]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> list[Any]:
    return [
        pytest.param(query["expr"], id=f"{path.stem}: {panel['title']} {query['refId']}")
        for path in FILES
        for panel in panels(load(path))
        for query in panel["targets"]
    ]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_dashboards", DASHBOARDS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_files_are_what_the_generator_makes(generator: ModuleType) -> None:
    made = dict(generator.rendered())
    assert {path.name: path.read_text(encoding="utf-8") for path in FILES} == made


def test_rows_stand_in_the_order_of_what_predicts_an_outage() -> None:
    titles = [panel["title"] for panel in load(DASHBOARDS / "pd-group.json")["panels"] if panel["type"] == "row"]
    assert titles == ["Node health", "KV cache", "HiCache"]


def test_uids_are_unique_and_fixed() -> None:
    assert [load(path)["uid"] for path in FILES] == ["sglang-pd-group"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_has_id_unit_description_and_the_provisioned_data_source(path: Path) -> None:
    dashboard = load(path)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 1
    for panel in panels(dashboard):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"], panel["title"]
        sources = [panel["datasource"], *(query["datasource"] for query in panel["targets"])]
        assert sources == [{"type": "prometheus", "uid": "prometheus"}] * len(sources), panel["title"]
        assert [query["refId"] for query in panel["targets"]] == list("ABCDEFGH")[: len(panel["targets"])]
    for variable in dashboard["templating"]["list"]:
        assert variable["datasource"]["uid"] == "prometheus"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_stay_on_the_grid_and_do_not_overlap(path: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in load(path)["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@pytest.mark.parametrize("expr", queries())
def test_every_expression_asks_for_exposed_series_by_known_labels(expr: str) -> None:
    found = list(selectors(parsed(expr)))
    assert found, f"no selector in {expr}"
    for selector in found:
        assert selector.name in known_names()
        assert {matcher.name for matcher in selector.matchers.matchers} <= LABELS


def test_an_unknown_series_is_seen() -> None:
    names = {
        selector.name
        for selector in selectors(parsed("sum by (host) (rate(sglang_token_usage[$__rate_interval])) / 2"))
    }
    assert names == {"sglang_token_usage"}
    assert not names & known_names()
