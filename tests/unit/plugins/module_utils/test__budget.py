# SPDX-License-Identifier: Apache-2.0
"""The HiCache budget: the reference host, what is refused, and what holds for every host."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _budget, _hicache
from ansible_collections.llmfleet.sglang.plugins.module_utils._budget import Consumer, Demand, Reserves, make_budget
from ansible_collections.llmfleet.sglang.plugins.module_utils._geometry import Geometry, read_geometry
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.plan_cases import FLASH, GIB, node

GB = 10**9
MIB = 1024**2
RELEASE = _hicache.RELEASES["0.5.23"]
NONE = Reserves(os=0, page_cache=0, services=0, process=0, check=0, growth=Fraction(0))
GQA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def geometry(config: dict[str, Any] | None = None, **flags: Any) -> Geometry:
    server = _hicache.server_of(RELEASE, {"page-size": 64, **flags}, {}, 1, "fp8")
    return read_geometry(json.dumps(config or FLASH), server)


def topology(*nodes: dict[str, Any], limits: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"nodes": list(nodes), "gpus": [], "mems_allowed": None, "limits": limits or []}


def two_nodes(total: int = 240 * GB, **changes: Any) -> dict[str, Any]:
    return topology(node(0, total), node(1, total), **changes)


def prefill(**changes: Any) -> Consumer:
    known = {"ranks": 4, "memory_nodes": [0], "geometry": geometry(), "tokens": 1_000_192}
    return Consumer(**{"name": "prefill", "role": "prefill", "unit": "llmfleet-prefill.service", **known, **changes})


def decode(**changes: Any) -> Consumer:
    known = {"ranks": 4, "memory_nodes": [1], "geometry": geometry(), "none_because": "keeps no prefix cache"}
    return Consumer(**{"name": "decode", "role": "decode", "unit": "llmfleet-decode.service", **known, **changes})


def budget(
    found: dict[str, Any],
    *consumers: Consumer,
    demand: Demand | None = None,
    reserves: Reserves | None = None,
    **kw: Any,
) -> dict[str, Any]:
    made, refused = make_budget(found, consumers, demand, reserves or Reserves(), kw.pop("release", RELEASE), **kw)
    assert refused == []
    return made


def refusal(
    found: dict[str, Any],
    *consumers: Consumer,
    demand: Demand | None = None,
    reserves: Reserves | None = None,
    **kw: Any,
) -> RefusalError:
    made, refused = make_budget(found, consumers, demand, reserves or Reserves(), kw.pop("release", RELEASE), **kw)
    assert made["host"]["given"] == 0
    return refused[0]


def total(text: str) -> Demand | None:
    return _budget.parse_demand({"total": text}, "plan_hicache")


def entry(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in made["instances"] if item["name"] == name)


# ------------------------------------------------------------------------------------------------- the reference host


def test_300_gb_on_two_nodes_of_240_is_150_each_and_the_decode_servers_half_is_not_used() -> None:
    made = budget(two_nodes(), prefill(), decode(), demand=total("300GB"))
    first, second = made["nodes"]
    assert (first["asked"], second["asked"]) == (150 * GB, 150 * GB)
    assert first["available"] == 150_981_566_136  # (240 GB - 6 GiB) x 0.72 - 16 GiB
    server = entry(made, "prefill")
    # One thousandth of a ratio more would not fit: that much of it is 28 MB.
    assert server["given"] == 149_952_724_992
    assert 0 <= 150 * GB - server["given"] < 50_000_000
    assert server["flags"] == {
        "enable-hierarchical-cache": True,
        "hicache-ratio": 5.294,
        "max-total-tokens": 1_000_192,
    }
    assert server["tokens"] == {"device": 1_000_192, "all": 5_294_848, "window": 528_384}
    assert first["by"] == {"prefill": server["given"]}
    other = entry(made, "decode")
    assert (other["given"], other["flags"], other["why"]) == (0, {}, "keeps no prefix cache")
    assert (second["given"], second["unused"]) == (0, 150 * GB)
    assert second["why"] == "unused, see decode"
    assert made["host"]["given"] == server["given"]


def test_the_table_says_what_each_node_gives_and_why() -> None:
    text = _budget.table(budget(two_nodes(), prefill(), decode(), demand=total("300GB")))
    assert (
        text
        == """\
node  available  reserved     asked     given  why
0      151.0 GB   89.0 GB  150.0 GB  150.0 GB  prefill
1      151.0 GB   89.0 GB  150.0 GB       0 B  unused, see decode
host   302.0 GB            300.0 GB  150.0 GB

decode (memory of node 1): 0 B, keeps no prefix cache

prefill (memory of node 0): 150.0 GB, ratio 5.294 of 1,000,192 device
  tokens
  4 ranks x 37.5 GB, backed by plain pages; MemoryMax 232.1 GB
  host pool 5,294,848 tokens, window 528,384: what can be reused is
    bounded by the smaller

28% of each node is kept for growth under load, or the page cache if
  that is more.

The engine's own check before it starts: it wants 177.7 GB and will
  count 432.8 GB."""
    )


def test_a_ratio_of_2_on_a_small_device_pool_is_told_to_be_20_gb() -> None:
    made = budget(two_nodes(), prefill(tokens=352_768, demand=Demand("ratio", 2.0)), decode())
    assert round(made["host"]["given"] / GB) == 20


def test_memory_max_leaves_room_for_growth_and_for_the_engines_own_check() -> None:
    server = entry(budget(two_nodes(), prefill(), decode(), demand=total("300GB")), "prefill")
    grown = (server["given"] + 16 * GIB) / 0.72
    assert server["memory_max"] == pytest.approx(grown, abs=1)
    small = budget(
        two_nodes(), prefill(demand=Demand("ratio", 0.5)), reserves=Reserves(growth=Fraction(0), process=GIB)
    )
    item = entry(small, "prefill")
    largest = max(pool["bytes"] for pool in item["pools"])
    # What 0.5.23 wants to see inside the limit: everything, a sibling's largest pool three times more, and 10 GiB.
    assert item["memory_max"] > item["given"] + 4 * GIB + 10 * GIB
    assert item["memory_max"] <= item["given"] + 4 * GIB + 10 * GIB + 3 * largest


def test_every_step_of_the_arithmetic_is_told() -> None:
    server = entry(budget(two_nodes(), prefill(), decode(), demand=total("300GB")), "prefill")
    steps = {step["what"]: step["bytes"] for step in server["steps"]}
    pools = [amount for what, amount in steps.items() if what.startswith("pool ")]
    assert len(pools) == 6
    assert steps["asked"] == 150 * GB
    assert steps["for each rank"] == 37_500_000_000
    assert steps["one rank"] == sum(-(-amount // 4096) * 4096 for amount in pools)
    assert steps["given"] == 4 * steps["one rank"]
    assert steps["MemoryMax"] == server["memory_max"]


# ---------------------------------------------------------------------------------------------------------- the demand


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"total": "300 gigs"}, "'300 gigs'"),
        ({"total": "300"}, "which has no unit"),
        ({"total": 300}, "which has no unit"),
        ({"total": "0GiB"}, "which is nothing"),
        ({"total": 0}, "which has no unit"),
        ({"total": "-3GiB"}, "'-3GiB'"),
        ({"total": "1e3GiB"}, "'1e3GiB'"),
        ({"total": "9999999999TiB"}, "more than 1 EiB"),
        ({"total": True}, "True"),
        ({"total": None}, "None"),
        ({"fraction": 0}, "is 0"),
        ({"fraction": 1.5}, "1.5"),
        ({"fraction": -0.1}, "-0.1"),
        ({"fraction": "0.5"}, "'0.5'"),
        ({"fraction": float("nan")}, "nan"),
        ({"ratio": "2.0"}, "'2.0'"),
        ({"ratio": 0}, "is 0"),
        ({"ratio": -1}, "is -1"),
        ({"ratio": float("inf")}, "inf"),
        ({"enabled": True}, "True"),
        ({"size": "3GiB"}, "size"),
        ({"total": "3GiB", "ratio": 2.0}, "ratio"),
        ("300GiB", "300GiB"),
        (["total"], "total"),
    ],
)
def test_a_demand_that_is_none_is_refused(value: Any, found: str) -> None:
    with pytest.raises(RefusalError) as caught:
        _budget.parse_demand(value, "plan_hicache")
    assert found in caught.value.found
    assert "plan_hicache" in caught.value.found


def test_demands() -> None:
    def parsed(value: Any) -> Demand | None:
        return _budget.parse_demand(value, "plan_hicache")

    assert parsed({}) is None
    assert parsed({"total": "300GiB"}) == Demand("total", 300 * GIB)
    assert parsed({"total": "1.5 TB"}) == Demand("total", 1_500_000_000_000)
    assert parsed({"fraction": 1}) == Demand("fraction", 1.0)
    assert parsed({"ratio": 2}) == Demand("ratio", 2.0)
    assert parsed({"enabled": False}) == Demand("none")


# ------------------------------------------------------------------------------------------------------------ refusals


def test_more_than_a_node_has_names_the_node_and_the_shortfall() -> None:
    refused = refusal(two_nodes(), prefill(), decode(), demand=total("400GB"))
    assert refused.code == "hicache_node"
    assert refused.found == (
        "node 0 is asked for 200.0 GB (186.3 GiB) of plain memory by prefill, and has 151.0 GB (140.6 GiB) to give: "
        "49.0 GB (45.7 GiB) short"
    )
    assert (
        "240.0 GB less 0 B of hugepages, 4.3 GB for the system, 2.1 GB for services, 65.4 GB of headroom and 17.2 GB"
        in (refused.expected)
    )


def test_more_than_the_host_has_is_refused_also_where_no_server_takes_it() -> None:
    refused = refusal(two_nodes(), decode(), demand=total("900GB"))
    assert refused.code == "hicache_host"
    assert "900.0 GB" in refused.found


def test_a_fixed_ratio_is_checked_against_the_machine() -> None:
    # 2.5 times a device pool of 8 x 240 GB is 4.8 TB, on a machine of 3,095,781 MiB.
    found = topology(node(0, 3_095_781 * MIB // 2), node(1, 3_095_781 * MIB // 2))
    tokens = 240 * GB // int(geometry().bytes_per_token)
    server = prefill(ranks=8, memory_nodes=[0, 1], tokens=tokens, demand=Demand("ratio", 2.5))
    refused = refusal(found, server)
    assert refused.code == "hicache_node"
    assert "short" in refused.found


def test_a_ratio_or_an_amount_needs_the_device_pool() -> None:
    for demand in (Demand("ratio", 2.0), Demand("total", 100 * GB)):
        refused = refusal(two_nodes(), prefill(tokens=None, demand=demand))
        assert refused.code == "device_pool"
        assert "max-total-tokens" in refused.expected


def test_less_than_a_page_of_each_pool_is_refused() -> None:
    refused = refusal(two_nodes(), prefill(demand=Demand("total", 10_000_000)))
    assert refused.code == "hicache_small"
    assert "2.5 MB" in refused.found


def test_two_services_on_one_node_are_counted_together() -> None:
    one = prefill(demand=Demand("total", 100 * GB))
    other = prefill(name="prefill-b", demand=Demand("total", 100 * GB))
    assert budget(two_nodes(), one)["host"]["given"] > 99 * GB
    refused = refusal(two_nodes(), one, other)
    assert refused.code == "hicache_node"
    assert "by prefill and prefill-b" in refused.found
    apart = budget(two_nodes(), one, prefill(name="prefill-b", memory_nodes=[1], demand=Demand("total", 100 * GB)))
    assert apart["nodes"][1]["by"].keys() == {"prefill-b"}


def test_eight_ranks_that_each_fit_alone_do_not_fit_together() -> None:
    gqa = geometry(GQA)
    found = topology(node(0, 500 * GB, nodes=1))
    one_rank = int(176.71 * GB)
    assert budget(found, prefill(ranks=1, geometry=gqa, tokens=10**6, demand=Demand("total", one_rank)))
    refused = refusal(found, prefill(ranks=8, geometry=gqa, tokens=10**6, demand=Demand("total", 8 * one_rank)))
    assert refused.code == "hicache_node"
    assert "1.4 TB" in refused.found


def test_the_engines_own_reserve_of_10_gib_is_counted_once() -> None:
    """40 GB asked where 44.87 GB are available: 44.87 GB - 10 GiB = 34.13 GB."""
    found = topology(node(0, 44_870_000_000, nodes=1))
    gqa = geometry(GQA)
    bare = Reserves(os=0, page_cache=0, services=0, process=0, growth=Fraction(0))
    server = {"ranks": 1, "geometry": gqa, "tokens": 10**6}
    refused = refusal(found, prefill(**server, demand=Demand("total", 40 * GB)), reserves=bare)
    assert refused.code == "engine_check"
    assert "5.8 GB (5.4 GiB) short" in refused.found
    made = budget(found, prefill(**server, demand=Demand("total", 34_130_000_000)), reserves=bare)
    assert made["host"]["engine_check"]["needed"] <= 44_870_000_000


def test_0_5_16_does_not_divide_its_check_by_the_ranks() -> None:
    found = topology(node(0, 100 * GB, nodes=1))
    bare = Reserves(os=0, page_cache=0, services=0, process=0, growth=Fraction(0))
    server = prefill(geometry=geometry(GQA), tokens=10**6, demand=Demand("total", 80 * GB))
    assert refusal(found, server, reserves=bare).code == "engine_check"
    assert budget(found, server, reserves=bare, release=_hicache.RELEASES["0.5.16"])["host"]["given"] > 79 * GB


# ------------------------------------------------------------------------------------------------- cgroups, hugepages


def limit(size: int, path: str = "/llmfleet.slice") -> dict[str, Any]:
    return {"path": path, "file": "memory.max", "limit": size}


def test_a_cgroup_smaller_than_the_node_bounds_the_budget() -> None:
    """206.54 GiB asked of a node of 692.65 GiB under a limit of 150 GiB."""
    found = topology(node(0, int(692.65 * GIB), nodes=1), limits=[limit(150 * GIB)])
    refused = refusal(found, prefill(demand=Demand("total", int(206.54 * GIB))))
    assert refused.code == "hicache_limit"
    assert "memory.max of /llmfleet.slice leaves" in refused.found
    made = budget(found, prefill(demand=Demand("fraction", 1.0)))
    assert made["host"]["given"] <= 150 * GIB * 0.72 - 16 * GIB
    assert made["host"]["given"] > 80 * GIB
    assert 149 * GIB < entry(made, "prefill")["memory_max"] <= 150 * GIB


def test_the_tightest_limit_of_the_path_holds() -> None:
    found = two_nodes(limits=[limit(300 * GIB, "/"), limit(200 * GIB), limit(250 * GIB, "/llmfleet.slice/x.slice")])
    assert budget(found, prefill(demand=Demand("fraction", 0.5)))["limit"]["limit"] == 200 * GIB


def test_a_limit_of_400_gib_is_not_planned_to_be_291_full_when_idle() -> None:
    found = topology(node(0, 800 * GIB, nodes=1), limits=[limit(400 * GIB)])
    server = prefill(ranks=8, demand=Demand("total", 291 * GIB - 8 * 4 * GIB))
    assert refusal(found, server).code == "hicache_limit"
    made = budget(found, prefill(ranks=8, demand=Demand("fraction", 1.0)))
    assert made["host"]["given"] + 8 * 4 * GIB <= 288 * GIB


def test_reserved_hugepages_are_not_there_for_plain_pages() -> None:
    """1772 GiB of which 1582 GiB are reserved in pages of 2 MiB: what is left is not a share of 1772."""
    found = topology(
        node(0, 1_858_076_672 * 1024, nodes=1, hugepages={str(2 * MIB): {"total": 809_984, "free": 809_984}})
    )
    made = budget(found, prefill(ranks=8, demand=Demand("fraction", 1.0)))
    assert made["nodes"][0]["hugepages"] == 1582 * GIB
    assert made["nodes"][0]["available"] == 107_889_578_475  # (190 GiB - 6 GiB) x 0.72 - 32 GiB
    assert made["host"]["given"] <= 190 * GIB
    # Backed by that pool it would fit, but the engine compares with plain memory and would refuse the start.
    asked = Demand("total", 8 * 176_710_000_000)
    refused = refusal(found, prefill(ranks=8, hugepage=2 * MIB, demand=asked))
    assert refused.code == "engine_check"
    assert "plain memory, which hugepages are not part of" in refused.found


def test_hugepages_are_budgeted_from_their_own_pool_and_in_whole_pages() -> None:
    pools = {str(GIB): {"total": 40, "free": 3}, str(2 * MIB): {"total": 512, "free": 0}}
    found = topology(node(0, 400 * GIB, nodes=1, hugepages=pools))
    made = budget(found, prefill(ranks=1, hugepage=GIB, demand=Demand("fraction", 1.0)))
    server = entry(made, "prefill")
    assert server["backing"] == str(GIB)
    assert server["given"] <= 40 * GIB
    assert server["given"] % GIB == 0
    assert made["nodes"][0]["hugepages"] == 41 * GIB
    refused = refusal(found, prefill(ranks=1, hugepage=GIB, demand=Demand("total", 41 * GIB)))
    assert "of pages of 1.1 GB" in refused.found
    # A fraction of the host's is one of what backs the pools, and beside a server in plain memory neither takes from
    # the other.
    both = budget(
        found,
        prefill(ranks=1, hugepage=GIB),
        prefill(name="prefill-b", ranks=1),
        demand=Demand("fraction", 0.5),
    )
    assert 19 * GIB <= entry(both, "prefill")["given"] <= 20 * GIB
    assert entry(both, "prefill-b")["given"] > 100 * GIB
    assert both["nodes"][0]["why"] == "prefill (hugepages), prefill-b"
    bare = refusal(two_nodes(), prefill(hugepage=GIB, demand=Demand("total", GIB)))
    assert bare.code == "hicache_hugepages"


# ------------------------------------------------------------------------------------------------------ odd topologies


def test_each_node_is_budgeted_by_what_it_has() -> None:
    found = topology(node(0, 1970 * MIB), node(1, 669 * MIB))
    small = geometry({**FLASH, "num_hidden_layers": 2, "compress_ratios": [4, 128]})
    made = budget(
        found,
        prefill(ranks=1, geometry=small, tokens=25_600),
        prefill(name="prefill-b", ranks=1, memory_nodes=[1], geometry=small, tokens=25_600),
        demand=Demand("fraction", 1.0),
        reserves=NONE,
    )
    first, second = (entry(made, name)["given"] for name in ("prefill", "prefill-b"))
    assert 1960 * MIB < first <= 1970 * MIB
    assert 660 * MIB < second <= 669 * MIB


def test_memory_of_gpus_and_empty_nodes_are_not_divided_by() -> None:
    nodes = [node(0, 480_000 * MIB, nodes=9), node(1, 97_000 * MIB, nodes=9, cpus=0)]
    nodes += [node(number, 0, nodes=9, cpus=0) for number in range(2, 9)]
    made = budget(topology(*nodes), prefill(), demand=total("200GiB"))
    assert [item["id"] for item in made["nodes"]] == [0]
    assert made["nodes"][0]["asked"] == 200 * GIB
    opted = budget(topology(*nodes), prefill(), demand=total("200GiB"), memory_only=[1])
    assert [item["id"] for item in opted["nodes"]] == [0, 1]


def test_34_nodes() -> None:
    nodes = [node(number, 480_000 * MIB, nodes=34) for number in (0, 1)]
    nodes += [
        node(number, 188_000 * MIB if number in (2, 10, 18, 26) else 0, nodes=34, cpus=0) for number in range(2, 34)
    ]
    made = budget(topology(*nodes), prefill(), decode(), demand=total("500GiB"))
    assert [(item["id"], item["asked"]) for item in made["nodes"]] == [(0, 250 * GIB), (1, 250 * GIB)]


def test_a_node_without_cpus_and_memory_of_its_own_divides_nothing() -> None:
    found = topology(
        node(0, 0, nodes=4), node(1, 64_307 * MIB, nodes=4), node(2, 64_472 * MIB, nodes=4), node(3, 0, nodes=4)
    )
    made = budget(found, prefill(ranks=1, memory_nodes=[1, 2]), demand=total("40GiB"))
    assert [item["id"] for item in made["nodes"]] == [1, 2]
    assert sum(entry(made, "prefill")["by_node"].values()) == pytest.approx(40 * GIB, rel=0.01)


def test_memory_that_is_not_bound_may_come_from_every_node() -> None:
    made = budget(two_nodes(), prefill(memory_nodes=[], demand=Demand("total", 200 * GB)))
    assert entry(made, "prefill")["memory_nodes"] == [0, 1]
    assert refusal(two_nodes(), prefill(demand=Demand("total", 200 * GB))).code == "hicache_node"


def test_servers_that_share_some_of_their_nodes_are_warned_of() -> None:
    one, other = prefill(memory_nodes=[0, 1]), prefill(name="prefill-b", memory_nodes=[0])
    made = budget(two_nodes(), one, other, demand=Demand("fraction", 0.5))
    assert "prefill and prefill-b share node 0" in made["warnings"][0]


def test_a_ratio_below_one_is_accepted_with_a_warning() -> None:
    made = budget(two_nodes(), prefill(demand=Demand("ratio", 0.5)))
    assert "hicache-ratio 0.5 is below 1" in made["warnings"][0]
    assert budget(two_nodes(), prefill(demand=Demand("ratio", 1.0)))["warnings"] == []


def test_without_a_pinned_pool_a_model_that_takes_a_size_gets_whole_gigabytes() -> None:
    made = budget(two_nodes(), prefill(geometry=geometry(GQA), tokens=None, demand=Demand("total", 101 * GB)))
    server = entry(made, "prefill")
    assert server["flags"] == {"enable-hierarchical-cache": True, "hicache-size": 25}
    assert server["max_total_tokens"] is None
    # Decimal gigabytes for each rank, and a page more.
    assert 4 * 25 * GB < server["given"] < 4 * 25 * GB + 4 * 64 * 131_072 + 4 * 4096


# ------------------------------------------------------------------------------------------- what holds for every host

MODELS = (
    FLASH,
    GQA,
    {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
)
GEOMETRIES = tuple(geometry(model) for model in MODELS)


@st.composite
def hosts(draw: st.DrawFn) -> tuple[dict[str, Any], list[Consumer], Demand | None, Reserves, _hicache.Release]:
    count = draw(st.sampled_from([1, 2, 4, 8, 16, 34]))
    sizes = st.one_of(st.just(0), st.integers(1, 4 * 10**12))
    pools = st.dictionaries(
        st.sampled_from([str(2 * MIB), str(GIB)]),
        st.integers(0, 300).map(lambda total: {"total": total, "free": total}),
    )
    nodes = [
        node(number, draw(sizes), cpus=draw(st.sampled_from([0, 4])), nodes=count, hugepages=draw(pools))
        for number in range(count)
    ]
    limits = draw(st.lists(st.integers(0, 10**13).map(limit), max_size=2))
    asked = st.one_of(
        st.none(),
        st.integers(1, 10**13).map(lambda value: Demand("total", value)),
        st.floats(0.001, 1).map(lambda value: Demand("fraction", value)),
        st.floats(0.001, 50).map(lambda value: Demand("ratio", value)),
    )
    consumers = []
    for number in range(draw(st.integers(0, 4))):
        usable = [item["id"] for item in nodes if item["cpus"] and item["mem_total"]]
        bound = draw(st.lists(st.sampled_from(usable), unique=True, max_size=3)) if usable else []
        consumers.append(
            Consumer(
                name=f"server-{number}",
                role="prefill",
                unit=f"llmfleet-server-{number}.service",
                ranks=draw(st.sampled_from([1, 2, 4, 8])),
                memory_nodes=sorted(bound),
                policy=draw(st.sampled_from(["strict", "preferred", "none"])),
                demand=draw(asked),
                geometry=draw(st.sampled_from(GEOMETRIES)),
                tokens=draw(st.one_of(st.none(), st.integers(256, 10**7))),
                hugepage=draw(st.sampled_from([None, None, 2 * MIB, GIB])),
                none_because=draw(st.sampled_from(["", "", "", "keeps no prefix cache"])),
            )
        )
    small = st.integers(0, 64 * GIB)
    reserves = Reserves(
        os=draw(small),
        page_cache=draw(small),
        services=draw(small),
        process=draw(st.integers(0, 8 * GIB)),
        check=draw(st.sampled_from([0, 10 * GIB])),
        growth=draw(st.sampled_from([Fraction(0), Fraction(28, 100), Fraction(9, 10)])),
        nodes=draw(st.dictionaries(st.integers(0, count - 1), small, max_size=2)),
    )
    release = _hicache.RELEASES[draw(st.sampled_from(sorted(_hicache.RELEASES)))]
    return topology(*nodes, limits=limits), consumers, draw(asked), reserves, release


Host = tuple[dict[str, Any], list[Consumer], Demand | None, Reserves, _hicache.Release]


@given(hosts())
def test_no_node_gives_more_than_it_has(host: Host) -> None:
    found, consumers, demand, reserves, release = host
    made, refused = make_budget(found, consumers, demand, reserves, release)
    for item in made["nodes"]:
        kept = item["reserved"]
        plain = sum(
            entry(made, name)["by_node"][str(item["id"])]
            for name in item["by"]
            if entry(made, name)["backing"] == _budget.PLAIN
        )
        assert 0 <= plain <= item["available"]
        if item["available"]:
            assert plain + item["hugepages"] + sum(kept.values()) <= item["total"]
        for size, there in item["hugepage_pools"].items():
            backed = [entry(made, name) for name in item["by"] if entry(made, name)["backing"] == size]
            assert sum(server["by_node"][str(item["id"])] for server in backed) <= there
    for server in made["instances"]:
        assert server["given"] == server["per_rank"] * server["ranks"]
        assert server["given"] <= server["asked"] or not server["given"]
        assert sum(server["by_node"].values()) >= server["given"]
        if server["mode"] == "ratio":
            assert server["flags"]["max-total-tokens"] > 0
        if made["limit"] and server["memory_max"] is not None:
            assert server["memory_max"] <= made["limit"]["limit"]
    if made["limit"]:
        pinned = sum(server["given"] for server in made["instances"] if server["backing"] == _budget.PLAIN)
        assert pinned <= made["limit"]["available"]
    if refused:
        assert made["host"]["given"] == 0
        for error in refused:
            assert error.found
            assert error.expected
            assert error.cure


@given(hosts())
def test_the_engine_itself_would_accept_what_is_given(host: Host) -> None:
    """Replays the engine's check pool by pool, the siblings and the other servers being ahead."""
    found, consumers, demand, reserves, release = host
    made, _refused = make_budget(found, consumers, demand, reserves, release)
    there = made["host"]["engine_check"]["available"]
    takers = [server for server in made["instances"] if server["given"]]
    for server in takers:
        ranks = server["ranks"]
        plain = server["backing"] == _budget.PLAIN
        free = there - sum(other["given"] for other in takers if other is not server and other["backing"] == "plain")
        for pool in server["pools"]:
            siblings = (ranks - 1) * pool["bytes"] if plain else 0
            allowed = free - siblings - reserves.check
            assert pool["bytes"] <= (allowed // ranks if release.check_by_rank else allowed)
            free -= ranks * pool["bytes"] if plain else 0


@given(hosts(), st.data())
def test_more_memory_never_gives_less(host: Host, data: st.DataObject) -> None:
    found, consumers, demand, reserves, release = host
    before, _refused = make_budget(found, consumers, demand, reserves, release)
    larger = copy.deepcopy(found)
    chosen = data.draw(st.integers(0, len(larger["nodes"]) - 1))
    if larger["nodes"][chosen]["mem_total"] == 0:
        return  # a node that gets its first memory is another topology: totals are split over one node more
    larger["nodes"][chosen]["mem_total"] += data.draw(st.integers(1, 10**12))
    after, refused = make_budget(larger, consumers, demand, reserves, release)
    if before["host"]["given"]:
        assert refused == []
    assert after["host"]["given"] >= before["host"]["given"]
    given_before = {item["id"]: item["given"] for item in before["nodes"]}
    given_after = {item["id"]: item["given"] for item in after["nodes"]}
    assert given_after.get(chosen, 0) >= given_before.get(chosen, 0)


@given(hosts(), st.randoms(use_true_random=False))
def test_the_same_input_in_any_order_gives_the_same_bytes(host: Host, random: Any) -> None:
    found, consumers, demand, reserves, release = host
    shuffled = list(consumers)
    random.shuffle(shuffled)
    first = make_budget(found, consumers, demand, reserves, release)
    second = make_budget(copy.deepcopy(found), shuffled, demand, reserves, release)
    assert json.dumps(first[0], sort_keys=True) == json.dumps(second[0], sort_keys=True)
    assert [str(error) for error in first[1]] == [str(error) for error in second[1]]


@given(hosts())
def test_what_is_free_at_the_moment_changes_nothing(host: Host) -> None:
    found, consumers, demand, reserves, release = host
    running = copy.deepcopy(found)
    for item in running["nodes"]:
        item["mem_free"] = item["mem_available"] = 0
        for pool in item["hugepages"].values():
            pool["free"] = 0
    assert (
        make_budget(found, consumers, demand, reserves, release)[0]
        == (make_budget(running, consumers, demand, reserves, release)[0])
    )


@given(hosts())
def test_everything_is_plain_finite_data(host: Host) -> None:
    made, _refused = make_budget(*host)
    assert json.loads(json.dumps(made, allow_nan=False)) == made

    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [number for item in value.values() for number in numbers(item)]
        if isinstance(value, list):
            return [number for item in value for number in numbers(item)]
        return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []

    assert min(numbers(made), default=0) >= 0
    shown = _budget.table(made).splitlines()
    assert len(shown) > len(made["nodes"]) + len(made["instances"])
