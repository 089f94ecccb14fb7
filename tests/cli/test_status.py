"""`defib status`, `pause` and `resume` against a socket that speaks as the supervisor does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from defib.cli.exits import Exit
from defib.cli.main import main

HELLO = {"type": "hello", "who": "supervisor", "protocol": 1, "instance": "i", "pid": 41}
SNAPSHOT = {
    "type": "snapshot",
    "phase": "serving",
    "generation": 2,
    "address": "127.0.0.1:1",
    "proven": True,
    "rung": "eager",
    "epoch": 3,
    "incidents": 1,
    "incident": None,
    "observe": False,
    "gateway": {"accepted": 5, "answered": 4, "replayed": 2},
}


class Supervisor:
    """Serves one connection at a time; `heard` are the lines that it was sent."""

    def __init__(self, folder: Path, reply: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.heard: list[dict[str, Any]] = []
        self.reply = reply or {"type": "reply", "id": 1, "ok": True, "phase": "serving"}
        self.listeners = [self._listen(folder / "launcher.sock"), self._listen(folder / "supervisor.sock")]
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    @staticmethod
    def _listen(path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        return listener

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listeners[1].accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as lines:
                for message in (HELLO, SNAPSHOT):
                    lines.write(json.dumps(message).encode() + b"\n")
                lines.flush()
                for line in lines:
                    message = json.loads(line)
                    self.heard.append(message)
                    if message["type"] == "command":
                        lines.write(json.dumps(self.reply).encode() + b"\n")
                        lines.flush()

    def close(self) -> None:
        for listener in self.listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.thread.join(10)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    return tmp_path / "i"


@pytest.fixture
def supervisor(folder: Path) -> Iterator[Supervisor]:
    running = Supervisor(folder)
    yield running
    running.close()


def test_nothing_that_runs_is_said_clearly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--runtime-dir", str(tmp_path)]) == Exit.NOT_RUNNING
    assert f"no instance of defib runs here (looked in {tmp_path})" in capsys.readouterr().err


def test_a_running_instance_is_shown(supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--name", "i"]) == Exit.ORDERED
    out = capsys.readouterr().out
    assert "i: serving" in out
    assert "generation 2 at 127.0.0.1:1, proven, rung eager" in out
    assert "accepted 5, answered 4, replayed 2" in out


def test_the_snapshot_can_be_had_as_json(
    supervisor: Supervisor, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json", "--runtime-dir", str(folder)]) == Exit.ORDERED
    found = json.loads(capsys.readouterr().out)
    assert (found[0]["instance"], found[0]["phase"]) == ("i", "serving")


def test_another_instances_name_finds_nothing(supervisor: Supervisor) -> None:
    assert main(["status", "--name", "other"]) == Exit.NOT_RUNNING


def test_left_over_sockets_are_no_instance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Supervisor(folder).close()
    assert main(["status", "--runtime-dir", str(folder)]) == Exit.NOT_RUNNING
    assert "does not run (its sockets" in capsys.readouterr().out


def test_a_supervisor_that_is_away_is_not_an_instance_that_is_away(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Supervisor(folder)
    (folder / "supervisor.sock").unlink()
    try:
        assert main(["status", "--runtime-dir", str(folder)]) == Exit.NOT_RUNNING
    finally:
        running.close()
    assert "runs, but its supervisor does not answer" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_an_order_carries_the_epoch_that_it_was_shown(
    supervisor: Supervisor, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--name", "i"]) == Exit.ORDERED
    assert f"i: {verb} ordered, was serving" in capsys.readouterr().out
    hello, command = supervisor.heard
    assert (hello["type"], hello["protocol"], hello["epoch"]) == ("hello", 1, 3)
    assert (command["verb"], command["epoch"]) == (verb, 3)


def test_a_refused_order_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = Supervisor(folder, {"type": "reply", "id": 1, "ok": False, "error": "refused", "message": "no"})
    try:
        assert main(["pause", "--runtime-dir", str(folder)]) == Exit.FAILED
    finally:
        running.close()
    assert "refused: no" in capsys.readouterr().err


def test_an_order_without_a_name_needs_a_single_instance(
    supervisor: Supervisor, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Supervisor(folder.parent / "j")
    try:
        assert main(["pause"]) == Exit.USAGE
    finally:
        other.close()
    assert "choose one with --name" in capsys.readouterr().err
    assert supervisor.heard == []
