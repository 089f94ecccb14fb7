"""Proof of origin: whatever a client writes, its text accuses nobody.

Every signature's own examples are put where client text can reach the log of a serving engine: prompts (as repr and
raw), bodies, model names, request ids, exceptions of the HTTP server, JSON records, raw prints. What isn't covered:
raw text that a custom route prints on *stderr* looks like the C++ runtime's; it is a suspicion of group T only.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.triage.support import READY, START, causes, findings, matcher, serving, shipped

from defib.triage.assembler import TAINT_S
from defib.triage.records import MAX_RECORD_LINES
from defib.triage.scanner import Scanner

PAYLOADS = sorted({example.text for signature in shipped() for example in signature.examples})
PAYLOADS += sorted({line.split("] ", 1)[-1] for text in PAYLOADS for line in text.split("\n")})

SERVER = "(APIServer pid=41) {level} 09-20 01:01:40 [{file}:42] "
DUMP = "(EngineCore pid=42) ERROR 09-20 01:01:40 [dump_input.py:79] "


def logged(text: str, level: str, file: str = "logger.py", join: str = "\r\n") -> str:
    """As vLLM's logger writes a message with line breaks: the heading in front of every line."""
    prefix = SERVER.format(level=level, file=file)
    return prefix + text.replace("\n", join + prefix) + "\n"


def raised(text: str, kind: str = "ValueError", prefix: str = "", end: str = "\n") -> str:
    """A traceback of the HTTP server that ends in a client's text."""
    lines = ["Traceback (most recent call last):", '  File "site/starlette/routing.py", line 73, in app']
    lines += ["    response = await f(request)", '  File "site/vllm/entrypoints/openai/api_server.py", line 5, in f']
    lines += ["    raise error", *f"{kind}: {text}".split("\n")]
    return end.join(prefix + line for line in lines) + "\n"


def as_json(text: str, level: str, name: str, tag: str, pid: int, **more: str) -> str:
    values = {"levelname": level, "name": name, "process": pid, "message": text, "vllm_process_name": tag}
    return json.dumps({"asctime": "2026-11-30 23:21:50,1", **values, **more}) + "\n"


CARRIERS = {
    "prompt as repr": lambda t: logged(f"Received request cmpl-1: prompt: {t!r}, params: SamplingParams(n=1)", "INFO"),
    "prompt raw": lambda t: logged(f"Received request cmpl-1: prompt: {t}", "INFO"),
    "prompt raw, at the beginning": lambda t: logged(t, "INFO"),
    "warning": lambda t: logged(t, "WARNING", "serving_chat.py"),
    "error": lambda t: logged(t, "ERROR", "serving_chat.py", "\n"),
    "error, joined": lambda t: logged(t, "ERROR", "serving_chat.py"),
    "debug": lambda t: logged(t, "DEBUG"),
    "server traceback": lambda t: raised(t, prefix=SERVER.format(level="ERROR", file="serving_chat.py")),
    "server traceback, RuntimeError": lambda t: raised(
        t, "RuntimeError", SERVER.format(level="ERROR", file="serving_chat.py"), "\r\n"
    ),
    "request id in a dump": lambda t: f"{DUMP}Dumping scheduler output: SchedulerOutput(req_id={t!r})\n",
    "request id in a dump, raw": lambda t: DUMP + ("req_id=" + t).replace("\n", "\n" + DUMP) + "\n",
    "request id in a dump, joined": lambda t: DUMP + ("req_id=" + t).replace("\n", "\r\n" + DUMP) + "\n",
    "path of a request": lambda t: f'INFO:     10.0.0.1:5 - "GET /{t!r} HTTP/1.1" 404 Not Found\n',
    "progress bar": lambda t: "".join(f"(Worker_TP0 pid=43) \rLoading\r{line}\n" for line in t.split("\n")),
    "after a carriage return": lambda t: logged("x\r" + t.replace("\n", "\r"), "INFO"),
    "JSON message": lambda t: as_json(t, "ERROR", "vllm.entrypoints.openai.serving_chat", "APIServer", 41),
    "JSON exception": lambda t: as_json(
        "x", "ERROR", "vllm.entrypoints.openai.serving_chat", "APIServer", 41, exc_info=raised(t)
    ),
    "JSON that nobody logs here": lambda t: as_json(t, "ERROR", "vllm.v1.engine.core", "EngineCore", 42, exc_info=t),
    "engine refuses a request": lambda t: raised(t, prefix=DUMP.replace("dump_input.py", "core.py")).replace(
        "site/starlette/", "site/vllm/v1/engine/"
    ),
    "printed": lambda t: t + "\n",
    "printed in two halves": lambda t: t + "\n",
    "printed by a tagged server": lambda t: "".join(f"(APIServer pid=41) {line}\n" for line in t.split("\n")),
}  # fmt: skip


@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_a_signature_s_text_in_client_text_accuses_nobody(carrier: str) -> None:
    for payload in PAYLOADS:
        found = causes(findings(CARRIERS[carrier](payload), "stdout", serving()))
        assert found == [], payload


ASGI = "ERROR:    Exception in ASGI application\n"


@pytest.mark.parametrize("stream", ["stderr", "merged"])
@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError", "torch.AcceleratorError"])
def test_a_route_that_raises_a_client_s_text_accuses_nobody(stream: str, kind: str) -> None:
    """uvicorn writes the traceback without a heading: each line of the client's text begins a line of the log."""
    for payload in PAYLOADS:
        for before in ("", "x\n", "x\nINFO:     fake\n", "x\nProcess EngineCore:\n"):
            text = before + payload
            found = causes(findings(ASGI + raised(text, kind), stream, serving()))
            assert found == [], payload


def test_a_client_s_text_longer_than_a_record_accuses_nobody_either() -> None:
    filler = "x\n" * (MAX_RECORD_LINES + 100)
    for payload in PAYLOADS:
        assert causes(findings(ASGI + raised(filler + payload), "stderr", serving())) == [], payload


def test_after_a_route_s_exception_the_stream_is_believed_again() -> None:
    scanner = serving()
    scanner.feed("stderr", (ASGI + raised("x")).encode(), 10.0)
    assert_line = (
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:15: f: block: [1,0,0], thread: [96,0,0] Assertion `a` failed."
    )
    assert scanner.feed("stderr", (assert_line + "\n").encode(), 10.0 + TAINT_S / 2).findings == ()
    # quiet long enough for the traceback to be over, too
    found = scanner.feed("stderr", (assert_line + "\n").encode(), 12.0).findings
    assert [f.signature for f in found] == ["cuda_assertion_line"]


def test_the_same_bare_traceback_of_an_engine_process_does_accuse() -> None:
    """The counterpart: what the attacks imitate is recognised where it is true."""
    text = 'Process EngineCore:\nTraceback (most recent call last):\n  File "vllm/v1/engine/core.py", line 1, in run\n'
    text += "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    assert [f.signature for f in causes(findings(text, "stderr", serving()))] == ["cuda_illegal_memory_access"]


FAULT = """\
(EngineCore pid={pid}) ERROR 12-01 00:00:29 [core.py:1332] EngineCore encountered a fatal error.
(EngineCore pid={pid}) ERROR 12-01 00:00:29 [core.py:1332] Traceback (most recent call last):
(EngineCore pid={pid}) ERROR 12-01 00:00:29 [core.py:1332]   File "vllm/v1/engine/core.py", line 1323, in run
(EngineCore pid={pid}) ERROR 12-01 00:00:29 [core.py:1332] torch.AcceleratorError: CUDA error: misaligned address
"""


def test_a_process_that_was_not_there_at_the_start_is_not_believed() -> None:
    assert causes(findings(FAULT.format(pid=1), scanner=serving())) == []
    assert causes(findings(FAULT.format(pid=41), scanner=serving())) == []
    assert [f.pid for f in causes(findings(FAULT.format(pid=42), scanner=serving()))] == [42]


def test_a_process_inside_another_s_heading_is_not_believed_where_none_spoke_so() -> None:
    """Where the server's every print is tagged, a line that it prints carries both."""
    text = FAULT.format(pid=42).replace("(EngineCore", "(APIServer pid=41) (EngineCore")
    assert causes(findings(text, scanner=serving())) == []
    forked = Scanner(matcher())
    forked.feed("stdout", START.replace("(EngineCore", "(APIServer pid=41) (EngineCore").encode() + READY.encode(), 1.0)
    assert [f.pid for f in causes(findings(text, scanner=forked))] == [42]


def test_a_worker_may_be_renamed_after_it_was_heard() -> None:
    text = FAULT.format(pid=44).replace("EngineCore pid", "Worker_TP1_EP1 pid")
    assert [f.pid for f in causes(findings(text, scanner=serving()))] == [44]


def test_engines_that_log_only_errors_are_believed_when_first_heard() -> None:
    scanner = Scanner(matcher())
    scanner.feed("stdout", b"(APIServer pid=41) WARNING 09-20 01:00:04 [envs.py:88] x\n", 1.0)
    scanner.feed("stderr", READY.encode(), 2.0)
    assert [f.pid for f in causes(findings(FAULT.format(pid=42), scanner=scanner))] == [42]


def test_a_scanner_that_starts_late_believes_every_process() -> None:
    assert [f.pid for f in causes(findings(FAULT.format(pid=42), scanner=Scanner(matcher(), ready=True)))] == [42]


def test_a_half_line_that_is_completed_later_is_not_taken_for_a_line_of_its_own() -> None:
    scanner = serving()
    scanner.feed("stderr", b"route says: ", 10.0)
    scanner.flush(11.0)
    assert scanner.feed("stderr", b"!!!!!!! Segfault encountered !!!!!!!\n", 12.0).findings == ()


def test_start_errors_count_only_before_ready() -> None:
    text = "vllm: error: unrecognized arguments: --x\n"
    assert [f.signature for f in causes(findings(text, "stderr"))] == ["bad_flag"]
    assert causes(findings(text, "stderr", serving())) == []


WORDS = [*PAYLOADS, "\r\n", "\r", "Traceback (most recent call last):", '  File "vllm/v1/engine/core.py"', "x"]
CLIENT_WORDS = st.lists(st.sampled_from(WORDS), max_size=6).map("\n".join)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CARRIERS)), CLIENT_WORDS)
def test_no_mixture_of_signature_texts_accuses_anybody(carrier: str, words: str) -> None:
    assert causes(findings(CARRIERS[carrier](words), "stdout", serving())) == []


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.sampled_from(["stdout", "stderr", "merged"]))
def test_no_bytes_break_the_scanner(data: bytes, stream: str) -> None:
    scanner = serving()
    scanner.feed(stream, data, 3.0)
    scanner.feed(stream, START.encode() + data, 4.0)
    scanner.flush(math.inf)
