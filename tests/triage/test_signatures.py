"""What a signature may be: rules that keep a pattern from accusing where it can't prove anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.triage.support import findings, shipped

from defib.triage.cuda import CudaError, spellings
from defib.triage.records import Place
from defib.triage.scanner import Scanner, check_examples
from defib.triage.signatures import MAX_COUNTED_GAP, Example, Matcher, Signature, SignatureError, Where

GOOD = Signature(
    id="x",
    title="t",
    meaning="m",
    fault="hang",
    role="cause",
    where=(Where(Place.RAW_STDERR, ("^boom$",)),),
    root_layer="kernel",
    restart_helps="true",
    examples=(Example("boom", "stderr"),),
    near_misses=(Example("boom", "stdout"),),
)


def with_where(**changes: object) -> Signature:
    return replace(GOOD, where=(replace(GOOD.where[0], **changes),))  # type: ignore[arg-type]


def test_a_good_signature_passes() -> None:
    check_examples((GOOD,))


@pytest.mark.parametrize(
    ("signature", "key", "said"),
    [
        (replace(GOOD, fault="sad"), "class", "expected one of poisoned_context"),
        (replace(GOOD, role="culprit"), "role", "expected one of cause"),
        (replace(GOOD, trust="rumour"), "trust", "expected one of kernel_log"),
        (replace(GOOD, when="later"), "when", "expected one of any"),
        (replace(GOOD, restart_helps="maybe"), "restart_helps", "expected one of true"),
        (replace(GOOD, where=()), "where", "at least one place"),
        (with_where(patterns=()), "where[0].patterns", "at least one pattern"),
        (with_where(patterns=("boom",)), "where[0].patterns[0]", "must start with ^"),
        (with_where(patterns=("^(boom",)), "where[0].patterns[0]", "not a pattern that RE2 takes"),
        (with_where(patterns=(r"^(a)\1",)), "where[0].patterns[0]", "not a pattern that RE2 takes"),
        (with_where(patterns=("^.*",)), "where[0].patterns[0]", "matches the empty text"),
        (with_where(patterns=("^a.{0,300}b",)), "where[0].patterns[0]", "a counted gap above"),
        (with_where(patterns=("^" + "a" * 2000,)), "where[0].patterns[0]", "longer than"),
        (with_where(place=Place.RECORD), "where[0].files", "source files"),
        (with_where(place=Place.DETAIL), "where[0].place", "can't prove a cause"),
        (with_where(place=Place.SERVER_EXCEPTION), "where[0].place", "client text"),
        (with_where(place=Place.RAW_STDOUT), "where[0].place", "client text"),
        (with_where(place=Place.UVICORN), "where[0].place", "client text"),
        (with_where(levels=("LOUD",)), "where[0].levels", "LOUD"),
        (replace(GOOD, not_patterns=("(",)), "not_patterns[0]", "not a pattern that RE2 takes"),
        (replace(GOOD, examples=()), "example", "at least one log"),
        (replace(GOOD, near_misses=()), "near_miss", "at least one log"),
        (replace(GOOD, examples=(Example("bang", "stderr"),)), "example[0]", "does not find its own example"),
        (replace(GOOD, near_misses=(Example("boom", "stderr"),)), "near_miss[0]", "matches its near miss"),
    ],
)
def test_what_can_t_be_used_is_refused_with_its_key(signature: Signature, key: str, said: str) -> None:
    with pytest.raises(SignatureError) as caught:
        check_examples((signature,))
    assert caught.value.key == key and said in caught.value.expected


def test_counted_gaps_are_allowed_up_to_the_limit() -> None:
    Matcher((with_where(patterns=(rf"^a.{{0,{MAX_COUNTED_GAP}}}b",)),))
    with pytest.raises(SignatureError):
        Matcher((with_where(patterns=(rf"^a.{{0,{MAX_COUNTED_GAP + 1}}}b",)),))
    Matcher((with_where(patterns=(r"^a\{0,300\}b",)),))


def test_not_patterns_take_a_match_back() -> None:
    signature = replace(
        with_where(patterns=("^boom",)), not_patterns=("harmless",), examples=(Example("boom", "stderr"),)
    )
    check_examples((replace(signature, near_misses=(Example("boom, harmless", "stderr"),)),))


def test_a_set_of_many_wide_patterns_compiles() -> None:
    """RE2's default memory refuses such a set."""
    many = tuple(
        replace(GOOD, id=f"s{n}", where=(Where(Place.RAW_STDERR, (rf"^boom{n}\b.{{0,60}}x{n}.{{0,60}}y{n}",)),))
        for n in range(300)
    )
    Matcher(many)


CUDA = CudaError("an odd error was met", 799, "cudaErrorOdd", "CUDA_ERROR_ODD", ("WARP_ODD",))
TRACE = 'Process EngineCore:\nTraceback (most recent call last):\n  File "vllm/v1/engine/core.py", line 1, in run\n'

SPELT = [
    TRACE + "torch.AcceleratorError: CUDA error: an odd error was met",
    TRACE + "RuntimeError: CUDA error: an odd error was met",
    TRACE + "RuntimeError: CUDA driver error: an odd error was met",
    TRACE + "RuntimeError: Triton Error [CUDA]: an odd error was met",
    TRACE + "RuntimeError: Error in model execution (input dumped to /tmp/x.pkl): CUDA error: an odd error was met",
    TRACE + "RuntimeError: CUDA error: cudaErrorOdd",
    TRACE + "RuntimeError: CUDA error: CUDA_ERROR_ODD",
    TRACE + "RuntimeError: CUDA error code 799",
    TRACE + "RuntimeError: csrc/x.cu:12: CUDA runtime error: 799",
    TRACE + "cupy_backends.cuda.api.runtime.CUDARuntimeError: cudaErrorOdd: an odd error was met",
    TRACE + "cupy_backends.cuda.api.driver.CUDADriverError: CUDA_ERROR_ODD: an odd error was met",
    "ERROR 02-25 11:03:19 engine.py:139] RuntimeError('CUDA error: an odd error was met\\nmore')",
    "(VllmWorkerProcess pid=9) ERROR 01-12 08:36:38 multiproc_worker_utils.py:233] Exception in worker "
    "VllmWorkerProcess while processing method execute_model: CUDA error: an odd error was met",
    "[rank0]:[E122 00:13:31.8 ProcessGroupNCCL.cpp:1595] [PG 3 Rank 0] Process group watchdog thread terminated with "
    "exception: CUDA error: an odd error was met",
    "2026-09-16 03:14:20.0 [E:onnxruntime:, cuda_call.cc:148 CudaCall] CUDA failure 799: an odd error was met ; GPU=0",
    "  what():  CUDA error: an odd error was met",
    "  what():  /onnxruntime_src/cuda_call.cc:153 std::conditional_t<THRW> CUDA failure 799: an odd error was met",
    "[00:05:14.515809] coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ODD (14)",
    "CUDA error: an odd error was met",
]  # fmt: skip

NOT_SPELT = [
    TRACE + "RuntimeError: the prompt says CUDA error: an odd error was met",
    TRACE + "RuntimeError: CUDA error code 7990",
    TRACE + "ValueError: CUDA error: an odd error was met",
    "ERROR 02-25 11:03:19 serving_chat.py:139] RuntimeError('CUDA error: an odd error was met')",
    "INFO 02-25 11:03:19 engine.py:139] RuntimeError('CUDA error: an odd error was met')",
    "CUDA error: an odd error was met again",
    "the log says: CUDA error: an odd error was met",
    "CUDBG_EXCEPTION_WARP_ODD",
]


def odd() -> Matcher:
    return Matcher((replace(GOOD, where=spellings(CUDA)),))


@pytest.mark.parametrize("text", SPELT)
def test_a_cuda_error_is_known_in_every_spelling(text: str) -> None:
    assert [f.signature for f in findings(text, "stderr", Scanner(odd()))] == ["x"]


@pytest.mark.parametrize("text", NOT_SPELT)
def test_text_that_only_contains_a_cuda_error_is_not_one(text: str) -> None:
    assert findings(text, "stderr", Scanner(odd())) == []


@pytest.mark.parametrize("signature", shipped(), ids=lambda s: s.id)
def test_a_shipped_signature_explains_itself(signature: Signature) -> None:
    assert signature.title[0].isupper() or signature.title.startswith(("vLLM", "cuBLAS"))
    assert signature.meaning.endswith(".") and len(signature.meaning) > 30


def test_the_hint_line_about_device_side_assertions_is_never_an_assert() -> None:
    hint = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    text = f"{TRACE}RuntimeError: CUDA error: invalid argument\n{hint}"
    assert [f for f in findings(text, "stderr") if "assert" in f.signature] == []
