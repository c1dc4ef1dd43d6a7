# SPDX-License-Identifier: Apache-2.0
"""The configuration that the role prometheus renders from scrape targets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible.plugins.filter.core import FilterModule

TEMPLATES = Path(__file__).resolve().parents[3] / "roles" / "prometheus" / "templates"

Json = dict[str, Any]

TARGETS = [
    {
        "job": "sglang",
        "targets": [
            {
                "address": "10.0.0.1:30000",
                "path": "/metrics",
                "labels": {"host": "gpu1", "instance_name": "prefill-0", "role": "prefill", "group": "a"},
            },
            {"address": "[2001:db8::1]:30001", "path": "/metrics", "labels": {"host": "gpu2"}},
        ],
    },
    {"job": "router", "targets": [{"address": "10.0.0.1:29000", "path": "/other", "labels": {"note": 'a "b": c'}}]},
    {"job": "gpu_exporter", "targets": []},
]


def rendered(**variables: Any) -> Json:
    """The rendered configuration, parsed: Jinja set up as Ansible does it, with those filters that Jinja has not."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters = FilterModule().filters() | environment.filters
    values = {
        "ansible_managed": "managed",
        "prometheus_scrape_interval": "5s",
        "prometheus_external_labels": {},
        "_prometheus_rules_dir": "/etc/prometheus/rules",
        "_prometheus_self": "127.0.0.1:9090",
        "plan_scrape": TARGETS,
    }
    content: Json = yaml.safe_load(environment.get_template("prometheus.yml.j2").render(values | variables))
    return content


def jobs(config: Json) -> dict[str, Json]:
    return {job["job_name"]: job for job in config["scrape_configs"]}


def test_every_job_of_the_plan_and_prometheus_itself_is_scraped() -> None:
    config = rendered()
    assert list(jobs(config)) == ["prometheus", "sglang", "router", "gpu_exporter"]
    assert jobs(config)["prometheus"]["static_configs"] == [{"targets": ["127.0.0.1:9090"]}]
    assert jobs(config)["gpu_exporter"]["static_configs"] == []


def test_targets_carry_their_labels_and_path() -> None:
    assert jobs(rendered())["sglang"]["static_configs"] == [
        {
            "targets": ["10.0.0.1:30000"],
            "labels": {
                "__metrics_path__": "/metrics",
                "group": "a",
                "host": "gpu1",
                "instance_name": "prefill-0",
                "role": "prefill",
            },
        },
        {"targets": ["[2001:db8::1]:30001"], "labels": {"__metrics_path__": "/metrics", "host": "gpu2"}},
    ]
    assert jobs(rendered())["router"]["static_configs"][0]["labels"] == {
        "__metrics_path__": "/other",
        "note": 'a "b": c',
    }


def test_a_target_without_path_and_labels_has_the_default_path() -> None:
    config = rendered(plan_scrape=[{"job": "router", "targets": [{"address": "10.0.0.1:29000"}]}])
    assert jobs(config)["router"]["static_configs"] == [
        {"targets": ["10.0.0.1:29000"], "labels": {"__metrics_path__": "/metrics"}}
    ]


def test_intervals_rules_and_external_labels() -> None:
    config = rendered(prometheus_external_labels={"site": "lab: 1"})
    assert config["global"] == {
        "scrape_interval": "5s",
        "evaluation_interval": "5s",
        "external_labels": {"site": "lab: 1"},
    }
    assert config["rule_files"] == ["/etc/prometheus/rules/*.yml"]


@pytest.mark.parametrize(
    ("arrived", "stored"),
    [
        ("sglang:token_usage", "sglang:token_usage"),
        ("sglang_token_usage", "sglang:token_usage"),
        ("sglang_queue_time_seconds_bucket", "sglang:queue_time_seconds_bucket"),
        ("sglang", "sglang"),
        ("my_sglang_x", "my_sglang_x"),
        ("python_info", "python_info"),
    ],
)
def test_the_engines_series_are_stored_under_one_name(arrived: str, stored: str) -> None:
    (rule,) = jobs(rendered())["sglang"]["metric_relabel_configs"]
    assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
    # Prometheus anchors the expression at both ends and leaves the label alone where it does not match.
    match = re.fullmatch(rule["regex"], arrived)
    assert (match.expand(rule["replacement"].replace("$1", r"\1")) if match else arrived) == stored


def test_only_the_engines_series_are_renamed() -> None:
    assert [name for name, job in jobs(rendered()).items() if "metric_relabel_configs" in job] == ["sglang"]
