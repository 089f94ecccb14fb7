"""Steps of an instance's event log as lines for a newcomer: when, what, and how long it took.

Only words: it decides nothing and knows no step that the event log doesn't name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_LOG_BYTES = 8 << 20
STEP_WIDTH = 10

Event = Mapping[str, object]


@dataclass(slots=True)
class Timeline:
    """Times are counted from the fault; every line also says how long it was after the line before it."""

    fault_at: float
    last_at: float = 0.0

    def line(self, at: float, step: str, text: str) -> str:
        """One line; `at` in CLOCK_BOOTTIME seconds."""
        since, took = at - self.fault_at, at - (self.last_at or at)
        self.last_at = at
        return f"  {since:6.2f} s  +{took:4.2f}  {step:<{STEP_WIDTH}} {text}"


def read_events(path: Path) -> list[dict[str, object]]:
    """Every whole line of an event log; a file that isn't there yet is empty."""
    try:
        data = path.read_bytes()[:MAX_LOG_BYTES]
    except OSError:
        return []
    events = []
    for line in data.split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def told(timeline: Timeline, event: Event) -> Iterable[str]:
    """The line of a step, if a newcomer wants to know of it."""
    at = event.get("at")
    said = _said(event)
    if said is None or not isinstance(at, float):
        return
    yield timeline.line(at, *said)


def _said(event: Event) -> tuple[str, str] | None:
    def field(name: str) -> str:
        return str(event.get(name, ""))

    match event.get("event"):
        case "suspecting":
            return "suspect", f"first witness: {field('group_t') if field('group_t') != 'none' else field('group_w')}"
        case "verdict":
            by = f", first in {field('initiator')}" if field("initiator") else ""
            seen = " + ".join(w for w in (field("group_t"), field("group_w")) if w and w != "none")
            return "verdict", f"{field('fault')}{by}; witnesses: {seen}"
        case "captured":
            return "evidence", f"saved in {field('detail')}"
        case "killed":
            return "kill", f"every process of generation {field('generation')}: {field('detail')}"
        case "gated":
            return "gate", field("detail")
        case "cleared":
            return "caches", f"moved aside: {field('detail')}"
        case "launch":
            return "launch", f"generation {field('generation')}, {RUNGS.get(field('rung'), field('rung'))}"
        case "ready":
            return "ready", f"generation {field('generation')} says so, {field('seconds')} s after its launch"
        case "canary":
            return "canary", f"{PURPOSES.get(field('purpose'), field('purpose'))}: {field('outcome')} {field('detail')}"
        case "rung_failed" | "bad_rung":
            return "next rung", f"{field('why')}"
        case "proven":
            return "proven", f"generation {field('generation')} computes; traffic may reach it"
        case "replayed":
            return "replay", f"{field('answered')} held requests answered, {field('failed')} failed"
        case "settled":
            return "settled", field("outcome")
        case "report":
            return "report", f"{field('folder')}/report.md"
        case _:
            return None


RUNGS = {"same-again": "the same command again", "eager": "with the fallback flag --enforce-eager"}
PURPOSES = {"suspect": "does it still compute?", "prove": "does the new one compute?", "reference": "first answer"}
