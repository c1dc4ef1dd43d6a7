# SPDX-License-Identifier: Apache-2.0
"""The demo: a virtual GPU host, the whole deployment on it, a question and its answer; ``tools/demo`` calls it.

``up`` can be run again: what exists is kept, and a second run changes nothing on the host. ``ask`` asks once more,
``down`` removes all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tools import ROOT, cache_dir

HOST = "gpu1"
INDEX = 11
ADDRESS = f"10.88.0.{INDEX}"
ROUTER = f"http://{ADDRESS}:30001"
PROMETHEUS = f"http://{ADDRESS}:9090"
MODEL = "tiny-qwen2"
WAIT_S = 300
QUESTION = "What does the quick brown fox do?"


class DemoError(Exception):
    """A step of the demo failed; the text says which and what to do."""


def step(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def run(command: list[str], to_do: str) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise DemoError(f"`{' '.join(command)}` failed; its own message is above. {to_do}")


def chat(stream: bool) -> urllib.request.Request:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 16,
        "temperature": 0,
        "stream": stream,
    }
    return urllib.request.Request(
        f"{ROUTER}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )


def answer() -> dict[str, Any]:
    """One completion, whole."""
    with urllib.request.urlopen(chat(stream=False), timeout=120) as response:
        found: dict[str, Any] = json.load(response)
    return found


def streamed() -> Iterator[str]:
    """One completion, piece by piece as server-sent events bring it."""
    with urllib.request.urlopen(chat(stream=True), timeout=120) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data:") and text != "data: [DONE]":
                for choice in json.loads(text[5:])["choices"]:
                    yield choice["delta"].get("content") or ""


def targets() -> list[tuple[str, str, str]]:
    """(job, address, health) of every scrape target."""
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/targets?state=active", timeout=10) as response:
        active = json.load(response)["data"]["activeTargets"]
    return sorted((t["labels"]["job"], t["labels"]["instance"], t["health"]) for t in active)


def workers() -> dict[str, bool]:
    """What the router knows: the address of each worker, and whether it is healthy."""
    with urllib.request.urlopen(f"{ROUTER}/workers", timeout=10) as response:
        return {worker["url"]: worker["is_healthy"] for worker in json.load(response)["workers"]}


def wait_for_workers() -> None:
    """Wait, at most WAIT_S, until the router takes both servers for healthy: a killed one loads for a minute."""
    deadline = time.monotonic() + WAIT_S
    while True:
        known = workers()
        sick = [address for address, healthy in known.items() if not healthy]
        if len(known) == 2 and not sick:
            return
        if time.monotonic() > deadline:
            raise DemoError(
                f"After {WAIT_S} s the router knows {known}; expected two healthy workers. Run `make demo`."
            )
        print(f"waiting: the router does not serve {', '.join(sick) or 'all workers'} yet", flush=True)
        time.sleep(2)


def ask() -> None:
    wait_for_workers()
    step(f"Asking the router at {ROUTER}: {QUESTION!r}")
    whole = answer()
    print(f"whole:    {whole['choices'][0]['message']['content']!r}")
    print(f"usage:    {whole['usage']['prompt_tokens']} tokens in, {whole['usage']['completion_tokens']} tokens out")
    pieces = [piece for piece in streamed() if piece]
    print(f"streamed: {''.join(pieces)!r} in {len(pieces)} pieces")
    if "".join(pieces) != whole["choices"][0]["message"]["content"]:
        raise DemoError(
            "The streamed answer is not the whole one, though the temperature is 0. Look at the servers' journals."
        )
    print("(The model has 0.4 million random weights: prefill, KV transfer and decode are real, its words are not.)")
    step(f"Prometheus at {PROMETHEUS} scrapes")
    found = targets()
    for job, address, health in found:
        print(f"  {health:<7} {job:<14} {address}")
    if not found or {health for _job, _address, health in found} != {"up"}:
        raise DemoError(f"Not every target is up. See {PROMETHEUS}/targets.")


def up() -> None:
    begin = time.monotonic()
    step("Building the model and the virtual host (the first time takes a few minutes)")
    run([sys.executable, "-m", "testbed", "model"], "Run `make setup` first.")
    run([sys.executable, "-m", "testbed", "up", HOST, "--index", str(INDEX)], "Run `make demo-down`, then again.")
    step("Deploying with `ansible-playbook site.yml -i inventories/demo`")
    run(["ansible-playbook", "site.yml", "-i", "inventories/demo"], "Mend what it names, then run `make demo` again.")
    ask()
    step(f"Done in {(time.monotonic() - begin) / 60:.1f} minutes")
    print(
        f"""\
Router (OpenAI API)   {ROUTER}/v1/chat/completions
Prometheus            {PROMETHEUS}
Grafana               no server can be had without its package repository; its configuration is on the host:
                      /etc/grafana, /var/lib/grafana-dashboards

Try next
  curl {ROUTER}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 16}}'
  python3 -m testbed ssh {HOST} -- systemctl status 'llmfleet-*'
  python3 -m testbed ssh {HOST} -- cat /etc/llmfleet/plan.json
  python3 -m testbed ssh {HOST} -- systemctl kill --signal=KILL --kill-whom=main llmfleet-decode
  tools/demo ask          # decode comes back by itself: waits for it, then asks again
  make demo               # again: nothing changes, nothing restarts
  make demo-down          # remove it all"""
    )


def down() -> None:
    step("Removing the demo")
    run([sys.executable, "-m", "testbed", "down", HOST], "Remove what it names by hand.")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/demo", description="A virtual GPU host with the whole deployment on it."
    )
    parser.add_argument("action", choices=["up", "ask", "down"])
    action = {"up": up, "ask": ask, "down": down}[parser.parse_args().action]
    os.environ["PATH"] = f"{cache_dir() / 'venv' / 'bin'}:{os.environ['PATH']}"
    try:
        action()
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except (urllib.error.URLError, OSError) as error:
        print(
            f"\ndemo: no answer from the demo host {ADDRESS}: {error}. Run `make demo` to (re)build it.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
