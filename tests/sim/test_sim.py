"""Thousands of seeded incidents, and the mutants that the invariants catch. DEFIB_SIM_RUNS makes it longer."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.world import Broken, World

from defib.core.budget import Budget
from defib.core.state import Rules

RUNS = int(os.environ.get("DEFIB_SIM_RUNS", "300"))

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


def story(seed: int, steps: int = 40, **more: Any) -> World:
    """One instance's life: things befall it at random moments, then peace."""
    world = World(seed, **more)
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
