# SPDX-License-Identifier: Apache-2.0
"""Inputs that the tests of the plan share: a fleet of one host, and what such a host is like."""

from __future__ import annotations

import copy
from typing import Any

HOST = "gpu1"
ARTEFACTS = {
    "artefacts": [
        {"kind": "wheel", "name": name, "version": "1.0", "arch": "any", "sha256": "0" * 64, "sets": [group]}
        for name, group in (
            ("sglang", "engine-0.5.23-cpu"),
            ("sglang-cuda", "engine-0.5.23-cuda"),
            ("smg", "router"),
            ("uv", "uv"),
        )
    ]
}
GIB = 1024**3


def prefill(**changes: Any) -> dict[str, Any]:
    return {"name": "prefill", "role": "prefill", "port": 30000, "bootstrap_port": 8998, "gpus": [0, 1, 2, 3]} | changes


def decode(**changes: Any) -> dict[str, Any]:
    return {"name": "decode", "role": "decode", "port": 30002, "gpus": [4, 5, 6, 7]} | changes


def router(**changes: Any) -> dict[str, Any]:
    return {"name": "router", "role": "router", "port": 30001, "metrics_port": 29000, "host": "0.0.0.0"} | changes


def variables(*instances: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The variables of one host: the reference topology unless told otherwise."""
    return {
        "ansible_host": "192.0.2.11",
        "plan_model_path": "/srv/models/flash",
        "plan_instances": list(instances or (prefill(), decode(), router())),
    } | changes


def facts(**changes: Any) -> dict[str, Any]:
    """A Debian host with eight GPUs on two nodes, an empty disk of 100 GiB and the model in place."""
    path = {"exists": True, "is_dir": True, "unreadable": "", "size": 1000, "device": 1, "free": 100 * GIB}
    found = {
        "os": {"distribution": "Debian", "major": "12", "arch": "x86_64"},
        "topology": {
            "nodes": [{"id": 0}, {"id": 1}],
            "gpus": [{"index": n, "pci": f"0000:{n:02x}:00.0", "numa_node": n // 4} for n in range(8)],
        },
        "ports": {},
        "paths": {name: dict(path) for name in ("/opt/llmfleet", "/srv/models/flash", "/srv/models/flash/config.json")},
        "releases": [],
        "model_source": None,
    }
    return copy.deepcopy(found | changes)
