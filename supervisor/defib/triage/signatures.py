"""Signatures: named patterns, each with the places at which it counts. Pure; compiled once into one RE2 set.

RE2 matches in linear time whatever the text, also with an operator's own patterns. What a pattern means is data;
nothing here knows a CUDA error from a typing mistake.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import re2

from defib.triage.records import Place, Seen

CLASSES = (
    "poisoned_context",
    "gpu_hardware",
    "oom_gpu",
    "oom_host",
    "hang",
    "comm_failure",
    "config_error",
    "engine_bug_host",
    "shutdown",
    "healthy",
    "unknown",
)
ROLES = ("cause", "consequence", "hint", "either")
TRUSTS = ("kernel_log", "assertion", "library", "peer", "wrapper")
"""Whose word weighs more, best first."""
WHENS = ("any", "starting")
RESTARTS = ("true", "only_with_change", "false")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

MAX_FINDING_CHARS = 500
MAX_SCAN_CHARS = 4096
"""Of a longer message the beginning is matched: patterns of causes are anchored there."""
MAX_COUNTED_GAP = 64
"""`.{0,300}` unrolls into hundreds of states: refused above this."""
MAX_PATTERN_CHARS = 1000
SET_MEMORY_BYTES = 64 << 20
"""RE2's default of 8 MiB refuses a set of 150 patterns with gaps."""


class SignatureError(Exception):
    """A signature that can't be used: its id, the key, what was expected."""

    def __init__(self, signature: str, key: str, expected: str) -> None:
        self.signature, self.key, self.expected = signature, key, expected
        super().__init__(f"signature {signature!r}: {key}: {expected}")


@dataclass(frozen=True, slots=True)
class Where:
    """A place at which the patterns count.

    `files` (source files) and `levels` narrow records; `within` narrows exceptions and details to records whose
    message starts with one of these texts.
    """

    place: Place
    patterns: tuple[str, ...]
    files: tuple[str, ...] = ()
    levels: tuple[str, ...] = ("ERROR", "CRITICAL")
    within: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """Lines as they are printed, and the stream on which."""

    text: str
    stream: str = "stdout"


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature. `fault` is its class; `fallback`: reported only when nothing else explains the record."""

    id: str
    title: str
    meaning: str
    fault: str
    role: str
    where: tuple[Where, ...]
    root_layer: str
    restart_helps: str
    trust: str = "library"
    when: str = "any"
    fallback: bool = False
    not_patterns: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()
    near_misses: tuple[Example, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A match. `line` is the number in `stream`; `process`, `pid` and `rank` are what the line claims, or empty.

    `at` is the caller's time; `text` at most MAX_FINDING_CHARS.
    """

    signature: str
    fault: str
    role: str
    trust: str
    restart_helps: str
    place: Place
    stream: str
    line: int
    process: str
    pid: int | None
    rank: int | None
    text: str
    at: float


@dataclass(slots=True)
class Matcher:
    """All patterns, compiled. Raises SignatureError for a signature that can't be compiled."""

    signatures: tuple[Signature, ...]
    info_files: frozenset[str] = frozenset()
    _set: re2.Set = field(init=False)
    _owners: list[tuple[Signature, Where]] = field(init=False, default_factory=list)
    _nots: dict[str, list[re2._Regexp]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        options = _options()
        self._set = re2.Set.SearchSet(options)
        for signature in self.signatures:
            check(signature)
            self._nots[signature.id] = [re2.compile(p, options) for p in signature.not_patterns]
            for where in signature.where:
                for pattern in where.patterns:
                    self._set.Add(pattern)
                    self._owners.append((signature, where))
        try:
            self._set.Compile()
        except re2.error as error:
            raise SignatureError("*", "where.patterns", f"all together need too much memory ({error})") from error
        self.info_files = frozenset(
            file
            for signature in self.signatures
            for where in signature.where
            if {"INFO", "DEBUG"} & set(where.levels)
            for file in where.files
        )

    def match(self, seen: Seen, starting: bool) -> list[Signature]:
        """The signatures that count for this line at its place, in their order, each once."""
        if seen.place is Place.NONE:
            return []
        text = seen.heading.message[:MAX_SCAN_CHARS]
        hits = self._set.Match(text.encode("utf-8", "replace"))
        found: dict[str, Signature] = {}
        for index in sorted(hits or ()):
            signature, where = self._owners[index]
            if signature.id in found or (signature.when == "starting" and not starting):
                continue
            if _stands(where, seen) and not any(n.search(text) for n in self._nots[signature.id]):
                found[signature.id] = signature
        return list(found.values())


def finding(signature: Signature, seen: Seen, at: float) -> Finding:
    """The finding of a signature at a line."""
    heading = seen.heading
    return Finding(
        signature=signature.id,
        fault=signature.fault,
        role=signature.role,
        trust=signature.trust,
        restart_helps=signature.restart_helps,
        place=seen.place,
        stream=seen.line.stream,
        line=seen.line.number,
        process=heading.tag,
        pid=heading.pid,
        rank=heading.rank,
        text=heading.message.strip()[:MAX_FINDING_CHARS],
        at=at,
    )


def _stands(where: Where, seen: Seen) -> bool:
    heading, record = seen.heading, seen.record
    if where.place is not seen.place:
        return False
    if where.files and heading.source not in where.files:
        return False
    if where.place in (Place.RECORD, Place.UVICORN) and heading.level not in where.levels:
        return False
    return not where.within or record.heading.message.startswith(where.within)


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = SET_MEMORY_BYTES
    options.log_errors = False
    return options


_CLIENT_PLACES = (Place.SERVER_EXCEPTION, Place.UVICORN, Place.RAW_STDOUT)
"""Once clients are served, these may hold what a client chose."""

_COUNTED = re.compile(r"(?<!\\)(?:\\\\)*\{(\d+)(?:,(\d*))?\}")


def check(signature: Signature) -> None:
    """Raises SignatureError for the first thing that is wrong with a signature's own values."""
    for key, value, allowed in (
        ("class", signature.fault, CLASSES),
        ("role", signature.role, ROLES),
        ("trust", signature.trust, TRUSTS),
        ("when", signature.when, WHENS),
        ("restart_helps", signature.restart_helps, RESTARTS),
    ):
        if value not in allowed:
            raise SignatureError(signature.id, key, f"expected one of {', '.join(allowed)}; found {value!r:.60}")
    if not signature.where:
        raise SignatureError(signature.id, "where", "expected at least one place")
    for number, where in enumerate(signature.where):
        _check_where(signature, where, f"where[{number}]")
    for number, pattern in enumerate(signature.not_patterns):
        _check_pattern(signature, f"not_patterns[{number}]", pattern)


def _check_where(signature: Signature, where: Where, key: str) -> None:
    causal = signature.role in ("cause", "either")
    if where.place is Place.RECORD and not where.files:
        raise SignatureError(signature.id, f"{key}.files", "expected the source files that log this record")
    if causal and where.place in (Place.DETAIL, Place.NONE):
        raise SignatureError(signature.id, f"{key}.place", f"{where.place} can't prove a cause")
    if causal and signature.when == "any" and where.place in _CLIENT_PLACES:
        raise SignatureError(
            signature.id, f"{key}.place", f'{where.place} may hold client text; needs when = "starting"'
        )
    if unknown := [level for level in where.levels if level not in LEVELS]:
        raise SignatureError(
            signature.id, f"{key}.levels", f"expected some of {', '.join(LEVELS)}; found {unknown[0]!r}"
        )
    if not where.patterns:
        raise SignatureError(signature.id, f"{key}.patterns", "expected at least one pattern")
    for number, pattern in enumerate(where.patterns):
        _check_pattern(signature, f"{key}.patterns[{number}]", pattern)
        if causal and not pattern.startswith("^"):
            raise SignatureError(signature.id, f"{key}.patterns[{number}]", "a cause's pattern must start with ^")


def _check_pattern(signature: Signature, key: str, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise SignatureError(signature.id, key, f"longer than {MAX_PATTERN_CHARS} characters")
    for low, high in _COUNTED.findall(pattern):
        if max(int(low), int(high or 0)) > MAX_COUNTED_GAP:
            raise SignatureError(signature.id, key, f"a counted gap above {MAX_COUNTED_GAP} ({pattern!r:.80})")
    try:
        compiled = re2.compile(pattern, _options())
    except re2.error as error:
        raise SignatureError(signature.id, key, f"not a pattern that RE2 takes ({error}): {pattern!r:.80}") from error
    if compiled.search(""):
        raise SignatureError(signature.id, key, f"matches the empty text ({pattern!r:.80})")
