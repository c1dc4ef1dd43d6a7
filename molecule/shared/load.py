# SPDX-License-Identifier: Apache-2.0
"""Clients that ask without a pause until they are told to end, or each a number of times, and what became of their
requests.

A client goes to the first router that lets it in: one that refuses the connection, or says 503 or 429 before it has
begun to answer, has not accepted the request, and the next one is asked. So has one that closes its port at the moment
at which a client connects: the kernel has made the connection, and resets it unread. Whatever else goes wrong was an
accepted request that failed, and a request that nobody lets in failed too. On SIGTERM every client ends its request;
the result is written as JSON.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import signal
import socket
import sys
import threading
import time
import urllib.parse

TOKENS = 20


def closed(host: str, port: int | None) -> bool:
    try:
        socket.create_connection((host, port or 80), timeout=5).close()
    except OSError:
        return True
    return False


def ask(url: str, prompt: str, key: str) -> str:
    """One streamed completion: nothing when it came whole, "away" when the router did not take it, else why not."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    body = {
        "model": "tiny-qwen2",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    try:
        connection.connect()
    except OSError:
        return "away"
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
        except (BrokenPipeError, ConnectionResetError) as error:
            # RemoteDisconnected is a connection that was read, and ended without an answer.
            unread = not isinstance(error, http.client.RemoteDisconnected)
            if unread and closed(str(address.hostname), address.port):
                return "away"
            raise
        if response.status in (429, 503):
            return "away"
        events = response.read().decode().strip().split("\n\n")
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    if response.status != 200:
        return f"status {response.status}: {' '.join(events)[:200]}"
    words = [event for event in events if '"content"' in event]
    return "" if events[-1] == "data: [DONE]" and len(words) == TOKENS else f"{len(words)} of {TOKENS} tokens"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--requests", type=int, help="of each client; until SIGTERM where it is left out")
    parser.add_argument("--result", required=True)
    parser.add_argument("--key-file", required=True, help="with the API key that is shown")
    parser.add_argument("urls", nargs="+")
    options = parser.parse_args()
    with open(options.key_file, encoding="ascii") as stream:
        key = stream.read()
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: told.set())
    served: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        asked = 0
        while not told.is_set() and asked != options.requests:
            asked += 1
            # Each begins with another router, so that all of them are used.
            turned = options.urls[number % len(options.urls) :] + options.urls[: number % len(options.urls)]
            for url in turned:
                outcome = ask(url, f"request {number} {asked}", key)
                if outcome != "away":
                    break
            with lock:
                if outcome:
                    failures.append(f"{time.strftime('%H:%M:%S')} {url}: {outcome}")
                else:
                    served[url] += 1
            told.wait(0.1)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(options.clients)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    with open(options.result, "w", encoding="utf-8") as stream:
        json.dump({"served": served, "failures": failures}, stream)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
