# SPDX-License-Identifier: Apache-2.0
"""Reading nodes, GPUs and limits from trees in the shape of sysfs and procfs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import (
    TopologyError,
    available,
    format_cpulist,
    normalise_pci,
    parse_cpulist,
    parse_zoneinfo,
    read_gpus,
    read_limits,
    read_mems_allowed,
    read_nodes,
    read_topology,
    slice_folders,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.topology_cases import (
    FIXTURES,
    GIB,
    Files,
    gpu_files,
    load,
    node_files,
    read,
    square_host,
    write,
)

KIB = 1024
#: A host has these or not: its kernel may be older, the controller off, the slice not made yet.
OPTIONAL = ("/online", "/memory.max", "/memory.high", "/memory.limit_in_bytes", "proc/zoneinfo", "proc/self/status")


# --------------------------------------------------------------------------------------------------------- whole hosts


def test_a_node_has_exactly_these_facts(tmp_path: Path) -> None:
    pools = {2048: (512, 500), 1048576: (4, 0)}
    files = node_files(0, [0, 1, 8], 1000, [10], pools, MemFree=300) | {"sys/devices/system/node/online": "0\n"}
    assert read(write(tmp_path, files))["nodes"] == [
        {
            "id": 0,
            "cpus": [0, 1, 8],
            "mem_total": 1000 * KIB,
            "mem_free": 300 * KIB,
            "mem_available": 300 * KIB,
            "hugepages": {"2097152": {"total": 512, "free": 500}, "1073741824": {"total": 4, "free": 0}},
            "distances": [10],
        }
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 34])
def test_hosts_of_any_number_of_nodes(tmp_path: Path, count: int) -> None:
    found = read(write(tmp_path, square_host(count, gpus=8)))
    assert [node["id"] for node in found["nodes"]] == list(range(count))
    assert {node["mem_total"] for node in found["nodes"]} == {64 * GIB}
    assert [node["cpus"][0] for node in found["nodes"]] == [4 * node for node in range(count)]
    assert [node["distances"].index(10) for node in found["nodes"]] == list(range(count))
    # In PCI order, although that runs against the order of the nodes.
    assert [gpu["index"] for gpu in found["gpus"]] == list(range(8))
    assert [gpu["numa_node"] for gpu in found["gpus"]] == [count - 1 - index % count for index in range(8)]


def test_nodes_with_cpus_and_no_memory(tmp_path: Path) -> None:
    nodes = read(write(tmp_path, load("four_nodes_two_without_memory")))["nodes"]
    assert [node["mem_total"] for node in nodes] == [0, 65850368 * KIB, 66019328 * KIB, 0]
    assert [node["mem_free"] for node in nodes] == [0, 19675136 * KIB, 28615680 * KIB, 0]
    assert nodes[0]["cpus"] == [0, 1, 2, 3, 4, 5, 24, 25, 26, 27, 28, 29]
    assert nodes[3]["distances"] == [12, 12, 12, 10]


def test_nodes_with_memory_and_no_cpus(tmp_path: Path) -> None:
    found = read(write(tmp_path, load("thirty_four_nodes")))
    assert len(found["nodes"]) == 34
    assert [node["id"] for node in found["nodes"] if node["cpus"]] == [0, 1]
    assert [node["id"] for node in found["nodes"] if node["mem_total"] and not node["cpus"]] == [2, 10, 18, 26]
    assert [(gpu["pci"], gpu["numa_node"]) for gpu in found["gpus"]] == [
        ("0008:01:00.0", 0),
        ("0009:01:00.0", 0),
        ("0018:01:00.0", 1),
        ("0019:01:00.0", 1),
    ]


def test_unequal_nodes_are_not_averaged(tmp_path: Path) -> None:
    nodes = read(write(tmp_path, load("unequal_nodes")))["nodes"]
    assert [node["mem_total"] for node in nodes] == [1970 * 1024 * KIB, 669 * 1024 * KIB]


def test_hugepages_of_every_size_are_read(tmp_path: Path) -> None:
    """The node's meminfo counts the default size only: 404992 pages of 2 MiB, nothing of the 1 GiB pages."""
    nodes = read(write(tmp_path, load("hugepages_of_two_sizes")))["nodes"]
    assert [node["hugepages"] for node in nodes] == [
        {"2097152": {"total": 404992, "free": 404992}, "1073741824": {"total": 8, "free": 3}},
        {"2097152": {"total": 404992, "free": 404992}, "1073741824": {"total": 0, "free": 0}},
    ]
    assert nodes[0]["mem_total"] == 886 * GIB
    # What is set aside in hugepages is not free: 791 of 886 GiB.
    assert [node["mem_free"] // GIB for node in nodes] == [42, 50]


def test_a_tree_without_zoneinfo_status_and_cgroups_is_read(tmp_path: Path) -> None:
    found = read(write(tmp_path, square_host(2, gpus=0)))
    assert (found["gpus"], found["mems_allowed"], found["limits"]) == ([], None, [])


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.json")))
def test_every_fixture_is_a_host(tmp_path: Path, name: str) -> None:
    found = read(write(tmp_path, load(name)))
    assert set(found["mems_allowed"]) == {node["id"] for node in found["nodes"]}


# ---------------------------------------------------------------------------------------------------------- the GPUs


def test_gpus_are_nvidias_display_controllers_in_pci_order(tmp_path: Path) -> None:
    gpus = read(write(tmp_path, load("eight_gpus_two_nodes")))["gpus"]
    assert [(gpu["index"], gpu["pci"], gpu["numa_node"]) for gpu in gpus] == [
        (0, "0000:9f:00.0", 0),
        (1, "0000:a1:00.0", 0),
        (2, "0000:a3:00.0", 0),
        (3, "0000:a5:00.0", 0),
        (4, "0000:ae:00.0", 1),
        (5, "0000:b0:00.0", 1),
        (6, "0000:b2:00.0", 1),
        (7, "0000:b4:00.0", 1),
    ]
    assert (gpus[0]["vendor"], gpus[0]["device"], gpus[0]["cpus"][:2]) == ("10de", "27b8", [0, 1])


def test_other_functions_of_a_gpu_are_none(tmp_path: Path) -> None:
    files = square_host(1, gpus=1) | gpu_files("0000:01:00.1", 0, [0], "10de:22bd", "040300")
    assert [gpu["pci"] for gpu in read(write(tmp_path, files))["gpus"]] == ["0000:01:00.0"]


def test_an_operator_can_name_more_devices(tmp_path: Path) -> None:
    root = write(tmp_path, load("eight_gpus_two_nodes"))
    gpus = read_gpus(str(root / "sys"), [" 1D0F:1111 "])
    assert [gpu["pci"] for gpu in gpus][:2] == ["0000:00:03.0", "0000:9f:00.0"]


def test_where_the_firmware_does_not_say_the_node_is_none(tmp_path: Path) -> None:
    gpus = read(write(tmp_path, load("gpus_without_node")))["gpus"]
    assert [(gpu["pci"], gpu["numa_node"], len(gpu["cpus"])) for gpu in gpus] == [
        ("0000:17:00.0", None, 64),
        ("0000:97:00.0", None, 64),
    ]


def test_a_longer_domain_comes_after_every_shorter_one(tmp_path: Path) -> None:
    files = square_host(1, gpus=0) | gpu_files("10000:01:00.0", 0, [0]) | gpu_files("ffff:01:00.0", 0, [0])
    assert [gpu["pci"] for gpu in read(write(tmp_path, files))["gpus"]] == ["ffff:01:00.0", "10000:01:00.0"]


def test_a_wrong_pci_id_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="'10de' is not a PCI id of the form vendor:device"):
        read_gpus(str(tmp_path), ["10de"])


# ------------------------------------------------------------------------------------------------------- what moves


def test_available_is_the_kernels_formula_for_each_node(tmp_path: Path) -> None:
    """Node 0 keeps all of its DMA (3840 pages) and DMA32 (384000), which the reserves of higher zones exceed, and the
    high watermark of Normal (60000): 447840 pages, 1791360 kB. Its low watermarks are 5 + 600 + 40000 + 32 pages,
    162548 kB. So 33551360 - 1791360 + (60000000 - 162548) + (1000000 - 162548).
    Node 1: 64000000 - 240000 + (10000000 - 160000) + 300000 / 2, half of the slab being less than its low watermark.
    """
    nodes = read(write(tmp_path, load("eight_gpus_two_nodes")))["nodes"]
    assert [node["mem_available"] for node in nodes] == [92434904 * KIB, 73750000 * KIB]


def test_without_zoneinfo_the_watermarks_count_as_nothing(tmp_path: Path) -> None:
    files = load("eight_gpus_two_nodes")
    del files["proc/zoneinfo"]
    nodes = read(write(tmp_path, files))["nodes"]
    assert [node["mem_available"] for node in nodes] == [94551360 * KIB, 74300000 * KIB]


def test_pages_may_be_larger_than_4_kib() -> None:
    """10000 pages of 64 KiB; 100 are kept, the low watermark is 50."""
    meminfo = {"MemTotal": 640000 * KIB, "MemFree": 200000 * KIB, "Inactive(file)": 100000 * KIB}
    zone = {"managed": 10000, "low": 50, "kept": 100}
    assert available(meminfo, zone) == (200000 - 6400 + 100000 - 3200) * KIB


def test_the_page_size_does_not_depend_on_what_is_free() -> None:
    """Nothing is free, and 10000 pages of 16 KiB are managed: the cache less the low watermark is left."""
    meminfo = {"MemTotal": 160000 * KIB, "MemFree": 0, "Active(file)": 50000 * KIB}
    assert available(meminfo, {"managed": 10000, "low": 100, "kept": 0}) == (50000 - 1600) * KIB


def test_nothing_is_never_less_than_nothing() -> None:
    meminfo = {"MemTotal": 4000 * KIB, "MemFree": 100 * KIB}
    assert available(meminfo, {"managed": 1000, "low": 100, "kept": 500}) == 0


def test_zones_are_summed_by_node() -> None:
    text = load("eight_gpus_two_nodes")["proc/zoneinfo"]
    assert parse_zoneinfo(text) == {
        0: {"managed": 24987840, "low": 40637, "kept": 447840},
        1: {"managed": 24780800, "low": 40000, "kept": 60000},
    }


# ------------------------------------------------------------------------------------------------------- the limits


def test_limits_of_nested_slices_v2(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    files = {
        f"{base}/cgroup.controllers": "cpuset cpu memory\n",
        f"{base}/llm.slice/memory.max": f"{400 * GIB}\n",
        f"{base}/llm.slice/memory.high": "max\n",
        f"{base}/llm.slice/llm-fleet.slice/memory.max": "max\n",
        f"{base}/llm.slice/llm-fleet.slice/memory.high": f"{300 * GIB}\n",
        # Neither on the way, nor another hierarchy.
        f"{base}/system.slice/memory.max": "1\n",
        f"{base}/memory/memory.max": "1\n",
    }
    write(tmp_path, files)
    assert read_limits(str(tmp_path / "sys"), "llm-fleet.slice") == [
        {"path": "/llm.slice", "file": "memory.max", "limit": 400 * GIB},
        {"path": "/llm.slice/llm-fleet.slice", "file": "memory.high", "limit": 300 * GIB},
    ]
    # A slice that is not there yet has those of the slices around it.
    assert [limit["limit"] for limit in read_limits(str(tmp_path / "sys"), "llm-new.slice")] == [400 * GIB]


@pytest.mark.parametrize("unlimited", [2**63 - 4096, 2**63 - 65536])
def test_limits_of_nested_slices_v1(tmp_path: Path, unlimited: int) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        f"{base}/memory.limit_in_bytes": f"{unlimited}\n",
        f"{base}/llm.slice/memory.limit_in_bytes": f"{500 * GIB}\n",
        f"{base}/llm.slice/llm-fleet.slice/memory.limit_in_bytes": f"{unlimited}\n",
    }
    write(tmp_path, files)
    assert read_limits(str(tmp_path / "sys"), "llm-fleet.slice") == [
        {"path": "/llm.slice", "file": "memory.limit_in_bytes", "limit": 500 * GIB}
    ]


def test_a_limit_at_the_root_counts(tmp_path: Path) -> None:
    """As a container sees its own limit, whose cgroup is the root to it."""
    write(tmp_path, {"sys/fs/cgroup/memory.max": "1000\n"})
    expected = [{"path": "/", "file": "memory.max", "limit": 1000}]
    assert read_limits(str(tmp_path / "sys"), "llmfleet.slice") == expected
    assert read_limits(str(tmp_path / "sys"), "-.slice") == expected


def test_slices_are_nested_by_their_name() -> None:
    assert slice_folders("a-b-c.slice") == ["", "a.slice", "a.slice/a-b.slice", "a.slice/a-b.slice/a-b-c.slice"]


@pytest.mark.parametrize("name", ["", "llmfleet", "-a.slice", "a-.slice", "a--b.slice", "../a.slice", ".slice"])
def test_what_systemd_takes_for_no_slice_is_an_error(name: str) -> None:
    with pytest.raises(TopologyError, match="not the name of a slice"):
        slice_folders(name)


def test_the_nodes_that_are_allowed(tmp_path: Path) -> None:
    write(tmp_path, {"self/status": "Name:\tpython3\nMems_allowed:\t00000005\nMems_allowed_list:\t0,2-3\nrest:\t1\n"})
    assert read_mems_allowed(str(tmp_path)) == [0, 2, 3]
    write(tmp_path, {"self/status": "Name:\tpython3\n"})
    assert read_mems_allowed(str(tmp_path)) is None
    # The line after an empty one is not part of it.
    write(tmp_path, {"self/status": "Mems_allowed_list:\t\nvoluntary_ctxt_switches:\t7\n"})
    assert read_mems_allowed(str(tmp_path)) == []


# ------------------------------------------------------------------------------------------------------------ bad trees


def complete() -> Files:
    """Small, and with every file that is ever read."""
    unread = ("/0000:00:03.0/", "/0000:a")
    files = {name: text for name, text in load("eight_gpus_two_nodes").items() if not any(n in name for n in unread)}
    return files | {"sys/fs/cgroup/llmfleet.slice/memory.high": "171798691840\n"}


@pytest.mark.parametrize("name", [name for name in complete() if not name.endswith(OPTIONAL)])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    root = write(tmp_path, complete())
    (root / name).unlink()
    with pytest.raises(TopologyError) as caught:
        read(root)
    assert str(caught.value) == f"cannot read {root / name}: No such file or directory"


@pytest.mark.parametrize("name", [name for name in complete() if name.endswith(OPTIONAL)])
def test_what_a_host_need_not_have_may_be_missing(tmp_path: Path, name: str) -> None:
    root = write(tmp_path, complete())
    (root / name).unlink()
    assert len(read(root)["nodes"]) == 2


@pytest.mark.parametrize("name", list(complete()))
@pytest.mark.parametrize(
    "rubbish", [b"a-b\n", b"\xff\xfe rubbish\n", b"-7\n", "³\n".encode(), b"9" * 5000], ids=range(5)
)
def test_rubbish_is_an_error_that_names_the_file(tmp_path: Path, name: str, rubbish: bytes) -> None:
    root = write(tmp_path, complete())
    (root / name).write_bytes(b"Mems_allowed_list:\t" + rubbish if name.endswith("status") else rubbish)
    with pytest.raises(TopologyError) as caught:
        read(root)
    assert str(root / name) in str(caught.value)


@pytest.mark.parametrize("name", [name for name in complete() if not name.endswith(("cpulist", "status"))])
def test_an_empty_file_is_an_error_where_it_is_no_list(tmp_path: Path, name: str) -> None:
    root = write(tmp_path, complete() | {name: ""})
    with pytest.raises(TopologyError) as caught:
        read(root)
    assert str(root / name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("node1/meminfo", "Node 1 MemFree: 1 kB\n", "meminfo has no MemTotal"),
        ("node1/meminfo", "Node 1 MemTotal: 1 kB\n", "meminfo has no MemFree"),
        ("node1/distance", "10\n", "expected 2 numbers"),
        ("node1/cpulist", "3-1\n", "runs backwards"),
        ("node1/cpulist", "0-99999999999\n", "not a kernel CPU list"),
        ("online", "0-2\n", "online is '0-2' and the node directories are .0, 1.: truncated tree"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, text: str, message: str) -> None:
    root = write(tmp_path, square_host(2, gpus=0) | {f"sys/devices/system/node/{name}": text})
    with pytest.raises(TopologyError, match=message):
        read(root)


def test_a_node_that_is_missing_is_noticed(tmp_path: Path) -> None:
    root = write(tmp_path, square_host(2, gpus=0))
    shutil.rmtree(root / "sys/devices/system/node/node1")
    with pytest.raises(TopologyError, match=r"online is '0-1' and the node directories are \[0\]"):
        read(root)


def test_hugepages_that_are_counted_and_not_shown_are_noticed(tmp_path: Path) -> None:
    root = write(tmp_path, node_files(0, [0], 1000, [10], {2048: (4, 4)}))
    shutil.rmtree(root / "sys/devices/system/node/node0/hugepages")
    with pytest.raises(TopologyError, match=r"node0/meminfo counts hugepages and .*/hugepages has no pool"):
        read(root)


def test_a_zone_that_is_cut_off_is_noticed(tmp_path: Path) -> None:
    text = load("eight_gpus_two_nodes")["proc/zoneinfo"]
    root = write(tmp_path, square_host(2, gpus=0) | {"proc/zoneinfo": text[: text.index("        managed")]})
    with pytest.raises(TopologyError, match=r"proc/zoneinfo does not tell low, .* of node 0, zone DMA"):
        read(root)


def test_a_stray_name_on_the_pci_bus_is_an_error(tmp_path: Path) -> None:
    root = write(tmp_path, square_host(1, gpus=0) | gpu_files("not-an-address", 0, [0]))
    with pytest.raises(TopologyError, match="bus/pci/devices: 'not-an-address' is not a PCI address"):
        read(root)


def test_no_tree_is_an_error_and_no_pci_bus_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="cannot list"):
        read_nodes(str(tmp_path / "nowhere"))
    (tmp_path / "sys/devices/system/node").mkdir(parents=True)
    with pytest.raises(TopologyError, match="has no node directory"):
        read_nodes(str(tmp_path / "sys"))
    assert read_gpus(str(tmp_path / "nowhere")) == []


def test_this_machine_can_be_read() -> None:
    found = read_topology("/sys")
    assert sum(node["mem_total"] for node in found["nodes"]) > 0
    assert [node["id"] for node in found["nodes"] if node["mem_available"] > node["mem_total"]] == []


# ------------------------------------------------------------------------------------------------------------ the lists


@pytest.mark.parametrize("address", ["00000000:17:00.0", "0000:17:00.0", "17:00.0", " 0000:17:00.0 "])
def test_pci_addresses_have_one_spelling(address: str) -> None:
    assert normalise_pci(address) == "0000:17:00.0"


@pytest.mark.parametrize("address", ["", "17:00", "0000:17:00.8", "gpu0", "0000:17:00.0x"])
def test_what_is_no_pci_address_is_an_error(address: str) -> None:
    with pytest.raises(TopologyError, match="is not a PCI address such as"):
        normalise_pci(address)


@pytest.mark.parametrize(
    ("cpus", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([29, 24, 0, 1, 2, 25], "0-2,24-25,29")]
)
def test_cpulists_are_written_as_the_kernel_writes_them(cpus: list[int], text: str) -> None:
    assert format_cpulist(cpus) == text


@given(st.sets(st.integers(0, 9000)))
def test_a_cpulist_reads_back(cpus: set[int]) -> None:
    assert parse_cpulist(format_cpulist(list(cpus))) == sorted(cpus)
    assert parse_cpulist(",".join(str(cpu) for cpu in cpus)) == sorted(cpus)


@pytest.mark.parametrize("text", ["a-b", "1-", "-1", "1 2", "0-3:2/4", "all", "²"])
def test_what_is_no_cpulist_is_an_error(text: str) -> None:
    with pytest.raises(TopologyError, match=f"{text!r} is not a kernel CPU list"):
        parse_cpulist(text)
