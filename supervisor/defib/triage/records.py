"""Records, and the places in them at which a line can stand. Pure values.

The place is the proof of origin: text that a client can choose never stands at a place that counts, because vLLM's
logger repeats its heading on every line of a record and repr escapes the rest. How places are told is the assembler's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from defib.triage.headings import Heading
from defib.triage.lines import Line

MAX_RECORD_LINES = 400
"""Lines kept of one record; it ends there. Real tracebacks of vLLM with all notes stay under 200."""


class Place(StrEnum):
    """Where a line stands."""

    RECORD = "record"
    """The message of a record that a logger wrote."""
    EXCEPTION = "exception"
    """The exception at the end of an engine process's traceback."""
    SERVER_EXCEPTION = "server_exception"
    """The same of the API server, of a launcher, or of we don't know whom: may be a client's text."""
    DETAIL = "detail"
    """A line after the exception in an engine process's record."""
    RAW_STDERR = "raw_stderr"
    """A line without heading on stderr, outside any traceback."""
    RAW_STDOUT = "raw_stdout"
    """The same on stdout, where a custom route may print what it likes."""
    UVICORN = "uvicorn"
    """A line of the HTTP server itself."""
    NONE = "none"
    """A frame, the rest of a message, or a place that is not believed."""


@dataclass(frozen=True, slots=True)
class Record:
    """One logical log line with its traceback. `numbers` are the first and last line; `cut`: lines not kept."""

    stream: str
    heading: Heading
    traceback: tuple[str, ...]
    exception: str
    numbers: tuple[int, int]
    at: float
    cut: bool


class Stage(StrEnum):
    MESSAGE = "message"
    FRAMES = "frames"
    AFTER = "after"


@dataclass(slots=True, eq=False)
class Open:
    """A record that may still grow."""

    stream: str
    heading: Heading
    first: int
    last: int
    at: float
    stage: Stage = Stage.MESSAGE
    engine: bool = False
    server: bool = False
    doubtful: bool = False
    more: bool = False
    exception: str = ""
    lines: list[str] = field(default_factory=list)
    explained: bool = False
    """Some signature knows this record's exception; kept for the scanner."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A line at its place. `record` is what it belongs to (still growing)."""

    line: Line
    heading: Heading
    place: Place
    record: Open


def finished(record: Open) -> Record:
    """A closed record as a value."""
    return Record(
        stream=record.stream,
        heading=record.heading,
        traceback=tuple(record.lines),
        exception=record.exception,
        numbers=(record.first, record.last),
        at=record.at,
        cut=len(record.lines) >= MAX_RECORD_LINES,
    )
