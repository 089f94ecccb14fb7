"""Bytes to lines: whatever the pieces, the lines are the same; whatever the input, memory is bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defib.triage.lines import MAX_LINE_BYTES, STALE_S, TAIL_BYTES, Line, LineSplitter


def split(*pieces: bytes) -> list[Line]:
    splitter = LineSplitter("stdout")
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.flush(math.inf)


def test_lines_carry_stream_number_and_byte_offset() -> None:
    assert split("a\nzwölf\n\nb\n".encode()) == [
        Line("stdout", 1, 0, "a"),
        Line("stdout", 2, 2, "zwölf"),
        Line("stdout", 3, 9, ""),
        Line("stdout", 4, 10, "b"),
    ]


@given(
    st.lists(st.sampled_from(["plain", "", "grün", "a\rb", "\x1b[31mred\x1b[0m", "end\r", "\udcff"]), max_size=12),
    st.lists(st.integers(0, 80), max_size=6),
)
def test_how_the_bytes_are_cut_into_pieces_changes_nothing(texts: list[str], cuts: list[int]) -> None:
    data = "".join(text + "\n" for text in texts).encode("utf-8", "surrogateescape")
    pieces, last = [], 0
    for cut in sorted(min(cut, len(data)) for cut in cuts):
        pieces.append(data[last:cut])
        last = cut
    assert split(*pieces, data[last:]) == split(data)


def test_a_progress_bar_shows_its_last_state_and_is_marked() -> None:
    (line,) = split(b"(Worker pid=4) \rLoading 0%\rLoading 50%\rLoading 100%\n")
    assert line.text == "Loading 100%" and line.rewritten


def test_a_carriage_return_before_the_newline_only_says_that_more_follows() -> None:
    first, second = split(b"ERROR one\r\nERROR two\n")
    assert (first.text, first.more, first.rewritten) == ("ERROR one", True, False)
    assert (second.text, second.more) == ("ERROR two", False)


@pytest.mark.parametrize(
    "raw", [b"\x1b[1;36m(A pid=1)\x1b[0;0m x", b"(A pid=1) \x1b[31mx\x1b[K", b"\x1b]0;title\x07(A pid=1) x"]
)
def test_colours_and_titles_are_removed(raw: bytes) -> None:
    assert [line.text for line in split(raw + b"\n")] == ["(A pid=1) x"]
    assert [line.text for line in split(raw + b"\r\n")] == ["(A pid=1) x"]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert [line.text for line in split(b"caf\xe9 \xff\n")] == ["caf\ufffd \ufffd"]


@pytest.mark.parametrize("size", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1])
@pytest.mark.parametrize("piece", [1 << 22, 1000])
def test_a_line_over_the_limit_keeps_head_and_tail_and_counts_the_rest(size: int, piece: int) -> None:
    data = b"H" + b"x" * (size - 2) + b"T\nnext\n"
    line, after = split(*(data[start : start + piece] for start in range(0, len(data), piece)))
    assert line.text[0] == "H" and line.text[-1] == "T"
    assert line.lost == size - MAX_LINE_BYTES
    assert ("1 bytes left out" in line.text) == (size > MAX_LINE_BYTES)
    assert (after.text, after.number, after.offset) == ("next", 2, size + 1)


def test_a_line_without_end_is_held_in_bounded_memory() -> None:
    splitter = LineSplitter("stdout")
    for _ in range(64):
        splitter.feed(b"x" * (1 << 20))
    (line,) = splitter.flush(math.inf)
    assert len(line.text) < MAX_LINE_BYTES + 64
    assert line.lost == (64 << 20) - MAX_LINE_BYTES
    assert len(splitter._tail) + len(splitter._head) <= MAX_LINE_BYTES + TAIL_BYTES


def test_a_stale_half_line_is_given_out_and_its_rest_is_marked_as_continued() -> None:
    splitter = LineSplitter("stderr")
    splitter.feed(b"(Engine", 1.0)
    assert splitter.flush(1.0 + STALE_S / 2) == []
    assert splitter.flush(1.0 + STALE_S) == [Line("stderr", 1, 0, "(Engine")]
    assert splitter.flush(9.0) == []
    rest, after = splitter.feed(b"Core) x\nnext\n", 9.0)
    assert rest == Line("stderr", 1, 7, "Core) x", continued=True)
    assert after == Line("stderr", 2, 15, "next")


def test_a_half_line_that_still_grows_is_not_stale() -> None:
    splitter = LineSplitter("stderr")
    splitter.feed(b"a", 1.0)
    splitter.feed(b"b", 1.4)
    assert splitter.flush(1.6) == []
    assert [line.text for line in splitter.feed(b"c\n", 1.7)] == ["abc"]


def test_a_reader_that_starts_later_counts_on_from_there() -> None:
    (line,) = LineSplitter("stdout", offset=700, number=12).feed(b"x\n")
    assert (line.number, line.offset) == (13, 700)
