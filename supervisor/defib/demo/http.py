"""A small HTTP/1.1 server with uvicorn's manners: its headers, its access lines, its way to close.

Knows nothing of models. One request at a time on a connection (pipelined ones wait); a client that
goes away cancels its handler. Limits: head 64 KiB, body 64 MiB.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from defib.demo import lines

HEAD_MAX_BYTES = 64 << 10
BODY_MAX_BYTES = 64 << 20
KEEP_ALIVE_S = 5.0
"""uvicorn closes a connection that has been idle so long after an answer."""
SSE_TYPE = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request; header names in lower case, the last of several wins."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


Handler = Callable[[Request, "Responder"], Awaitable[None]]


class Server:
    """What all connections of one server share."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections: set[Connection] = set()
        self.closing = False

    def protocol(self) -> "Connection":
        """The protocol factory for `loop.create_server`."""
        return Connection(self)

    def shut_down(self) -> None:
        """Close idle connections now and the others after their answer."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

    @property
    def busy(self) -> bool:
        """Whether an answer is still going out."""
        return any(connection.busy for connection in self.connections)


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._idle: asyncio.TimerHandle | None = None
        self.client = ""

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._task is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.client = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._transport = None
        self._rest()
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._rest()
        self._buffer += data
        self._next()

    def _rest(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def close_if_idle(self) -> None:
        """For the server's shutdown."""
        if self._task is None and self._transport is not None:
            self._transport.close()

    def _next(self) -> None:
        if self._task is not None or self._transport is None:
            return
        try:
            request = take_request(self._buffer, self._continue)
        except ValueError:
            lines.uvicorn("Invalid HTTP request received.", "WARNING")
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self._transport.close()
            return
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(self._answer(request))

    def _continue(self) -> None:
        if self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _answer(self, request: Request) -> None:
        responder = Responder(self, request, self._server.closing)
        try:
            await self._server.handler(request, responder)
        except Exception as error:  # As uvicorn: logged, answered 500, the server goes on.
            await responder.crash(error)
        finally:
            self._task = None
        if self._transport is None:
            return
        if responder.last or self._server.closing:
            self._transport.close()
        else:
            self._idle = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.close_if_idle)
            self._next()

    async def send(self, data: bytes) -> None:
        """Write and wait while the client is slow. Raises ConnectionError when it has gone."""
        if self._transport is None:
            raise ConnectionResetError
        self._transport.write(data)
        await self._writable.wait()


class Responder:
    """Gives the one answer of a request."""

    def __init__(self, connection: Connection, request: Request, closing: bool) -> None:
        self._connection = connection
        self._request = request
        self._started = False
        self.last = closing or request.headers.get("connection", "").lower() == "close"

    async def json(self, status: int, value: object, extra: str = "") -> None:
        """A JSON answer, as starlette renders it."""
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        await self.whole(status, text.encode("utf-8", "replace"), "application/json", extra)

    async def whole(self, status: int, body: bytes = b"", kind: str = "", extra: str = "") -> None:
        """An answer of known length."""
        kind_field = f"content-type: {kind}\r\n" if kind else ""
        await self._head(status, f"content-length: {len(body)}\r\n{kind_field}{extra}", body)

    async def begin_events(self) -> None:
        """The head of an event stream; it leaves before the first event exists, as vLLM's does."""
        await self._head(200, f"content-type: {SSE_TYPE}\r\n", b"", "transfer-encoding: chunked\r\n")

    async def event(self, value: object) -> None:
        """One event in one chunk; a str goes out as it is."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        data = f"data: {text}\n\n".encode("utf-8", "replace")
        await self._connection.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_events(self) -> None:
        """The end of an event stream."""
        await self._connection.send(b"0\r\n\r\n")

    async def crash(self, error: Exception) -> None:
        """After an exception that the handler didn't expect."""
        if self._started or isinstance(error, ConnectionError):
            self.last = True
            return
        await self.whole(500, b"Internal Server Error", "text/plain; charset=utf-8")

    async def _head(self, status: int, fields: str, body: bytes, after: str = "") -> None:
        self._started = True
        phrase = HTTPStatus(status).phrase
        request = self._request
        lines.access(self._connection.client, request.method, request.target, status, phrase)
        close = "connection: close\r\n" if self.last else ""
        vary = "" if status == HTTPStatus.UNAUTHORIZED else "vary: Origin\r\n"
        date = formatdate(usegmt=True)
        head = f"HTTP/1.1 {status} {phrase}\r\ndate: {date}\r\nserver: uvicorn\r\n{fields}{vary}{close}{after}\r\n"
        await self._connection.send(head.encode("latin-1", "replace") + body)


def take_request(buffer: bytearray, send_continue: Callable[[], None]) -> Request | None:
    """Take a whole request off the buffer; None while it isn't complete. Raises ValueError on nonsense."""
    end = buffer.find(b"\r\n\r\n")
    if (end if end >= 0 else len(buffer)) > HEAD_MAX_BYTES:
        raise ValueError("head too long")
    if end < 0:
        return None
    start_line, *fields = buffer[:end].decode("latin-1").split("\r\n")
    method, target, version = start_line.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers: dict[str, str] = {}
    for line in fields:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(line)
        headers[name.strip().lower()] = value.strip()
    body_at = end + 4
    if "chunked" in headers.get("transfer-encoding", "").lower():
        taken = _chunked(buffer, body_at)
    else:
        length = int(headers.get("content-length") or 0)
        if not 0 <= length <= BODY_MAX_BYTES:
            raise ValueError("body too long")
        whole = len(buffer) >= body_at + length
        taken = (bytes(buffer[body_at : body_at + length]), body_at + length) if whole else None
    if taken is None:
        if headers.get("expect", "").lower() == "100-continue" and len(buffer) == body_at:
            send_continue()
        return None
    del buffer[: taken[1]]
    return Request(method, target, headers, taken[0])


def _chunked(buffer: bytearray, at: int) -> tuple[bytes, int] | None:
    body = bytearray()
    while True:
        line_end = buffer.find(b"\r\n", at)
        if line_end < 0:
            return None
        size = int(bytes(buffer[at:line_end]).split(b";")[0], 16)
        at = line_end + 2 + size + 2
        if len(body) + size > BODY_MAX_BYTES or size < 0:
            raise ValueError("body too long")
        if len(buffer) < at:
            return None
        if size == 0:
            return bytes(body), at
        body += buffer[line_end + 2 : at - 2]
