"""Prints how many log lines a second triage scans on one core, and what that is of a core at 5,000 lines/s.

    python tests/bench/scan.py [LINES]

Streams: `dull`, what a serving vLLM prints (access lines, statistics, request logs); `coloured`, the same in the
dialect that colours every line; `errors`, tracebacks from end to end, none of which the gate can skip.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from defib.policy.reading import policies_folder
from defib.policy.signatures import load_signatures
from defib.triage.scanner import Scanner
from defib.triage.signatures import Matcher

BLOCK_BYTES = 16 * 1024
"""What one read of a busy worker's output brings."""

RATE = 5_000
"""Lines a second that design.md section 11 speaks of."""

ACCESS = 'INFO:     10.0.2.{n}:52953 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
STATS = (
    "(APIServer pid=1) INFO 09-20 01:01:19 [loggers.py:318] Engine 000: Avg prompt throughput: 1298.4 tokens/s, Avg "
    "generation throughput: 266.1 tokens/s, Running: {n} reqs, Waiting: 0 reqs, GPU KV cache usage: 36.2%"
)
REQUEST = (
    "(APIServer pid=1) INFO 09-20 01:01:40 [logger.py:42] Received request cmpl-{n}: prompt: '"
    + "word " * 60
    + "', params: "
    "SamplingParams(n=1, temperature=0.2, max_tokens=900), lora_request: None."
)
FRAME = '(EngineCore pid=7) ERROR 12-01 00:00:29 [core.py:1332]   File "vllm/v1/engine/core.py", line {n}, in run'
SOURCE = "(EngineCore pid=7) ERROR 12-01 00:00:29 [core.py:1332]     outputs, executed = self.step_fn()"
ENDING = "(EngineCore pid=7) ERROR 12-01 00:00:29 [core.py:1332] RuntimeError: number {n} is not even"
HEADER = "(EngineCore pid=7) ERROR 12-01 00:00:29 [core.py:1332] Traceback (most recent call last):"


def _coloured(line: str) -> str:
    """As vLLM 0.10.2 to 0.11 print every line."""
    return f"\x1b[1;36m(APIServer pid=1)\x1b[0;0m {line.removeprefix('(APIServer pid=1) ')}"


MIXES = {
    "dull": ([ACCESS] * 6 + [STATS] + [REQUEST] * 3, str),
    "coloured": ([ACCESS] * 6 + [STATS] + [REQUEST] * 3, _coloured),
    "errors": ([HEADER, FRAME, SOURCE, FRAME, SOURCE, ENDING], str),
}


def lines_of(shapes: list[str], dress: Callable[[str], str], count: int) -> bytes:
    made = [dress(shapes[n % len(shapes)].format(n=n % 250)) for n in range(count)]
    return ("\n".join(made) + "\n").encode()


def microseconds_a_line(matcher: Matcher, data: bytes, count: int) -> float:
    """CPU time, the best of three runs: the machine's other work is not our cost."""
    best = float("inf")
    for _ in range(3):
        scanner = Scanner(matcher)
        begin = time.process_time()
        for start in range(0, len(data), BLOCK_BYTES):
            scanner.feed("stdout", data[start : start + BLOCK_BYTES], begin)
        best = min(best, time.process_time() - begin)
    return best / count * 1e6


def main(count: int = 50_000, folder: Path | None = None) -> None:
    signatures = load_signatures(folder or policies_folder() / "signatures")
    matcher = Matcher(signatures)
    for name, (shapes, dress) in MIXES.items():
        data = lines_of(shapes, dress, count)
        cost = microseconds_a_line(matcher, data, count)
        print(
            f"scan {name:9} {1e6 / cost:10,.0f} lines/s  {cost:6.2f} us/line  {len(data) / count:5.0f} bytes/line  "
            f"{RATE * cost / 1e4:5.2f} % of a core at {RATE:,} lines/s  ({len(signatures)} signatures)"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
