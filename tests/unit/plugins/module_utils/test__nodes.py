# SPDX-License-Identifier: Apache-2.0
"""Which nodes an instance is bound to, on hosts of every shape."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._nodes import (
    POLICIES,
    NodeSet,
    check_allowed,
    gpu_node,
    host_nodes,
    nearest,
    node_set,
    numactl_argv,
    systemd_properties,
)
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.topology_cases import GIB, gpu, host, load, node, read, square_host, write

NUMACTL = "/usr/bin/numactl"


def nodes_of(topology: dict[str, Any], gpus: Sequence[int], **options: Any) -> tuple[list[int], list[int]]:
    """Nodes and memory nodes of an instance."""
    found = node_set("prefill", gpus, options.pop("asked", None), topology, **options)
    return found.nodes, found.memory_nodes


def refusal(topology: dict[str, Any], gpus: Sequence[int], **options: Any) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        nodes_of(topology, gpus, **options)
    return caught.value


def two_nodes(gpus: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
    nodes = [node(0, range(8), 64 * GIB, [10, 21]), node(1, range(8, 16), 64 * GIB, [21, 10])]
    return host(nodes, gpus, **more)


# --------------------------------------------------------------------------------------------------------- real shapes


class TestNodesWithoutMemory:
    """Four nodes per socket with half of the memory slots filled: nodes 0 and 3 have CPUs and no memory."""

    @pytest.fixture
    def topology(self, tmp_path: Path) -> dict[str, Any]:
        return read(write(tmp_path, load("four_nodes_two_without_memory")))

    def test_memory_is_the_hosts_on_the_other_nodes(self, topology: dict[str, Any]) -> None:
        assert host_nodes(topology) == [1, 2]

    def test_the_nearest_memory_is_borrowed_from_all_that_are_equally_near(self, topology: dict[str, Any]) -> None:
        """GPU 3 is on node 0: GPUs in PCI order are on nodes 3, 2, 1, 0."""
        found = node_set("prefill", [3], None, topology)
        assert (found.nodes, found.memory_nodes) == ([0], [1, 2])
        assert numactl_argv("numactl", found, "strict") == ["numactl", "--physcpubind=0-5,24-29", "--membind=1,2"]
        assert numactl_argv("numactl", found, "preferred") == ["numactl", "--physcpubind=0-5,24-29", "--preferred=1"]
        assert systemd_properties(found, "strict") == {
            "CPUAffinity": "0-5,24-29",
            "NUMAPolicy": "bind",
            "NUMAMask": "1,2",
        }

    def test_a_node_with_memory_is_named_as_a_node(self, topology: dict[str, Any]) -> None:
        found = node_set("prefill", [2], None, topology)
        assert numactl_argv("numactl", found, "strict") == ["numactl", "--cpunodebind=1", "--membind=1"]

    def test_a_set_with_both_kinds_names_cpus(self, topology: dict[str, Any]) -> None:
        found = node_set("prefill", [2, 3], None, topology)
        argv = numactl_argv("numactl", found, "strict")
        assert argv == ["numactl", "--physcpubind=0-11,24-35", "--membind=1,2"]

    def test_the_nearest_is_nearer_than_the_others(self, topology: dict[str, Any]) -> None:
        topology["nodes"][0]["distances"] = [10, 12, 32, 32]
        assert nodes_of(topology, [3]) == ([0], [1])


class TestGpuMemoryAsNodes:
    """HBM is a node with memory and without CPUs: not the host's memory, unless the operator says so."""

    @pytest.mark.parametrize(
        ("name", "hosts", "memory", "gpus"),
        [
            ("gpu_memory_as_nodes", [0], [1], {0: 0}),
            ("thirty_four_nodes", [0, 1], [2, 10, 18, 26], {0: 0, 1: 0, 2: 1, 3: 1}),
        ],
    )
    def test_only_nodes_with_cpus_are_bound(
        self, tmp_path: Path, name: str, hosts: list[int], memory: list[int], gpus: dict[int, int]
    ) -> None:
        topology = read(write(tmp_path, load(name)))
        assert host_nodes(topology) == hosts
        assert host_nodes(topology, memory) == sorted(hosts + memory)
        assert {index: nodes_of(topology, [index]) for index in gpus} == {i: ([n], [n]) for i, n in gpus.items()}
        for number in memory:
            assert "memory of a GPU or an expander" in refusal(topology, [], asked=[0, number]).found
        assert "nothing in it" in refusal(topology, [], asked=[0, 8]).found

    @pytest.mark.parametrize("said", ["-1\n", "HBM"])
    def test_nvml_finds_the_node_by_its_cpus_and_not_by_its_own_id(self, tmp_path: Path, said: str) -> None:
        """The firmware does not say, or says the GPU's own memory; NVML's own id would be refused by the kernel."""
        files = load("thirty_four_nodes")
        hbm = {"0008:01:00.0": 2, "0009:01:00.0": 10, "0018:01:00.0": 18, "0019:01:00.0": 26}
        for address, number in hbm.items():
            files[f"sys/bus/pci/devices/{address}/numa_node"] = said.replace("HBM", str(number))
            files[f"sys/bus/pci/devices/{address}/local_cpulist"] = "0-143\n" if said == "-1\n" else "\n"
        topology = read(write(tmp_path, files))
        for entry in topology["gpus"]:
            cpus = range(72) if entry["pci"] < "0010" else range(72, 144)
            entry["nvml"] = {"numa_node": hbm[entry["pci"]], "cpu_affinity": list(cpus), "memory_affinity": []}
        assert [gpu_node(entry, topology, {}) for entry in topology["gpus"]] == [0, 0, 1, 1]
        assert nodes_of(topology, [1, 2]) == ([0, 1], [0, 1])

    def test_a_memory_affinity_to_the_gpus_own_memory_tells_nothing(self, tmp_path: Path) -> None:
        topology = read(write(tmp_path, load("thirty_four_nodes")))
        for affinity, expected in (([1, 18], 1), ([18], None), ([0, 1, 18], None)):
            place = gpu(2, None, {"memory_affinity": affinity, "cpu_affinity": []})
            assert gpu_node(place, topology, {}) == expected

    def test_named_memory_is_used_beside_cpus(self, tmp_path: Path) -> None:
        topology = read(write(tmp_path, load("gpu_memory_as_nodes")))
        found = node_set("prefill", [0], [0, 1], topology, memory_only=[1])
        assert (found.nodes, found.memory_nodes, found.cpus) == ([0], [0, 1], list(range(72)))
        assert numactl_argv("numactl", found, "strict") == ["numactl", "--cpunodebind=0", "--membind=0,1"]
        # To opt in does not give it to anybody who does not name it.
        assert nodes_of(topology, [0], memory_only=[1]) == ([0], [0])

    def test_named_memory_alone_is_refused(self, tmp_path: Path) -> None:
        topology = read(write(tmp_path, load("gpu_memory_as_nodes")))
        told = refusal(topology, [], asked=[1], memory_only=[1])
        assert (told.code, told.expected) == ("numa_node", "at least one of the nodes with CPUs: 0")


def test_eight_gpus_on_two_nodes(tmp_path: Path) -> None:
    """NVML does not support the question, and sysfs knows."""
    topology = read(write(tmp_path, load("eight_gpus_two_nodes")))
    for entry in topology["gpus"]:
        entry["nvml"] = {"memory_affinity": [], "cpu_affinity": [], "numa_node": None}
    assert [gpu_node(entry, topology, {}) for entry in topology["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert nodes_of(topology, range(4)) == ([0], [0])
    assert nodes_of(topology, range(2, 6)) == ([0, 1], [0, 1])


def test_unequal_nodes_are_each_their_own(tmp_path: Path) -> None:
    topology = read(write(tmp_path, load("unequal_nodes")))
    assert [nodes_of(topology, [], asked=[number]) for number in (0, 1)] == [([0], [0]), ([1], [1])]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 34])
def test_the_order_of_gpus_is_not_the_order_of_nodes(tmp_path: Path, count: int) -> None:
    topology = read(write(tmp_path, square_host(count, gpus=8)))
    expected = sorted({count - 1 - index % count for index in range(8)})
    assert nodes_of(topology, range(8)) == (expected, expected)
    assert nodes_of(topology, [0]) == ([count - 1], [count - 1])


# ----------------------------------------------------------------------------------------------------- unknown places


class TestGpuWithoutNode:
    """The firmware shows -1 and every CPU."""

    @pytest.fixture
    def topology(self, tmp_path: Path) -> dict[str, Any]:
        return read(write(tmp_path, load("gpus_without_node")))

    def test_nvmls_memory_affinity_tells(self, topology: dict[str, Any]) -> None:
        for entry, affinity in zip(topology["gpus"], ([0], [1]), strict=True):
            entry["nvml"] = {"memory_affinity": affinity, "cpu_affinity": []}
        assert [gpu_node(entry, topology, {}) for entry in topology["gpus"]] == [0, 1]

    def test_nvmls_cpu_affinity_tells(self, topology: dict[str, Any]) -> None:
        for entry, affinity in zip(topology["gpus"], (range(32, 64), range(32)), strict=True):
            entry["nvml"] = {"memory_affinity": [], "cpu_affinity": list(affinity)}
        assert [gpu_node(entry, topology, {}) for entry in topology["gpus"]] == [1, 0]

    def test_an_affinity_to_several_nodes_is_left_to_the_memory(self, topology: dict[str, Any]) -> None:
        """The CPUs of a whole socket and one of its nodes."""
        topology["gpus"][0]["nvml"] = {"memory_affinity": [1], "cpu_affinity": list(range(64))}
        assert gpu_node(topology["gpus"][0], topology, {}) == 1
        topology["gpus"][0]["nvml"] = {"memory_affinity": [0, 1], "cpu_affinity": list(range(64))}
        assert gpu_node(topology["gpus"][0], topology, {}) is None

    @pytest.mark.parametrize("nvml", [None, {"memory_affinity": [], "cpu_affinity": []}, {}])
    def test_nobody_knows(self, topology: dict[str, Any], nvml: dict[str, Any] | None) -> None:
        for entry in topology["gpus"]:
            entry["nvml"] = nvml
        told = refusal(topology, [1])
        assert told.code == "numa_unknown"
        assert told.found == "neither sysfs nor NVML says to which NUMA node GPU 1 (0000:97:00.0) belongs"
        assert "plan_gpu_numa_nodes: {'0000:97:00.0': NODE}" in told.cure
        assert nodes_of(topology, [0, 1], policy="none") == ([], [])
        # The operator may say it of the instance,
        assert nodes_of(topology, [1], asked=[1]) == ([1], [1])
        # or of the GPU, however they write its address.
        for address in ("0000:97:00.0", "00000000:97:00.0", "97:00.0"):
            assert nodes_of(topology, [1], mapping={address: 1}) == ([1], [1])
        assert refusal(topology, [1], mapping={"0000:17:00.0": 1}).code == "numa_unknown"

    @pytest.mark.parametrize("said", [2, -1, "1", True, 1.0])
    def test_a_mapping_to_what_is_no_node_is_refused(self, topology: dict[str, Any], said: Any) -> None:
        told = refusal(topology, [1], mapping={"0000:97:00.0": said})
        assert (told.code, told.expected) == ("numa_mapping", "one of the nodes with CPUs: 0, 1")
        assert told.found == f"plan_gpu_numa_nodes says {said!r} for 0000:97:00.0"

    def test_a_mapping_of_what_is_no_address_is_refused(self, topology: dict[str, Any]) -> None:
        """As YAML reads an address without quotes: minutes and seconds."""
        told = refusal(topology, [1], mapping={5820.0: 1})
        assert (told.code, told.found) == ("numa_mapping", "plan_gpu_numa_nodes names 5820.0")
        assert "in quotes" in told.cure

    def test_a_mapping_that_the_host_contradicts_is_refused(self, topology: dict[str, Any]) -> None:
        topology["gpus"][0]["nvml"] = {"memory_affinity": [0], "cpu_affinity": []}
        told = refusal(topology, [0], mapping={"0000:17:00.0": 1})
        assert told.code == "numa_mapping"
        assert told.found == "plan_gpu_numa_nodes says node 1 for 0000:17:00.0, and the host itself says node 0"
        assert nodes_of(topology, [0], mapping={"0000:17:00.0": 0}) == ([0], [0])


def test_where_one_node_has_cpus_every_gpu_is_on_it(tmp_path: Path) -> None:
    """Virtual machines show -1 for every device; so can a host whose other nodes are HBM."""
    assert nodes_of(read(write(tmp_path / "square", square_host(1, gpus=2))), [0, 1]) == ([0], [0])
    files = load("gpu_memory_as_nodes")
    files["sys/bus/pci/devices/0009:01:00.0/numa_node"] = "-1\n"
    assert nodes_of(read(write(tmp_path / "hbm", files)), [0]) == ([0], [0])


def test_a_node_without_cpus_is_placed_by_the_cpus_that_sysfs_lists() -> None:
    nodes = [node(0, [0, 1], GIB, [10, 20, 40]), node(1, [2, 3], GIB, [20, 10, 40]), node(2, [], GIB, [40, 40, 10])]
    assert nodes_of(host(nodes, [gpu(0, 2, cpus=[2, 3])]), [0]) == ([1], [1])
    assert refusal(host(nodes, [gpu(0, 2, cpus=[1, 2])]), [0]).code == "numa_unknown"


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "code", "found", "expected"),
    [
        ({"gpus": [2]}, "gpu_missing", "asks for GPU 2", "GPUs of this host: 0, 1"),
        ({"asked": [0, 7]}, "numa_node", "names node 7", "nodes of this host: 0, 1"),
        ({"asked": [-1]}, "numa_node", "names node -1", "nodes of this host: 0, 1"),
        ({"asked": []}, "numa_node", "is []: no node whose CPUs", "nodes with CPUs: 0, 1"),
        ({"gpus": [0, 1], "asked": [0]}, "numa_split", "bound to node 0 and its GPU 1 is on node 1", "every GPU"),
    ],
)
def test_what_a_host_has_not_is_refused(options: dict[str, Any], code: str, found: str, expected: str) -> None:
    topology = two_nodes([gpu(0, 0), gpu(1, 1)])
    told = refusal(topology, options.pop("gpus", []), **options)
    assert told.code == code
    assert found in told.found
    assert expected in told.expected


def test_a_host_without_gpus_says_so() -> None:
    assert refusal(two_nodes(), [0]).expected == "GPUs of this host: none on the PCI bus"


def test_cpus_without_any_memory_near_are_refused() -> None:
    nodes = [node(0, [0, 1], 0, [10, 40]), node(1, [], GIB, [40, 10])]
    told = refusal(host(nodes, [gpu(0, 0)]), [0], memory_only=[1])
    assert told.code == "numa_memory"
    assert nodes_of(host(nodes, [gpu(0, 0)]), [0], asked=[0, 1], memory_only=[1]) == ([0], [1])


def test_a_cpuset_narrower_than_the_plan_is_refused() -> None:
    topology = two_nodes([gpu(0, 1)], mems_allowed=[0])
    found = node_set("prefill", [0], None, topology)
    for policy in ("strict", "preferred"):
        with pytest.raises(
            RefusalError, match="prefill is to have memory of node 1, and Mems_allowed of this host is 0"
        ):
            check_allowed("prefill", found, topology, policy)
    check_allowed("prefill", found, topology, "none")
    check_allowed("prefill", node_set("decode", [], [0], topology), topology, "strict")
    check_allowed("prefill", found, topology | {"mems_allowed": None}, "strict")
    check_allowed("prefill", found, topology | {"mems_allowed": [0, 1]}, "strict")


# -------------------------------------------------------------------------------------------------------------- binding


def test_policies() -> None:
    found = NodeSet([0, 1], [0, 1], cpus=[0, 1, 8])
    assert numactl_argv("n", found, "strict") == ["n", "--cpunodebind=0,1", "--membind=0,1"]
    assert numactl_argv("n", found, "preferred") == ["n", "--cpunodebind=0,1", "--preferred=0"]
    assert numactl_argv("n", found, "none") == []
    assert systemd_properties(found, "strict")["NUMAMask"] == "0,1"
    preferred = {"CPUAffinity": "0-1,8", "NUMAPolicy": "preferred", "NUMAMask": "0"}
    assert systemd_properties(found, "preferred") == preferred
    assert systemd_properties(found, "none") == {}


def test_memory_beside_cpus_is_preferred_to_memory_alone() -> None:
    found = NodeSet([2], [1, 2], cpus=[4])
    assert numactl_argv("n", found, "preferred") == ["n", "--cpunodebind=2", "--preferred=2"]


def numactl(*arguments: str) -> int:
    return subprocess.run([NUMACTL, *arguments, "true"], capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    "argument", ["--membind=-1", "--cpunodebind=-1", "--preferred=-1", "--membind=", "--membind=0 "]
)
def test_numactl_refuses_what_is_never_written(argument: str) -> None:
    """Why an unknown node must not reach a command line: numactl ends with 1 before the program starts."""
    assert numactl(argument) == 1


@pytest.mark.parametrize("policy", ["strict", "preferred"])
@pytest.mark.parametrize("by_cpu", [False, True])
def test_numactl_takes_what_is_written(policy: str, by_cpu: bool) -> None:
    found = NodeSet([0], [0], cpus=[0], by_cpu=by_cpu)
    argv = numactl_argv(NUMACTL, found, policy)
    assert subprocess.run([*argv, "true"], capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------------------------------- what holds for every host


@st.composite
def hosts(draw: st.DrawFn) -> dict[str, Any]:
    """1 to 34 nodes: with both CPUs and memory, with one of them, or empty; GPUs anywhere, known or not."""
    count = draw(st.integers(1, 34))
    kinds = draw(st.lists(st.sampled_from(["host", "cpus", "memory", "empty"]), min_size=count, max_size=count))
    kinds[draw(st.integers(0, count - 1))] = "host"
    # Ids have gaps where a node is offline.
    ids = sorted(draw(st.sets(st.integers(0, 63), min_size=count, max_size=count)))
    places = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    nodes = []
    for position, (number, kind) in enumerate(zip(ids, kinds, strict=True)):
        row = [10 if other == position else 12 + abs(place - places[position]) for other, place in enumerate(places)]
        cpus = range(2 * position, 2 * position + 2) if kind in ("host", "cpus") else ()
        nodes.append(node(number, cpus, GIB if kind in ("host", "memory") else 0, row))
    affinity = st.fixed_dictionaries(
        {
            "memory_affinity": st.lists(st.sampled_from(ids), max_size=2, unique=True),
            "cpu_affinity": st.lists(st.integers(0, 2 * count - 1), max_size=3, unique=True),
            "numa_node": st.sampled_from([None, *ids]),
        }
    )
    said = draw(st.lists(st.tuples(st.sampled_from([None, *ids]), st.none() | affinity), max_size=16))
    return host(nodes, [gpu(index, number, nvml) for index, (number, nvml) in enumerate(said)])


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """A host and what is asked of it: arguments of ``node_set``."""
    topology = draw(hosts())
    ids = [entry["id"] for entry in topology["nodes"]]
    memory = [entry["id"] for entry in topology["nodes"] if not entry["cpus"] and entry["mem_total"]]
    usual = [entry["id"] for entry in topology["nodes"] if entry["cpus"]]
    indices = [entry["index"] for entry in topology["gpus"]]
    return {
        "name": "prefill",
        "gpus": draw(st.lists(st.sampled_from(indices), unique=True)) if indices else [],
        "asked": draw(st.none() | st.lists(st.sampled_from(usual), min_size=1) | st.lists(st.sampled_from(ids))),
        "topology": topology,
        "policy": draw(st.sampled_from(POLICIES)),
        "mapping": draw(
            st.dictionaries(st.sampled_from([gpu(i, None)["pci"] for i in range(16)]), st.sampled_from(ids))
        ),
        "memory_only": draw(st.lists(st.sampled_from(memory), unique=True)) if memory else [],
    }


def answer(question: dict[str, Any]) -> NodeSet | tuple[str, str, str, str]:
    """The node set, or all that the refusal says."""
    try:
        return node_set(**question)
    except RefusalError as error:
        return error.code, error.found, error.expected, error.cure


@given(questions())
def test_memory_is_always_the_hosts_and_there(question: dict[str, Any]) -> None:
    found = answer(question)
    if not isinstance(found, NodeSet):
        return
    nodes = {entry["id"]: entry for entry in question["topology"]["nodes"]}
    for number in found.memory_nodes:
        assert nodes[number]["mem_total"] > 0
        assert nodes[number]["cpus"] or number in question["memory_only"]
    assert all(nodes[number]["cpus"] for number in found.nodes)
    assert bool(found.nodes) == bool(found.memory_nodes) == bool(found.cpus) == bool(found)
    assert found.cpus == sorted(cpu for number in found.nodes for cpu in nodes[number]["cpus"])


@given(questions())
def test_numactl_is_never_told_a_node_without_memory(question: dict[str, Any]) -> None:
    found = answer(question)
    if not isinstance(found, NodeSet):
        return
    with_memory = {entry["id"] for entry in question["topology"]["nodes"] if entry["mem_total"]}
    for word in numactl_argv("numactl", found, question["policy"])[1:]:
        option, value = word.split("=")
        if option != "--physcpubind":
            assert {int(number) for number in value.split(",")} <= with_memory


@given(questions(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_read_does_not_matter(question: dict[str, Any], random: Any) -> None:
    shuffled = question["topology"] | {key: list(question["topology"][key]) for key in ("nodes", "gpus")}
    random.shuffle(shuffled["nodes"])
    random.shuffle(shuffled["gpus"])
    asked = None if question["asked"] is None else list(question["asked"])
    assert answer(question | {"topology": shuffled, "asked": asked}) == answer(question)


@given(questions(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_asked_does_not_matter(question: dict[str, Any], random: Any) -> None:
    found = answer(question)
    asked, gpus = question["asked"], list(question["gpus"])
    random.shuffle(gpus)
    if asked is not None:
        asked = list(asked)
        random.shuffle(asked)
    other = answer(question | {"asked": asked, "gpus": gpus})
    # Of several things that are wrong, another one may be told first.
    assert other == found or not (isinstance(other, NodeSet) or isinstance(found, NodeSet))


@given(hosts(), st.sampled_from(POLICIES))
def test_without_gpus_and_nodes_nothing_is_bound(topology: dict[str, Any], policy: str) -> None:
    found = node_set("router", [], None, topology, policy)
    assert found == NodeSet([], [])
    assert not found
    assert numactl_argv("numactl", found, policy) == []
    assert systemd_properties(found, policy) == {}


@given(questions())
def test_hosts_with_and_without_their_hbm_nodes_are_bound_alike(question: dict[str, Any]) -> None:
    """The driver can hide a GPU's memory from the kernel's list of nodes; the plan must not move with that."""
    nodes = question["topology"]["nodes"]
    kept = [position for position, entry in enumerate(nodes) if entry["cpus"]]
    fewer = [nodes[at] | {"distances": [nodes[at]["distances"][other] for other in kept]} for at in kept]
    visible = {nodes[at]["id"] for at in kept}
    gpus = [
        entry | {"numa_node": entry["numa_node"] if entry["numa_node"] in visible else None}
        for entry in question["topology"]["gpus"]
    ]
    asked = None if question["asked"] is None else [number for number in question["asked"] if number in visible]
    same = question | {"asked": asked, "memory_only": []}
    hidden = same | {"topology": question["topology"] | {"nodes": fewer, "gpus": gpus}}
    # An entry of the operator's for a node that is gone is told with the same words, for it has no CPUs either way.
    assert answer(hidden) == answer(same)


@given(hosts())
def test_the_nearest_are_the_nearest(topology: dict[str, Any]) -> None:
    ids = [entry["id"] for entry in topology["nodes"]]
    candidates = host_nodes(topology)
    for entry in topology["nodes"]:
        distance = dict(zip(ids, entry["distances"], strict=True))
        chosen = nearest(topology, entry["id"], candidates)
        assert chosen
        assert {distance[number] for number in chosen} == {min(distance[number] for number in candidates)}
        assert [n for n in candidates if n not in chosen and distance[n] <= distance[chosen[0]]] == []


class Counted(list[Any]):
    """A list that counts what is taken out of it."""

    taken = 0

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            Counted.taken += 1
            yield entry


def test_the_work_grows_with_nodes_and_gpus_and_not_with_sets_of_nodes() -> None:
    """34 nodes, half without memory, and 16 GPUs on all of those: no more than a few looks at each node for each GPU.

    All sets of 34 nodes would be 2^34.
    """
    cpus = [range(2 * number, 2 * number + 2) for number in range(34)]
    distances = [[10 if a == b else 21 for b in range(34)] for a in range(34)]
    nodes = Counted(node(n, cpus[n], GIB if n % 2 else 0, distances[n]) for n in range(34))
    topology = host([], [gpu(index, 2 * index) for index in range(16)]) | {"nodes": nodes}
    Counted.taken = 0
    found = node_set("prefill", range(16), None, topology)
    assert found.nodes == list(range(0, 32, 2))
    assert found.memory_nodes == list(range(1, 34, 2))
    assert Counted.taken <= 34 * 16 * 4
