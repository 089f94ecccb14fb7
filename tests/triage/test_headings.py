"""What a line says about who printed it, in the dialects from vLLM 0.6 to 0.33."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defib.triage.headings import MAX_JSON_CHARS, Form, Origin, parse, parse_json

HEADINGS = """
logged ERROR EngineCore 7 - core.py | (EngineCore pid=7) ERROR 11-30 23:21:50 [core.py:1512] msg | msg
logged INFO Worker_TP3 9 3 executor.py | (Worker_TP3 pid=9) INFO 07-15 21:01:01 [v1/executor/executor.py:7] msg | msg
logged ERROR VllmWorker 265 1 x.py | (VllmWorker rank=1 pid=265) ERROR 05-12 19:01:18 [x.py:3]   File |   File
logged ERROR VllmWorker_PP1_TP0 214 - x.py | (VllmWorker PP1_TP0 pid=214) ERROR 08-28 01:01:42 [x.py:5] msg | msg
logged ERROR - - - engine.py | ERROR 05-12 19:01:18 engine.py:135] msg | msg
logged ERROR - - - core.py | ERROR 11-30 23:21:50 [core.py:1512] |
logged ERROR RayWorkerVllm 5 - w.py | (RayWorkerVllm pid=5, ip=10.0.0.2) ERROR 05-12 19:01:18 w.py:1] msg | msg
raw - EngineCore_DP5 8 5 - | (EngineCore_DP5 pid=8) Traceback (most recent call): | Traceback (most recent call):
uvicorn INFO - - - - | INFO:     1.2.3.4:5 - "GET / HTTP/1.1" 200 OK | 1.2.3.4:5 - "GET / HTTP/1.1" 200 OK
uvicorn ERROR APIServer 1 - - | (APIServer pid=1) ERROR:    Exception in ASGI | Exception in ASGI
native WARNING - - - utils.cpp | [W1130 23:33:10.012078654 utils.cpp:68] Warning: x | Warning: x
native ERROR - - 7 ProcessGroupNCCL.cpp | [rank7]:[E904 02:14:22.110 ProcessGroupNCCL.cpp:1515] [PG 3] x | [PG 3] x
native ERROR - - - ProcessGroupNCCL.cpp | [E ProcessGroupNCCL.cpp:475] [Rank 4] x | [Rank 4] x
native ERROR - - - model.cc | E1130 23:33:10.012078 4711 model.cc:68] x | x
native ERROR - - - cuda_call.cc | 2026-09-16 03:14:20.002 [E:onnxruntime:, cuda_call.cc:148 CudaCall] x | x
raw - - - 1 - | [rank1]: RuntimeError: x | RuntimeError: x
raw - - - - - | (see above) ERROR: x | (see above) ERROR: x
raw - - - - - | ERROR:root:x | ERROR:root:x
"""


@pytest.mark.parametrize("row", HEADINGS.strip().split("\n"))
def test_a_heading_is_taken_apart(row: str) -> None:
    expected, line, *message = row.split(" | ")
    heading = parse(line.removesuffix(" |"))
    values = (heading.form, heading.level, heading.tag, heading.pid, heading.rank, heading.source)
    assert " ".join(str(v).replace(" ", "_") if v not in ("", None) else "-" for v in values) == expected
    assert heading.message == "".join(message)


def test_of_two_processes_in_front_the_inner_one_speaks_and_the_outer_is_kept() -> None:
    heading = parse("(APIServer pid=1) (EngineCore_DP0 pid=68) ERROR 02-26 09:00:10 [core.py:1008] x")
    assert (heading.tag, heading.pid, heading.outer) == ("EngineCore_DP0", 68, "APIServer")


@pytest.mark.parametrize(
    ("line", "origin"),
    [
        ("(EngineCore pid=7) x", Origin.ENGINE),
        ("(VllmWorker-0 pid=7) x", Origin.ENGINE),
        ("(ApiServer_0 pid=7) x", Origin.SERVER),
        ("(Somebody pid=7) x", Origin.UNKNOWN),
        ("ERROR 05-12 19:01:18 [core.py:135] x", Origin.ENGINE),
        ("ERROR 05-12 19:01:18 [serving_chat.py:135] x", Origin.SERVER),
        ("x", Origin.UNKNOWN),
    ],
)
def test_the_origin_is_told_by_tag_else_by_source_file(line: str, origin: Origin) -> None:
    assert parse(line).origin is origin


def test_a_json_line_gives_heading_and_traceback() -> None:
    line = json.dumps(
        {
            "asctime": "2026-11-30 23:21:50,1",
            "levelname": "ERROR",
            "name": "vllm.v1.engine.core",
            "process": 7,
            "message": "EngineCore encountered a fatal error.\nmore",
            "vllm_process_name": "EngineCore_DP1",
            "exc_info": "Traceback (most recent call last):\n  File x\nRuntimeError: y",
        }
    )
    parsed = parse_json(line)
    assert parsed is not None
    heading, trace = parsed
    assert (heading.form, heading.level, heading.tag, heading.pid, heading.rank) == (
        Form.LOGGED,
        "ERROR",
        "EngineCore_DP1",
        7,
        1,
    )
    assert (heading.source, heading.message) == ("core.py", "EngineCore encountered a fatal error.")
    assert trace[-1] == "RuntimeError: y"


@pytest.mark.parametrize(
    "line", ['{"levelname": }', '{"levelname": 1', json.dumps({"levelname": "x" * MAX_JSON_CHARS}), '{"a":' * 30_000]
)
def test_what_is_not_json_after_all_is_no_json_line(line: str) -> None:
    assert parse_json(line) is None


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    assert parse(text).message in text
    parse_json('{"levelname"' + text)
