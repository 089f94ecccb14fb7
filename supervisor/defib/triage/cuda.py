"""The ways in which one CUDA error is spelt in a serving process's log. Pure data expansion.

A sticky CUDA error reaches the log through torch, Triton, CuPy, ONNX Runtime, the NCCL watchdog, a C++ abort or the
driver's core dump. A signature names the error once; this writes the places and patterns. Seen on an NVIDIA H200
with torch 2.11 and vLLM 0.26, and in the reports that the policy files name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from defib.triage.records import Place
from defib.triage.signatures import Where

_TORCH = r"^(?:torch\.)?(?:AcceleratorError|RuntimeError): (?:Error in model execution[^:]*: )?"
_V0_FILES = ("engine.py", "async_llm_engine.py")
_V0_WORKER_FILES = ("multiproc_worker_utils.py",)


@dataclass(frozen=True, slots=True)
class CudaError:
    """`text` as cudaGetErrorString says it; `code` its number, `runtime` and `driver` its names.

    `exceptions`: what the GPU core dump calls it (CUDBG_EXCEPTION_...), empty if it has no such name.
    """

    text: str
    code: int
    runtime: str
    driver: str
    exceptions: tuple[str, ...] = ()


def spellings(error: CudaError) -> tuple[Where, ...]:
    """All places and patterns of one error."""
    text, names = re.escape(error.text), f"(?:{error.code}|{error.runtime}|{error.driver})"
    exception = (
        rf"{_TORCH}(?:CUDA(?: driver)? error|Triton Error \[CUDA\]): {text}",
        rf"{_TORCH}(?:[\w./-]+:\d+:? )?CUDA (?:runtime |driver )?(?:error|failure)(?: code)?:? \(?{names}\b",
        rf"^(?:\w+\.)*CUDARuntimeError: {error.runtime}\b",
        rf"^(?:\w+\.)*CUDADriverError: {error.driver}\b",
    )
    raw = [
        rf"^\s*what\(\):\s+.*CUDA (?:driver )?(?:error|failure {error.code}): {text}",
        rf"^CUDA error: {text}$",
    ]
    if error.exceptions:
        raw.append(
            rf"^\[[\d:.]+\] coredump: Detected an exception of type CUDBG_EXCEPTION_(?:{'|'.join(error.exceptions)})\b"
        )
    return (
        Where(Place.EXCEPTION, exception),
        Where(
            Place.RECORD,
            (rf"^(?:AcceleratorError|RuntimeError)\(['\"](?:Error in model execution[^:]*: )?CUDA error: {text}",),
            _V0_FILES,
        ),
        Where(
            Place.RECORD,
            (rf"^Exception in worker \S+ while processing method \w+: CUDA error: {text}",),
            _V0_WORKER_FILES,
        ),
        Where(
            Place.RECORD,
            (rf"^(?:\[[^\]]*\] )*Process group watchdog thread terminated with exception: CUDA error: {text}",),
            ("ProcessGroupNCCL.cpp",),
        ),
        Where(Place.RECORD, (rf"^CUDA failure {error.code}: {text}",), ("cuda_call.cc",)),
        Where(Place.RAW_STDERR, tuple(raw)),
    )
