# SPDX-License-Identifier: Apache-2.0
"""STAND-IN for ``python -m sglang.launch_server`` on hosts that cannot run the engine.

It takes the engine's command line, opens the ports that line names, and writes to 64 MiB of memory, so that units,
binding and the placement of pages can be proven. It serves no model: every path but the readiness route and
/server_info is a 404. Like the engine it exits with an error when a port is taken, and ends on SIGTERM.

With --enable-hierarchical-cache it makes the host pools that SGLang 0.5.23 makes for a DeepSeek V4 ``config.json``: a
process for each rank, the same sizes, the same log lines, memory of the same kind (anonymous, shared, every page
written), and the same refusals with the same end. What it is not: it knows no other model, no draft layers, no
hugepages and no limits of a cgroup, and where CUDA would pin the pools they are locked, if LIGHT_ENGINE_PIN is set.
LIGHT_ENGINE_RESERVE_BYTES takes the place of the 10 GiB that the engine wants to stay available, which a small machine
has not.
"""

from __future__ import annotations

import argparse
import ctypes
import http.server
import json
import math
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 64 << 20
PAGE = 4096
RESERVE = 10 << 30
# What "profiling" finds room for on the device that does not exist.
PROFILED_TOKENS = 1 << 20
KV_PAGE, SWA_RATIO = 256, 0.1
PR_SET_PDEATHSIG = 1


class Pool(NamedTuple):
    """One host pool of a rank; ``kind`` is paged or state, which the engine's words differ by."""

    name: str
    kind: str
    layers: int
    pages: int
    item_bytes: int


def log(message: str, rank: str = "") -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{rank}] {message}", file=sys.stderr, flush=True)


def device_tokens(wanted: int | None) -> list[int]:
    """The tokens of the device's pool as profiled, and as capped by --max-total-tokens: whole pages."""
    profiled = PROFILED_TOKENS // KV_PAGE * KV_PAGE
    return [profiled, min(profiled, wanted or profiled) // KV_PAGE * KV_PAGE]


def swa_tokens(full: int) -> int:
    return int(full * SWA_RATIO) // KV_PAGE * KV_PAGE


def host_pools(config: dict[str, Any], full: int, ratio: float) -> list[Pool]:
    """The pools of one rank, in the engine's order. Latent pages are padded to 576 bytes."""
    layers, head_dim, rope_dim, index_dim = (
        int(config[key]) for key in ("num_hidden_layers", "head_dim", "qk_rope_head_dim", "index_head_dim")
    )
    ratios = config["compress_ratios"][:layers]
    c4, c128 = ratios.count(4), ratios.count(128)
    full_pages, swa_pages = int(full // KV_PAGE * ratio), int(swa_tokens(full) // KV_PAGE * ratio)

    def latent(slots: int) -> int:
        return math.ceil(slots * (head_dim - rope_dim + 2 * rope_dim + 8) / 576) * 576

    # Rows of float32 state: a ring of 8, each of 4 vectors.
    pools = [
        Pool("swa", "paged", layers, swa_pages, latent(KV_PAGE)),
        Pool("deepseek_v4_c4", "paged", c4, full_pages, latent(KV_PAGE // 4)),
        Pool("deepseek_v4_c4_indexer", "paged", c4, full_pages, KV_PAGE // 4 * (index_dim + 4)),
        Pool("deepseek_v4_c4_state", "state", c4, swa_pages, 8 * 4 * head_dim * 4),
        Pool("deepseek_v4_c4_indexer_state", "state", c4, swa_pages, 8 * 4 * index_dim * 4),
        Pool("deepseek_v4_c128", "paged", c128, full_pages, latent(KV_PAGE // 128)),
    ]
    return [pool for pool in pools if pool.layers]


def budget(ranks: int) -> int:
    """What one rank may take: what is available less the reserve, divided."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    available = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:"))
    return (available - int(os.environ.get("LIGHT_ENGINE_RESERVE_BYTES", RESERVE))) // ranks


def allocate(pool: Pool, ranks: int, rank: str) -> mmap.mmap:
    size, free = pool.layers * pool.pages * pool.item_bytes, budget(ranks)
    if size > free:
        raise ValueError(
            f"Not enough host memory for V4 {pool.kind} pool {pool.name}. "
            f"Requesting {size / 1e9:.2f} GB but only have {free / 1e9:.2f} GB free."
        )
    memory = mmap.mmap(-1, size)
    memory[::PAGE] = b"x" * -(-size // PAGE)
    if os.environ.get("LIGHT_ENGINE_PIN"):
        pin(memory, size)
    item = "item_bytes" if pool.kind == "paged" else "state_page_bytes"
    log(
        f"Allocating {size / 1e9:.2f} GB host memory for V4 {pool.kind} pool '{pool.name}' "
        f"(layers={pool.layers}, pages={pool.pages}, {item}={pool.item_bytes}, layout=page_first).",
        rank,
    )
    return memory


def pin(memory: mmap.mmap, size: int) -> None:
    """Lock the pages, in the place of cudaHostRegister; its failure ends the engine too."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
        raise RuntimeError("cudaHostRegister failed (rc=2)")


def run_rank(number: int, options: argparse.Namespace, ready: multiprocessing.connection.Connection) -> None:
    """A scheduler process: makes its pools, says so, and holds them until it is ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = f" TP{number}" if options.tp_size > 1 else ""
    try:
        sizes = device_tokens(options.max_total_tokens)
        for full in sizes:
            swa = swa_tokens(full)
            states = f"c4_state={swa // KV_PAGE * 8}, c128_state=0"
            log(f"DSV4 pool sizes: full={full}, swa={swa}, c4={full // 4}, c128={full // 128}, {states}", rank)
        if number == 0:
            log_tokens(sizes[-1], rank)
        if options.hicache_size > 0:
            raise ValueError(
                "DeepSeek V4 HiCache currently does not support --hicache-size; use --hicache-ratio instead."
            )
        if options.hicache_ratio is None:
            raise ValueError(
                "HiCache auto-sizing does not support DeepSeekV4TokenToKVPool; "
                "set --hicache-ratio or --hicache-size explicitly."
            )
        config = json.loads((Path(options.model_path) / "config.json").read_text(encoding="utf-8"))
        pools = host_pools(config, sizes[-1], options.hicache_ratio)
        held = [allocate(pool, options.tp_size, rank) for pool in pools]
        ready.send(len(held))
    except Exception:
        log(f"Scheduler hit an exception: {traceback.format_exc()}", rank)
        os.kill(os.getppid(), signal.SIGQUIT)
    while True:
        signal.pause()


def log_tokens(tokens: int, rank: str = "") -> None:
    log(
        f"max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=256, context_len=65536, available_gpu_mem=0.00 GB",
        rank,
    )


def start_ranks(options: argparse.Namespace) -> None:
    """Starts a process for each rank and waits until each has its pools. Daemons: they end when this process does."""
    ranks = multiprocessing.get_context("fork")
    waiting = []
    for number in range(options.tp_size):
        receiver, sender = ranks.Pipe(duplex=False)
        process = ranks.Process(target=run_rank, args=(number, options, sender), daemon=True)
        process.start()
        # With the last writer gone, a rank that dies ends the wait.
        sender.close()
        waiting.append((process, receiver))
    for number, (process, receiver) in enumerate(waiting):
        try:
            receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(
                f"Rank {number} scheduler died during initialization (exit code: {process.exitcode})."
            ) from None


def child_failed(*_: object) -> None:
    """What the engine does when a rank asks for the end: everything is killed, itself last."""
    log("Received sigquit from a child process. It usually means the child failed.")
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    os.kill(os.getpid(), signal.SIGKILL)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disaggregation-bootstrap-port", type=int)
    parser.add_argument("--enable-hierarchical-cache", "--enable-hicache", action="store_true")
    parser.add_argument("--hicache-ratio", type=float)
    parser.add_argument("--hicache-size", type=int, default=0)
    options, _others = parser.parse_known_args()
    if options.enable_hierarchical_cache and options.disaggregation_mode == "decode":
        raise ValueError(
            "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive "
            "and cannot be used at the same time. Please use only one of them."
        )
    return options


class Handler(http.server.BaseHTTPRequestHandler):
    tokens = 0

    def do_GET(self) -> None:
        information = json.dumps({"max_total_num_tokens": self.tokens}).encode()
        body = information if self.path == "/server_info" else b""
        self.send_response(200 if body or self.path in ("/ready", "/health") else 404)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/json" if body else "text/plain")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet: the journal is for the start and for what goes wrong."""


def main() -> None:
    options = parse_options()
    log(f"server_args={options}")
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
    signal.signal(signal.SIGQUIT, child_failed)
    Handler.tokens = device_tokens(options.max_total_tokens)[-1]
    if options.enable_hierarchical_cache:
        start_ranks(options)
    else:
        log_tokens(Handler.tokens)
    memory = bytearray(MEMORY)
    memory[::PAGE] = b"x" * (MEMORY // PAGE)  # a page is placed on a node when it is first written
    ports = [options.port, *filter(None, [options.disaggregation_bootstrap_port])]
    servers = [http.server.ThreadingHTTPServer((options.host, port), Handler) for port in ports]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
