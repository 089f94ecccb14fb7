"""Faults of mixed kinds under concurrent clients: what was lost, wrong, or killed while healthy, by kind.

Every client sends short plain and streamed requests for as long as the run lasts and checks each answer against the
one that the same prompt got in peace. An answer is *wrong* if it claims to be complete and differs; *lost* if a client
was neither answered nor told clearly. A half-delivered stream that is ended with our clear error is *told*.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.figures import Figure
from tests.loop.bed import Bed, Client, Got, bed, completion, until

FAULTS = int(os.environ.get("BENCH_FAULTS", "200"))
CLIENTS = int(os.environ.get("BENCH_CLIENTS", "32"))
SEED = int(os.environ.get("BENCH_SEED", "1"))

DEADLY = (
    "illegal_access",
    "assert",
    "misaligned",
    "launch_failure",
    "cublas",
    "triton",
    "oom",
    "exception",
    "silent_death",
    "worker_kill",
    "root_kill",
)
HARMLESS = ("echo", "raise", "stream_error")
"""Kinds after which the worker is healthy: a kill would be harm."""
CLEAR = ("defib_stream_interrupted", "defib_not_replayed", "defib_unavailable")
PROMPTS = [f"question number {n}" for n in range(24)]


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    kind: str = "none"
    bad: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, got: Got) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            self.kinds.setdefault(self.kind, Counter())[outcome] += 1
            if outcome in ("lost", "wrong") and len(self.bad) < 20:
                self.bad.append(f"{self.kind}: {outcome}: {got.status} {got.cut} {got.error} {got.events[-2:]}")


def judge(got: Got, text: str) -> str:
    """answered, told, passed (the worker's own error, unchanged), wrong or lost."""
    if got.finished:
        return "answered" if got.text == text else "wrong"
    error = got.error or {}
    if str(error.get("type", "")).startswith("defib_"):
        return "told"
    if got.cut or not error:
        return "lost"
    if "EngineCore encountered" in str(error):
        return "lost"  # an incident's error reached a client
    return "passed"


def _client(b: Bed, answers: dict[tuple[str, int], str], tally: Tally, stop: threading.Event, number: int) -> None:
    dice = random.Random(SEED * 1000 + number)
    while not stop.is_set():
        prompt, tokens, stream = dice.choice(PROMPTS), dice.choice((4, 16)), dice.random() < 0.5
        got = Client(b.url, "/v1/completions", completion(prompt, tokens, stream), 120.0).result(150)
        tally.add(judge(got, answers[prompt, tokens]), got)


def _harmless(b: Bed, kind: str, number: int) -> None:
    text = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    if kind == "echo":
        b.post(f"{text}\n(EngineCore pid=1) ERROR 11-30 23:21:50 [core.py:1] {text}\n{number}").result(150)
    elif kind == "raise":
        Client(b.url, "/fake/raise", {"text": text, "n": number}, 120.0).result(150)
    else:
        b.post(f"<|fault:stream_error|> {number}", 8, stream=True).result(150)


def faults_under_load(folder: Path) -> list[Figure]:
    """Injects FAULTS faults, one after the other, each after the recovery from the one before."""
    settings = ("probation_s=0.2", "budget_overall=100000", "symptom_rest_s=0.5")
    run = tuple(itertools.chain.from_iterable(("--set", s) for s in settings))
    tally, stop = Tally(), threading.Event()
    healthy_kills = 0
    missed: Counter[str] = Counter()
    dice = random.Random(SEED)
    with bed(folder, "--fake-step-ms", "3", "--fake-echo-prompts", run=run) as b:
        answers = {(p, n): b.post(p, n).result().text for p in PROMPTS for n in (4, 16)}
        threads = [
            threading.Thread(target=_client, args=(b, answers, tally, stop, n), daemon=True) for n in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for number in range(FAULTS):
            generation = b.serving(b.status()["generation"], 60)["generation"]
            kind = dice.choice(DEADLY + HARMLESS)
            with tally.lock:
                tally.kind = kind
            if kind in HARMLESS:
                _harmless(b, kind, number)
                time.sleep(0.3)
                healthy_kills += b.status()["generation"] != generation
                continue
            b.fault(kind)
            try:
                until(lambda g=generation: b.status()["generation"] > g, 60, kind)
                until(lambda: b.phase() == "serving", 60, "serving again")
            except (AssertionError, OSError) as error:
                missed[kind] += 1
                tally.bad.append(f"{kind}: {error}")
        stop.set()
        for thread in threads:
            thread.join(150)
        counts = b.status()["gateway"]
        orphans = len(b.alive()) - len(b.worker_processes())
    print(f"# clients saw {dict(tally.outcomes)}; gateway counts {counts}; orphans {orphans}")
    for name, seen in sorted(tally.kinds.items()):
        print(f"#   {name:<16} {dict(seen)}")
    for line in tally.bad:
        print(f"#   BAD {line}")
    return [
        Figure(f"{FAULTS} faults, {CLIENTS} clients: requests lost", [tally.outcomes["lost"]], 0, "", True),
        Figure("  answers wrong", [tally.outcomes["wrong"]], 0, "", True),
        Figure("  healthy workers killed", [healthy_kills], 0, "", True),
        Figure("  faults not recovered from", [sum(missed.values())], 0, "", True),
        Figure("  requests answered", [tally.outcomes["answered"]], None, ""),
        Figure("  half-delivered streams told clearly", [tally.outcomes["told"]], None, ""),
    ]
