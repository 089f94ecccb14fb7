"""Runs the fake worker alone, as a person would, and leaves nothing behind."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

READY_LIMIT_S = 20.0
WAIT_LIMIT_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = WAIT_LIMIT_S) -> Any:
    """The first true value of a condition; fails with `what` after the limit."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {limit_s} s: {what}"
        time.sleep(0.005)
    return value


def stays(condition: Callable[[], Any], what: str, seconds: float = 0.4) -> None:
    """A condition holds for a while: for what must not happen there is nothing to wait for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"did not stay: {what}"
        time.sleep(0.01)


class Fake:
    """One fake worker with its output, its control file and its clients."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self.folder = folder
        self.control = folder / "control"
        self.stdout_path = folder / "stdout"
        self.stderr_path = folder / "stderr"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        inherited = {name: value for name, value in os.environ.items() if name != "SPT_NOENV"}
        own = {"TRITON_CACHE_DIR": str(folder / "triton"), "FAKE_CONTROL": str(self.control), "HOME": str(folder)}
        command = [sys.executable, "-m", "defib.demo.fakeworker", "serve", "tiny", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--fake-time-scale", "0.2", "--fake-max-life-s", "90", *arguments]
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env=inherited | own | {"TMPDIR": str(folder)} | environment,
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        self.known: dict[int, psutil.Process] = {}

    def ready(self) -> "Fake":
        """Wait until /health says 200 and remember all processes."""
        wait_until(self._is_ready, f"ready; stderr: {self.stderr_path.read_text()[-500:]}", READY_LIMIT_S)
        self.tree()
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.stderr_path.read_text()[-2000:]
        return self.health() == 200

    def health(self) -> int:
        """The status of /health, 0 when nobody listens."""
        try:
            with httpx.Client(trust_env=False, timeout=10) as client:
                return client.get(f"{self.url}/health").status_code
        except httpx.TransportError:
            return 0

    def tree(self) -> dict[str, psutil.Process]:
        """The processes by what they are: root, tracker, engine, worker."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.known |= {child.pid: child for child in children}
        out = {"root": psutil.Process(self.process.pid)}
        for child in children:
            line = " ".join(child.cmdline())
            for name, part in (("tracker", "resource_tracker"), ("engine", "EngineCore"), ("worker", "Worker")):
                if part in line:
                    out[name] = child
        return out

    def strike(self, fault: str, **fields: object) -> None:
        """Write the control file."""
        fresh = self.folder / "control.fresh"
        fresh.write_text(json.dumps({"fault": fault, "times": 1, **fields}))
        fresh.rename(self.control)

    @property
    def stdout(self) -> str:
        """All standard output so far."""
        return self.stdout_path.read_bytes().decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """All standard error so far."""
        return self.stderr_path.read_bytes().decode("utf-8", "replace")

    def exit_code(self) -> int:
        """Wait for the root process to end."""
        return self.process.wait(WAIT_LIMIT_S)

    def wait_gone(self) -> None:
        """Every process that was ever seen has ended."""
        wait_until(lambda: not [process for process in self.known.values() if alive(process)], "all gone")

    def stop(self) -> None:
        """Kill what is left, by identity; not the tracker, which removes the segments and then ends."""
        self.client.close()
        if self.process.poll() is None:
            self.tree()
        self.process.kill()
        self.process.wait(WAIT_LIMIT_S)
        for process in self.known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        self.wait_gone()
        for child in psutil.Process().children():
            if child.name().startswith("VLLM::"):
                child.kill()
                child.wait(WAIT_LIMIT_S)


def alive(process: psutil.Process) -> bool:
    """Running, and not just waiting to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def segments() -> set[str]:
    """The shared memory segments of this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


def completion(prompt: str = "hello", max_tokens: int = 8, **fields: object) -> dict[str, object]:
    """The body of a completion request."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


@pytest.fixture(autouse=True)
def _subreaper() -> Iterator[None]:
    """Orphans come to us, so that they can be found and reaped."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                break
        except ChildProcessError:
            break


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Callable[..., Fake]]:
    """Starts fake workers: `fake("--flag", NAME="value")`; call `.ready()` on the result."""
    started: list[Fake] = []

    def start(*arguments: str, **environment: str) -> Fake:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Fake(folder, arguments, environment))
        return started[-1]

    before = signal.getsignal(signal.SIGCHLD)
    yield start
    for one in started:
        one.stop()
    assert signal.getsignal(signal.SIGCHLD) == before
