"""Lines to records, and for every line at once the place at which it stands. Pure, incremental, bounded.

A finding can't wait for its record to end, so `push` answers for each line with what is known by then: which process
speaks, and whether this is the message of a record, the exception at the end of a traceback, a detail after it or
raw text. Two kinds of text carry no heading and may end in what a client chose: the HTTP server's own tracebacks and
prints; both are told apart here.
"""

from __future__ import annotations

import re
from dataclasses import replace

from defib.triage.headings import ENGINE_FILES, Form, Heading, Origin, is_json, origin_of_tag, parse, parse_json
from defib.triage.lines import Line
from defib.triage.records import MAX_RECORD_LINES, Open, Place, Seen, Stage

MAX_OPEN = 256
"""Records that may be open at once, over all processes; the oldest is closed for a new one."""

QUIET_S = 0.25
"""A record to which nothing was added for this long is complete."""

TAINT_S = 0.1
TAINT_LINES = 5_000
"""After `Exception in ASGI application` a stream is not believed for this long, or for this many lines where time
stands still (one read brings fewer): uvicorn writes the record in one go, without a heading, and its end may imitate
any line."""

CLIENT_TEXT = frozenset(
    "ValueError TypeError ValidationError HTTPException RequestValidationError TemplateError UndefinedError"  # noqa: SIM905
    " JSONDecodeError UnicodeDecodeError VLLMValidationError BadRequestError Exception AssertionError".split()
)
"""Exceptions that are raised about a request and may quote it, line breaks included: what follows one in the same
record is not believed."""

DUMP_FILES = frozenset({"dump_input.py"})
"""Files that log dumps of requests: nothing after the first line of such a record is the engine's own word."""

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = '  File "'
_ENGINE_FRAME = re.compile(
    r'  File "(?:[^"]*/)?vllm/(?:v1/(?:engine/core\.py|executor/|worker/)|worker/|executor/|engine/|model_executor/)'
)
_SERVER_FRAME = re.compile(r'  File "(?:[^"]*/)?(?:(?:starlette|fastapi|uvicorn)/|vllm/entrypoints/)')
_PROCESS_DIED = re.compile(r"Process (?:VLLM::)?(\w+?)(?:-\d+)?:$")
_EXCEPTION_NAME = re.compile(r"(?:\w+\.)*(\w+)")
_ASGI = "Exception in ASGI application"


class Assembler:
    """Joins the lines of any number of streams; `push` them in the order in which they were read."""

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], Open] = {}
        self._framed = False
        self._taint: dict[str, tuple[float, int]] = {}
        self._closed: list[Open] = []

    def push(self, line: Line, at: float) -> list[Seen]:
        """What this line is: one answer, or one per line of the traceback in a JSON object."""
        if is_json(line.text) and (parsed := parse_json(line.text)) is not None:
            return self._json(line, at, *parsed)
        heading = parse(line.text)
        if heading.form is Form.LOGGED:
            seen = self._logged(line, heading, at)
        elif heading.form is Form.RAW:
            seen = self._raw(line, heading, at)
        else:
            seen = self._single(line, heading, at)
        if self._taint and self._tainted(line.stream, at) and seen.place is not Place.UVICORN:
            seen = replace(seen, place=Place.NONE)
        return [seen]

    def flush(self, at: float, but: frozenset[str] = frozenset()) -> None:
        """Closes what has been quiet for QUIET_S, but not on streams whose next line is on its way."""
        for key, record in list(self._open.items()):
            if at - record.at >= QUIET_S and record.stream not in but:
                self._close(key)

    def take(self) -> list[Open]:
        """The records that were closed since the last call, oldest first."""
        closed, self._closed = self._closed, []
        return closed

    @property
    def is_idle(self) -> bool:
        """No record is open: nothing depends on what comes next."""
        return not self._open

    def _logged(self, line: Line, heading: Heading, at: float) -> Seen:
        key = (line.stream, heading.tag, heading.pid, "" if heading.tag else heading.place)
        self._framed = self._framed or line.more
        record = self._open.get(key)
        if record is None or not self._continues(record, heading):
            record = self._begin(key, line, heading, at)
            record.engine = heading.origin is Origin.ENGINE
            record.server = not record.engine
            place = _record_place(heading)
            # vLLM 0.8 logs `EngineCore hit an exception: Traceback ...`; a frame goes on with a record that was cut.
            if heading.message.endswith(_TRACEBACK) or heading.message.startswith(_FRAME):
                record.stage = Stage.FRAMES
        else:
            place = self._advance(record, heading.message)
            self._grow(key, record, line, heading.message, at)
        record.more = line.more
        if self._framed and not line.more:
            self._close(key)
        return Seen(line, heading, place, record)

    def _continues(self, record: Open, heading: Heading) -> bool:
        """Is this line part of the open record? Exactly known where `\\r\\n` joins lines, else by its look."""
        head, message = record.heading, heading.message
        if (head.place, head.stamp, head.level) != (heading.place, heading.stamp, heading.level):
            return False
        if record.more or record.stage is not Stage.MESSAGE:
            return True
        return not message or message[0] in " \t" or message.startswith(_TRACEBACK)

    def _raw(self, line: Line, heading: Heading, at: float) -> Seen:
        key = (line.stream, heading.tag, heading.pid, heading.rank, "raw")
        record = self._open.get(key)
        if record is not None and at - record.at >= QUIET_S:
            self._close(key)
            record = None
        message = heading.message
        if record is None:
            return self._begin_raw(key, line, heading, at)
        place = self._advance(record, message)
        if place in (Place.DETAIL, Place.RECORD):
            trusted = record.engine and not record.server and not record.doubtful
            place = _raw_place(line, heading) if trusted else Place.NONE
        elif place is Place.EXCEPTION and line.stream == "stdout" and heading.origin is Origin.UNKNOWN:
            place = Place.SERVER_EXCEPTION
        self._grow(key, record, line, message, at)
        return Seen(line, heading, place, record)

    def _begin_raw(self, key: tuple[object, ...], line: Line, heading: Heading, at: float) -> Seen:
        """A bare traceback begins (its first line may be glued to a progress bar and lost), or this is just text."""
        message = heading.message
        died = _PROCESS_DIED.match(message)
        if not died and not message.startswith((_TRACEBACK, _FRAME)):
            alone = Open(line.stream, heading, line.number, line.number, at)
            return Seen(line, heading, _raw_place(line, heading), alone)
        record = self._begin(key, line, heading, at)
        record.engine = heading.origin is Origin.ENGINE
        record.server = heading.origin is Origin.SERVER
        if died:
            record.engine = record.engine or origin_of_tag(died[1]) is Origin.ENGINE
        else:
            record.stage = Stage.FRAMES
            _note_frame(record, message)
        return Seen(line, heading, Place.NONE, record)

    def _single(self, line: Line, heading: Heading, at: float) -> Seen:
        """A line that is a record by itself; it ends bare text of the same process."""
        key = (line.stream, heading.tag, heading.pid, heading.rank, "raw")
        self._close(key)
        if heading.form is Form.NATIVE:
            place = Place.RECORD if line.stream != "stdout" or heading.origin is Origin.ENGINE else Place.NONE
            return Seen(line, heading, place, Open(line.stream, heading, line.number, line.number, at))
        record = Open(line.stream, heading, line.number, line.number, at, server=True)
        if heading.message.startswith(_ASGI):
            self._taint[line.stream] = (at + TAINT_S, TAINT_LINES)
            record = self._begin(key, line, heading, at)
            record.server = True
        return Seen(line, heading, Place.UVICORN, record)

    def _json(self, line: Line, at: float, heading: Heading, trace: tuple[str, ...]) -> list[Seen]:
        record = Open(line.stream, heading, line.number, line.number, at)
        record.engine = heading.origin is Origin.ENGINE and heading.form is Form.LOGGED
        record.server = not record.engine
        seen = [Seen(line, heading, _record_place(heading) if heading.form is Form.LOGGED else Place.UVICORN, record)]
        record.lines.extend(trace[:MAX_RECORD_LINES])
        for text in trace[:MAX_RECORD_LINES]:
            seen.append(Seen(line, replace(heading, message=text), self._advance(record, text), record))
        self._closed.append(record)
        return seen

    def _advance(self, record: Open, message: str) -> Place:
        """The place of a further line of a record, and the record's new stage."""
        if message.startswith(_TRACEBACK) or (record.stage is Stage.MESSAGE and message.startswith(_FRAME)):
            record.stage = Stage.FRAMES
            _note_frame(record, message)
            return Place.NONE
        if record.stage is Stage.MESSAGE or record.heading.source in DUMP_FILES:
            return Place.NONE
        if record.stage is Stage.FRAMES:
            if not message or message[0] in " \t":
                _note_frame(record, message)
                return Place.NONE
            record.stage = Stage.AFTER
            return _exception_place(record, message)
        return Place.DETAIL if record.engine and not record.server else Place.NONE

    def _begin(self, key: tuple[object, ...], line: Line, heading: Heading, at: float) -> Open:
        self._close(key)
        if len(self._open) >= MAX_OPEN:
            self._close(next(iter(self._open)))
        record = self._open[key] = Open(line.stream, heading, line.number, line.number, at)
        return record

    def _grow(self, key: tuple[object, ...], record: Open, line: Line, message: str, at: float) -> None:
        record.last, record.at = line.number, at
        record.lines.append(message)
        if len(record.lines) >= MAX_RECORD_LINES:
            self._close(key)

    def _close(self, key: tuple[object, ...]) -> None:
        record = self._open.pop(key, None)
        if record is not None:
            self._closed.append(record)

    def _tainted(self, stream: str, at: float) -> bool:
        until, lines = self._taint.get(stream, (at, 0))
        if at >= until or lines <= 0:
            self._taint.pop(stream, None)
            return False
        self._taint[stream] = (until, lines - 1)
        return True


def _record_place(heading: Heading) -> Place:
    """A server process doesn't log from an engine's files: where every print is tagged, this one was printed."""
    if heading.tag and heading.origin is not Origin.ENGINE and heading.source in ENGINE_FILES:
        return Place.NONE
    return Place.RECORD


def _raw_place(line: Line, heading: Heading) -> Place:
    """On stdout only an engine process whose every line is prefixed may speak raw."""
    if heading.origin is Origin.SERVER:
        return Place.RAW_STDOUT
    return Place.RAW_STDERR if line.stream != "stdout" or heading.origin is Origin.ENGINE else Place.RAW_STDOUT


def _note_frame(record: Open, message: str) -> None:
    """Where no tag does, a frame tells whose traceback this is. A server frame outweighs: a request came through."""
    if record.heading.tag and record.heading.origin is Origin.ENGINE:
        return
    if _SERVER_FRAME.match(message):
        record.server = True
    elif _ENGINE_FRAME.match(message):
        record.engine = True


def _exception_place(record: Open, message: str) -> Place:
    doubtful = record.doubtful
    name = _EXCEPTION_NAME.match(message)
    if name and name[1] in CLIENT_TEXT:
        record.doubtful = True
    if not record.exception or not doubtful:
        record.exception = message[:500]
    if doubtful:
        return Place.NONE
    return Place.EXCEPTION if record.engine and not record.server else Place.SERVER_EXCEPTION
