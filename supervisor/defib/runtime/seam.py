"""The seam: JSON lines over unix stream sockets between launcher, gateway and supervisor.

One server and one client for asyncio, as docs/seam.md describes them: hello with a protocol version, a
full snapshot on every connect, commands that are always answered, events to everyone, epochs, peer's uid.
Both ends are bounded. What a message means is its owner's business: nothing in here knows a verb, a gate or
a worker.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

PROTOCOL = 1
MAX_LINE_BYTES = 1 << 20
"""A longer line closes the connection that sent it."""
MAX_BACKLOG_BYTES = 4 << 20
"""A reader that leaves more than this unread is cut off; it reconnects and gets a snapshot."""
MAX_CLIENTS = 32
"""Connections a server serves at once; one more is closed without a word."""
MAX_PENDING_COMMANDS = 64
"""Commands of one connection that may wait for their answer; one more is refused."""
HELLO_S = 5.0
"""A client that has not said hello by then is closed."""
RECONNECT_FIRST_S, RECONNECT_LAST_S = 0.05, 1.0
CALL_S = 5.0
"""Default deadline of a command."""
MAX_SOCKET_PATH_BYTES = 100
"""Longer paths than this (the kernel's limit is 107) are reached through their folder's descriptor."""

Message = dict[str, Any]
ErrorName = Literal["stale_epoch", "stale_generation", "unknown_verb", "bad_request", "refused", "failed"]
Handler = Callable[[str, Message], Message | Awaitable[Message]]


class SeamError(Exception):
    """A command that got no `ok` reply."""


class SeamRefused(SeamError):
    """The other side said no. Handlers of a server raise it too, and its fields become the reply."""

    def __init__(self, error: ErrorName, message: str) -> None:
        self.error: ErrorName = error
        self.message = message
        super().__init__(f"{error}: {message}")


class SeamLost(SeamError):
    """There is no connection, or it ended before the reply came: whether the command was done is unknown."""


class SeamTimeout(SeamError):
    """No reply in time: whether the command was done is unknown."""


class _BadLine(Exception):
    """A line that is too long, isn't JSON or isn't an object."""


@dataclass(slots=True)
class _Lines:
    """Bytes to JSON objects; keeps an unfinished line, up to MAX_LINE_BYTES of it."""

    rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Message]:
        """The objects whose lines these bytes complete. Raises _BadLine."""
        self.rest += data
        messages: list[Message] = []
        start = 0
        while (end := self.rest.find(b"\n", start)) >= 0:
            messages.append(self._parse(bytes(self.rest[start:end])))
            start = end + 1
        if start:
            del self.rest[:start]
        if len(self.rest) > MAX_LINE_BYTES:
            raise _BadLine("line too long")
        return messages

    @staticmethod
    def _parse(line: bytes) -> Message:
        if len(line) > MAX_LINE_BYTES:
            raise _BadLine("line too long")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _BadLine(f"bad JSON: {error}") from None
        if not isinstance(message, dict):
            raise _BadLine("not a JSON object")
        return message


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _peer_is_ours(transport: asyncio.BaseTransport) -> bool:
    """Whether the process at the other end runs as us or as root."""
    sock = transport.get_extra_info("socket")
    # uvloop's socket object has no getsockopt: ask through a duplicate of the descriptor.
    with socket.socket(fileno=os.dup(sock.fileno())) as own:
        credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", credentials)[1]
    return uid in (0, os.geteuid())


class _ReachablePath:
    """A name of a socket that fits the kernel's 107 bytes: itself, or through a descriptor of its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = -1

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= MAX_SOCKET_PATH_BYTES:
            return str(self._path)
        self._folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._folder >= 0:
            os.close(self._folder)


def _bind(path: Path) -> socket.socket:
    """A listening socket at `path`, mode 0600; replaces what an earlier run left there, in one step."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _ReachablePath(fresh) as name:
            sock.bind(name)
        fresh.chmod(0o600)
        sock.listen(MAX_CLIENTS)
        fresh.replace(path)
    except BaseException:
        sock.close()
        fresh.unlink(missing_ok=True)
        raise
    sock.setblocking(False)
    return sock


class SeamServer:
    """Serves one seam socket.

    `snapshot()` returns the fields of the snapshot. `handle(verb, message)` returns the fields of the reply,
    or an awaitable of them, and raises SeamRefused to say no. With `check_epoch`, a hello must carry an
    epoch, and hellos and commands with a lower one than the highest seen are refused. `on_clients(n)` says
    how many clients are greeted, whenever that changes.
    """

    def __init__(
        self,
        path: Path | str,
        who: str,
        instance: str,
        snapshot: Callable[[], Message],
        handle: Handler,
        *,
        check_epoch: bool = True,
        on_clients: Callable[[int], None] | None = None,
        hello_s: float = HELLO_S,
    ) -> None:
        self.path = Path(path)
        self.who, self.instance = who, instance
        self.snapshot, self.handle = snapshot, handle
        self.check_epoch, self.hello_s = check_epoch, hello_s
        self.epoch = 0
        """The highest epoch that any client named."""
        self.events_dropped = 0
        """Events that were longer than a line may be."""
        self._on_clients = on_clients
        self._clients: set[_ServerSide] = set()
        self._server: asyncio.AbstractServer | None = None
        self._inode = 0

    async def start(self) -> None:
        """Binds the socket and listens. OSError where the folder can't be written."""
        sock = _bind(self.path)
        self._inode = self.path.stat().st_ino
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _ServerSide(self), sock=sock)

    async def stop(self) -> None:
        """Closes every connection and removes the socket, if it is still ours."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for client in list(self._clients):
            client.close()
        await asyncio.sleep(0)
        try:
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        except FileNotFoundError:
            pass

    def event(self, name: str, **fields: Any) -> None:
        """Sends an event to every client that has its snapshot."""
        if not self._clients:
            return
        line = _line({"type": "event", "event": name, **fields})
        if len(line) > MAX_LINE_BYTES:
            self.events_dropped += 1
            return
        for client in list(self._clients):
            client.write(line)

    @property
    def clients(self) -> int:
        """Connections that said hello and were accepted."""
        return sum(1 for client in self._clients if client.greeted)

    def _add(self, client: _ServerSide) -> bool:
        if len(self._clients) >= MAX_CLIENTS:
            return False
        self._clients.add(client)
        return True

    def _refuse_epoch(self, epoch: object) -> SeamRefused | None:
        """Why this epoch is refused; None: it is fine, and now the highest seen."""
        if not self.check_epoch:
            return None
        if not _is_count(epoch):
            return SeamRefused("bad_request", "`epoch` must be a count")
        if epoch < self.epoch:
            return SeamRefused("stale_epoch", f"epoch {epoch} is over, {self.epoch} is current")
        self.epoch = epoch
        return None

    def _greeted(self) -> None:
        if self._on_clients is not None:
            self._on_clients(self.clients)

    def _remove(self, client: _ServerSide) -> None:
        self._clients.discard(client)
        if client.greeted:
            self._greeted()


class _ServerSide(asyncio.Protocol):
    """One client's connection, as the server sees it."""

    def __init__(self, server: SeamServer) -> None:
        self._server = server
        self._lines = _Lines()
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._epoch = 0
        self.greeted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not _peer_is_ours(transport) or not self._server._add(self):
            self.close()
            return
        server = self._server
        self._deadline = asyncio.get_running_loop().call_later(server.hello_s, self.close)
        hello = {"type": "hello", "who": server.who, "protocol": PROTOCOL, "instance": server.instance}
        self.write(_line({**hello, "pid": os.getpid()}))
        snapshot: Message = {"type": "snapshot", **server.snapshot()}
        if server.check_epoch:
            snapshot.setdefault("epoch", server.epoch)
        self.write(_line(snapshot))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()
        for task in self._tasks:
            task.cancel()
        self._server._remove(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                if self._transport is not None:
                    self._take(message)
        except _BadLine:
            self.close()

    def write(self, line: bytes) -> None:
        """Sends one line; cuts a reader that doesn't read."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() + len(line) > MAX_BACKLOG_BYTES:
            self._transport.abort()
            return
        self._transport.write(line)

    def close(self) -> None:
        """Ends the connection after what was written."""
        if self._transport is not None:
            self._transport.close()

    def _take(self, message: Message) -> None:
        if message.get("type") == "hello" and not self.greeted:
            self._take_hello(message)
        elif message.get("type") == "command" and self.greeted:
            self._take_command(message)
        elif message.get("type") in ("hello", "command"):
            self._turn_away("say hello first, and once")

    def _take_hello(self, message: Message) -> None:
        epoch = message.get("epoch")
        if message.get("protocol") != PROTOCOL:
            self._turn_away(f"protocol {message.get('protocol')!r:.20} is not spoken here, {PROTOCOL} is")
        elif (refusal := self._server._refuse_epoch(epoch)) is not None:
            self._turn_away(str(refusal))
        else:
            self._epoch = epoch if _is_count(epoch) else 0
            self.greeted = True
            if self._deadline is not None:
                self._deadline.cancel()
            self._server._greeted()

    def _turn_away(self, reason: str) -> None:
        self.write(_line({"type": "refused", "reason": reason}))
        self.close()

    def _take_command(self, message: Message) -> None:
        number, verb = message.get("id"), message.get("verb")
        if not isinstance(number, int) or not isinstance(verb, str):
            self._reply(number, SeamRefused("bad_request", "a command has an `id` (int) and a `verb` (text)"))
            return
        refusal = self._server._refuse_epoch(message.get("epoch", self._epoch))
        if refusal is not None:
            self._reply(number, refusal)
        elif len(self._tasks) >= MAX_PENDING_COMMANDS:
            self._reply(number, SeamRefused("refused", "too many commands are waiting for their answer"))
        else:
            self._do(number, verb, message)

    def _do(self, number: int, verb: str, message: Message) -> None:
        try:
            answer = self._server.handle(verb, message)
        except SeamRefused as refusal:
            self._reply(number, refusal)
        except Exception as error:
            self._report(number, verb, error)
        else:
            if not inspect.isawaitable(answer):
                self._reply(number, answer)
                return
            task = asyncio.ensure_future(self._finish(number, verb, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, number: int, verb: str, answer: Awaitable[Message]) -> None:
        try:
            self._reply(number, await answer)
        except SeamRefused as refusal:
            self._reply(number, refusal)
        except Exception as error:
            self._report(number, verb, error)

    def _report(self, number: int, verb: str, error: Exception) -> None:
        """A handler's bug: the caller gets an answer, the loop's exception handler gets the bug."""
        self._reply(number, SeamRefused("failed", f"{verb}: {type(error).__name__}: {error}"))
        context = {"message": f"seam handler of {verb!r} failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)

    def _reply(self, number: object, answer: Message | SeamRefused) -> None:
        head = {"type": "reply", "id": number}
        if isinstance(answer, SeamRefused):
            line = _line({**head, "ok": False, "error": answer.error, "message": answer.message[:2000]})
        else:
            line = _line({**head, "ok": True, **answer})
        if len(line) > MAX_LINE_BYTES:
            line = _line({**head, "ok": False, "error": "failed", "message": "the reply is too long"})
        self.write(line)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class SeamClient:
    """One end of a seam that keeps itself connected.

    `on_snapshot(message)` after every (re)connect, `on_event(message)` for each event, `on_lost(reason)` once
    for each connection that ended; a refusal's reason begins with `refused: `. A failed attempt to connect is
    no event: it is tried again after 0.05 s, growing to 1 s.
    """

    def __init__(
        self,
        path: Path | str,
        who: str,
        epoch: int | None,
        on_snapshot: Callable[[Message], None],
        on_event: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.path = Path(path)
        self.who, self.epoch = who, epoch
        self.on_snapshot, self.on_event, self.on_lost = on_snapshot, on_event, on_lost
        self.hello: Message = {}
        """The server's hello on the current or last connection."""
        self._line: _ClientSide | None = None
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    def start(self) -> None:
        """Begins to connect, and to reconnect for ever, in a task of the running loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    async def stop(self) -> None:
        """Ends the connection and the reconnecting; waiting calls get SeamLost. `on_lost` is not called."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._line is not None:
            self._line.abandon("stopped")
            self._line = None

    @property
    def connected(self) -> bool:
        """Whether a connection is up and has brought its snapshot."""
        return self._line is not None and self._line.ready

    async def call(self, verb: str, *, timeout_s: float = CALL_S, **fields: Any) -> Message:
        """Sends a command and returns its reply. Raises SeamRefused, SeamLost or SeamTimeout."""
        line = self._line
        if line is None or not line.ready:
            raise SeamLost(f"{verb}: no connection to {self.path.name}")
        self._number += 1
        command: Message = {"type": "command", "id": self._number, "verb": verb}
        if self.epoch is not None:
            command["epoch"] = self.epoch
        reply = line.ask(self._number, {**command, **fields})
        try:
            async with asyncio.timeout(timeout_s):
                answer = await reply
        except TimeoutError:
            raise SeamTimeout(f"{verb}: no reply from {self.path.name} in {timeout_s:g} s") from None
        finally:
            line.forget(command["id"])
        if answer.get("ok") is True:
            return answer
        raise SeamRefused(answer.get("error", "failed"), str(answer.get("message", "")))

    async def _keep_connected(self) -> None:
        delay_s = RECONNECT_FIRST_S
        while True:
            line = _ClientSide(self)
            if await self._connect(line):
                self._line = line
                reason = await line.ended
                self._line = None
                if line.ready and not reason.startswith("refused"):
                    delay_s = RECONNECT_FIRST_S
                self.on_lost(reason)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RECONNECT_LAST_S)

    async def _connect(self, line: _ClientSide) -> bool:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HELLO_S):
                with _ReachablePath(self.path) as name:
                    await loop.create_unix_connection(lambda: line, name)
        except (OSError, TimeoutError):
            return False
        return True


class _ClientSide(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, client: SeamClient) -> None:
        self._client = client
        self._lines = _Lines()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._reason = "connection closed"
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ready = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not _peer_is_ours(transport):
            self._end("the server runs as another user")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.ready = False
        if exc is not None:
            self._reason = f"connection failed: {exc}"
        self._fail_waiting()
        if not self.ended.done():
            self.ended.set_result(self._reason)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                if not self.ended.done():
                    self._take(message)
        except _BadLine as error:
            self._end(f"the server sent a bad line: {error}")

    def ask(self, number: int, command: Message) -> asyncio.Future[Message]:
        """Sends a command; the future gets its reply or SeamLost."""
        if self._transport is None:
            raise SeamLost(self._reason)
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._transport.write(_line(command))
        return reply

    def forget(self, number: int) -> None:
        """Nobody waits for this reply any more."""
        self._waiting.pop(number, None)

    def abandon(self, reason: str) -> None:
        """Ends the connection at once."""
        if not self.ended.done():
            self.ended.set_result(reason)
        self._end(reason)
        self._fail_waiting()

    def _end(self, reason: str) -> None:
        self._reason = reason
        self.ready = False
        if self._transport is not None:
            self._transport.abort()

    def _fail_waiting(self) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(SeamLost(self._reason))
        self._waiting.clear()

    def _take(self, message: Message) -> None:
        kind = message.get("type")
        if kind == "reply":
            reply = self._waiting.pop(cast(int, message.get("id")), None)
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif kind == "event":
            self._client.on_event(message)
        elif kind == "hello":
            self._greet(message)
        elif kind == "snapshot":
            self.ready = True
            self._client.on_snapshot(message)
        elif kind == "refused":
            self._end(f"refused: {message.get('reason', '')}")

    def _greet(self, message: Message) -> None:
        if message.get("protocol") != PROTOCOL:
            self._end(f"refused: the server speaks protocol {message.get('protocol')!r:.20}, not {PROTOCOL}")
            return
        self._client.hello = message
        hello: Message = {"type": "hello", "who": self._client.who, "protocol": PROTOCOL}
        if self._client.epoch is not None:
            hello["epoch"] = self._client.epoch
        if self._transport is not None:
            self._transport.write(_line(hello))
