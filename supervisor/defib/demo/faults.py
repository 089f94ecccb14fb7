"""The faults: what each kind prints, and when one is due. Says what; `gpu.py` does it."""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from defib.demo.options import Options

Moment = Literal["start", "step", "now"]
CONTROL_MAX_BYTES = 65536

_SEARCH = (
    "Search for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html "
    "for more information.\n"
)
_HINTS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def _cuda(text: str, name: str) -> tuple[str, str]:
    return "torch.AcceleratorError", f"CUDA error: {text}\n{_SEARCH.format(name=name)}{_HINTS}"


# Kind -> (exception class, its text), as PyTorch 2.13, Triton 3.9 and NCCL word them.
ERRORS: dict[str, tuple[str, str]] = {
    "illegal_access": _cuda("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
    "assert": _cuda("device-side assert triggered", "cudaErrorAssert"),
    "misaligned": _cuda("misaligned address", "cudaErrorMisalignedAddress"),
    "illegal_instruction": _cuda("an illegal instruction was encountered", "cudaErrorIllegalInstruction"),
    "launch_failure": _cuda("unspecified launch failure", "cudaErrorLaunchFailure"),
    "launch_timeout": _cuda("the launch timed out and was terminated", "cudaErrorLaunchTimeout"),
    "cublas": (
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k, "
        "&falpha, a, CUDA_R_16BF, lda, b, CUDA_R_16BF, ldb, &fbeta, c, std::is_same_v<C_Dtype, float> ? "
        "CUDA_R_32F : CUDA_R_16BF, ldc, compute_type, CUBLAS_GEMM_DEFAULT_TENSOR_OP)`",
    ),
    "cudnn": ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    "triton": ("RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered"),
    "nccl": (
        "torch.distributed.DistBackendError",
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, remote process exited or "
        "there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a "
        "network error or a remote process exiting prematurely.",
    ),
    "oom": (
        "torch.OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
        "1.06 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the "
        "allocated memory 75.12 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    ),
    "exception": (
        "RuntimeError",
        "The size of tensor a (4096) must match the size of tensor b (4097) at non-singleton dimension 1",
    ),
}
# Printed raw on stderr by the CUDA or the C++ runtime, before anything in Python notices.
RAW: dict[str, str] = {
    "assert": "".join(
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1528: indexSelectSmallIndex: block: [0,0,0], "
        f"thread: [{thread},0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
        for thread in range(8)
    ),
    "onnx": (
        "\x1b[1;31m2026-11-30 03:14:20.002087466 [E:onnxruntime:, cuda_call.cc:148 CudaCall] CUDA failure "
        "700: an illegal memory access was encountered ; GPU=0 ; hostname=gpu-node ; "
        "file=onnxruntime/core/providers/cuda/cuda_execution_provider.cc ; line=534 ; "
        "expr=cudaStreamSynchronize(static_cast<cudaStream_t>(stream_)); \x1b[m\n"
        "terminate called after throwing an instance of 'onnxruntime::OnnxRuntimeException'\n"
        "  what():  /onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:153 "
        "onnxruntime::CudaCall CUDA failure 700: an illegal memory access was encountered ; GPU=0\n\n"
    ),
    "segv": "!!!!!!! Segfault encountered !!!!!!!\n",
}
_AT_ONCE = ("worker_kill", "silent_death", "root_kill", "orphan", "orphan_closed", "flood")
KINDS = (*ERRORS, "onnx", "segv", "hang", "stream_error", *_AT_ONCE)
_MAGIC = re.compile(r"<\|fault:([a-z_]+)(?:@(\d+))?\|>")
_WAIT = re.compile(r"<\|wait:(\d+)\|>")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and its conditions; `times` None strikes for ever."""

    kind: str
    at: Moment
    times: int | None = None
    after_tokens: int = 0
    min_running: int = 1
    unless_eager: bool = False
    while_file: str | None = None
    lines_per_s: float = 1000.0
    seconds: float = 1.0


def read(text: str) -> Fault:
    """A fault from its kind or its JSON object. Raises ValueError with what is wrong."""
    value: object = json.loads(text) if text.lstrip().startswith("{") else {"fault": text.strip()}
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    fields = dict(value)
    kind = fields.pop("fault", None)
    if kind not in KINDS:
        raise ValueError(f"fault: expected one of {', '.join(KINDS)}, got {kind!r}")
    at = fields.pop("at", "now" if kind in _AT_ONCE else "step")
    if at not in ("start", "step", "now"):
        raise ValueError(f"at: expected start, step or now, got {at!r}")
    try:
        return Fault(kind=kind, at=at, **fields)
    except TypeError as error:
        raise ValueError(str(error)) from None


def in_prompt(text: str) -> Fault | None:
    """The fault that the magic words of a prompt ask for, if any."""
    match = _MAGIC.search(text)
    if match is None or match[1] not in KINDS:
        return None
    return Fault(kind=match[1], at="step", after_tokens=int(match[2] or 0))


def wait_in_prompt_s(text: str) -> float:
    """How long a prompt asks its first token to be kept back."""
    match = _WAIT.search(text)
    return int(match[1]) / 1000 if match else 0.0


class Faults:
    """What is due now, from the start options and the control file. Lives in the worker process."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._own = [read(text) for text in options.faults]
        self._control = Path(options.control) if options.control else None

    @property
    def watching(self) -> bool:
        """Something may become due while the worker is idle."""
        return self._control is not None or any(fault.at == "now" for fault in self._own)

    def due(self, moment: Moment, tokens: tuple[int, ...] = ()) -> Fault | None:
        """The fault that strikes at this moment, used up by one; `tokens` of each running request."""
        for index, fault in enumerate(self._own):
            if self.strikes(fault, moment, tokens):
                if fault.times is not None:
                    left = fault.times - 1
                    self._own[index : index + 1] = [replace(fault, times=left)] if left > 0 else []
                return fault
        return self._due_by_file(moment, tokens)

    def strikes(self, fault: Fault, moment: Moment, tokens: tuple[int, ...]) -> bool:
        """Whether all conditions of a fault hold."""
        if fault.at != moment:
            return False
        if self._options.enforce_eager and (fault.unless_eager or self._options.eager_cures):
            return False
        if fault.while_file and not Path(fault.while_file).exists():
            return False
        if moment != "step":
            return True
        return len(tokens) >= fault.min_running and max(tokens, default=0) >= fault.after_tokens

    def _due_by_file(self, moment: Moment, tokens: tuple[int, ...]) -> Fault | None:
        if self._control is None:
            return None
        try:
            with self._control.open(encoding="utf-8") as file:
                text = file.read(CONTROL_MAX_BYTES)
            fault = read(text)
        except (OSError, ValueError):
            return None  # None there, or half written: it is read again at the next look.
        if not self.strikes(fault, moment, tokens):
            return None
        self._use_up(self._control, text, fault)
        return fault

    def _use_up(self, control: Path, text: str, fault: Fault) -> None:
        if fault.times is None:
            return
        if fault.times <= 1:
            control.unlink(missing_ok=True)
            return
        fresh = control.with_name(control.name + ".next")
        fresh.write_text(json.dumps(json.loads(text) | {"times": fault.times - 1}), encoding="utf-8")
        os.replace(fresh, control)
