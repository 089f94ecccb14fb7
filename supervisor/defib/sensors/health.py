"""Asks the engine's health endpoint: often while it starts, once a second when idle, not at all while tokens flow.

A probe that can't be sent, or meets anything but 200 and 503, is no fact about the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from defib.core.events import HealthFailed, Ready
from defib.runtime.http import address_url, client_for

FAST_S = 0.1
FAST_FOR_S = 10.0
STARTING_S = 0.5
IDLE_S = 1.0
ALIVE_FOR_S = 2.0
"""A token this recent proves more than a probe would."""
TIMEOUT_S = 5.0


class Health:
    """Watches one address at a time; `watch` changes it, `nudge` asks at once."""

    def __init__(
        self,
        path: str,
        clock: Callable[[], float],
        post: Callable[[Ready | HealthFailed], None],
    ) -> None:
        self.path, self.clock, self.post = path, clock, post
        self.generation = 0
        self.ready = False
        self.token_at = 0.0
        self.probes = 0
        self.blind = 0
        self._address: str | None = None
        self._since = 0.0
        self._client: httpx.AsyncClient | None = None
        self._nudge = asyncio.Event()
        self._failed = False

    async def watch(self, generation: int, address: str | None, ready: bool = False) -> None:
        """From now on this generation at this address; `ready`: it already said so."""
        if (generation, address) == (self.generation, self._address):
            return
        self.generation, self._address, self.ready, self._failed = generation, address, ready, False
        self._since = self.clock()
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        if address == "" and not ready:
            self._judge(200, generation)  # nobody to ask: started is all that can be known
        self.nudge()

    def nudge(self) -> None:
        """Something hints at a change: ask now."""
        self._nudge.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(self._pause_s()):
                        await self._nudge.wait()
                except TimeoutError:
                    pass
                self._nudge.clear()
                if self._address and self.clock() - self.token_at > ALIVE_FOR_S:
                    await self._ask(self.generation, self._address)
        finally:
            if self._client is not None:
                await self._client.aclose()

    def _pause_s(self) -> float:
        if self.ready:
            return IDLE_S
        return FAST_S if self.clock() - self._since < FAST_FOR_S else STARTING_S

    async def _ask(self, generation: int, address: str) -> None:
        if not self.path:
            await self._knock(generation, address)
            return
        if self._client is None:
            self._client = client_for(address)
        self.probes += 1
        try:
            answer = await self._client.get(address_url(address) + self.path, timeout=TIMEOUT_S)
        except httpx.HTTPError:
            self.blind += 1
            return
        if generation != self.generation:
            return
        self._judge(answer.status_code, generation)

    async def _knock(self, generation: int, address: str) -> None:
        """An engine without a health endpoint: its port accepts, or it doesn't."""
        if self.ready:
            return
        self.probes += 1
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError):
            self.blind += 1
            return
        writer.close()
        if generation == self.generation:
            self._judge(200, generation)

    def _judge(self, status: int, generation: int) -> None:
        if status == 200:
            self._failed = False
            if not self.ready:
                self.ready = True
                self.post(Ready(self.clock(), generation))
        elif status == 503 and self.ready and not self._failed:
            self._failed = True
            self.post(HealthFailed(self.clock(), generation, 503))
