"""`make bench`: the figures of the loop on the fake worker, as a table, and with BENCH_OUT=FILE as JSON lines.

Nothing here fails on a slow day: a figure that misses its goal is marked, and the exit code stays 0 unless a request
was lost, an answer was wrong or a healthy worker was killed. `BENCH_FAULTS` (200), `BENCH_CLIENTS` (32),
`BENCH_IDLE_S` (30) and `BENCH_RUNS` (15) change the sizes; `BENCH_ONLY=name,...` picks sections.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.faults import faults_under_load
from tests.bench.figures import Figure, show
from tests.loop.bed import Bed, bed, until

RUNS = int(os.environ.get("BENCH_RUNS", "15"))
IDLE_S = float(os.environ.get("BENCH_IDLE_S", "30"))
QUICK = ("--set", "probation_s=0.2", "--set", "budget_overall=100000")


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def recovery_times(folder: Path) -> list[Figure]:
    """Line written -> verdict, and verdict -> new launch with evidence on disk, once for each of RUNS recoveries."""
    line_to_verdict: list[float] = []
    verdict_to_launch: list[float] = []
    stamp = folder / "stamp"
    with bed(folder, "--fake-step-ms", "5", run=QUICK, env={"FAKE_FAULT_STAMP": str(stamp)}) as b:
        for run in range(RUNS):
            stamp.unlink(missing_ok=True)
            b.fault("illegal_access")
            client = b.post(f"run {run}", 20)
            assert client.result().finished
            b.serving(run + 2)
            _survive(b)
            written = json.loads(stamp.read_text())["boottime"]
            verdict = [e for e in b.events("verdict") if e["generation"] == run + 1][-1]
            launched = [e for e in b.events("launched") if e["generation"] == run + 2][-1]
            line_to_verdict.append(verdict["at"] - written)
            verdict_to_launch.append(launched["at"] - verdict["at"])
    return [
        Figure("line written -> verdict, s", line_to_verdict, 0.1, "nobody publishes one"),
        Figure("verdict -> launched, evidence written, s", verdict_to_launch, 2.0, "cold restart 49 s to 310 s"),
    ]


def _survive(b: Bed) -> None:
    """The generation ends its probation, so that the next fault starts with a full budget."""
    assert b.post("traffic").result().finished
    generation = b.status()["generation"]
    until(lambda: any(e["generation"] == generation for e in b.events("survived_probation")), 20, "probation")


def exit_to_event(folder: Path) -> list[Figure]:
    """SIGKILL of EngineCore -> the exit known to the machine."""
    times: list[float] = []
    with bed(folder, run=QUICK) as b:
        for run in range(RUNS):
            engine = b.named("VLLM::EngineCore")
            killed = boottime()
            engine.send_signal(signal.SIGKILL)
            b.serving(run + 2)
            _survive(b)
            exits = [e for e in b.events("exited") if e["generation"] == run + 1 and e["at"] >= killed]
            times.append(exits[0]["at"] - killed)
    return [Figure("child exit -> event, s", times, 0.05, "TGI launcher polls at 0.1 s")]


def idle_cost(folder: Path) -> list[Figure]:
    """CPU (share of one core) and memory (PSS, MB) of launcher, gateway and supervisor, idle and while tokens flow."""
    with bed(folder, "--fake-step-ms", "20") as b:
        assert b.process is not None
        assert b.post("warm").result().finished
        ours = [b.process.pid, b.ours("gateway").pid, b.ours("supervisor").pid]
        time.sleep(3)
        idle = _share(ours, IDLE_S)
        memory = sum(_pss(pid) for pid in ours)
        stream = b.post("tokens", int(IDLE_S / 0.02) + 100, stream=True)
        assert stream.got.first_event.wait(10)
        busy = _share(ours, IDLE_S / 2)
        supervisor = _share([ours[2]], IDLE_S / 3)
        stream.leave()
    return [
        Figure("idle CPU of all three, 1 Hz probes, % of a core", [idle * 100], 1.0, "httpx + full parse: 1.7 %"),
        Figure("CPU of all three, one stream of 50 tokens/s, %", [busy * 100], None, ""),
        Figure("supervisor's CPU while traffic proves life, %", [supervisor * 100], 0.3, ""),
        Figure("memory of all three (PSS), MB", [memory], 90.0, "vllm-router alone: 81 MB"),
    ]


def _cpu_ns(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total


def _share(pids: list[int], seconds: float) -> float:
    began, before = time.monotonic(), [_cpu_ns(p) for p in pids]
    time.sleep(seconds)
    return sum(_cpu_ns(p) - b for p, b in zip(pids, before, strict=True)) / 1e9 / (time.monotonic() - began)


def _pss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


SECTIONS: dict[str, Callable[[Path], list[Figure]]] = {
    "recovery": recovery_times,
    "exit": exit_to_event,
    "idle": idle_cost,
    "faults": faults_under_load,
}


def main() -> int:
    only = [name for name in os.environ.get("BENCH_ONLY", "").split(",") if name] or list(SECTIONS)
    figures: list[Figure] = []
    for name in only:
        with tempfile.TemporaryDirectory(prefix="defib-bench-") as folder:
            began = time.monotonic()
            figures += SECTIONS[name](Path(folder))
            print(f"# {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    show(figures, os.environ.get("BENCH_OUT"))
    return 1 if any(f.must and f.ok is False for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
