"""What smells of a dying engine is kept back until a ruling, and the ruling decides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.bed import (
    COMPLETIONS,
    DONE,
    ERROR,
    ERROR_500,
    LAST,
    SSE_HEAD,
    STREAM_BODY,
    TOKENS,
    WHOLE,
    Act,
    Got,
    House,
    Talk,
    Worker,
    address_of,
    chunk,
    cut_after,
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

DYING = [token("a"), token("b"), ERROR, DONE]
"""How vLLM ends a stream when its engine died: an error object and `[DONE]`, under HTTP 200."""
DYING_RAW = SSE_HEAD + b"".join(map(chunk, DYING)) + LAST
PLAIN_500 = head("Content-Type: application/json", f"Content-Length: {len(ERROR_500)}", status="500 Oops") + ERROR_500


async def parked(home: House, number: int = 1) -> None:
    await until(lambda: home.counts["parked"] == number, "parked")
    await until(lambda: len(home.told("symptom")) >= number, "symptoms")


def raw(data: bytes, byte_by_byte: bool = False) -> Act:
    async def act(talk: Talk) -> None:
        await talk.send(*([bytes([b]) for b in data] if byte_by_byte else [data]))

    return act


@pytest.mark.parametrize("byte_by_byte", [False, True])
def test_an_error_in_a_stream_is_kept_back_and_then_released_unchanged(tmp_path: Path, byte_by_byte: bool) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw(DYING_RAW, byte_by_byte)), park_s=100) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await parked(home)
            await caller.until(b'"b"')
            await home.rule("counts")  # a round trip: whatever was written is there
            assert parsed(caller.raw, eof=False).body == token("a") + token("b")
            await home.pause()
            await home.open(Worker_at(home))
            await caller.until(LAST)
            assert caller.raw == DYING_RAW
            assert home.counts["passed_error"] == 1
            symptom = home.told("symptom")[0]
            assert (symptom["kind"], symptom["status"], symptom["generation"]) == ("error_object", 0, 1)

    run(story())


def Worker_at(home: House) -> Worker:
    """The worker that the gate is open for already, for ruling in its favour."""
    worker = Worker()
    worker.address = home.gateway.relay.keeper.address
    return worker


def test_without_a_ruling_an_answer_is_released_after_the_parking_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw(PLAIN_500)), park_s=0.3) as home:
            loop = asyncio.get_running_loop()
            began = loop.time()
            got = await home.get(request())
            assert got.raw == PLAIN_500
            assert 0.3 <= loop.time() - began < 2
            assert (home.counts["parked"], home.counts["passed_error"]) == (1, 1)
            assert home.told("symptom")[0]["status"] == 500

    run(story())


def test_a_pause_keeps_parked_answers_beyond_the_parking_time_until_its_lease_ends(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(raw(PLAIN_500), plain())
        async with house(tmp_path, worker, park_s=0.1, hold_plain_s=100) as home:
            loop = asyncio.get_running_loop()
            caller = await home.ask(request())
            await until(lambda: home.counts["parked"] == 1)
            parked_at = loop.time()
            await home.pause(lease_s=0.6)
            waiting = await home.ask(request())
            await until(lambda: loop.time() > parked_at + 0.3)
            assert caller.raw == b"", "the parking time alone ends nothing in a pause"
            assert len(home.gateway.relay.holding) == 1
            assert len(worker.talks) == 1, "nothing new is sent in a pause"
            await until(lambda: home.gateway.relay.keeper.gate == "open")
            assert (await caller.all()).raw == PLAIN_500
            assert (await waiting.all()).status == 200
            assert not home.gateway.relay.keeper.parking

    run(story())


def test_with_parking_off_a_failing_answer_passes_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw(PLAIN_500)), park_s=10, lease_s=0.0) as home:
            await home.supervisor.stop()
            await until(lambda: not home.gateway.seam.clients)
            assert (await home.get(request())).raw == PLAIN_500
            assert home.counts["parked"] == 0

    run(story())


def test_parking_goes_on_for_a_lease_after_the_supervisor_was_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw(PLAIN_500)), park_s=0.1, lease_s=30) as home:
            await home.supervisor.stop()
            await until(lambda: not home.gateway.seam.clients)
            await home.get(request())
            assert home.counts["parked"] == 1

    run(story())


FAULTS: dict[str, tuple[Act, bytes, str]] = {
    "plain 500": (raw(PLAIN_500), b"{}", "status"),
    "error first": (stream(ERROR, DONE), STREAM_BODY, "error_object"),
    "done first": (stream(DONE), STREAM_BODY, "no_finish"),
    "empty stream": (raw(SSE_HEAD + LAST), STREAM_BODY, "no_finish"),
    "cut before the head": (cut_after(b"HTTP/1.1 2"), b"{}", "cut"),
    "cut in a plain answer": (cut_after(head("Content-Length: 100") + b"half"), b"{}", "cut"),
    "cut after a stream's head": (cut_after(SSE_HEAD), STREAM_BODY, "cut"),
    "cut in the first event": (cut_after(SSE_HEAD, chunk(TOKENS[0])[:30]), STREAM_BODY, "cut"),
    "cut after a comment": (cut_after(SSE_HEAD, chunk(b": ping\n\n")), STREAM_BODY, "cut"),
    "bad head": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"), b"{}", "cut"),
    "bad chunk": (raw(SSE_HEAD + b"zz\r\n"), STREAM_BODY, "cut"),
    "503 chunked": (raw(head("Transfer-Encoding: chunked", status="503 No") + chunk(b"no")), b"{}", "status"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_exchange_that_delivered_nothing_is_replayed_and_its_client_sees_the_answer_only(
    tmp_path: Path, name: str
) -> None:
    act, body, kind = FAULTS[name]

    async def story() -> None:
        whole = stream() if body == STREAM_BODY else plain()
        first, second = Worker(act), Worker(whole)
        async with house(
            tmp_path, first, second, park_s=10, hold_stream_s=9, hold_plain_s=9, silent_stream_s=9
        ) as home:
            caller = await home.ask(request(body=body))
            await parked(home)
            assert home.told("symptom")[0]["kind"] == kind
            await home.hold()
            assert (await home.open(second, 2))["replaying"] == 1
            got = await caller.all()
            assert (got.status, got.complete) == (200, True)
            if name != "cut after a comment":  # there the head was sent before
                assert (got.headers["x-defib-replayed"], got.headers["x-defib-incident"]) == ("1", "i-7")
            assert b"error" not in got.body
            assert got.body.endswith(DONE if body == STREAM_BODY else b'{"choices":[]}')
            assert first.talks[0].body == second.talks[0].body
            assert (home.counts["replayed"], home.counts["answered"]) == (1, 1)
            await until(lambda: home.told("replayed"))
            assert {k: home.told("replayed")[0][k] for k in ("generation", "answered", "failed")} == {
                "generation": 2,
                "answered": 1,
                "failed": 0,
            }

    run(story())


def test_a_token_behind_a_comment_is_a_delivered_token(tmp_path: Path) -> None:
    async def story() -> None:
        begun = asyncio.Event()

        async def act(talk: Talk) -> None:
            await talk.send(SSE_HEAD, chunk(b": ping\n\n"))
            await begun.wait()
            await talk.send(chunk(token("a")))
            await talk.gone()

        first, second = Worker(act), Worker(stream())
        async with house(tmp_path, first, second) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await caller.until(b": ping")
            begun.set()
            await caller.until(b'"a"')
            await home.hold()
            await home.open(second, 2)
            got = await caller.all()
            assert got.data[0] == token("a")[6:-2].decode()
            interrupted(got)
            assert second.talks == []

    run(story())


def test_a_refused_connection_waits_for_the_ruling_too(tmp_path: Path) -> None:
    async def story() -> None:
        second = Worker(plain(b"2"))
        async with house(tmp_path, second, park_s=10) as home:
            dead = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
            address = address_of(dead)
            dead.close()
            await dead.wait_closed()
            await home.rule("open", generation=2, address=address, ramp_per_s=0)
            # Never sent: even what may not be sent twice can wait.
            caller = await home.ask(request("/unknown", b"{}"))
            await parked(home)
            assert home.told("symptom")[0]["kind"] == "refused"
            await home.hold(2)
            await home.open(second, 3)
            got = await caller.all()
            assert (got.body, "x-defib-replayed" in got.headers) == (b"2", False)

    run(story())


@pytest.mark.parametrize("act", [cut_after(b""), cut_after(b"HTTP/1.1 2")])
def test_a_cut_that_is_released_with_nothing_delivered_is_a_clear_502(tmp_path: Path, act: Act) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(act), park_s=0.05) as home:
            got = await home.get(request())
            assert got.status == 502
            assert b"defib_upstream_failed" in got.body

    run(story())


def test_a_half_delivered_stream_that_was_cut_ends_the_same_way_when_released(tmp_path: Path) -> None:
    async def story() -> None:
        half = SSE_HEAD + chunk(token("a")) + chunk(token("b"))[:20]
        async with house(tmp_path, Worker(cut_after(half)), park_s=0.05) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await until(lambda: caller.ended)
            assert caller.raw == half
            assert not parsed(caller.raw).complete
            assert home.counts["passed_error"] == 1

    run(story())


def interrupted(got: Got) -> dict[str, Any]:
    """Checks the clear end of a stream: our error object last, in order, and no `[DONE]`."""
    assert got.complete
    assert "[DONE]" not in got.data
    error: dict[str, Any] = json.loads(got.data[-1])["error"]
    assert error["type"] == "defib_stream_interrupted"
    assert error["code"] == 503
    return error


LONG_HEAD = head("Content-Type: text/event-stream", "Content-Length: 5000")
ENDS: dict[str, Act] = {
    "error object": raw(DYING_RAW),
    "cut between events": cut_after(SSE_HEAD, chunk(token("a")), chunk(token("b"))),
    "cut in an event": cut_after(SSE_HEAD, chunk(token("a")), chunk(token("b")) + chunk(token("c"))[:9]),
    "one chunk with good and bad": raw(SSE_HEAD + chunk(token("a") + token("b") + ERROR) + chunk(DONE) + LAST),
    "owing a little": cut_after(SSE_HEAD, b"%x\r\n" % (len(token("a") + token("b")) + 5) + token("a") + token("b")),
    "owing much": cut_after(SSE_HEAD, b"%x\r\n" % (len(token("a") + token("b")) + 5000) + token("a") + token("b")),
    "owing a line end": cut_after(SSE_HEAD, chunk(token("a")), chunk(token("b"))[:-2]),
    "owing half a line end": cut_after(SSE_HEAD, chunk(token("a")), chunk(token("b"))[:-1]),
    "done without finish": stream(token("a"), token("b"), DONE),
    "a known length": cut_after(
        head("Content-Type: text/event-stream", "Content-Length: 5000"), token("a"), token("b")
    ),
    "still running": raw(SSE_HEAD + chunk(token("a")) + chunk(token("b"))),
}


@pytest.mark.parametrize("old_client", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_a_half_delivered_stream_ends_with_a_clear_error_and_no_done(
    tmp_path: Path, name: str, old_client: bool
) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(ENDS[name]), park_s=10) as home:
            raw_request = request(body=STREAM_BODY)
            caller = await home.ask(raw_request.replace(b"HTTP/1.1", b"HTTP/1.0") if old_client else raw_request)
            await caller.until(b'"b"')
            if name != "still running":
                await parked(home)
            await home.hold()
            if old_client:
                await until(lambda: caller.ended)
            got = await caller.all()
            assert got.data[:2] == [token(text)[6:-2].decode() for text in "ab"]
            interrupted(got)
            assert (home.counts["ended_with_error"], home.counts["replayed"]) == (1, 0)

    run(story())


def test_the_connection_of_an_interrupted_stream_serves_the_next_request(tmp_path: Path) -> None:
    async def story() -> None:
        second = Worker(plain(b"next"))
        async with house(tmp_path, Worker(raw(DYING_RAW)), second, park_s=10) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await parked(home)
            await home.hold()
            await home.open(second, 2)
            await caller.send(request())
            await caller.until(b"next")

    run(story())


NOT_TWICE = {
    "unknown path": request("/v1/unknown"),
    "forbidden option": request(body=b'{"prompt":"p","store":true}'),
    "unreadable body": request(body=b"\xff\xfe"),
    "opt-out": request(COMPLETIONS, b"{}", "POST", "X-Defib-Replay: never"),
    "body too large": request(body=b'{"prompt":"%b"}' % (b"x" * 5000)),
    "chunked body too large": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b'{"prompt":"%b"}' % (b"x" * 5000))
    + LAST,
}


@pytest.mark.parametrize("name", NOT_TWICE)
def test_what_is_not_known_to_be_safe_is_told_so_and_never_sent_twice(tmp_path: Path, name: str) -> None:
    async def story() -> None:
        first, second = Worker(silent), Worker(plain())
        async with house(tmp_path, first, second, body_bytes=2000) as home:
            caller = await home.ask(NOT_TWICE[name])
            await until(lambda: first.talks)
            await home.hold()
            got = await caller.all()
            assert got.status == 503
            assert b"defib_not_replayed" in got.body
            assert got.headers["x-should-retry"] == "false"
            await home.open(second, 2)
            assert second.talks == []

    run(story())


def test_an_option_that_is_there_but_says_no_does_not_forbid_the_replay(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Worker(silent), Worker(plain())
        async with house(tmp_path, first, second) as home:
            caller = await home.ask(request(body=b'{"store":false,"background":null}'))
            await until(lambda: first.talks)
            await home.hold()
            await home.open(second, 2)
            assert (await caller.all()).status == 200

    run(story())


def test_an_exchange_that_saw_two_deaths_is_not_sent_a_third_time(tmp_path: Path) -> None:
    async def story() -> None:
        workers = [Worker(silent), Worker(silent), Worker(plain())]
        async with house(tmp_path, *workers) as home:
            caller = await home.ask(request())
            for generation in (1, 2):
                await until(lambda g=generation: workers[g - 1].talks)  # type: ignore[misc]
                await home.hold(generation)
                await home.open(workers[generation], generation + 1)
            got = await caller.all()
            assert got.status == 503
            assert b"2 failures" in got.body
            assert workers[2].talks == []
            await until(lambda: len(home.told("replayed")) == 0)

    run(story())


def test_an_opening_for_a_later_generation_takes_back_what_the_old_one_had(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Worker(silent), Worker(plain(b"new"))
        async with house(tmp_path, first, second) as home:
            caller = await home.ask(request())
            await until(lambda: first.talks)
            await home.open(second, 2)
            assert (await caller.all()).body == b"new"
            await until(lambda: first.connections == 0)

    run(story())


def test_a_client_that_leaves_while_parked_or_held_is_not_replayed(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Worker(raw(PLAIN_500)), Worker(plain())
        async with house(tmp_path, first, second, park_s=10) as home:
            parked_one, held_one = await home.ask(request()), await home.ask(request())
            await parked(home, 2)
            await parked_one.close()
            await until(lambda: home.counts["given_up"] == 1)
            await home.hold()
            await until(lambda: len(home.gateway.relay.holding) == 1)
            await held_one.close()
            await until(lambda: home.counts["given_up"] == 2)
            assert (await home.open(second, 2))["replaying"] == 0
            assert second.talks == []

    run(story())


def test_a_client_that_leaves_while_it_is_replayed_ends_the_replay(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Worker(silent), Worker(silent)
        async with house(tmp_path, first, second) as home:
            caller = await home.ask(request())
            await until(lambda: first.talks)
            await home.hold()
            await home.open(second, 2)
            await until(lambda: second.talks)
            await caller.close()
            await until(lambda: second.connections == 0)
            await until(lambda: home.told("replayed"))
            assert (home.told("replayed")[0]["failed"], home.counts["given_up"]) == (1, 1)

    run(story())


@pytest.mark.parametrize("late", [False, True])
def test_no_order_of_symptom_and_verdict_delivers_an_error_and_replays_it(tmp_path: Path, late: bool) -> None:
    async def story() -> None:
        answers: list[asyncio.Event] = [asyncio.Event() for _ in range(6)]

        def dying(number: int) -> Act:
            async def act(talk: Talk) -> None:
                await answers[number].wait()
                await talk.send(PLAIN_500)

            return act

        first = Worker(*map(dying, range(6)))
        second = Worker(plain())
        async with house(tmp_path, first, second, park_s=10) as home:
            callers = [await home.ask(request(body=b'{"n":%d}' % number)) for number in range(6)]
            await until(lambda: len(first.talks) == 6)
            for number in range(3):
                answers[number].set()
            await parked(home, 3)
            await home.pause()
            for number in (3, 4):
                answers[number].set()
            if late:
                await parked(home, 5)
            await home.hold()
            answers[5].set()
            await home.open(second, 2)
            for caller in callers:
                got = await caller.all()
                assert (got.status, caller.raw.count(b"HTTP/1.1")) == (200, 1)
            assert home.counts["passed_error"] == 0

    run(story())


def test_an_unknown_paths_failure_passes_at_once_and_is_still_reported(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw(PLAIN_500)), park_s=10) as home:
            assert (await home.get(request("/v1/files"))).raw == PLAIN_500
            await until(lambda: home.told("symptom"))
            assert (home.counts["parked"], home.counts["symptoms"], home.counts["passed_error"]) == (0, 1, 1)

    run(story())


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "429 Too Many", "501 No"])
def test_errors_of_the_clients_own_making_pass_at_once_and_are_no_symptom(tmp_path: Path, status: str) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(plain(ERROR_500, status)), park_s=10) as home:
            got = await home.get(request())
            assert got.status == int(status[:3])
            assert (home.counts["symptoms"], home.counts["answered"]) == (0, 1)

    run(story())


def test_symptoms_name_connections_and_bodies_without_telling_them(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw(PLAIN_500)), park_s=0.01) as home:
            caller = await home.ask(request(body=b"one"))
            await caller.all()
            await caller.send(request(body=b"two"))
            await until(lambda: caller.raw.count(b"500 Oops") == 2)
            await home.get(request(body=b"one"))
            await until(lambda: len(home.told("symptom")) == 3)
            first, second, third = home.told("symptom")
            assert first["connection"] == second["connection"] != third["connection"]
            assert first["body"] == third["body"] != second["body"]
            assert b"one" not in str(home.events).encode()

    run(story())


def test_symptoms_are_told_at_a_bounded_rate_and_all_counted(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(raw(PLAIN_500)), park_s=0.01, symptoms_per_s=3) as home:
            callers = [await home.ask(request()) for _ in range(10)]
            for caller in callers:
                await caller.all()
            assert home.counts["symptoms"] == 10
            await home.rule("counts")
            assert len(home.told("symptom")) <= 6, "two seconds at most were touched"

    run(story())


HUGE = 20_000_000
HUGE_ANSWERS = {
    "plain": (plain(b"e" * HUGE, "500 Oops"), b"{}"),
    "stream": (stream(token("a"), ERROR, *[b"data: " + b"e" * 1_000_000 + b"\n\n"] * (HUGE // 1_000_000)), STREAM_BODY),
}


@pytest.mark.parametrize("name", HUGE_ANSWERS)
def test_a_huge_parked_answer_stops_the_worker_and_arrives_whole_when_released(tmp_path: Path, name: str) -> None:
    act, body = HUGE_ANSWERS[name]

    async def story() -> None:
        async with house(tmp_path, Worker(act), park_s=100, parked_bytes=1000) as home:
            caller = await home.ask(request(body=body))
            await parked(home)
            answer = next(iter(home.gateway.relay.exchanges.values())).answer
            assert answer is not None
            upstream = answer.upstream
            assert upstream is not None
            await until(lambda: "parked" in upstream._held_back, "the worker is stopped")
            kept = len(answer.filter.kept if answer.filter is not None else answer.kept)
            assert 1000 < kept < HUGE // 4
            await home.pause()
            await home.open(Worker_at(home))
            got = await caller.all()
            assert got.complete
            assert got.body.count(b"e") >= HUGE

    run(story())


def test_tokens_are_told_as_progress_and_comments_are_not(tmp_path: Path) -> None:
    async def story() -> None:
        go_on = asyncio.Event()

        async def act(talk: Talk) -> None:
            await talk.send(SSE_HEAD, chunk(token("a")), chunk(token("b")))
            await go_on.wait()
            await talk.send(chunk(b": ping\n\n") * 3, chunk(token("c", '"stop"')), chunk(DONE), LAST)

        async with house(tmp_path, Worker(act)) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await until(lambda: any(p["tokens"] == 2 and p["in_flight"] == 1 for p in home.told("progress")))
            go_on.set()
            await caller.all()
            await until(lambda: home.told("progress")[-1]["in_flight"] == 0)
            last = home.told("progress")[-1]
            assert (last["tokens"], last["generation"]) == (3, 1)
            assert last["token_at"] > 0

    run(story())


def test_the_head_of_a_stream_goes_out_without_its_first_event_after_a_while(tmp_path: Path) -> None:
    async def story() -> None:
        async def act(talk: Talk) -> None:
            await talk.send(SSE_HEAD)
            await talk.gone()

        first, second = Worker(act), Worker(stream())
        async with house(tmp_path, first, second, stream_head_s=0.05, sweep_s=0.02, silent_stream_s=5) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await until(lambda: caller.raw == SSE_HEAD)
            await home.hold()
            await home.open(second, 2)
            await caller.until(LAST)
            assert caller.raw == WHOLE, "nothing of an answer was delivered: the head fits the second one"

    run(story())
