# SPDX-License-Identifier: Apache-2.0
"""A request served in two stages has a twin on the other one. When one is rejected, the other has to go too.

Both know the room (``bootstrap_room``) and the bootstrap server of prefill (``bootstrap_host:bootstrap_port``), and
nothing else of each other. So decode talks to the bootstrap server: while it has requests whose KV is still to come,
and whenever it has rejected one, it posts ``{"rejected": [room], "waiting": [room]}`` to ``PATH`` and is answered
with those of the waiting rooms that prefill has rejected. That needs no router, holds for every transfer backend, and
a twin that arrives after the word about it is refused when it does. All of this runs in the two server processes; the
schedulers see ordinary aborts.

A room that a client uses again after a rejection is a new request: on prefill its arrival clears the old word, and the
word of decode is good for one request only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import takewhile
from typing import Any

from llmfleet_plugin._admission_queues import FAKE_HOST

logger = logging.getLogger("llmfleet")

PATH = "/llmfleet/rooms"
#: Seconds between two questions of decode, and between two aborts of a twin until it is gone: an abort that overtakes
#: its request on the way to the scheduler has no effect.
INTERVAL_S = 0.5
#: Seconds for which a rejected room is remembered.
REMEMBERED_S = 60.0


class Pair:
    """The requests of one HTTP request that have a twin: their rooms, and the way to drop them."""

    def __init__(self, rooms: Iterable[int], address: str, abort: Callable[[], None]) -> None:
        self.rooms = tuple(rooms)
        self.address = address
        self.abort = abort
        self.rejected_by_twin = False
        self.present = True


class Rooms:
    """The rooms of one server: who is present, who was rejected here, whose twin was rejected. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.present: dict[int, Pair] = {}
        self.rejected_here: dict[int, float] = {}
        self.rejected_there: dict[int, float] = {}

    def enter(self, pair: Pair) -> None:
        """Sets ``rejected_by_twin`` when the word about it came first."""
        with self.lock:
            for room in pair.rooms:
                self.rejected_here.pop(room, None)
                if self._remembers(self.rejected_there, room):
                    del self.rejected_there[room]
                    pair.rejected_by_twin = True
                self.present[room] = pair

    def leave(self, pair: Pair) -> None:
        with self.lock:
            pair.present = False
            for room in pair.rooms:
                if self.present.get(room) is pair:
                    del self.present[room]

    def reject(self, pair: Pair) -> None:
        with self.lock:
            self._remember(self.rejected_here, pair.rooms)

    def told(self, rejected: Iterable[int]) -> list[Pair]:
        """Those present whose twin was rejected, each told once. The rest is remembered until it comes, unless it was
        rejected here."""
        found: dict[int, Pair] = {}
        with self.lock:
            for room in rejected:
                if pair := self.present.get(room):
                    if not pair.rejected_by_twin:
                        found[id(pair)] = pair
                elif not self._remembers(self.rejected_here, room):
                    self._remember(self.rejected_there, [room])
            for pair in found.values():
                pair.rejected_by_twin = True
        return list(found.values())

    def rejected_of(self, waiting: Iterable[int]) -> list[int]:
        with self.lock:
            return [room for room in waiting if self._remembers(self.rejected_here, room)]

    def _remembers(self, table: dict[int, float], room: int) -> bool:
        return table.get(room, float("-inf")) > self.clock()

    def _remember(self, table: dict[int, float], rooms: Iterable[int]) -> None:
        now = self.clock()
        for room in list(takewhile(lambda room: table[room] <= now, table)):  # oldest first
            del table[room]
        for room in rooms:
            table.pop(room, None)
            table[room] = now + REMEMBERED_S


class Twins:
    """The rooms of this process, and the talk about them."""

    def __init__(self, default_port: Callable[[Any], int]) -> None:
        self.default_port = default_port
        self.rooms = Rooms()
        self.stage = ""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.talks: dict[str, _Talk] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.silent: set[str] = set()  # bootstrap servers that did not answer, each told of once

    def enter(self, manager: Any, obj: Any) -> Pair | None:
        """None for a request without a twin. Runs in the server's event loop."""
        self.stage = manager.disaggregation_mode.value
        rooms = _listed(getattr(obj, "bootstrap_room", None))
        host = next(iter(_listed(getattr(obj, "bootstrap_host", None))), None)
        if self.stage == "null" or not rooms or host is None or host == FAKE_HOST:
            return None
        port = next(iter(_listed(obj.bootstrap_port)), None) or self.default_port(manager)
        pair = Pair(
            rooms, f"[{host}]:{port}" if ":" in host.strip("[]") else f"{host}:{port}", lambda: _abort(manager, obj)
        )
        self.loop = asyncio.get_running_loop()
        self.rooms.enter(pair)
        if self.stage == "decode":
            self._talk(pair.address).waiting.add(pair)
        return pair

    def leave(self, pair: Pair | None) -> None:
        if pair is not None and pair.present:
            self.rooms.leave(pair)
            if talk := self.talks.get(pair.address):
                talk.waiting.discard(pair)

    def reject(self, pair: Pair | None) -> None:
        """The request was rejected here: its twin is to hear of it."""
        if pair is None:
            return
        self.rooms.reject(pair)
        if self.stage == "decode":
            self._talk(pair.address).say(pair.rooms)

    def told(self, rejected: Iterable[int]) -> None:
        """The other stage has rejected these rooms. From any thread."""
        for pair in self.rooms.told(rejected):
            if self.loop is not None:
                self.loop.call_soon_threadsafe(lambda pair=pair: self._start(self._drop(pair)))  # type: ignore[misc]

    def _talk(self, address: str) -> _Talk:
        talk = self.talks.get(address)
        if talk is None or talk.over:
            talk = self.talks[address] = _Talk(address, self)
            self._start(talk.run())
        return talk

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _drop(self, pair: Pair) -> None:
        while pair.present:
            pair.abort()
            await asyncio.sleep(INTERVAL_S)


class _Talk:
    """Decode's side of the talk with one bootstrap server, as long as there is something to talk about."""

    def __init__(self, address: str, twins: Twins) -> None:
        self.url = f"http://{address}{PATH}"
        self.twins = twins
        self.waiting: set[Pair] = set()
        self.unsaid: dict[int, float] = {}
        self.wake = asyncio.Event()
        self.over = False

    def say(self, rooms: Iterable[int]) -> None:
        self.unsaid |= dict.fromkeys(rooms, time.monotonic() + REMEMBERED_S)
        self.wake.set()

    async def run(self) -> None:
        import aiohttp

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            try:
                while self.waiting or self.unsaid:
                    await self._exchange(session)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self.wake.wait(), INTERVAL_S)
            finally:
                self.over = True  # what is to be said from now on takes a new talk

    async def _exchange(self, session: Any) -> None:
        self.wake.clear()
        now = time.monotonic()
        self.unsaid = {room: until for room, until in self.unsaid.items() if until > now}
        said = list(self.unsaid)
        waiting = [room for pair in self.waiting for room in pair.rooms]
        try:
            async with session.post(self.url, json={"rejected": said, "waiting": waiting}) as response:
                response.raise_for_status()
                rejected = await response.json()
        except Exception as error:
            if self.url not in self.twins.silent:
                logger.warning(
                    "llmfleet: %s does not answer (%s); expected a prefill server with queue_bound on; until it does, "
                    "the twins of rejected requests stay until the engine's own timeouts",
                    self.url,
                    error,
                )
                self.twins.silent.add(self.url)
            return
        self.twins.silent.discard(self.url)
        for room in said:
            self.unsaid.pop(room, None)
        self.twins.told(rejected)


def add_route(twins: Twins, bootstrap_server: Any) -> None:
    """After ``CommonKVBootstrapServer._setup_routes``: prefill's side of the talk."""
    from aiohttp import web

    async def exchange(request: Any) -> Any:
        told = await request.json()
        twins.told(told["rejected"])
        return web.json_response(twins.rooms.rejected_of(told["waiting"]))

    bootstrap_server.app.router.add_post(PATH, exchange)


def _listed(value: Any) -> list[Any]:
    return [each for each in (value if isinstance(value, list) else [value]) if each is not None]


def _abort(manager: Any, obj: Any) -> None:
    """Ask the scheduler again and again; the manager's own ``abort_request`` asks once."""
    from sglang.srt.managers.io_struct import AbortReq

    for rid in _listed(obj.rid):
        if rid in manager.rid_to_state:
            manager._dispatch_to_scheduler(AbortReq(rid=rid))
