"""The health sensor against a real socket: what it reports once, and what it keeps to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from defib.core.events import HealthFailed, Ready
from defib.sensors.health import Health


class Endpoint:
    """Answers every request with the status of the moment; None: closes at once."""

    def __init__(self) -> None:
        self.status: int | None = 503
        self.asked = 0

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.asked += 1
                if self.status is None:
                    break
                writer.write(f"HTTP/1.1 {self.status} X\r\ncontent-length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_ready_is_said_once_and_503_only_after_it() -> None:
    async def run() -> None:
        endpoint, events = Endpoint(), []
        address = await endpoint.start()
        health = Health("/health", asyncio.get_running_loop().time, events.append)
        task = asyncio.create_task(health.run())
        await health.watch(1, address)
        await until(lambda: endpoint.asked >= 2)
        assert events == []
        endpoint.status = 200
        await until(lambda: bool(events))
        asked = endpoint.asked
        health.nudge()
        await until(lambda: endpoint.asked > asked)
        assert [type(e) for e in events] == [Ready]
        for _ in range(2):
            endpoint.status, asked = 503, endpoint.asked
            health.nudge()
            await until(lambda asked=asked: endpoint.asked > asked)
        await until(lambda: len(events) > 1)
        assert [type(e) for e in events] == [Ready, HealthFailed]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        endpoint.server.close()

    asyncio.run(run())


def test_no_probe_is_sent_while_tokens_prove_life() -> None:
    async def run() -> None:
        endpoint, events = Endpoint(), []
        endpoint.status = 200
        address = await endpoint.start()
        clock = asyncio.get_running_loop().time
        health = Health("/health", clock, events.append)
        health.token_at = clock() + 3600
        task = asyncio.create_task(health.run())
        await health.watch(1, address)
        for _ in range(5):
            health.nudge()
            await asyncio.sleep(0)
        assert endpoint.asked == 0
        health.token_at = 0.0
        health.nudge()
        await until(lambda: bool(events))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        endpoint.server.close()

    asyncio.run(run())


def test_a_worker_that_cannot_be_asked_is_ready_when_started_and_a_port_when_it_accepts() -> None:
    async def run() -> None:
        events: list[Ready | HealthFailed] = []
        health = Health("", asyncio.get_running_loop().time, events.append)
        await health.watch(1, "")
        assert [type(e) for e in events] == [Ready]
        endpoint = Endpoint()
        address = await endpoint.start()
        task = asyncio.create_task(health.run())
        await health.watch(2, address)
        await until(lambda: len(events) == 2)
        assert events[1].generation == 2 and endpoint.asked == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        endpoint.server.close()

    asyncio.run(run())
