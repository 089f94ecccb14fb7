"""The machine by golden transcripts (events in, commands out, as text) and by what the rules promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.stories import STORIES, Story

from defib.core.events import (
    CanaryDone,
    CanaryOutcome,
    Done,
    Effect,
    Elapsed,
    Exited,
    FaultClass,
    Found,
    ProcessKind,
    Ready,
)

FOLDER = Path(__file__).parent / "transcripts"
IMA = FaultClass.POISONED_CONTEXT


@pytest.mark.parametrize("name", STORIES)
def test_a_story_goes_as_written(name: str, regenerate: bool) -> None:
    path = FOLDER / f"{name}.txt"
    text = "\n".join(STORIES[name]().lines) + "\n"
    if regenerate:
        path.write_text(text)
    assert text == path.read_text(), "read the difference; `pytest tests/core --regenerate` accepts it"


def test_no_transcript_is_left_over() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(STORIES)


def test_facts_of_another_generation_and_stale_tickets_change_nothing() -> None:
    story = Story().serves()
    before = story.state
    for event in (
        Found(200.0, 7, "ima", IMA, True),
        Exited(200.0, 7, 9, ProcessKind.ROOT, 0),
        Ready(200.0, 0),
        CanaryDone(200.0, 999, CanaryOutcome.ERROR, 199.0),
        Done(200.0, 999, Effect.KILL, True),
        Elapsed(200.0, "phase", 999),
    ):
        assert story.machine.step(event) == []
        assert story.state == before


def test_a_hold_is_told_what_is_left_of_the_time_to_ready() -> None:
    story = Story().serves().poisoned().relaunches()
    expected = story.state.ready_in_s
    assert expected is not None
    story.elapses("lease", 10.0)
    holds = [c.ready_in_s for c in story.commands if type(c).__name__ == "HoldTraffic"]
    assert holds and holds[0] is not None and holds[0] < expected - 9.0
