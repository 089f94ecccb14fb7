"""One gateway: relay, door, seam and their turns, put together on a listening socket and a runtime folder.

It owns the order of starting and stopping. Settings come as values; nothing in here reads a file or an argument.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from defib.gateway.client import Door
from defib.gateway.control import Control
from defib.gateway.journal import Journal
from defib.gateway.relay import Relay
from defib.gateway.rules import Limits, Rules
from defib.gateway.telling import Teller
from defib.runtime.seam import SeamServer

IDLE_TURN_S = 1.0
LISTEN_BACKLOG = 2048
DRAIN_GRACE_S = 0.05
"""A request that was under way to us when we stopped accepting is read and told, not cut."""
FLUSH_S = 1.0
"""How long answers may take to leave after the last exchange of a gateway that stops."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway lives: its instance, its seam socket, its journal (None: none)."""

    instance: str
    seam: Path
    journal: Path | None


class Gateway:
    """A running gateway. `clock` is CLOCK_BOOTTIME in seconds."""

    def __init__(self, place: Place, rules: Rules, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self.seam = SeamServer(
            place.seam, "gateway", place.instance, self._snapshot, self._handle, on_clients=self._supervised
        )
        journal = Journal(place.journal, f"{os.getpid()}-{start_of(os.getpid())}", limits.journal_bytes)
        self.relay = Relay(rules, limits, Teller(self.seam.event, clock, limits), journal)
        self.door = Door(self.relay)
        self._control = Control(self.relay)
        self._server: asyncio.AbstractServer | None = None
        self._turn_timer: asyncio.TimerHandle | None = None
        self._swept_at = 0.0
        self._stop = asyncio.Event()
        self._empty = asyncio.Event()
        self.relay.on_end = self._ended
        self.relay.on_begin = self._begun

    async def start(self, sock: socket.socket) -> None:
        """Listens on the seam and on `sock`. OSError where the seam's folder can't be written."""
        await self.seam.start()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.door.factory, sock=sock, backlog=LISTEN_BACKLOG)
        self._turn()

    async def drain(self, drain_s: float) -> None:
        """Stops in order: nobody new, those who wait are told, those under way get `drain_s`."""
        if self._server is not None:
            self._server.close()
        self.relay.drain()
        await asyncio.sleep(DRAIN_GRACE_S)
        self.door.drain()
        self._ended()
        try:
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        except TimeoutError:
            self.relay.end_all()
        await self._flush()

    async def stop(self) -> None:
        """Ends everything that is left, at once."""
        if self._server is not None:
            self._server.close()
        self.relay.draining = True
        self.relay.end_all()
        self.relay.tell()
        if self._turn_timer is not None:
            self._turn_timer.cancel()
        self.relay.pool.drop()
        for client in list(self.door.clients):
            client.abort()
        await self.seam.stop()
        self.relay.journal.close()
        await asyncio.sleep(0)

    async def _flush(self) -> None:
        """Waits until clients have what was written for them, or for FLUSH_S."""
        deadline = self.relay.loop.time() + FLUSH_S
        while self.door.clients and self.relay.loop.time() < deadline:
            for client in list(self.door.clients):
                client.close_if_flushed()
            await asyncio.sleep(0.01)

    # --- parts ---

    def _snapshot(self) -> dict[str, object]:
        return self._control.snapshot()

    def _handle(self, verb: str, message: dict[str, object]) -> dict[str, object]:
        reply = self._control.handle(verb, message)
        self._hurry()
        return reply

    def _supervised(self, clients: int) -> None:
        self.relay.supervised(clients)

    def _begun(self) -> None:
        self._hurry()

    def _ended(self) -> None:
        if self.relay.draining and not self.relay.exchanges:
            self._empty.set()

    # --- turns ---

    def _hurry(self) -> None:
        """Something happened after a quiet time: the next turn comes soon."""
        loop = self.relay.loop
        if self._turn_timer is not None and self._turn_timer.when() > loop.time() + self._limits.progress_s:
            self._turn_timer.cancel()
            self._turn_timer = loop.call_later(self._limits.progress_s, self._turn)

    def _turn(self) -> None:
        loop = self.relay.loop
        self.relay.tell()
        now = loop.time()
        if now - self._swept_at >= self._limits.sweep_s:
            self._swept_at = now
            self.relay.sweep()
            self.door.sweep()
        busy = bool(self.relay.exchanges) or self.relay.teller.untold
        next_s = self._limits.progress_s if busy else min(IDLE_TURN_S, self._limits.sweep_s)
        self._turn_timer = loop.call_later(next_s, self._turn)


def start_of(pid: int) -> int:
    """Field 22 of /proc/PID/stat: the start time that makes a pid an identity."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])
