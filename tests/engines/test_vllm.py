"""A real vLLM under `defib run`: what every client received, the evidence, and what is left.

The first three tests share one instance, since a start takes half a minute; each leaves it serving or,
if it ended it, the next one starts another.
"""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.bed import START_LIMIT_S, Bed, Seen, chat, completion, read_json, wait_until
from tests.engines.clients import Client

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
Start = Callable[..., Bed]
PLAIN = completion("Seven requests were in flight", 60)
LATE = completion("Evidence first, then the kill", 40, stream=True)
BAD_FLAG_EXIT_CODE = 78
CONTEXT_LINES = 100


@pytest.fixture(scope="module")
def serving(start: Start) -> Callable[[], Bed]:
    """A serving instance: the one of the test before, if it still serves."""
    current: list[Bed] = []

    def get() -> Bed:
        if not current or current[-1].process.poll() is not None:
            current.append(start().ready())
        return current[-1]

    return get


def ask(bed: Bed, path: str, body: dict[str, object]) -> Client:
    return Client(bed.url, path, body).start()


def half_delivered(bed: Bed) -> tuple[Client, Client]:
    """A completion stream and a chat stream that have delivered something and have much before them."""
    streams = (
        ask(bed, "/v1/completions", completion("A context that is poisoned", 400, stream=True)),
        ask(bed, "/v1/chat/completions", chat("The supervisor reads", 400, stream=True)),
    )
    for stream in streams:
        assert stream.delivering.wait(60), bed.tail()
    return streams


def assert_ended_clearly(stream: Client) -> None:
    """Our error object is the last event, no [DONE] follows, and nothing of the worker's own error came."""
    stream.join()
    assert stream.status == 200
    assert "[DONE]" not in stream.events
    error = stream.objects[-1]["error"]
    assert error["type"].startswith("defib_"), error
    assert "EngineCore" not in bytes(stream.raw).decode()
    assert stream.finish_reason is None
    assert len(stream.choices) > 1


def assert_complete(answer: Client, expected: Client) -> None:
    """The same answer as before the fault."""
    answer.join()
    assert answer.status == 200, bytes(answer.raw)
    assert (answer.text, answer.finish_reason) == (expected.text, "length")
    if answer.body["stream"]:
        assert answer.events[-1] == "[DONE]"
        assert len(answer.choices) == len(expected.choices)


def new_incident(bed: Bed, before: int) -> Path:
    """The one folder that was added, once it has its report."""

    def settled() -> Path | None:
        added = bed.incidents()[before:]
        assert len(added) <= 1, added
        return added[0] if added and (added[0] / "report.md").exists() else None

    folder = wait_until(settled, f"one settled incident\n{bed.tail()}", START_LIMIT_S)
    assert isinstance(folder, Path)
    return folder


def generation(bed: Bed) -> Seen:
    """Today's worker, whole: API server, tracker, EngineCore and Worker, with its segments."""
    seen = bed.generation()
    assert len(seen.processes) == 4, seen
    assert seen.segments
    return seen


def assert_gone(seen: Seen) -> None:
    """No process and no segment of a dead generation is left."""
    assert not seen.left(), seen.left()


def test_an_illegal_access_costs_no_answer_that_had_not_begun(serving: Callable[[], Bed]) -> None:
    bed = serving()
    before = len(bed.incidents())
    expected_plain = ask(bed, "/v1/completions", PLAIN).join()
    expected_late = ask(bed, "/v1/completions", LATE).join()
    streams = half_delivered(bed)
    plain = ask(bed, "/v1/completions", PLAIN)
    wait_until(lambda: bed.running() == 3, "three requests run", 30)
    # The engine takes three at a time, so this one is dispatched and delivers nothing.
    late = ask(bed, "/v1/completions", LATE)
    dead = generation(bed)
    wait_until(lambda: bed.waiting() == 1, "one request waits in the engine", 30)
    bed.strike("illegal 2")  # It comes back in the next generation, so that the fallback is needed.

    for stream in streams:
        assert_ended_clearly(stream)
    assert_complete(plain, expected_plain)
    assert_complete(late, expected_late)

    folder = new_incident(bed, before)
    verdict = read_json(folder, "verdict*.json")
    assert "poisoned_context" in str(verdict)
    assert_context(folder)
    assert (folder / "report.md").stat().st_size > 500
    assert_gone(dead)
    assert bed.rungs() == ["same-again", "eager"]
    now = generation(bed)
    assert not set(now.processes) & set(dead.processes)
    root = min(now.processes.values(), key=lambda process: process.create_time())
    assert root.cmdline()[-1] == "--enforce-eager"
    assert_complete(ask(bed, "/v1/completions", PLAIN), expected_plain)


def assert_context(folder: Path) -> None:
    """At least 100 lines are kept before the causal one, and the causal one is there."""
    text = next(folder.glob("log-g*.txt")).read_text(encoding="utf-8")
    before, found, _ = text.partition("CUDA error: an illegal memory access was encountered")
    assert found
    assert before.count("\n") >= CONTEXT_LINES


def test_a_killed_engine_is_replaced_and_its_requests_answered(serving: Callable[[], Bed]) -> None:
    bed = serving()
    before = len(bed.incidents())
    expected = ask(bed, "/v1/completions", PLAIN).join()
    (stream, chat_stream), plain = half_delivered(bed), ask(bed, "/v1/completions", PLAIN)
    wait_until(lambda: bed.running() == 3, "three requests run", 30)
    dead = generation(bed)
    engine = dead.named("VLLM::EngineCore")
    assert engine is not None
    engine.send_signal(signal.SIGKILL)

    for client in (stream, chat_stream):
        assert_ended_clearly(client)
    assert_complete(plain, expected)
    folder = new_incident(bed, before)
    assert "poisoned_context" not in str(read_json(folder, "verdict*.json"))
    assert_gone(dead)
    assert_complete(ask(bed, "/v1/completions", PLAIN), expected)


def test_sigterm_with_traffic_ends_in_order_and_is_no_incident(serving: Callable[[], Bed]) -> None:
    bed = serving()
    before = bed.incidents()
    streams = half_delivered(bed)
    assert bed.terminate() == 0, bed.tail()
    for stream in streams:
        stream.join()
        assert "[DONE]" not in stream.events or stream.finish_reason == "length"
    assert bed.incidents() == before
    assert bed.health() == 0
    bed.assert_nothing_left()


def test_a_bad_flag_is_told_and_not_tried_again(start: Start) -> None:
    bed = start("--no-such-flag", "3")
    assert bed.process.wait(START_LIMIT_S) == BAD_FLAG_EXIT_CODE, bed.tail()
    said = bed.stdout_path.read_text("utf-8", "replace") + bed.stderr_path.read_text("utf-8", "replace")
    assert "vllm: error: unrecognized arguments: --no-such-flag 3" in said
    assert re.findall(r"worker started generation=(\d+)", said) == ["1"]
    assert not bed.incidents()
    bed.assert_nothing_left()
