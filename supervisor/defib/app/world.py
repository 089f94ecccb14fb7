"""Does what the machine asks: each slow command is a task with a ticket, whose end is posted as an event.

It decides nothing. A task that fails unexpectedly still ends its ticket, as a failure that is told.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from defib.app.settings import InstanceConfig
from defib.core.commands import (
    Capture,
    CheckGate,
    ClearCaches,
    Command,
    Finish,
    HoldTraffic,
    KillTree,
    Launch,
    Note,
    OpenTraffic,
    PauseTraffic,
    Persist,
    Probe,
    RefuseTraffic,
    Settle,
    Value,
    Wait,
)
from defib.core.events import CanaryDone, CanaryOutcome, Done, Effect, Event, Replayed, StoreFailed
from defib.core.events import Resume as ResumeValue
from defib.core.redact import redact_argv, secret_name
from defib.drivers.launcher_client import Launcher, Process, process
from defib.effects import evidence as evidence_module
from defib.effects.canary import CanaryRequest, CanaryResult, send_canary
from defib.effects.evidence import Evidence, Incident
from defib.effects.kill import kill_tree
from defib.effects.report import Report, render
from defib.observe.event_log import EventLog
from defib.policy.engines import EngineProfile
from defib.policy.ladders import Ladder
from defib.runtime.clock import boottime
from defib.runtime.seam import Message, SeamClient, SeamError, SeamLost
from defib.sensors.output import Output
from defib.sensors.ring import Kept, Ring

LEASE_S = 30.0
RAMP_PER_S = 64.0
TRAFFIC_TRIES = 3
SHAPES_S = 1.0
GATE_POLL_S = 0.05
REPORT_BEFORE_LINES = 10
REPORT_LINES = 60
GATE_S = 30.0
NOTHING_THERE = "nothing is there"
"""The launcher's word for a cache that does not exist: no failure."""


class Owner(Protocol):
    """What the world needs of the supervisor that it works for."""

    log: EventLog
    ring: Ring
    output: Output

    def on_event(self, event: Event) -> None: ...
    def launched(self, generation: int, reply: Message) -> None: ...
    def save(self, resume: ResumeValue) -> str | None: ...


class World:
    """`do(command)` returns at once."""

    def __init__(
        self,
        config: InstanceConfig,
        profile: EngineProfile,
        ladder: Ladder,
        launcher: Launcher,
        gateway: SeamClient,
        owner: Owner,
    ) -> None:
        self.config, self.profile, self.ladder = config, profile, ladder
        self.launcher, self.gateway, self.owner = launcher, gateway, owner
        key = config.canary.key(os.environ)
        self.evidence = Evidence(config.state / "incidents", [key] if key else [])
        self.key = key
        self.reference = ""
        self.counts: dict[str, Any] = {}
        self.tree: dict[int, dict[int, Process]] = {}
        self.shapes: list[dict[str, Any]] = []
        self.verdicts: dict[str, dict[str, Value]] = {}
        self.applied: dict[int, str] = {1: "primary"}
        self._incidents: dict[str, Incident] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._traffic: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._traffic_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Cancels what runs."""
        tasks = [*self._tasks, *([self._traffic_task] if self._traffic_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def saw_tree(self, generation: int, tree: list[dict[str, Any]]) -> None:
        """Identities are recorded while the worker lives."""
        known = self.tree.setdefault(generation, {})
        known.update({int(p["pid"]): process(p) for p in tree})
        for old in [g for g in self.tree if g < generation - 1]:
            del self.tree[old]

    def gateway_counts(self, counts: dict[str, Any]) -> None:
        self.counts = counts

    def do(self, command: Command) -> None:
        """Starts it. Quick ones are done when this returns."""
        match command:
            case OpenTraffic(generation, address):
                self._say("open", generation=generation, address=address, ramp_per_s=RAMP_PER_S)
            case PauseTraffic(generation):
                self._say("pause", generation=generation, lease_s=LEASE_S)
            case HoldTraffic(generation, incident, ready_in_s):
                self._say("hold", generation=generation, lease_s=LEASE_S, ready_in_s=ready_in_s, incident=incident)
            case RefuseTraffic(reason, retry_after_s):
                self._say("refuse", reason=reason, retry_after_s=retry_after_s)
            case Probe():
                self._start(self._probe(command))
            case Capture(ticket=ticket):
                self._start(self._guarded(ticket, Effect.CAPTURE, self._capture(command)))
            case KillTree(ticket=ticket):
                self._start(self._guarded(ticket, Effect.KILL, self._kill(command)))
            case CheckGate(ticket=ticket):
                self._start(self._guarded(ticket, Effect.GATE, self._gate(command)))
            case ClearCaches(ticket=ticket):
                self._start(self._guarded(ticket, Effect.CLEAR, self._clear(command)))
            case Launch(ticket=ticket):
                self._start(self._guarded(ticket, Effect.LAUNCH, self._launch(command)))
            case Persist(resume):
                problem = self.owner.save(resume)
                if problem:
                    self.owner.on_event(StoreFailed(boottime(), problem))
            case Settle():
                self._start(self._settle(command))
            case Finish(code, reason):
                self._start(self._finish(code, reason))
            case Note(name="verdict", fields=fields):
                told = dict(fields)
                self.verdicts[str(told.get("incident"))] = told
            case Note() | Wait():
                pass

    # --- tasks ---

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, ticket: int, effect: Effect, work: Coroutine[Any, Any, Done]) -> None:
        try:
            done = await work
        except SeamError as error:
            done = Done(boottime(), ticket, effect, False, f"{type(error).__name__}: {error}")
        except Exception as error:
            self.owner.log.write("bug", {"effect": effect.value, "error": repr(error)})
            done = Done(boottime(), ticket, effect, False, f"bug: {error!r}")
        self.owner.on_event(done)

    # --- traffic ---

    def _say(self, verb: str, **fields: Any) -> None:
        if not self.config.gateway:
            if verb == "open":  # nothing can wait anywhere, so nothing is left to replay
                self.owner.on_event(Replayed(boottime(), int(fields["generation"]), 0, 0))
            return
        self._traffic.put_nowait((verb, fields))
        if self._traffic_task is None or self._traffic_task.done():
            self._traffic_task = asyncio.get_running_loop().create_task(self._tell_gateway())

    async def _tell_gateway(self) -> None:
        """In order, one at a time. What a lost gateway missed is said again when it is back."""
        while not self._traffic.empty():
            verb, fields = self._traffic.get_nowait()
            for _ in range(TRAFFIC_TRIES):
                try:
                    reply = await self.gateway.call(verb, timeout_s=2.0, **fields)
                    if verb == "open" and not reply.get("replaying"):
                        # Nothing waited there, so no `replayed` will come.
                        self.owner.on_event(Replayed(boottime(), int(fields["generation"]), 0, 0))
                    break
                except SeamLost:
                    break
                except SeamError as error:
                    self.owner.log.write("traffic_refused", {"verb": verb, "error": str(error)})

    # --- canary ---

    def _canary_request(self) -> CanaryRequest | None:
        canary = self.profile.canary
        if canary is None:
            return None
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return CanaryRequest(canary.path, canary.body_for(self.config.canary.model), headers)

    async def _probe(self, command: Probe) -> None:
        request = self._canary_request()
        now = boottime()
        if request is None or not command.address:
            blind = CanaryDone(now, command.ticket, CanaryOutcome.BLIND, now, "there is nothing to ask")
            self.owner.on_event(blind)
            return
        reference = "" if command.purpose == "reference" else self.reference
        try:
            result = await send_canary(command.address, request, command.timeout_s, boottime, reference)
        except Exception as error:  # a bug of ours is no fact about the worker
            self.owner.log.write("bug", {"effect": "canary", "error": repr(error)})
            result = CanaryResult(CanaryOutcome.BLIND, now, f"bug: {error!r}")
        if command.purpose == "reference" and result.digest:
            self.reference = result.digest
        outcome, detail = result.outcome, result.detail
        self.owner.on_event(CanaryDone(boottime(), command.ticket, outcome, result.sent_at, detail))

    # --- evidence ---

    def _incident(self, incident: str, generation: int) -> Incident:
        if incident not in self._incidents:
            self._incidents[incident] = self.evidence.open(incident, generation, boottime())
        return self._incidents[incident]

    async def _capture(self, command: Capture) -> Done:
        while self.owner.output.pump():
            await asyncio.sleep(0)
        self.owner.output.flush()
        shapes, tree = await asyncio.gather(self._shapes(), self._tree(command.generation))
        folder = self._incident(command.incident, command.generation)
        files = self._files(command, tree, shapes)
        good = await asyncio.to_thread(self.evidence.write, folder, files)
        detail = str(folder.folder) if good else self.evidence.last_error
        return Done(boottime(), command.ticket, Effect.CAPTURE, good, detail)

    async def _shapes(self) -> list[dict[str, Any]]:
        if not self.config.gateway:
            return []
        try:
            reply = await self.gateway.call("exchanges", timeout_s=SHAPES_S)
        except SeamError:
            return []
        self.shapes = list(reply.get("exchanges") or ())
        return self.shapes

    async def _tree(self, generation: int) -> list[Process]:
        known = dict(self.tree.get(generation, {}))
        try:
            async with asyncio.timeout(SHAPES_S):
                known.update({p.pid: p for p in await self.launcher.tree(generation)})
        except (SeamError, TimeoutError):
            pass
        return list(known.values())

    def _is_cause(self, generation: int) -> Callable[[Kept], bool]:
        """Whether a line is the first causal one of a generation."""
        for found_in, finding in self.owner.output.findings:
            if found_in == generation and finding.role in ("cause", "either"):
                text = finding.text[:200]
                return lambda line: text in line.text
        return lambda line: False

    def _excerpt(self, generation: int, before: int = evidence_module.CONTEXT_LINES) -> list[Kept]:
        return evidence_module.context(self.owner.ring.of(generation), self._is_cause(generation), before)

    def _files(
        self, command: Capture, tree: list[Process], shapes: list[dict[str, Any]]
    ) -> dict[str, tuple[str, bytes | None, str]]:
        suffix = f"-g{command.generation}"
        json_of = self.evidence.json
        verdict = self.verdicts.get(command.incident, {})
        launch = {
            "argv": redact_argv(self.config.argv),
            "env_set": {k: v for k, v in self.config.env_set.items() if not secret_name(k)},
            "rung": self.applied.get(command.generation, "unknown"),
            "generation": command.generation,
        }
        processes = [{"pid": p.pid, "start": p.start, "name": p.name, "cmdline": p.cmdline.strip()} for p in tree]
        return {
            f"log{suffix}.txt": ("worker output", self.evidence.lines(self._excerpt(command.generation)), ""),
            f"verdict{suffix}.json": ("machine", json_of(verdict), ""),
            f"launch{suffix}.json": ("launcher", json_of(launch), ""),
            f"processes{suffix}.json": ("launcher", json_of(processes), ""),
            f"requests{suffix}.json": (
                "gateway",
                json_of(shapes) if self.config.gateway else None,
                "" if self.config.gateway else "no gateway in this instance",
            ),
            "versions.json": ("package metadata", json_of(self._versions()), ""),
            "timeline.jsonl": ("machine", self._timeline(command.incident), ""),
        }

    def _versions(self) -> Mapping[str, str | None]:
        return {"engine": f"{self.config.engine} {self.config.engine_version or 'unknown'}", **_platform()}

    def _timeline(self, incident: str) -> bytes:
        since = self._incidents[incident].opened_at - 30.0
        return "".join(json.dumps(line) + "\n" for line in self.owner.log.since(since)).encode()

    async def _settle(self, command: Settle) -> None:
        await asyncio.sleep(0)
        incident = self._incidents.pop(command.incident, None) or self.evidence.open(command.incident, 0, boottime())
        self._incidents[command.incident] = incident
        after = [line for line in self.owner.ring.of(incident.generation) if line.at >= incident.opened_at]
        excerpt = self._excerpt(incident.generation, REPORT_BEFORE_LINES)
        report = Report(
            incident=command.incident,
            outcome=command.outcome,
            verdict=self.verdicts.get(command.incident, {}),
            timeline=self.owner.log.since(incident.opened_at - 5.0),
            command=redact_argv(self.config.argv),
            versions={k: v for k, v in self._versions().items() if v},
            excerpt=self.evidence.lines(excerpt[:REPORT_LINES]).decode("utf-8", "replace").splitlines(),
            shapes=self.shapes,
        )
        files: dict[str, tuple[str, bytes | None, str]] = {
            f"log-after-g{incident.generation}.txt": ("worker output", self.evidence.lines(after), ""),
            "timeline.jsonl": ("machine", self._timeline(command.incident), ""),
            "report.md": ("defib", render(report).encode("utf-8", "replace"), ""),
        }
        await asyncio.to_thread(self.evidence.write, incident, files)
        del self._incidents[command.incident]
        self.owner.log.write("report", {"incident": command.incident, "folder": str(incident.folder)})
        await asyncio.to_thread(self.evidence.tidy)

    # --- kill, gate, clear, launch ---

    async def _kill(self, command: KillTree) -> Done:
        killed = await kill_tree(self.launcher, command.generation, boottime)
        return Done(boottime(), command.ticket, Effect.KILL, killed.ok, killed.told())

    async def _gate(self, command: CheckGate) -> Done:
        deadline = boottime() + GATE_S
        while boottime() < deadline:
            tree = await self.launcher.tree(command.generation)
            if not tree and await self.launcher.ports(command.generation):
                return Done(boottime(), command.ticket, Effect.GATE, True, "no process left, address free")
            await asyncio.sleep(GATE_POLL_S)
        left = ", ".join(f"{p.name}[{p.pid}]" for p in tree)
        return Done(
            boottime(), command.ticket, Effect.GATE, False, left or "the old address is taken", stuck=bool(tree)
        )

    async def _clear(self, command: ClearCaches) -> Done:
        told: list[str] = []
        good = True
        for cache in command.caches:
            reply = await self.launcher.clear(command.generation, cache, command.incident)
            moved = reply.get("moved") or ()
            skipped = [s for s in reply.get("skipped") or () if s["why"] != NOTHING_THERE]
            told += [f"{m['from']} -> {m['to']}" for m in moved]
            told += [f"{s['path']}: {s['why']}" for s in skipped]
            good = good and not skipped
        return Done(boottime(), command.ticket, Effect.CLEAR, good, "; ".join(told) or "nothing there to move")

    async def _launch(self, command: Launch) -> Done:
        delta = self.ladder.delta(command.rung, self.config.argv, self.config.engine_version)
        reply = await self.launcher.launch(command.generation, delta)
        self.applied[command.generation] = command.rung
        self.owner.launched(command.generation, reply)
        edits = " ".join(delta.append) or "none"
        address = str(reply.get("address") or "")
        return Done(boottime(), command.ticket, Effect.LAUNCH, True, f"flags: {edits}", address=address)

    async def _finish(self, code: int, reason: str) -> None:
        await asyncio.sleep(0.05)  # the settling task of this incident goes first
        await asyncio.gather(*[t for t in self._tasks if t is not asyncio.current_task()], return_exceptions=True)
        try:
            await self.launcher.finish(0, code, reason)
        except SeamError as error:
            self.owner.log.write("finish_failed", {"error": str(error)})


def _platform() -> dict[str, str]:
    return {"python": platform.python_version(), "kernel": platform.release()}
