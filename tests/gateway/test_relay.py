"""What goes through untouched, and what never gets through."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from pathlib import Path

import pytest
from tests.gateway.bed import (
    COMPLETIONS,
    DONE,
    LAST,
    SSE_HEAD,
    STREAM_BODY,
    WHOLE,
    Act,
    Talk,
    Worker,
    address_of,
    chunk,
    head,
    house,
    parsed,
    plain,
    request,
    run,
    silent,
    stream,
    token,
    until,
)


def raw_answer(raw: bytes, rng: random.Random) -> Act:
    async def act(talk: Talk) -> None:
        rest = raw
        while rest:
            size = rng.choice((1, 7, 100, 5000))
            await talk.send(rest[:size])
            rest = rest[size:]

    return act


def random_answer(rng: random.Random) -> bytes:
    """Head and chunked body of a stream whose chunks and events have borders of their own."""
    payload = b"".join(token("t" * rng.randint(0, 300)) for _ in range(rng.randint(1, 30)))
    payload += token("", '"stop"') + DONE
    body = b""
    while payload:
        size = rng.randint(1, 600)
        body += chunk(payload[:size])
        payload = payload[size:]
    return SSE_HEAD + body + LAST


@pytest.mark.parametrize("plain_loop", [False, True])
def test_streams_are_the_workers_bytes_whatever_their_chunks_and_segments(tmp_path: Path, plain_loop: bool) -> None:
    async def story() -> None:
        rng = random.Random(7)
        answers = [random_answer(rng) for _ in range(40)]
        worker = Worker(*(raw_answer(answer, rng) for answer in answers))
        async with house(tmp_path, worker) as home:
            for answer in answers:
                got = await home.get(request(body=STREAM_BODY))
                assert hashlib.sha256(got.raw).digest() == hashlib.sha256(answer).digest()
                assert got.complete
            assert worker.connections == 1, "kept alive and used again"

    run(story(), plain_loop)


def test_events_arrive_one_by_one_while_the_stream_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        go_on = asyncio.Event()

        async def act(talk: Talk) -> None:
            await talk.send(SSE_HEAD, chunk(token("first")))
            await go_on.wait()
            await talk.send(chunk(token("second", '"stop"')), chunk(DONE), LAST)

        async with house(tmp_path, Worker(act)) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await caller.until(b"first")
            assert b"second" not in caller.raw
            go_on.set()
            assert (await caller.all()).complete

    run(story())


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("POST", head("Content-Length: 5", "X-Y:  odd   spacing ") + b"hello"),
        ("POST", head("Content-Length: 300000") + b"x" * 300000),
        ("POST", head("Transfer-Encoding: chunked") + b"5;ext=1\r\nhello\r\n0\r\nX-Trailer: t\r\n\r\n"),
        ("POST", head("Content-Length: 0")),
        ("POST", head(status="204 No Content")),
        ("GET", head("ETag: x", status="304 Not Modified")),
        ("HEAD", head("Content-Length: 5000")),
        ("POST", head("Content-Length: 17", status="400 Bad Request") + b'{"error":{"m":1}}'),
        ("POST", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + head("Content-Length: 1") + b"x"),
        ("POST", WHOLE),
    ],
)
def test_each_kind_of_answer_goes_through_byte_for_byte(tmp_path: Path, method: str, raw: bytes) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw_answer(raw, random.Random(1)))) as home:
            for path in (COMPLETIONS, "/other"):
                got = await home.get(request(path, method=method), method)
                assert got.raw == raw
                assert got.complete
            assert home.counts["answered"] == 2

    run(story())


def test_a_body_that_ends_with_its_connection_ends_the_clients_too(tmp_path: Path) -> None:
    async def story() -> None:
        async def act(talk: Talk) -> None:
            await talk.send(head("X: y"), b"until the end")
            talk.writer.close()

        async with house(tmp_path, Worker(act)) as home:
            caller = await home.ask(request("/other"))
            await until(lambda: caller.ended)
            got = parsed(caller.raw)
            assert (got.body, got.headers["connection"]) == (b"until the end", "close")
            assert home.counts["answered"] == 1

    run(story())


def test_an_http_1_0_client_gets_no_chunks(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(stream())) as home:
            raw = request(body=STREAM_BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
            caller = await home.ask(raw)
            await until(lambda: caller.ended)
            got = parsed(caller.raw)
            assert "transfer-encoding" not in got.headers
            assert got.data[-1] == "[DONE]"
            assert got.complete

    run(story())


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async def story() -> None:
        async def act(talk: Talk) -> None:
            await plain(talk.body)(talk)

        async with house(tmp_path, Worker(act)) as home:
            bodies = [b"%d" % number for number in range(20)]
            caller = await home.ask(b"".join(request(body=body) for body in bodies) + request("/health", method="GET"))
            await until(lambda: caller.raw.count(b"HTTP/1.1 200") == 21)
            found = [part.split(b"\r\n\r\n")[1] for part in caller.raw.split(b"HTTP/1.1 200 OK")[1:]]
            assert found[:20] == bodies
            assert b'"ok"' in found[20]

    run(story())


def test_pipelined_bytes_are_bounded_and_nothing_of_them_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        go_on = asyncio.Event()

        async def act(talk: Talk) -> None:
            await go_on.wait()
            await plain(b"%d" % len(talk.body))(talk)

        async with house(tmp_path, Worker(act), pipeline_bytes=1000) as home:
            caller = await home.ask(request(body=b"a" * 10))
            sending = asyncio.create_task(caller.send(request(body=b"b" * 6_000_000)))
            await until(lambda: any("ahead" in client._held_back for client in home.gateway.door.clients))
            go_on.set()
            await sending
            await until(lambda: caller.raw.endswith(b"6000000"))

    run(story())


def test_a_client_that_expects_100_continue_gets_it_and_the_worker_never_sees_it(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(b"ok"))
        async with house(tmp_path, worker) as home:
            caller = await home.ask(
                b"POST /x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n"
            )
            await caller.until(b"HTTP/1.1 100 Continue\r\n\r\n")
            await caller.send(b"hi")
            await caller.until(b"200 OK")
            assert worker.talks[0].header("expect") is None
            assert worker.talks[0].body == b"hi"

    run(story())


def test_chunked_request_bodies_arrive_whole(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(b"ok"))
        async with house(tmp_path, worker) as home:
            raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            caller = await home.ask(raw)
            for byte in chunk(b'{"a":') + chunk(b"1}") + b"0\r\nX-T: 1\r\n\r\n":
                await caller.send(bytes([byte]))
            await caller.until(b"200 OK")
            assert worker.talks[0].body == b'{"a":1}'

    run(story())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_streams_through_and_arrives_whole(tmp_path: Path, chunked: bool) -> None:
    async def story() -> None:
        body = os.urandom(3_000_000)
        worker = Worker(plain(b"ok"))
        async with house(tmp_path, worker, body_bytes=100_000) as home:
            if chunked:
                parts = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
                raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                raw += b"".join(map(chunk, parts)) + LAST
            else:
                raw = request(body=body)
            got = await home.get(raw + request("/health", method="GET"))
            assert got.body == b"ok"
            assert worker.talks[0].body == body
            assert home.gateway.relay.body_bytes == 0

    run(story())


def test_a_client_that_sends_faster_than_the_worker_takes_is_slowed_down(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(b"ok"))
        async with house(tmp_path, worker, body_bytes=1000) as home:
            gate = asyncio.Event()

            async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await gate.wait()
                await worker._serve(reader, writer)

            slow = await asyncio.start_server(slowly, "127.0.0.1", 0, limit=1000)
            await home.rule("open", generation=2, address=address_of(slow), ramp_per_s=0)
            caller = await home.caller()
            sending = asyncio.create_task(caller.send(request(body=b"z" * 30_000_000)))
            await until(lambda: any("upstream" in c._held_back for c in home.gateway.door.clients), "back-pressure")
            gate.set()
            await sending
            await caller.until(b"200 OK")
            assert worker.talks[0].body == b"z" * 30_000_000
            slow.close()

    run(story())


def test_a_client_that_reads_slowly_slows_the_worker_down(tmp_path: Path) -> None:
    async def story() -> None:
        total = 16_000_000
        sent = 0

        async def act(talk: Talk) -> None:
            nonlocal sent
            await talk.send(head(f"Content-Length: {total}"))
            for _ in range(total // 100_000):
                await talk.send(b"w" * 100_000)
                sent += 100_000

        async with house(tmp_path, Worker(act)) as home:
            caller = await home.caller(reading=False)
            await caller.send(request("/big"))
            await until(lambda: any(client.write_paused for client in home.gateway.door.clients), "back-pressure")
            assert sent < total
            caller.listen()
            await until(lambda: len(caller.raw) >= total)
            got = await caller.all()
            assert len(got.body) == total

    run(story())


def test_a_client_that_reads_nothing_for_too_long_is_given_up(tmp_path: Path) -> None:
    async def story() -> None:
        async def act(talk: Talk) -> None:
            await talk.send(head("Content-Length: 90000000"), *[b"w" * 1_000_000] * 90)

        async with house(tmp_path, Worker(act), write_stall_s=0.2, sweep_s=0.05) as home:
            caller = await home.caller(reading=False)
            await caller.send(request("/big"))
            await until(lambda: home.counts["given_up"] == 1)

    run(story())


def test_the_engine_sees_our_request_id_and_a_new_one_each_time(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain())
        async with house(tmp_path, worker) as home:
            for _ in range(2):
                await home.get(request(COMPLETIONS, b"{}", "POST", "X-Request-Id: CUDA error: an illegal access"))
            await home.get(request("/v1/embeddings", b"{}", "POST", "X-Request-Id: mine"))
            names = [talk.header("x-request-id") or "" for talk in worker.talks]
            assert names[0].startswith("defib-")
            assert names[1].startswith("defib-")
            assert names[0] != names[1]
            assert names[2] == "mine"
            assert worker.talks[0].header("x-forwarded-for") == "127.0.0.1"

    run(story())


def test_a_private_unix_socket_serves_as_the_workers_address(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(b"over uds"))
        async with house(tmp_path) as home:
            await worker.start(tmp_path / "worker.sock")
            await home.open(worker)
            assert (await home.get(request())).body == b"over uds"
            await worker.stop()

    run(story())


def test_a_websocket_is_passed_on_both_ways(tmp_path: Path) -> None:
    async def story() -> None:
        async def act(talk: Talk) -> None:
            switch = ("Upgrade: websocket", "Connection: Upgrade")
            await talk.send(head(*switch, status="101 Switching Protocols") + b"hello")
            data = await talk.reader.readexactly(5)
            await talk.send(data.upper())
            await talk.gone()

        async with house(tmp_path, Worker(act)) as home:
            lines = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: x")
            caller = await home.ask(request("/v1/realtime", b"", "GET", *lines) + b"early")
            await caller.until(b"helloEARLY")
            assert b"101" in caller.raw
            await caller.close()
            await until(home.balanced)
            assert home.counts["answered"] == 1

    run(story())


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70000, 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: magic\r\n\r\n", 417),
    ],
)
def test_a_request_that_could_be_read_in_two_ways_is_refused_and_the_connection_closed(
    tmp_path: Path, raw: bytes, status: int
) -> None:
    async def story() -> None:
        worker = Worker(plain())
        async with house(tmp_path, worker) as home:
            caller = await home.ask(raw + request())
            await until(lambda: caller.ended)
            got = parsed(caller.raw)
            assert (got.status, got.complete) == (status, True)
            assert caller.raw.count(b"HTTP/1.1") == 1, "nothing that follows is served"
            assert b"defib_bad_request" in got.body
            assert worker.talks == []
            assert home.counts["accepted"] == 0

    run(story())


def test_a_head_exactly_at_the_limit_is_served(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(plain()), head_bytes=200) as home:
            frame = b"GET /x HTTP/1.1\r\nHost: x\r\nA: %b\r\n\r\n"
            at = frame % (b"a" * (200 + 4 - len(frame % b"")))
            assert (await home.get(at, "GET")).status == 200
            caller = await home.ask(at.replace(b"A: a", b"A: aa"))
            await caller.until(b"431")

    run(story())


def test_slow_heads_and_stalled_bodies_are_ended_and_idle_connections_closed(tmp_path: Path) -> None:
    async def story() -> None:
        limits = {"head_s": 0.1, "body_stall_s": 0.1, "idle_s": 0.3, "sweep_s": 0.02}
        async with house(tmp_path, Worker(plain()), **limits) as home:
            slow = await home.ask(b"POST /x HT")
            await slow.until(b"408")
            stalled = await home.ask(request(body=b"12345")[:-1])
            await stalled.until(b"408")
            idle = await home.ask(request())
            await until(lambda: idle.ended)
            assert parsed(idle.raw).status == 200

    run(story())


def test_one_connection_too_many_is_told_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(plain()), clients=2) as home:
            first, second = await home.ask(request()), await home.ask(request())
            await first.all()
            await second.all()
            third = await home.caller()
            await third.until(b"503")
            await until(lambda: third.ended)

    run(story())


def test_a_client_that_leaves_takes_its_request_from_the_worker_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(silent)
        async with house(tmp_path, worker) as home:
            caller = await home.ask(request())
            await until(lambda: worker.talks)
            await caller.close()
            await until(lambda: worker.connections == 0, "the worker sees its client leave")
            assert home.counts["given_up"] == 1
            assert not home.told("symptom")

    run(story())


def test_a_kept_connection_that_the_worker_closed_costs_nobody_anything(tmp_path: Path) -> None:
    async def story() -> None:
        async def act(talk: Talk) -> None:
            await plain(b"%d" % len(talk.body))(talk)
            talk.writer.close()

        async def refuse_quietly(talk: Talk) -> None:
            talk.cut()  # a request on a kept connection, and the connection ends just then

        worker = Worker(plain(b"first"), refuse_quietly, plain(b"third"), act)
        async with house(tmp_path, worker) as home:
            assert (await home.get(request())).body == b"first"
            assert (await home.get(request())).body == b"third"
            assert home.counts["symptoms"] == 0
            for _ in range(3):
                assert (await home.get(request())).status == 200

    run(story())


def test_a_connection_that_was_idle_for_too_long_is_not_used_again(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain())
        async with house(tmp_path, worker, pool_idle_s=0.0) as home:
            await home.get(request())
            await home.get(request())
            await until(lambda: worker.connections <= 1)
            assert home.gateway.relay.pool.connections <= 1
        async with house(tmp_path, Worker(plain()), pool_idle_s=0.05, sweep_s=0.02) as home:
            await home.get(request())
            await until(lambda: home.gateway.relay.pool.connections == 0)

    run(story())


def test_a_compressed_stream_is_passed_on_without_a_look(tmp_path: Path) -> None:
    async def story() -> None:
        raw = head("Content-Type: text/event-stream", "Content-Encoding: gzip", "Transfer-Encoding: chunked")
        raw += chunk(b"\x1f\x8b no blank line") + LAST
        async with house(tmp_path, Worker(raw_answer(raw, random.Random(3)))) as home:
            assert (await home.get(request(body=STREAM_BODY))).raw == raw
            assert home.counts["answered"] == 1

    run(story())


def test_an_answer_before_the_end_of_the_request_closes_the_connection_after_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, body_bytes=1000) as home:

            async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(head("Content-Length: 3", status="413 Too Large") + b"big")
                await reader.read()
                writer.close()

            server = await asyncio.start_server(early, "127.0.0.1", 0)
            await home.rule("open", generation=1, address=address_of(server), ramp_per_s=0)
            caller = await home.ask(request("/x", b"y" * 5000)[:-10])
            await until(lambda: caller.ended)
            assert parsed(caller.raw).body == b"big"
            server.close()

    run(story())


def test_a_thousand_exchanges_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain())
        async with house(tmp_path, worker) as home:
            await home.get(request())
            before = len(os.listdir("/proc/self/fd"))
            for batch in range(20):
                callers = [await home.ask(request(body=STREAM_BODY if n % 2 else b"{}")) for n in range(50)]
                for number, caller in enumerate(callers):
                    if (number + batch) % 5:
                        await caller.all()
                    await caller.close()
                home.callers.clear()
            await until(home.balanced)
            assert home.counts["accepted"] >= 800
            await until(lambda: not home.gateway.door.clients)
            home.gateway.relay.pool.drop()
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "no leak")

    run(story())
