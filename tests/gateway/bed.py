"""The test bed of the gateway: a worker that does as it is told, callers that record every byte, a supervisor that
rules over the real seam. Everything runs in one loop; the limits are small so that nothing has to be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h11
import uvloop

from defib.gateway.rules import Limits, ReplayRule, rules_of
from defib.gateway.server import Gateway, Place
from defib.runtime.clock import boottime
from defib.runtime.seam import Message, SeamClient

DEADLINE_S = 20.0
COMPLETIONS = "/v1/completions"
SMALL = Limits(
    park_s=0.3, hold_plain_s=1.0, hold_stream_s=2.0, silent_stream_s=0.2, comment_s=0.1, progress_s=0.02, counts_s=0.05
)
RULES = rules_of(
    (ReplayRule("POST", COMPLETIONS, ("store", "background")), ReplayRule("GET", "/v1/models")),
    frozenset({"/health", "/ping", "/metrics"}),
)


def run(scenario: Coroutine[Any, Any, None], plain_loop: bool = False) -> None:
    """Runs one test's story, with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    (asyncio.run if plain_loop else uvloop.run)(bounded())


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """The first true value of a condition."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S / 2
    while not (value := condition()):
        assert loop.time() < deadline, f"not reached: {what or condition}"
        await asyncio.sleep(0.005)
    return value


# --- the worker ---


@dataclass
class Talk:
    """One request at the worker, and the ways to answer it."""

    head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n")[0].decode()

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode().lower() == name.lower():
                return value.strip().decode()
        return None

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0)

    def cut(self) -> None:
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Until the gateway has left."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(4096):
                pass


Act = Callable[[Talk], Awaitable[None]]


def address_of(server: asyncio.Server) -> str:
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Worker:
    """Answers its n-th request with the n-th act (the last one from then on)."""

    def __init__(self, *acts: Act) -> None:
        self.acts = acts
        self.talks: list[Talk] = []
        self.connections = 0
        self.address = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, path: Path | None = None) -> Worker:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._serve, str(path))
            self.address = f"unix:{path}"
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.address = address_of(self._server)
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                await self._one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        talk = Talk(head, b"", reader, writer)
        if (length := talk.header("content-length")) is not None:
            talk.body = await reader.readexactly(int(length))
        elif talk.header("transfer-encoding"):
            while size := int(await reader.readuntil(b"\r\n"), 16):
                talk.body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        self.talks.append(talk)
        act = self.acts[min(len(self.talks), len(self.acts)) - 1]
        await act(talk)
        if writer.transport.is_closing():
            raise ConnectionResetError


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode()


def plain(body: bytes = b'{"choices":[]}', status: str = "200 OK") -> Act:
    async def act(talk: Talk) -> None:
        await talk.send(head("Content-Type: application/json", f"Content-Length: {len(body)}", status=status) + body)

    return act


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


SSE_HEAD = head("content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked")
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ERROR = (
    b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
)
ERROR_500 = b'{"error":{"message":"EngineCore died","type":"InternalServerError","param":null,"code":500}}'


def token(text: str, finish: str = "null") -> bytes:
    return b'data: {"id":"c","choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n' % (
        text.encode(),
        finish.encode(),
    )


TOKENS = [token("a"), token("b"), token("c", '"stop"'), DONE]
WHOLE = SSE_HEAD + b"".join(chunk(event) for event in TOKENS) + LAST


def stream(*events: bytes, end: bytes = LAST) -> Act:
    async def act(talk: Talk) -> None:
        await talk.send(SSE_HEAD, *(chunk(event) for event in events or TOKENS), *([end] if end else []))

    return act


def cut_after(*parts: bytes) -> Act:
    async def act(talk: Talk) -> None:
        await talk.send(*parts)
        talk.writer.close()

    return act


async def silent(talk: Talk) -> None:
    """Never answers."""
    await talk.gone()


# --- the caller ---


@dataclass
class Got:
    """What a caller has received of one answer."""

    raw: bytes = b""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def data(self) -> list[str]:
        """The data of the whole events of a stream."""
        return [part[6:] for part in self.body.decode().split("\n\n")[:-1] if part.startswith("data: ")]


def parsed(raw: bytes, method: str = "POST", eof: bool = True) -> Got:
    """What h11 makes of the bytes of one answer."""
    got = Got(raw)
    oracle = h11.Connection(h11.CLIENT)
    oracle.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    oracle.send(h11.EndOfMessage())
    oracle.receive_data(raw)
    if eof:
        oracle.receive_data(b"")
    try:
        while True:
            event = oracle.next_event()
            if isinstance(event, h11.Response):
                got.status = event.status_code
                got.headers = {k.decode(): v.decode() for k, v in event.headers}
            elif isinstance(event, h11.Data):
                got.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                got.complete = True
                return got
            elif event is h11.NEED_DATA or event is h11.PAUSED:
                return got
    except h11.RemoteProtocolError:
        return got


def request(path: str = COMPLETIONS, body: bytes = b'{"prompt":"p"}', method: str = "POST", *lines: str) -> bytes:
    fields = ["Host: gateway", *lines]
    if method == "POST":
        fields.append(f"Content-Length: {len(body)}")
    return "\r\n".join((f"{method} {path} HTTP/1.1", *fields, "", "")).encode() + (body if method == "POST" else b"")


STREAM_BODY = b'{"prompt":"p","stream":true}'


class Caller:
    """One client connection; reads in the background until its end."""

    def __init__(self, house: House) -> None:
        self._house = house
        self.raw = b""
        self.ended = False
        self._task: asyncio.Task[None] | None = None
        self.writer: asyncio.StreamWriter

    async def open(self, reading: bool = True) -> Caller:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._house.port)
        self._house.callers.append(self)
        if reading:
            self.listen()
        return self

    def listen(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                self.raw += data
        self.ended = True

    async def send(self, data: bytes) -> Caller:
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def until(self, part: bytes) -> None:
        """Until this has been received."""
        await until(lambda: part in self.raw or self.ended, repr(part))
        assert part in self.raw, self.raw

    async def all(self, method: str = "POST") -> Got:
        """The one complete answer of this connection, or what came before it was cut."""
        await until(lambda: self.ended or parsed(self.raw, method, False).complete, "an answer's end")
        return parsed(self.raw, method, self.ended)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


# --- the house ---


class House:
    """One gateway with its supervisor."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(128)
        self.port: int = self.sock.getsockname()[1]
        place = Place("test", folder / "g.sock", folder / "journal")
        self.gateway = Gateway(place, RULES, limits, boottime)
        self.events: list[Message] = []
        self.snapshots: list[Message] = []
        self.callers: list[Caller] = []
        self.supervisor = SeamClient(
            folder / "g.sock", "supervisor", 1, self.snapshots.append, self.events.append, lambda reason: None
        )

    async def supervise(self) -> None:
        self.supervisor.start()
        await until(lambda: self.supervisor.connected and self.gateway.seam.clients, "a supervisor")

    async def open(self, worker: Worker, generation: int = 1, ramp_per_s: float = 0.0) -> Message:
        return await self.rule("open", generation=generation, address=worker.address, ramp_per_s=ramp_per_s)

    async def hold(self, generation: int = 1, ready_in_s: float | None = None, lease_s: float = 30.0) -> Message:
        fields: dict[str, Any] = {"ready_in_s": ready_in_s, "incident": "i-7", "lease_s": lease_s}
        return await self.rule("hold", generation=generation, **fields)

    async def pause(self, generation: int = 1, lease_s: float = 30.0) -> Message:
        return await self.rule("pause", generation=generation, lease_s=lease_s)

    async def rule(self, verb: str, **fields: Any) -> Message:
        return await self.supervisor.call(verb, **fields)

    async def caller(self, reading: bool = True) -> Caller:
        return await Caller(self).open(reading)

    async def ask(self, raw: bytes) -> Caller:
        return await (await self.caller()).send(raw)

    async def get(self, raw: bytes, method: str = "POST") -> Got:
        caller = await self.ask(raw)
        got = await caller.all(method)
        await caller.close()
        return got

    def told(self, name: str) -> list[Message]:
        return [event for event in self.events if event["event"] == name]

    @property
    def counts(self) -> dict[str, int]:
        counts = self.gateway.relay.teller.counts
        return {name: getattr(counts, name) for name in counts.__slots__}

    def balanced(self) -> bool:
        """Every accepted exchange ended in exactly one way."""
        counts = self.counts
        ends = ("answered", "passed_error", "refused", "given_up", "ended_with_error")
        return counts["accepted"] == sum(counts[end] for end in ends) and not self.gateway.relay.exchanges


@contextlib.asynccontextmanager
async def house(folder: Path, *workers: Worker, supervised: bool = True, **limits: Any) -> AsyncIterator[House]:
    """A gateway whose gate is open for the first worker, as generation 1; the others are started, no more."""
    made = House(folder, replace(SMALL, **limits))
    await made.gateway.start(made.sock)
    for worker in workers:
        await worker.start()
    try:
        if supervised:
            await made.supervise()
            if workers:
                await made.open(workers[0])
        yield made
        await until(made.balanced, f"a balance: {made.counts}")
    finally:
        for caller in made.callers:
            await caller.close()
        await made.supervisor.stop()
        await made.gateway.stop()
        for worker in workers:
            await worker.stop()
