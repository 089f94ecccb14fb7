"""Bytes to findings: what is reported, once, when, and with whose name."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
from tests.triage.support import READY, START, causes, findings, matcher, serving, shipped

from defib.triage.assembler import QUIET_S
from defib.triage.lines import STALE_S
from defib.triage.scanner import REPEAT_S, Scanner
from defib.triage.signatures import MAX_FINDING_CHARS

FATAL = """\
(EngineCore pid=42) ERROR 12-01 00:00:29 [core.py:1332] EngineCore encountered a fatal error.
(EngineCore pid=42) ERROR 12-01 00:00:29 [core.py:1332] Traceback (most recent call last):
(EngineCore pid=42) ERROR 12-01 00:00:29 [core.py:1332]   File "vllm/v1/engine/core.py", line 1323, in run
(EngineCore pid=42) ERROR 12-01 00:00:29 [core.py:1332] {exception}
"""
ASSERT = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1515: f: block: [{n},0,0], thread: [96,0,0] Assertion `a` failed.\n"
)


def test_a_finding_names_process_pid_line_and_the_caller_s_time() -> None:
    (found,) = causes(
        findings(FATAL.format(exception="RuntimeError: CUDA error: misaligned address"), scanner=serving())
    )
    assert (found.signature, found.fault, found.role) == ("cuda_misaligned_address", "poisoned_context", "cause")
    assert (found.process, found.pid, found.rank, found.stream) == ("EngineCore", 42, None, "stdout")
    assert (found.line, found.at) == (8, 10.0)
    assert found.text == "RuntimeError: CUDA error: misaligned address"


def test_a_finding_names_the_rank() -> None:
    text = FATAL.replace("EngineCore pid=42", "Worker_TP1 pid=44").format(
        exception="RuntimeError: CUDA error: misaligned address"
    )
    assert [f.rank for f in causes(findings(text, scanner=serving()))] == [1]


def test_a_record_counts_only_at_its_levels() -> None:
    text = (
        "(EngineCore pid=42) {} 11-30 23:30:13 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly\n"
    )
    assert [f.signature for f in findings(text.format("ERROR"), scanner=serving())] == ["vllm_worker_died"]
    assert findings(text.format("WARNING"), scanner=serving()) == []


def test_a_finding_s_text_is_bounded() -> None:
    exception = "torch.OutOfMemoryError: CUDA out of memory. " + "x" * 5000
    (found,) = causes(findings(FATAL.format(exception=exception), scanner=serving()))
    assert len(found.text) == MAX_FINDING_CHARS


def test_every_line_is_returned_dull_ones_too() -> None:
    scanned = Scanner(matcher()).feed("stdout", START.encode() + b"\nhalf", 1.0)
    assert [line.number for line in scanned.lines] == [1, 2, 3, 4, 5]
    assert scanned.findings == ()


def test_the_ready_line_is_a_hint_and_ends_the_start() -> None:
    scanner = Scanner(matcher())
    scanner.feed("stdout", START.encode(), 1.0)
    assert not scanner.ready
    scanned = scanner.feed("stderr", READY.encode(), 2.0)
    assert [(f.signature, f.role) for f in scanned.findings] == [("vllm_ready", "hint")]
    assert scanner.ready


def test_repeats_of_a_finding_are_counted_not_reported() -> None:
    scanner = serving()
    storm = "".join(ASSERT.format(n=n) for n in range(5000))
    assert len(scanner.feed("stderr", storm.encode(), 10.0).findings) == 1
    assert scanner.suppressed == 4999
    assert scanner.feed("stderr", ASSERT.format(n=1).encode(), 10.0 + REPEAT_S / 2).findings == ()
    assert len(scanner.feed("stderr", ASSERT.format(n=1).encode(), 10.0 + REPEAT_S).findings) == 1


def test_the_same_finding_of_another_rank_is_reported() -> None:
    text = "".join(
        FATAL.replace("EngineCore pid=42", f"Worker_TP{n} pid={43 + n}").format(
            exception="RuntimeError: CUDA error: misaligned address"
        )
        for n in range(2)
    )
    assert [f.rank for f in causes(findings(text, scanner=serving()))] == [0, 1]


def test_an_exception_that_nothing_explains_is_reported_when_its_record_is_over() -> None:
    scanner = serving()
    text = FATAL.format(exception="KeyError: 'block_7'")
    assert causes(list(scanner.feed("stdout", text.encode(), 10.0).findings)) == []
    assert scanner.flush(10.0 + QUIET_S / 2).findings == ()
    (found,) = scanner.flush(10.0 + QUIET_S).findings
    assert (found.signature, found.line, found.text) == ("vllm_engine_fatal", 8, "KeyError: 'block_7'")


def test_where_carriage_returns_join_the_lines_it_is_reported_at_once() -> None:
    text = FATAL.format(exception="KeyError: 'block_7'").rstrip("\n").replace("\n", "\r\n") + "\n"
    found = serving().feed("stdout", text.encode(), 10.0).findings
    assert [f.signature for f in causes(list(found))] == ["vllm_engine_fatal"]


def test_a_known_cause_later_in_the_same_record_explains_it() -> None:
    chained = "KeyError: 7\n\nDuring handling of the above exception, another exception occurred:\n\n"
    chained += "Traceback (most recent call last):\n"
    chained += '  File "vllm/v1/engine/core.py", line 3, in run\nRuntimeError: CUDA error: misaligned address'
    text = FATAL.format(exception=chained.replace("\n", "\n(EngineCore pid=42) ERROR 12-01 00:00:29 [core.py:1332] "))
    assert [f.signature for f in causes(findings(text, scanner=serving()))] == ["cuda_misaligned_address"]


def test_records_come_with_their_traceback() -> None:
    scanner = serving()
    scanner.feed("stdout", FATAL.format(exception="KeyError: 7").encode(), 10.0)
    (record,) = scanner.flush(11.0).records
    assert record.heading.message == "EngineCore encountered a fatal error."
    assert record.exception == "KeyError: 7" and record.numbers == (5, 8)


def json_line(level: str, name: str, message: str, **more: str) -> str:
    values = {"levelname": level, "name": name, "process": 42, "message": message, "vllm_process_name": "EngineCore"}
    return json.dumps({"asctime": "2026-11-30 23:21:50,1", **values, **more}) + "\n"


def test_the_json_formatter_s_exceptions_are_read() -> None:
    scanner = Scanner(matcher())
    scanner.feed("stdout", json_line("INFO", "vllm.v1.engine.core", "x").encode(), 1.0)
    scanner.feed("stdout", json_line("INFO", "uvicorn.error", "Application startup complete.").encode(), 2.0)
    assert scanner.ready
    trace = 'Traceback (most recent call last):\n  File "x", line 1, in f\n'
    trace += "torch.AcceleratorError: CUDA error: misaligned address\nhint"
    text = json_line("ERROR", "vllm.v1.engine.core", "EngineCore encountered a fatal error.", exc_info=trace)
    found = causes(findings(text, scanner=scanner))
    assert [(f.signature, f.pid, f.line) for f in found] == [("cuda_misaligned_address", 42, 3)]


@pytest.mark.parametrize("stream", ["stdin", ""])
def test_an_unknown_stream_is_refused(stream: str) -> None:
    with pytest.raises(ValueError, match="unknown stream"):
        Scanner(matcher()).feed(stream, b"x\n", 1.0)


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ValueError, match="known: vllm"):
        Scanner(matcher(), "apache")


def test_memory_stays_bounded_whatever_speaks() -> None:
    """Thousands of processes, each with an open traceback and a finding of its own."""
    scanner = Scanner(matcher())
    for pid in range(5000):
        text = FATAL.replace("EngineCore pid=42", f"Worker_TP{pid} pid={pid}")
        scanner.feed("stdout", text.format(exception="KeyError: 7").encode(), 1.0)
    assert len(scanner._tags) <= 1024 and len(scanner._reported) <= 1024
    assert len(scanner._waiting) <= 256 and len(scanner._assembler._open) <= 256


@pytest.mark.parametrize(
    "shape", ["(" * 2000, "(EngineCore pid=1) " * 500, "[" * 4000, "a." * 8000 + "Error: ", " " * 60_000]
)
def test_long_odd_lines_cost_linear_time(shape: str) -> None:
    begin = time.process_time()
    findings(shape + "\n", "stderr")
    assert time.process_time() - begin < 0.5


def test_no_signature_keeps_the_gate_from_skipping_access_and_statistics_lines() -> None:
    gate = Scanner(matcher())._gate
    assert gate.match('INFO:     10.0.2.11:52953 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
    assert gate.match("(APIServer pid=1) INFO 09-20 01:01:19 [loggers.py:318] Engine 000: Avg prompt throughput")
    assert gate.match("INFO 09-20 01:01:19 logger.py:42] Received request cmpl-1")
    assert not gate.match("(APIServer pid=1) INFO 09-20 01:01:19 [launcher.py:100] [shutdown] x")
    assert not gate.match("(APIServer pid=1) ERROR 09-20 01:01:19 [loggers.py:318] INFO 09-20 01:01:19 [x.py:1]")
    assert not gate.match(READY.strip())


def test_the_gate_hides_no_example_s_finding() -> None:
    """The gate is only speed: each INFO or DEBUG line that it skips is at no place that a signature names."""
    gate = Scanner(matcher())._gate
    for signature in shipped():
        for example in signature.examples:
            skipped = [line for line in example.text.split("\n") if gate.match(line)]
            assert not skipped or len(skipped) < len(example.text.split("\n")), signature.id


def test_nothing_is_found_in_nothing() -> None:
    scanner = Scanner(matcher())
    assert scanner.feed("stdout", b"", 1.0).lines == ()
    assert scanner.flush(math.inf).lines == ()
    assert re.fullmatch(r"\d+", str(scanner.suppressed))


def test_a_last_line_without_an_end_still_belongs_to_its_traceback() -> None:
    """A process that is killed leaves half a line; it is read when it has been stale for long enough."""
    scanner = serving()
    text = FATAL.format(exception="RuntimeError: CUDA error: misaligned address").rstrip("\n")
    assert causes(list(scanner.feed("stdout", text.encode(), 10.0).findings)) == []
    assert scanner.flush(10.0 + QUIET_S).findings == ()
    (found,) = scanner.flush(10.0 + STALE_S).findings
    assert (found.signature, found.at) == ("cuda_misaligned_address", 10.0)
