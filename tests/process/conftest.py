"""Starts a real launcher with a configuration of the test's, and talks to it over its seam with plain sockets.

    run = launcher(argv=[sys.executable, "-c", "..."])      # folders are made; no gateway, no supervisor
    with run.client() as client:
        client.call("tree", generation=1)
        client.event("exited", root=True)

Whatever a test leaves is ended by pid, with the launcher first told to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = Path(__file__).parents[2] / "supervisor/defib/drivers/launcher.py"
DEADLINE_S = 20.0

Message = dict[str, Any]


def until(condition: Callable[[], Any], what: str = "the condition", deadline_s: float = DEADLINE_S) -> Any:
    """What `condition` returns once it is true; fails after the deadline."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"{what} did not come true within {deadline_s:g} s")


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(pid: int) -> bool:
    return start_time(pid) is not None


class Cut(Exception):
    """The launcher closed the connection."""


class Client:
    """One connection to a launcher. `hello` and `snapshot` are what it said first."""

    def __init__(self, path: Path, epoch: int | None = None, greet: bool = True) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(DEADLINE_S)
        self._rest = bytearray()
        self._ids = 0
        self.events: list[Message] = []
        """Events that came and that nobody has asked for yet."""
        try:
            self.connection.connect(str(path))
            self.hello, self.snapshot = self.read(), self.read()
        except (OSError, Cut):
            self.connection.close()
            raise
        self.epoch: int = self.snapshot["epoch"] if epoch is None else epoch
        if greet:
            self.say({"type": "hello", "who": "supervisor", "protocol": 1, "epoch": self.epoch})

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def say(self, message: Message) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self, deadline_s: float = DEADLINE_S) -> Message:
        """The next message. Raises Cut, TimeoutError."""
        deadline = time.monotonic() + deadline_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            try:
                data = self.connection.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                raise Cut
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def call(self, verb: str, **arguments: Any) -> Message:
        """The reply, whether it is ok or not. `epoch` and `generation` may be given."""
        self._ids += 1
        self.say({"type": "command", "id": self._ids, "verb": verb, "epoch": self.epoch, **arguments})
        while True:
            message = self.read()
            if message["type"] == "reply" and message["id"] == self._ids:
                return message
            self.events.append(message)

    def event(self, name: str, deadline_s: float = DEADLINE_S, **fields: Any) -> Message:
        """The first event of that name with these fields, whether it has come already or not."""
        deadline = time.monotonic() + deadline_s
        seen = 0
        while True:
            for index in range(seen, len(self.events)):
                message = self.events[index]
                if message.get("event") == name and all(message.get(k) == v for k, v in fields.items()):
                    del self.events[index]
                    return message
            seen = len(self.events)
            self.events.append(self.read(max(0.0, deadline - time.monotonic())))


@dataclass
class Running:
    """A launcher that runs. `config` is what it was given."""

    process: subprocess.Popen[bytes]
    config: Message
    log: Path
    """Its stderr, unless the test gave another."""
    clients: list[Client] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def state(self) -> Path:
        return Path(self.config["state"])

    @property
    def socket(self) -> Path:
        return Path(self.config["runtime"]) / "launcher.sock"

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def client(self, epoch: int | None = None, greet: bool = True) -> Client:
        """A connected client, closed at the end of the test."""
        until(lambda: self.socket.exists() or self.process.poll() is not None, f"a launcher: {self.said()}")
        client = until(lambda: self._try_connect(epoch, greet), "a connection")
        self.clients.append(client)
        assert isinstance(client, Client)
        return client

    def _try_connect(self, epoch: int | None, greet: bool) -> Client | None:
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            return Client(self.socket, epoch, greet)
        return None

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout=deadline_s)

    def end(self) -> None:
        """SIGTERM, then a second one, then SIGKILL to it and to all that it recorded."""
        for client in self.clients:
            client.connection.close()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=4.0)
        self._kill_recorded()

    def _kill_recorded(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((self.state / "worker.json").read_text())
            for pid, start, *_ in record["processes"]:
                if start_time(pid) == start:
                    os.kill(pid, signal.SIGKILL)


Start = Callable[..., Running]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="dl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def launcher(short_path: Path) -> Iterator[Start]:
    """Starts launchers: `launcher(argv=[...], **configuration)`; `python`, `stdout`, `stderr`, `env` are its own."""
    started: list[Running] = []

    def start(
        argv: list[str] | None = None,
        python: str = sys.executable,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = None,
        env: dict[str, str] | None = None,
        **changes: Any,
    ) -> Running:
        config: Message = {
            "version": 1,
            "instance": "test",
            "engine": "fake",
            "state": str(short_path / "state"),
            "runtime": str(short_path / "run"),
            "observe": False,
            "argv": argv or [sys.executable, "-c", "import time; time.sleep(600)"],
            "cwd": str(short_path),
            "env_set": {"SPT_NOENV": "1"},
            "env_unset": [],
            "listen": None,
            "upstream": {"kind": "port"},
            "gateway": [],
            "supervisor": [],
            "limits": {"drain_s": 2, "term_s": 2, "output_cap_bytes": 64 << 20},
            **changes,
        }
        log = short_path / f"launcher-{len(started)}.log"
        descriptor = os.memfd_create("config", 0)
        try:
            os.write(descriptor, json.dumps(config).encode())
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    [python, "-I", "-S", str(LAUNCHER), "--config-fd", str(descriptor)],
                    pass_fds=(descriptor,),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=sink if stderr is None else stderr,
                    env={"TMPDIR": str(short_path), **(os.environ if env is None else env)},
                )
        finally:
            os.close(descriptor)
        running = Running(process, config, log)
        started.append(running)
        return running

    yield start
    for running in started:
        running.end()
