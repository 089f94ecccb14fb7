"""The gateway's side of docs/seam.md, held to the page: its words, its fields, its refusals."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.bed import STREAM_BODY, House, Worker, house, plain, request, run, silent, stream, until

from defib.runtime.seam import SeamRefused

PAGE = (Path(__file__).parents[2] / "docs" / "seam.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("\n## Gateway") :]


def table(heading: str) -> dict[str, list[str]]:
    """The names and the fields in backticks of a table of the gateway's section."""
    rows = SECTION[SECTION.index(heading) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].strip("`"): re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row[1])) for row in cells}


VERBS, EVENTS = table("| verb |"), table("| event |")
COUNTS = re.findall(r"`(\w+)`", SECTION[SECTION.index("`counts` (monotonic") :].split("Every accepted")[0])[1:]


def test_the_page_is_read_as_meant() -> None:
    assert set(VERBS) == {"open", "pause", "hold", "refuse", "counts", "exchanges"}
    assert set(EVENTS) == {"symptom", "progress", "counts", "replayed"}
    assert "passed_error" in COUNTS


def test_the_snapshot_has_every_field_of_the_page(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path) as home:
            example = json.loads(re.search(r"Snapshot: `(\{.*?)`", SECTION).group(1).replace("{...}", "{}"))  # type: ignore[union-attr]
            snapshot = home.snapshots[0]
            assert set(example) <= set(snapshot)
            for name, value in example.items():
                if name != "address":
                    assert type(snapshot[name]) is type(value), name
            assert set(COUNTS) == set(snapshot["counts"])
            assert home.supervisor.hello["who"] == "gateway"

    run(story())


GOOD: dict[str, dict[str, Any]] = {
    "open": {"generation": 1, "address": "127.0.0.1:9", "ramp_per_s": 0},
    "pause": {"generation": 1, "lease_s": 5},
    "hold": {"generation": 1, "lease_s": 5, "ready_in_s": None, "incident": "i"},
    "refuse": {"reason": "r", "retry_after_s": 5},
    "counts": {},
    "exchanges": {},
}


def test_every_verb_of_the_page_is_answered(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path) as home:
            assert set(GOOD) == set(VERBS)
            for verb, fields in GOOD.items():
                assert set(fields) <= set(VERBS[verb]) or not fields, verb
                assert (await home.rule(verb, **fields))["ok"] is True

    run(story())


@pytest.mark.parametrize(
    ("verb", "wrong"),
    [
        ("open", {"generation": "1"}),
        ("open", {"generation": True}),
        ("open", {"generation": -1}),
        ("open", {"address": "nowhere"}),
        ("open", {"address": "127.0.0.1:99999"}),
        ("open", {"address": None}),
        ("open", {"ramp_per_s": -1}),
        ("pause", {"lease_s": None}),
        ("pause", {"lease_s": "5"}),
        ("hold", {"ready_in_s": "soon"}),
        ("hold", {"incident": 7}),
        ("refuse", {"reason": None}),
        ("refuse", {"retry_after_s": float("inf")}),
    ],
)
def test_a_bad_argument_is_refused_and_changes_nothing(tmp_path: Path, verb: str, wrong: dict[str, Any]) -> None:
    async def story() -> None:
        async with house(tmp_path) as home:
            await home.rule("open", **GOOD["open"])
            before = repr(home.gateway.relay.keeper)
            with pytest.raises(SeamRefused) as refused:
                await home.rule(verb, **{**GOOD[verb], **wrong})
            assert refused.value.error == "bad_request"
            assert repr(home.gateway.relay.keeper) == before

    run(story())


def test_unknown_verbs_and_stale_generations_have_their_errors(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path) as home:
            await home.rule("open", generation=3, address="127.0.0.1:9")
            for verb in ("open", "pause", "hold"):
                with pytest.raises(SeamRefused) as refused:
                    await home.rule(verb, **{**GOOD[verb], "generation": 2})
                assert refused.value.error == "stale_generation"
            with pytest.raises(SeamRefused) as refused:
                await home.rule("launch")
            assert refused.value.error == "unknown_verb"

    run(story())


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path) as home:
            assert (await home.rule("open", **GOOD["open"], mood="good"))["ok"] is True

    run(story())


async def seen(home: House, name: str) -> dict[str, Any]:
    found: dict[str, Any] = await until(lambda: next(iter(home.told(name)), None), name)
    return found


def test_every_event_has_the_fields_of_the_page(tmp_path: Path) -> None:
    async def story() -> None:
        worker, second = Worker(plain(b'{"error":{}}', "500 No")), Worker(stream())
        async with house(tmp_path, worker, second, park_s=10) as home:
            caller = await home.ask(request(body=STREAM_BODY))
            await seen(home, "symptom")
            await home.hold()
            await home.open(second, 2)
            await caller.all()
            for name, fields in EVENTS.items():
                event = await seen(home, name)
                said = set(event) - {"type", "event"}
                if name == "symptom":
                    fields = [field for field in fields if field in said or field not in ("status", "error_object")]
                assert set(fields) <= said, name

    run(story())


def test_the_shapes_of_exchanges_tell_no_content(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(silent)
        async with house(tmp_path, worker) as home:
            raw = request("/v1/completions?key=secret1", b'{"prompt":"secret2"}', "POST", "Authorization: secret3")
            await home.ask(raw)
            await until(lambda: worker.talks)
            reply = await home.rule("exchanges")
            shape = reply["exchanges"][0]
            assert "secret" not in json.dumps(reply)
            assert (shape["path"], shape["state"], shape["generation"]) == ("/v1/completions", "sent", 1)
            assert {"id", "method", "stream", "events", "attempts", "request_bytes"} <= set(shape)
            await home.callers[0].close()

    run(story())


def test_the_shapes_are_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(silent), shapes=2) as home:
            for _ in range(3):
                await home.ask(request())
            await until(lambda: len(home.gateway.relay.exchanges) == 3)
            reply = await home.rule("exchanges")
            assert (len(reply["exchanges"]), reply["total"]) == (2, 3)
            for caller in home.callers:
                await caller.close()

    run(story())


def test_a_new_supervisor_takes_over_and_the_old_one_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(plain())) as home:
            older = home.supervisor
            newer = House.__new__(House)
            newer.gateway, newer.events, newer.snapshots = home.gateway, [], []
            from defib.runtime.seam import SeamClient

            newer.supervisor = SeamClient(
                tmp_path / "g.sock", "supervisor", 2, newer.snapshots.append, newer.events.append, lambda reason: None
            )
            await newer.supervise()
            await newer.rule("counts")
            assert newer.snapshots[0]["gate"] == "open"
            with pytest.raises(SeamRefused) as refused:
                await older.call("refuse", reason="r", retry_after_s=1)
            assert refused.value.error == "stale_epoch"
            assert (await home.get(request())).status == 200
            await newer.supervisor.stop()

    run(story())


def test_progress_and_counts_are_told_at_a_bounded_rate(tmp_path: Path) -> None:
    async def story() -> None:
        async with house(tmp_path, Worker(plain()), progress_s=0.1, counts_s=0.5) as home:
            loop = asyncio.get_running_loop()
            began = loop.time()
            while loop.time() - began < 1.0:
                await home.get(request())
            spent = loop.time() - began
            assert len(home.told("progress")) <= spent / 0.1 + 2
            assert len(home.told("counts")) <= spent / 0.5 + 2

    run(story())
