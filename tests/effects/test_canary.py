"""The canary against real sockets: what is a fact about the worker, and what is our own blindness."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable

import pytest

from defib.core.events import CanaryOutcome
from defib.effects.canary import CanaryRequest, CanaryResult, send_canary

REQUEST = CanaryRequest("/v1/completions", {"prompt": "1 2 3 4", "max_tokens": 4}, {})
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(status: str, body: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    return answer


async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def ask(answer: Answer, reference: str = "", timeout_s: float = 5.0) -> CanaryResult:
    async def run() -> CanaryResult:
        ended: list[asyncio.Event] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ended.append(asyncio.Event())
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await answer(reader, writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            ended[-1].set()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            loop = asyncio.get_running_loop()
            result = await send_canary(f"127.0.0.1:{port}", REQUEST, timeout_s, loop.time, reference)
            for event in ended:
                await event.wait()
        return result

    return asyncio.run(run())


def completion(text: str, finish: str | None = "length") -> bytes:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish}]}).encode()


def test_an_answer_is_compared_with_the_first_one() -> None:
    first = ask(answering("200 OK", completion("5 6 7 8")))
    assert first.outcome is CanaryOutcome.ANSWERED and first.digest
    assert ask(answering("200 OK", completion("5 6 7 8")), first.digest).outcome is CanaryOutcome.ANSWERED
    assert ask(answering("200 OK", completion("9 9 9 9")), first.digest).outcome is CanaryOutcome.DIFFERS


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (answering("500 Internal Server Error", b"{}"), CanaryOutcome.ERROR),
        (answering("503 Service Unavailable", b""), CanaryOutcome.ERROR),
        (answering("200 OK", b'{"error": {"code": 500}}'), CanaryOutcome.ERROR),
        (answering("200 OK", completion("half", None)), CanaryOutcome.ERROR),
        (answering("200 OK", b"<html>"), CanaryOutcome.ERROR),
        (answering("401 Unauthorized", b"{}"), CanaryOutcome.BLIND),
        (answering("404 Not Found", b"{}"), CanaryOutcome.BLIND),
        (answering("400 Bad Request", b"{}"), CanaryOutcome.BLIND),
        (cut, CanaryOutcome.ERROR),
    ],
)
def test_only_the_engines_own_failure_is_a_failure(answer: Answer, outcome: CanaryOutcome) -> None:
    assert ask(answer).outcome is outcome


def test_silence_is_a_timeout() -> None:
    assert ask(silent, timeout_s=0.2).outcome is CanaryOutcome.TIMEOUT


def test_a_port_where_nobody_listens_any_more_is_refused() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    result = asyncio.run(send_canary(address, REQUEST, 2.0, lambda: 0.0))
    assert result.outcome is CanaryOutcome.REFUSED


def test_a_private_socket_that_is_gone_is_refused() -> None:
    result = asyncio.run(send_canary("unix:/nonexistent/w1.sock", REQUEST, 2.0, lambda: 0.0))
    assert result.outcome is CanaryOutcome.REFUSED


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ask(answering("200 OK", completion("x"))).outcome is CanaryOutcome.ANSWERED
