"""Exchanges that wait for the gate: bounded, earliest deadline first, told of while they wait.

A plain request waits silently up to its limit. A stream waits silently for a while, then gets a head of ours and a
comment now and then, so that nothing between us and the client takes the silence for death.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator

from defib.gateway.exchange import Exchange, State
from defib.gateway.rules import Limits


class Holding:
    """The queue. `on_expired(exchange)` is called when a limit is reached; the exchange has left by then."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        on_expired: Callable[[Exchange], None],
        incident: Callable[[], str],
    ) -> None:
        self._loop, self._limits = loop, limits
        self._on_expired, self._incident = on_expired, incident
        self._heap: list[tuple[float, int, Exchange]] = []
        self._entries = 0
        self._members: dict[int, Exchange] = {}
        self.body_bytes = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._members.values()))

    def full(self, exchange: Exchange) -> bool:
        """Whether this one would be too many."""
        more = self.body_bytes + exchange.body_bytes
        return len(self._members) >= self._limits.held or more > self._limits.held_bytes

    def add(self, exchange: Exchange) -> None:
        """It waits from now on. Its hold limit must be known (`look_into`)."""
        now = self._loop.time()
        exchange.state, exchange.wait_started = State.WAITING, now
        silent_s = self._limits.silent_stream_s if exchange.streams else exchange.hold_left_s
        if exchange.outlet.head_sent:
            silent_s = self._limits.comment_s
        self._members[exchange.number] = exchange
        self.body_bytes += exchange.body_bytes
        self._push(now + silent_s, exchange)
        self._arm(exchange, now, silent_s)

    def remove(self, exchange: Exchange) -> bool:
        """It waits no longer, whatever the reason. False: it did not wait."""
        if self._members.pop(exchange.number, None) is None:
            return False
        self.body_bytes -= exchange.body_bytes
        exchange.stop_timer()
        # Never quite zero: that would mean "not looked into".
        left_s = exchange.hold_left_s - (self._loop.time() - exchange.wait_started)
        exchange.hold_left_s = max(0.001, left_s)
        if not self._members:
            self._heap.clear()
        return True

    def pop(self) -> Exchange | None:
        """The most urgent one; it waits no longer."""
        while self._heap:
            exchange = heapq.heappop(self._heap)[2]
            if self.remove(exchange):
                return exchange
        return None

    def _push(self, urgent_at: float, exchange: Exchange) -> None:
        """Entries of those that left stay until they come up, or until they are too many."""
        if len(self._heap) > 2 * self._limits.held:
            self._heap = [entry for entry in self._heap if entry[2].number in self._members]
            heapq.heapify(self._heap)
        self._entries += 1
        heapq.heappush(self._heap, (urgent_at, self._entries, exchange))

    def _arm(self, exchange: Exchange, now: float, after_s: float) -> None:
        left_s = exchange.wait_started + exchange.hold_left_s - now
        exchange.timer = self._loop.call_later(max(0.0, min(after_s, left_s)), self._turn, exchange)

    def _turn(self, exchange: Exchange) -> None:
        now = self._loop.time()
        exchange.timer = None
        if not exchange.streams or now - exchange.wait_started >= exchange.hold_left_s - 0.001:
            self.remove(exchange)
            self._on_expired(exchange)
            return
        if not exchange.outlet.head_sent:
            exchange.outlet.send_early_head(self._incident())
        exchange.outlet.comment()
        self._arm(exchange, now, self._limits.comment_s)
