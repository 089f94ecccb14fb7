"""What stands in front of a log line's message: who printed it, how, and at which level. Pure, one line at a time.

The dialects of vLLM 0.6 to 0.33 and of the C++ libraries inside it. A heading is what the line *claims*; whether the
claim is believed is decided elsewhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """How a line was printed."""

    LOGGED = "logged"
    """By the engine's own logger: level, time, source file; every line of a record repeats it."""
    UVICORN = "uvicorn"
    """By the HTTP server: `INFO:     ...`."""
    NATIVE = "native"
    """By a C++ logger: torch, glog, ONNX Runtime."""
    RAW = "raw"
    """Anything else, with or without a process in front: bare tracebacks, C++ text, `print`."""


class Origin(StrEnum):
    """The kind of process that a heading claims."""

    ENGINE = "engine"
    SERVER = "server"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Heading:
    """A line taken apart. `pid` and `rank` are None where the line doesn't name them; `message` keeps its indent.

    `outer` is the process in front of `tag` where a line carries two (a child forked with its parent's stdout).
    """

    form: Form
    message: str
    level: str = ""
    tag: str = ""
    pid: int | None = None
    rank: int | None = None
    outer: str = ""
    source: str = ""
    place: str = ""
    stamp: str = ""

    @property
    def origin(self) -> Origin:
        """By process tag; in the dialects without tags by the source file that logged."""
        if self.tag:
            return origin_of_tag(self.tag)
        if self.form is Form.LOGGED:
            return Origin.ENGINE if self.source in ENGINE_FILES else Origin.SERVER
        return Origin.UNKNOWN


ENGINE_FILES = frozenset(
    [
        "async_llm_engine.py",
        "core.py",
        "cpu_worker.py",
        "engine.py",
        "executor_base.py",
        "gpu_model_runner.py",
        "gpu_worker.py",
        "llm_engine.py",
        "model_runner.py",
        "multiproc_executor.py",
        "multiproc_gpu_executor.py",
        "multiproc_worker_utils.py",
        "ray_distributed_executor.py",
        "ray_utils.py",
        "uniproc_executor.py",
        "worker.py",
        "worker_base.py",
    ]
)
"""Files that log in an engine process: how vLLM up to 0.9, whose lines carry no process, is told apart."""

_ENGINE_TAG = re.compile(r"(?:VLLM::)?(?:EngineCore|Worker|VllmWorker|RayWorker|MQLLMEngine)")
_SERVER_TAG = re.compile(r"(?:VLLM::)?(?:APIServer|ApiServer|MainProcess|DPCoordinator|DPSupervisor)")

PROCESS = (
    r"\((?P<tag>[A-Za-z][\w:.-]*(?: [A-Z]+\d[A-Z\d_]*)?)(?: rank=(?P<rank>\d+))? pid=(?P<pid>\d+)(?:, ip=[\d.]+)?\)"
)
"""`(Worker_TP0 pid=23220)`, `(VllmWorker rank=0 pid=265)`, `(VllmWorker PP1_TP0 pid=214)`; Ray adds the address."""

_PROCESS = re.compile(rf" ?{PROCESS} ")
_LOGGED = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<stamp>\d\d-\d\d \d\d:\d\d:\d\d) "
    r"\[?(?P<place>(?:[\w.-]+/)*(?P<source>[\w.-]+):\d+)\](?: (?P<message>.*))?$",
    re.DOTALL,
)
_UVICORN = re.compile(r"(?P<level>TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL): +(?P<message>.*)", re.DOTALL)
_NATIVE = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]: ?)?"
    r"(?:\[(?P<torch>[IWEF])\d* ?(?:\d\d:\d\d:\d\d[.\d]* )?(?P<source>[\w.]+\.(?:cpp|cu|h|cuh|hpp)):\d+\]"
    r"|\[?\d{4}-\d\d-\d\d [\d:.]+ \[(?P<ort>[VIWEF]):onnxruntime:[^,\]]*, (?P<ort_source>[\w.]+):\d+ [\w:~<>]+\]"
    r"|(?P<glog>[IWEF])\d{4} [\d:.]+ +\d+ (?P<glog_source>[\w.]+):\d+\]) (?P<message>.*)",
    re.DOTALL,
)
_RANK = re.compile(r"\[rank(\d+)\]: ?")
_TAG_RANK = re.compile(r"(?:TP|_DP)(\d+)$")
_LETTERS = {"V": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}


def parse(text: str) -> Heading:
    """The heading of one line without colours; never fails: what has no heading is RAW."""
    tag = outer = ""
    pid = rank = None
    while text[:2] == " (" or text[:1] == "(":
        found = _PROCESS.match(text)
        if found is None:
            break
        outer = outer or tag
        tag, pid = found["tag"], int(found["pid"])
        rank = int(found["rank"]) if found["rank"] else _rank_of_tag(tag)
        text = text[found.end() :]
    if found := _LOGGED.match(text):
        message, level = found["message"] or "", found["level"]
        return Heading(
            Form.LOGGED, message, level, tag, pid, rank, outer, found["source"], found["place"], found["stamp"]
        )
    if found := _UVICORN.match(text):
        return Heading(Form.UVICORN, found["message"], found["level"], tag, pid, rank, outer)
    if text[:1] in "[IWEF2" and (found := _NATIVE.match(text)):
        level = _LETTERS[found["torch"] or found["ort"] or found["glog"]]
        source = found["source"] or found["ort_source"] or found["glog_source"]
        rank = int(found["rank"]) if found["rank"] else rank
        return Heading(Form.NATIVE, found["message"], level, tag, pid, rank, outer, source)
    if text[:5] == "[rank" and (found := _RANK.match(text)):
        return Heading(Form.RAW, text[found.end() :], "", tag, pid, int(found[1]), outer)
    return Heading(Form.RAW, text, "", tag, pid, rank, outer)


def origin_of_tag(tag: str) -> Origin:
    """The kind of process by the name that vLLM gives it."""
    if _ENGINE_TAG.match(tag):
        return Origin.ENGINE
    return Origin.SERVER if _SERVER_TAG.match(tag) else Origin.UNKNOWN


def _rank_of_tag(tag: str) -> int | None:
    """`Worker_TP3` is rank 3 and `EngineCore_DP5` rank 5; with several parallel forms the tag alone doesn't say."""
    if tag.count("_") + tag.count(" ") != 1:
        return None
    found = _TAG_RANK.search(tag)
    return int(found[1]) if found else None


MAX_JSON_CHARS = 64 * 1024
"""A longer JSON line is not parsed; it is raw text then."""


def is_json(text: str) -> bool:
    """Does this look like a line of vLLM's JSON formatter?"""
    return text[:2] == '{"' and '"levelname"' in text


def parse_json(text: str) -> tuple[Heading, tuple[str, ...]] | None:
    """A line of the JSON formatter: its heading and the lines of `exc_info`. None if it isn't one after all."""
    if len(text) > MAX_JSON_CHARS:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    name, pid = str(values.get("name", "")), values.get("process")
    tag = str(values.get("vllm_process_name") or values.get("processName") or "")
    heading = Heading(
        form=Form.UVICORN if name.startswith("uvicorn") else Form.LOGGED,
        message=str(values.get("message", "")).split("\n", 1)[0],
        level=str(values.get("levelname", "")),
        tag=tag,
        pid=pid if isinstance(pid, int) else None,
        rank=_rank_of_tag(tag),
        source=name.rpartition(".")[2] + ".py",
        place="json",
        stamp=str(values.get("asctime", "")),
    )
    trace = values.get("exc_info")
    return heading, tuple(trace.split("\n")) if isinstance(trace, str) else ()
