"""The worker: makes the tokens of a step, and strikes with whatever fault is due.

A process of its own (`VLLM::Worker`), or part of EngineCore in the one-GPU layout. It never takes a
decision about requests; it answers each step with tokens, with an error, or not at all.
"""

import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NoReturn

from defib.demo import faults, lines, tracebacks
from defib.demo.faults import Fault, Faults, Moment
from defib.demo.lines import Log
from defib.demo.messages import Result, Step
from defib.demo.options import Options
from defib.demo.title import set_title
from defib.demo.tokens import Generator

IDLE_LOOK_S = 0.03
# Measured: a Worker whose EngineCore was killed lived 3 s longer than the API server.
OUTLIVES_ENGINE_S = 3.0
_FLOOD_LINE = "\x1b[36mLoading safetensors checkpoint shards:\x1b[0m  {percent:3d}% Completed | {done}/100 "


class WorkerError(Exception):
    """The step failed; the text is the exception's last line(s), class first."""


@dataclass(slots=True)
class _Request:
    generator: Generator
    fault: Fault | None
    first_at: float
    made: int = 0


class Gpu:
    """The thing that computes. `engine_pid` and `root_pid` are whom some faults kill."""

    def __init__(self, options: Options, log: Log, engine_pid: int, root_pid: int) -> None:
        self._options = options
        self._log = log
        self._engine_pid = engine_pid
        self._root_pid = root_pid
        self._faults = Faults(options)
        self._requests: dict[str, _Request] = {}

    @property
    def watching(self) -> bool:
        """Whether it wants to be asked while idle."""
        return self._faults.watching

    def load(self) -> None:
        """The part of loading that the worker does."""
        self._log.info("gpu_model_runner.py:4980", f"Starting to load model {self._options.model}...")
        _fill_triton_cache(self._log)
        self._log.info("base_loader.py:82", "Initializing model took 0.108359 seconds")
        if self._options.orphan:
            leave_orphan(closed=self._options.orphan == "closed", life_s=self._options.max_life_s)
        if self._options.flood_lines_per_s > 0:
            _flood(self._options.flood_lines_per_s, float("inf"))
        if self._options.start_fault:
            self._strike(faults.read(self._options.start_fault))
        self.look("start")

    def look(self, moment: Moment) -> None:
        """Strike with a fault that is due outside of a step. Raises WorkerError."""
        if (fault := self._faults.due(moment)) is not None:
            self._strike(fault)

    def step(self, step: Step) -> Result:
        """One token for every running request that is past its first wait. Raises WorkerError."""
        now = time.monotonic()
        for new in step.new:
            first_at = now + self._options.first_token_s + new.wait_s
            self._requests[new.id] = _Request(Generator(new.prompt_ids), new.fault, first_at)
        for gone in step.gone:
            self._requests.pop(gone, None)
        time.sleep(self._options.step_s)
        result = Result()
        self._strike_in_step(step.running, result)
        for name in step.running:
            request = self._requests[name]
            if name not in result.failed and time.monotonic() >= request.first_at:
                request.made += 1
                result.tokens[name] = request.generator.next()
        return result

    def _strike_in_step(self, running: list[str], result: Result) -> None:
        made = tuple(self._requests[name].made for name in running)
        if (fault := self._faults.due("step", made)) is not None:
            victim = max(running, key=lambda name: self._requests[name].made)
            self._strike(fault, victim, result)
        for name in running:
            request = self._requests[name]
            asked = request.fault
            if asked and self._faults.strikes(asked, "step", (request.made,)):
                request.fault = None
                self._strike(asked, name, result)

    def _strike(self, fault: Fault, victim: str | None = None, result: Result | None = None) -> None:
        match fault.kind:
            case "stream_error":
                if victim is not None and result is not None:
                    result.failed.append(victim)
            case "hang":
                _hang()
            case "onnx" | "segv":
                _die_raw(faults.RAW[fault.kind], signal.SIGABRT if fault.kind == "onnx" else signal.SIGSEGV)
            case "worker_kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "silent_death":
                os.kill(self._engine_pid, signal.SIGKILL)
            case "root_kill":
                os.kill(self._root_pid, signal.SIGKILL)
            case "orphan" | "orphan_closed":
                leave_orphan(closed=fault.kind == "orphan_closed", life_s=self._options.max_life_s)
            case "flood":
                _flood(fault.lines_per_s, fault.seconds)
            case kind:
                _stamp(kind)
                if kind in faults.RAW:
                    lines.write(lines.STDERR, faults.RAW[kind])
                name, text = faults.ERRORS[kind]
                raise WorkerError(f"{name}: {text}")


def worker_main(options: Options, engine: Connection, engine_pid: int, root_pid: int, segments: list[str]) -> NoReturn:
    """The whole life of the process `VLLM::Worker`."""
    begin_child("VLLM::Worker", options)
    log = Log("VllmWorker-0", ansi=options.ansi)
    attached = [SharedMemory(name) for name in segments]
    log.info("parallel_state.py:1906", "world_size=1 rank=0 local_rank=0 backend=nccl")
    log.rename("Worker")
    gpu = Gpu(options, log, engine_pid, root_pid)
    try:
        gpu.load()
        engine.send("ready")
        while True:
            _answer(gpu, log, engine)
    except WorkerError as error:
        engine.send(Result(error=str(error)))
        os._exit(1)
    except (EOFError, OSError):
        log.info("multiproc_executor.py:843", "Parent process exited, terminating worker queues")
        time.sleep(OUTLIVES_ENGINE_S * options.time_scale)
        for segment in attached:
            segment.close()
    os._exit(0)


def _answer(gpu: Gpu, log: Log, engine: Connection) -> None:
    step = engine.recv() if not gpu.watching or engine.poll(IDLE_LOOK_S) else None
    try:
        gpu.look("now")
        if step is None:
            return
        result = gpu.step(step)
    except WorkerError as error:
        text = tracebacks.render(tracebacks.WORKER_STEP, str(error))
        log.error("multiproc_executor.py:1063", f"WorkerProc hit an exception.\n{text}\n{text}")
        result = Result(error=str(error))
    engine.send(result)


def begin_child(title: str, options: Options) -> None:
    """What every forked process does first: its name, its end of life, its signals."""
    set_title(title, erase_environment=options.hide_mark)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_sigterm else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(options.max_life_s)


def leave_orphan(*, closed: bool, life_s: int) -> None:
    """A grandchild in a session of its own, environment erased, that outlives everybody.

    `closed`: it has no file open any more; otherwise it keeps the worker's output open.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    set_title("VLLM::Orphan", erase_environment=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(life_s)
    os.closerange(0 if closed else 3, 4096)
    os.chdir("/")
    while True:
        time.sleep(3600)


def _stamp(kind: str) -> None:
    """For measurements: when the first error line is about to be written (CLOCK_BOOTTIME), into FAKE_FAULT_STAMP."""
    if path := os.environ.get("FAKE_FAULT_STAMP"):
        stamp = {"kind": kind, "boottime": time.clock_gettime(time.CLOCK_BOOTTIME)}
        Path(path).write_text(json.dumps(stamp))


def _hang() -> NoReturn:
    # As in a driver call: Python's handlers don't run any more, only SIGKILL ends it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})
    while True:
        time.sleep(3600)


def _die_raw(text: str, number: int) -> None:
    lines.write(lines.STDERR, text)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(60)


def _flood(lines_per_s: float, seconds: float) -> None:
    def run() -> None:
        started, count = time.monotonic(), 0
        while (passed := time.monotonic() - started) < seconds:
            while count < passed * lines_per_s:
                percent = count % 101
                end = "\r" if percent < 100 else "\n"
                lines.write(lines.STDERR, _FLOOD_LINE.format(percent=percent, done=percent) + end)
                count += 1
            time.sleep(0.01)

    threading.Thread(target=run, daemon=True).start()


def _fill_triton_cache(log: Log) -> None:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    root = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    try:
        for name in ("4CKTBP2N6MDUT7QDHS2", "YRZV3LZ2KPWNEJ5QF5A"):
            entry = root / name
            entry.mkdir(parents=True, exist_ok=True)
            (entry / "fused_add_rms_norm_kernel.cubin").write_bytes(b"\x7fELF" + bytes(2048))
            (entry / "fused_add_rms_norm_kernel.json").write_text('{"num_warps": 4}', encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            log.warning("triton_utils.py:88", f"Triton cache {root} is not writable: {error}")


def leave_files() -> None:
    """The sockets and the file that each start of vLLM leaves in a private TMPDIR for good."""
    if not os.environ.get("TMPDIR"):
        return
    folder = Path(tempfile.gettempdir())
    try:
        (folder / f"vllm_dist_{secrets.token_hex(16)}").write_bytes(bytes(64))
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(folder / f"{secrets.token_hex(4)}-{secrets.token_hex(2)}"))
    except OSError:
        pass  # A path too long for a socket, or a folder that can't be written: not what is tested here.
