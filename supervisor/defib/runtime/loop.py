"""The single-writer loop: every event of the instance passes through here, one at a time, in order.

It owns the machine and its timers and hands commands on. It measures its own gaps: when it did not run (suspend,
SIGSTOP, throttling), every pending deadline moves by that time, since our own absence is not the worker's silence.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable

from defib.core.commands import Command, Wait
from defib.core.events import Elapsed, Event
from defib.core.machine import Machine

GAP_S = 1.0
"""A wake-up later than this is a gap in which we did not run."""
HEARTBEAT_S = 1.0
BUG_RETRY_S = 5.0
"""A deadline whose handling met a bug is tried again after this long."""
MAX_QUEUED = 10_000
"""More waiting events than this are a bug or an attack: what comes then is lost, and counted."""

log = logging.getLogger("defib.loop")


class Loop:
    """Posts go in from anywhere on the event loop's thread; `on_command` does what the machine asks for."""

    def __init__(self, machine: Machine, clock: Callable[[], float], on_command: Callable[[Command], None]) -> None:
        self.machine, self.clock, self.on_command = machine, clock, on_command
        self.on_event: Callable[[Event], None] = lambda event: None
        self.gaps_s = 0.0
        self.bugs = 0
        self.dropped = 0
        self._queue: deque[Event] = deque()
        self._timers: list[tuple[float, int, Wait]] = []
        self._count = 0
        self._busy = False
        self._handle: asyncio.TimerHandle | None = None
        self._expected = 0.0
        self._stopped = False

    def start(self) -> None:
        """Begins to measure gaps and to fire deadlines."""
        self._arm()

    def stop(self) -> None:
        self._stopped = True
        if self._handle is not None:
            self._handle.cancel()

    def post(self, event: Event) -> None:
        """Takes an event. Events posted while one is being handled wait their turn."""
        if len(self._queue) >= MAX_QUEUED:
            self.dropped += 1
            return
        self._queue.append(event)
        if not self._busy:
            self._drain()

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._queue:
                self._one(self._queue.popleft())
        finally:
            self._busy = False

    def _one(self, event: Event) -> None:
        self._notice_gap()
        try:
            self.on_event(event)
            commands = self.machine.step(event)
        except Exception:  # the one catch-all: a bug in one step must not end the watch
            self._bug(event)
            if isinstance(event, Elapsed):  # nor must a phase wait for ever because its deadline met a bug
                self._add(Wait(event.name, self.clock() + BUG_RETRY_S, event.ticket))
            return
        for command in commands:
            try:
                if isinstance(command, Wait):
                    self._add(command)
                else:
                    self.on_command(command)
            except Exception:  # what else this step asked for is still done
                self._bug(command)

    def _bug(self, about: object) -> None:
        self.bugs += 1
        log.exception("bug while handling %r", about)

    def _add(self, wait: Wait) -> None:
        self._count += 1
        heapq.heappush(self._timers, (wait.at, self._count, wait))
        self._arm()

    def _arm(self) -> None:
        if self._stopped:
            return
        now = self.clock()
        delay = HEARTBEAT_S
        if self._timers:
            delay = min(delay, max(0.0, self._timers[0][0] - now))
        if self._handle is not None:
            self._handle.cancel()
        self._expected = now + delay
        self._handle = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._notice_gap()
        self._handle = None
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            wait = heapq.heappop(self._timers)[2]
            self.post(Elapsed(now, wait.name, wait.ticket))
        self._arm()

    def _notice_gap(self) -> None:
        """Looked for before anything is done: after a gap a socket may wake us before our own timer does."""
        late = self.clock() - self._expected
        if self._handle is not None and late > GAP_S:
            self._shift(late)
            self._expected += late

    def _shift(self, seconds: float) -> None:
        """We did not run for this long: nobody's time ran out meanwhile."""
        self.gaps_s += seconds
        log.warning("did not run for %.1f s; deadlines move by that", seconds)
        self._timers = [(at + seconds, count, wait) for at, count, wait in self._timers]
        heapq.heapify(self._timers)
