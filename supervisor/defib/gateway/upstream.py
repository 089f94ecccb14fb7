"""Connections to the worker: one protocol object each, and the idle ones of the current generation in a pool."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

from defib.gateway.framing import BadFraming
from defib.gateway.heads import BadHead
from defib.gateway.rules import Limits

if TYPE_CHECKING:
    from defib.gateway.answer import Answer


class Upstream(asyncio.Protocol):
    """One connection to one generation of the worker. Its answer takes the bytes and the end."""

    __slots__ = ("_held_back", "_loop", "answer", "generation", "idle_since", "pool", "transport", "used")

    def __init__(self, pool: Pool, generation: int) -> None:
        self.pool, self.generation = pool, generation
        self.transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        self.used = 0
        """Requests that it carried; a second one may meet a connection that the worker is just closing."""
        self.idle_since = 0.0
        self._held_back: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.pool.connections += 1

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is not None:
            try:
                answer.take(answer, data)
            except (BadHead, BadFraming):
                answer.bad()
        else:
            self.abort()  # bytes that nobody asked for: whatever they answer, it isn't the next request

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.pool.connections -= 1
        self.pool.forget(self)
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.closed(exc)

    def pause_writing(self) -> None:
        """The worker takes no more for now."""
        source = self.answer.exchange.source if self.answer is not None else None
        if source is not None:
            source.hold_body(True)

    def resume_writing(self) -> None:
        """The worker takes again."""
        source = self.answer.exchange.source if self.answer is not None else None
        if source is not None:
            source.hold_body(False)

    def write(self, data: bytes) -> None:
        """Sends bytes."""
        if self.transport is not None:
            self.transport.write(data)

    def hold_back(self, reason: str, hold: bool) -> None:
        """Stops reading while any reason holds."""
        before = bool(self._held_back)
        (self._held_back.add if hold else self._held_back.discard)(reason)
        if self.transport is None or self.transport.is_closing() or before == bool(self._held_back):
            return
        if hold:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def abort(self) -> None:
        """Closes at once; the worker takes that as its client's leaving."""
        self.answer = None
        self.pool.forget(self)
        if self.transport is not None:
            self.transport.abort()


class Pool:
    """Idle connections to the current generation."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits) -> None:
        self._loop, self._limits = loop, limits
        self._idle: deque[Upstream] = deque()
        self.generation = 0
        self.connections = 0

    def move_to(self, generation: int) -> None:
        """Connections to any other generation are of no use any more."""
        if generation != self.generation:
            self.generation = generation
            self.drop()

    def drop(self) -> None:
        """Closes all that are idle."""
        while self._idle:
            self._idle.pop().abort()

    def take(self) -> Upstream | None:
        """A connection that was idle, the most recent first, and not for so long that the worker may just close it."""
        oldest = self._loop.time() - self._limits.pool_idle_s
        while self._idle:
            upstream = self._idle.pop()
            if upstream.idle_since < oldest:
                upstream.abort()
            elif upstream.transport is not None and not upstream.transport.is_closing():
                return upstream
        return None

    def give(self, upstream: Upstream) -> None:
        """An answer is complete and its connection can be used again."""
        upstream.answer = None
        upstream.hold_back("client", False)
        upstream.hold_back("parked", False)
        usable = upstream.transport is not None and not upstream.transport.is_closing()
        if not usable or upstream.generation != self.generation or len(self._idle) >= self._limits.pool_connections:
            upstream.abort()
        else:
            upstream.idle_since = self._loop.time()
            self._idle.append(upstream)

    def forget(self, upstream: Upstream) -> None:
        """It is closed."""
        try:
            self._idle.remove(upstream)
        except ValueError:
            pass

    def sweep(self) -> None:
        """Closes what was idle for too long."""
        before = self._loop.time() - self._limits.pool_idle_s
        while self._idle and self._idle[0].idle_since < before:
            self._idle.popleft().abort()

    async def connect(self, address: str, generation: int) -> Upstream:
        """A new connection to `host:port` or `unix:/path`. Raises OSError, TimeoutError included."""
        upstream = Upstream(self, generation)
        async with asyncio.timeout(self._limits.connect_s):
            if address.startswith("unix:"):
                await self._loop.create_unix_connection(lambda: upstream, address[5:])
            else:
                host, _, port = address.rpartition(":")
                await self._loop.create_connection(lambda: upstream, host.strip("[]"), int(port))
        return upstream


def check_address(address: str) -> None:
    """Raises ValueError for what `Pool.connect` can't use."""
    if address.startswith("unix:/"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address {address!r:.100}: expected host:port or unix:/path")
