"""Real logs: vLLM 0.26 on an NVIDIA H200 with real faults, vLLM 0.32 on a CPU with injected ones."""

from __future__ import annotations

import re

import pytest
from tests.triage.support import LOGS, causes, findings, matcher

from defib.triage.scanner import Scanner
from defib.triage.verdict import judge

LOGGED = re.compile(r"(\((?:\w+) pid=\d+\) ERROR [\d-]+ [\d:]+ \[[\w.]+:\d+\] )")

EXPECTED = {
    "gpu-illegal-access-0.26": ("poisoned_context", "cuda_illegal_memory_access", "EngineCore"),
    "gpu-illegal-access-mp-0.26": ("poisoned_context", "cuda_illegal_memory_access", "Worker"),
    "gpu-blocking-0.26": ("poisoned_context", "cuda_illegal_memory_access", "EngineCore"),
    "gpu-core-dump-0.26": ("poisoned_context", "cuda_illegal_memory_access", ""),
    "gpu-assert-0.26": ("poisoned_context", "cuda_assertion_line", ""),
    "gpu-misaligned-0.26": ("poisoned_context", "cuda_misaligned_address", "EngineCore"),
    "gpu-start-fault-0.26": ("poisoned_context", "cuda_illegal_memory_access", "EngineCore"),
    "gpu-out-of-memory-0.26": ("oom_gpu", "cuda_out_of_memory", "EngineCore"),
    "gpu-plain-exception-0.26": ("engine_bug_host", "vllm_engine_fatal", "EngineCore"),
    "gpu-memory-taken-0.26": ("config_error", "gpu_memory_taken", "EngineCore"),
    "gpu-healthy-0.26": ("healthy", None, None),
    "illegal-access-0.32": ("poisoned_context", "cuda_illegal_memory_access", "Worker"),
    "rpc-timeout-0.32": ("hang", "vllm_rpc_timeout", "EngineCore"),
    "segfault-0.32": ("engine_bug_host", "process_crashed", ""),
    "worker-killed-0.32": ("unknown", "vllm_worker_died", "EngineCore"),
    "engine-killed-0.32": ("unknown", None, None),
    "planned-stop-0.32": ("shutdown", "planned_stop", "APIServer"),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_real_log_gets_its_verdict(name: str) -> None:
    verdict = judge(findings((LOGS / f"{name}.log").read_bytes(), "merged"))
    initiator = verdict.initiator
    found = (verdict.fault, initiator and initiator.signature, initiator and initiator.process)
    assert found == EXPECTED[name]


def test_every_log_has_an_expectation() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)


@pytest.mark.parametrize("name", ["gpu-illegal-access-0.26", "illegal-access-0.32", "rpc-timeout-0.32"])
def test_lines_joined_by_carriage_returns_give_the_same_verdict(name: str) -> None:
    """As the files of a live vLLM have them: all lines of a record but its last end in `\\r\\n`."""
    lines = (LOGS / f"{name}.log").read_text().split("\n")
    joined = ""
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        here, there = LOGGED.match(line), LOGGED.match(after)
        same = here and there and here[1] == there[1]
        joined += line + ("\r\n" if same else "\n")
    assert joined.count("\r") > 30
    verdict = judge(findings(joined, "merged"))
    assert (verdict.fault, verdict.initiator and verdict.initiator.signature) == EXPECTED[name][:2]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_pieces_in_which_a_log_is_read_don_t_matter(name: str) -> None:
    data = (LOGS / f"{name}.log").read_bytes()
    scanner, found = Scanner(matcher()), []
    for start in range(0, len(data), 777):
        found.extend(scanner.feed("merged", data[start : start + 777], 1.0).findings)
    found.extend(scanner.flush(float("inf")).findings)
    assert found == findings(data, "merged", at=1.0)


def test_a_cause_is_found_with_the_line_that_completes_it() -> None:
    """No flush, nothing after it: the finding is there as soon as the line is."""
    text = (LOGS / "gpu-illegal-access-0.26.log").read_text()
    end = text.index("torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n")
    scanner = Scanner(matcher())
    assert causes(list(scanner.feed("stdout", text[:end].encode(), 1.0).findings)) == []
    rest = text[end : text.index("\n", end) + 1]
    assert [f.signature for f in scanner.feed("stdout", rest.encode(), 1.0).findings] == ["cuda_illegal_memory_access"]
