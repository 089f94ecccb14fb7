"""The test bed of the whole loop: `defib run` around the fake worker, clients that record what they got, and eyes
on processes, shared memory and evidence. Used by tests/loop and by tests/bench.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = "demo-model"
READY_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], Any], seconds: float = 15.0, what: str = "") -> Any:
    """The first true value of a condition; fails after a deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.02)


@dataclass
class Got:
    """What one client received."""

    status: int | None = None
    body: bytes = b""
    events: list[str] = field(default_factory=list)
    cut: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    first_event: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        """The generated text, from a stream or a plain answer."""
        if self.events:
            out = ""
            for event in self.events:
                if event.startswith("{"):
                    for choice in json.loads(event).get("choices", ()):
                        out += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            return out
        choice = json.loads(self.body)["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def finished(self) -> bool:
        """A complete answer: finish reason seen, and nothing that looks like an error."""
        if self.error is not None or self.cut or self.status != 200:
            return False
        if self.events:
            return self.events[-1] == "[DONE]" and any(
                '"finish_reason":' in e and "null" not in e.split('"finish_reason":')[1][:6] for e in self.events[:-1]
            )
        return bool(json.loads(self.body)["choices"][0]["finish_reason"])

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object that the client was told, if any."""
        for event in self.events:
            if event.startswith("{") and "error" in json.loads(event):
                error: dict[str, Any] = json.loads(event)["error"]
                return error
        if self.status is not None and self.status >= 400:
            with contextlib.suppress(ValueError):
                body: dict[str, Any] = json.loads(self.body)
                return body.get("error", body)
            return {"message": self.body.decode("utf-8", "replace")}
        return None


class Client:
    """One request in a thread of its own, on a connection of its own."""

    def __init__(self, url: str, path: str, body: dict[str, Any], timeout_s: float = 90.0, **headers: str) -> None:
        self.got = Got()
        self._request = (url + path, body, timeout_s, headers)
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        url, body, timeout_s, headers = self._request
        began = time.monotonic()
        try:
            with httpx.Client(timeout=timeout_s, trust_env=False) as client:
                if body.get("stream"):
                    self._stream(client, url, body, headers)
                else:
                    answer = client.post(url, json=body, headers=headers)
                    self.got.status, self.got.body = answer.status_code, answer.content
                    self.got.headers = dict(answer.headers)
        except httpx.HTTPError as error:
            self.got.cut = repr(error)
        self.got.seconds = time.monotonic() - began

    def _stream(self, client: httpx.Client, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        with client.stream("POST", url, json=body, headers=headers) as answer:
            self.got.status, self.got.headers = answer.status_code, dict(answer.headers)
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                self.got.body = answer.read()
                return
            for line in answer.iter_lines():
                if self._stop.is_set():
                    return
                if line.startswith("data: "):
                    self.got.events.append(line[6:])
                    self.got.first_event.set()

    def leave(self) -> None:
        self._stop.set()

    def result(self, seconds: float = 90.0) -> Got:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the client still waits"
        return self.got


def completion(prompt: str, tokens: int = 8, stream: bool = False, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream, **more}


def _segments(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {line.rsplit("/dev/shm/", 1)[1].split(" ")[0] for line in maps.splitlines() if "/dev/shm/" in line}


class Bed:
    """One `defib run` around one fake worker."""

    def __init__(
        self, folder: Path, *worker: str, run: tuple[str, ...] = (), env: dict[str, str] | None = None, name: str = "t"
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.control = folder / "control.json"
        self.state, self.runtime = folder / "state", folder / "run"
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        self.stdout, self.stderr = folder / "stdout.txt", folder / "stderr.txt"
        self.command = [
            sys.executable, "-m", "defib.cli.main", "run", "--name", name, "--state-dir", str(self.state),
            "--runtime-dir", str(self.runtime), *run, "--", sys.executable, "-m", "defib.demo.fakeworker", "serve",
            MODEL, "--port", str(self.port), "--fake-control", str(self.control), *worker,
        ]  # fmt: skip
        self.env = {**os.environ, "HOME": str(self.home), **(env or {})}
        for name_ in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "STATE_DIRECTORY", "RUNTIME_DIRECTORY"):
            if not env or name_ not in env:
                self.env.pop(name_, None)
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: set[tuple[int, float]] = set()
        self.shm_seen: set[str] = set()

    # --- life ---

    def start(self) -> Bed:
        with self.stdout.open("ab") as out, self.stderr.open("ab") as err:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self.env, cwd=self.folder
            )
        return self

    def ready(self, seconds: float = READY_S) -> Bed:
        until(self._is_ready, seconds, f"ready; stderr: {self.tail()}")
        self.worker_processes()
        return self

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"defib ended with {self.process.returncode}: {self.tail()}"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + "/health", timeout=2, trust_env=False).status_code == 200
        return False

    def stop(self, seconds: float = 40.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(seconds)

    def close(self) -> None:
        """Leaves nothing behind, whatever the test did."""
        with contextlib.suppress(psutil.Error):
            self.worker_processes()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()

    # --- clients ---

    def post(self, prompt: str, tokens: int = 8, stream: bool = False, **more: Any) -> Client:
        return Client(self.url, "/v1/completions", completion(prompt, tokens, stream, **more))

    def chat(self, prompt: str, tokens: int = 8, stream: bool = False) -> Client:
        body = completion(prompt, tokens, stream)
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        return Client(self.url, "/v1/chat/completions", body)

    def fault(self, kind: str, **more: Any) -> float:
        """Tells the fake worker to fail; returns when (monotonic)."""
        new = self.control.with_suffix(".new")
        new.write_text(json.dumps({"fault": kind, "times": 1, **more}))
        new.rename(self.control)
        return time.monotonic()

    # --- what is there ---

    def children(self) -> list[psutil.Process]:
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def ours(self, part: str) -> psutil.Process:
        """The gateway or the supervisor process."""
        for process in self.children():
            with contextlib.suppress(psutil.Error):
                if f"defib.app.{part}" in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no {part}")

    def worker_processes(self) -> list[psutil.Process]:
        found = []
        for process in self.children():
            with contextlib.suppress(psutil.Error):
                if "defib.app." not in " ".join(process.cmdline()):
                    found.append(process)
                    self.seen.add((process.pid, process.create_time()))
                    self.shm_seen |= _segments(process.pid)
        return found

    def named(self, name: str) -> psutil.Process:
        """The worker's process with this title."""
        for process in self.worker_processes():
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()) or process.name().startswith(name[:15]):
                    return process
        raise AssertionError(f"no process {name}")

    def alive(self) -> list[psutil.Process]:
        """Processes of any generation that were seen and still live."""
        found = []
        for pid, created in self.seen:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def status(self) -> dict[str, Any]:
        """The supervisor's snapshot, over its socket."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(5)
            line.connect(str(self.runtime / "supervisor.sock"))
            file = line.makefile("rb")
            json.loads(file.readline())
            snapshot: dict[str, Any] = json.loads(file.readline())
            return snapshot

    def phase(self) -> str:
        try:
            return str(self.status()["phase"])
        except (OSError, ValueError):
            return ""

    def serving(self, generation: int, seconds: float = 30.0) -> dict[str, Any]:
        """Waits until this generation serves."""

        def there() -> dict[str, Any] | None:
            with contextlib.suppress(OSError, ValueError):
                status = self.status()
                if status["phase"] == "serving" and status["generation"] == generation:
                    return status
            return None

        self.worker_processes()
        status: dict[str, Any] = until(there, seconds, f"generation {generation} serving: {self.tail()}")
        self.worker_processes()
        return status

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.state / "events.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in lines if name is None or line["event"] == name]

    def incidents(self) -> list[Path]:
        root = self.state / "incidents"
        return sorted(p for p in root.iterdir() if not p.name.startswith(".")) if root.is_dir() else []

    def leftover_shm(self) -> set[str]:
        """Segments that the worker's processes had mapped and that are still there."""
        return self.shm_seen & set(os.listdir("/dev/shm"))

    def tail(self) -> str:
        text = self.stderr.read_text(errors="replace") if self.stderr.exists() else ""
        return text[-3000:]


@contextlib.contextmanager
def bed(folder: Path, *worker: str, run: tuple[str, ...] = (), wait: bool = True, **more: Any) -> Iterator[Bed]:
    """A running bed, ready unless told otherwise, and nothing of it left afterwards."""
    running = Bed(folder, *worker, run=run, **more)
    try:
        running.start()
        yield running.ready() if wait else running
    finally:
        running.close()
