"""The fake worker: `python -m defib.demo.fakeworker serve MODEL [flags]`, a vLLM server without a model.

For tests and the demo. It looks like vLLM 0.32.0 from outside: processes, log lines, HTTP, exits.
It knows nothing of defib and uses nothing but the standard library (setproctitle where present).
This module is the root process: it starts the others and decides how everything ends.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection

from defib.demo import lines, tracebacks
from defib.demo.api import Api
from defib.demo.engine import engine_main
from defib.demo.http import Server
from defib.demo.lines import Log
from defib.demo.messages import Ready
from defib.demo.options import VERSION, Options, parse

START_FAILED_EXIT_CODE = 1
# Measured on a real GPU: 503 for 40 to 120 ms, the process gone 0.6 to 0.8 s after the first error line.
HEALTH_503_S = 0.08
ENGINE_GONE_S = 0.2
EXIT_S = 0.65
# An EngineCore that dies without a word is noticed by a poll of its sentinel (0.23 s in a run).
NOTICE_S = 0.2
FLUSH_LIMIT_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Run the fake worker with arguments as in sys.argv[1:]; the exit code is vLLM's."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] in (["--version"], ["-v"]):
        print(VERSION)
        return 0
    if arguments[:1] == ["serve"]:
        arguments = arguments[1:]
    options = parse(arguments, dict(os.environ))
    signal.alarm(options.max_life_s)
    log = Log("APIServer", ansi=options.ansi)
    lines.banner(log, options)
    listener = _bind(options)
    if listener is None:
        return START_FAILED_EXIT_CODE
    root = _Root(options, log, listener)
    if not root.start_engine():
        return START_FAILED_EXIT_CODE
    return asyncio.run(root.serve())


def _bind(options: Options) -> socket.socket | None:
    """The address, bound before anything is loaded and not listened on yet, as vLLM does."""
    family = socket.AF_UNIX if options.uds else socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if options.uds:
            listener.bind(options.uds)
            os.chmod(options.uds, 0o666)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((options.host, options.port))
    except OSError as error:
        text = tracebacks.render(tracebacks.BIND, f"OSError: [Errno {error.errno}] {error.strerror}")
        lines.write(lines.STDERR, text + "\n")
        return None
    return listener


class _Root:
    def __init__(self, options: Options, log: Log, listener: socket.socket) -> None:
        self._options = options
        self._log = log
        self._listener = listener
        self._engine: Connection | None = None
        self._engine_pid = 0
        self._worker_pid: int | None = None
        self._worker_fd = -1

    def start_engine(self) -> bool:
        """Fork EngineCore and wait until it has loaded; False when it could not (the log says why)."""
        if self._options.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        resource_tracker.ensure_running()
        self._engine, theirs = Pipe()
        root_pid = os.getpid()
        self._engine_pid = os.fork()
        if self._engine_pid == 0:
            self._listener.close()
            self._engine.close()
            engine_main(self._options, theirs, root_pid)
        theirs.close()
        try:
            answer = self._engine.recv()
        except (EOFError, OSError):
            answer = None
        if isinstance(answer, Ready):
            self._worker_pid = answer.worker_pid
            if self._worker_pid is not None:
                self._worker_fd = os.pidfd_open(self._worker_pid)
            return True
        os.waitpid(self._engine_pid, 0)
        last = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
        lines.write(lines.STDERR, tracebacks.render(tracebacks.API_START, last) + "\n")
        return False

    async def serve(self) -> int:
        """Serve until the engine dies or a signal comes; the exit code is 0 in both cases, as vLLM's."""
        assert self._engine is not None
        api = Api(self._options, self._engine, self._log)
        server = Server(api.handle)
        terminated = asyncio.Event()
        loop = asyncio.get_running_loop()
        if not self._options.ignore_sigterm:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, terminated.set)
        listening = await self._listen(server)
        api.start()
        background = loop.create_task(api.statistics())
        await self._first_of(api.dead, api.engine_gone, terminated)
        if terminated.is_set():
            await self._on_sigterm(api)
        else:
            await self._on_engine_death(api, terminated)
        began = time.monotonic()
        listening.close()
        await self._drain(server, limit_s=None if terminated.is_set() else FLUSH_LIMIT_S)
        await self._end_engine(began, quiet=api.engine_gone.is_set())
        background.cancel()
        return 0

    async def _listen(self, server: Server) -> asyncio.Server:
        shown = f"unix:{self._options.uds}" if self._options.uds else self._address()
        lines.serving(self._log, shown)
        lines.uvicorn(f"Started server process [{os.getpid()}]")
        lines.uvicorn("Waiting for application startup.")
        loop = asyncio.get_running_loop()
        if self._options.uds:
            listening = await loop.create_unix_server(server.protocol, sock=self._listener, backlog=2048)
        else:
            listening = await loop.create_server(server.protocol, sock=self._listener, backlog=2048)
        lines.uvicorn("Application startup complete.")
        return listening

    def _address(self) -> str:
        host = self._options.host or "0.0.0.0"
        return f"http://{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    async def _first_of(self, *events: asyncio.Event) -> None:
        tasks = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _on_engine_death(self, api: Api, terminated: asyncio.Event) -> None:
        if not api.dead.is_set():
            await self._pause(NOTICE_S)
            self._log.warning(
                "core_client.py:817", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
            )
            self._log.info("core_client.py:770", "[shutdown] MPClient: start timeout=default")
            self._log.info("core_client.py:772", "[shutdown] MPClient: stopping engine manager")
            lines.engine_manager_stopped(self._log)
            api.fail_all()
        if self._options.keep_alive:
            await self._first_of(api.engine_gone, terminated)
            if api.engine_gone.is_set():
                self._reap_engine()
            await terminated.wait()
        await self._pause(HEALTH_503_S)

    async def _on_sigterm(self, api: Api) -> None:
        self._log.info("launcher.py:254", "[shutdown] API server: shutdown triggered")
        text = "[shutdown] API server: stopping engine client mode=abort timeout=0s"
        self._log.info("launcher.py:270", text)
        lines.engine_manager_stop(self._log, self._engine_pid, self._worker_pid)
        self._kill(self._engine_pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            # A hung engine can't say that it dies: its clients are told nothing and are waited for.
            await asyncio.wait_for(self._first_of(api.dead, api.engine_gone), 0.3)
        self._kill_engine()
        lines.engine_manager_stopped(self._log)
        self._log.info("launcher.py:279", "[shutdown] API server: engine client stopped")
        self._log.info("launcher.py:282", "[shutdown] API server: signalling HTTP server shutdown")
        self._log.info("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server")

    async def _drain(self, server: Server, limit_s: float | None) -> None:
        lines.uvicorn("Shutting down")
        server.shut_down()
        deadline = time.monotonic() + limit_s if limit_s is not None else None
        said = False
        while server.busy and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(0.005)
            if server.busy and not said:
                lines.uvicorn("Waiting for connections to close. (CTRL+C to force quit)")
                said = True
        lines.uvicorn("Waiting for application shutdown.")
        lines.uvicorn("Application shutdown complete.")

    async def _end_engine(self, began: float, *, quiet: bool) -> None:
        lines.uvicorn(f"Finished server process [{os.getpid()}]")
        if self._engine_pid:
            await self._pause(ENGINE_GONE_S - HEALTH_503_S)
            if not quiet:
                lines.engine_manager_stop(self._log, self._engine_pid, self._worker_pid)
                self._kill_engine()
                lines.engine_manager_stopped(self._log)
        rest_s = EXIT_S * self._options.time_scale - (time.monotonic() - began)
        await asyncio.sleep(max(0.0, rest_s))

    def _kill_engine(self) -> None:
        self._kill(self._engine_pid, signal.SIGKILL)
        if self._worker_fd >= 0:
            # By descriptor: EngineCore may have reaped it, and the number may be somebody else's by now.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._worker_fd, signal.SIGKILL)
        self._reap_engine()

    def _reap_engine(self) -> None:
        if self._engine_pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._engine_pid, 0)
        self._engine_pid, self._worker_pid = 0, None

    @staticmethod
    def _kill(pid: int, number: int) -> None:
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._options.time_scale)


if __name__ == "__main__":
    sys.exit(main())
