"""Thousands of seeded incidents, and the mutants that the invariants catch. DEFIB_SIM_RUNS makes it longer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.invariants import Broken
from tests.sim.life import Life, with_row

from defib.core import moves, orders, recovering, steps, watching
from defib.core.budget import Budget
from defib.core.commands import Command, HoldTraffic, Launch, Note, OpenTraffic, Settle
from defib.core.events import (
    Done,
    Elapsed,
    Event,
    Exited,
    Found,
    PauseOrdered,
    Ready,
    Replayed,
    StopOrdered,
    Symptom,
)
from defib.core.machine import TABLE, Machine
from defib.core.state import Phase, Rules, Turn
from defib.core.witnesses import Case

RUNS = int(os.environ.get("DEFIB_SIM_RUNS", "350"))

WHAT = (
    ("poison", 5),
    ("crash", 3),
    ("hang", 1),
    ("mutter", 4),
    ("busy", 1),
    ("sicken", 1),
    ("traffic", 4),
    ("kill_supervisor", 2),
    ("kill_supervisor_soon", 2),
    ("gateway_dies", 2),
    ("replaced_by_others", 0.7),
    ("unkillable", 0.5),
    ("straggle", 0.3),
    ("store_fills", 0.5),
    ("pause", 0.4),
    ("resume", 1),
    ("freeze", 0.4),
    ("stop", 0.03),
)
PAUSES_S = (0.002, 0.02, 0.1, 0.5, 3.0, 20.0, 90.0, 400.0)


def story(seed: int, steps: int = 40, **more: Any) -> Life:
    """One instance's life: things befall it at random moments, then peace."""
    world = Life(seed, **more)
    names, weights = zip(*WHAT, strict=True)
    for _ in range(steps):
        world.run(world.dice.choice(PAUSES_S))
        getattr(world, world.dice.choices(names, weights)[0])()
        if world.stopped:
            break
    world.finish()
    return world


def test_thousands_of_incidents_keep_every_invariant() -> None:
    befallen: Counter[str] = Counter()
    for seed in range(RUNS):
        try:
            world = story(seed)
        except Broken as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken
        befallen += world.counts
        befallen["incidents"] += len(world.watch.opened)
    assert befallen["incidents"] > RUNS * 3, befallen
    assert befallen["supervisor"] > RUNS and befallen["gateway"] > RUNS // 2, befallen


SETTINGS = {
    "observe": replace(Rules(), observe=True),
    "exit": replace(Rules(), on_spent="exit"),
    "one rung": replace(Rules(), rungs=Rules().rungs[:1]),
    "no cache": replace(Rules(), caches=()),
    "budget of one": replace(Rules(), budget=Budget(3600.0, 1)),
    "short window": replace(Rules(), budget=Budget(120.0, 2), start_limit_s=30.0),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_other_rules_keep_every_invariant(setting: str) -> None:
    for seed in range(RUNS // 8):
        try:
            story(seed, rules=SETTINGS[setting])
        except Broken as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken


def test_the_same_seed_gives_the_same_transcript() -> None:
    assert story(7).transcript == story(7).transcript
    assert story(7).transcript != story(8).transcript


# --- mutants: each breaks one rule, and the rule's invariant must fall ---


def _launch_without_a_kill(t: Turn, e: Any) -> None:
    steps.launch(t)


def _trust_a_failed_kill(t: Turn, e: Any) -> None:
    steps.gate(t)


def _open_unproven(t: Turn, e: Any) -> None:
    recovering.launching_ready(t, e)
    t.say(OpenTraffic(t.state.generation, t.state.address or ""))


def _kill_on_one_witness(t: Turn, e: Any) -> None:
    watching.serving_found(t, e)
    if t.state.case is not None:
        steps.convict(t, t.state.case)


def _kill_on_a_symptom(t: Turn, e: Any) -> None:
    watching.suspecting_symptom(t, e)
    if t.state.case is not None and t.state.phase is Phase.SUSPECTING:
        steps.convict(t, t.state.case)


def _forget_the_deadline(t: Turn, e: Any) -> None:
    recovering.launched(t, e)
    t.forget("phase")


def _renew_nothing(t: Turn, e: Any) -> None:
    if e.name != "lease":
        recovering.launch_late(t, e)


def _pause_that_forgets(t: Turn, e: Any) -> None:
    orders.pause(t, e)
    moves.serve(t)


def _act_while_paused(t: Turn, e: Any) -> None:
    steps.convict(t, Case(t.at, exits=("root",)))


def _stop_that_launches(t: Turn, e: Any) -> None:
    orders.stop(t, e)
    t.say(Launch(t.ticket(), t.state.generation + 1, "same-again"))


def _settle_twice(t: Turn, e: Any) -> None:
    incident = t.state.incident
    recovering.replayed(t, e)
    if incident:
        t.say(Settle(incident, "again"))


def _never_settle(t: Turn, e: Any) -> None:
    t.state = replace(t.state, incident=None)
    recovering.replayed(t, e)


def _forget_the_ledger(t: Turn, e: Any) -> None:
    recovering.launched(t, e)
    t.state = replace(t.state, ledger=())


def _observe_that_kills(t: Turn, e: Any) -> None:
    steps.kill(t)


def _down_for_ever(t: Turn, e: Any) -> None:
    t.wait("phase", 60.0)


OBSERVE = replace(Rules(), observe=True)
MUTANTS: dict[str, tuple[str, Phase, type[Event], Callable[..., None], Rules]] = {
    "launches without a kill": ("empty-before-launch", Phase.CAPTURING, Done, _launch_without_a_kill, Rules()),
    "trusts a failed kill": ("empty-before-launch", Phase.KILLING, Done, _trust_a_failed_kill, Rules()),
    "opens the unproven": ("proven-before-open", Phase.LAUNCHING, Ready, _open_unproven, Rules()),
    "kills on one witness": ("witnesses", Phase.SERVING, Found, _kill_on_one_witness, Rules()),
    "kills the well": ("no-harm", Phase.SUSPECTING, Symptom, _kill_on_a_symptom, Rules()),
    "waits for ever": ("deadline", Phase.LAUNCHING, Done, _forget_the_deadline, Rules()),
    "lets a lease end": ("lease", Phase.LAUNCHING, Elapsed, _renew_nothing, Rules()),
    "ends a pause": ("paused", Phase.SERVING, PauseOrdered, _pause_that_forgets, Rules()),
    "acts while paused": ("paused", Phase.PAUSED, Exited, _act_while_paused, Rules()),
    "launches while stopping": ("stopped", Phase.SERVING, StopOrdered, _stop_that_launches, Rules()),
    "settles twice": ("settled", Phase.REPLAYING, Replayed, _settle_twice, Rules()),
    "never settles": ("settled", Phase.REPLAYING, Replayed, _never_settle, Rules()),
    "forgets the ledger": ("budget", Phase.LAUNCHING, Done, _forget_the_ledger, Rules()),
    "observes with teeth": ("observe", Phase.CAPTURING, Done, _observe_that_kills, OBSERVE),
    "stays down": ("peace", Phase.DOWN, Elapsed, _down_for_ever, Rules()),
}


def fallen(invariant: str, runs: int = 1000, **more: Any) -> bool:
    """Whether some story breaks this invariant. Mutants break others too; those stories end early and say nothing."""
    for seed in range(runs):
        try:
            story(seed, **more)
        except Broken as broken:
            if broken.name == invariant:
                return True
        except AssertionError:
            continue
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_its_invariant(name: str) -> None:
    invariant, phase, event, handler, rules = MUTANTS[name]
    assert fallen(invariant, rules=rules, table=with_row(TABLE, phase, event, handler))


class Forgetful(Machine):
    """Says everything but one kind of command."""

    missing: type[Command] = HoldTraffic

    def step(self, event: Event) -> list[Command]:
        return [c for c in super().step(event) if not isinstance(c, self.missing)]


class Moody(Machine):
    """Its answers depend on more than its state and the event."""

    moods = iter(range(10**9))

    def step(self, event: Event) -> list[Command]:
        return [*super().step(event), Note("mood", (("number", next(self.moods)),))]


def test_a_machine_that_never_holds_lets_traffic_reach_the_convicted() -> None:
    assert fallen("held", machine=Forgetful)


def test_a_machine_with_a_mood_gives_two_transcripts_for_one_seed() -> None:
    assert story(7, machine=Moody).transcript != story(7, machine=Moody).transcript


def test_a_launcher_that_takes_a_second_generation_is_seen_by_one_alive() -> None:
    world = Life(3)
    world.run(90.0)
    with pytest.raises(Broken) as broken:
        world._begin("primary")
    assert broken.value.name == "one-alive"
