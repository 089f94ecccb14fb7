"""Reads the worker's two output files as they grow: lines into the ring, findings to the loop.

The launcher says how far the files reach; what was read is acknowledged, so that it can be punched out. Nothing is
decided here: a finding is a fact of group T.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from defib.core.events import FaultClass, Found
from defib.sensors.ring import Kept, Ring

READ_BYTES = 256 * 1024
"""At most this much of one stream is read in one turn, so that the loop stays responsive in a flood."""

MAX_FINDINGS = 1_000
"""Findings remembered of this generation and the one before, for the evidence."""


class ScannedLine(Protocol):
    """A line as triage splits it."""

    @property
    def stream(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def text(self) -> str: ...


class Finding(Protocol):
    """A match as triage reports it."""

    @property
    def signature(self) -> str: ...
    @property
    def fault(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def process(self) -> str: ...
    @property
    def text(self) -> str: ...


class Scan(Protocol):
    """What triage's Scanner does, as far as this sensor needs it."""

    def feed(self, stream: str, data: bytes, at: float) -> Any: ...
    def flush(self, at: float) -> Any: ...


class Output:
    """The files of the current generation. `pump` reads what is new and says whether there is more."""

    def __init__(
        self,
        ring: Ring,
        scanner: Callable[[bool], Scan],
        clock: Callable[[], float],
        on_found: Callable[[Found], None],
        on_hint: Callable[[str], None],
    ) -> None:
        self.ring, self.clock = ring, clock
        self.on_found, self.on_hint = on_found, on_hint
        self.generation = 0
        self.lines = 0
        self.findings: list[tuple[int, Finding]] = []
        self.lost_bytes = 0
        self.holes = 0
        self._scanner = scanner
        self._scan = scanner(False)
        self._paths: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self.unflushed = False
        """Something was read since the last flush: a partial line or record may wait."""

    def follow(self, generation: int, output: dict[str, Any]) -> None:
        """Begins with the files of a generation, from what an earlier reader acknowledged."""
        if generation == self.generation:
            self.grown(generation, {name: values.get("size", 0) for name, values in output.items()})
            return
        self.close()
        self.generation = generation
        # What was acknowledged was read by a supervisor before us: the start lies behind what we shall read.
        self._scan = self._scanner(any((values or {}).get("consumed") for values in output.values()))
        self.findings = [kept for kept in self.findings if kept[0] >= generation - 1]
        for name in ("stdout", "stderr"):
            values = output.get(name) or {}
            if values.get("path"):
                self._paths[name] = values["path"]
                self._offsets[name] = int(values.get("consumed", 0))
                self._sizes[name] = int(values.get("size", 0))
                self.lost_bytes += int(values.get("lost_bytes", 0))

    def grown(self, generation: int, sizes: dict[str, Any]) -> None:
        """The launcher saw the files grow."""
        if generation == self.generation:
            for name in self._paths:
                self._sizes[name] = max(self._sizes[name], int(sizes.get(name) or 0))

    def pump(self) -> bool:
        """Reads a bounded piece of each stream; True if more waits."""
        more = False
        for name in self._paths:
            waiting = self._sizes[name] - self._offsets[name]
            if waiting > 0:
                data = self._read(name, min(waiting, READ_BYTES))
                more = more or self._sizes[name] > self._offsets[name]
                if data:
                    self._take(self._scan.feed(name, data, self.clock()))
                    self.unflushed = True
        return more

    def flush(self) -> None:
        """Nothing came for a moment: what is incomplete is taken as it is."""
        self.unflushed = False
        self._take(self._scan.flush(self.clock()))

    def acknowledged(self) -> tuple[int, int, int]:
        """(generation, stdout offset, stderr offset) up to which everything was read."""
        return self.generation, self._offsets.get("stdout", 0), self._offsets.get("stderr", 0)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files, self._paths, self._offsets, self._sizes = {}, {}, {}, {}

    def _read(self, name: str, size: int) -> bytes:
        try:
            if name not in self._files:
                self._files[name] = os.open(self._paths[name], os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._files[name], size, self._offsets[name])
        except OSError:
            self._sizes[name] = self._offsets[name]
            return b""
        self._offsets[name] += len(data)
        if b"\0" in data:  # a hole: punched at the cap while nobody read; the launcher counts what that cost
            data = data.replace(b"\0", b"")
            self.holes += 1
        if not data:  # truncated at the cap: the launcher counts what that cost
            self._sizes[name] = self._offsets[name]
        return data

    def _take(self, scanned: Any) -> None:
        now = self.clock()
        for line in scanned.lines:
            self.lines += 1
            self.ring.add(Kept(now, self.generation, line.stream, line.number, line.text))
        for finding in scanned.findings:
            if len(self.findings) < MAX_FINDINGS:
                self.findings.append((self.generation, finding))
            self._report(finding, now)

    def _report(self, finding: Finding, now: float) -> None:
        if finding.role == "hint":
            self.on_hint(finding.signature)
            return
        self.on_found(
            Found(
                at=now,
                generation=self.generation,
                signature=finding.signature,
                fault=FaultClass(finding.fault),
                cause=finding.role in ("cause", "either"),
                process=finding.process,
                text=finding.text,
            )
        )
