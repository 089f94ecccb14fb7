"""Thousands of seeded incidents, and the mutants that the invariants catch. DEFIB_SIM_RUNS makes it longer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.world import Broken, World, with_row

from defib.core import machine as m
from defib.core.budget import Budget
from defib.core.commands import Launch, OpenTraffic, Settle
from defib.core.events import (
    Done,
    Found,
    PauseOrdered,
    StopOrdered,
    Symptom,
)
from defib.core.state import Phase, Rules, Turn

RUNS = int(os.environ.get("DEFIB_SIM_RUNS", "400"))

WHAT = (
    ("poison", 5),
    ("crash", 3),
    ("mutter", 4),
    ("sicken", 1),
    ("traffic", 4),
    ("replace_supervisor", 3),
    ("gateway_dies", 2),
    ("replaced_by_others", 1),
    ("pause", 0.3),
    ("resume", 0.6),
    ("freeze", 0.3),
    ("stop", 0.03),
)


def story(seed: int, steps: int = 30, **more: Any) -> World:
    """One instance's life: things befall it at random moments, then peace."""
    world = World(seed, **more)
    names, weights = zip(*WHAT, strict=True)
    for _ in range(steps):
        world.run(world.dice.choice((0.02, 0.2, 0.5, 3.0, 20.0, 90.0, 400.0)))
        getattr(world, world.dice.choices(names, weights)[0])()
    world.finish()
    return world


def test_thousands_of_incidents_keep_every_invariant() -> None:
    befallen = 0
    for seed in range(RUNS):
        world = story(seed)
        befallen += world.counts.total()
    assert befallen > RUNS * 8


@pytest.mark.parametrize("setting", ["observe", "exit", "one rung", "no budget"])
def test_other_rules_keep_every_invariant(setting: str) -> None:
    rules = Rules()
    rules = {
        "observe": replace(rules, observe=True),
        "exit": replace(rules, on_spent="exit"),
        "one rung": replace(rules, rungs=rules.rungs[:1]),
        "no budget": replace(rules, budget=Budget(3600.0, 1)),
    }[setting]
    for seed in range(RUNS // 8):
        story(seed, rules=rules)


def test_the_same_seed_gives_the_same_transcript() -> None:
    assert story(7).transcript == story(7).transcript
    assert story(7).transcript != story(8).transcript


def _launch_without_a_kill(t: Turn, e: Any) -> None:
    m._launch(t)


def _open_unproven(t: Turn, e: Any) -> None:
    m._launching_ready(t, e)
    t.say(OpenTraffic(t.state.generation, t.state.address or ""))


def _kill_on_one_witness(t: Turn, e: Any) -> None:
    m._serving_found(t, e)
    if t.state.case is not None:
        m._convict(t, t.state.case)


def _kill_on_a_symptom(t: Turn, e: Any) -> None:
    m._suspecting_symptom(t, e)
    if t.state.case is not None and t.state.phase is Phase.SUSPECTING:
        m._convict(t, t.state.case)


def _forget_the_deadline(t: Turn, e: Any) -> None:
    m._launched(t, e)
    t.forget("phase")


def _pause_that_forgets(t: Turn, e: Any) -> None:
    m._pause(t, e)
    m._serve(t)


def _stop_that_launches(t: Turn, e: Any) -> None:
    m._stop(t, e)
    t.say(Launch(t.ticket(), t.state.generation + 1, "same-again"))


def _settle_twice(t: Turn, e: Any) -> None:
    incident = t.state.incident
    m._replayed(t, e)
    if incident:
        t.say(Settle(incident, "again"))


def _never_settle(t: Turn, e: Any) -> None:
    t.state = replace(t.state, incident=None)
    m._replayed(t, e)


def _ledger_without_end(t: Turn, e: Any) -> None:
    before = t.state.ledger
    m._cleared(t, e)
    t.state = replace(t.state, ledger=(*before, *t.state.ledger, *t.state.ledger, *t.state.ledger))


def _observe_that_kills(t: Turn, e: Any) -> None:
    m._kill(t)


MUTANTS: dict[str, tuple[str, Phase, Any, Callable[..., None], Rules]] = {
    "launches without a kill": ("empty-before-launch", Phase.CAPTURING, Done, _launch_without_a_kill, Rules()),
    "opens the unproven": ("proven-before-open", Phase.LAUNCHING, m.Ready, _open_unproven, Rules()),
    "kills on one witness": ("no-harm", Phase.SERVING, Found, _kill_on_one_witness, Rules()),
    "kills on a symptom": ("no-harm", Phase.SUSPECTING, Symptom, _kill_on_a_symptom, Rules()),
    "waits for ever": ("deadline", Phase.LAUNCHING, Done, _forget_the_deadline, Rules()),
    "ends a pause": ("paused", Phase.SERVING, PauseOrdered, _pause_that_forgets, Rules()),
    "launches while stopping": ("stopped", Phase.SERVING, StopOrdered, _stop_that_launches, Rules()),
    "settles twice": ("settled", Phase.REPLAYING, m.Replayed, _settle_twice, Rules()),
    "never settles": ("settled", Phase.REPLAYING, m.Replayed, _never_settle, Rules()),
    "forgets the budget": ("budget", Phase.CLEARING, Done, _ledger_without_end, Rules()),
    "observes with teeth": ("observe", Phase.CAPTURING, Done, _observe_that_kills, replace(Rules(), observe=True)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_its_invariant(name: str) -> None:
    invariant, phase, event, handler, rules = MUTANTS[name]
    table = with_row(m.TABLE, phase, event, handler)
    fallen: set[str] = set()
    for seed in range(120):
        try:
            story(seed, rules=rules, table=table)
        except Broken as broken:
            fallen.add(broken.name)
            if broken.name == invariant:
                return
    raise AssertionError(f"the mutant lived; fell: {fallen}")
