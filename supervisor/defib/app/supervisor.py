"""The supervisor process: wires sensors, machine and effects together. `python -m defib.app.supervisor --config-fd N`.

It owns nothing that others need: killed at any time it leaves worker and traffic as they are, and its successor
takes a snapshot and goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from defib.app.settings import ConfigError, InstanceConfig, read_config, rules_with
from defib.app.world import World
from defib.core.commands import Command, Note
from defib.core.events import (
    Adopted,
    Booted,
    Event,
    Exited,
    Found,
    GatewayBack,
    GatewayLost,
    PauseOrdered,
    ProcessKind,
    Progressed,
    Replayed,
    Resume,
    ResumeOrdered,
    StopOrdered,
    Symptom,
)
from defib.core.machine import Machine
from defib.core.state import Phase
from defib.drivers.launcher_client import Launcher
from defib.observe.event_log import EventLog
from defib.policy.engines import EngineProfile, load_engine
from defib.policy.ladders import load_ladder
from defib.policy.reading import PolicyError
from defib.policy.signatures import load_signatures
from defib.runtime.clock import boot_id, boottime, wall
from defib.runtime.loop import Loop
from defib.runtime.seam import Message, SeamClient, SeamError, SeamServer
from defib.runtime.store import Store
from defib.sensors.health import Health
from defib.sensors.output import Output, Scan
from defib.sensors.ring import Ring
from defib.triage.plain import PlainScanner
from defib.triage.scanner import Scanner
from defib.triage.signatures import Matcher

EXIT_INTERNAL = 70
EXIT_CONFIG = 78
FLUSH_AFTER_S = 0.2
"""A partial line or record that nobody continued for this long is taken as it is."""
ACK_EVERY_S = 1.0
FLOOD_PAUSE_S = 0.002
READY_HINT = "vllm_ready"

log = logging.getLogger("defib.supervisor")


class Supervisor:
    """One instance's supervisor. `run` lasts until it is told to stop."""

    def __init__(self, config: InstanceConfig, epoch: int) -> None:
        self.config, self.epoch = config, epoch
        self.profile: EngineProfile = load_engine(config.policies, config.engine)
        ladder = load_ladder(config.policies, config.engine)
        self.ladder = ladder if config.editable else ladder.unedited()
        rules = self.ladder.rules(config.engine_version, config.caches, config.observe, config.argv)
        self.machine = Machine(rules_with(rules, config.settings))
        matcher = Matcher(load_signatures(config.policies / "signatures"))
        self.log = EventLog(config.state / "events.jsonl", config.instance)
        self.store = Store(config.state / "state.json")
        self.loop = Loop(self.machine, boottime, self._do)
        self.ring = Ring()
        self.output = Output(self.ring, self._scanner_for(matcher), boottime, self._found, self._hint)
        self.health = Health(self.profile.ready.path, boottime, self.loop.post)
        self.launcher_seam = SeamClient(
            config.runtime / "launcher.sock",
            "supervisor",
            epoch,
            self._launcher_snapshot,
            self._launcher_event,
            self._launcher_lost,
        )
        self.gateway_seam = SeamClient(
            config.runtime / "gateway.sock",
            "supervisor",
            epoch,
            self._gateway_snapshot,
            self._gateway_event,
            self._gateway_lost,
        )
        self.world = World(config, self.profile, self.ladder, Launcher(self.launcher_seam), self.gateway_seam, self)
        self.admin = SeamServer(
            config.runtime / "supervisor.sock", "supervisor", config.instance, self.status, self._operator
        )
        self._pumping = asyncio.Event()
        self._booted = False
        self._stop = asyncio.Event()
        self._boots = boot_id()
        self._started_at = boottime()
        self.counts: dict[str, int] = {}

    def _scanner_for(self, matcher: Matcher) -> Callable[[bool], Scan]:
        dialect = self.profile.dialect
        if dialect == "plain":
            return lambda ready: PlainScanner()
        return lambda ready: Scanner(matcher, dialect, ready)

    # --- life ---

    async def run(self) -> int:
        """Until SIGTERM. Returns the exit code."""
        running = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, self._stop.set)
        self.loop.start()
        await self.admin.start()
        self.launcher_seam.start()
        if self.config.gateway:
            self.gateway_seam.start()
        tasks = [asyncio.create_task(work()) for work in (self._pump, self._acknowledge, self.health.run)]
        try:
            await self._stop.wait()
        finally:
            self.loop.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.world.close()
            await self.gateway_seam.stop()
            await self.launcher_seam.stop()
            await self.admin.stop()
        return 0

    def _do(self, command: Command) -> None:
        if isinstance(command, Note):
            fields = dict(command.fields)
            self.counts[command.name] = self.counts.get(command.name, 0) + 1
            self.log.write(command.name, fields)
        self.world.do(command)

    # --- launcher ---

    def _launcher_snapshot(self, message: Message) -> None:
        generation = int(message["generation"])
        self.world.saw_tree(generation, message.get("tree") or [])
        self.output.follow(generation, message.get("output") or {})
        self._pumping.set()
        if message.get("planned_stop") or message.get("state") == "stopping":
            self.loop.post(StopOrdered(boottime()))
            return
        if not self._booted:
            self._boot(message)
        elif generation > self.machine.state.generation:
            self.loop.post(Adopted(boottime(), generation, self._address(message)))
        elif message.get("state") == "exited" and self.machine.state.alive:
            self._root_gone(generation, message.get("exit") or {})
        self._follow()

    def _boot(self, message: Message) -> None:
        self._booted = True
        stored, problem = self.store.load()
        if problem:
            self.log.write("store_failed", {"detail": problem})
        left = message.get("exit") or {}
        self.loop.post(
            Booted(
                at=boottime(),
                generation=int(message["generation"]),
                running=message.get("state") == "running",
                address=self._address(message),
                launched_at=float(message.get("launched_at") or boottime()),
                code=left.get("code"),
                resume=self._resume(stored),
            )
        )

    def _address(self, message: Message) -> str | None:
        """Where the worker listens; empty where it has no address that we could ask."""
        return message.get("address") or (None if self.config.addressed else "")

    def _resume(self, stored: dict[str, Any]) -> Resume | None:
        """What an earlier supervisor of this same launcher run left; the ledger alone outlives the launcher."""
        if not stored:
            return None
        try:
            ledger = tuple((self._aged(float(at)), str(c), str(r)) for at, c, r in stored.get("ledger", ()))
            if stored.get("run") != self._run():
                return Resume(generation=-1, incidents=int(stored.get("incidents", 0)), ledger=ledger)
            values = {k: v for k, v in stored.items() if k in Resume.__dataclass_fields__}
            values["bad_rungs"] = tuple(values.get("bad_rungs", ()))
            self.world.reference = str(stored.get("reference", ""))
            return Resume(**{**values, "ledger": ledger})
        except (TypeError, ValueError) as error:
            self.log.write("store_failed", {"detail": f"state.json: {error}; starting with an empty memory"})
            return None

    def _run(self) -> str:
        """Names this run of the launcher: a new one starts its generations at 1 again."""
        hello = self.launcher_seam.hello
        return f"{self._boots}:{hello.get('pid')}:{hello.get('started_at', '')}"

    def _aged(self, stamp: float) -> float:
        """A persisted wall time as this boot's clock; a time from the future counts as now."""
        return boottime() - max(0.0, wall() - stamp)

    def save(self, resume: Resume) -> str | None:
        """Persists; returns why it could not."""
        values = asdict(resume)
        values["ledger"] = [[wall() - (boottime() - at), c, r] for at, c, r in resume.ledger]
        values |= {"run": self._run(), "reference": self.world.reference}
        return self.store.save(values)

    def _launcher_event(self, message: Message) -> None:
        generation = int(message.get("generation") or 0)
        match message.get("event"):
            case "output":
                self.output.grown(generation, message)
                self._pumping.set()
            case "exited":
                self._process_exited(generation, message)
            case "spawned":
                self.world.saw_tree(generation, message.get("tree") or [])
            case "stopping":
                self.loop.post(StopOrdered(boottime()))
            case "gateway" if message.get("state") == "exited":
                self.log.write("gateway_exited", {"lost_exchanges": int(message.get("lost_exchanges") or 0)})
            case _:
                pass

    def _process_exited(self, generation: int, message: Message) -> None:
        # What the process said last is read first, so that the verdict has it.
        while self.output.pump():
            pass
        if message.get("root"):
            self._root_gone(generation, message)
            return
        kind = self.profile.kind_of(str(message.get("cmdline") or ""), str(message.get("name") or ""))
        self.loop.post(
            Exited(
                at=boottime(),
                generation=generation,
                pid=int(message["pid"]),
                kind=ProcessKind.ENGINE if kind == "engine" else ProcessKind.OTHER,
                code=message.get("code"),
                signal=message.get("signal"),
                ordered=bool(message.get("ordered")),
                name=str(message.get("name") or ""),
            )
        )

    def _root_gone(self, generation: int, message: Message) -> None:
        self.loop.post(
            Exited(
                at=boottime(),
                generation=generation,
                pid=int(message.get("pid") or 0),
                kind=ProcessKind.ROOT,
                code=message.get("code"),
                signal=message.get("signal"),
                ordered=bool(message.get("ordered")),
                name="root",
            )
        )

    def _launcher_lost(self, reason: str) -> None:
        self.log.write("launcher_lost", {"reason": reason})
        if reason.startswith("refused") or os.getppid() == 1:
            self._stop.set()

    # --- gateway ---

    def _gateway_snapshot(self, message: Message) -> None:
        self.world.gateway_counts(message.get("counts") or {})
        self.loop.post(GatewayBack(boottime(), int(message.get("generation") or 0), str(message.get("gate"))))

    def _gateway_event(self, message: Message) -> None:
        generation, now = int(message.get("generation") or 0), boottime()
        match message.get("event"):
            case "progress":
                token_at = float(message.get("token_at") or 0.0)
                self.health.token_at = max(self.health.token_at, token_at)
                self.loop.post(Progressed(now, generation, token_at))
            case "symptom":
                while self.output.pump():
                    pass
                self.loop.post(
                    Symptom(
                        at=float(message.get("at") or now),
                        generation=generation,
                        exchange=str(message.get("exchange")),
                        connection=str(message.get("connection")),
                        body=str(message.get("body")),
                        kind=str(message.get("kind")),
                    )
                )
                self.health.nudge()
            case "replayed":
                answered, failed = int(message.get("answered") or 0), int(message.get("failed") or 0)
                self.loop.post(Replayed(now, generation, answered, failed))
            case "counts":
                self.world.gateway_counts(message.get("counts") or {})
            case _:
                pass

    def _gateway_lost(self, reason: str) -> None:
        self.loop.post(GatewayLost(boottime()))

    # --- output ---

    def _found(self, found: Found) -> None:
        self.loop.post(found)
        self._follow()

    def _hint(self, signature: str) -> None:
        if signature == READY_HINT:
            self.health.nudge()

    async def _pump(self) -> None:
        while True:
            try:
                async with asyncio.timeout(FLUSH_AFTER_S if self.output.unflushed else None):
                    await self._pumping.wait()
            except TimeoutError:
                self.output.flush()
                continue
            self._pumping.clear()
            while self.output.pump():
                await asyncio.sleep(FLOOD_PAUSE_S)

    async def _acknowledge(self) -> None:
        said = (0, 0, 0)
        while True:
            await asyncio.sleep(ACK_EVERY_S)
            now = self.output.acknowledged()
            if now != said and self.launcher_seam.connected:
                try:
                    await Launcher(self.launcher_seam).consumed(*now)
                    said = now
                except SeamError:
                    continue

    # --- everyone else ---

    def on_event(self, event: Event) -> None:
        """Effects report here."""
        self.loop.post(event)
        self._follow()

    def launched(self, generation: int, reply: Message) -> None:
        """A launch was done: follow its output."""
        self.output.follow(generation, reply.get("output") or {})
        self._pumping.set()

    def _follow(self) -> None:
        """Sensors look at what the machine now calls current."""
        state = self.machine.state
        ready = state.phase not in (Phase.STARTING, Phase.LAUNCHING)
        address = state.address if state.alive else None
        asyncio.get_running_loop().create_task(self.health.watch(state.generation, address, ready and state.proven))

    def status(self) -> Message:
        """The snapshot on supervisor.sock: what `defib status` shows."""
        state = self.machine.state
        return {
            "phase": state.phase.value,
            "generation": state.generation,
            "address": state.address,
            "proven": state.proven,
            "observe": self.machine.rules.observe,
            "rung": self.world.applied.get(state.generation, self.machine.rules.rungs[state.rung].name),
            "incident": state.incident,
            "incidents": state.incidents,
            "launches_counted": len(state.ledger),
            "ready_in_s": state.ready_in_s,
            "epoch": self.epoch,
            "uptime_s": round(boottime() - self._started_at, 1),
            "gateway": self.world.counts,
            "notes": dict(self.counts),
            "health": {"probes": self.health.probes, "blind": self.health.blind},
            "loop": {"gaps_s": self.loop.gaps_s, "bugs": self.loop.bugs, "dropped": self.loop.dropped},
            "evidence": {"failures": self.world.evidence.failures, "last_error": self.world.evidence.last_error},
        }

    def _operator(self, verb: str, message: Message) -> Message:
        match verb:
            case "status":
                return self.status()
            case "pause":
                self.loop.post(PauseOrdered(boottime()))
            case "resume":
                self.loop.post(ResumeOrdered(boottime()))
            case _:
                return {"ok": False, "error": "unknown_verb", "message": f"{verb}: not one of status, pause, resume"}
        return {"phase": self.machine.state.phase.value}


def main(argv: list[str] | None = None) -> int:
    """Entry. Exit codes: 0 told to stop, 78 configuration, 70 a bug."""
    parser = argparse.ArgumentParser(prog="defib-supervisor")
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="defib %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.ERROR)
    try:
        config = read_config(given.config_fd)
        return asyncio.run(_main(config, given.epoch))
    except (ConfigError, PolicyError) as error:
        print(f"defib: {error}", file=sys.stderr)
        return EXIT_CONFIG


async def _main(config: InstanceConfig, epoch: int) -> int:
    return await Supervisor(config, epoch).run()


if __name__ == "__main__":
    sys.exit(main())
