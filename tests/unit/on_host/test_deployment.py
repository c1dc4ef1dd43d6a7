# SPDX-License-Identifier: Apache-2.0
"""What is read of a host, of texts as they are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deployment
import pytest

ROUTER = {"name": "router", "role": "router", "group": "a", "port": 1, "metrics": {"port": 2, "path": "/metrics"}}
DECODE = {"name": "decode", "role": "decode", "group": "a", "port": 3, "metrics": {"port": 3, "path": "/metrics"}}
TOLD = {
    2: "# TYPE smg_admission_inflight gauge\nsmg_admission_inflight 4\nsmg_admission_queue_depth 1\nsmg_other 9\n",
    3: 'sglang:num_running_reqs{tp_rank="0"} 2.0\nsglang:num_running_reqs{tp_rank="1"} 3.0\n'
    'sglang:num_decode_prealloc_queue_reqs{tp_rank="0"} 1.0\nsglang:num_retracted_reqs{tp_rank="0"} 7.0\n',
}


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two instances that are ready, and a router that knows its worker."""
    state: dict[str, Any] = {"active": "active", "workers": [{"is_healthy": True}]}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"instances": [DECODE, ROUTER]}))
    monkeypatch.setattr(deployment, "PLAN", plan)
    monkeypatch.setattr(
        deployment,
        "get",
        lambda port, path: json.dumps({"workers": state["workers"]}) if path == "/workers" else TOLD[port],
    )
    monkeypatch.setattr(deployment, "unit", lambda _name: {"ActiveState": state["active"]})
    return state


def test_gauges_are_those_of_the_busiest_rank() -> None:
    assert deployment.gauges(DECODE) == {
        "num_running_reqs": 3.0,
        "num_decode_prealloc_queue_reqs": 1.0,
        "num_retracted_reqs": 7.0,
    }


def test_requests_are_those_of_servers_and_routers() -> None:
    assert deployment.requests_held() == 3 + 1 + 4 + 1


@pytest.mark.parametrize(
    ("active", "workers", "well"),
    [
        ("active", [{"is_healthy": True}], True),
        ("activating", [{"is_healthy": True}], False),
        ("active", [{"is_healthy": False}], False),
        ("active", [], False),
        ("active", [{"is_healthy": True}, {"is_healthy": True}], False),
    ],
)
def test_a_router_has_to_take_every_server(host: dict[str, Any], active: str, workers: list[Any], well: bool) -> None:
    host.update(active=active, workers=workers)
    assert deployment.healthy() is well


def test_memory_is_the_sum_of_a_units_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "members", lambda _name: [1, 2, 3])
    told = {
        "/proc/1/smaps_rollup": "Rss:  9000 kB\nPss:  2048 kB\nPss_Anon: 5 kB\n",
        "/proc/2/smaps_rollup": "Pss:  512 kB\n",
    }
    monkeypatch.setattr(deployment, "read", lambda path: told.get(str(path), ""))
    assert deployment.memory_mib("decode") == 2.5
