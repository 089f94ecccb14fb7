"""Request and response heads: bytes to values, refusing what two readers could read in two ways.

The head is cut out by us and checked as raw bytes (bare LF, obs-fold, control characters); a client's is then
parsed by httptools (llhttp, strict), the worker's by splitting lines, which is faster for its few fields. Heads
that we send on are rebuilt from the parsed fields without the hop-by-hop ones; the head of an answer stays the
worker's bytes unless something in it must change. No I/O in here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import httptools

HEAD_END = b"\r\n\r\n"
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\r\n")
_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_SPECIAL = _HOP | {
    b"content-length",
    b"expect",
    b"host",
    b"http2-settings",
    b"x-defib-replay",
    b"x-forwarded-for",
    b"x-request-id",
}
_READ = _HOP | {b"content-length", b"content-type", b"content-encoding"}
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [^\r\n]*)?")
Fields = list[tuple[bytes, bytes]]
Framing = Literal["none", "length", "chunked", "close"]


class BadHead(Exception):
    """A head that we don't serve; `status` and the message go to whoever sent it."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(slots=True)
class RequestHead:
    """One request's head. `length` -1: chunked; 0: no body."""

    method: str
    target: bytes
    path: str
    version: str
    fields: Fields
    """As they came, less hop-by-hop fields, lengths, and those that are ours to set."""
    length: int
    keep_alive: bool
    expects_continue: bool
    websocket: bool
    no_replay: bool
    request_id: bytes | None
    forwarded_for: bytes | None
    raw: bytes = b""
    """The bytes, kept only where they are passed on as they are (websocket)."""

    def to_worker(self, framing: bytes, request_id: bytes | None, peer: str) -> bytes:
        """The head as the worker gets it. `framing`: the field that describes the body, with its CRLF, or nothing."""
        parts = [self.method.encode(), b" ", self.target, b" HTTP/1.1\r\n"]
        for name, value in self.fields:
            parts += (name, b": ", value, b"\r\n")
        chosen = request_id if request_id is not None else self.request_id
        if chosen is not None:
            parts += (b"X-Request-Id: ", chosen, b"\r\n")
        if peer:
            before = self.forwarded_for + b", " if self.forwarded_for else b""
            parts += (b"X-Forwarded-For: ", before, peer.encode(), b"\r\n")
        parts += (framing, b"\r\n")
        return b"".join(parts)


class _Collector:
    """httptools' callbacks."""

    __slots__ = ("fields", "target")

    def __init__(self) -> None:
        self.target = b""
        self.fields: Fields = []

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))


def check_head(head: bytes) -> None:
    """Refuses raw bytes that no head may have. `head` includes its empty line. Raises BadHead."""
    lines = head.count(b"\r\n")
    if lines != head.count(b"\n") or lines != head.count(b"\r"):
        raise BadHead(400, "a line of the head ends without CRLF")
    if head.find(b"\r\n ") >= 0 or head.find(b"\r\n\t") >= 0:
        raise BadHead(400, "a folded line in the head")
    if len(head.translate(None, _CONTROLS)) != len(head):
        raise BadHead(400, "a control character in the head")


def parse_request(head: bytes) -> RequestHead:
    """A whole head, its empty line included. Raises BadHead."""
    check_head(head)
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadHead(400, str(error)[:200]) from None
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise BadHead(505, "HTTP/1.1 and HTTP/1.0 are spoken here")
    method = parser.get_method().decode()
    return _request(method, collector, version, head)


def _request(method: str, collector: _Collector, version: str, raw: bytes) -> RequestHead:
    if method == "CONNECT":
        raise BadHead(501, "this is no forward proxy")
    special: dict[bytes, bytes] = {}
    fields: Fields = []
    for name, value in collector.fields:
        low = name.lower()
        if low not in _SPECIAL:
            if low != b"host":
                fields.append((name, value))
            continue
        if low in (b"content-length", b"host", b"transfer-encoding", b"expect") and low in special:
            raise BadHead(400, f"more than one {low.decode()} field")
        special[low] = special[low] + b", " + value if low in special else value
        if low == b"host":
            fields.append((name, value))
    fields = _without_nominated(fields, special)
    target, path = _target(collector.target)
    websocket = special.get(b"upgrade", b"").lower() == b"websocket" and version == "1.1"
    return RequestHead(
        method=method,
        target=target,
        path=path,
        version=version,
        fields=fields,
        length=_body_length(special, version),
        keep_alive=version == "1.1" and b"close" not in _tokens(special.get(b"connection", b"")),
        expects_continue=_expects(special, version),
        websocket=websocket,
        no_replay=special.get(b"x-defib-replay", b"").lower() == b"never",
        request_id=special.get(b"x-request-id"),
        forwarded_for=special.get(b"x-forwarded-for"),
        raw=raw if websocket else b"",
    )


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip().lower() for token in value.split(b",")}


def _without_nominated(fields: Fields, special: dict[bytes, bytes]) -> Fields:
    """Fields that `Connection` names are for this hop only."""
    connection = special.get(b"connection")
    if connection is None or connection.lower() in (b"keep-alive", b"close"):
        return fields
    named = _tokens(connection) - {b"host"}
    return [(name, value) for name, value in fields if name.lower() not in named]


def _target(target: bytes) -> tuple[bytes, str]:
    """The target in origin form, and its path."""
    if target[:7].lower() == b"http://":
        slash = target.find(b"/", 7)
        target = target[slash:] if slash > 0 else b"/"
    if not target.startswith(b"/") and target != b"*":
        raise BadHead(400, "the request target is neither a path nor an http URL")
    return target, target.partition(b"?")[0].decode("latin-1")


def _body_length(special: dict[bytes, bytes], version: str) -> int:
    coding, length = special.get(b"transfer-encoding"), special.get(b"content-length")
    if coding is not None:
        if length is not None or version == "1.0" or coding.lower() != b"chunked":
            raise BadHead(400, "a body is framed by one Content-Length or by `Transfer-Encoding: chunked`")
        return -1
    if length is None:
        return 0
    if not length.isdigit() or len(length) > 18:
        raise BadHead(400, "Content-Length is not a number")
    return int(length)


def _expects(special: dict[bytes, bytes], version: str) -> bool:
    expect = special.get(b"expect")
    if expect is None:
        return False
    if expect.lower() != b"100-continue":
        raise BadHead(417, "only 100-continue can be expected")
    return version == "1.1"


@dataclass(slots=True)
class AnswerHead:
    """One response's head. `raw` are the worker's bytes, the empty line included."""

    raw: bytes
    status: int
    framing: Framing
    length: int
    keep_alive: bool
    event_stream: bool
    """Server-sent events that can be read (not compressed)."""
    hop: bool
    """It has fields of this hop only: it can't be passed on as it is."""
    fields: Fields

    def to_client(self, extra: bytes, close: bool, dechunked: bool) -> bytes:
        """The head as the client gets it. `extra`: whole field lines of ours; `dechunked`: the body is sent plain."""
        if close:
            extra += b"Connection: close\r\n"
        if not self.hop and not dechunked:
            return self.raw if not extra else self.raw[:-2] + extra + b"\r\n"
        parts = [self.raw[: self.raw.index(b"\r\n") + 2]]
        for name, value in self.fields:
            low = name.lower()
            if low in _HOP and (low != b"transfer-encoding" or dechunked):
                continue
            parts += (name, b": ", value, b"\r\n")
        parts += (extra, b"\r\n")
        return b"".join(parts)


def parse_answer(head: bytes, method: str) -> AnswerHead:
    """A whole head, its empty line included. Raises BadHead (its status is meaningless)."""
    check_head(head)
    lines = head.split(b"\r\n")
    status = _STATUS_LINE.fullmatch(lines[0])
    if status is None:
        raise BadHead(502, "no status line")
    fields: Fields = []
    answer = AnswerHead(head, int(status[2]), "close", 0, status[1] == b"1", False, False, fields)
    coding = length = None
    event_stream = encoded = False
    for line in lines[1:-2]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.find(b" ") >= 0 or name.find(b"\t") >= 0:
            raise BadHead(502, "a header line without a name")
        value = value.strip(b" \t")
        fields.append((name, value))
        low = name.lower()
        if low not in _READ:
            continue
        if low == b"content-length":
            if length is not None or not value.isdigit() or len(value) > 18:
                raise BadHead(502, "a bad Content-Length")
            length = int(value)
        elif low == b"content-type":
            event_stream = value.lower().startswith(b"text/event-stream")
        elif low == b"content-encoding":
            encoded = value.lower() != b"identity"
        elif low == b"transfer-encoding":
            coding = value.lower() if coding is None else b"twice"
        else:
            answer.hop = True
            if low == b"connection" and b"close" in _tokens(value):
                answer.keep_alive = False
    answer.event_stream = event_stream and not encoded
    _frame(answer, coding, length, method)
    return answer


def _frame(answer: AnswerHead, coding: bytes | None, length: int | None, method: str) -> None:
    if coding is not None and (length is not None or coding != b"chunked"):
        raise BadHead(502, "the answer's body is framed in two ways, or in an unknown one")
    if method == "HEAD" or answer.status in (204, 304) or answer.status < 200:
        answer.framing = "none"
    elif coding is not None:
        answer.framing = "chunked"
    elif length is not None:
        answer.framing, answer.length = ("length", length) if length else ("none", 0)
    else:
        answer.framing, answer.keep_alive = "close", False
