"""The event log: one line per step, JSON in a bounded file, key=value for a person on our own stderr.

Prompts, keys and bodies never come here: the machine's notes hold only its own words and facts.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from defib.core.commands import Value
from defib.runtime.clock import boottime, stamp

MAX_FILE_BYTES = 8 << 20
"""At this size the file is moved to `.1`, and the one before it is forgotten."""
MAX_TIMELINE = 2_000
MAX_VALUE_CHARS = 500
LOUD = frozenset(
    {"verdict", "false_alarm", "inconclusive", "stuck", "down", "finish", "proven", "settled", "would_have_killed",
     "captured", "killed", "cleared", "launch", "launched", "ready", "replayed", "bad_rung", "rung_failed",
     "gateway_lost", "gateway_back", "store_failed", "adopted", "exited", "unproven", "suspecting", "canary"}
)  # fmt: skip
"""What a person on call sees; the file has all of it."""


class EventLog:
    """`write(name, fields)`. A full disk costs lines in the file, counted in `failures`, and nothing else."""

    def __init__(self, path: Path, instance: str, out: TextIO | None = None) -> None:
        self.path, self.instance = path, instance
        self.out = sys.stderr if out is None else out
        self.failures = 0
        self.timeline: deque[dict[str, Value]] = deque(maxlen=MAX_TIMELINE)
        self._plain = not self.out.isatty()

    def write(self, name: str, fields: Mapping[str, Value]) -> None:
        """One step of what happened."""
        line: dict[str, Value] = {"time": stamp(), "at": round(boottime(), 4), "event": name}
        line.update({k: v[:MAX_VALUE_CHARS] if isinstance(v, str) else v for k, v in fields.items()})
        self.timeline.append(line)
        text = json.dumps({**line, "instance": self.instance})
        self._to_file(text)
        if name in LOUD:
            self._to_people(name, line, text)

    def since(self, at: float) -> list[dict[str, Value]]:
        """The steps from this time (CLOCK_BOOTTIME) on, oldest first."""
        return [line for line in self.timeline if isinstance(line["at"], float) and line["at"] >= at]

    def _to_file(self, text: str) -> None:
        try:
            if self.path.exists() and self.path.stat().st_size > MAX_FILE_BYTES:
                os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError:
            self.failures += 1

    def _to_people(self, name: str, line: Mapping[str, Value], text: str) -> None:
        if not self._plain:
            shown = " ".join(f"{k}={_shown(v)}" for k, v in line.items() if k not in ("time", "at", "event"))
            text = f"defib {line['time']} {name} {shown}"
        try:
            print(text, file=self.out, flush=True)
        except OSError:
            self.failures += 1


def _shown(value: Value) -> str:
    text = str(value)
    return json.dumps(text) if " " in text or not text else text
