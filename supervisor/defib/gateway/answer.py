"""What one dispatch of an exchange brings back, from the worker's first byte to its last.

It follows the framing, keeps back what smells of a dying engine and says so (`Desk.failed`); whether that is parked,
released or taken back is the desk's decision. It never delivers a byte of an answer that is parked.

    head -> pass      bytes go on as they come
         -> keep      a short plain answer, or a failing one: goes on when complete, or when released
         -> stream    events go on one by one, up to the first bad one
         -> tunnel    websocket
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from defib.gateway import answers
from defib.gateway.events import Kind, error_object
from defib.gateway.exchange import Exchange
from defib.gateway.framing import CloseScanner, Piece, Scanner, scanner_for
from defib.gateway.heads import HEAD_END, AnswerHead, BadHead, parse_answer
from defib.gateway.outlet import UNKNOWN_LEFT
from defib.gateway.rules import Limits
from defib.gateway.stream import StreamFilter
from defib.gateway.telling import Outcome, Teller
from defib.gateway.upstream import Upstream

FAILING = frozenset({500, 502, 503, 504})
"""Statuses of a plain answer that smell of a dying engine."""


class Desk(Protocol):
    """Who decides about answers."""

    limits: Limits
    teller: Teller

    def failed(self, answer: Answer, kind: Kind, status: int) -> None:
        """It smells of a dying engine: park it, release it, or end its exchange."""

    def noticed(self, answer: Answer, kind: Kind, status: int) -> None:
        """The same of an answer that goes on regardless."""

    def returned(self, answer: Answer, upstream: Upstream, reusable: bool) -> None:
        """The worker's side is over; the connection goes back."""

    def lost_idle(self, answer: Answer) -> bool:
        """A kept connection ended before a byte of the answer. True: it is sent again on a new one."""
        ...

    def delivered(self, answer: Answer) -> None:
        """The first byte of the answer went to the client."""

    def done(self, answer: Answer, outcome: Outcome) -> None:
        """The client has all it will get."""

    def fields(self, exchange: Exchange) -> bytes:
        """Header lines of ours for an answer whose head isn't sent yet."""
        ...


class Answer:
    """One attempt's answer."""

    __slots__ = (
        "_buffer",
        "_desk",
        "_events_before",
        "_head_out",
        "_scanner",
        "_tokens",
        "cut",
        "ended",
        "exchange",
        "filter",
        "got_bytes",
        "head",
        "kept",
        "outcome",
        "refused",
        "released",
        "reused",
        "since",
        "smell",
        "streaming",
        "take",
        "timer",
        "tunnel",
        "upstream",
    )

    def __init__(self, desk: Desk, exchange: Exchange, since: float) -> None:
        self._desk, self.exchange, self.since = desk, exchange, since
        self.upstream: Upstream | None = None
        self.head: AnswerHead | None = None
        self.kept = bytearray()
        self.filter: StreamFilter | None = None
        self.smell: Kind | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.outcome = Outcome.ANSWERED
        self.got_bytes = self.ended = self.cut = self.refused = self.released = False
        self.reused = False
        self.streaming = self.tunnel = self._head_out = False
        self._buffer = b""
        self._scanner: Scanner | None = None
        # Takes the worker's bytes; raises BadHead and BadFraming. The function and not the bound method, which
        # would be a cycle for the collector to find, for every answer.
        self.take: Callable[[Answer, bytes], None] = Answer._take_head
        self._tokens = 0
        self._events_before = exchange.outlet.events

    @property
    def head_waits(self) -> bool:
        """A stream's head came and no event yet: the client knows nothing of it."""
        return self.streaming and not self._head_out and self.smell is None

    @property
    def _early(self) -> bool:
        """The client was promised a stream, and this is something else: needed whole, to make an event of it."""
        return self.exchange.outlet.head_sent and not self._head_out and not self.streaming

    @property
    def events(self) -> int:
        """Events with data that this exchange's client got."""
        return self._events_before + (self.filter.watch.events if self.filter is not None else 0)

    # --- from the worker ---

    def bad(self) -> None:
        """The worker's bytes can't be followed: nothing more is read of them."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()
        self._lost()

    def closed(self, exc: Exception | None) -> None:
        """The connection ended."""
        self.upstream = None
        if self.ended:
            return
        if self.tunnel:
            self.exchange.outlet.client.cut()
            self._desk.done(self, Outcome.ANSWERED)
        elif not self.got_bytes and self._desk.lost_idle(self):
            return
        elif exc is None and isinstance(self._scanner, CloseScanner):
            self._ends_by_closing()
        else:
            self._lost()

    def _lost(self) -> None:
        self.cut = True
        if self.released or (self.smell is None and not self.exchange.outlet.untouched and not self.streaming):
            # Half of a plain answer is out: nothing can be done for it but to end as the worker did.
            if not self.released:
                self._desk.noticed(self, Kind.CUT, 0)
            self.exchange.outlet.client.cut()
            self._desk.done(self, Outcome.PASSED_ERROR)
        elif self.smell is None:
            self._desk.failed(self, Kind.CUT, 0)

    def _take_head(self, data: bytes) -> None:
        self.got_bytes = True
        buffer = self._buffer + data
        end = buffer.find(HEAD_END, max(0, len(self._buffer) - 3))
        if end < 0:
            if len(buffer) > self._desk.limits.answer_head_bytes:
                raise BadHead(502, "the head is too long")
            self._buffer = buffer
            return
        self._buffer = b""
        head = parse_answer(buffer[: end + 4], self.exchange.head.method)
        rest = buffer[end + 4 :]
        if head.status < 200:
            self._inform(head)
            if rest:
                self.take(self, rest)
            return
        self.head = head
        self._choose(head)
        if self.exchange.answer is not self:
            return
        if self.take is Answer._keep and len(rest) == head.length and self.smell is None and not self._early:
            self._send(rest)  # the usual short answer: all of it is here
            self._body_ended(False)
        elif head.framing == "none":
            self._body_ended(bool(rest))
        elif rest:
            self.take(self, rest)
        elif self.take is Answer._pass:
            self._send(b"")

    def _inform(self, head: AnswerHead) -> None:
        exchange = self.exchange
        if head.status == 101:
            if not exchange.head.websocket or self.upstream is None:
                raise BadHead(502, "an upgrade that nobody asked for")
            self.tunnel = exchange.outlet.head_sent = True
            self.take = Answer._tunnel
            exchange.outlet.client.write(head.raw)
            exchange.outlet.client.tunnel_to(self.upstream)
        elif head.status != 100 and exchange.head.version == "1.1" and not exchange.outlet.head_sent:
            exchange.outlet.client.write(head.raw)

    def _choose(self, head: AnswerHead) -> None:
        """How this answer is passed on."""
        exchange, limits = self.exchange, self._desk.limits
        scanner = self._scanner = scanner_for(head.framing, head.length)
        failing = head.status in FAILING and not exchange.probe
        if failing:
            self.outcome = Outcome.PASSED_ERROR
        if head.event_stream and head.status == 200 and exchange.generates and head.framing != "none":
            self.streaming = True
            self.filter = StreamFilter(scanner, limits.event_bytes)
            self.take = Answer._stream
        elif exchange.outlet.head_sent or (
            exchange.known and not failing and head.framing == "length" and head.length <= limits.plain_kept_bytes
        ):
            self.take = Answer._keep
        else:
            self.take = Answer._pass
        if not failing:
            return
        if exchange.known:
            self.take = Answer._keep
            self._desk.failed(self, Kind.STATUS, head.status)
        else:
            self._desk.noticed(self, Kind.STATUS, head.status)

    # --- the ways of passing on ---

    def _tunnel(self, data: bytes) -> None:
        self.exchange.outlet.client.write(data)

    def _pass(self, data: bytes) -> None:
        end = self._scanner.feed(data) if self._scanner is not None else len(data)
        if end < 0:
            self._send(data)
            return
        self._send(data[:end])
        self._body_ended(end < len(data))

    def _keep(self, data: bytes) -> None:
        end = self._scanner.feed(data) if self._scanner is not None else len(data)
        self.kept += data if end < 0 else data[:end]
        if end >= 0:
            self._body_ended(end < len(data))
        elif len(self.kept) > self._desk.limits.parked_bytes:
            if self.smell is None or self.released:  # only `_early` ones come here: a long something else
                self.drop()
                self._complete()
            else:
                self._stop_reading()

    def _stream(self, data: bytes) -> None:
        watched, outlet = self.filter, self.exchange.outlet
        assert watched is not None
        if outlet.events and watched.is_token(data):  # `events`: the head and a first event are out
            teller = self._desk.teller
            teller.tokens += 1
            teller.token_at = teller.clock()
            self._tokens += 1
            outlet.body(data)
            return
        passed = watched.feed(data)
        if watched.watch.tokens != self._tokens:
            self._desk.teller.saw_tokens(watched.watch.tokens - self._tokens)
            self._tokens = watched.watch.tokens
        self._after_events(watched, passed)
        if watched.ended and not self.ended:
            self._body_ended(watched.excess)

    def _after_events(self, watched: StreamFilter, passed: bytes) -> None:
        outlet = self.exchange.outlet
        if passed:
            self._send(passed)
        outlet.events = self._events_before + watched.watch.events
        outlet.left = UNKNOWN_LEFT if watched.blind else watched.left
        outlet.owes_crlf = watched.owes_crlf
        if watched.bad is not None and not watched.blind:
            if self.smell is None:
                self._desk.failed(self, watched.bad, 0)
            if len(watched.kept) > self._desk.limits.parked_bytes:
                self._stop_reading()

    def _send(self, first: bytes) -> None:
        outlet = self.exchange.outlet
        if self._head_out or self.head is None:
            outlet.body(first)
            return
        self._head_out = True
        outlet.send_head(self.head, self._desk.fields(self.exchange), first)
        self._desk.delivered(self)

    def _stop_reading(self) -> None:
        if self.upstream is not None:
            self.upstream.hold_back("parked", True)

    # --- ends ---

    def _ends_by_closing(self) -> None:
        if self.filter is not None:
            self._after_events(self.filter, self.filter.close())
        if self.exchange.answer is self and not self.ended:
            self._body_ended(True)

    def _body_ended(self, excess: bool) -> None:
        """The worker's last byte is here. A parked answer stays parked; its connection is free."""
        self.ended = True
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            keep = self.head is not None and self.head.keep_alive and not excess
            self._desk.returned(self, upstream, keep)
        exchange = self.exchange
        if not self.streaming and exchange.computes and self.head is not None and self.head.status == 200:
            self._desk.teller.saw_tokens(1)
        if self.exchange.answer is self and (self.smell is None or self.released):
            self._complete()

    def _complete(self) -> None:
        outlet = self.exchange.outlet
        if self._early:
            outlet.last_event(self._error_event())
        else:
            if not self._head_out:
                self._send(bytes(self.kept))
                self.kept.clear()
            outlet.end(self.exchange.source is None or self.exchange.source.body_done)
        self._desk.done(self, self.outcome)

    def _error_event(self) -> bytes:
        """A plain answer for a client that was promised a stream: its error as the stream's last event."""
        assert self.head is not None
        pieces: list[Piece] = []
        scanner_for(self.head.framing, self.head.length).feed(bytes(self.kept), pieces)
        payload = b"".join(bytes(self.kept[start:stop]) for start, stop, _ in pieces)
        error = error_object(payload) if len(payload) <= self._desk.limits.parked_bytes else None
        if error is None:
            text = f"The inference server answered this request with status {self.head.status} and no stream."
            error = {"message": text, "type": "defib_not_a_stream", "param": None, "code": self.head.status}
        return b"data: " + answers.json_page({"error": error}) + b"\n\n"

    # --- from the desk ---

    def give_head(self) -> None:
        """The head of a stream that has no event yet goes out."""
        if self.head_waits:
            self._send(b"")

    def release(self) -> None:
        """Unchanged, whatever it is."""
        self.stop_timer()
        self.released = True
        self.outcome = Outcome.PASSED_ERROR
        if self.refused or self.cut:
            self._release_cut()
            return
        if self.filter is not None:
            kept = self.filter.let_go()
            self.exchange.outlet.left = UNKNOWN_LEFT
        else:
            if self._early:
                if self.ended:
                    self._complete()
                elif self.upstream is not None:
                    self.upstream.hold_back("parked", False)
                return
            kept = bytes(self.kept)
            self.kept.clear()
            self.take = Answer._pass
        self._send(kept)
        if self.ended:
            self._complete()
        elif self.upstream is not None:
            self.upstream.hold_back("parked", False)

    def _release_cut(self) -> None:
        outlet = self.exchange.outlet
        if outlet.untouched:
            what = "it could not be reached" if self.refused else "it ended the connection"
            outlet.problem(answers.unreachable(what))
        else:
            if self.filter is not None and self.filter.kept:
                outlet.body(self.filter.let_go())
            outlet.client.cut()
        self._desk.done(self, Outcome.PASSED_ERROR)

    def drop(self) -> None:
        """The worker's side ends now; nothing more comes from it."""
        self.stop_timer()
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()

    def stop_timer(self) -> None:
        """No parking limit runs any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
