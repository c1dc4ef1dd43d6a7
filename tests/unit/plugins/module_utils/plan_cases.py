# SPDX-License-Identifier: Apache-2.0
"""Inputs that the tests of the plan share: a fleet of one host, and what such a host is like."""

from __future__ import annotations

import copy
import json
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
# The dimensions of a DeepSeek V4 of 43 layers, 21 of them compressed by 4 and 20 by 128.
FLASH = {
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}


def prefill(**changes: Any) -> dict[str, Any]:
    return {"name": "prefill", "role": "prefill", "port": 30000, "bootstrap_port": 8998, "gpus": [0, 1, 2, 3]} | changes


def decode(**changes: Any) -> dict[str, Any]:
    return {"name": "decode", "role": "decode", "port": 30002, "gpus": [4, 5, 6, 7]} | changes


def router(**changes: Any) -> dict[str, Any]:
    return {"name": "router", "role": "router", "port": 30001, "metrics_port": 29000, "host": "0.0.0.0"} | changes


def fallback(**changes: Any) -> dict[str, Any]:
    return {"name": "whole", "role": "server", "gpus": list(range(8))} | changes


def variables(*instances: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The variables of one host: the reference topology unless told otherwise."""
    return {
        "ansible_host": "192.0.2.11",
        "plan_model_path": "/srv/models/flash",
        "plan_instances": list(instances or (prefill(), decode(), router())),
    } | changes


def node(number: int, total: int = 240 * 10**9, cpus: int = 64, nodes: int = 2, **changes: Any) -> dict[str, Any]:
    """A NUMA node of ``nodes`` with ``cpus`` CPUs and ``total`` bytes, all of it free."""
    return {
        "id": number,
        "cpus": list(range(number * cpus, (number + 1) * cpus)),
        "mem_total": total,
        "mem_free": total,
        "mem_available": total,
        "hugepages": {},
        "distances": [10 if other == number else 21 for other in range(nodes)],
    } | changes


def gpu(index: int, numa_node: int | None, **changes: Any) -> dict[str, Any]:
    """A GPU whose node the firmware names; None where it does not."""
    return {"index": index, "pci": f"0000:{index:02x}:00.0", "numa_node": numa_node, "cpus": []} | changes


def facts(**changes: Any) -> dict[str, Any]:
    """A Debian host with eight GPUs on two nodes, an empty disk of 100 GiB and the model in place."""
    path = {"exists": True, "is_dir": True, "unreadable": "", "size": 1000, "device": 1, "free": 100 * GIB}
    found = {
        "os": {"distribution": "Debian", "major": "12", "arch": "x86_64"},
        "topology": {
            "nodes": [node(0), node(1)],
            "gpus": [gpu(n, n // 4) for n in range(8)],
            "mems_allowed": [0, 1],
            "limits": [],
        },
        "memory": {},
        "model_config": json.dumps(FLASH),
        "ports": {},
        "paths": {name: dict(path) for name in ("/opt/llmfleet", "/srv/models/flash", "/srv/models/flash/config.json")},
        "releases": [],
        "model_source": None,
    }
    return copy.deepcopy(found | changes)
