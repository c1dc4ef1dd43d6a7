# SPDX-License-Identifier: Apache-2.0
"""Reading nodes and GPUs from a tree in the shape of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import (
    TopologyError,
    normalise_pci,
    parse_cpulist,
    read_topology,
)
from hypothesis import given
from hypothesis import strategies as st


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def node(root: Path, number: int, cpus: str, total_kib: int, distance: str = "10 21") -> None:
    base = f"devices/system/node/node{number}"
    put(root, f"{base}/cpulist", f"{cpus}\n")
    put(root, f"{base}/distance", f"{distance}\n")
    put(
        root,
        f"{base}/meminfo",
        f"Node {number} MemTotal:  {total_kib} kB\nNode {number} MemFree:  {total_kib // 2} kB\n",
    )


def pci(root: Path, address: str, vendor: str, device: str, pci_class: str, numa_node: int, cpus: str = "0") -> None:
    base = f"bus/pci/devices/{address}"
    for name, text in (("vendor", vendor), ("device", device), ("class", pci_class), ("local_cpulist", cpus)):
        put(root, f"{base}/{name}", f"{text}\n")
    put(root, f"{base}/numa_node", f"{numa_node}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    node(tmp_path, 0, "0-1", 1000)
    node(tmp_path, 1, "2,3", 2000, "21 10")
    pci(tmp_path, "0000:81:00.0", "0x10de", "0x2335", "0x030200", 1, "2-3")
    pci(tmp_path, "0000:17:00.0", "0x10de", "0x2335", "0x030200", 0, "0-1")
    pci(tmp_path, "0000:17:00.1", "0x10de", "0x22bd", "0x040300", 0)  # the audio function of a GPU
    pci(tmp_path, "0000:00:02.0", "0x8086", "0x1234", "0x030000", -1)  # another vendor's display
    return tmp_path


def test_nodes_are_read_in_bytes(tree: Path) -> None:
    nodes = read_topology(str(tree))["nodes"]
    assert nodes[1] == {
        "id": 1,
        "cpus": [2, 3],
        "mem_total": 2000 * 1024,
        "mem_free": 1000 * 1024,
        "distances": [21, 10],
    }
    assert [entry["id"] for entry in nodes] == [0, 1]


def test_gpus_are_nvidias_display_controllers_in_pci_order(tree: Path) -> None:
    gpus = read_topology(str(tree))["gpus"]
    assert [(gpu["index"], gpu["pci"], gpu["numa_node"]) for gpu in gpus] == [
        (0, "0000:17:00.0", 0),
        (1, "0000:81:00.0", 1),
    ]
    assert gpus[1]["cpus"] == [2, 3]


def test_an_operator_can_name_more_devices(tree: Path) -> None:
    gpus = read_topology(str(tree), ["8086:1234"])["gpus"]
    assert [gpu["pci"] for gpu in gpus] == ["0000:00:02.0", "0000:17:00.0", "0000:81:00.0"]
    assert gpus[0]["numa_node"] is None


def test_nodes_are_ordered_by_number_not_by_name(tree: Path) -> None:
    node(tree, 10, "", 3000, "21 21 10")
    nodes = read_topology(str(tree))["nodes"]
    assert [entry["id"] for entry in nodes] == [0, 1, 10]
    assert nodes[2]["cpus"] == []


@pytest.mark.parametrize(
    ("break_tree", "message"),
    [
        (lambda root: (root / "devices/system/node/node1/meminfo").write_text("Node 1 MemFree: 1 kB\n"), "no MemTotal"),
        (lambda root: (root / "devices/system/node/node0/cpulist").unlink(), "cannot read"),
        (lambda root: (root / "devices/system/node/node0/cpulist").write_text("a-b\n"), "not a kernel CPU list"),
    ],
)
def test_a_truncated_tree_is_an_error(tree: Path, break_tree: object, message: str) -> None:
    assert callable(break_tree)
    break_tree(tree)
    with pytest.raises(TopologyError, match=message):
        read_topology(str(tree))


def test_no_tree_is_an_error_and_no_pci_bus_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="cannot list"):
        read_topology(str(tmp_path / "nowhere"))
    bare = tmp_path / "bare"
    node(bare, 0, "0", 10, "10")
    assert read_topology(str(bare))["gpus"] == []


def test_a_wrong_pci_id_is_an_error(tree: Path) -> None:
    with pytest.raises(TopologyError, match="vendor:device"):
        read_topology(str(tree), ["10de"])


@pytest.mark.parametrize("address", ["00000000:17:00.0", "0000:17:00.0", "17:00.0", " 0000:17:00.0 "])
def test_pci_addresses_have_one_spelling(address: str) -> None:
    assert normalise_pci(address) == "0000:17:00.0"


@given(st.sets(st.integers(0, 200)))
def test_a_cpulist_reads_back(cpus: set[int]) -> None:
    assert parse_cpulist(",".join(str(cpu) for cpu in sorted(cpus))) == sorted(cpus)
