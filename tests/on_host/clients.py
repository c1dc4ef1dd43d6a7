# SPDX-License-Identifier: Apache-2.0
"""Clients on a host that serves: each asks for a streamed completion. A request is

    whole     200, every token that was asked for, and [DONE]
    refused   not let in: no connection, 429 or 503 before the answer has begun
    failed    another status, before the answer has begun
    broken    200 and then not whole: an accepted request that was lost

For programs that tests run there, with the host's own Python: standard library only.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from deployment import wait

#: That are asked for.
TOKENS = 16


@dataclass
class Answer:
    """One request and what became of it. Moments are of the monotonic clock; without an answer the status is 0."""

    began: float
    ended: float
    outcome: str
    detail: str = ""
    status: int = 0
    retry_after: str | None = None
    first: float | None = None
    text: str = ""


def begin(port: int, prompt: str, tokens: int, timeout: float) -> http.client.HTTPConnection:
    """A connection on which a streamed completion was asked for. Raises OSError, HTTPException."""
    body = {
        "model": "tiny-qwen2",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        # So that every token is in the text: the end token is one like any other then.
        "skip_special_tokens": False,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def content(line: str) -> str:
    """What an event of a stream adds to the text of the answer; nothing where it was cut off."""
    try:
        choices = json.loads(line.removeprefix("data: ")).get("choices", [])
    except (ValueError, AttributeError):
        return ""
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def ask(port: int, prompt: str, tokens: int = TOKENS, timeout: float = 400) -> Answer:
    answer = Answer(time.monotonic(), 0.0, "refused")

    def ended(outcome: str, detail: str = "") -> Answer:
        answer.ended, answer.outcome, answer.detail = time.monotonic(), outcome, detail[:200]
        return answer

    try:
        connection = begin(port, prompt, tokens, timeout)
    except (OSError, http.client.HTTPException) as error:
        return ended("refused", type(error).__name__)
    lines = []
    with closing(connection):
        try:
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            return ended("refused", type(error).__name__)
        answer.status, answer.retry_after = response.status, response.getheader("retry-after")
        try:
            for line in response:
                lines.append(line.decode(errors="replace"))
                if answer.first is None and response.status == 200 and content(lines[-1]):
                    answer.first = time.monotonic()
        except (OSError, http.client.HTTPException) as error:
            return ended("broken", type(error).__name__)
    text = "".join(lines)
    if response.status != 200:
        return ended("refused" if response.status in (429, 503) else "failed", f"{response.status} {text}")
    finished = '"finish_reason":"length"' in text.replace(" ", "")
    if not finished or not text.rstrip().endswith("data: [DONE]"):
        return ended("broken", text[-200:])
    ended("whole")
    answer.text = "".join(map(content, lines))
    return answer


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of the others does not exceed, of values in order."""
    return ordered[int(share * (len(ordered) - 1))]


class Clients:
    """Clients that ask, each again when it was answered, until they are told to end."""

    def __init__(self, count: int, ask_one: Callable[[], Answer]) -> None:
        self.answers: list[Answer] = []
        self.told = threading.Event()
        self.ask_one = ask_one
        self.threads = [threading.Thread(target=self._client) for _number in range(count)]

    def _client(self) -> None:
        while not self.told.is_set():
            answer = self.ask_one()
            self.answers.append(answer)
            if answer.outcome != "whole":
                self.told.wait(0.5)

    def whole_since(self, moment: float) -> list[Answer]:
        return [answer for answer in list(self.answers) if answer.outcome == "whole" and answer.began >= moment]

    def wait_whole(self, count: int, since: float, within: float) -> None:
        wait(lambda: len(self.whole_since(since)) >= count, f"{count} whole answers", within)


@contextmanager
def clients(count: int, ask_one: Callable[[], Answer]) -> Iterator[Clients]:
    asking = Clients(count, ask_one)
    for thread in asking.threads:
        thread.start()
    try:
        yield asking
    finally:
        asking.told.set()
        for thread in asking.threads:
            thread.join()
