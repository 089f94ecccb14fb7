"""Waiting through a recovery: limits by form, bounds, order, ramp, leases, probes, and the end of the gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.gateway.bed import (
    ERROR_500,
    LAST,
    STREAM_BODY,
    TOKENS,
    Act,
    Talk,
    Worker,
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

COMMENT = b": defib: recovering\n\n"


def test_a_plain_request_waits_silently_for_the_worker(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(b"here"))
        async with house(tmp_path, supervised=False) as home:
            caller = await home.ask(request())
            await until(lambda: len(home.gateway.relay.holding) == 1)
            await home.supervise()
            assert home.snapshots[0]["gate"] == "starting"
            assert home.snapshots[0]["held"] == 1
            await home.open(await worker.start())
            got = await caller.all()
            assert (got.body, "x-defib-replayed" in got.headers) == (b"here", False)
            assert home.counts["held"] == 1
            await worker.stop()

    run(story())


def test_a_plain_request_is_told_to_come_back_at_its_limit(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, hold_plain_s=0.2) as home:
            loop = asyncio.get_running_loop()
            began = loop.time()
            got = await home.get(request())
            assert 0.2 <= loop.time() - began < 2
            assert (got.status, got.headers["retry-after"]) == (503, "5")
            assert json.loads(got.body)["error"]["type"] == "defib_recovering"
            assert home.counts["refused"] == 1

    run(story())


def test_a_stream_gets_a_head_and_comments_while_it_waits_and_then_its_events(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(stream())
        async with house(tmp_path, silent_stream_s=0.1, comment_s=0.05, hold_stream_s=10) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await until(lambda: caller.raw.count(COMMENT) >= 3)
            assert parsed(caller.raw, eof=False).status == 200
            await home.open(await worker.start())
            got = await caller.all()
            assert got.complete
            assert got.body.replace(COMMENT, b"") == b"".join(TOKENS)
            await caller.send(request("/health", method="GET"))
            await caller.until(b'"ok"')
            await worker.stop()

    run(story())


ODD_ANSWERS: dict[str, Act] = {
    "400 with an error object": plain(b'{"error":{"message":"bad prompt","code":400}}', "400 Bad Request"),
    "500 chunked": lambda talk: talk.send(
        head("Transfer-Encoding: chunked", status="500 No"),
        chunk(b'{"error":{"message":'),
        chunk(b'"bad prompt"}}') + LAST,
    ),
    "401 without one": plain(b"nope", "401 Unauthorized"),
    "200 and no stream": plain(b"{}"),
    "200 and much too long": plain(b"x" * 5_000_000),
    "204": lambda talk: talk.send(head(status="204 No Content")),
}


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_a_client_that_was_promised_a_stream_gets_another_answer_as_an_error_event(tmp_path: Path, name: str) -> None:
    async def story() -> None:
        worker = Worker(ODD_ANSWERS[name])
        async with house(tmp_path, silent_stream_s=0.01, hold_stream_s=10, park_s=0.05) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await caller.until(COMMENT)
            await home.open(await worker.start())
            got = await caller.all()
            assert got.complete
            error = json.loads(got.data[-1])["error"]
            if "object" in name or "chunked" in name:
                assert error["message"] == "bad prompt"
            else:
                assert error["type"] == "defib_not_a_stream"
            await worker.stop()

    run(story())


@pytest.mark.parametrize("framing", ["length", "close"])
def test_a_stream_of_another_framing_fits_behind_the_early_head(tmp_path: Path, framing: str) -> None:
    async def story() -> None:
        body = b"".join(TOKENS)

        async def act(talk: Talk) -> None:
            more = (f"Content-Length: {len(body)}",) if framing == "length" else ()
            await talk.send(head("Content-Type: text/event-stream", *more), body[:100], body[100:])
            talk.writer.close()

        worker = Worker(act)
        async with house(tmp_path, silent_stream_s=0.01, hold_stream_s=10) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await caller.until(COMMENT)
            await home.open(await worker.start())
            got = await caller.all()
            assert got.complete
            assert got.body.replace(COMMENT, b"") == body
            await worker.stop()

    run(story())


def test_an_http_1_0_stream_can_wait_too(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(stream())
        async with house(tmp_path, silent_stream_s=0.01, hold_stream_s=10) as home:
            caller = await home.ask(request(body=STREAM_BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
            await caller.until(COMMENT)
            await home.open(await worker.start())
            await until(lambda: caller.ended)
            assert parsed(caller.raw).body.replace(COMMENT, b"") == b"".join(TOKENS)
            await worker.stop()

    run(story())


def test_a_stream_ends_with_a_clear_error_at_its_limit(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, silent_stream_s=0.05, comment_s=0.05, hold_stream_s=0.3) as home:
            got = await home.get(request(body=STREAM_BODY))
            assert got.complete
            assert json.loads(got.data[-1])["error"]["type"] == "defib_recovering"
            assert "[DONE]" not in got.data
            assert home.counts["ended_with_error"] == 1

    run(story())


def test_a_hold_that_is_known_to_be_too_long_is_said_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(silent)
        async with house(tmp_path, worker, hold_plain_s=50, hold_stream_s=600, silent_stream_s=30) as home:
            plain_one, stream_one = await home.ask(request()), await home.ask(request(body=STREAM_BODY))
            await until(lambda: len(worker.talks) == 2)
            await home.hold(ready_in_s=120)
            got = await plain_one.all()
            assert (got.status, got.headers["retry-after"]) == (503, "120")
            later = await home.get(request())
            assert later.status == 503
            assert len(home.gateway.relay.holding) == 1, "the stream has time"
            await home.hold(ready_in_s=700)
            got = await stream_one.all()
            assert (got.status, got.headers["retry-after"]) == (503, "700")

    run(story())


def test_the_queue_is_bounded_by_count_and_by_bytes(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, held=2, held_bytes=1000, hold_plain_s=0.5) as home:
            waiting = [await home.ask(request(body=b"x" * 400)) for _ in range(2)]
            await until(lambda: len(home.gateway.relay.holding) == 2)
            got = await home.get(request())
            assert b"defib_overloaded" in got.body
            assert got.headers["retry-after"]
            await waiting[0].close()
            await until(lambda: len(home.gateway.relay.holding) == 1)
            assert b"defib_overloaded" in (await home.get(request(body=b"x" * 601))).body
            assert b"defib_recovering" in (await home.get(request(body=b"x" * 600))).body

    run(story())


def test_the_most_urgent_goes_first_and_the_ramp_is_kept(tmp_path: Path) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def act(talk: Talk) -> None:
            times.append(loop.time())
            await (stream()(talk) if b"stream" in talk.body else plain()(talk))

        worker = Worker(act)
        async with house(tmp_path, hold_plain_s=20, silent_stream_s=9, hold_stream_s=30) as home:
            for number in range(3):
                await home.ask(request(body=b'{"n":%d}' % number))
                await until(lambda n=number: len(home.gateway.relay.holding) == n + 1)  # type: ignore[misc]
            await home.ask(request(body=STREAM_BODY))
            await until(lambda: len(home.gateway.relay.holding) == 4)
            await home.open(await worker.start(), ramp_per_s=20)
            await until(lambda: len(worker.talks) == 1)
            late = await home.ask(request(body=b'{"n":"late"}'))
            await late.all()
            bodies = [talk.body for talk in worker.talks]
            assert bodies == [STREAM_BODY, b'{"n":0}', b'{"n":1}', b'{"n":2}', b'{"n":"late"}']
            assert times[4] - times[0] >= 4 / 20 * 0.9
            await until(lambda: home.told("replayed"))
            assert home.told("replayed")[0]["answered"] == 4
            await worker.stop()

    run(story())


def test_a_later_opening_does_not_wait_for_the_ramp_of_an_earlier_one(tmp_path: Path) -> None:
    async def story() -> None:
        worker, second = Worker(plain()), Worker(plain())
        async with house(tmp_path, hold_plain_s=20) as home:
            callers = [await home.ask(request()) for _ in range(3)]
            await until(lambda: len(home.gateway.relay.holding) == 3)
            await home.open(await worker.start(), ramp_per_s=0.001)
            await home.hold()
            await home.open(await second.start(), 2)
            for caller in callers:
                assert (await caller.all()).status == 200
            await worker.stop()
            await second.stop()

    run(story())


def test_time_in_a_hold_adds_up_over_several(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Worker(silent), Worker(silent)
        async with house(tmp_path, first, second, hold_plain_s=0.5) as home:
            loop = asyncio.get_running_loop()
            caller = await home.ask(request())
            await until(lambda: first.talks)
            await home.hold()
            began = loop.time()
            await asyncio.sleep(0.3)
            await home.open(second, 2)
            await until(lambda: second.talks)
            first_wait = loop.time() - began
            relay = home.gateway.relay
            left = next(iter(relay.exchanges.values())).hold_left_s
            assert left <= 0.5 - 0.29
            assert left >= 0.5 - first_wait - 0.01
            await caller.close()

    run(story())


def test_refusing_tells_everybody_why(tmp_path: Path) -> None:
    async def story() -> None:
        dying = Worker(plain(ERROR_500, "500 No"))
        async with house(tmp_path, dying, park_s=10) as home:
            parked_one = await home.ask(request())
            await until(lambda: home.counts["parked"] == 1)
            await home.pause()
            waiting = await home.ask(request())
            await until(lambda: len(home.gateway.relay.holding) == 1)
            await home.rule("refuse", reason="the GPU needs a reset", retry_after_s=60)
            for got in (await parked_one.all(), await waiting.all(), await home.get(request())):
                assert (got.status, got.headers["retry-after"]) == (503, "60")
                assert b"the GPU needs a reset" in got.body
            assert len(dying.talks) == 1

    run(story())


def test_a_held_gate_whose_supervisor_is_lost_holds_to_its_limits(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(silent), hold_plain_s=0.4) as home:
            await home.hold(lease_s=0.05)
            await home.supervisor.stop()
            caller = await home.ask(request())
            await asyncio.sleep(0.2)
            assert caller.raw == b""
            assert (await caller.all()).status == 503

    run(story())


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_probes_are_answered_at_once_at_every_gate(tmp_path: Path, path: str) -> None:
    async def story() -> None:
        worker = Worker(plain(b"never asked"))
        async with house(tmp_path) as home:

            async def status() -> tuple[int, str]:
                got = await home.get(request(path, method="GET"), "GET")
                return got.status, json.loads(got.body)["gate"]

            assert await status() == (503, "starting")
            await home.open(await worker.start())
            assert await status() == (200, "open")
            await home.pause()
            assert await status() == (200, "paused")
            await home.hold()
            assert await status() == (503, "held")
            await home.rule("refuse", reason="r", retry_after_s=1)
            assert await status() == (503, "refusing")
            assert worker.talks == []
            assert home.counts["accepted"] == 0
            assert (await home.get(request(path, method="HEAD"), "HEAD")).status == 503
            await worker.stop()

    run(story())


def test_metrics_are_relayed_or_refused_and_never_held_or_parked(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(b"metric 1"), plain(b"broken", "500 No"), silent)
        async with house(tmp_path, worker, park_s=10, hold_plain_s=10) as home:
            metrics = request("/metrics", method="GET")
            assert (await home.get(metrics, "GET")).body == b"metric 1"
            assert (await home.get(metrics, "GET")).status == 500
            caller = await home.ask(metrics)
            await until(lambda: len(worker.talks) == 3)
            await home.hold()
            assert (await caller.all("GET")).status == 503
            assert (await home.get(metrics, "GET")).status == 503
            assert home.counts["symptoms"] == 0

    run(story())


def test_a_websocket_is_never_held(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path) as home:
            raw = request("/v1/realtime", b"", "GET", "Upgrade: websocket", "Connection: Upgrade")
            assert (await home.get(raw, "GET")).status == 503

    run(story())


def test_a_streamed_body_waits_for_the_gate_with_its_client_slowed_down(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(b"ok"))
        async with house(tmp_path, body_bytes=1000, hold_plain_s=10) as home:
            caller = await home.caller()
            sending = asyncio.create_task(caller.send(request(body=b"q" * 20_000_000)))
            await until(lambda: len(home.gateway.relay.holding) == 1)
            assert home.gateway.relay.body_bytes < 1_000_000
            await home.open(await worker.start())
            await sending
            await caller.until(b"200 OK")
            assert worker.talks[0].body == b"q" * 20_000_000
            await worker.stop()

    run(story())


def test_bodies_in_memory_are_bounded_together(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(silent), bodies_bytes=1000) as home:
            await home.ask(request(body=b"a" * 900))
            await until(lambda: home.gateway.relay.body_bytes == 900)
            await home.ask(request(body=b"b" * 200))
            await until(lambda: len(home.gateway.relay.exchanges) == 2)
            kept = {e.body_bytes: e.body is not None for e in home.gateway.relay.exchanges.values()}
            assert kept == {900: True, 200: False}
            for caller in home.callers:
                await caller.close()
            await until(lambda: home.gateway.relay.body_bytes == 0)

    run(story())


def test_draining_finishes_what_is_under_way_and_tells_the_rest(tmp_path: Path) -> None:
    async def story() -> None:
        go_on = asyncio.Event()

        async def act(talk: Talk) -> None:
            await go_on.wait()
            await plain(b"finished")(talk)

        worker = Worker(act)
        async with house(tmp_path, worker, hold_plain_s=10) as home:
            idle = await home.caller()
            busy = await home.ask(request())
            await until(lambda: worker.talks)
            await home.pause()
            waiting = await home.ask(request())
            await until(lambda: len(home.gateway.relay.holding) == 1)
            drain = asyncio.create_task(home.gateway.drain(5.0))
            assert b"defib_stopping" in (await waiting.all()).body
            await until(lambda: idle.ended)
            assert not drain.done()
            go_on.set()
            assert (await busy.all()).body == b"finished"
            await drain
            await until(lambda: busy.ended)
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", home.port)

    run(story())


def test_a_drain_that_takes_too_long_tells_those_under_way(tmp_path: Path) -> None:
    async def story() -> None:
        async def half(talk: Talk) -> None:
            await stream(token("a"), end=b"")(talk)
            await talk.gone()

        worker = Worker(half, silent)
        async with house(tmp_path, worker) as home:
            streaming = await home.ask(request(body=STREAM_BODY))
            await streaming.until(b'"a"')
            waiting = await home.ask(request())
            await until(lambda: len(worker.talks) == 2)
            await home.gateway.drain(0.1)
            got = await streaming.all()
            assert got.complete
            assert b"defib_stream_interrupted" in got.body
            assert (await waiting.all()).status == 503

    run(story())
