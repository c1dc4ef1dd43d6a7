# SPDX-License-Identifier: Apache-2.0
"""What a client sees of a rejection: HTTP 503 with ``Retry-After``, before anything else was sent.

The engine answers a streamed request with 200 as soon as the stream exists and tells of the rejection in its first
event. So the status of a stream is held back until its first event; the engine does the same for chat and completions
(it waits for the first event before it makes the response). Nothing reaches a client later than before but the line
``200 OK``, and a client that goes away is noticed as before, since only the way out is held.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from llmfleet_plugin._admission import OUTRANKED, QUEUE_FULL
from llmfleet_plugin._admission_twins import Twins

#: Seconds; what the router in front of the engine asks for as well.
RETRY_AFTER = b"2"
SCOPE_KEY = "llmfleet.rejection"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Rejection:
    """Of one HTTP request: the reason, once there is one."""

    message: str | None = None


class RejectionMiddleware:
    """ASGI: answers 503 for a stream whose first event is a rejection, and puts ``Retry-After`` on every rejection."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        rejection = scope[SCOPE_KEY] = Rejection()
        answer = _Answer(send, rejection)
        try:
            await self.app(scope, receive, answer)
        except Exception:
            # A stream that was refused before it began ends in an exception, which no handler may answer any more.
            if not (answer.held and rejection.message):
                raise
            await answer.reject()


class _Answer:
    def __init__(self, send: Send, rejection: Rejection) -> None:
        self.send = send
        self.rejection = rejection
        self.held: Message | None = None
        self.rejected = False

    async def __call__(self, message: Message) -> None:
        if self.rejected:
            return  # the rest of a stream that was answered with 503
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self.held = message
                return
            if message["status"] == 503 and self.rejection.message:
                message["headers"] = [*message.get("headers", ()), (b"retry-after", RETRY_AFTER)]
        elif self.held:
            if self.rejection.message:
                await self.reject()
                return
            held, self.held = self.held, None
            await self.send(held)
        await self.send(message)

    async def reject(self) -> None:
        """The body that the engine gives to a request that is not streamed."""
        self.rejected, self.held = True, None
        error = {"object": "error", "message": self.rejection.message, "type": "503", "param": None, "code": 503}
        body = json.dumps(error, separators=(",", ":")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", RETRY_AFTER),
        ]
        await self.send({"type": "http.response.start", "status": 503, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def add_middleware(original: Callable[[Any], Any], app: Any) -> Any:
    """Around ``FastAPI.build_middleware_stack``. Innermost, so that the engine's own middleware counts the 503."""
    from starlette.middleware import Middleware

    if all(entry.cls is not RejectionMiddleware for entry in app.user_middleware):
        app.user_middleware.append(Middleware(RejectionMiddleware))
    return original(app)


async def watch(
    twins: Twins, original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """Around ``TokenizerManager.generate_request``: note rejections, here and by the twin, on the way to the client."""
    from fastapi import HTTPException

    rejection = Rejection() if request is None else request.scope.get(SCOPE_KEY, Rejection())
    refused = HTTPException(503, QUEUE_FULL)
    pair = twins.enter(manager, obj)
    try:
        if pair is not None and pair.rejected_by_twin:
            raise refused
        async with aclosing(original(manager, obj, request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                reason = _abort_reason(output)
                if reason is not None:
                    if reason in (QUEUE_FULL, OUTRANKED):
                        rejection.message = reason
                        twins.reject(pair)
                        abort(manager, obj)
                    elif pair is not None and pair.rejected_by_twin:
                        rejection.message = QUEUE_FULL
                        if not getattr(obj, "stream", False):
                            raise refused
                twins.leave(pair)
                yield output
    except HTTPException as error:
        if error.status_code == 503 and error.detail in (QUEUE_FULL, OUTRANKED):
            rejection.message = error.detail
            if error is not refused:
                twins.reject(pair)
                abort(manager, obj)
        elif pair is not None and pair.rejected_by_twin:
            rejection.message = QUEUE_FULL
            raise refused from error
        raise
    finally:
        twins.leave(pair)


def abort(manager: Any, obj: Any) -> None:
    """Have the scheduler drop the rest of a batch of which one request was rejected."""
    if not obj.is_single:
        for rid in obj.rid:
            manager.abort_request(rid)


def _abort_reason(output: Any) -> str | None:
    """The message of an aborted request's last event; of a batch, that of the first aborted one."""
    for each in output if isinstance(output, list) else [output]:
        reason = each.get("meta_info", {}).get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return str(reason.get("message", ""))
    return None
