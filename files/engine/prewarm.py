# SPDX-License-Identifier: Apache-2.0
"""Compile what a server of a plan would compile at its start and at its first requests, into the release's cache.

    <release>/venv/bin/python prewarm.py [--check] [--timeout SECONDS] < job.json

A job is ``{"instance": {name, role, argv, environment}, "release", "cache", "model", "readiness"}``: an instance of the
plan, the release's name and cache, the model's folder, and the route that answers 200 when a server is ready. The
engine is started once with the instance's own command line and environment, with random weights and as many layers as
hold every kind of layer (see ``cut``), and is asked for what differs in shape (see ``ladder``). Then it is ended, and
``<cache>/prewarm/<hash>.json`` says what was run; with that file there, nothing is done.

- prefill runs as a server of both stages that is asked for one token: prefix cache, HiCache and its way back from the
  host need no decode server then. Its decode graphs are off, as they are on a prefill server.
- decode runs as a decode server with the engine's own stand-in for the transfer (``fake``): it decodes whatever lies in
  its pool, so that nothing of prefill is compiled for it.

It starts only when nothing else holds memory of the instance's GPUs: a server that runs there would miss that memory.
The last line of the output is JSON: ``{"state": "done" | "compiled" | "missing" | "skipped", ...}``; "missing" is told
with ``--check`` only. Exit status 1, with the reason and the log's end, when the engine does not do what was asked; no
process is left behind, also when this one is killed. Standard library only, besides the release's pynvml.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The address by which the engine knows requests whose keys come from nowhere, as those of its own warm-up.
NO_HOST = "2.2.2.2"
#: Tokens of the device's pool: enough for the longest prompt of the ladder, also in a sliding window's tenth of it.
POOL_TOKENS = 262144
#: Tokens of a tile of the mHC's matrix product (DeepGEMM's tf32_hc_prenorm_gemm: BLOCK_M).
TILE = 64
#: Memory of a GPU that may be in use without a process that NVML shows: the driver's own.
IDLE_BYTES = 2 * 1024**3
#: What a server gets after SIGTERM before it is killed.
STOP_SECONDS = 60
#: What its other processes get when it has ended.
LEFT_SECONDS = 2
#: How much of the log is shown.
TAIL_LINES, TAIL_COLUMNS = 25, 300

# Fields of a config.json by which layers differ, beside lists with an entry for each layer.
FIRST_LAYERS = ("first_k_dense_replace", "n_hash_layers", "num_hash_layers")
EVERY_FEW_LAYERS = (
    "decoder_sparse_step",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "moe_layer_freq",
    "sliding_window_pattern",
)
EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
TEXT_MODELS = ("text_config", "llm_config", "language_config")

# Flags that say where a server listens, who may ask it, how much it holds: nothing that is compiled differs by them.
DROPPED = (
    "--admin-api-key",
    "--api-key",
    "--dist-init-addr",
    "--hicache-host-memory-fraction",
    "--hicache-size",
    "--host",
    "--load-format",
    "--max-queued-requests",
    "--max-total-tokens",
    "--nccl-port",
    "--port",
    "--served-model-name",
)
DROPPED_PREFIXES = ("--hicache-storage-", "--ssl-")
# What else a decode server's stand-in for the transfer has no use for, or refuses.
DROPPED_FROM_DECODE = (
    "--disaggregation-bootstrap-port",
    "--disaggregation-decode-enable-radix-cache",
    "--disaggregation-ib-device",
    "--disaggregation-transfer-backend",
)
# Variables that name an instance, or who may ask it, not what it compiles.
OWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LLMFLEET_API_KEYS",
    "LLMFLEET_FEATURES_DIR",
    "LLMFLEET_FINGERPRINT",
    "LLMFLEET_INSTANCE",
    "LLMFLEET_REVISION",
    "MAX_JOBS",
    "PROMETHEUS_MULTIPROC_DIR",
)


# A process that kills the group which it is given, when the one that started it is gone without a word.
GUARD = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if not sys.stdin.read(1):
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


class PrewarmError(Exception):
    """The engine did not start, did not answer, or did not end."""


# ------------------------------------------------------------------------------------------------ which layers


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _names_layers(name: str) -> bool:
    """Is that a list of layers, such as ``mlp_only_layers`` or ``kv_source_layer_ids``?"""
    return name == "mlp_only_layers" or name.endswith("_layer_ids")


def _per_layer(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The lists of a config that have an entry for each layer, or one for each and for each draft layer behind them."""
    layers = config["num_hidden_layers"]
    lengths = {layers, layers + max(_whole(config.get(name)) for name in EXTRA_LAYERS)}
    return {
        name: value
        for name, value in config.items()
        if isinstance(value, list) and len(value) in lengths and not _names_layers(name) and name != "architectures"
    }


def kinds(config: Mapping[str, Any]) -> list[str]:
    """What each layer is, as a text that is equal for layers that differ in nothing the config tells."""
    found = []
    lists = _per_layer(config)
    named = [value for name, value in config.items() if _names_layers(name) and isinstance(value, list)]
    for layer in range(config["num_hidden_layers"]):
        kind: list[Any] = [values[layer] for values in lists.values()]
        kind += [layer < _whole(config.get(name)) for name in FIRST_LAYERS]
        kind += [layer % max(1, _whole(config.get(name))) for name in EVERY_FEW_LAYERS]
        kind += [layer in layers for layers in named]
        found.append(json.dumps(kind))
    return found


def cut(config: Mapping[str, Any], least: int = 1) -> dict[str, Any]:
    """A model's ``config.json`` with the fewest first layers that hold every kind of layer, and at least ``least``.

    Always the first ones, so that whatever counts from the front (dense layers, hash layers, every fourth layer) stays
    as it is. Lists with an entry for each layer are cut with them (entries for draft layers stay), and so are lists
    that name layers. Of a model with a text model inside, that one is cut. A config that does not tell its layers stays
    as it is.
    """
    for name in TEXT_MODELS:
        if "num_hidden_layers" not in config and isinstance(config.get(name), Mapping):
            return {**config, name: cut(config[name], least)}
    layers = _whole(config.get("num_hidden_layers"))
    if layers < 1:
        return dict(config)
    each = kinds(config)
    kept = min(layers, max(least, 1 + max(each.index(kind) for kind in set(each))))
    lists = {name: values[:kept] + values[layers:] for name, values in _per_layer(config).items()}
    lists |= {
        name: [layer for layer in value if layer < kept]
        for name, value in config.items()
        if _names_layers(name) and isinstance(value, list)
    }
    return {**config, **lists, "num_hidden_layers": kept}


# --------------------------------------------------------------------------------------------- which command line


def _flags(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The command up to the engine's module, and each flag with its values, as the plan writes them."""
    start = list(argv).index("-m") + 2
    found: list[tuple[str, list[str]]] = []
    for word in argv[start:]:
        if word.startswith("--") or not found:
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return list(argv[:start]), found


def _value(flags: Sequence[tuple[str, list[str]]], *names: str) -> str:
    return next((values[0] for name, values in flags if name in names and values), "")


def small_argv(argv: Sequence[str], role: str) -> list[str]:
    """The command line that is run, without port and model: no weights, a small pool, one stage on its own."""
    command, flags = _flags(argv)
    decode = role == "decode"
    kept = [
        (name, values)
        for name, values in flags
        if name not in DROPPED
        and not name.startswith(DROPPED_PREFIXES)
        and not (name in DROPPED_FROM_DECODE if decode else name.startswith("--disaggregation-"))
        and name not in ("--model-path", "--model")
    ]
    tokens = min(POOL_TOKENS, int(_value(flags, "--max-total-tokens") or POOL_TOKENS))
    kept += [("--host", ["127.0.0.1"]), ("--load-format", ["dummy"]), ("--max-total-tokens", [str(tokens)])]
    names = [name for name, _values in flags]
    if decode:
        kept.append(("--disaggregation-transfer-backend", ["fake"]))
    elif role == "prefill" and "--cuda-graph-backend-decode" not in names:
        kept.append(("--cuda-graph-backend-decode", ["disabled"]))
    if "--enable-hierarchical-cache" in names and "--hicache-ratio" not in names:
        kept.append(("--hicache-ratio", ["2"]))
    return command + [word for name, values in kept for word in (name, *values)]


# ------------------------------------------------------------------------------------------------ which requests


@dataclass(frozen=True)
class Request:
    """One request: a prompt of each length, from the random tokens of ``seed``, so that equal seeds share prefixes."""

    what: str
    lengths: tuple[int, ...]
    new: int
    seed: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # Where the prompt's keys come from; only a decode server asks.
    host: str | None = None

    def body(self, vocabulary: int) -> dict[str, Any]:
        """What is sent to /generate. Low ids: special tokens and placeholders of images are high ones."""
        prompts = []
        for number, length in enumerate(self.lengths):
            draw = random.Random(self.seed * 1000 + number)  # noqa: S311 - only has to differ
            prompts.append([draw.randrange(3, max(4, min(vocabulary, 4000))) for _number in range(length)])
        return {
            "input_ids": prompts if len(prompts) > 1 else prompts[0],
            "bootstrap_host": self.host,
            "sampling_params": {"max_new_tokens": self.new, "temperature": 0, "ignore_eos": True} | dict(self.sampling),
        }


SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "top_k": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "min_p": {"temperature": 0.6, "min_p": 0.05},
    "penalties": {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1},
}


def steps(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to ``most``, which is the last one: two for each doubling."""
    found = {1, most}
    power = 2
    while power <= most:
        found |= {power, power // 2 * 3}
        power *= 2
    return sorted(step for step in found if 0 < step <= most)


def ladder(role: str, chunk: int, longest: int, running: int, pool: int, host_cache: bool) -> list[Request]:
    """What is asked of a server, in this order; no prompt is longer than ``longest``.

    Kernels are made for the number of tokens in a step, by its size and by whether 16 divides it: each step of
    ``steps`` up to a chunk is asked for, and with one token more. Matrix products are split by the number of tiles of
    ``TILE`` tokens, which gives a kernel for each quotient of the GPU's multiprocessors by it: prefill is asked for
    every number of tiles. Selecting kernels are made for the length so far, by powers of two: longer prompts up to
    ``longest``. Then a prefix that is known; ``running`` requests at once, and fewer; ways of sampling. With a host
    cache, prompts of more tokens than the device's ``pool`` has, then each again, the newest first: some of them come
    back from the host.
    """
    new, host = (4, NO_HOST) if role == "decode" else (1 if role == "prefill" else 4, None)
    found: list[Request] = []

    def ask(what: str, *lengths: int, seed: int = 0, sampling: Mapping[str, Any] | None = None) -> None:
        if max(lengths) <= longest:
            found.append(Request(what, lengths, new, seed or 10 + len(found), sampling or {}, host))

    for step in steps(max(1, min(chunk, longest - 1))):
        ask("length", step)
        if step > 4:
            ask("length", step + 1)
    if role != "decode":  # it computes no prompt
        for tiles in range(1, chunk // TILE + 1):
            ask("tiles", tiles * TILE - 20)
        for step in steps(longest):
            if step > chunk:
                ask("long", step)
                ask("long", step - 20)
    several = min(longest - 200, 5 * chunk // 2)
    if several > chunk:
        ask("chunks", several + 1)
        ask("chunks", several, seed=1)
        ask("prefix", several, seed=1)
        ask("prefix", several + 100, seed=1)
        ask("prefix", several + 200, seed=1)
    for size in steps(max(1, running)):
        ask("batch", *[32] * size)
        ask("batch", *[33] * size)
        ask("batch", *[64 + number for number in range(size)])
    for name, sampling in SAMPLINGS.items():
        ask(name, 40, sampling=sampling)
        ask(name, 40, 50, 60, sampling=sampling)
    if host_cache and role != "decode" and several > chunk:
        seeds = range(2, 3 + pool * 5 // 4 // several)
        for seed in seeds:
            ask("fill", several, seed=seed)
        for seed in reversed(seeds):
            ask("back from the host", several, seed=seed)
    return found


# ------------------------------------------------------------------------------------------------- which GPUs


def gpus(environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Names of the GPUs that the instance sees, and why they cannot be used now: "" when they are free."""
    try:
        import pynvml

        pynvml.nvmlInit()
        chosen = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(pynvml.nvmlDeviceGetCount())))
        handles = {
            name: pynvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in chosen.split(",")
        }
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles.values()]
        for name, handle in handles.items():
            held = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if held:
                return names, f"GPU {name} is in use by process {', '.join(str(process.pid) for process in held)}"
            used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
            if used > IDLE_BYTES:
                return names, f"{used >> 20} MiB of GPU {name} are in use by a process that NVML does not show"
    except Exception as error:  # whatever it is that keeps NVML from answering
        return [], f"NVML cannot be asked whether the GPUs are free: {type(error).__name__}: {error}"
    return names, ("" if names else "there is no GPU")


# ------------------------------------------------------------------------------------------------- the engine


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _members(group: int) -> list[int]:
    """Processes of a group that have not ended; one that waits to be collected has."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/stat", encoding="ascii", errors="replace") as stream:
                    state, _parent, its = stream.read().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(its) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


class Engine:
    """The started engine: ready, asked, and ended with all that it has started."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], folder: str, log: str, deadline: float):
        self.log, self.deadline = log, deadline
        self.port = _free_port()
        # Not by a proxy that the host may have.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with open(log, "wb") as stream:
            self.process = subprocess.Popen(
                [*argv, "--port", str(self.port)],
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        guard = [sys.executable, "-I", "-c", GUARD, str(self.process.pid)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def _check(self) -> None:
        if self.process.poll() is not None:
            raise PrewarmError(f"the engine ended with status {self.process.returncode}")
        if time.monotonic() > self.deadline:
            raise PrewarmError("the time limit is over")

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with self._opener.open(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")

    def wait_ready(self, route: str) -> None:
        while True:
            self._check()
            try:
                self._open(route, None, 30)
            except OSError:
                time.sleep(0.25)
            except ValueError:
                return  # an answer without JSON is one, too
            else:
                return

    def facts(self) -> dict[str, Any]:
        try:
            return dict(self._open("/server_info", None, max(1.0, self.deadline - time.monotonic())))
        except (OSError, ValueError) as error:
            self._check()
            raise PrewarmError(f"/server_info was not answered: {error}") from error

    def ask(self, request: Request, vocabulary: int) -> None:
        self._check()
        try:
            answer = self._open("/generate", request.body(vocabulary), max(1.0, self.deadline - time.monotonic()))
        except urllib.error.HTTPError as error:
            raise PrewarmError(f"a request was answered {error.code}: {error.read()[:500].decode()!r}") from error
        except (OSError, ValueError) as error:
            self._check()
            raise PrewarmError(f"a request was not answered: {error}") from error
        for part in answer if isinstance(answer, list) else [answer]:
            reason = part.get("meta_info", {}).get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise PrewarmError(f"a request was aborted: {reason.get('message')}")

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """End the engine and wait until none of its processes is left; what does not go is killed.

        Only the server itself is told: it ends the others, and takes it for a crash when one ends before it.
        """
        group = self.process.pid
        limit, left = time.monotonic() + patience, time.monotonic() + LEFT_SECONDS
        self.process.terminate()
        while _members(group) and time.monotonic() < min(limit, left):
            if self.process.poll() is None:
                left = time.monotonic() + LEFT_SECONDS
            time.sleep(0.05)
        while _members(group):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()
        self._guard.communicate(b".")

    def tail(self) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as stream:
            return "\n".join(line.rstrip()[:TAIL_COLUMNS] for line in stream.readlines()[-TAIL_LINES:])


# ----------------------------------------------------------------------------------------------------- the job


@dataclass(frozen=True)
class Job:
    """What was asked for; see the module's text."""

    instance: Mapping[str, Any]
    release: str
    cache: str
    model: str
    readiness: str

    @property
    def folder(self) -> str:
        return os.path.join(self.cache, "prewarm")

    def config(self) -> dict[str, Any]:
        with open(os.path.join(self.model, "config.json"), encoding="utf-8") as stream:
            return dict(json.load(stream))

    def identity(self, names: Sequence[str]) -> str:
        """A hash over all that decides what is compiled, this program included. ``names`` are those of the GPUs."""
        with open(__file__, "rb") as stream:
            program = hashlib.sha256(stream.read()).hexdigest()
        environment = {name: value for name, value in self.instance["environment"].items() if name not in OWN_VARIABLES}
        argv = small_argv(self.instance["argv"], self.instance["role"])
        matter = [self.release, self.config(), argv, environment, sorted(set(names)), program]
        return hashlib.sha256(json.dumps(matter, sort_keys=True).encode()).hexdigest()[:16]


def compiled(cache: str) -> set[str]:
    """Every file below the release's cache but our own notes, by its path there."""
    found = set()
    for parent, folders, files in os.walk(cache):
        if parent == cache and "prewarm" in folders:
            folders.remove("prewarm")
        found |= {os.path.relpath(os.path.join(parent, name), cache) for name in files}
    return found


def by_folder(files: set[str]) -> dict[str, int]:
    return dict(sorted(Counter(name.partition(os.sep)[0] for name in files).items()))


def small_model(model: str, target: str, config: Mapping[str, Any]) -> str:
    """A folder of links to the model's files with another ``config.json``, by the model's name: templates go by it."""
    path = os.path.join(target, os.path.basename(model.rstrip("/")) or "model")
    os.mkdir(path)
    for entry in os.scandir(model):
        if entry.name != "config.json":
            os.symlink(os.path.abspath(entry.path), os.path.join(path, entry.name))
    Path(path, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    with open(os.path.join(folder, ".lock"), "a", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PrewarmError(f"another run compiles for {folder}; wait for it and run again") from error
        yield


def run(job: Job, identity: str, timeout: float) -> dict[str, Any]:
    """Start the engine, ask it, end it; what was run, and what was compiled. Raises PrewarmError."""
    started = time.monotonic()
    config = job.config()
    _command, flags = _flags(job.instance["argv"])
    kept = cut(config, int(_value(flags, "--pp-size", "--pipeline-parallel-size") or 1))
    before = compiled(job.cache)
    log = os.path.join(job.folder, f"{identity}.log")
    note: dict[str, Any] = {"instance": job.instance["name"], "release": job.release, "requests": []}
    with tempfile.TemporaryDirectory(prefix="llmfleet-prewarm-") as own:
        argv = [
            *small_argv(job.instance["argv"], job.instance["role"]),
            "--model-path",
            small_model(job.model, own, kept),
        ]
        environment = dict(job.instance["environment"])
        for name in ("LLMFLEET_FEATURES_DIR", "PROMETHEUS_MULTIPROC_DIR"):
            environment[name] = os.path.join(own, name.lower())
            os.mkdir(environment[name])
        engine = Engine(argv, environment, own, log, started + timeout)
        try:
            engine.wait_ready(job.readiness)
            note["seconds_to_ready"] = round(time.monotonic() - started, 1)
            seen = compiled(job.cache)
            note["files_at_start"] = len(seen - before)
            for request in _requests(job, engine.facts(), kept):
                since = time.monotonic()
                try:
                    engine.ask(request, _vocabulary(kept))
                except PrewarmError as error:
                    sizes = f"{len(request.lengths)} of up to {max(request.lengths)} tokens"
                    raise PrewarmError(f"{request.what}, {sizes}: {error}") from error
                now = compiled(job.cache)
                note["requests"].append(
                    {
                        "what": request.what,
                        "prompts": len(request.lengths),
                        "tokens": sum(request.lengths),
                        "seconds": round(time.monotonic() - since, 3),
                        "files": len(now - seen),
                    }
                )
                seen = now
        except PrewarmError as error:
            engine.stop()
            raise PrewarmError(f"{error}. The end of {log}:\n{engine.tail()}") from error
        except BaseException:
            # Told to end: it has no time to drain.
            engine.stop(0)
            raise
        engine.stop()
    after = compiled(job.cache)
    note |= {
        "argv": argv,
        "layers": kept.get("num_hidden_layers"),
        "files_before": by_folder(before),
        "files_compiled": by_folder(after - before),
        "seconds": round(time.monotonic() - started, 1),
    }
    return note


def _vocabulary(config: Mapping[str, Any]) -> int:
    inner: Mapping[str, Any] = next((config[name] for name in TEXT_MODELS if isinstance(config.get(name), Mapping)), {})
    return _whole(config.get("vocab_size")) or _whole(inner.get("vocab_size")) or 1000


def _requests(job: Job, facts: Mapping[str, Any], config: Mapping[str, Any]) -> list[Request]:
    """The ladder for what the started server says of itself."""
    pool = _whole(facts.get("max_total_num_tokens")) or POOL_TOKENS
    chunk = _whole(facts.get("chunked_prefill_size"))
    context = _whole(facts.get("context_length")) or _whole(facts.get("max_req_input_len"))
    context = context or _whole(config.get("max_position_embeddings")) or pool
    running = min(_whole(facts.get("max_running_requests")) or 16, 256)
    # Without chunks a prompt must fit into a sliding window's tenth of the pool, or it waits for ever.
    longest = min(context, pool // 2 if chunk > 0 else pool // 10) - 16
    return ladder(
        job.instance["role"],
        chunk if chunk > 0 else 8192,
        longest,
        running,
        pool,
        bool(facts.get("enable_hierarchical_cache")),
    )


def _ended(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compile what a server would compile; the job comes on stdin")
    parser.add_argument("--check", action="store_true", help="say what would be done")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all of it")
    options = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ended)
    job = Job(**json.load(sys.stdin))
    _command, flags = _flags(job.instance["argv"])
    names, busy = ([], "") if _value(flags, "--device") == "cpu" else gpus(job.instance["environment"])
    told: dict[str, Any]
    identity = job.identity(names)
    marker = os.path.join(job.folder, f"{identity}.json")
    if os.path.exists(marker):
        told = {"state": "done", "marker": marker}
    elif busy:
        told = {"state": "skipped", "reason": busy}
    elif options.check:
        told = {"state": "missing"}
    else:
        os.makedirs(job.folder, mode=0o755, exist_ok=True)
        try:
            with _alone(job.folder):
                note = run(job, identity, options.timeout)
        except PrewarmError as error:
            print(f"{job.instance['name']}: {error}", file=sys.stderr)
            return 1
        partial = f"{marker}.partial"
        Path(partial).write_text(json.dumps(note, indent=1), encoding="utf-8")
        os.rename(partial, marker)
        files, seconds = sum(note["files_compiled"].values()), note["seconds"]
        told = {"state": "compiled", "marker": marker, "files": files, "seconds": seconds}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
