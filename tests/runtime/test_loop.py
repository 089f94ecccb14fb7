"""The single-writer loop: order, deadlines, its own gaps, and a bug in one step."""

from __future__ import annotations

import asyncio
import logging

import pytest

from defib.core.commands import Command, Note
from defib.core.events import Booted, Elapsed, Event, PauseOrdered, ResumeOrdered, StopOrdered
from defib.core.machine import Machine
from defib.core.state import Rules
from defib.runtime.loop import GAP_S, MAX_QUEUED, Loop


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Seen:
    """A loop whose commands and events are kept."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.clock = Clock()
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.loop = Loop(machine or Machine(Rules()), self.clock, self.commands.append)
        self.loop.on_event = self.events.append


def test_what_is_posted_while_one_is_handled_waits_its_turn() -> None:
    async def run() -> None:
        seen = Seen()
        order: list[str] = []

        def on_event(event: Event) -> None:
            order.append(type(event).__name__)
            if isinstance(event, Booted):
                seen.loop.post(StopOrdered(100.0))
                order.append("posted")

        seen.loop.on_event = on_event
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        assert order == ["Booted", "posted", "StopOrdered"]

    asyncio.run(run())


def test_a_deadline_fires_when_its_time_has_come() -> None:
    async def run() -> None:
        seen = Seen()
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        seen.loop._wake()
        assert not [e for e in seen.events if isinstance(e, Elapsed)]
        seen.clock.now += 900.5
        seen.loop._expected = seen.clock.now
        seen.loop._wake()
        assert [e.name for e in seen.events if isinstance(e, Elapsed)] == ["phase"]
        seen.loop.stop()

    asyncio.run(run())


def test_time_in_which_we_did_not_run_moves_the_deadlines(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        seen = Seen()
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        seen.clock.now += 5000.0
        with caplog.at_level(logging.WARNING):
            seen.loop._wake()
        assert not [e for e in seen.events if isinstance(e, Elapsed)]
        assert seen.loop.gaps_s > 4990 and "did not run" in caplog.text
        seen.loop.stop()

    asyncio.run(run())


def test_a_gap_is_seen_even_if_an_event_wakes_us_before_our_own_timer() -> None:
    async def run() -> None:
        seen = Seen()
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        deadline = seen.loop._timers[0][0]
        seen.clock.now += 90.0
        seen.loop.post(PauseOrdered(seen.clock.now))  # a socket was read first, and what it said arms nothing
        seen.loop.post(ResumeOrdered(seen.clock.now))  # and this arms a deadline of its own
        moved, fresh = sorted(at for at, _, _ in seen.loop._timers)
        assert moved == pytest.approx(deadline + 90.0, abs=2.0)
        assert fresh == pytest.approx(seen.clock.now + 900.0)
        assert seen.loop.gaps_s == pytest.approx(90.0, abs=2.0)
        seen.loop.stop()

    asyncio.run(run())


def test_being_a_little_late_is_no_gap() -> None:
    async def run() -> None:
        seen = Seen()
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        before = seen.loop._timers[0][0]
        seen.clock.now = seen.loop._expected + GAP_S
        seen.loop._wake()
        assert seen.loop._timers[0][0] == before and seen.loop.gaps_s == 0
        seen.loop.stop()

    asyncio.run(run())


def test_a_bug_in_one_step_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Machine):
        def step(self, event: Event) -> list[Command]:
            if isinstance(event, PauseOrdered):
                raise RuntimeError("a bug")
            return super().step(event)

    async def run() -> None:
        seen = Seen(Bad(Rules()))
        seen.loop.post(PauseOrdered(100.0))
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        assert seen.loop.bugs == 1
        assert [c.name for c in seen.commands if isinstance(c, Note)][:1] == ["booted"]
        seen.loop.stop()

    asyncio.run(run())
    assert "a bug" in caplog.text


def test_a_command_that_fails_does_not_take_the_others_with_it() -> None:
    async def run() -> None:
        seen = Seen()

        def do(command: Command) -> None:
            if isinstance(command, Note):
                raise OSError("full")
            seen.commands.append(command)

        seen.loop.on_command = do
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        assert seen.commands and seen.loop.bugs > 0 and seen.loop._timers
        seen.loop.stop()

    asyncio.run(run())


def test_a_deadline_that_meets_a_bug_comes_again() -> None:
    class Bad(Machine):
        def step(self, event: Event) -> list[Command]:
            if isinstance(event, Elapsed):
                raise RuntimeError("a bug")
            return super().step(event)

    async def run() -> None:
        seen = Seen(Bad(Rules()))
        seen.loop.post(Booted(100.0, 1, True, "a:1", 100.0))
        seen.clock.now += 900.5
        seen.loop._expected = seen.clock.now
        seen.loop._wake()
        assert [wait.name for _, _, wait in seen.loop._timers] == ["phase"]
        seen.loop.stop()

    asyncio.run(run())


def test_the_queue_is_bounded() -> None:
    async def run() -> None:
        seen = Seen()

        def flood(event: Event) -> None:
            if isinstance(event, StopOrdered):
                for _ in range(MAX_QUEUED + 7):
                    seen.loop.post(PauseOrdered(100.0))

        seen.loop.on_event = flood
        seen.loop.post(StopOrdered(100.0))
        assert seen.loop.dropped == 7

    asyncio.run(run())
