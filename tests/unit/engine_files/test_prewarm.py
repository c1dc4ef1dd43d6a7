# SPDX-License-Identifier: Apache-2.0
"""What the pre-warm runs, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from files.engine import prewarm

SCRIPT = Path(prewarm.__file__)
STAND_IN = Path(__file__).parent / "stand_in"

# ------------------------------------------------------------------------------------------------ which layers

V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 10,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 0],
    "hidden_size": 4096,
}


def test_deepseek_v4_keeps_a_layer_of_each_ratio_with_each_way_of_routing() -> None:
    # 0 hashed, 4 hashed, 128 routed, 4 routed; the last entry is the draft layer's.
    assert prewarm.cut(V4) == {**V4, "num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0]}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 32}, 1),
        ({"num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1}, 4),
        ({"num_hidden_layers": 48, "full_attention_interval": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}, 4),
        ({"num_hidden_layers": 48, "mlp_only_layers": [0, 5]}, 2),
        ({"num_hidden_layers": 6, "layer_types": ["sliding", "sliding", "full", "sliding", "sliding", "full"]}, 3),
        ({"num_hidden_layers": 2, "architectures": ["A"], "eos_token_id": [1, 2]}, 2),
        ({"num_hidden_layers": 8, "kv_source_layer_ids": [1, 3, 5]}, 2),
    ],
)
def test_layers_that_are_kept(config: dict[str, Any], layers: int) -> None:
    assert prewarm.cut(config)["num_hidden_layers"] == layers


def test_lists_that_name_layers_name_none_that_is_gone() -> None:
    assert prewarm.cut({"num_hidden_layers": 8, "kv_source_layer_ids": [1, 3, 5]})["kv_source_layer_ids"] == [1]


def test_the_text_model_inside_a_model_is_cut() -> None:
    config = {"model_type": "vlm", "text_config": V4, "vision_config": {"num_hidden_layers": 27}}
    assert prewarm.cut(config) == {**config, "text_config": prewarm.cut(V4)}


def test_a_stage_of_a_pipeline_has_a_layer() -> None:
    assert prewarm.cut({"num_hidden_layers": 32}, least=4)["num_hidden_layers"] == 4


def test_a_config_without_layers_stays() -> None:
    assert prewarm.cut({"n_layer": 12}) == {"n_layer": 12}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 40))
    drafts = draw(st.integers(0, 2))
    return {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "first_k_dense_replace": draw(st.integers(0, 5)),
        "moe_layer_freq": draw(st.integers(1, 4)),
        "ratios": draw(st.lists(st.sampled_from([0, 4, 128]), min_size=layers + drafts, max_size=layers + drafts)),
        "layer_types": draw(st.lists(st.sampled_from(["full", "linear"]), min_size=layers, max_size=layers)),
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), max_size=3)),
    }


@given(configs())
def test_the_first_layers_hold_every_kind_and_one_fewer_does_not(config: dict[str, Any]) -> None:
    small = prewarm.cut(config)
    kept, before = small["num_hidden_layers"], prewarm.kinds(config)
    assert set(before[:kept]) == set(before)
    assert set(before[: kept - 1]) != set(before)
    # What a layer is does not change by cutting, and the draft layers' entries are still the last ones.
    assert [json.loads(kind) for kind in prewarm.kinds(small)] == [json.loads(kind) for kind in before[:kept]]
    drafts = config["num_nextn_predict_layers"]
    assert len(small["ratios"]) == kept + drafts
    assert small["ratios"][kept:] == config["ratios"][config["num_hidden_layers"] :]


# --------------------------------------------------------------------------------------------- which command line

COMMON = (
    "--api-key secret --host 10.0.0.1 --max-queued-requests 8 --max-total-tokens 1000192 --model-path /m --port 30000"
)


def rendered(text: str) -> list[str]:
    return ["/venv/bin/python", "-m", "sglang.launch_server", *text.split()]


def test_prefill_runs_both_stages_without_decode_graphs_and_keeps_its_host_cache() -> None:
    argv = rendered(
        "--chunked-prefill-size 8192 --disaggregation-bootstrap-port 8998 --disaggregation-mode prefill "
        f"--disaggregation-transfer-backend mooncake --enable-hierarchical-cache --hicache-size 40 {COMMON} --tp-size 4"
    )
    assert prewarm.small_argv(argv, "prefill") == rendered(
        "--chunked-prefill-size 8192 --enable-hierarchical-cache --tp-size 4 --host 127.0.0.1 --load-format dummy "
        "--max-total-tokens 262144 --cuda-graph-backend-decode disabled --hicache-ratio 2"
    )


def test_decode_stays_decode_and_is_sent_nothing() -> None:
    argv = rendered(
        "--cuda-graph-max-bs-decode 16 --disaggregation-mode decode --disaggregation-decode-retraction-backup pool "
        f"--disaggregation-transfer-backend mooncake {COMMON} --tp-size 4"
    )
    assert prewarm.small_argv(argv, "decode") == rendered(
        "--cuda-graph-max-bs-decode 16 --disaggregation-mode decode --disaggregation-decode-retraction-backup pool "
        "--tp-size 4 --host 127.0.0.1 --load-format dummy --max-total-tokens 262144 "
        "--disaggregation-transfer-backend fake"
    )


def test_a_fallback_runs_both_stages_with_decode_graphs() -> None:
    argv = rendered(f"--chunked-prefill-size 8192 --enable-hierarchical-cache --hicache-ratio 5.2 {COMMON} --tp-size 8")
    assert prewarm.small_argv(argv, "server") == rendered(
        "--chunked-prefill-size 8192 --enable-hierarchical-cache --hicache-ratio 5.2 --tp-size 8 --host 127.0.0.1 "
        "--load-format dummy --max-total-tokens 262144"
    )


def test_what_the_operator_says_of_graphs_and_a_smaller_pool_stays() -> None:
    argv = rendered("--cuda-graph-backend-decode full --max-total-tokens 16384")
    assert prewarm.small_argv(argv, "prefill") == rendered(
        "--cuda-graph-backend-decode full --host 127.0.0.1 --load-format dummy --max-total-tokens 16384"
    )


# ------------------------------------------------------------------------------------------------ which requests


def test_steps() -> None:
    assert prewarm.steps(100) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]


@given(
    st.sampled_from(["prefill", "decode", "server"]),
    st.integers(1, 20000),
    st.integers(300, 600000),
    st.integers(1, 256),
    st.booleans(),
)
def test_no_prompt_is_too_long_and_every_size_of_a_step_is_met(
    role: str, chunk: int, longest: int, running: int, host_cache: bool
) -> None:
    found = prewarm.ladder(role, chunk, longest, running, 262144, host_cache)
    assert max(max(request.lengths) for request in found) <= longest
    single = {request.lengths[0] for request in found if request.what == "length"}
    most = min(chunk, longest - 1)
    # Between any length up to a chunk and the next one that was asked for lies less than a half of it.
    assert all(any(length <= met < 1.5 * length + 2 for met in single) for length in range(1, most + 1, 7))
    assert {len(request.lengths) for request in found if request.what == "batch"} == set(prewarm.steps(running))
    assert {request.new for request in found} == {1 if role == "prefill" else 4}
    # The engine's warm-up marks so what has no prefill server, and keeps it out of the prefix cache.
    assert {request.host for request in found} == {"2.2.2.2" if role == "decode" else None}


def test_prefill_meets_every_split_of_a_matrix_product_and_every_power_of_two_of_a_long_prompt() -> None:
    found = prewarm.ladder("prefill", 8192, 65504, 16, 262144, False)
    tiles = {-(-request.lengths[0] // 64) for request in found if request.what == "tiles"}
    # An H200 has 132 multiprocessors: the kernel differs by how many of them there are for a tile.
    assert {132 // tile for tile in tiles} == {132 // tile for tile in range(1, 129)}
    long = [request.lengths[0] for request in found if request.what == "long"]
    assert long == [12288, 12268, 16384, 16364, 24576, 24556, 32768, 32748, 49152, 49132, 65504, 65484]
    decode = prewarm.ladder("decode", 8192, 65504, 16, 262144, False)
    assert {request.what for request in decode} == {request.what for request in found} - {"tiles", "long"}


def test_a_host_cache_is_filled_with_more_than_the_device_holds_and_asked_from_the_newest_on() -> None:
    found = prewarm.ladder("prefill", 8192, 65536, 16, 262144, True)
    fill = [request for request in found if request.what == "fill"]
    assert sum(request.lengths[0] for request in fill) > 262144
    assert [r.seed for r in found if r.what == "back from the host"] == [request.seed for request in reversed(fill)]
    assert len({request.seed for request in fill}) == len(fill)
    assert [r for r in prewarm.ladder("decode", 8192, 65536, 16, 262144, True) if r.what == "fill"] == []


def test_equal_seeds_share_a_prefix_and_the_prompts_of_a_batch_do_not() -> None:
    short = prewarm.Request("a", (40,), 1, seed=5).body(1000)["input_ids"]
    long, other = prewarm.Request("b", (60, 60), 1, seed=5).body(1000)["input_ids"]
    assert long[:40] == short
    assert other[:40] != short
    assert min(long) >= 3
    assert max(long) < 1000


# ------------------------------------------------------------------------------------------------- which GPUs


def nvml(processes: dict[int, list[int]], used: dict[int, int]) -> types.ModuleType:
    module = types.ModuleType("pynvml")
    module.__dict__.update(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]),
        nvmlDeviceGetName=lambda _handle: "H200",
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            types.SimpleNamespace(pid=pid) for pid in processes.get(handle, [])
        ],
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=used[handle]),
    )
    return module


@pytest.mark.parametrize(
    ("visible", "processes", "used", "expected"),
    [
        ("0,1", {2: [77]}, {0: 0, 1: 600 << 20, 2: 0}, (["H200", "H200"], "")),
        ("0,2", {2: [77, 78]}, {0: 0, 1: 0, 2: 0}, (["H200", "H200"], "GPU 2 is in use by process 77, 78")),
        ("", {1: [5]}, {0: 0, 1: 0}, (["H200", "H200"], "GPU 1 is in use by process 5")),
        ("GPU-1", {1: [5]}, {0: 0, 1: 0}, (["H200"], "GPU GPU-1 is in use by process 5")),
        ("0", {}, {0: 3 << 30}, (["H200"], "3072 MiB of GPU 0 are in use by a process that NVML does not show")),
        ("", {}, {}, ([], "NVML cannot be asked whether the GPUs are free: ValueError: invalid device ''")),
    ],
)
def test_free_gpus(
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    processes: dict[int, list[int]],
    used: dict[int, int],
    expected: tuple[list[str], str],
) -> None:
    module = nvml(processes, used)
    if not used:

        def no_device(_uuid: str) -> int:
            raise ValueError("invalid device ''")

        module.__dict__["nvmlDeviceGetHandleByUUID"] = no_device
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert prewarm.gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_without_nvml_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    names, why = prewarm.gpus({})
    assert names == []
    assert why.startswith("NVML cannot be asked whether the GPUs are free: ModuleNotFoundError")


# ---------------------------------------------------------------------------------------------------- the process


class Bench:
    """A job for the stand-in engine, and the program that runs it."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.model, self.pids = folder / "cache", folder / "tiny", folder / "pids"
        self.cache.mkdir()
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(V4))
        (self.model / "tokenizer.json").write_text("{}")
        self.flags = "--device cpu --disaggregation-mode prefill --model-path /overlay --port 1 --tp-size 1"
        self.environment = {
            "LLMFLEET_FEATURES_DIR": "/nowhere",
            "PYTHONPATH": str(STAND_IN),
            "STAND_IN_CACHE": str(self.cache),
            "STAND_IN_PIDS": str(self.pids),
        }

    def job(self, **changes: str) -> str:
        argv = [sys.executable, "-m", "prewarm_stand_in", *self.flags.split()]
        instance = {"name": "prefill", "role": "prefill", "argv": argv, "environment": self.environment}
        job = {"instance": instance, "release": "r1", "cache": str(self.cache), "model": str(self.model)}
        return json.dumps({**job, "readiness": "/ready", **changes})

    def start(self, *options: str, wrong: str = "", **changes: str) -> subprocess.Popen[str]:
        self.environment["STAND_IN"] = wrong
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        child.stdin.write(self.job(**changes))
        child.stdin.close()
        child.stdin = None
        return child

    def run(self, *options: str, wrong: str = "", **changes: str) -> tuple[int, dict[str, Any], str]:
        child = self.start(*options, wrong=wrong, **changes)
        out, err = child.communicate(timeout=120)
        return child.returncode, json.loads(out.splitlines()[-1]) if out else {}, err

    def started(self) -> list[int]:
        return [int(pid) for pid in self.pids.read_text().split()]

    def notes(self) -> list[Path]:
        return sorted((self.cache / "prewarm").glob("*.json"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    for pid in found.started() if found.pids.exists() else []:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_run_asks_the_ladder_counts_what_is_compiled_and_is_done_once(bench: Bench) -> None:
    assert bench.run("--check") == (0, {"state": "missing"}, "")
    status, told, error = bench.run()
    assert (status, error) == (0, "")
    (marker,) = bench.notes()
    note = json.loads(marker.read_text())
    compiled = sorted(path.name for path in (bench.cache / "triton").iterdir())
    assert (told["state"], told["marker"], told["files"]) == ("compiled", str(marker), len(compiled))
    assert note["files_compiled"] == {"triton": len(compiled)}
    assert (note["files_before"], note["files_at_start"], note["layers"]) == ({}, 1, 5)
    asked = prewarm.ladder("prefill", 64, 1008, 4, 4096, False)
    assert [(entry["what"], entry["tokens"]) for entry in note["requests"]] == [
        (request.what, sum(request.lengths)) for request in asked
    ]
    assert sum(entry["files"] for entry in note["requests"]) == len(compiled) - 1
    assert [pid for pid in bench.started() if alive(pid)] == []
    assert bench.run()[1] == {"state": "done", "marker": str(marker)}
    assert bench.run("--check")[1] == {"state": "done", "marker": str(marker)}


def test_the_model_that_is_run_is_the_model_with_fewer_layers(bench: Bench) -> None:
    bench.run()
    argv = json.loads(bench.notes()[0].read_text())["argv"]
    assert argv.count("--model-path") == 1
    path = Path(argv[argv.index("--model-path") + 1])
    assert path.name == "tiny"
    assert not path.exists()


def test_another_release_or_model_is_another_run_and_another_port_is_not(bench: Bench) -> None:
    bench.run()
    bench.flags = bench.flags.replace("--port 1", "--port 2")
    bench.environment["LLMFLEET_FINGERPRINT"] = "another"
    assert bench.run()[1]["state"] == "done"
    assert bench.run("--check", release="r2")[1] == {"state": "missing"}
    (bench.model / "config.json").write_text(json.dumps({**V4, "hidden_size": 7168}))
    assert bench.run("--check")[1] == {"state": "missing"}


@pytest.mark.parametrize(
    ("wrong", "options", "said"),
    [
        ("dies", (), "the engine ended with status 1. The end of {log}:\nthe stand-in starts\nno CUDA device"),
        ("silent", ("--timeout", "3"), "the time limit is over. The end of {log}:\nthe stand-in starts"),
        ("aborts", (), "length, 1 of up to 1 tokens: a request was aborted: too long. The end of {log}:"),
        ("refuses", (), "length, 1 of up to 1 tokens: a request was answered 500: "),
    ],
)
def test_a_failure_tells_the_reason_and_the_end_of_the_log_and_leaves_nothing(
    bench: Bench, wrong: str, options: tuple[str, ...], said: str
) -> None:
    status, told, error = bench.run(*options, wrong=wrong)
    (log,) = (bench.cache / "prewarm").glob("*.log")
    assert (status, told) == (1, {})
    assert f"prefill: {said.format(log=log)}" in error
    assert bench.notes() == []
    assert [pid for pid in bench.started() if alive(pid)] == []


def test_a_server_that_does_not_end_is_killed(bench: Bench) -> None:
    engine_argv = [sys.executable, "-m", "prewarm_stand_in"]
    environment = {**bench.environment, "STAND_IN": "stays"}
    folder, log = str(bench.cache), str(bench.cache / "log")
    engine = prewarm.Engine(engine_argv, environment, folder, log, time.monotonic() + 60)
    engine.wait_ready("/ready")
    engine.stop(patience=0.5)
    assert engine.process.returncode == -signal.SIGKILL
    assert [pid for pid in bench.started() if alive(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_run_is_ended(bench: Bench, number: signal.Signals) -> None:
    child = bench.start(wrong="silent")
    until(lambda: bench.pids.exists() and len(bench.pids.read_text().split()) == 2)
    child.send_signal(number)
    child.communicate(timeout=60)
    assert child.returncode == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: not any(alive(pid) for pid in bench.started()))
    assert bench.notes() == []


def test_gpus_that_are_in_use_are_left_alone(bench: Bench) -> None:
    bench.flags = bench.flags.replace("--device cpu", "--device cuda")
    folder = bench.cache.parent / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(
        "from types import SimpleNamespace\n"
        "nvmlInit = lambda: None\n"
        "nvmlDeviceGetCount = lambda: 1\n"
        "nvmlDeviceGetHandleByIndex = lambda index: index\n"
        "nvmlDeviceGetName = lambda handle: 'H200'\n"
        "nvmlDeviceGetComputeRunningProcesses = lambda handle: [SimpleNamespace(pid=4711)]\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    out = subprocess.run(
        [sys.executable, str(SCRIPT)], input=bench.job(), env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(out) == {"state": "skipped", "reason": "GPU 0 is in use by process 4711"}
    assert not bench.pids.exists()
    assert not (bench.cache / "prewarm").exists()


def test_two_runs_do_not_compile_at_once(bench: Bench) -> None:
    first = bench.start(wrong="silent")
    until(bench.pids.exists)
    status, told, error = bench.run(release="r2")
    assert (status, told) == (1, {})
    assert error == f"prefill: another run compiles for {bench.cache}/prewarm; wait for it and run again\n"
    first.terminate()
    first.communicate(timeout=60)
