"""EngineCore: batches requests, asks the worker for each step, and dies as vLLM's does.

A process of its own between the API server and the worker. It keeps working when the API server is
gone, as the real one does, and it never speaks HTTP.
"""

import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from typing import NoReturn

from defib.demo import dump, lines, tracebacks
from defib.demo.gpu import Gpu, WorkerError, begin_child, leave_files, worker_main
from defib.demo.lines import Log
from defib.demo.messages import Abort, Add, Dead, NewRequest, Outputs, Ready, Result, StartFailed, Step
from defib.demo.options import VERSION, Options

SEGMENT_BYTES = (1 << 20, 1 << 16)
WORKER_GRACE_S = 5.0
DEFAULT_STEP_TIMEOUT_S = 300.0


@dataclass(slots=True)
class _Running:
    add: Add
    made: int = 0


class _Failed(Exception):
    """The step failed: the frames and the last line of EngineCore's own traceback."""

    def __init__(self, frames: tuple[tracebacks.Frame, ...], last: str) -> None:
        super().__init__(last)
        self.text = tracebacks.render(frames, last)


def engine_main(options: Options, root: Connection, root_pid: int) -> NoReturn:
    """The life of the process `VLLM::EngineCore`."""
    begin_child("VLLM::EngineCore", options)
    log = Log("EngineCore", ansi=options.ansi)
    engine = _Engine(options, root, root_pid, log)
    try:
        engine.load()
    except (WorkerError, _Failed, EOFError, OSError) as error:
        frames = tracebacks.ENGINE_START
        text = tracebacks.render(frames, str(error) or "Exception: WorkerProc initialization failed")
        log.error("core.py:1512", f"EngineCore failed to start.\n{text}")
        root.send(StartFailed())
        lines.write(lines.STDERR, f"Process EngineCore:\n{text}\n")
        os._exit(1)
    try:
        engine.run()
    except _Failed as error:
        engine.die(error)
    os._exit(1)


class _Engine:
    def __init__(self, options: Options, root: Connection, root_pid: int, log: Log) -> None:
        self._options = options
        self._root: Connection | None = root
        self._root_pid = root_pid
        self._log = log
        self._waiting: deque[Add] = deque()
        self._running: dict[str, _Running] = {}
        self._gone: list[str] = []
        self._new: list[NewRequest] = []
        self._worker: Connection | None = None
        self._worker_pid: int | None = None
        self._gpu: Gpu | None = None
        self._segments: list[SharedMemory] = []
        self._timeout_s = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS") or DEFAULT_STEP_TIMEOUT_S)
        self._terminated, self._terminate = socket.socketpair()
        self._terminated.setblocking(False)
        self._terminate.setblocking(False)

    def load(self) -> None:
        """Start the worker and wait for it. Raises what made it fail."""
        config = lines.config_text(self._options)
        self._log.info("core.py:133", f"Initializing a V1 LLM engine (v{VERSION}) with config: {config}")
        self._segments = [SharedMemory(create=True, size=size) for size in SEGMENT_BYTES]
        leave_files()
        if self._options.uni:
            self._gpu = Gpu(self._options, self._log, os.getpid(), self._root_pid)
            self._gpu.load()
        else:
            self._start_worker()
        time.sleep(self._options.start_s)
        while self._options.never_ready:
            time.sleep(3600)
        lines.engine_ready(self._log, self._options)
        if not self._options.ignore_sigterm:
            signal.set_wakeup_fd(self._terminate.fileno())
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._send(Ready(self._worker_pid))

    def _start_worker(self) -> None:
        self._worker, theirs = Pipe()
        engine_pid = os.getpid()
        self._worker_pid = os.fork()
        if self._worker_pid == 0:
            self._worker.close()
            if self._root is not None:
                self._root.close()
            names = [segment.name for segment in self._segments]
            worker_main(self._options, theirs, engine_pid, self._root_pid, names)
        theirs.close()
        answer = self._worker.recv()
        if isinstance(answer, Result):
            raise WorkerError(answer.error or "")

    def run(self) -> None:
        """Step after step. Raises _Failed when the engine must die; returns on SIGTERM."""
        while True:
            if not self._receive():
                return
            while self._waiting and len(self._running) < self._options.max_num_seqs:
                add = self._waiting.popleft()
                self._running[add.request.id] = _Running(add)
                self._new.append(add.request)
            if self._running:
                step = Step(self._new, list(self._running), self._gone)
                self._new, self._gone = [], []
                self._take(self._execute(step))

    def _receive(self) -> bool:
        """Take what has come; blocks while there is nothing to do. False: SIGTERM came."""
        sources: list[Connection | socket.socket] = [self._terminated]
        if self._root is not None:
            sources.append(self._root)
        if self._worker is not None and not self._running:
            sources.append(self._worker)
        idle_s = 0.03 if self._gpu is not None and self._gpu.watching else None
        for source in wait(sources, 0 if self._running or self._waiting else idle_s):
            if source is self._terminated:
                return self._on_sigterm()
            if self._worker is not None and source is self._worker:
                self._answer_of(self._worker)  # It speaks unasked only to fail.
            elif self._root is not None:
                self._on_root(self._root)
        if self._gpu is not None and not self._running:
            self._look(self._gpu)
        return True

    @staticmethod
    def _look(gpu: Gpu) -> None:
        try:
            gpu.look("now")
        except WorkerError as error:
            raise _Failed(tracebacks.ENGINE_UNI, str(error)) from None

    def _on_root(self, root: Connection) -> None:
        try:
            while root.poll():
                message = root.recv()
                if isinstance(message, Add):
                    self._waiting.append(message)
                elif isinstance(message, Abort):
                    self._drop(message.id)
        except (EOFError, OSError):
            self._root = None  # The API server was killed: the real engine stays as well.

    def _drop(self, name: str) -> None:
        self._waiting = deque(add for add in self._waiting if add.request.id != name)
        self._new = [request for request in self._new if request.id != name]
        if self._running.pop(name, None) is not None:
            self._gone.append(name)

    def _execute(self, step: Step) -> Result:
        if self._gpu is not None:
            try:
                self._look(self._gpu)
                return self._gpu.step(step)
            except WorkerError as error:
                raise _Failed(tracebacks.ENGINE_UNI, str(error)) from None
        assert self._worker is not None
        try:
            self._worker.send(step)
            ready = wait([self._worker, self._terminated], self._timeout_s)
            if not ready:
                raise _Failed(tracebacks.ENGINE_TIMED_OUT, "TimeoutError: RPC call to execute_model timed out.")
            if self._worker not in ready:
                self._stop_hung()
            return self._answer_of(self._worker)
        except OSError:
            self._on_worker_gone()

    def _answer_of(self, worker: Connection) -> Result:
        try:
            result = worker.recv()
        except (EOFError, OSError):
            self._on_worker_gone()
        if not isinstance(result, Result):
            raise TypeError(result)
        if result.error is not None:
            last = result.error.partition(": ")[2]
            raise _Failed(
                tracebacks.ENGINE_WORKER_FAILED,
                f"RuntimeError: Worker failed with error '{last}', please check the stack trace above for "
                "the root cause",
            )
        return result

    def _take(self, result: Result) -> None:
        items: list[tuple[str, int | None]] = [(name, token) for name, token in result.tokens.items()]
        items += [(name, None) for name in result.failed]
        for name, token in items:
            running = self._running[name]
            running.made += 1
            if token is None or running.made >= running.add.max_tokens:
                del self._running[name]
                self._gone.append(name)
        self._send(Outputs(items, len(self._running), len(self._waiting)))

    def _on_worker_gone(self) -> NoReturn:
        assert self._worker_pid is not None
        _, status = os.waitpid(self._worker_pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._log.error(
            "multiproc_executor.py:315",
            f"Worker proc VllmWorker-0 died unexpectedly (exit code: {code}), shutting down executor.",
        )
        self._log.info("multiproc_executor.py:479", "[shutdown] Executor: waiting for worker exit count=0")
        self._log.info("multiproc_executor.py:486", "[shutdown] Executor: all workers exited gracefully")
        self._worker_pid = None
        raise _Failed(tracebacks.ENGINE_CANCELLED, "RuntimeError: cancelled")

    def die(self, error: _Failed) -> None:
        """The end after a failed step: the dump, the traceback, the word to the API server."""
        self._dump()
        self._log.error("core.py:1512", f"EngineCore encountered a fatal error.\n{error.text}")
        self._send(Dead())
        if self._worker_pid is not None:
            self._log.info("multiproc_executor.py:479", "[shutdown] Executor: waiting for worker exit count=1")
        if self._worker is not None:
            self._worker.close()
        time.sleep(WORKER_GRACE_S * self._options.time_scale)
        if self._worker_pid is not None:
            self._log.warning(
                "multiproc_executor.py:491",
                "[shutdown] Executor: workers still running after grace period; sending SIGTERM count=1",
            )
            os.kill(self._worker_pid, signal.SIGTERM)
        lines.write(lines.STDERR, f"Process EngineCore:\n{error.text}\n")

    def _dump(self) -> None:
        runs = [
            dump.Run(run.add.request.id, len(run.add.request.prompt_ids), run.made, run.add.max_tokens)
            for run in self._running.values()
        ]
        config = lines.config_text(self._options)
        self._log.error(
            "dump_input.py:72", f"Dumping input data for V1 LLM engine (v{VERSION}) with config: {config}, "
        )
        scheduled = dump.scheduler_output(runs)
        self._log.error("dump_input.py:79", f"Dumping scheduler output for model execution: {scheduled}")
        statistics = dump.scheduler_stats(len(self._running), len(self._waiting))
        self._log.error("dump_input.py:81", f"Dumping scheduler stats: {statistics}")

    def _on_sigterm(self) -> bool:
        self._log.info("core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM")
        self._send(Dead())
        time.sleep(WORKER_GRACE_S)  # The API server kills us meanwhile.
        return False

    def _stop_hung(self) -> NoReturn:
        """SIGTERM in the middle of a step: the real one says so and can say no more."""
        self._log.info("core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM")
        if self._worker is not None and self._worker.poll(0.2):
            self._send(Dead())
        time.sleep(WORKER_GRACE_S)
        os._exit(0)

    def _send(self, message: object) -> None:
        if self._root is None:
            return
        try:
            self._root.send(message)
        except OSError:
            self._root = None
