from __future__ import annotations

import random

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from defib.gateway.events import Kind, Watch, error_object
from defib.gateway.framing import BadFraming, ChunkScanner, LengthScanner, Piece, chunk
from defib.gateway.stream import StreamFilter


def token(text: str, finish: str = "null") -> bytes:
    return b'data: {"id":"c","choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n' % (
        text.encode(),
        finish.encode(),
    )


ERROR = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'
BOTH = b'data: {"choices":[{"text":"a","finish_reason":null}],"error":{"code":500}}\n\n'
DONE = b"data: [DONE]\n\n"
GOOD = [token("a"), token("b"), b": ping\n\n", token("c", '"stop"'), DONE]


def chunked(payload: bytes, rng: random.Random) -> bytes:
    """The payload in chunks whose borders have nothing to do with its events."""
    out = b""
    while payload:
        size = rng.randint(1, len(payload))
        out += chunk(payload[:size])
        payload = payload[size:]
    return out + b"0\r\n\r\n"


def segments(raw: bytes, rng: random.Random) -> list[bytes]:
    out = []
    while raw:
        size = rng.randint(1, min(len(raw), rng.choice((1, 3, 40, 4000))))
        out.append(raw[:size])
        raw = raw[size:]
    return out


def payload_of(raw: bytes) -> bytes:
    """What a chunk decoder makes of a part of a chunked body."""
    pieces: list[Piece] = []
    ChunkScanner().feed(raw, pieces)
    return b"".join(raw[p.start : p.stop] for p in pieces)


@settings(max_examples=150, deadline=None)
@given(st.integers())
def test_a_good_stream_passes_byte_for_byte_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    raw = chunked(b"".join(GOOD), rng)
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    out = b"".join(filter_.feed(part) for part in segments(raw, rng))
    assert out == raw
    assert filter_.ended
    assert filter_.bad is None
    assert (filter_.watch.events, filter_.watch.tokens) == (4, 3)


@settings(max_examples=150, deadline=None)
@given(st.integers())
def test_no_byte_of_an_error_event_or_of_what_follows_gets_through(seed: int) -> None:
    rng = random.Random(seed)
    raw = chunked(GOOD[0] + GOOD[1] + ERROR + DONE, rng)
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    out = b"".join(filter_.feed(part) for part in segments(raw, rng))
    assert payload_of(out) == GOOD[0] + GOOD[1]
    assert filter_.bad is Kind.ERROR_OBJECT
    assert out + filter_.let_go() == raw, "released, it is what the worker sent"


@settings(max_examples=100, deadline=None)
@given(st.integers())
def test_what_the_client_still_expects_of_a_chunk_is_known(seed: int) -> None:
    rng = random.Random(seed)
    raw = chunked(GOOD[0] + GOOD[1] + ERROR + DONE, rng)
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    out = b"".join(filter_.feed(part) for part in segments(raw, rng))
    fill = b"x" * filter_.left + (b"\r\n" if filter_.left or filter_.owes_crlf else b"") + b"0\r\n\r\n"
    assert ChunkScanner().feed(out + fill) == len(out + fill)


EVENTS = [
    *GOOD,
    ERROR,
    token(""),
    token("x", '"length"'),
    GOOD[0].replace(b'{"id"', b'{"error":{},"id"'),
    BOTH,
    token('\\"error\\"'),
    b"event: x\n" + GOOD[0],
    GOOD[0] + GOOD[1],
]
EVENTS += [
    b'data: {"choices":[],"usage":{}}\n\n',
    GOOD[0].replace(b"\n\n", b"\r\n\r\n"),
    GOOD[0][:-1],
    b"data: [DONE]x\n\n",
]
RAW = [*map(chunk, EVENTS), chunk(GOOD[0]).replace(b"\r\n", b"\rX", 1), chunk(GOOD[0])[:-1] + b"x", chunk(GOOD[0])[:-3]]
RAW += [
    chunk(GOOD[0]) + chunk(GOOD[1]),
    chunk(GOOD[0])[:30],
    b"0\r\n\r\n",
    b"zz\r\n" + GOOD[0] + b"\r\n",
    b"\r\n",
    b"\r",
]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(RAW), max_size=6))
def test_the_hot_path_says_yes_only_where_the_slow_one_passes_all_and_counts_the_same(raws: list[bytes]) -> None:
    fast, slow = StreamFilter(ChunkScanner(), 1 << 20), StreamFilter(ChunkScanner(), 1 << 20)
    for raw in [chunk(GOOD[0]), *raws]:
        hot = fast.is_token(raw)
        try:
            passed = slow.feed(raw)
        except BadFraming:
            assert not hot
            return
        assert passed == raw or not hot
        if not hot:
            assert fast.feed(raw) == passed
        assert (fast.watch.tokens, fast.watch.events) == (slow.watch.tokens, slow.watch.events)
        assert (fast.watch.finished, fast.bad, fast.left) == (slow.watch.finished, slow.bad, slow.left)


def test_the_usual_event_takes_the_hot_path() -> None:
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    filter_.feed(chunk(GOOD[0]))
    assert filter_.is_token(chunk(GOOD[1]))


def test_an_event_is_judged_only_when_whole_and_not_before() -> None:
    raw = chunk(GOOD[0])
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    for at in range(len(raw) - 3):
        assert filter_.feed(raw[at : at + 1]) == b"", at
    assert filter_.feed(raw[-3:]) == raw


@pytest.mark.parametrize("events", [[GOOD[0], DONE], [GOOD[0]], [], [DONE]])
def test_a_stream_that_ends_without_a_finish_reason_is_kept_back(events: list[bytes]) -> None:
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    for event in events:
        filter_.feed(chunk(event))
    filter_.feed(b"0\r\n\r\n")
    assert filter_.bad is Kind.NO_FINISH
    assert filter_.ended


def test_a_stream_of_a_form_that_we_do_not_know_may_end_as_it_likes() -> None:
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    assert filter_.feed(chunk(b'data: {"x":1}\n\n') + chunk(DONE) + b"0\r\n\r\n")
    assert filter_.bad is None


def test_an_error_event_without_its_blank_line_at_the_end_is_caught() -> None:
    body = GOOD[0] + ERROR.rstrip()
    filter_ = StreamFilter(LengthScanner(len(body)), 1 << 20)
    assert filter_.feed(body) == GOOD[0]
    assert filter_.bad is Kind.ERROR_OBJECT


def test_crlf_line_ends_of_events_are_understood() -> None:
    filter_ = StreamFilter(ChunkScanner(), 1 << 20)
    first = chunk(GOOD[0].replace(b"\n", b"\r\n"))
    assert filter_.feed(first) == first
    assert filter_.feed(chunk(ERROR.replace(b"\n", b"\r\n"))) == b""


def test_an_event_longer_than_the_limit_makes_the_filter_blind_and_loses_nothing() -> None:
    raw = chunk(b"data: " + b"x" * 300)
    filter_ = StreamFilter(ChunkScanner(), 100)
    assert filter_.feed(raw) == raw
    assert filter_.blind
    assert filter_.feed(chunk(ERROR)) == chunk(ERROR)
    exact = StreamFilter(ChunkScanner(), 100)
    assert exact.feed(chunk(b"d" * 100)) == b""
    assert not exact.blind


@pytest.mark.parametrize(
    ("event", "bad"),
    [
        (b'data: {"error":{"message":"x"}}\n\n', True),
        (b'data:{"error":"x"}\n\n', True),
        (b'data: {"id":"x","choices":[],"error":{"code":500}}\n\n', True),
        (b'event: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n', True),
        (b'data: {"object":"error","message":"old vLLM","code":500}\n\n', True),
        (b': ok\ndata: {"error":{"message":"behind a comment"}}\n\n', True),
        (b'data: {"id":"x","error":null,"choices":[{"text":"a"}]}\n\n', False),
        (b'data: {"choices":[{"text":"\\"error\\": {"}]}\n\n', False),
        (b'data: {"choices":[{"text":"error"}]}\n\n', False),
        (b'data: {"choices":[{"delta":{"content":"data: {\\"error\\":1}\\n\\n"}}]}\n\n', False),
        (b'data: {"response":{"error":null}}\n\n', False),
        (b'data: {"choices":[{"delta":{"error":"nested"}}]}\n\n', False),
    ],
)
def test_only_a_top_level_error_of_the_worker_counts_as_one(event: bytes, bad: bool) -> None:
    assert (Watch().whole(event) is Kind.ERROR_OBJECT) is bad


@pytest.mark.parametrize(
    ("event", "tokens"),
    [
        (token("x"), 1),
        (token(""), 0),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', 0),
        (b'data: {"choices":[{"delta":{"content":"","reasoning_content":"h"}}]}\n\n', 1),
        (b'data: {"choices": [{"delta": {"content": "spaced"}}]}\n\n', 1),
        (b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n', 1),
        (b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n', 0),
        (b": ping\n\n", 0),
        (b"event: ping\n\n", 0),
        (b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n', 1),
        (b'data: {"type":"response.output_text.delta","delta":"a"}\n\n', 1),
    ],
)
def test_only_events_with_generated_content_count_as_tokens(event: bytes, tokens: int) -> None:
    watch = Watch()
    watch.whole(event)
    assert watch.tokens == tokens


@pytest.mark.parametrize(
    ("event", "finished"),
    [
        (token("x", '"stop"'), True),
        (token("x"), False),
        (token('\\"finish_reason\\":\\"stop\\"'), False),
        (b'data: {"choices": [{"finish_reason": "length"}]}\n\n', True),
        (b'data: {"choices": [{"finish_reason": null}]}\n\n', False),
        (b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n', True),
        (b'data: {"type":"response.completed","response":{}}\n\n', True),
    ],
)
def test_a_finish_reason_is_seen_in_every_form_and_not_in_generated_text(event: bytes, finished: bool) -> None:
    watch = Watch()
    watch.whole(event)
    assert watch.finished is finished


def test_error_objects_of_plain_answers_are_read() -> None:
    assert error_object(b'{"error":{"message":"m"}}') == {"message": "m"}
    assert error_object(b'{"error":"m"}') == {"message": "m"}
    assert error_object(b'{"object":"error","message":"m"}') == {"object": "error", "message": "m"}
    assert error_object(b"[1]") is None
    assert error_object(b"<html>") is None


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.integers())
def test_the_chunk_scanner_agrees_with_h11(payload: bytes, seed: int) -> None:
    rng = random.Random(seed)
    raw = chunked(payload, rng)[:-2] + rng.choice((b"", b"X-Trailer: 1\r\n")) + b"\r\n"
    scanner, got, ends = ChunkScanner(), b"", []
    for part in segments(raw, rng):
        pieces: list[Piece] = []
        ends.append(scanner.feed(part, pieces))
        got += b"".join(part[p.start : p.stop] for p in pieces)
    oracle = h11.Connection(h11.SERVER)
    oracle.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)
    body = b""
    while not isinstance(event := oracle.next_event(), h11.EndOfMessage):
        body += bytes(event.data) if isinstance(event, h11.Data) else b""
    assert got == body == payload
    assert [end for end in ends[:-1] if end >= 0] == []
    assert ends[-1] >= 0


BAD_CHUNKS = (
    *(b"g\r\n", b"-1\r\n", b"+1\r\n", b"1_0\r\n", b" 1\r\n", b"\r\n", b"1\n", b"0x1\r\n", b"1" * 17),
    *(b"1\r\nab\r\n", b"1\r\na\n\r\n", b"1\r\na\rX", b"5\rX\n"),
    *(b"1;" + b"x" * 2000, b"0\r\n" + b"a: b\r\n" * 4000),
)


@pytest.mark.parametrize("raw", BAD_CHUNKS)
def test_bad_chunked_framing_is_an_error(raw: bytes) -> None:
    with pytest.raises(BadFraming):
        ChunkScanner().feed(raw + b"\r\n")


def test_what_follows_a_body_is_not_part_of_it() -> None:
    assert ChunkScanner().feed(b"1\r\na\r\n0\r\n\r\nGET /") == 11
    assert LengthScanner(3).feed(b"abcGET") == 3
