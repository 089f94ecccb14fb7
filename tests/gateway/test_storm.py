"""Seeded storms: many clients, workers that fail in every way, a supervisor that rules in random order.

Whatever happens: one answer a client, of one generation only, complete or with a clear end; never more dispatches than
allowed; every exchange counted once; no error of an incident for somebody who is replayed.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from tests.gateway.bed import (
    DONE,
    ERROR,
    ERROR_500,
    LAST,
    SSE_HEAD,
    Caller,
    House,
    Talk,
    Worker,
    chunk,
    head,
    house,
    parsed,
    request,
    run,
    token,
    until,
)

CLIENTS = 40
ROUNDS = 6


class Fickle(Worker):
    """Answers by chance; every token says which client and which generation it belongs to."""

    def __init__(self, generation: int, rng: random.Random, healthy: bool) -> None:
        super().__init__(self.answer)
        self.generation, self.rng, self.healthy = generation, rng, healthy

    async def answer(self, talk: Talk) -> None:
        body = json.loads(talk.body)
        fault = "none" if self.healthy else self.rng.choice(("none", "none", "error", "cut", "silent", "no finish"))
        await asyncio.sleep(self.rng.random() * 0.02)
        if body.get("stream"):
            await self._stream(talk, body["n"], fault)
        else:
            await self._plain(talk, body["n"], fault)

    async def _stream(self, talk: Talk, number: int, fault: str) -> None:
        good = self.rng.randint(0, 3) if fault != "none" else 4
        raw = b"".join(chunk(token(f"{number}/{self.generation}/{at}")) for at in range(good))
        if fault == "none":
            raw += chunk(token(f"{number}/{self.generation}/4", '"stop"')) + chunk(DONE) + LAST
        elif fault == "error":
            raw += chunk(ERROR) + chunk(DONE) + LAST
        elif fault == "no finish":
            raw += chunk(DONE) + LAST
        elif fault == "cut":
            raw += chunk(token("never whole"))[: self.rng.randint(0, 40)]
        raw = SSE_HEAD + raw
        while raw:
            size = self.rng.choice((7, 50, 400))
            await talk.send(raw[:size])
            raw = raw[size:]
        if fault == "cut":
            talk.cut()
        elif fault == "silent":
            await talk.gone()

    async def _plain(self, talk: Talk, number: int, fault: str) -> None:
        page = b'{"choices":[{"text":"%d/%d"}]}' % (number, self.generation)
        if fault == "none":
            await talk.send(head(f"Content-Length: {len(page)}") + page)
        elif fault == "silent":
            await talk.gone()
        elif fault == "cut":
            await talk.send(head(f"Content-Length: {len(page)}") + page[: self.rng.randint(0, 9)])
            talk.cut()
        else:
            await talk.send(head(f"Content-Length: {len(ERROR_500)}", status="500 No") + ERROR_500)


async def clients(home: House, rng: random.Random) -> list[tuple[int, bool, Caller]]:
    made = []
    for number in range(CLIENTS):
        streams = rng.random() < 0.6
        body = json.dumps({"n": number, "stream": streams}).encode()
        made.append((number, streams, await home.ask(request(body=body))))
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.1:
            await made.pop()[2].close()
    return made


async def rulings(home: House, workers: list[Fickle], rng: random.Random) -> None:
    generation = 1
    while generation < len(workers):
        await asyncio.sleep(rng.random() * 0.15)
        verb = rng.choice(("pause", "open", "hold"))
        if verb == "hold":
            await home.hold(generation)
            if rng.random() < 0.5:
                await home.hold(generation)
            await asyncio.sleep(rng.random() * 0.1)
            generation += 1
            await home.open(workers[generation - 1], generation, ramp_per_s=rng.choice((0, 500)))
        elif verb == "pause":
            await home.pause(generation, lease_s=rng.choice((0.02, 30)))
        else:
            await home.open(workers[generation - 1], generation)


def check_stream(number: int, raw: bytes) -> str:
    got = parsed(raw)
    if got.status != 200:
        json.loads(got.body)["error"]
        return "told"
    said = [json.loads(data) for data in got.data if data != "[DONE]"]
    tokens = [event["choices"][0]["text"].split("/") for event in said if "choices" in event]
    assert [int(at) for _, _, at in tokens] == list(range(len(tokens))), "each token once, in order"
    assert {int(n) for n, _, _ in tokens} <= {number}, "nobody gets another one's tokens"
    assert len({generation for _, generation, _ in tokens}) <= 1, "one generation only"
    errors = [event["error"] for event in said if "error" in event]
    assert len(errors) <= 1
    if len(tokens) == 5:
        assert got.complete
        assert got.data[-1] == "[DONE]"
        assert not errors
        return "answered"
    if errors and errors[0]["type"].startswith("defib_"):
        assert got.complete
        assert "error" in got.data[-1]
    return "told" if errors else "cut or unfinished"


def check_plain(number: int, raw: bytes) -> str:
    got = parsed(raw)
    assert got.complete
    page = json.loads(got.body)
    if got.status == 200:
        assert page["choices"][0]["text"].split("/")[0] == str(number)
        return "answered"
    assert page["error"]
    return "told"


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_faults_and_rulings_ends_every_exchange_once_and_clearly(tmp_path: Path, seed: int) -> None:
    async def story() -> None:
        rng = random.Random(seed)
        workers = [Fickle(number + 1, rng, number == ROUNDS - 1) for number in range(ROUNDS)]
        limits = {"park_s": 0.15, "hold_plain_s": 8.0, "hold_stream_s": 8.0, "silent_stream_s": 0.1}
        async with house(tmp_path, *workers, **limits) as home:
            made, _ = await asyncio.gather(clients(home, rng), rulings(home, workers, rng))
            await until(home.balanced, f"everything ends: {home.counts}")
            ends = []
            for number, streams, caller in made:
                await until(lambda c=caller: c.ended or parsed(c.raw, eof=False).complete)  # type: ignore[misc]
                assert caller.raw.count(b"HTTP/1.1 ") == 1, "one answer"
                ends.append((check_stream if streams else check_plain)(number, caller.raw))
            assert ends.count("answered") >= 3, ends
            sent = [json.loads(talk.body)["n"] for worker in workers for talk in worker.talks]
            assert max(sent.count(number) for number in set(sent)) <= 3
            assert home.gateway.relay.body_bytes == 0

    run(story())
