# SPDX-License-Identifier: Apache-2.0
"""API keys from the unit's credential: several valid at once, and in no argument of the engine.

The engine knows one key, ``--api-key``, that ends up in its command line, its log and ``/server_info``. With the
feature on, the keys are the lines of ``$CREDENTIALS_DIRECTORY/api-keys``, read once at the start, and every HTTP or
WebSocket request has to show one of them as ``Authorization: Bearer <key>``; else it gets 401. Exempt is what the
engine itself exempts (``sglang.srt.utils.auth``): ``OPTIONS``, and paths that begin with ``/health``, ``/metrics`` and,
in 0.5.23, ``/ready``. What only the engine's admin key opens stays closed.

The engine's own requests show the first key: its warm-up, and a decode that asks its prefill to compute anew.

Not covered, since the engine serves them by other means: the bootstrap port and the transfer of KV, and HTTP in more
than one process (``--tokenizer-worker-num``) or by gRPC, which the plan refuses.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from llmfleet_plugin._feature import Context, Feature, FeatureError
from llmfleet_plugin._hooks import Hooks

CREDENTIAL = "api-keys"
#: What a key looks like: it has to pass through an HTTP header, and not to be guessed.
KEY = re.compile(r"[\x21-\x7e]{16,512}")

#: Under FastAPI's own ``__call__``, which the HTTP server wants to find unchanged.
REQUEST_COMES = "starlette.applications.Starlette.__call__"
WARM_UP_RUNS = "sglang.srt.entrypoints.http_server._wait_and_warmup"
WARM_UP_ASKS = "requests.sessions.Session.prepare_request"
WARM_UP_OF_PAIR_ASKS = "sglang.srt.entrypoints.http_server._send_disaggregation_warmup_requests"
RECOMPUTE_ASKS = "sglang.srt.disaggregation.common.conn.CommonKVManager._get_prefill_recompute_session"

_TARGETS = {
    REQUEST_COMES: "(self, scope, receive, send)",
    WARM_UP_ASKS: "(self, request)",
    RECOMPUTE_ASKS: "(self)",
}

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def read_keys(environment: Mapping[str, str]) -> list[str]:
    """The keys of the unit's credential, the fleet's own first. Raises FeatureError, which never has a key in it."""
    path = Path(environment.get("CREDENTIALS_DIRECTORY", "/nowhere")) / CREDENTIAL
    try:
        keys = path.read_bytes().decode("latin-1").splitlines()
    except OSError as error:
        raise FeatureError(
            f"{path} cannot be read ({error.strerror}); expected the unit's LoadCredential= to provide it; "
            "run the playbook again, which writes both from plan_api_keys"
        ) from error
    wrong = [number for number, key in enumerate(keys, 1) if not KEY.fullmatch(key)]
    if wrong or not keys:
        raise FeatureError(
            f"{path} has {f'no key in line {wrong[0]}' if wrong else 'no line'}; expected in each line a key of 16 to "
            "512 printable characters without spaces; correct plan_api_keys"
        )
    return keys


class Door:
    """Whether a request may come in. ``exempt`` tells of (method, path) whether it needs no key."""

    def __init__(self, keys: Sequence[str], exempt: Callable[[str, str], bool]) -> None:
        self.keys = [key.encode() for key in keys]
        self.exempt = exempt

    def opens(self, scope: Scope) -> bool:
        """Of an ASGI scope. The server's own start and end (``lifespan``) are no requests."""
        if scope["type"] == "lifespan":
            return True
        if scope["type"] == "http" and self.exempt(scope["method"], scope["path"]):
            return True
        shown = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _space, given = shown.partition(b" ")
        # All of them, each in constant time: the time tells nothing about which key came close.
        found = [hmac.compare_digest(given, key) for key in self.keys]
        return scheme.lower() == b"bearer" and any(found)


async def turn_away(scope: Scope, send: Send) -> None:
    """401 with the engine's own body; a WebSocket that is not accepted is answered with 403 by the server."""
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": "Unauthorized"}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def exempt(method: str, path: str) -> bool:
    """Whether the engine lets a request in without a key where it has one."""
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    return bool(
        decide_request_auth(
            method=method,
            path=path,
            authorization_header=None,
            api_key="a key",
            admin_api_key=None,
            auth_level=AuthLevel.NORMAL,
        ).allowed
    )


def install(_context: Context, hooks: Hooks) -> dict[str, Any]:
    keys = read_keys(os.environ)
    door = Door(keys, exempt)
    shown = {"Authorization": f"Bearer {keys[0]}"}
    warming = threading.local()

    async def come(original: Callable[..., Awaitable[None]], app: Any, scope: Scope, receive: Any, send: Send) -> None:
        if door.opens(scope):
            await original(app, scope, receive, send)
        else:
            await turn_away(scope, send)

    def run(original: Callable[..., None], server_args: Any, *args: Any, **kwargs: Any) -> None:
        warming.url = f"{server_args.url()}/"
        try:
            original(server_args, *args, **kwargs)
        finally:
            warming.url = None

    def ask(prepared: Any, _session: Any, _request: Any) -> None:
        # The warm-up has its own thread; nobody else's request is touched, and no other server is shown the key.
        own = getattr(warming, "url", None)
        if own is not None and prepared.url.startswith(own):
            prepared.headers.update(shown)

    def ask_of_pair(original: Callable[..., Any], *args: Any, headers: Mapping[str, str], **kwargs: Any) -> Any:
        return original(*args, headers={**headers, **shown}, **kwargs)

    def ask_recompute(session: Any, _manager: Any) -> None:
        session.headers.update(shown)

    hooks.around(REQUEST_COMES, come)
    hooks.around(WARM_UP_RUNS, run)
    hooks.after(WARM_UP_ASKS, ask)
    hooks.around(WARM_UP_OF_PAIR_ASKS, ask_of_pair)
    hooks.after(RECOMPUTE_ASKS, ask_recompute)
    return {"keys": len(keys)}


FEATURE = Feature(
    name="api_keys",
    variable="LLMFLEET_API_KEYS",
    values=("on",),
    hooks={
        "0.5.16": {
            **_TARGETS,
            WARM_UP_RUNS: "(server_args, launch_callback=, execute_warmup_func=)",
            WARM_UP_OF_PAIR_ASKS: "(server_args, url, headers, ssl_verify, timeout)",
        },
        "0.5.23": {
            **_TARGETS,
            WARM_UP_RUNS: "(server_args, launch_callback=, execute_warmup_func=, post_warmup_callback=)",
            WARM_UP_OF_PAIR_ASKS: "(url, headers, ssl_verify, timeout)",
        },
    },
    install=install,
)
