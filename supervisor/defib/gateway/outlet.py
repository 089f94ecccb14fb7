"""The client's side of one answer: what was sent, and how it can be ended in order.

The worker's body bytes are passed on as they are wherever the client's framing is the worker's; where it isn't
(HTTP/1.0, or a head of our own sent during a hold) the payload is framed anew. It decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from defib.gateway import answers
from defib.gateway.answers import Problem
from defib.gateway.framing import LAST_CHUNK, Piece, Scanner, chunk, scanner_for
from defib.gateway.heads import AnswerHead, Framing, RequestHead

if TYPE_CHECKING:
    from defib.gateway.upstream import Upstream

MAX_FILL_BYTES = 1 << 20
"""A chunk begun by the worker that owes more than this is not filled: the connection is ended instead."""
UNKNOWN_LEFT = MAX_FILL_BYTES + 1
"""For `Outlet.left`: nobody knows what the client expects, so the stream can't be ended in order."""


class ClientPort(Protocol):
    """What an outlet needs of a client's connection."""

    write_paused: bool
    """The client reads too slowly: nothing more should be read for it."""

    def write(self, data: bytes) -> None:
        """Sends bytes."""

    def finished(self, keep: bool) -> None:
        """The answer is complete; `keep`: the connection may carry another exchange."""

    def cut(self) -> None:
        """The answer can't be completed: the connection ends after what was sent."""

    def tunnel_to(self, upstream: Upstream) -> None:
        """From now on both sides' bytes are passed on without a look (websocket)."""


class Outlet:
    """One exchange's answer on its way to the client."""

    __slots__ = (
        "_head_only",
        "_old_client",
        "_scanner",
        "client",
        "close",
        "event_stream",
        "events",
        "framing",
        "head_sent",
        "left",
        "owes_crlf",
    )

    def __init__(self, client: ClientPort, head: RequestHead) -> None:
        self.client = client
        old_client, keep_alive = head.version == "1.0", head.keep_alive
        self._head_only = head.method == "HEAD"
        self._old_client = old_client
        """HTTP/1.0: knows no chunks."""
        self.close = not keep_alive
        self.head_sent = False
        self.event_stream = False
        self.framing: Framing = "none"
        self._scanner: Scanner | None = None
        self.events = 0
        """Events with data that were delivered."""
        self.left = 0
        """Payload bytes that the client still expects of a chunk (or of the body) that the worker began."""
        self.owes_crlf = False

    @property
    def untouched(self) -> bool:
        """Whether the client has nothing of an answer, so that another one can take its place."""
        if not self.head_sent:
            return True
        return self.event_stream and not self.events and self.framing in ("chunked", "close") and not self.left

    def send_head(self, head: AnswerHead, extra: bytes, first: bytes = b"") -> None:
        """The worker's head, with `extra` field lines of ours, and the first bytes of the body in one write."""
        if self.head_sent:
            self._frame_anew(head)
            if first:
                self.body(first)
            return
        dechunked = self._old_client and head.framing == "chunked"
        self.framing = "close" if dechunked else head.framing
        self.close = self.close or self.framing == "close"
        self.head_sent, self.event_stream, self.left = True, head.event_stream, head.length
        self._scanner = scanner_for("chunked", 0) if dechunked else None
        raw = head.to_client(extra, self.close, dechunked)
        if self._scanner is not None:
            self.client.write(raw)
            self.body(first)
        else:
            self.client.write(raw + first if first else raw)

    def send_early_head(self, incident: str) -> None:
        """A head of our own for a stream that waits: 200, and the events follow when they come."""
        self.head_sent = self.event_stream = True
        self.framing = "close" if self._old_client else "chunked"
        fields = answers.EARLY_STREAM_FIELDS + incident_field(incident)
        if self._old_client:
            self.close = True
            self.client.write(b"HTTP/1.1 200 OK\r\n" + fields + b"Connection: close\r\n\r\n")
        else:
            self.client.write(answers.head(200, fields, None, self.close))

    def comment(self) -> None:
        """A comment, for clients and proxies that count silence."""
        self.own_payload(answers.RECOVERING)

    def own_payload(self, payload: bytes) -> None:
        """Payload of ours, framed as the client expects it."""
        self.client.write(chunk(payload) if self.framing == "chunked" else payload)

    def body(self, raw: bytes) -> None:
        """Bytes of the worker's body, its framing included."""
        if self._scanner is None:
            self.client.write(raw)
            return
        pieces: list[Piece] = []
        self._scanner.feed(raw, pieces)
        for start, stop, _ in pieces:
            self.own_payload(raw[start:stop])

    def end(self, reusable: bool) -> None:
        """The worker's body is complete. `reusable` False: the client's connection can't go on."""
        if self._scanner is not None and self.framing == "chunked":
            self.client.write(LAST_CHUNK)
        self.client.finished(reusable and not self.close)

    def problem(self, problem: Problem, reusable: bool = True) -> None:
        """Ends the answer with an error of ours: plain, as a stream's last event, or by ending the connection."""
        if not self.head_sent:
            keep = reusable and not self.close
            body = problem.body()
            fields = b"Content-Type: application/json\r\n" + problem.fields()
            self.client.write(answers.head(problem.status, fields, len(body), not keep))
            if not self._head_only:
                self.client.write(body)
            self.client.finished(keep)
        elif self.event_stream:
            self.last_event(problem.event())
        else:
            self.client.cut()

    def last_event(self, event: bytes) -> None:
        """Ends a stream with this event, inside whatever chunk the worker had begun."""
        if self.framing == "length":
            if len(event) > self.left or self.left > MAX_FILL_BYTES:
                self.client.cut()
                return
            self.client.write(event.ljust(self.left, b"\n"))
        elif self.framing == "close":
            self.client.write(event)
        elif self.left > MAX_FILL_BYTES:
            self.client.cut()
            return
        else:
            self.client.write(self._fill(event))
        self.client.finished(not self.close)

    def _fill(self, event: bytes) -> bytes:
        """The event as chunks; its first bytes complete the chunk that is under way, blank lines fill it."""
        if not self.left:
            return (b"\r\n" if self.owes_crlf else b"") + chunk(event) + LAST_CHUNK
        first, rest = event[: self.left].ljust(self.left, b"\n"), event[self.left :]
        return first + b"\r\n" + (chunk(rest) if rest else b"") + LAST_CHUNK

    def _frame_anew(self, head: AnswerHead) -> None:
        """The client has a head already: does this body fit behind it as it is?"""
        fits = head.framing == self.framing
        self._scanner = None if fits else scanner_for(head.framing, head.length)
        if self.owes_crlf:
            self.client.write(b"\r\n")
        self.left, self.owes_crlf = 0, False


def incident_field(incident: str) -> bytes:
    """The header line that names the incident."""
    safe = "".join(c for c in incident if c.isalnum() or c in "-_.:")[:100]
    return f"X-Defib-Incident: {safe}\r\n".encode("ascii", "replace") if safe else b""
