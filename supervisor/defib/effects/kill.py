"""Ends every process of a generation and proves it: SIGKILL to all but the resource tracker, then that, then a sweep.

SIGTERM is of no use here: a poisoned or hung engine sits in a driver call where no Python handler runs, and vLLM's
API server waits for its clients' connections for as long as they like (57 s seen, vLLM 0.32).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

from defib.drivers.launcher_client import Launcher, Process
from defib.runtime.seam import SeamError

POLL_S = 0.02
TRACKER_S = 1.5
"""The resource tracker removes shared memory within this time once the others are gone (vLLM 0.32)."""
LIMIT_S = 12.0
MAX_ROUNDS = 2_000


@dataclass(frozen=True, slots=True)
class Killed:
    """What was ended. `left` is not empty only if a process survived SIGKILL."""

    ended: tuple[Process, ...]
    left: tuple[Process, ...]
    swept: tuple[str, ...]
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.left and not self.error

    def told(self) -> str:
        """For the timeline: names and pids."""
        if self.error:
            return self.error
        if self.left:
            return "alive after SIGKILL: " + ", ".join(f"{p.name}[{p.pid}] state {p.state}" for p in self.left)
        ended = ", ".join(f"{p.name}[{p.pid}]" for p in self.ended) or "nothing was left"
        return ended + (f"; swept {len(self.swept)} leftovers" if self.swept else "")


async def kill_tree(launcher: Launcher, generation: int, clock: Callable[[], float]) -> Killed:
    """Never raises for a lost launcher: that is an error in the result."""
    seen: dict[tuple[int, int], Process] = {}
    deadline = clock() + LIMIT_S
    try:
        left = await _end(launcher, generation, clock, deadline, seen)
        swept: tuple[str, ...] = ()
        if not left:
            reply = await launcher.sweep(generation)
            swept = tuple(str(item) for item in reply.get("removed", ()))
    except SeamError as error:
        return Killed(tuple(seen.values()), (), (), f"the launcher did not answer: {error}")
    return Killed(tuple(p for k, p in seen.items() if k not in {(q.pid, q.start) for q in left}), left, swept)


async def _end(
    launcher: Launcher,
    generation: int,
    clock: Callable[[], float],
    deadline: float,
    seen: dict[tuple[int, int], Process],
) -> tuple[Process, ...]:
    trackers_until: float | None = None
    signalled: set[tuple[int, int]] = set()
    tree: tuple[Process, ...] = ()
    for _ in range(MAX_ROUNDS):
        tree = await launcher.tree(generation)
        seen.update({(p.pid, p.start): p for p in tree})
        if not tree or clock() > deadline:
            return tree
        targets = [p for p in tree if not p.tracker]
        if not targets:
            trackers_until = trackers_until or clock() + TRACKER_S
            targets = [] if clock() < trackers_until else list(tree)
        fresh = [p for p in targets if (p.pid, p.start) not in signalled]
        if fresh:
            await launcher.signal(generation, fresh, signal.SIGKILL)
            signalled.update((p.pid, p.start) for p in fresh)
        await asyncio.sleep(POLL_S)
    return tree
