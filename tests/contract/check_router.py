# SPDX-License-Identifier: Apache-2.0
"""What the router does with more requests than are taken in: the facts that ``docs/admission.md`` counts on.

    <router>/venv/bin/python check_router.py [--plan /etc/llmfleet/plan.json]

Starts ``smg`` in front of a stand-in for a prefill and a decode server (``pd_pair.py``), with the flags of the plan's
first router, or with the collection's own where no plan is named, and numbers small enough for a minute. Prints a line
for each fact, and exits with 1 unless all of them hold: no other release of the router is to be taken before they do.

Standard library only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from pd_pair import MODEL, Limits, Pair

SMG = Path(sys.executable).with_name("smg")
#: The program that the router's unit runs it by where there are keys: of the clone, or beside this file.
LIFECYCLE = Path(__file__).parents[2] / "files" / "lifecycle"
START_S = 60
#: Rejections that have not come by then were not made at once.
WITHIN_S = 20
OURS = ["--disable-retries", "--disable-circuit-breaker", "--disable-worker-overload-protection"]
OURS += ["--health-check-interval-secs", "5", "--policy", "cache_aware"]
#: Flags of a planned router that belong to its host, and the numbers that each check sets itself.
REPLACED = (
    "host",
    "max-concurrent-requests",
    "port",
    "prefill-max-inflight-requests-per-worker",
    "prefill-queue-size",
    "prometheus-host",
    "prometheus-port",
    "queue-size",
    "queue-timeout-secs",
    "request-timeout-secs",
)


@dataclass(frozen=True)
class Answer:
    status: int
    retry_after: str | None
    body: str

    @property
    def code(self) -> str:
        """The router's word for what is wrong."""
        try:
            error = json.loads(self.body.removeprefix("data: "))["error"]
        except (ValueError, KeyError, TypeError):
            return ""
        return str(error.get("code", ""))


def planned_flags(plan_file: str) -> list[str]:
    """The flags of the plan's first router, less those of its host and its numbers."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    argv = next(entry["argv"] for entry in plan["instances"] if entry["role"] == "router")
    rest = argv[argv.index("--pd-disaggregation") + 1 :]
    groups: list[list[str]] = []
    for word in rest:
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    skipped = ("prefill", "decode", *REPLACED)
    return [word for group in groups if group[0].removeprefix("--") not in skipped for word in group]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def get(port: int, path: str, key: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers=bearer(key))
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@contextmanager
def routed(pair: Pair, flags: Sequence[str], keys: Sequence[str] = ()) -> Iterator[int]:
    """The port of a router in front of the pair, until the block ends. With ``keys`` it is run as its unit runs it, and
    it is refused that one of them can be seen: in its command line, its environment, its log or its metrics."""
    port, metrics = free_port(), free_port()
    argv = [sys.executable, "-I", "-B", str(LIFECYCLE), "router"] if keys else [str(SMG)]
    argv += ["launch", "--pd-disaggregation"]
    argv += [word for stage in pair.prefills for word in ("--prefill", stage.url, "8998")]
    argv += ["--decode", pair.decode.url, "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    argv += ["--prometheus-port", str(metrics), "--disable-tokenizer-autoload", "--worker-startup-check-interval", "1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*argv, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CREDENTIALS_DIRECTORY": _credentials(folder, keys)},
        ) as router,
    ):
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(router.stdout or ()), daemon=True)
        reader.start()
        try:
            end = time.monotonic() + START_S
            while not _is_ready(port, len(pair.prefills) + 1):
                if router.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the router is not ready: {''.join(log[-20:])}")
                time.sleep(0.1)
            yield port
            seen = "".join(log) + get(metrics, "/metrics")[1]
            seen += "".join(Path(f"/proc/{router.pid}/{name}").read_text() for name in ("cmdline", "environ"))
            if any(key in seen for key in keys):
                raise SystemExit("a key is in what the router logs, counts or shows in /proc")
        finally:
            # It keeps its listener for five seconds after SIGTERM, for a load balancer; nothing here waits for one.
            router.kill()
            router.wait()


def _credentials(folder: str, keys: Sequence[str]) -> str:
    (Path(folder) / "api-keys").write_text("".join(f"{key}\n" for key in keys))
    return folder


def _is_ready(port: int, servers: int) -> bool:
    try:
        status, body = get(port, "/readiness")
    except OSError:
        return False
    return status == 200 and json.loads(body).get("healthy_workers") == servers


def send(port: int, stream: bool = False, key: str = "", **extra: Any) -> Answer:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": stream, **extra}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json", **bearer(key)}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return Answer(response.status, response.getheader("retry-after"), response.read().decode())
    finally:
        connection.close()


def burst(pair: Pair, port: int, number: int, stream: bool, rejected: int = 0) -> list[Answer]:
    """Some requests at once. None is served before ``rejected`` of them have an answer: those did not wait."""
    answers: list[Answer] = []
    line = threading.Barrier(number)

    def one() -> None:
        line.wait()
        answers.append(send(port, stream))

    threads = [threading.Thread(target=one) for _ in range(number)]
    pair.go_on.clear()
    for thread in threads:
        thread.start()
    end = time.monotonic() + WITHIN_S
    while len(answers) < rejected and time.monotonic() < end:
        time.sleep(0.01)
    pair.go_on.set()
    for thread in threads:
        thread.join()
    return answers


class Facts:
    """What was found, told as it is found."""

    def __init__(self) -> None:
        self.broken = 0

    def hold(self, what: str, found: Any, expected: Any) -> None:
        good = found == expected
        self.broken += not good
        print(f"{'ok    ' if good else 'BROKEN'} {what}: {found}{'' if good else f', expected {expected}'}", flush=True)


def counted(answers: Sequence[Answer]) -> dict[str, int]:
    """Answers by status, code and Retry-After."""
    found: dict[str, int] = {}
    for answer in answers:
        name = f"{answer.status} {answer.code} Retry-After {answer.retry_after}" if answer.status != 200 else "200"
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def check_cap(facts: Facts, flags: Sequence[str]) -> None:
    numbers = ["--max-concurrent-requests", "4", "--queue-size", "3", "--queue-timeout-secs", "30"]
    with Pair(Limits(1, 8, 0.1), Limits(16, 64, 0.05)) as pair, routed(pair, [*flags, *numbers]) as port:
        for stream in (False, True):
            answers = burst(pair, port, 40, stream, 33)
            expected = {"200": 7, "429 admission_queue_full Retry-After 2": 33}
            what = "streamed" if stream else "whole"
            facts.hold(f"40 {what} requests at once, 4 in flight and 3 queued", counted(answers), expected)
        facts.hold("most requests waiting for prefill, of which it takes 8", pair.prefill.most_waiting <= 3, True)
    numbers = ["--max-concurrent-requests", "4", "--queue-size", "0"]
    with Pair(Limits(1, 8, 0.1), Limits(16, 64, 0.05)) as pair, routed(pair, [*flags, *numbers]) as port:
        expected = {"200": 4, "429 admission_queue_full Retry-After 2": 36}
        facts.hold("the same without a queue", counted(burst(pair, port, 40, True, 36)), expected)


def check_queue_timeout(facts: Facts, flags: Sequence[str]) -> None:
    numbers = ["--max-concurrent-requests", "1", "--queue-size", "4", "--queue-timeout-secs", "1"]
    with Pair(Limits(1, 8, 0.1), Limits(16, 64, 0.05)) as pair, routed(pair, [*flags, *numbers]) as port:
        expected = {"200": 1, "503 admission_queue_timeout Retry-After 2": 3}
        facts.hold("4 at once, one in flight, a second in the queue", counted(burst(pair, port, 4, False, 3)), expected)


def check_server_rejects(facts: Facts, flags: Sequence[str]) -> None:
    with Pair(Limits(1, 2, 0.1), Limits(64, 64, 0.05)) as pair, routed(pair, flags) as port:
        for stream in (False, True):
            rejected = [answer for answer in burst(pair, port, 12, stream, 9) if answer.status != 200]
            what = "streamed" if stream else "whole"
            facts.hold(f"{what} requests that a full server rejects", [a.status for a in rejected], [503] * 9)
            # Of a stream the header is kept where decode's half tells first.
            lost = sum(answer.retry_after is None for answer in rejected)
            if not stream:
                facts.hold("of those without the server's Retry-After", lost, 9)
            else:
                print(f"       of those without the server's Retry-After: {lost}")
        facts.hold("requests are sent once", len(pair.prefill.bodies), 24)
        facts.hold("no lockout afterwards", send(port).status, 200)


def check_gate(facts: Facts, flags: Sequence[str]) -> None:
    numbers = ["--max-concurrent-requests", "12", "--queue-size", "0"]
    numbers += ["--prefill-max-inflight-requests-per-worker", "3", "--prefill-queue-size", "0"]
    with Pair(Limits(1, 2, 0.1), Limits(64, 64, 0.05)) as pair, routed(pair, [*flags, *numbers]) as port:
        expected = {"200": 3, "429 pd_prefill_queue_full Retry-After None": 9}
        facts.hold("12 at once, 3 at prefill", counted(burst(pair, port, 12, False, 9)), expected)
        facts.hold("the server itself rejected none of them", len(pair.prefill.bodies), 3)


def check_gate_of_two(facts: Facts, flags: Sequence[str]) -> None:
    numbers = ["--prefill-max-inflight-requests-per-worker", "5", "--prefill-queue-size", "0"]
    with Pair(Limits(4, 64, 0.1), Limits(64, 64, 0.05), prefills=2) as pair, routed(pair, [*flags, *numbers]) as port:
        expected = {"200": 10, "429 pd_prefill_queue_full Retry-After None": 14}
        told = "24 equal prompts at once, two prefill servers, 5 at each"
        facts.hold(told, counted(burst(pair, port, 24, False, 14)), expected)
        facts.hold("requests that each of the two got", [len(stage.bodies) for stage in pair.prefills], [5, 5])


def check_overload(facts: Facts, flags: Sequence[str]) -> None:
    def busy(pair: Pair, waiting: int) -> None:
        for stage in (pair.prefill, pair.decode):
            load = {**stage.load(), "num_waiting_reqs": waiting}
            load["queues"] = {**load["queues"], "waiting": waiting}
            stage.loads = partial(dict, load)

    shed = ["--worker-overload-shed", "--load-monitor-interval", "1"]
    stock = [flag for flag in flags if flag != "--disable-worker-overload-protection"]
    rejected = {"503 worker_overload_protection_shed Retry-After 1": 6}
    cases = (("the router's own limit of 8", [*stock, *shed], rejected), ("our flags", [*flags, *shed], {"200": 6}))
    for what, chosen, expected in cases:
        with Pair(Limits(16, 64, 0.05), Limits(16, 64, 0.05)) as pair:
            busy(pair, 8)
            with routed(pair, chosen) as port:
                end = time.monotonic() + 10
                while pair.decode.polls == 0 and time.monotonic() < end:
                    time.sleep(0.1)
                facts.hold(f"8 waiting, shedding on, {what}", counted(burst(pair, port, 6, False)), expected)


def check_request_timeout(facts: Facts, flags: Sequence[str]) -> None:
    numbers = ["--request-timeout-secs", "2"]
    with Pair(Limits(4, 4, 0.05), Limits(4, 4, 6.0)) as pair, routed(pair, [*flags, *numbers]) as port:
        facts.hold("an answer of 6 s within 2 s", send(port).status, 502)
        answer = send(port, stream=True)
        cut = "operation timed out" in answer.body
        facts.hold("a stream of 6 s within 2 s ends in an error event", (answer.status, cut), (200, True))


def check_thinking(facts: Facts, flags: Sequence[str]) -> None:
    for model in ("deepseek-flash", "deepseek-v4-flash", "deepseek-v4-pro", "my-model"):
        added = None if model == "my-model" else {"thinking": True}
        with Pair(Limits(4, 4, 0.01), Limits(4, 4, 0.01), model) as pair, routed(pair, flags) as port:
            send(port, model=model)
            found = pair.decode.bodies[-1].get("chat_template_kwargs")
            facts.hold(f"chat_template_kwargs for {model}, where a client says nothing", found, added)
            send(port, model=model, chat_template_kwargs={"thinking": False})
            found = pair.decode.bodies[-1].get("chat_template_kwargs")
            facts.hold(f"chat_template_kwargs for {model}, where it says not to think", found, {"thinking": False})


def check_keys(facts: Facts, flags: Sequence[str]) -> None:
    """What docs/secrets.md counts on: who may do what, which key goes where, and a rotation without a rejection."""
    old, new, client, wrong = (f"{name}-key-0123456789" for name in ("old", "new", "client", "wrong"))

    def asked(given: Sequence[str], taken: Sequence[str]) -> dict[str, int]:
        """The status of a completion by key, from a router that was given some keys and servers that take some."""
        with Pair(Limits(4, 4, 0.01), Limits(4, 4, 0.01)) as pair:
            for stage in (pair.prefill, pair.decode):
                stage.keys = list(taken)
            with routed(pair, flags, given) as port:
                found = {key.split("-")[0]: send(port, key=key).status for key in (old, new, client, wrong)}
                found["none"] = send(port).status
                for path in ("/workers", "/readiness"):
                    found[path] = get(port, path)[0]
                found["/workers by its own"] = get(port, "/workers", given[0])[0]
                found["/workers by another"] = get(port, "/workers", given[-1])[0] if len(given) > 1 else 401
            shown = {*pair.prefill.shown, *pair.decode.shown}
            facts.hold("nothing comes to the servers without a key", None in shown, False)
            return found

    ours = {"wrong": 401, "none": 401, "/workers": 401, "/readiness": 200}
    ours |= {"/workers by its own": 200, "/workers by another": 401}
    for what, keys, served in (
        ("before", [old, client], (old, client)),
        ("while both are valid", [new, old, client], (old, new, client)),
        ("after", [new, client], (new, client)),
    ):
        expected = {key.split("-")[0]: 200 if key in served else 401 for key in (old, new, client)}
        facts.hold(f"a rotation, {what}", asked(keys, keys), expected | ours)
    with Pair(Limits(4, 4, 0.01), Limits(4, 4, 0.01)) as pair, routed(pair, flags, [old, client]) as port:
        pair.prefill.keys = pair.decode.keys = [old]
        facts.hold("what a client has shown goes on to the servers", send(port, key=client).status, 500)
        facts.hold(
            "and not the router's own key", set(pair.prefill.shown) <= {f"Bearer {old}", f"Bearer {client}"}, True
        )
        facts.hold("which is what it asks for itself with", f"Bearer {client}" in pair.prefill.shown, True)


def check_retries(facts: Facts) -> None:
    """Why retries and circuit breakers are off: with them two rejected requests lock every client out."""
    with Pair(Limits(1, 0, 0.1), Limits(64, 64, 0.05)) as pair, routed(pair, ["--policy", "cache_aware"]) as port:
        burst(pair, port, 4, False, 3)
        facts.hold("with the router's defaults 4 requests are sent more than once", len(pair.prefill.bodies) > 4, True)
        locked_out = {"503 no_available_workers Retry-After 1": 1}
        facts.hold("and lock out the next client of an idle pair", counted([send(port)]), locked_out)
        facts.hold("while the router is ready", json.loads(get(port, "/readiness")[1])["healthy_workers"], 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", help="a plan whose router's flags are used")
    options = parser.parse_args()
    flags = planned_flags(options.plan) if options.plan else OURS
    facts = Facts()
    for check in (
        check_cap,
        check_queue_timeout,
        check_server_rejects,
        check_gate,
        check_gate_of_two,
        check_overload,
        check_request_timeout,
        check_thinking,
        check_keys,
    ):
        check(facts, flags)
    check_retries(facts)
    print(f"{facts.broken} broken")
    return 1 if facts.broken else 0


if __name__ == "__main__":
    sys.exit(main())
