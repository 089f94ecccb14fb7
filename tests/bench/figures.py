"""One figure of the bench, the table, and the JSON lines."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """`samples` in the unit that the name gives; `goal` is an upper bound; `must`: missing it fails the bench."""

    name: str
    samples: list[float]
    goal: float | None
    beside: str
    must: bool = False

    @property
    def ours(self) -> float:
        return statistics.median(self.samples) if self.samples else float("nan")

    @property
    def ok(self) -> bool | None:
        return None if self.goal is None else self.ours <= self.goal

    def line(self) -> str:
        return json.dumps(
            {
                "figure": self.name,
                "ours": round(self.ours, 5),
                "beside": self.beside,
                "ratio": None if not self.goal else round(self.ours / self.goal, 3),
                "goal": self.goal,
                "ok": self.ok,
                "samples": [round(s, 5) for s in self.samples],
            }
        )


def show(figures: list[Figure], out: str | None) -> None:
    """Prints the table; writes one JSON line a figure to `out`."""
    width = max((len(f.name) for f in figures), default=10)
    print(f"{'figure':<{width}}  {'median':>10} {'min':>10} {'max':>10} {'n':>4} {'goal':>8}  ok   beside")
    for f in figures:
        goal = "-" if f.goal is None else f"{f.goal:g}"
        ok = {None: "-", True: "yes", False: "NO"}[f.ok]
        low, high = (min(f.samples), max(f.samples)) if f.samples else (float("nan"), float("nan"))
        numbers = f"{f.ours:10.4f} {low:10.4f} {high:10.4f} {len(f.samples):4}"
        print(f"{f.name:<{width}}  {numbers} {goal:>8}  {ok:<4} {f.beside}")
    if out:
        Path(out).write_text("".join(f.line() + "\n" for f in figures))
