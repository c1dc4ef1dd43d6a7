# SPDX-License-Identifier: Apache-2.0
"""The plan: what it says for sound input, what it refuses, and what holds for every input."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.llmfleet.sglang.plugins.module_utils import (
    _budget,
    _commands,
    _host_budget,
    _plan,
    _wants,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.plan_cases import (
    ARTEFACTS,
    FLASH,
    GIB,
    HOST,
    decode,
    facts,
    fallback,
    node,
    prefill,
    router,
    variables,
)

ROOT = Path(__file__).parents[4]


def plan(fleet: dict[str, Any], found: dict[str, Any] | None = None, host: str = HOST) -> dict[str, Any]:
    return _plan.make_plan(host, fleet, ARTEFACTS, found)


def codes(made: dict[str, Any]) -> list[str]:
    return [refusal["code"] for refusal in made["refusals"]]


def instance(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in made["instances"] if entry["name"] == name)


def option(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


# ------------------------------------------------------------------------------------------------------- sound input


def test_the_reference_host() -> None:
    made = plan({HOST: variables(plan_engine_args={"context-length": 524288})}, facts())
    assert made["refusals"] == []
    first, second, third = (instance(made, name) for name in ("prefill", "decode", "router"))
    assert first["binding"] == ["/usr/bin/numactl", "--cpunodebind=0", "--membind=0"]
    assert second["nodes"] == [1]
    assert first["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert second["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert option(first["argv"], "--disaggregation-bootstrap-port") == "8998"
    assert option(second["argv"], "--tp-size") == "4"
    assert option(second["argv"], "--context-length") == "524288"
    assert "--disaggregation-bootstrap-port" not in second["argv"]
    assert third["argv"][1:8] == [
        "launch",
        "--pd-disaggregation",
        "--prefill",
        "http://127.0.0.1:30000",
        "8998",
        "--decode",
        "http://127.0.0.1:30002",
    ]
    assert option(third["argv"], "--host") == "0.0.0.0"
    assert third["url"] == "http://127.0.0.1:30001"
    assert first["ports"] == {"http": 30000, "bootstrap": 8998}
    served = {"path": "/srv/models/flash", "served_path": "/srv/models/flash", "served_name": "flash", "changes": {}}
    assert made["model"] == served


def test_the_routers_metrics_stay_on_loopback_unless_prometheus_is_elsewhere() -> None:
    assert instance(plan({HOST: variables()}), "router")["metrics"]["host"] == "127.0.0.1"
    elsewhere = _plan.make_plan(HOST, {HOST: variables(gpu_exporter_listen_address="::")}, ARTEFACTS, None, "mon")
    # Its engines listen on loopback, which a Prometheus elsewhere cannot reach.
    assert codes(elsewhere) == ["loopback"]


def test_the_cpu_device_brings_its_own_flags_and_takes_no_gpus() -> None:
    made = plan({HOST: variables(prefill(gpus=[]), decode(gpus=[]), router(), plan_device="cpu")}, facts())
    assert made["refusals"] == []
    argv = instance(made, "decode")["argv"]
    assert option(argv, "--device") == "cpu"
    assert option(argv, "--disaggregation-decode-retraction-backup") == "cpu_tensor"
    assert "--sleep-on-idle" in argv
    assert "CUDA_VISIBLE_DEVICES" not in instance(made, "decode")["environment"]
    assert instance(made, "decode")["binding"] == []


def test_an_instances_flags_come_after_the_hosts() -> None:
    fleet = {HOST: variables(prefill(args={"page-size": 64}), decode(), router(), plan_engine_args={"page-size": 1})}
    made = plan(fleet)
    assert option(instance(made, "prefill")["argv"], "--page-size") == "64"
    assert option(instance(made, "decode")["argv"], "--page-size") == "1"


def test_preferred_binding_names_one_node_and_none_binds_nothing() -> None:
    spread = variables(prefill(gpus=[3, 4]), decode(gpus=[5]), router(), plan_numa_policy="preferred")
    assert instance(plan({HOST: spread}, facts()), "prefill")["binding"][1:] == ["--cpunodebind=0,1", "--preferred=0"]
    free = variables(plan_numa_policy="none")
    assert instance(plan({HOST: free}, facts()), "prefill")["binding"] == []


def test_numbers_may_come_as_text_since_extra_variables_are_text() -> None:
    as_text = prefill(port="30000", bootstrap_port="8998", tp_size="4", gpus=["0", "1", "2", "3"])
    assert plan({HOST: variables(as_text, decode(), router())}) == plan({HOST: variables()})


@pytest.mark.parametrize(("value", "argv"), [("false", []), (False, []), ("no", []), (None, []), ("True", ["--x"])])
def test_text_booleans_are_booleans(value: Any, argv: list[str]) -> None:
    assert _commands.render_flags({"x": value}) == argv


def test_flag_values_of_every_shape() -> None:
    flags = {"c": [1, 2], "a": {"k": True}, "b": 0.5, "d": "0"}
    assert _commands.render_flags(flags) == ["--a", '{"k":true}', "--b", "0.5", "--c", "1", "2", "--d", "0"]


def test_a_group_over_two_hosts_is_reached_by_address() -> None:
    fleet = {
        "a": variables(prefill(host="::", group="pd0"), router(group="pd0", host="::"), ansible_host="2001:db8::1"),
        "b": variables(decode(host="192.0.2.12", group="pd0"), ansible_host="192.0.2.12"),
    }
    # Prometheus on "a" cannot reach the exporter on b's loopback: that is the only thing wrong here, and it is b's.
    assert codes(_plan.make_plan("b", fleet, ARTEFACTS, facts(), monitor="a")) == ["loopback"]
    fleet["b"]["gpu_exporter_listen_address"] = "192.0.2.12"
    made = plan(fleet, facts(), "a")
    assert made["refusals"] == []
    assert made["groups"]["pd0"]["decode"][0]["url"] == "http://192.0.2.12:30002"
    assert "http://[2001:db8::1]:30000" in instance(made, "router")["argv"]
    assert [target["address"] for target in made["scrape"][0]["targets"]] == ["[2001:db8::1]:30000"]
    everything = _plan.scrape_targets({name: _wants.parse_wants(name, found) for name, found in fleet.items()}, "a")
    assert [target["address"] for target in everything[0]["targets"]] == ["[2001:db8::1]:30000", "192.0.2.12:30002"]
    from_b = _plan.make_plan("b", fleet, ARTEFACTS, facts(), monitor="a")
    assert from_b["refusals"] == []
    assert from_b["groups"] == made["groups"]
    assert from_b["scrape"][0]["targets"] == everything[0]["targets"][1:]


def test_each_host_is_a_group_of_its_own_unless_told_otherwise() -> None:
    fleet = {name: variables(gpu_exporter_listen_address="0.0.0.0") for name in ("a", "b")}
    made = _plan.make_plan("b", fleet | {"a": variables()}, ARTEFACTS, None, monitor="b")
    assert codes(made) == []  # what is wrong with a host of another group is that host's matter
    assert _plan.make_plan("b", {"b": fleet["b"]}, ARTEFACTS)["groups"].keys() == {"b"}


def test_a_queue_bound_that_the_engine_ignores_is_warned_about() -> None:
    bound = {"max-queued-requests": 32}
    off = {"queue_bound": False}
    made = plan({HOST: variables(prefill(args=bound), decode(), router(), plan_features=off)})
    assert [warning.split(":")[0] for warning in made["warnings"]] == ["prefill"]
    assert "router" in made["warnings"][0]
    assert plan({HOST: variables(prefill(args=bound), decode(), router())})["warnings"] == []


@pytest.mark.parametrize(("bound", "warned"), [(32, ["decode"]), ("33", []), (128, [])])
def test_decode_is_to_have_more_room_than_prefill(bound: Any, warned: list[str]) -> None:
    wanted = variables(
        prefill(args={"max-queued-requests": "32"}), decode(args={"max-queued-requests": bound}), router()
    )
    assert [warning.split(":")[0] for warning in plan({HOST: wanted})["warnings"]] == warned


REFERENCE = {"prefill_tokens_per_s": 3300, "prompt_tokens": 11000, "ttft_s": 110}
BOOTSTRAP, WAITING = (f"SGLANG_DISAGGREGATION_{name}_TIMEOUT" for name in ("BOOTSTRAP", "WAITING"))


def test_queues_are_bounded_unless_told_otherwise() -> None:
    made = plan({HOST: variables()})
    assert option(instance(made, "prefill")["argv"], "--max-queued-requests") == "32"
    assert option(instance(made, "decode")["argv"], "--max-queued-requests") == "33"
    router_line = instance(made, "router")["argv"]
    assert option(router_line, "--max-concurrent-requests") == "33"
    assert option(router_line, "--queue-size") == "0"
    assert option(router_line, "--request-timeout-secs") == "1800"
    assert {"--disable-retries", "--disable-circuit-breaker", "--disable-worker-overload-protection"} < set(router_line)
    assert made["admission"][HOST]["bounds"] == {"prefill": 32, "decode": 33}
    assert made["warnings"] == []


def test_what_is_set_by_hand_is_what_runs() -> None:
    by_hand = variables(
        prefill(args={"max-queued-requests": 5}),
        decode(args={"max-queued-requests": None}),
        router(args={"max-concurrent-requests": "6", "request-timeout-secs": None}),
        plan_admission=REFERENCE,
    )
    made = plan({HOST: by_hand})
    assert option(instance(made, "prefill")["argv"], "--max-queued-requests") == "5"
    assert "--max-queued-requests" not in instance(made, "decode")["argv"]
    assert option(instance(made, "router")["argv"], "--max-concurrent-requests") == "6"
    assert option(instance(made, "router")["argv"], "--queue-timeout-secs") == "106"
    assert "--request-timeout-secs" not in instance(made, "router")["argv"]
    assert made["admission"][HOST]["bounds"] == {"prefill": 5, "decode": None}
    assert made["admission"][HOST]["timeouts"]["request"] == 1800


def test_figures_may_be_text() -> None:
    as_text = {name: str(value) for name, value in REFERENCE.items()}
    assert plan({HOST: variables(plan_admission=as_text)}) == plan({HOST: variables(plan_admission=REFERENCE)})


def changed(wanted: dict[str, Any], base: dict[str, Any] | None = None) -> set[str]:
    """Names of the instances that run with something else than they did."""
    before, after = plan({HOST: base or variables()}), plan({HOST: wanted})
    assert before["groups"][HOST]["revision"] == after["groups"][HOST]["revision"]
    return {
        new["name"]
        for old, new in zip(before["instances"], after["instances"], strict=True)
        if old["fingerprint"] != new["fingerprint"]
    }


def test_a_changed_timeout_restarts_only_what_reads_it() -> None:
    assert changed(variables(plan_environment={WAITING: "600"})) == {"decode"}
    assert changed(variables(plan_environment={BOOTSTRAP: "200"})) == {"prefill"}
    assert changed(variables(plan_router_args={"queue-timeout-secs": 20})) == {"router"}
    assert changed(variables(prefill(), decode(args={"max-queued-requests": 99}), router())) == {"decode"}
    # SGLang 0.5.23 looks at both where decode allocates late.
    late = {"disaggregation-decode-allocation-policy": "prefill_complete"}
    both = variables(plan_environment={WAITING: "600"}, plan_engine_args=late)
    assert changed(both, variables(plan_engine_args=late)) == {"prefill", "decode"}


def test_a_server_of_parts_gets_no_bound_and_refuses_one() -> None:
    made = plan({HOST: variables(plan_engine_args={"pp-size": 2})})
    assert "--max-queued-requests" not in instance(made, "prefill")["argv"]
    assert option(instance(made, "router")["argv"], "--max-concurrent-requests") == "33"
    workers = {"tokenizer-worker-num": 2, "max-queued-requests": 8}
    assert codes(plan({HOST: variables(prefill(args=workers), decode(), router())})) == ["queue_bound_parts"]


def test_without_the_feature_servers_get_no_bound() -> None:
    made = plan({HOST: variables(plan_features={"queue_bound": "off"})})
    assert [entry["name"] for entry in made["instances"] if "--max-queued-requests" in entry["argv"]] == []


def test_timeouts_out_of_order_are_refused() -> None:
    short = variables(
        plan_environment={BOOTSTRAP: "600", WAITING: "600"}, plan_router_args={"request-timeout-secs": 300}
    )
    made = plan({HOST: short})
    assert codes(made) == ["timeout_order"]
    assert "request-timeout-secs of router is 300" in made["refusals"][0]["found"]
    assert made["instances"] == []


@pytest.mark.parametrize(
    ("instances", "by_hand", "policy"),
    [
        ((prefill(), decode(), router()), {}, "round_robin"),
        ((prefill(), decode(), router()), {"policy": "cache_aware"}, "cache_aware"),
        (
            (
                prefill(gpus=[0, 1]),
                prefill(name="prefill2", port=30004, bootstrap_port=8999, gpus=[2, 3]),
                decode(),
                router(),
            ),
            {},
            "cache_aware",
        ),
        (
            (prefill(), decode(gpus=[4, 5]), decode(name="decode2", port=30004, gpus=[6, 7]), router()),
            {},
            "cache_aware",
        ),
    ],
)
def test_a_router_keeps_prompts_only_where_it_has_a_choice(
    instances: tuple[dict[str, Any], ...], by_hand: dict[str, str], policy: str
) -> None:
    made = plan({HOST: variables(*instances, plan_router_args=by_hand)})
    assert made["refusals"] == []
    assert option(instance(made, "router")["argv"], "--policy") == policy


def test_retries_are_refused_unless_named() -> None:
    flags = {"disable-retries": "false"}
    assert codes(plan({HOST: variables(plan_router_args=flags)})) == ["router_safeguard"]
    made = plan({HOST: variables(plan_router_args=flags, plan_admission={"allow": ["retries"]})})
    assert made["refusals"] == []
    assert "--disable-retries" not in instance(made, "router")["argv"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"plan_served_model_name": "deepseek-v4-flash"}, "asks for thinking"),
        ({"plan_engine_args": {"enable-priority-scheduling": True}}, "the worst request"),
        ({"plan_router_args": {"disable-worker-overload-protection": False}}, "avoids servers"),
        ({"plan_router_args": {"disable-worker-overload-protection": False, "worker-overload-shed": True}}, "rejects"),
        ({"plan_router_args": {"max-concurrent-requests": -1}}, "bounds nothing"),
    ],
)
def test_what_fights_the_bounds_is_warned_about(changes: dict[str, Any], told: str) -> None:
    made = plan({HOST: variables(**changes)})
    assert made["refusals"] == []
    assert [text for text in made["warnings"] if told in text] != []


@pytest.mark.parametrize("kwargs", [{"thinking": True}, '{"thinking": true}', {"thinking": "true"}])
def test_thinking_that_both_ask_for_is_not_warned_about(kwargs: Any) -> None:
    asked = {"default-chat-template-kwargs": kwargs}
    made = plan({HOST: variables(plan_served_model_name="deepseek-v4-flash", plan_engine_args=asked)})
    assert made["warnings"] == []


def test_a_group_over_two_hosts_has_one_admission() -> None:
    def fleet(**changes: Any) -> dict[str, Any]:
        return {
            "a": variables(
                prefill(host="192.0.2.11", group="pd0", args={"max-queued-requests": 4}), router(group="pd0")
            ),
            "b": variables(
                prefill(host="192.0.2.12", group="pd0"),
                decode(host="192.0.2.12", group="pd0"),
                ansible_host="192.0.2.12",
                gpu_exporter_listen_address="192.0.2.12",
                **changes,
            ),
        }

    made = {host: _plan.make_plan(host, fleet(), ARTEFACTS, None, "a") for host in ("a", "b")}
    assert [entry["refusals"] for entry in made.values()] == [[], []]
    assert made["a"]["admission"] == made["b"]["admission"]
    assert made["a"]["admission"]["pd0"]["bounds"] == {"a/prefill": 4, "b/prefill": 32, "b/decode": 38}
    assert option(instance(made["b"], "prefill")["argv"], "--max-queued-requests") == "32"
    assert option(instance(made["a"], "router")["argv"], "--max-concurrent-requests") == "38"
    assert codes(plan(fleet(plan_admission=REFERENCE), None, "a")) == ["group_disagrees"]


KERNELS = {"index_keys": "bf16", "indexer_logits": "triton"}


def test_features_reach_servers_and_not_routers() -> None:
    made = plan({HOST: variables(plan_features=KERNELS)})
    servers = {item["name"]: item for item in made["instances"]}
    assert servers["prefill"]["features"] == {"queue_bound": "on"} | KERNELS
    assert servers["router"]["features"] == {}
    environment = servers["decode"]["environment"]
    assert environment["LLMFLEET_INDEX_KEYS"] == "bf16"
    assert environment["LLMFLEET_QUEUE_BOUND"] == "on"
    assert environment["LLMFLEET_FEATURES_DIR"] == "/run/llmfleet/decode/features"
    assert "LLMFLEET_SPARSE_MLA" not in environment
    assert "LLMFLEET_QUEUE_BOUND" not in servers["router"]["environment"]


def test_features_are_agreed_on_and_part_of_the_revision() -> None:
    stock = plan({HOST: variables()})
    ours = plan({HOST: variables(plan_features=KERNELS)})
    assert stock["groups"][HOST]["revision"] != ours["groups"][HOST]["revision"]
    assert stock["engine"]["release"] == ours["engine"]["release"]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [({}, 4), ({"pp-size": 2}, 8), ({"dp-size": 2}, 8), ({"dp-size": 4, "enable-dp-attention": True}, 4)],
)
def test_each_rank_of_a_server_is_counted(flags: dict[str, Any], ranks: int) -> None:
    made = plan({HOST: variables(plan_engine_args=flags)})
    assert {item["name"]: item["ranks"] for item in made["instances"]} == {
        "prefill": ranks,
        "decode": ranks,
        "router": 0,
    }


def test_bf16_index_keys_are_counted_in_the_budget() -> None:
    asked = {"plan_hicache": {"total": "300GB"}, "plan_engine_args": {"max-total-tokens": 1000192}}
    by_keys = [
        plan({HOST: variables(plan_features=features, **asked)}, facts())["budget"]["instances"]
        for features in ({}, KERNELS)
    ]
    ratios = [
        next(entry["flags"]["hicache-ratio"] for entry in entries if entry["name"] == "prefill") for entries in by_keys
    ]
    # A page of bf16 keys is 1,164,864 bytes against 998,208: the same memory holds fewer tokens.
    assert ratios[0] > ratios[1]


def test_the_plugin_and_the_patches_are_part_of_the_release() -> None:
    def released(digest: str) -> str:
        sources = {"": {"0.5.23": {"digest": digest}}}
        return str(
            _plan.make_plan(HOST, {HOST: variables()}, ARTEFACTS | {"sources": sources}, facts())["engine"]["release"]
        )

    assert released("a") == released("a")
    assert released("a") != released("b")


def test_generation_defaults_are_an_overlay_that_is_named_by_them() -> None:
    plain = plan({HOST: variables()}, facts())
    warm = plan({HOST: variables(plan_generation_config={"temperature": "0.6"})}, facts())
    assert plain["model"]["served_path"] == plain["model"]["path"] == "/srv/models/flash"
    assert warm["model"]["path"] == "/srv/models/flash"
    assert warm["model"]["served_path"].startswith("/opt/llmfleet/overlays/")
    assert warm["model"]["changes"] == {"generation_config.json": {"temperature": 0.6}}
    assert warm["model"]["served_path"] in instance(warm, "decode")["argv"]
    assert warm["groups"][HOST]["revision"] != plain["groups"][HOST]["revision"]


@pytest.mark.parametrize("asked", [{"temperature": "hot"}, {"eos_token_id": 3}, {"top_p": True}])
def test_generation_defaults_are_numbers_that_the_engine_reads(asked: dict[str, Any]) -> None:
    assert codes(plan({HOST: variables(plan_generation_config=asked)}, facts())) == ["generation_config"]


NVFP4 = {**FLASH, "model_type": "deepseek_v4"} | {
    "quantization_config": {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
}


def test_what_a_gpu_cannot_run_is_refused_for_each_server() -> None:
    wanted = {HOST: variables(plan_gpu_capability="12.0")}
    made = plan(wanted, facts(model_config=NVFP4))
    assert codes(made) == ["capability_moe_runner"] * 2
    assert made["refusals"][0]["found"].startswith("prefill: moe-runner-backend is auto on compute capability 12.0")
    good = {HOST: variables(plan_gpu_capability=12.0, plan_engine_args={"moe-runner-backend": "flashinfer_cutlass"})}
    assert codes(plan(good, facts(model_config=NVFP4))) == []
    assert codes(plan({HOST: variables(plan_gpu_capability="8.0")}, facts())) == ["gpu_capability"] * 2


def test_what_nvml_says_of_the_gpus_is_looked_at_too() -> None:
    found = facts(model_config=NVFP4)
    for entry in found["topology"]["gpus"]:
        entry["nvml"] = {
            "capability": "10.0" if entry["index"] < 4 else "12.0",
            "memory_affinity": [],
            "numa_node": None,
        }
        entry["nvml"]["cpu_affinity"] = []
    made = plan({HOST: variables()}, found)
    assert [entry["found"].split(":")[0] for entry in made["refusals"]] == ["decode"]


@pytest.mark.parametrize(("driver", "expected"), [("570.172.08", ["driver_version"]), ("580.95.05", []), (None, [])])
def test_a_driver_that_is_too_old_for_the_engines_cuda_is_refused(driver: str | None, expected: list[str]) -> None:
    found = facts()
    found["topology"]["driver"] = driver
    assert codes(plan({HOST: variables()}, found)) == expected


def test_engine_files_that_cannot_be_read_are_refused() -> None:
    sources = {"/nowhere": {"0.5.23": {"error": "/nowhere/plugin does not exist"}}}
    made = _plan.make_plan(
        HOST, {HOST: variables(plan_engine_files="/nowhere")}, ARTEFACTS | {"sources": sources}, facts()
    )
    assert [entry["code"] for entry in made["refusals"]] == ["engine_files"]


def test_compilers_are_bound_by_the_memory_of_the_servers_nodes() -> None:
    made = plan({HOST: variables()}, facts())
    # 64 CPUs, and a quarter of 240 GB is enough for 13 compilers of 4 GiB.
    assert {item["environment"].get("MAX_JOBS") for item in made["instances"] if item["role"] != "router"} == {"13"}


def test_scrape_targets_name_every_instance_and_exporter() -> None:
    made = plan({HOST: variables()})
    assert {job["job"]: [t["address"] for t in job["targets"]] for job in made["scrape"]} == {
        "sglang": ["127.0.0.1:30002", "127.0.0.1:30000"],
        "router": ["127.0.0.1:29000"],
        "gpu_exporter": ["127.0.0.1:9101"],
    }
    assert made["scrape"][0]["targets"][0]["labels"] == {
        "host": HOST,
        "instance_name": "decode",
        "role": "decode",
        "group": HOST,
    }


# ------------------------------------------------------------------------------------------------------ the fallback


def spared(*more: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The reference host with a fallback on all of its GPUs."""
    return variables(prefill(), decode(), router(), *(more or (fallback(),)), **changes)


def standby(made: dict[str, Any]) -> dict[str, Any]:
    assert made["refusals"] == []
    (found,) = made["fallbacks"]
    return dict(found)


def test_a_fallback_is_one_server_at_the_door_of_its_group() -> None:
    made = plan({HOST: spared(plan_engine_args={"disaggregation-prefill-pp": 2, "context-length": 4096})}, facts())
    found = standby(made)
    assert [entry["name"] for entry in made["instances"]] == ["prefill", "decode", "router"]
    assert (found["host"], found["port"], found["ports"]) == ("0.0.0.0", 30001, {"http": 30001})
    assert found["url"] == "http://127.0.0.1:30001"
    assert [word for word in found["argv"] if "disaggregation" in word] == []
    assert option(found["argv"], "--tp-size") == "8"
    assert option(found["argv"], "--context-length") == "4096"
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert {name for name in found["environment"] if "DISAGGREGATION" in name} == set()
    assert found["binding"] == ["/usr/bin/numactl", "--cpunodebind=0,1", "--membind=0,1"]
    assert (found["ranks"], found["features"]) == (8, {"queue_bound": "on"})
    assert found["conflicts"] == ["llmfleet-prefill.service", "llmfleet-decode.service", "llmfleet-router.service"]
    assert found["revision"] == made["groups"][HOST]["revision"]


def test_a_fallback_changes_nothing_of_what_runs() -> None:
    without, beside = plan({HOST: variables()}, facts()), plan({HOST: spared()}, facts())
    for part in ("instances", "groups", "scrape", "admission"):
        assert beside[part] == without[part]


def test_a_fallback_has_a_door_of_its_own_where_it_names_one_or_the_host_has_no_router() -> None:
    assert standby(plan({HOST: spared(fallback(port=30009))}, facts()))["ports"] == {"http": 30009}
    apart = {
        "h1": variables(prefill(group="g", host="0.0.0.0"), fallback(group="g"), ansible_host="192.0.2.1"),
        "h2": variables(decode(group="g", host="0.0.0.0"), router(group="g"), ansible_host="192.0.2.2"),
    }
    assert codes(plan(apart, host="h1")) == ["port"]
    apart["h1"]["plan_instances"][1]["port"] = 30001
    assert standby(plan(apart, host="h1"))["conflicts"] == ["llmfleet-prefill.service"]


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        # As much as the router in front of the pair lets in and queues.
        ({"plan_router_args": {"max-concurrent-requests": 40, "queue-size": 8}}, 48),
        ({}, 33),
        ({"plan_engine_args": {"max-queued-requests": 5}}, 5),
        ({"plan_router_args": {"max-concurrent-requests": -1}}, None),
        ({"plan_engine_args": {"tokenizer-worker-num": 2}}, None),
    ],
)
def test_a_fallbacks_queue_is_bounded_by_what_the_router_would_let_in(
    changes: dict[str, Any], bound: int | None
) -> None:
    argv = standby(plan({HOST: spared(**changes)}, facts()))["argv"]
    assert (int(option(argv, "--max-queued-requests")) if "--max-queued-requests" in argv else None) == bound


def test_a_fallback_asks_for_keys_and_opens_no_other_door() -> None:
    keys = ["k" * 32]
    assert standby(plan({HOST: spared(plan_api_keys=keys)}, facts()))["api_keys"] == 1
    doors = spared(fallback(args={"tokenizer-worker-num": 2}), plan_api_keys=keys)
    assert codes(plan({HOST: doors}, facts())) == ["api_keys_other_door"]


def test_a_fallback_may_hold_what_it_displaces_holds_and_the_other_way_round() -> None:
    holder = {"pid": 5, "unit": "llmfleet-whole.service", "command": "", "addresses": []}
    assert codes(plan({HOST: spared()}, facts(ports={"30001": holder}))) == []
    assert codes(plan({HOST: spared()}, facts(ports={"30000": holder}))) == []
    assert codes(plan({HOST: spared()}, facts(ports={"30001": holder | {"unit": "nginx.service"}}))) == [
        "port_taken",
        "port_taken",
    ]
    assert codes(plan({HOST: spared()}, facts(ports={"30001": holder | {"unit": "llmfleet-router.service"}}))) == []


def test_a_fallback_has_the_whole_budget_and_none_of_it_twice() -> None:
    made = plan({HOST: spared(fallback(args={"max-total-tokens": 1_000_192}), **pinned())}, facts())
    found = standby(made)
    (given,) = made["budget"]["fallbacks"]
    pair = {entry["name"]: entry["given"] for entry in made["budget"]["instances"]}
    # The pair can use half of the 300 GB, since decode keeps no prefixes; the fallback is on both nodes.
    assert 149 * 10**9 < pair["prefill"] <= 150 * 10**9
    assert 298 * 10**9 < given["given"] <= 300 * 10**9
    assert max(given["by_node"].values()) <= 150 * 10**9
    assert found["settings"] == {"MemoryMax": str(given["memory_max"])}
    assert made["budget"]["host"]["given"] == pair["prefill"]
    assert "whole stands by" in _budget.table(made["budget"])


def test_a_fallback_has_what_its_servers_were_given_where_the_host_names_no_budget() -> None:
    own = prefill(args={"max-total-tokens": 1_000_192}, hicache={"total": "100GB"})
    wanted = variables(own, decode(), router(), fallback(args={"max-total-tokens": 1_000_192}))
    made = plan({HOST: wanted}, facts())
    (given,) = made["budget"]["fallbacks"]
    assert standby(made)["nodes"] == [0, 1]
    assert 99 * 10**9 < given["given"] <= 100 * 10**9
    assert set(given["by_node"]) == {"0", "1"}
    assert given["by_node"]["1"] == 0
    none = fallback(hicache={"enabled": False})
    assert standby(plan({HOST: variables(own, decode(), router(), none)}, facts()))["settings"] == {}


def test_fallbacks_of_two_groups_fit_beside_whatever_runs_of_the_other() -> None:
    tokens = {"max-total-tokens": 1_000_192}
    entries = [
        prefill(name="prefill-a", group="a", gpus=[0, 1], args=tokens),
        decode(name="decode-a", group="a", gpus=[4, 5]),
        router(name="router-a", group="a"),
        fallback(name="whole-a", group="a", gpus=[0, 1, 4, 5], args=tokens),
        prefill(name="prefill-b", group="b", gpus=[2, 3], port=31000, bootstrap_port=8999, args=tokens),
        decode(name="decode-b", group="b", gpus=[6, 7], port=31002),
        router(name="router-b", group="b", port=31001, metrics_port=29001),
        fallback(name="whole-b", group="b", gpus=[2, 3, 6, 7], args=tokens),
    ]
    made = plan({HOST: variables(*entries, plan_hicache={"total": "300GB"})}, facts())
    assert made["refusals"] == []
    given = {
        entry["name"]: {node: entry["by_node"].get(node, 0) for node in "01"}
        for entry in (*made["budget"]["instances"], *made["budget"]["fallbacks"])
    }
    assert all(sum(given[f"whole-{group}"].values()) > sum(given[f"prefill-{group}"].values()) for group in "ab")
    for node_ in "01":
        most = [max(given[f"prefill-{group}"][node_], given[f"whole-{group}"][node_]) for group in "ab"]
        assert sum(most) <= 150 * 10**9


def test_memory_that_a_running_fallback_holds_is_there_for_the_pair() -> None:
    wanted = spared(fallback(args={"max-total-tokens": 1_000_192}), **pinned())
    running = facts()
    for number in (0, 1):
        running["topology"]["nodes"][number] |= {"mem_free": 1, "mem_available": 1}
    assert codes(plan({HOST: wanted}, running)) == ["memory_busy"]
    held = {"main_pid": 7, "by_node": {"0": 160 * 10**9, "1": 160 * 10**9}}
    running["memory"] = {"llmfleet-whole.service": held}
    assert plan({HOST: wanted}, running) == plan({HOST: wanted}, facts())


def pinned() -> dict[str, Any]:
    return {"plan_hicache": {"total": "300GB"}, "plan_engine_args": {"max-total-tokens": 1_000_192}}


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fleet", "code", "found", "cure"),
    [
        (variables(prefill(), decode(port=30000), router()), "port_shared", "port 30000", "own port"),
        (variables(prefill(), decode(), router(metrics_port=9101)), "port_shared", "gpu_exporter", "own port"),
        (variables(prefill(), decode(gpus=[3, 4]), router()), "gpu_shared", "gpu 3", "one instance"),
        (variables(prefill(role="prefil"), decode(), router()), "role", "'prefil'", "role"),
        (variables(prefill(bootstrap_port=None), decode(), router()), "bootstrap_port", "'prefill'", "8998"),
        (variables(prefill(numa_nodes=[-1]), decode(), router()), "numa_node", "[-1]", "leave numa_nodes out"),
        (variables(prefill(), decode(numa_node=1), router()), "instance_key", "numa_node", "spelling"),
        (variables(plan_instances=[]), "no_instances", "no instance", "plan_instances"),
        (variables(plan_instances="prefill"), "no_instances", "'prefill'", "plan_instances"),
        (variables(prefill(), router()), "group_incomplete", "no decode", "decode"),
        (variables(prefill(), decode(), router(), plan_device="tpu"), "choice", "'tpu'", "plan_device"),
        (variables(plan_engine_version="0.4.0"), "choice", "0.4.0", "plan_engine_version"),
        (variables(plan_engine_args={"port": 1}), "flag_owned", "port", "remove port"),
        (variables(plan_engine_args={"--tp": 1}), "flag", "'--tp'", "rename"),
        (variables(plan_engine_args={"max-queued-requests": 0}), "queue_bound", "0", "raise it"),
        (variables(prefill(port=70000), decode(), router()), "port", "70000", "valid port"),
        (variables(prefill(port="http"), decode(), router()), "type", "'http'", "number"),
        (variables(prefill(name="Pre fill"), decode(), router()), "name", "'Pre fill'", "name"),
        (variables(prefill(), decode(name="prefill"), router()), "name_shared", "prefill", "own name"),
        (variables(prefill(tp_size=3), decode(), router()), "tp_size", "3", "divisor"),
        (variables(prefill(gpus=[]), decode(), router()), "gpu_none", "no gpus", "set gpus"),
        (variables(prefill(), decode(), router(gpus=[1])), "gpu_unused", "router", "remove"),
        (variables(plan_device="cpu"), "gpu_unused", "[0, 1, 2, 3]", "remove"),
        (variables(plan_model_path="models/flash"), "model_path", "'models/flash'", "plan_model_path"),
        (variables(plan_engine_args=["a"]), "type", "plan_engine_args", "mapping"),
        (spared(fallback(group="other", port=30009)), "fallback_alone", "no instance on gpu1", "correct the group"),
        (spared(fallback(), fallback(name="second")), "fallback_second", "2 fallbacks", "keep the one"),
        (spared(fallback(name="router")), "name_shared", "a router and a server", "own name"),
        (spared(fallback(port=9101)), "fallback_shared", "port 9101", "nobody else"),
        (spared(fallback(gpus=[])), "gpu_none", "whole has no gpus", "set gpus"),
        (spared(fallback(tp_size=3)), "tp_size", "3 with 8 GPUs", "divisor"),
        (
            variables(
                prefill(gpus=[0]),
                decode(gpus=[1]),
                router(),
                fallback(gpus=[0, 1, 2]),
                prefill(name="p", group="b", gpus=[2], port=31000, bootstrap_port=8999),
                decode(name="d", group="b", gpus=[3], port=31002),
                router(name="r", group="b", port=31001, metrics_port=29001),
            ),
            "fallback_shared",
            "GPU 2 is asked for by whole, the fallback of group gpu1, and by p",
            "of group gpu1 alone",
        ),
    ],
)
def test_bad_inventory_is_refused(fleet: dict[str, Any], code: str, found: str, cure: str) -> None:
    made = plan({HOST: fleet}, facts())
    refusal = next((entry for entry in made["refusals"] if entry["code"] == code), None)
    assert refusal is not None, made["refusals"]
    assert refusal["host"] == HOST
    assert found in refusal["found"]
    assert cure in f"{refusal['expected']} {refusal['cure']}"
    assert made["instances"] == []


def _paths(**changes: Any) -> dict[str, Any]:
    found = facts()["paths"]
    for name, change in changes.items():
        path = {"root": "/opt/llmfleet", "model": "/srv/models/flash", "config": "/srv/models/flash/config.json"}[name]
        found[path] |= change
    return found


SQUATTER = {"pid": 99, "unit": "", "command": "python3 -m http.server 30000", "addresses": ["0.0.0.0"]}


@pytest.mark.parametrize(
    ("changes", "code", "found", "cure"),
    [
        ({"topology": {"nodes": [node(0, nodes=1)], "gpus": []}}, "gpu_missing", "GPU 0", "nvidia-smi"),
        ({"paths": _paths(model={"exists": False})}, "model_missing", "folder", "model_source"),
        ({"paths": _paths(config={"exists": False})}, "model_missing", "config.json", "model_source"),
        ({"paths": _paths(config={"unreadable": "/srv/models"})}, "model_unreadable", "/srv/models", "chmod"),
        ({"paths": _paths(root={"free": 3 * GIB})}, "disk", "3.0 GiB free at /opt/llmfleet", "16.0 GiB for the engine"),
        ({"os": {"distribution": "Fedora", "major": "41", "arch": "x86_64"}}, "os", "Fedora 41", "Debian 12"),
        ({"os": {"distribution": "Debian", "major": "12", "arch": "aarch64"}}, "arch", "aarch64", "x86_64"),
        ({"ports": {"30000": SQUATTER}}, "port_taken", "PID 99", "another port"),
        ({"model_source": {"exists": False, "path": "/m"}}, "model_source", "/m", "model_source"),
    ],
)
def test_a_host_that_cannot_run_the_plan_is_refused(changes: dict[str, Any], code: str, found: str, cure: str) -> None:
    made = plan({HOST: variables()}, facts(**changes))
    assert code in codes(made)
    refusal = next(entry for entry in made["refusals"] if entry["code"] == code)
    assert found in refusal["found"]
    assert cure in f"{refusal['expected']} {refusal['cure']}"


def test_a_gpu_whose_node_is_unknown_is_never_guessed() -> None:
    found = facts()
    for gpu in found["topology"]["gpus"]:
        gpu["numa_node"] = None
    assert codes(plan({HOST: variables()}, found)) == ["numa_unknown", "numa_unknown"]
    said = variables(prefill(numa_nodes=[0]), decode(numa_nodes=[1]), router())
    assert instance(plan({HOST: said}, found), "decode")["nodes"] == [1]
    assert codes(plan({HOST: variables(plan_numa_policy="none")}, found)) == []


def test_a_node_that_the_host_has_not_is_refused() -> None:
    made = plan({HOST: variables(prefill(numa_nodes=[7]), decode(), router())}, facts())
    assert codes(made) == ["numa_node"]
    assert made["refusals"][0]["expected"] == "nodes of this host: 0, 1"


def test_a_model_to_be_copied_needs_room_only_for_what_is_missing() -> None:
    source = {"exists": True, "is_dir": True, "path": "/m", "size": 90 * GIB}
    made = plan({HOST: variables()}, facts(model_source=source))
    assert codes(made) == ["disk"]
    copied = _paths(model={"size": 90 * GIB})
    assert plan({HOST: variables()}, facts(model_source=source, paths=copied))["refusals"] == []


def test_a_set_that_the_manifest_has_not_is_refused() -> None:
    bare = {"artefacts": [entry for entry in ARTEFACTS["artefacts"] if entry["sets"] != ["engine-0.5.23-cuda"]]}
    made = _plan.make_plan(HOST, {HOST: variables()}, bare, facts())
    assert codes(made) == ["artefacts"]
    assert "engine-0.5.23-cpu" in made["refusals"][0]["expected"]


def test_two_sides_of_a_group_that_disagree_are_refused() -> None:
    fleet = {
        "a": variables(prefill(host="0.0.0.0", group="pd0"), router(group="pd0"), plan_model_path="/x"),
        "b": variables(
            decode(host="192.0.2.12", group="pd0"), gpu_exporter_listen_address="0.0.0.0", plan_model_path="/y"
        ),
    }
    made = plan(fleet, None, "a")
    assert codes(made) == ["group_disagrees"]
    assert made["refusals"][0]["found"] == "plan_model_path of group pd0 is '/x' on a, '/y' on b"


def test_a_peer_that_is_refused_is_named() -> None:
    fleet = {
        "a": variables(prefill(host="192.0.2.11", group="pd0"), router(group="pd0")),
        "b": variables(decode(host="192.0.2.12", group="pd0"), plan_engine_version="0.1"),
    }
    refusals = plan(fleet, None, "a")["refusals"]
    assert [entry["cure"] for entry in refusals if entry["code"] == "peer"] == ["correct b first"]


def test_loopback_across_hosts_is_refused() -> None:
    fleet = {
        "a": variables(prefill(group="pd0"), router(group="pd0")),
        "b": variables(decode(host="192.0.2.12", group="pd0")),
    }
    assert "loopback" in codes(plan(fleet, None, "a"))


@pytest.mark.parametrize(
    ("host", "address", "refused"),
    [
        ("0.0.0.0", "2001:db8::1", True),
        ("::", "192.0.2.11", True),
        ("::", "2001:db8::1", False),
        ("0.0.0.0", "192.0.2.11", False),
        ("2001:db8::1", "192.0.2.11", False),
        # What a name stands for is not known here.
        ("0.0.0.0", "gpu1.example.org", False),
        ("::", "gpu1.example.org", False),
    ],
)
def test_an_engine_is_reached_by_the_family_that_it_listens_on(host: str, address: str, refused: bool) -> None:
    fleet = {HOST: variables(prefill(), decode(host=host), router(host="::"), plan_address=address)}
    assert ("address_family" in codes(plan(fleet))) is refused


@pytest.mark.parametrize(
    ("host", "address", "told"),
    [
        ("127.0.0.1", "192.0.2.11", None),
        ("0.0.0.0", "192.0.2.11", "192.0.2.11"),
        ("::", "2001:db8::1", "2001:db8::1"),
        ("198.51.100.1", "192.0.2.11", "198.51.100.1"),
        ("0.0.0.0", "gpu1.example.org", None),
    ],
)
def test_the_ranks_of_a_server_are_reached_where_the_server_is(host: str, address: str, told: str | None) -> None:
    made = plan({HOST: variables(prefill(host=host), decode(), router(host="::"), plan_address=address)})
    assert instance(made, "prefill")["environment"].get("SGLANG_HOST_IP") == told
    assert "SGLANG_HOST_IP" not in instance(made, "decode")["environment"]
    assert "SGLANG_HOST_IP" not in instance(made, "router")["environment"]


def test_an_operator_knows_better_where_ranks_are_reached() -> None:
    by_hand = prefill(host="192.0.2.11", environment={"SGLANG_HOST_IP": "198.51.100.1"})
    made = plan({HOST: variables(by_hand, decode(), router())})
    assert instance(made, "prefill")["environment"]["SGLANG_HOST_IP"] == "198.51.100.1"


def test_a_router_on_the_ipv6_wildcard_takes_ipv4_too_but_not_the_other_way_round() -> None:
    assert codes(plan({HOST: variables(prefill(), decode(), router(host="::"))})) == []
    (refusal,) = plan({HOST: variables(plan_address="2001:db8::1")})["refusals"]
    assert refusal["found"] == "router on gpu1 listens on 0.0.0.0, and others are told 2001:db8::1"
    assert refusal["expected"] == "an IPv4 address to tell, or an IPv6 address to listen on"
    assert refusal["cure"].startswith("set host of router to the address that others are to reach")


def test_refusals_read_as_found_expected_to_do() -> None:
    text = _plan.refusal_text(plan({HOST: variables(plan_device="cpu")})["refusals"])
    assert text.splitlines()[:3] == [
        "gpu1: found prefill has gpus [0, 1, 2, 3]",
        "  expected: no gpus, since plan_device is cpu",
        "  to do: remove gpus",
    ]


# ------------------------------------------------------------------------------------------- what holds for all input


def test_the_plan_does_not_move_when_its_services_run() -> None:
    before = plan({HOST: variables()}, facts())
    running = facts(
        releases=[before["engine"]["dir"], before["router"]["dir"]],
        paths=_paths(root={"free": 1 * GIB}),
        ports={
            str(port): {"pid": 5, "unit": entry["unit"], "command": "", "addresses": []}
            for entry in before["instances"]
            for port in entry["ports"].values()
        },
    )
    assert plan({HOST: variables()}, running) == before


def test_the_revision_follows_what_a_group_must_agree_on_and_nothing_else() -> None:
    base = plan({HOST: variables()})["groups"][HOST]["revision"]
    moved = variables(prefill(port=31000, bootstrap_port=9000), decode(), router(port=31001))
    assert plan({HOST: moved})["groups"][HOST]["revision"] == base
    other = variables(plan_engine_args={"kv-cache-dtype": "bf16"})
    assert plan({HOST: other})["groups"][HOST]["revision"] != base


def test_the_fingerprint_follows_environment_and_binding() -> None:
    base = instance(plan({HOST: variables()}, facts()), "prefill")["fingerprint"]
    for changed in (variables(plan_environment={"A": "1"}), variables(plan_numa_policy="preferred")):
        assert instance(plan({HOST: changed}, facts()), "prefill")["fingerprint"] != base


@given(st.permutations([prefill(), decode(), router()]), st.permutations(["gpu1", "gpu2", "gpu3"]))
def test_order_of_the_inventory_does_not_matter(instances: list[dict[str, Any]], hosts: list[str]) -> None:
    def fleet(order: list[str], entries: list[dict[str, Any]]) -> dict[str, Any]:
        def named(host: str) -> list[dict[str, Any]]:
            return [entry | {"group": host, "host": "0.0.0.0"} for entry in entries]

        return {host: variables(*named(host), gpu_exporter_listen_address="0.0.0.0") for host in order}

    shuffled = plan(fleet(hosts, instances), facts())
    ordered = plan(fleet(sorted(hosts), [prefill(), decode(), router()]), facts())
    key = "name"
    shuffled["instances"].sort(key=lambda entry: entry[key])
    ordered["instances"].sort(key=lambda entry: entry[key])
    assert _commands.canonical(shuffled) == _commands.canonical(ordered)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(sorted(_wants.DEFAULTS)), JSON_VALUES, max_size=3),
    st.lists(
        st.dictionaries(st.sampled_from(_wants.INSTANCE_KEYS), JSON_VALUES, max_size=12) | JSON_VALUES, max_size=3
    ),
)
def test_any_input_gives_a_plan_or_a_refusal_never_an_exception(changes: dict[str, Any], entries: list[Any]) -> None:
    made = plan({HOST: variables(plan_instances=entries) | changes}, None)
    assert json.loads(json.dumps(made)) == made
    assert bool(made["instances"]) != bool(made["refusals"])
    for refusal in made["refusals"]:
        assert all(refusal[key] for key in ("code", "host", "found", "expected", "cure"))


def test_the_defaults_are_those_of_the_role() -> None:
    role = yaml.safe_load((ROOT / "roles/plan/defaults/main.yml").read_text())
    assert role == {name: value for name, value in _wants.DEFAULTS.items() if name != "plan_model_path"}


def test_the_neighbours_defaults_are_those_of_their_roles() -> None:
    for name, value in _wants.NEIGHBOURS.items():
        role = next(part for part in ("gpu_exporter", "prometheus") if name.startswith(part))
        assert yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text())[name] == value


# ----------------------------------------------------------------------------------------------------------- host cache


def cached(**changes: Any) -> dict[str, Any]:
    """The reference host with 300 GB of HiCache asked for and the prefill's device pool pinned."""
    pinned = prefill(args={"max-total-tokens": 1_000_192})
    return variables(pinned, decode(), router(), **{"plan_hicache": {"total": "300GB"}, **changes})


def test_hicache_of_the_reference_host() -> None:
    made = plan({HOST: cached()}, facts())
    assert made["refusals"] == []
    first, second = instance(made, "prefill"), instance(made, "decode")
    assert option(first["argv"], "--hicache-ratio") == "5.294"
    assert option(first["argv"], "--max-total-tokens") == "1000192"
    assert "--enable-hierarchical-cache" in first["argv"]
    assert first["settings"] == {"MemoryMax": str(made["budget"]["instances"][1]["memory_max"])}
    assert "--enable-hierarchical-cache" not in second["argv"]
    assert second["settings"] == {}
    told = {entry["name"]: entry for entry in made["budget"]["instances"]}
    assert told["decode"]["why"].startswith("a decode server keeps no prefix cache")
    assert made["budget"]["nodes"][1]["why"] == "unused, see decode"


def test_what_a_window_costs_on_the_device_is_told_before_the_start() -> None:
    made = plan({HOST: cached(plan_engine_args={"context-length": 524_288, "max-running-requests": 64})}, facts())
    assert made["budget"]["device"]["decode"] == {
        "kind": "dsv4",
        "bytes_per_token": 7086.75,
        "bytes_per_token_bf16_keys": 7737.75,
        "fixed": 702_545_920,
        "context_tokens": 524_288,
        "context_bytes": 3_715_497_984,
        "largest_tokens": None,
    }


def test_the_device_pool_is_pinned_from_the_gpus_memory_where_that_is_said() -> None:
    found = facts()
    found["paths"]["/srv/models/flash"]["size"] = 160 * 10**9
    wanted = {
        "plan_hicache": {"total": "300GB"},
        "plan_gpu_memory": "96GB",
        "plan_engine_args": {"mem-fraction-static": 0.85, "max-running-requests": 64},
    }
    made = plan({HOST: variables(**wanted)}, found)
    # (96 GB x 0.85 - 160 GB / 4 - 2 GiB - 702,545,920 B) / 7086.75 B, in pages of 256
    tokens = (int(96e9 * 0.85) - 40 * 10**9 - 2 * GIB - 702_545_920) / 7086.75 // 256 * 256
    assert option(instance(made, "prefill")["argv"], "--max-total-tokens") == str(int(tokens))
    assert codes(plan({HOST: variables(plan_hicache={"total": "300GB"})}, facts())) == ["device_pool"]


def test_more_device_tokens_than_fit_are_warned_of() -> None:
    wanted = {
        "plan_gpu_memory": "96GB",
        "plan_engine_args": {"mem-fraction-static": 0.85, "max-running-requests": 64},
        "plan_router_args": {"max-concurrent-requests": 33},
    }
    found = facts()
    found["paths"]["/srv/models/flash"]["size"] = 160 * 10**9
    assert plan({HOST: cached(**wanted)}, found)["warnings"] == []
    wanted["plan_gpu_memory"] = "58GB"
    (warning,) = plan({HOST: cached(**wanted)}, found)["warnings"]
    assert warning.startswith("prefill: max-total-tokens 1,000,192 is more than the 9")


def test_a_unit_that_runs_does_not_move_the_plan_and_holds_what_the_gate_asks_for() -> None:
    before = plan({HOST: cached()}, facts())
    running = facts()
    running["topology"]["nodes"][0] |= {"mem_free": 1, "mem_available": 1}
    busy = plan({HOST: cached()}, running)
    assert codes(busy) == ["memory_busy"]
    assert "150.0 GB" in busy["refusals"][0]["found"]
    held = {"main_pid": 7, "by_node": {"0": 160 * 10**9}}
    assert plan({HOST: cached()}, running | {"memory": {"llmfleet-prefill.service": held}}) == before
    # Where the kernel does not tell what a unit holds, a running one holds what it is planned to.
    unknown = {"main_pid": 7, "by_node": None}
    assert plan({HOST: cached()}, running | {"memory": {"llmfleet-prefill.service": unknown}}) == before
    stopped = {"main_pid": 0, "by_node": None}
    assert codes(plan({HOST: cached()}, running | {"memory": {"llmfleet-prefill.service": stopped}})) == ["memory_busy"]


def test_hugepages_that_are_in_use_gate_the_start_too() -> None:
    pools = {str(2 << 20): {"total": 80_000, "free": 80_000}}
    found = facts()
    found["topology"]["nodes"][0]["hugepages"] = copy.deepcopy(pools)
    found["topology"]["nodes"][1]["mem_total"] = 480 * 10**9
    wanted = cached(plan_environment={"SGLANG_HUGEPAGE_SIZE": "2MB"}, plan_hicache={})
    wanted["plan_instances"][0]["hicache"] = {"total": "100GB"}
    assert codes(plan({HOST: wanted}, found)) == []
    found["topology"]["nodes"][0]["hugepages"][str(2 << 20)]["free"] = 10
    made = plan({HOST: wanted}, found)
    assert codes(made) == ["memory_busy"]
    assert "in pages of 2 MiB free now" in made["refusals"][0]["found"]


def test_the_revision_of_a_group_does_not_follow_a_hosts_memory() -> None:
    small = facts()
    small["topology"]["nodes"][0]["mem_total"] -= 10**9
    wanted = cached(plan_hicache={"fraction": 0.5})
    first, second = (plan({HOST: wanted}, found) for found in (facts(), small))
    assert instance(first, "prefill")["fingerprint"] != instance(second, "prefill")["fingerprint"]
    assert instance(first, "prefill")["revision"] == instance(second, "prefill")["revision"]


@pytest.mark.parametrize(
    ("changes", "code", "found"),
    [
        ({"plan_hicache": {"total": "300 gigs"}}, "size", "plan_hicache.total is '300 gigs'"),
        ({"plan_hicache": {"ratio": "2.0"}}, "number", "plan_hicache.ratio is '2.0'"),
        ({"plan_hicache": {"total": "9TB"}}, "hicache_node", "node 0 is asked for 4.5 TB"),
        ({"plan_reserve_os": "4"}, "size", "plan_reserve_os is '4', which has no unit"),
        ({"plan_reserve_growth": 0.95}, "share", "plan_reserve_growth is 0.95"),
        ({"plan_reserve_nodes": {"first": "4GiB"}}, "type", "a node of plan_reserve_nodes is 'first'"),
        ({"plan_gpu_memory": "96"}, "size", "plan_gpu_memory is '96'"),
        ({"plan_gpu_numa_nodes": {"gpu0": 1}}, "type", "plan_gpu_numa_nodes names 'gpu0'"),
        ({"plan_numa_binder": "taskset"}, "choice", "plan_numa_binder is 'taskset'"),
        ({"plan_memory_nodes": 2}, "type", "plan_memory_nodes is 2"),
        ({"plan_environment": {"SGLANG_AUTO_NUMA_BIND": "1"}}, "environment_owned", "SGLANG_AUTO_NUMA_BIND"),
        ({"plan_engine_args": {"hicache-ratio": 2}}, "flag_owned", "hicache-ratio"),
        ({"plan_engine_args": {"numa-node": [0, 0, 0, 0]}}, "flag_owned", "numa-node"),
        ({"plan_engine_args": {"hicache-mem-layout": "page_head"}}, "hicache_layout", "layouts layer_first"),
        ({"plan_engine_args": {"pp-size": 2}}, "hicache_pipeline", "pipeline"),
        ({"plan_environment": {"SGLANG_OPT_SM120_DIRECT_SWA_KV": "1"}}, "hicache_direct_swa", "SM120_DIRECT_SWA_KV"),
        ({"plan_environment": {"SGLANG_HUGEPAGE_SIZE": "4MB"}}, "hicache_hugepages", "neither 2MB nor 1GB"),
        ({"plan_environment": {"SGLANG_HUGEPAGE_SIZE": "2MB"}}, "hicache_hugepages", "no pool of that size"),
    ],
)
def test_wrong_memory_wants_are_refused_with_the_name_of_the_variable(
    changes: dict[str, Any], code: str, found: str
) -> None:
    made = plan({HOST: cached(**changes)}, facts())
    assert code in codes(made)
    assert any(found in refusal["found"] for refusal in made["refusals"])
    assert made["instances"] == []


def test_hicache_asked_of_a_server_that_cannot_have_it_is_refused() -> None:
    wanted = cached()
    wanted["plan_instances"][1]["hicache"] = {"total": "10GB"}
    assert codes(plan({HOST: wanted}, facts())) == ["hicache_decode"]
    off = cached()
    off["plan_instances"][0]["hicache"] = {"enabled": False}
    made = plan({HOST: off}, facts())
    assert made["budget"]["host"]["given"] == 0
    assert made["budget"]["instances"][1]["why"] == "disabled by the operator"
    routed = cached()
    routed["plan_instances"][2]["hicache"] = {"total": "10GB"}
    assert codes(plan({HOST: routed}, facts()))[0] == "hicache"
    # Without CUDA there is nothing to pin: the host's share is not used, and nothing is refused.
    cpu = {"plan_device": "cpu", "plan_transfer_backend": "mooncake_tcp", "plan_hicache": {"total": "300GB"}}
    unbound = variables(prefill(gpus=[]), decode(gpus=[]), router(), **cpu)
    assert plan({HOST: unbound}, facts())["budget"]["host"]["given"] == 0


@pytest.mark.parametrize("text", ["{", "[]", "", None])
def test_an_unreadable_config_json_is_refused_only_where_it_is_needed(text: str | None) -> None:
    assert codes(plan({HOST: cached()}, facts(model_config=text))) == ["model_config"]
    assert codes(plan({HOST: variables()}, facts(model_config=text))) == []


def test_a_config_json_that_ansible_has_read_already_is_the_same() -> None:
    read = facts(model_config=json.loads(facts()["model_config"]))
    assert plan({HOST: cached()}, read) == plan({HOST: cached()}, facts())


def test_systemd_binds_instead_of_numactl_and_never_both() -> None:
    made = plan({HOST: variables(plan_numa_binder="systemd")}, facts())
    first = instance(made, "prefill")
    assert first["binding"] == []
    assert first["argv"][0].endswith("/venv/bin/python")
    assert first["settings"] == {"CPUAffinity": "0-63", "NUMAPolicy": "bind", "NUMAMask": "0"}
    other = plan({HOST: variables()}, facts())
    assert instance(other, "prefill")["settings"] == {}
    assert instance(other, "prefill")["fingerprint"] != first["fingerprint"]
    for entry in made["instances"]:
        if entry["role"] != "router":
            assert entry["environment"]["SGLANG_AUTO_NUMA_BIND"] == "0"


def test_a_cpuset_that_forbids_a_planned_node_is_refused() -> None:
    narrow = facts()
    narrow["topology"]["mems_allowed"] = [0]
    assert codes(plan({HOST: variables()}, narrow)) == ["numa_not_allowed"]
    assert codes(plan({HOST: variables(plan_numa_policy="none")}, narrow)) == []


def test_gpus_of_two_nodes_pinned_to_one_are_refused() -> None:
    made = plan({HOST: variables(prefill(gpus=[2, 3, 4, 5], numa_nodes=[0]), decode(gpus=[6, 7]), router())}, facts())
    assert codes(made) == ["numa_split"]
    assert "its GPU 4 is on node 1" in made["refusals"][0]["found"]


def test_a_budget_without_a_plan_knows_releases_that_cannot_be_built() -> None:
    wanted = cached(plan_engine_version="0.5.16")
    made, refusals = _host_budget.budget_of(HOST, wanted, facts()["topology"], facts()["model_config"])
    assert refusals == []
    assert made["host"]["given"] > 149 * 10**9
    unknown = cached(plan_engine_version="0.4.9")
    _none, refusals = _host_budget.budget_of(HOST, unknown, facts()["topology"], facts()["model_config"])
    assert [refusal["code"] for refusal in refusals] == ["hicache_version"]
    told = cached(plan_engine_version="0.4.9", plan_hicache_like="0.5.16")
    assert _host_budget.budget_of(HOST, told, facts()["topology"], facts()["model_config"])[1] == []
