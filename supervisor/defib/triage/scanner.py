"""Bytes to findings: splitter, assembler and matcher behind a gate. Pure; one scanner per generation.

Written for a stream that is nearly always dull: a line whose own heading says INFO or DEBUG leaves the fast path
only if some signature asks for that source file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from defib.triage.assembler import Assembler
from defib.triage.headings import Form, Heading, Origin, origin_of_tag
from defib.triage.lines import Line, LineSplitter
from defib.triage.records import Place, Record, Seen, finished
from defib.triage.signatures import Finding, Matcher, Signature, SignatureError, finding

STREAMS = ("stdout", "stderr", "merged")
"""`merged`: one file holds both, so that raw text can't be told by its stream."""

REPEAT_S = 1.0
"""The same signature by the same process on the same stream is reported once in this time: a device-side assertion
prints a line per GPU thread."""

MAX_REMEMBERED = 1024
"""Processes learnt, and findings remembered for REPEAT_S."""

READY = "vllm_ready"
"""The hint that ends the start; from then on clients' text may reach the log."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """What one call found: every line, the findings, and the records that ended (INFO and DEBUG ones aren't built)."""

    lines: tuple[Line, ...] = ()
    findings: tuple[Finding, ...] = ()
    records: tuple[Record, ...] = ()


@dataclass(slots=True)
class Scanner:
    """Feed it the output of one generation as it is read. `ready`: the start lies behind what will be fed.

    Findings come with the line that completes them; only a signature marked `fallback` waits until its record is
    complete. Call `flush` when nothing came for a moment, `flush(math.inf)` at the end. `dialect` names the engine;
    only "vllm" is known.
    """

    matcher: Matcher
    dialect: str = "vllm"
    ready: bool = False
    suppressed: int = 0
    """Findings not reported because they repeat one."""
    _splitters: dict[str, LineSplitter] = field(default_factory=dict)
    _assembler: Assembler = field(default_factory=Assembler)
    _gate: re.Pattern[str] = field(init=False)
    _tags: set[str] = field(default_factory=set)
    _pids: dict[Origin, set[int]] = field(default_factory=dict)
    _talkative: bool = False
    _nested: bool = False
    _json: bool = False
    _learning: bool = True
    _reported: dict[tuple[str, str, str, int | None], float] = field(default_factory=dict)
    _waiting: dict[int, Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dialect != "vllm":
            raise ValueError(f"unknown dialect {self.dialect!r}; known: vllm")
        self._learning = not self.ready
        self._gate = _gate(self.matcher.info_files)

    def feed(self, stream: str, data: bytes, at: float) -> Scanned:
        """Takes the next bytes of a stream (one of STREAMS), read at `at` (monotonic seconds)."""
        splitter = self._splitters.get(stream)
        if splitter is None:
            if stream not in STREAMS:
                raise ValueError(f"unknown stream {stream!r}; known: {', '.join(STREAMS)}")
            splitter = self._splitters[stream] = LineSplitter(stream)
        return self._scan(splitter.feed(data, at), at)

    def flush(self, at: float) -> Scanned:
        """Takes incomplete lines and quiet records as they are. Cheap when there are none."""
        lines: list[Line] = []
        findings: list[Finding] = []
        records: list[Record] = []
        for splitter in self._splitters.values():
            held_at = splitter.held_at
            if held_at is not None and (stale := splitter.flush(at)):
                scanned = self._scan(stale, held_at)
                lines.extend(stale)
                findings.extend(scanned.findings)
                records.extend(scanned.records)
        if not self._assembler.is_idle:
            held = frozenset(s.stream for s in self._splitters.values() if s.held_at is not None)
            self._assembler.flush(at, held)
            self._settle(at, findings, records)
        return Scanned(tuple(lines), tuple(findings), tuple(records))

    def _scan(self, lines: list[Line], at: float) -> Scanned:
        findings: list[Finding] = []
        records: list[Record] = []
        gate = self._gate.match
        for line in lines:
            text = line.text
            if not text or line.rewritten or line.continued:
                continue  # a progress bar and the rest of a broken line prove nothing
            if found := gate(text):
                if self._learning and found["tag"]:
                    self._learn(found["tag"], int(found["pid"]), talkative=True)
                continue
            if text[:2] == '{"' and '"levelname": "INFO"' in text:
                self._json = self._json or self._learning
                if '"uvicorn.error"' not in text:
                    continue
            for seen in self._assembler.push(line, at):
                self._look(seen, at, findings)
            self._settle(at, findings, records)
        return Scanned(tuple(lines), tuple(findings), tuple(records))

    def _look(self, seen: Seen, at: float, findings: list[Finding]) -> None:
        if self._learning:
            self._learn_from(seen.heading)
        elif self._is_forged(seen.heading):
            return
        matched = self.matcher.match(seen, starting=self._learning)
        for signature in matched:
            if signature.id == READY:
                self.ready, self._learning = True, False
            if signature.fallback:
                self._waiting.setdefault(id(seen.record), finding(signature, seen, at))
                continue
            if seen.place in (Place.EXCEPTION, Place.SERVER_EXCEPTION):
                seen.record.explained = True
            self._report(finding(signature, seen, at), findings)

    def _settle(self, at: float, findings: list[Finding], records: list[Record]) -> None:
        """Records that ended: what nothing else explained is reported now."""
        for record in self._assembler.take():
            waiting = self._waiting.pop(id(record), None)
            if waiting is not None and not record.explained:
                self._report(waiting, findings)
            records.append(finished(record))

    def _report(self, found: Finding, findings: list[Finding]) -> None:
        key = (found.signature, found.stream, found.process, found.pid)
        last = self._reported.get(key)
        if last is not None and found.at - last < REPEAT_S:
            self.suppressed += 1
            return
        if len(self._reported) >= MAX_REMEMBERED:
            self._reported.clear()
        self._reported[key] = found.at
        findings.append(found)

    def _learn(self, tag: str, pid: int, talkative: bool) -> None:
        """Before ready no client can have put text into the log: what speaks then is really there."""
        origin = origin_of_tag(tag)
        pids = self._pids.setdefault(origin, set())
        if len(pids) < MAX_REMEMBERED and len(self._tags) < MAX_REMEMBERED:
            self._tags.add(tag)
            pids.add(pid)
            self._talkative = self._talkative or (talkative and origin is Origin.ENGINE)

    def _learn_from(self, heading: Heading) -> None:
        if heading.tag and heading.pid is not None:
            self._learn(heading.tag, heading.pid, talkative=heading.level == "INFO")
        self._nested = self._nested or bool(heading.outer)
        self._json = self._json or heading.place == "json"

    def _is_forged(self, heading: Heading) -> bool:
        """After ready: does a process speak that wasn't there, or in a way in which none has spoken?

        An engine that logs at INFO is heard from every process while it starts, so an unknown one is not believed
        then (an elastic engine that grows later is heard through its exits and its server only). Where the level is
        higher, a process may well be silent until its first error.
        """
        if not self._tags:
            return False
        if (heading.outer and not self._nested) or (heading.place == "json" and not self._json):
            return True
        if not heading.tag:
            return heading.form is Form.LOGGED and heading.origin is Origin.ENGINE and "APIServer" in self._tags
        if heading.pid in self._pids.get(heading.origin, ()):
            return False
        return heading.tag in self._tags or (self._talkative and heading.origin is not Origin.SERVER)


def _gate(info_files: frozenset[str]) -> re.Pattern[str]:
    """Matches the lines that need no look: INFO and DEBUG of the engine's logger, access lines of the HTTP server."""
    wanted = "|".join(re.escape(file) for file in sorted(info_files))
    skip = rf"(?!{wanted}:)" if wanted else ""
    return re.compile(
        r"(?:\((?P<tag>[\w:-]+) pid=(?P<pid>\d+)\) )?"
        rf"(?:(?:INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?{skip}[\w.-]+:\d+\]|INFO: +[\d\[])"
    )


def check_examples(signatures: tuple[Signature, ...]) -> None:
    """Lets every signature find its own examples and none of its near misses. Raises SignatureError."""
    matcher = Matcher(signatures)
    for signature in signatures:
        if not signature.examples:
            raise SignatureError(signature.id, "example", "expected at least one log that matches")
        if not signature.near_misses:
            raise SignatureError(signature.id, "near_miss", "expected at least one log that must not match")
        for number, example in enumerate(signature.examples):
            if signature.id not in _found(matcher, example.text, example.stream):
                raise SignatureError(signature.id, f"example[{number}]", "the signature does not find its own example")
        for number, example in enumerate(signature.near_misses):
            if signature.id in _found(matcher, example.text, example.stream):
                raise SignatureError(signature.id, f"near_miss[{number}]", "the signature matches its near miss")


def _found(matcher: Matcher, text: str, stream: str) -> set[str]:
    scanner = Scanner(matcher)
    scanned = scanner.feed(stream, text.encode() + b"\n", 0.0)
    rest = scanner.flush(float("inf"))
    return {found.signature for found in (*scanned.findings, *rest.findings)}
