"""Lines to records: tracebacks stay whole, processes that speak at once don't mix, memory is bounded."""

from __future__ import annotations

from defib.triage.assembler import MAX_OPEN, QUIET_S, Assembler
from defib.triage.lines import LineSplitter
from defib.triage.records import MAX_RECORD_LINES, Place, Record, Seen, finished

ENGINE = "(EngineCore pid=7) ERROR 12-01 00:00:29 [core.py:1332] "
WORKER = "(Worker_TP{n} pid={p}) ERROR 12-01 00:00:29 [multiproc_executor.py:948] "
TRACE = (
    "Failed.",
    "Traceback (most recent call last):",
    '  File "vllm/v1/engine/core.py", line 1, in f',
    "    f()",
    "RuntimeError: x",
    "more of x",
)


class Feed:
    """An assembler with a splitter per stream."""

    def __init__(self) -> None:
        self.assembler = Assembler()
        self.splitters = {name: LineSplitter(name) for name in ("stdout", "stderr")}

    def __call__(self, text: str, stream: str = "stdout", at: float = 1.0) -> list[Seen]:
        lines = self.splitters[stream].feed(text.encode() + b"\n", at)
        return [seen for line in lines for seen in self.assembler.push(line, at)]

    def closed(self, at: float = 9.0) -> list[Record]:
        self.assembler.flush(at)
        return [finished(record) for record in self.assembler.take()]


def prefixed(prefix: str, lines: tuple[str, ...], end: str = "\n") -> str:
    return end.join(prefix + line for line in lines)


def test_a_traceback_is_one_record_with_its_message_and_exception() -> None:
    feed = Feed()
    places = [seen.place for seen in feed(prefixed(ENGINE, TRACE))]
    assert places == [Place.RECORD, Place.NONE, Place.NONE, Place.NONE, Place.EXCEPTION, Place.DETAIL]
    (record,) = feed.closed()
    assert record.heading.message == "Failed." and record.exception == "RuntimeError: x"
    assert (record.numbers, record.traceback, record.cut) == ((1, 6), TRACE[1:], False)


def test_lines_joined_by_carriage_returns_say_exactly_where_a_record_ends() -> None:
    feed = Feed()
    feed(prefixed(ENGINE, TRACE, "\r\n") + "\n" + ENGINE + "Another.")
    first, second = (finished(record) for record in feed.assembler.take())
    assert first.traceback[-1] == "more of x"
    assert second.heading.message == "Another."


def test_the_further_lines_of_a_message_are_no_records() -> None:
    seen = Feed()(prefixed(ENGINE, ("Invocation failed: one", "EngineCore failed to start.", "two"), "\r\n"))
    assert [s.place for s in seen] == [Place.RECORD, Place.NONE, Place.NONE]


def test_tracebacks_of_several_ranks_line_by_line_don_t_mix() -> None:
    feed = Feed()
    prefixes = [WORKER.format(n=n, p=40 + n) for n in range(4)]
    seen = feed("\n".join(prefix + line for line in TRACE for prefix in prefixes))
    ends = [(s.heading.rank, s.heading.pid) for s in seen if s.place is Place.EXCEPTION]
    assert ends == [(0, 40), (1, 41), (2, 42), (3, 43)]
    assert len(feed.closed()) == 4


def test_a_chained_exception_counts_too() -> None:
    chained = (*TRACE[:5], "", "During handling of the above exception, another exception occurred:", "", *TRACE[1:5])
    seen = Feed()(prefixed(ENGINE, chained))
    assert [s.place for s in seen].count(Place.EXCEPTION) == 2


def test_the_server_s_exceptions_are_told_apart() -> None:
    seen = Feed()(prefixed("(APIServer pid=1) ERROR 12-01 00:00:29 [serving.py:1] ", TRACE))
    assert [s.place for s in seen if "exception" in s.place] == [Place.SERVER_EXCEPTION]


def test_vllm_0_8_puts_the_traceback_into_the_message() -> None:
    first = "ERROR 04-12 06:34:49 [core.py:390] EngineCore hit an exception: Traceback (most recent call last):"
    rest = prefixed("ERROR 04-12 06:34:49 [core.py:390] ", TRACE[2:5])
    assert [s.place for s in Feed()(first + "\n" + rest)][-1] is Place.EXCEPTION


def test_a_bare_traceback_counts_by_its_frames() -> None:
    engine = "\n".join(TRACE[1:5])
    server = engine.replace("vllm/v1/engine/core.py", "starlette/routing.py")
    within = engine.replace("  File", '  File "site/fastapi/routing.py", line 1, in f\n    f()\n  File')
    assert Feed()(within, "stderr")[-1].place is Place.SERVER_EXCEPTION
    custom = engine.replace("vllm/v1/engine/core.py", "/app/my_route.py")
    assert Feed()(engine, "stderr")[-1].place is Place.EXCEPTION
    assert Feed()(engine, "stdout")[-1].place is Place.SERVER_EXCEPTION
    assert Feed()(server, "stderr")[-1].place is Place.SERVER_EXCEPTION
    assert Feed()(custom, "stderr")[-1].place is Place.SERVER_EXCEPTION
    assert Feed()("Process EngineCore:\n" + custom, "stderr")[-1].place is Place.EXCEPTION


def test_raw_text_on_stderr_counts_only_outside_of_tracebacks() -> None:
    feed = Feed()
    assert feed("terminate called", "stderr")[0].place is Place.RAW_STDERR
    assert feed("terminate called", "stdout")[0].place is Place.RAW_STDOUT
    feed('  File "/app/my_route.py", line 1, in f\nValueError: x', "stderr")
    assert feed("terminate called", "stderr")[0].place is Place.NONE
    assert feed("terminate called", "stderr", at=1.0 + QUIET_S)[0].place is Place.RAW_STDERR


def test_a_quiet_record_is_closed_and_a_fresh_one_is_not() -> None:
    feed = Feed()
    feed(prefixed(ENGINE, TRACE), at=1.0)
    assert feed.closed(1.0 + QUIET_S / 2) == []
    assert len(feed.closed(1.0 + QUIET_S)) == 1


def test_a_record_ends_at_its_limit() -> None:
    feed = Feed()
    feed(prefixed(ENGINE, TRACE[:3] + ("    f()",) * MAX_RECORD_LINES))
    record = feed.closed()[0]
    assert record.cut and len(record.traceback) == MAX_RECORD_LINES


def test_the_exception_of_a_traceback_longer_than_the_limit_still_counts() -> None:
    seen = Feed()(prefixed(ENGINE, TRACE[:2] + TRACE[2:4] * 300 + TRACE[4:]))
    assert [s.place for s in seen].count(Place.EXCEPTION) == 1


def test_no_more_than_max_open_records_are_held() -> None:
    feed = Feed()
    for pid in range(MAX_OPEN + 1):
        feed(prefixed(WORKER.format(n=0, p=pid), TRACE[:2]))
    assert len(feed.assembler.take()) == 1
    assert len(feed.assembler._open) == MAX_OPEN
