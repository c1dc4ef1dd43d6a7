# SPDX-License-Identifier: Apache-2.0
"""Measure how long planning a fleet takes: ``python -m tools.bench_plan [--output FILE]``.

A hundred hosts of 34 NUMA nodes each (two with CPUs, four with the memory of a GPU, the rest empty), each with four
GPUs, a prefill, a decode server and a router, and HiCache asked for. What is timed is the plan of every host in one
process: the arithmetic alone, without Ansible and without reading the hosts. Prints JSON with the seconds of each run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tools import ROOT

sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.llmfleet.sglang.plugins.module_utils import _plan

HOSTS, NODES, RUNS = 100, 34, 5
GIB = 1024**3
FLASH = {
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}


def node(number: int) -> dict[str, Any]:
    """Nodes 0 and 1 are the host's, 2, 10, 18 and 26 are memory of GPUs, the others are empty."""
    memory = 480 * GIB if number < 2 else 188 * GIB if number in (2, 10, 18, 26) else 0
    return {
        "id": number,
        "cpus": list(range(72 * number, 72 * (number + 1))) if number < 2 else [],
        "mem_total": memory,
        "mem_free": memory,
        "mem_available": memory,
        "hugepages": {str(2 << 20): {"total": 0, "free": 0}, str(GIB): {"total": 0, "free": 0}},
        "distances": [10 if other == number else 80 for other in range(NODES)],
    }


def facts() -> dict[str, Any]:
    gpus = [{"index": index, "pci": f"000{index}:01:00.0", "numa_node": index // 2, "cpus": []} for index in range(4)]
    topology = {"nodes": [node(n) for n in range(NODES)], "gpus": gpus, "mems_allowed": None, "limits": []}
    return {"topology": topology, "model_config": json.dumps(FLASH)}


def variables(number: int) -> dict[str, Any]:
    pinned = {"max-total-tokens": 1_000_192}
    return {
        "ansible_host": f"192.0.2.{number}",
        "plan_model_path": "/srv/models/flash",
        "plan_hicache": {"total": "500GiB"},
        "plan_instances": [
            {
                "name": "prefill",
                "role": "prefill",
                "gpus": [0, 1],
                "port": 30000,
                "bootstrap_port": 8998,
                "args": pinned,
            },
            {"name": "decode", "role": "decode", "gpus": [2, 3], "port": 30002},
            {"name": "router", "role": "router", "port": 30001, "metrics_port": 29000},
        ],
        # So that one Prometheus can reach every host's.
        "gpu_exporter_listen_address": f"192.0.2.{number}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    artefacts = yaml.safe_load((ROOT / "files/artefacts.yml").read_text())
    fleet = {f"gpu-{number:03}": variables(number) for number in range(1, HOSTS + 1)}
    for entry in fleet.values():
        for instance in entry["plan_instances"]:
            instance["host"] = entry["ansible_host"]
    found, seconds, given = facts(), [], set()
    for _run in range(RUNS):
        start = time.perf_counter()
        plans = {host: _plan.make_plan(host, fleet, artefacts, found, "gpu-001") for host in fleet}
        seconds.append(round(time.perf_counter() - start, 3))
        given |= {plan["budget"]["host"]["given"] for plan in plans.values()}
        assert not any(plan["refusals"] for plan in plans.values())
    result = {
        "hosts": HOSTS,
        "nodes_per_host": NODES,
        "seconds": seconds,
        "given_by_host": sorted(given),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
