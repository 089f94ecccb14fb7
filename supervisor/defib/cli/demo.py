"""`defib demo`: the main job on an embedded engine, told as a timeline that a newcomer understands.

It starts a real instance (`defib run`) around the fake worker in a temporary folder, has three clients wait for their
answers, poisons the worker's "CUDA context" and shows what happened from the instance's own event log. Nothing outside
its folder is touched, and nothing is left running.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from defib.cli.demo_clients import Client
from defib.cli.demo_timeline import Timeline, read_events, told
from defib.cli.exits import Exit
from defib.cli.folders import short_enough
from defib.cli.run import isolation
from defib.runtime.clock import boottime

MODEL = "demo-model"
START_S, RECOVERY_S, REPORT_S, STOP_S = 30.0, 60.0, 10.0, 20.0
POLL_S = 0.02
LOG_TAIL_LINES = 25
ENGINE_FLAGS = ("--fake-start-s", "1.5", "--fake-step-ms", "40", "--fake-max-life-s", "300")
FAULT = '{"fault": "illegal_access", "unless_eager": true}\n'
"""Strikes in every step until the engine runs with --enforce-eager: the first rung of the ladder fails, too."""
REQUESTS = (
    ("a stream, before its first token", "<|wait:2500|> Tell me a story.", 40, True),
    ("a long answer, half computed", "Count the stars.", 48, False),
    ("a short answer, half computed", "Say something.", 24, False),
)

T = TypeVar("T")


class DemoFailed(Exception):
    """The demo could not show what it wanted to."""


def demo(options: argparse.Namespace) -> int:
    """Returns 0 if every client got its complete answer, else 1 (and keeps the folder)."""
    folder = Path(tempfile.mkdtemp(prefix="defib-demo-"))
    runtime = short_enough(folder / "run", os.geteuid())
    good = False
    try:
        with instance(folder) as port:
            good = show(folder, port)
    except DemoFailed as failure:
        print(f"\nThe demo failed: {failure}", file=sys.stderr)
        print("".join(_tail(folder / "log")), file=sys.stderr)
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
    if good and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
        print("\n  The evidence was in a temporary folder and is gone; `defib demo --keep` keeps it.")
    else:
        print(f"\n  Kept in {folder}: log, state/events.jsonl, state/incidents.")
    return Exit.ORDERED if good else Exit.FAILED


@contextmanager
def instance(folder: Path) -> Iterator[int]:
    """A running, ready instance; yields the port that clients come to. Raises DemoFailed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    command = _command(folder, port)
    print("defib demo: an embedded engine that speaks and dies as vLLM does; no GPU, no weights.\n", flush=True)
    print(f"  $ defib run -- vllm serve {MODEL} --port {port}\n", flush=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(folder))
    try:
        _until(lambda: _healthy(port) or _ended(process), START_S, "the engine was not ready")
        yield port
    finally:
        _stop(process)


def _command(folder: Path, port: int) -> list[str]:
    ours = [sys.executable, *isolation(), "-m", "defib.cli.main", "run"]
    folders = ["--state-dir", str(folder / "state"), "--runtime-dir", str(folder / "run"), "--name", "demo"]
    engine = [sys.executable, *isolation(), "-m", "defib.demo.fakeworker", "serve", MODEL]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return [*ours, *folders, "--", *engine, *address, *ENGINE_FLAGS, "--fake-control", str(folder / "control")]


def _environment(folder: Path) -> dict[str, str]:
    """Ours, with the caches inside the folder: the demo moves caches aside, and must not meet real ones."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DEFIB_", "VLLM_", "TRITON_"))}
    return {
        **kept,
        "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        "VLLM_CACHE_ROOT": str(folder / "cache" / "vllm"),
    }


def show(folder: Path, port: int) -> bool:
    """The story itself. Whether every client got its complete and right answer. Raises DemoFailed."""
    expected = [client.wait(RECOVERY_S) for client in [Client(port, MODEL, *request) for request in REQUESTS]]
    print("  ready. Three clients send their requests:", flush=True)
    clients = [Client(port, MODEL, *request) for request in REQUESTS]
    for client in clients:
        print(f"           {client.name}", flush=True)
    _until(lambda: all(client.sent_at for client in clients), START_S, "the clients could not send")
    time.sleep(0.5)  # for the eye and for the engine: some tokens of the plain answers are computed by then
    fault_at = boottime()
    _inject(folder / "control")
    timeline = Timeline(fault_at)
    print("\n" + timeline.line(fault_at, "fault", "an illegal memory access in the engine's worker"), flush=True)
    events = folder / "state" / "events.jsonl"
    for event in _follow(events, lambda: all(c.done for c in clients), fault_at):
        for line in told(timeline, event):
            print(line.replace(f"{folder}/", ""), flush=True)
    return _answers(clients, expected)


def _answers(clients: Sequence[Client], expected: Sequence[Client]) -> bool:
    print("\n  What the clients saw:")
    for client, before in zip(clients, expected, strict=True):
        right = client.complete and client.text == before.text
        words = len(client.text.split())
        fate = (
            f"complete answer of {words} words after {client.seconds:.1f} s ({before.seconds:.1f} s without the fault)"
            if right
            else f"NOT its complete answer: {client.problem}"
        )
        print(f"           {client.name}: {fate}", flush=True)
    return all(c.complete and c.text == b.text for c, b in zip(clients, expected, strict=True))


def _follow(events: Path, enough: Callable[[], bool], since: float) -> Iterator[dict[str, object]]:
    """The instance's steps as they are written, until the report is there and the clients are done."""
    deadline = time.monotonic() + RECOVERY_S
    seen, reported = 0, False
    while not (reported and enough()):
        fresh = read_events(events)[seen:]
        seen += len(fresh)
        for event in fresh:
            if isinstance(event.get("at"), float) and event["at"] >= since:  # type: ignore[operator]
                reported = reported or event.get("event") == "report"
                yield event
        if time.monotonic() > deadline:
            raise DemoFailed(f"no recovery in {RECOVERY_S:.0f} s")
        time.sleep(POLL_S)


def _inject(control: Path) -> None:
    """The fake worker reads its control file: a whole file appears at once."""
    fresh = control.with_suffix(".new")
    fresh.write_text(FAULT)
    fresh.replace(control)


def _healthy(port: int) -> bool:
    import httpx

    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _ended(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise DemoFailed(f"the instance ended by itself with code {process.returncode}")
    return False


def _until(condition: Callable[[], T], limit_s: float, otherwise: str) -> T:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise DemoFailed(f"{otherwise} in {limit_s:.0f} s")
        time.sleep(POLL_S)
    return value


def _stop(process: subprocess.Popen[bytes]) -> None:
    """In order, then (a second signal) at once, then without asking."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path) -> list[str]:
    try:
        return [f"  | {line}\n" for line in log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]]
    except OSError:
        return []
