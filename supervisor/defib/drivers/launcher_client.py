"""The supervisor's end of the launcher's seam: typed values in place of JSON (docs/seam.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from defib.core.launch_spec import Delta
from defib.runtime.seam import SeamClient

LAUNCH_S = 15.0
SCAN_S = 5.0
MOVE_S = 15.0


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the worker as the launcher saw it. Identity is (pid, start)."""

    pid: int
    start: int
    name: str
    cmdline: str
    root: bool
    state: str
    proofs: tuple[str, ...]

    @property
    def tracker(self) -> bool:
        """Python's resource tracker: it cleans shared memory after the others, so it goes last."""
        return not self.root and "multiprocessing.resource_tracker import main;main(" in self.cmdline


def process(values: dict[str, Any]) -> Process:
    """From the launcher's JSON."""
    return Process(
        pid=int(values["pid"]),
        start=int(values["start"]),
        name=str(values.get("name", "")),
        cmdline=str(values.get("cmdline", "")),
        root=bool(values.get("root", False)),
        state=str(values.get("state", "?")),
        proofs=tuple(values.get("proofs", ())),
    )


class Launcher:
    """Calls raise SeamRefused, SeamLost or SeamTimeout."""

    def __init__(self, seam: SeamClient) -> None:
        self.seam = seam

    async def launch(self, generation: int, delta: Delta) -> dict[str, Any]:
        return await self.seam.call("launch", timeout_s=LAUNCH_S, generation=generation, delta=delta.message())

    async def tree(self, generation: int) -> tuple[Process, ...]:
        reply = await self.seam.call("tree", timeout_s=SCAN_S, generation=generation)
        return tuple(process(p) for p in reply["tree"])

    async def signal(self, generation: int, targets: Iterable[Process], number: int) -> dict[str, Any]:
        pairs = [[p.pid, p.start] for p in targets]
        return await self.seam.call("signal", timeout_s=SCAN_S, generation=generation, targets=pairs, signal=number)

    async def facts(self, generation: int, target: Process, names: tuple[str, ...]) -> dict[str, Any]:
        reply = await self.seam.call(
            "facts",
            timeout_s=SCAN_S,
            generation=generation,
            pid=target.pid,
            start=target.start,
            names=list(names),
        )
        facts: dict[str, Any] = reply["facts"]
        return facts

    async def consumed(self, generation: int, stdout: int, stderr: int) -> None:
        await self.seam.call("consumed", generation=generation, stdout=stdout, stderr=stderr)

    async def clear(self, generation: int, cache: str, incident: str) -> dict[str, Any]:
        return await self.seam.call("clear", timeout_s=MOVE_S, generation=generation, cache=cache, incident=incident)

    async def sweep(self, generation: int) -> dict[str, Any]:
        return await self.seam.call("sweep", timeout_s=SCAN_S, generation=generation)

    async def ports(self, generation: int) -> bool:
        reply = await self.seam.call("ports", generation=generation)
        return bool(reply.get("address_free"))

    async def finish(self, generation: int, code: int, reason: str) -> None:
        await self.seam.call("finish", generation=generation, code=code, reason=reason)
