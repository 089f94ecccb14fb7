"""Connections of clients: bytes to requests, one exchange at a time, and the door they come through.

A connection reads heads and bodies, answers what is no exchange (bad requests, probes) and hands the rest to the
relay. What a client sends while its answer is under way is kept up to a limit and served afterwards.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import cast

from defib.gateway import answers
from defib.gateway.body import BodyReader
from defib.gateway.exchange import Exchange
from defib.gateway.framing import BadFraming
from defib.gateway.heads import HEAD_END, BadHead, RequestHead, parse_request
from defib.gateway.outlet import Outlet
from defib.gateway.relay import Relay
from defib.gateway.upstream import Upstream

MAX_LEADING_BLANK_BYTES = 8


class Mode(Enum):
    """What the next byte of a client is."""

    HEAD = "head"
    BODY = "body"
    BUSY = "busy"
    TUNNEL = "tunnel"
    CLOSING = "closing"


class Door:
    """All client connections of a gateway. `factory` is a protocol factory."""

    def __init__(self, relay: Relay) -> None:
        self.relay, self.limits = relay, relay.limits
        self.clients: set[Client] = set()
        self._connections = 0

    def factory(self) -> Client:
        """A protocol for one more connection."""
        self._connections += 1
        return Client(self, self._connections)

    def sweep(self) -> None:
        """Once a second: deadlines of heads, bodies, idle and stuck clients."""
        now = self.relay.loop.time()
        for client in list(self.clients):
            client.check(now)

    def drain(self) -> None:
        """Idle connections are closed; the others close after their exchange."""
        for client in list(self.clients):
            client.close_if_idle()


class Client(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_ahead",
        "_body",
        "_door",
        "_exchange",
        "_head",
        "_held_back",
        "_mode",
        "_number",
        "_paused_at",
        "_peer",
        "_relay",
        "_rest",
        "_since",
        "_transport",
        "_upstream",
        "write_paused",
    )

    def __init__(self, door: Door, number: int) -> None:
        self._door, self._relay, self._number = door, door.relay, number
        self._transport: asyncio.Transport | None = None
        self._mode = Mode.HEAD
        self._rest = b""
        """The beginning of a head."""
        self._ahead = b""
        """What came while an answer was under way."""
        self._head: RequestHead | None = None
        self._body: BodyReader | None = None
        self._exchange: Exchange | None = None
        self._upstream: Upstream | None = None
        """Where a body that isn't kept goes, or a tunnel's bytes."""
        self._held_back: set[str] = set()
        self._since = self._relay.loop.time()
        """The last time that something was heard (in a head: its first byte)."""
        self._paused_at = 0.0
        self._peer = ""
        self.write_paused = False

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Nothing is queued on top of the socket's own buffer: an event leaves in the turn in which it came.
        self._transport.set_write_buffer_limits(high=0)
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if isinstance(peer, tuple) else ""
        full = len(self._door.clients) >= self._door.limits.clients
        self._door.clients.add(self)
        if full:
            self._say(503, answers.overloaded("client connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._door.clients.discard(self)
        exchange, self._exchange = self._exchange, None
        self._mode = Mode.CLOSING
        self._drop_body()
        if exchange is not None:
            self._relay.gone(exchange)

    def pause_writing(self) -> None:
        self.write_paused, self._paused_at = True, self._relay.loop.time()
        self._hold_upstream(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        self._hold_upstream(False)

    def data_received(self, data: bytes) -> None:
        if self._mode is Mode.TUNNEL:
            if self._upstream is not None:
                self._upstream.write(data)
            return
        if self._ahead and self._mode is Mode.HEAD:  # its turn comes: nothing may overtake it
            self._ahead += data
            return
        self._read(data)

    # --- ClientPort ---

    def write(self, data: bytes) -> None:
        """See ClientPort."""
        if self._transport is not None:
            self._transport.write(data)

    def finished(self, keep: bool) -> None:
        """See ClientPort."""
        self._exchange = None
        keep = keep and self._mode is Mode.BUSY and not self._relay.draining
        self._drop_body()
        if not keep:
            self._close()
            return
        self._mode, self._head, self._since = Mode.HEAD, None, self._relay.loop.time()
        self._hold_back("ahead", False)
        if self._ahead:
            self._relay.loop.call_soon(self._read_ahead)

    def cut(self) -> None:
        """See ClientPort."""
        self._exchange = None
        self._drop_body()
        self._mode = Mode.CLOSING
        if self._transport is not None:
            self._transport.close()

    def tunnel_to(self, upstream: Upstream) -> None:
        """See ClientPort."""
        self._mode, self._upstream = Mode.TUNNEL, upstream
        if self._exchange is not None:
            self._exchange.source = self
        self._hold_back("ahead", False)
        if self._ahead:
            upstream.write(self._ahead)
            self._ahead = b""

    # --- BodySource ---

    def body_to(self, upstream: Upstream) -> None:
        """See BodySource."""
        self._upstream = upstream
        if self._body is not None:
            for part in self._body.drain():
                upstream.write(part)
        self._hold_back("source", False)

    def hold_body(self, hold: bool) -> None:
        """See BodySource."""
        self._hold_back("upstream", hold)

    @property
    def body_done(self) -> bool:
        """See BodySource."""
        return self._body is None or self._body.done

    # --- reading ---

    def _read(self, data: bytes) -> None:
        try:
            while data:
                if self._mode is Mode.HEAD:
                    data = self._take_head(data)
                elif self._mode is Mode.BODY:
                    data = self._take_body(data)
                else:
                    self._keep_for_later(data)
                    return
        except BadHead as error:
            self._say(error.status, answers.bad_request(error.status, str(error)))
        except BadFraming as error:
            self._bad_body(400, str(error))

    def _read_ahead(self) -> None:
        ahead, self._ahead = self._ahead, b""
        self._read(ahead)

    def _keep_for_later(self, data: bytes) -> None:
        if self._mode is Mode.CLOSING:
            return
        self._ahead += data
        if len(self._ahead) > self._door.limits.pipeline_bytes:
            self._hold_back("ahead", True)

    def _take_head(self, data: bytes) -> bytes:
        if not self._rest:
            data = data.lstrip(b"\r\n") if data[:MAX_LEADING_BLANK_BYTES].startswith(b"\r\n") else data
            if not data:
                return b""
            self._since = self._relay.loop.time()
        limit = self._door.limits.head_bytes
        buffer = self._rest + data
        end = buffer.find(HEAD_END, max(0, len(self._rest) - 3))
        if end < 0 or end > limit:
            if len(buffer) > limit:
                raise BadHead(431, f"the head is longer than {limit} bytes")
            if b"\n\n" in buffer:
                raise BadHead(400, "a line of the head ends without CRLF")
            self._rest = buffer
            return b""
        self._rest = b""
        head = parse_request(buffer[: end + 4])
        self._begin(head)
        return buffer[end + 4 :]

    def _begin(self, head: RequestHead) -> None:
        limits = self._door.limits
        self._head, self._mode = head, Mode.BODY
        self._body = BodyReader(head.length, self._relay, limits.body_bytes)
        if head.expects_continue and head.length:
            self.write(answers.CONTINUE)
        if self._body.done:
            self._submit()
        elif self._body.streamed:
            self._submit_streamed()

    def _take_body(self, data: bytes) -> bytes:
        body = self._body
        assert body is not None
        self._since = self._relay.loop.time()
        used = body.feed(data)
        if self._exchange is not None:
            self._pass_body_on(body)
        elif body.streamed:
            self._submit_streamed()
        elif body.done:
            self._submit()
        return data[used:] if used < len(data) else b""

    def _pass_body_on(self, body: BodyReader) -> None:
        """The body of an exchange that is under way already."""
        if self._upstream is not None:
            for part in body.drain():
                self._upstream.write(part)
        else:
            self._hold_back("source", True)
        if body.done:
            self._mode = Mode.BUSY

    def _submit(self) -> None:
        assert self._head is not None and self._body is not None
        self._mode = Mode.BUSY
        if self._head.path in self._relay.rules.probe_paths:
            probe = self._relay.probe_answer(self._head)
            if probe is not None:
                self._answer_probe(self._head, *probe)
                return
        self._accept(self._head, self._body.whole())

    def _submit_streamed(self) -> None:
        """The body is too large to keep: the exchange begins before all of it is here."""
        assert self._head is not None and self._body is not None
        self._hold_back("source", True)
        if self._body.done:
            self._mode = Mode.BUSY
        self._accept(self._head, None)

    def _accept(self, head: RequestHead, body: bytes | None) -> None:
        exchange = self._relay.accept(head, body, Outlet(self, head), self._number, self._peer)
        self._exchange = exchange
        if body is None:
            exchange.source = self
        self._relay.submit(exchange)

    def _answer_probe(self, head: RequestHead, status: int, page: bytes) -> None:
        fields = b"Content-Type: application/json\r\n"
        self.write(answers.head(status, fields, len(page), not head.keep_alive))
        if head.method != "HEAD":
            self.write(page)
        self.finished(head.keep_alive)

    def _bad_body(self, status: int, message: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:  # its beginning went to the worker
            self._relay.gone(exchange)
            self.cut()
            return
        self._say(status, answers.bad_request(status, message))

    # --- ends and bounds ---

    def _say(self, status: int, problem: answers.Problem) -> None:
        """An answer to something that is no exchange; the connection ends."""
        page = problem.body()
        fields = b"Content-Type: application/json\r\n"
        self.write(answers.head(status, fields, len(page), True) + page)
        self._close()

    def _close(self) -> None:
        """Ends the connection so that what was written arrives: what the client still sends is read and dropped."""
        self._mode = Mode.CLOSING
        self._drop_body()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._held_back.clear()
        transport.resume_reading()
        try:
            transport.write_eof()
        except (OSError, RuntimeError, NotImplementedError):
            transport.close()
            return
        self._relay.loop.call_later(self._door.limits.linger_s, transport.close)

    def _drop_body(self) -> None:
        self._upstream = None
        if self._body is not None:
            self._body.free()
            self._body = None

    def _hold_back(self, reason: str, hold: bool) -> None:
        """Stops reading from the client while any reason holds."""
        before = bool(self._held_back)
        (self._held_back.add if hold else self._held_back.discard)(reason)
        if self._transport is None or self._transport.is_closing() or before == bool(self._held_back):
            return
        if hold:
            self._transport.pause_reading()
        else:
            self._since = self._relay.loop.time()
            self._transport.resume_reading()

    def _hold_upstream(self, hold: bool) -> None:
        answer = self._exchange.answer if self._exchange is not None else None
        if answer is not None and answer.upstream is not None:
            answer.upstream.hold_back("client", hold)

    def close_if_idle(self) -> None:
        """Closes a connection that carries nothing."""
        if self._mode is Mode.HEAD and not self._rest:
            self._close()

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_flushed(self) -> None:
        """Closes a connection whose last answer has left."""
        if self._transport is not None and not self._transport.get_write_buffer_size():
            self._transport.close()

    def check(self, now: float) -> None:
        """Deadlines."""
        limits, quiet_s = self._door.limits, now - self._since
        if self.write_paused and now - self._paused_at > limits.write_stall_s:
            self.abort()
        elif self._mode is Mode.HEAD and self._rest:
            if quiet_s > limits.head_s:
                self._say(408, answers.bad_request(408, f"the head did not come within {limits.head_s:g} s"))
        elif self._mode is Mode.HEAD:
            if quiet_s > limits.idle_s:
                self._close()
        elif self._mode is Mode.BODY and not self._held_back and quiet_s > limits.body_stall_s:
            self._bad_body(408, f"nothing of the body came for {limits.body_stall_s:g} s")
