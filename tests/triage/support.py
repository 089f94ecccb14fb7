"""What the triage tests share: the shipped signatures, compiled once, and one call to scan a text."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from defib.policy.reading import policies_folder
from defib.policy.signatures import load_signatures
from defib.triage.scanner import Scanner
from defib.triage.signatures import Finding, Matcher, Signature

LOGS = Path(__file__).parent / "logs"

START = """\
(APIServer pid=41) INFO 09-20 01:00:00 [api_server.py:1448] vLLM API server version 0.32.0
(EngineCore pid=42) INFO 09-20 01:00:10 [core.py:118] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker_TP0 pid=43) INFO 09-20 01:00:12 [gpu_model_runner.py:2602] Starting to load model m...
(Worker_TP1 pid=44) INFO 09-20 01:00:12 [gpu_model_runner.py:2602] Starting to load model m...
"""
READY = "INFO:     Application startup complete.\n"


@cache
def shipped() -> tuple[Signature, ...]:
    return load_signatures(policies_folder() / "signatures")


@cache
def matcher() -> Matcher:
    return Matcher(shipped())


def serving() -> Scanner:
    """A scanner that has seen a start and the ready line, as the live supervisor's has."""
    scanner = Scanner(matcher())
    scanner.feed("stdout", START.encode(), 1.0)
    scanner.feed("stderr", READY.encode(), 2.0)
    assert scanner.ready
    return scanner


def findings(
    text: str | bytes, stream: str = "stdout", scanner: Scanner | None = None, at: float = 10.0
) -> list[Finding]:
    """Everything that one piece of output brings, up to the end of the stream."""
    scanner = scanner or Scanner(matcher())
    data = text.encode() if isinstance(text, str) else text
    return [*scanner.feed(stream, data, at).findings, *scanner.flush(math.inf).findings]


def causes(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.role in ("cause", "either")]
