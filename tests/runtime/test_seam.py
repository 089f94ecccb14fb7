from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from defib.runtime import seam
from defib.runtime.seam import Message, SeamClient, SeamLost, SeamRefused, SeamServer, SeamTimeout


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return asyncio.run if request.param == "asyncio" else uvloop.run


Run = Callable[[Coroutine[Any, Any, None]], None]


async def until(condition: Callable[[], Any]) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "not reached"
        await asyncio.sleep(0.005)


class Ends:
    """A server with a few verbs, and clients that remember what they were told."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / "s.sock"
        self.never = asyncio.Event()
        self.state = 0
        self.server = SeamServer(self.path, "launcher", "i", lambda: {"state": self.state}, self.handle, **options)
        self.told: list[Any] = []
        self.clients: list[SeamClient] = []

    def handle(self, verb: str, message: Message) -> Any:
        if verb == "later":
            return self.later(message)
        if verb == "never":
            return self.wait()
        if verb == "no":
            raise SeamRefused("stale_generation", "gone")
        if verb == "bug":
            raise KeyError("bug")
        if verb == "long":
            return {"text": "x" * seam.MAX_LINE_BYTES}
        return {"verb": verb, "said": message.get("say")}

    async def wait(self) -> Message:
        await self.never.wait()
        return {}

    async def later(self, message: Message) -> Message:
        await asyncio.sleep(0)
        if message.get("refuse"):
            raise SeamRefused("refused", "later")
        return {"late": True}

    def client(self, epoch: int | None = 1) -> SeamClient:
        def lost(reason: str) -> None:
            self.told.append(reason)

        made = SeamClient(self.path, "supervisor", epoch, self.told.append, self.told.append, lost)
        self.clients.append(made)
        made.start()
        return made

    async def connected(self, epoch: int | None = 1) -> SeamClient:
        made = self.client(epoch)
        await until(lambda: made.connected)
        return made


@contextlib.asynccontextmanager
async def ends(folder: Path, **options: Any) -> AsyncIterator[Ends]:
    made = Ends(folder, **options)
    await made.server.start()
    try:
        yield made
    finally:
        for client in made.clients:
            await client.stop()
        await made.server.stop()


async def lines_of(reader: asyncio.StreamReader, number: int) -> list[Message]:
    async with asyncio.timeout(5):
        return [json.loads(await reader.readline()) for _ in range(number)]


@contextlib.asynccontextmanager
async def raw(path: Path, hello: Message | None = None) -> AsyncIterator[Any]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    if hello is not None:
        await lines_of(reader, 2)
        writer.write(json.dumps(hello).encode() + b"\n")
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


HELLO = {"type": "hello", "who": "supervisor", "protocol": 1, "epoch": 3}


def test_a_client_gets_hello_and_snapshot_and_every_command_its_answer(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            client = await both.connected()
            assert client.hello["who"] == "launcher"
            assert client.hello["instance"] == "i"
            assert both.told == [{"type": "snapshot", "state": 0, "epoch": 0}]
            replies = await asyncio.gather(*(client.call("echo", say=n) for n in range(50)), client.call("later"))
            assert [reply.get("said") for reply in replies[:50]] == list(range(50))
            assert replies[50]["late"] is True
            for verb, fields in (("no", {}), ("later", {"refuse": 1})):
                with pytest.raises(SeamRefused):
                    await client.call(verb, **fields)
            with pytest.raises(SeamTimeout):
                await client.call("never", timeout_s=0.05)
            with pytest.raises(SeamRefused, match="too long"):
                await client.call("long")

    run(story())


def test_a_handlers_bug_is_answered_and_reported(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        async with ends(tmp_path) as both:
            client = await both.connected()
            with pytest.raises(SeamRefused, match="failed: bug: KeyError"):
                await client.call("bug")
            assert "seam handler" in reported[0]["message"]

    run(story())


def test_events_reach_every_client_in_order(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            await both.connected()
            await both.connected()
            for number in range(100):
                both.server.event("tick", number=number)
            await until(lambda: len(both.told) == 202)
            numbers = [m["number"] for m in both.told if m["type"] == "event"]
            assert sorted(numbers) == sorted([*range(100)] * 2)

    run(story())


def test_a_client_outlives_its_server_and_takes_a_fresh_snapshot(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        both = Ends(tmp_path)
        client = both.client()
        with pytest.raises(SeamLost):
            await client.call("echo")
        await both.server.start()
        await until(lambda: client.connected)
        waiting = asyncio.ensure_future(client.call("never", timeout_s=9))
        await client.call("echo")
        await both.server.stop()
        with pytest.raises(SeamLost):
            await waiting
        await until(lambda: isinstance(both.told[-1], str))
        assert not both.path.exists()
        both.state = 7
        await both.server.start()
        await until(lambda: client.connected)
        assert both.told[-1]["state"] == 7
        await client.stop()
        await both.server.stop()

    run(story())


def test_a_lower_epoch_is_refused_in_hellos_and_in_commands(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            old = await both.connected(3)
            await old.call("echo")
            new = await both.connected(4)
            await new.call("echo")
            with pytest.raises(SeamRefused) as refused:
                await old.call("echo")
            assert refused.value.error == "stale_epoch"
            both.client(2)
            await until(lambda: any("refused: stale_epoch" in str(told) for told in both.told))
            assert both.server.epoch == 4

    run(story())


def test_a_server_without_epochs_asks_for_none(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path, check_epoch=False) as both:
            client = await both.connected(None)
            assert (await client.call("echo", say=1))["said"] == 1
            assert "epoch" not in both.told[0]

    run(story())


@pytest.mark.parametrize("protocol", [0, 2, None, "1"])
def test_another_protocol_is_refused(run: Run, tmp_path: Path, protocol: Any) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            async with raw(both.path, {**HELLO, "protocol": protocol}) as (reader, _):
                assert (await lines_of(reader, 1))[0]["type"] == "refused"
                assert await reader.read() == b""

    run(story())


def test_a_client_that_says_no_hello_is_closed(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path, hello_s=0.05) as both:
            async with raw(both.path) as (reader, _):
                await lines_of(reader, 2)
                assert await reader.read() == b""
            async with raw(both.path) as (reader, writer):
                writer.write(b'{"type":"command","id":1,"verb":"echo","epoch":1}\n')
                assert (await lines_of(reader, 3))[2]["type"] == "refused"

    run(story())


@pytest.mark.parametrize(
    "line", [b"x\n", b"[1]\n", b'"a"\n', b"\xff\n", b"{}" + b" " * seam.MAX_LINE_BYTES, b"[" * 100_000 + b"\n"]
)
def test_a_bad_line_closes_that_connection_and_nothing_else(run: Run, tmp_path: Path, line: bytes) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            client = await both.connected()
            async with raw(both.path, HELLO) as (reader, writer):
                writer.write(line)
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            assert (await client.call("echo", say=1, epoch=3))["said"] == 1

    run(story())


def test_a_line_exactly_at_the_limit_is_taken(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            async with raw(both.path, HELLO) as (reader, writer):
                frame = b'{"type":"command","id":1,"verb":"echo","pad":"%b"}'
                writer.write(frame % (b"x" * (seam.MAX_LINE_BYTES - len(frame) + 2)) + b"\n")
                assert (await lines_of(reader, 1))[0]["ok"] is True

    run(story())


def test_half_lines_and_many_lines_at_once_are_understood(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            async with raw(both.path, HELLO) as (reader, writer):
                lines = b"".join(b'{"type":"command","id":%d,"verb":"echo"}\n' % n for n in range(20))
                for at in range(0, len(lines), 7):
                    writer.write(lines[at : at + 7])
                    await asyncio.sleep(0)
                assert [m["id"] for m in await lines_of(reader, 20)] == list(range(20))

    run(story())


def test_a_reader_that_does_not_read_is_cut_off_and_the_others_go_on(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            client = await both.connected()
            async with raw(both.path, HELLO):
                await until(lambda: both.server.clients == 2)
                for _ in range(20):
                    both.server.event("big", text="x" * 500_000)
                    await client.call("echo", epoch=3)
                await until(lambda: both.server.clients == 1)
            assert (await client.call("echo", say=2, epoch=3))["said"] == 2

    run(story())


def test_an_event_longer_than_a_line_is_dropped_and_counted(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            client = await both.connected()
            both.server.event("huge", text="x" * seam.MAX_LINE_BYTES)
            await client.call("echo")
            assert both.server.events_dropped == 1
            assert client.connected

    run(story())


def test_too_many_waiting_commands_are_refused(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            client = await both.connected()
            waiting = [
                asyncio.ensure_future(client.call("never", timeout_s=9)) for _ in range(seam.MAX_PENDING_COMMANDS)
            ]
            await until(lambda: sum(len(side._tasks) for side in both.server._clients) == seam.MAX_PENDING_COMMANDS)
            with pytest.raises(SeamRefused, match="too many"):
                await client.call("never")
            both.never.set()
            await asyncio.gather(*waiting)

    run(story())


def test_one_connection_too_many_is_closed_without_a_word(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with ends(tmp_path) as both:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(seam.MAX_CLIENTS):
                    await stack.enter_async_context(raw(both.path, HELLO))
                reader, _ = await stack.enter_async_context(raw(both.path))
                assert await reader.read() == b""

    run(story())


def test_the_socket_is_ours_alone_and_replaces_a_stale_one(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "s.sock").write_bytes(b"left by an earlier run")
        async with ends(tmp_path) as both:
            assert both.path.stat().st_mode & 0o777 == 0o600
            await both.connected()
            assert os.listdir(tmp_path) == ["s.sock"]
            other = Ends(tmp_path)
            await other.server.start()
            await both.server.stop()
            assert both.path.exists(), "the newer server's socket stays"
            await other.server.stop()

    run(story())


def test_a_path_too_long_for_the_kernel_works(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        folder = tmp_path / ("long" * 20) / ("path" * 20)
        folder.mkdir(parents=True)
        async with ends(folder) as both:
            client = await both.connected()
            assert (await client.call("echo", say=1))["said"] == 1

    run(story())


def test_the_number_of_clients_is_told_when_it_changes(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        numbers: list[int] = []
        async with ends(tmp_path, on_clients=numbers.append) as both:
            first = await both.connected()
            await first.call("echo")
            second = await both.connected()
            await second.call("echo")
            await first.stop()
            await until(lambda: numbers == [1, 2, 1])

    run(story())
