"""Ends every process of a generation and proves it: SIGKILL to all but the resource tracker, then that, then a sweep.

SIGTERM is of no use here: a poisoned or hung engine sits in a driver call where no Python handler runs, and vLLM's
API server waits for its clients' connections for as long as they like (57 s seen, vLLM 0.32).
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from defib.drivers.launcher_client import Process
from defib.runtime.seam import SeamError, SeamRefused

Identity = tuple[int, int]

POLL_S = 0.02
AGAIN_S = 1.0
"""A signal that the launcher refused is tried again after this long, and so is a launcher that can't be reached."""
TRACKER_S = 1.5
"""The resource tracker removes shared memory within this time once the others are gone (vLLM 0.32)."""
LIMIT_S = 12.0
MAX_ROUNDS = 2_000


class Trees(Protocol):
    """What the launcher's client does, as far as a kill needs it. Raises SeamError."""

    async def tree(self, generation: int) -> tuple[Process, ...]: ...
    async def signal(self, generation: int, targets: Iterable[Process], number: int) -> dict[str, Any]: ...
    async def sweep(self, generation: int) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Killed:
    """What was ended. `left` is not empty only if a process survived SIGKILL."""

    ended: tuple[Process, ...]
    left: tuple[Process, ...]
    swept: tuple[str, ...]
    error: str = ""
    refused: str = ""
    """Why the launcher did not signal a process that is left."""

    @property
    def ok(self) -> bool:
        return not self.left and not self.error

    def told(self) -> str:
        """For the timeline: names and pids."""
        if self.error:
            return self.error
        if self.left:
            alive = ", ".join(f"{p.name}[{p.pid}] state {p.state}" for p in self.left)
            return f"not signalled ({self.refused}): {alive}" if self.refused else f"alive after SIGKILL: {alive}"
        ended = ", ".join(f"{p.name}[{p.pid}]" for p in self.ended) or "nothing was left"
        return ended + (f"; swept {len(self.swept)} leftovers" if self.swept else "")


async def kill_tree(launcher: Trees, generation: int, clock: Callable[[], float]) -> Killed:
    """Never raises for a lost launcher: it is tried again until the limit, then it is an error in the result."""
    work = _Kill(launcher, generation, clock)
    try:
        left = await work.end()
    except SeamRefused as error:
        if error.error != "stale_generation":
            return Killed(work.ended(()), (), (), f"the launcher refused: {error}")
        # It launches nothing before everything earlier is gone: a generation that isn't current has no process.
        return Killed(work.ended(()), (), ())
    except SeamError as error:
        return Killed(work.ended(()), (), (), f"the launcher did not answer: {error}")
    return Killed(work.ended(left), left, () if left else await work.sweep(), refused=work.refused if left else "")


class _Kill:
    """One generation's end."""

    def __init__(self, launcher: Trees, generation: int, clock: Callable[[], float]) -> None:
        self.launcher, self.generation, self.clock = launcher, generation, clock
        self.deadline = clock() + LIMIT_S
        self.refused = ""
        self._seen: dict[Identity, Process] = {}
        self._signalled: dict[Identity, float] = {}
        """Until when each is left alone: for ever once it was signalled."""
        self._trackers_from: float | None = None

    def ended(self, left: tuple[Process, ...]) -> tuple[Process, ...]:
        """Those that were there and are not any more."""
        return tuple(p for k, p in self._seen.items() if k not in {_identity(q) for q in left})

    async def end(self) -> tuple[Process, ...]:
        """Returns what is left: nothing, or what a SIGKILL could not end. SeamError only when the time is over."""
        for _ in range(MAX_ROUNDS):
            try:
                tree = await self.launcher.tree(self.generation)
                if not tree or self.clock() > self.deadline:
                    return tree
                await self._signal(tree)
                await asyncio.sleep(POLL_S)
            except SeamRefused:
                raise
            except SeamError:
                if self.clock() + AGAIN_S > self.deadline:
                    raise
                await asyncio.sleep(POLL_S)
        return tuple(self._seen.values())

    async def _signal(self, tree: tuple[Process, ...]) -> None:
        self._seen.update({_identity(p): p for p in tree})
        now = self.clock()
        targets = [p for p in tree if not p.tracker]
        if not targets:
            self._trackers_from = self._trackers_from or now + TRACKER_S
            targets = list(tree) if now >= self._trackers_from else []
        due = [p for p in targets if self._signalled.get(_identity(p), now) <= now]
        if not due:
            return
        reply = await self.launcher.signal(self.generation, due, signal.SIGKILL)
        self._signalled.update({_identity(p): math.inf for p in due})
        for no in reply.get("refused") or ():
            pid, start = no["target"]
            self._signalled[pid, start] = now + AGAIN_S
            self.refused = str(no.get("why", ""))

    async def sweep(self) -> tuple[str, ...]:
        """What the dead left behind. A sweep that fails is no reason to stay down."""
        try:
            reply = await self.launcher.sweep(self.generation)
        except SeamError:
            return ()
        return tuple(str(item) for item in reply.get("removed") or ())


def _identity(process: Process) -> Identity:
    return process.pid, process.start
