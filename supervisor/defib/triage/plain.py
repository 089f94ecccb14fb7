"""The scanner for engines whose log we don't read: lines for the evidence, never a finding."""

from __future__ import annotations

from defib.triage.lines import Line, LineSplitter
from defib.triage.scanner import STREAMS, Scanned


class PlainScanner:
    """Splits and keeps, as `Scanner` does, and accuses nobody."""

    def __init__(self) -> None:
        self._splitters = {name: LineSplitter(name) for name in STREAMS}

    def feed(self, stream: str, data: bytes, at: float) -> Scanned:
        return Scanned(tuple(self._splitters[stream].feed(data, at)))

    def flush(self, at: float) -> Scanned:
        lines: list[Line] = [line for splitter in self._splitters.values() for line in splitter.flush(at)]
        return Scanned(tuple(lines))
