"""`defib run` becomes the launcher: one process, a sealed configuration that never reaches a disk, codes passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

RUN = (sys.executable, "-m", "defib.cli.main", "run")


def until(condition: Callable[[], Any], limit_s: float = 20.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return value


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        folders = ("--state-dir", str(tmp_path / "s"), "--runtime-dir", str(tmp_path / "r"))
        with (tmp_path / f"log{len(started)}").open("wb") as log:
            started.append(
                subprocess.Popen((*RUN, *folders, *options, "--", *command), stdout=log, stderr=log, cwd=tmp_path)
            )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def descriptor_of(pid: int) -> int | None:
    """The descriptor of the launcher's configuration, once the process is the launcher."""
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return int(argv[argv.index(b"--config-fd") + 1]) if b"--config-fd" in argv else None


def test_the_configuration_is_sealed_and_holds_the_key_that_no_file_has(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    fake = (sys.executable, "-m", "defib.demo.fakeworker", "serve", "m", "--api-key", "sesame-0815")
    process = start(*fake, "--fake-never-ready", options=("--no-gateway", "--name", "sealed"))
    descriptor = until(lambda: descriptor_of(process.pid))
    place = Path(f"/proc/{process.pid}/fd/{descriptor}")
    assert os.readlink(place).startswith("/memfd:defib-config")
    config = json.loads(place.read_bytes())
    assert config["instance"] == "sealed"
    assert config["canary"]["api_key"] == "sesame-0815"
    with pytest.raises(PermissionError), place.open("r+b", buffering=0) as file:
        file.write(b"{}")
    until(lambda: (tmp_path / "s" / "events.jsonl").exists())
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("log")]
    assert kept
    assert not [path for path in kept if b"sesame-0815" in path.read_bytes()]


def test_an_ordered_stop_ends_with_0_and_the_worker_is_gone(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    worker = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    process = start(sys.executable, "-c", worker)
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not Path(f"/proc/{pid}").exists()


def test_a_second_start_of_a_running_instance_is_refused(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first = start("sleep", "60")
    until(lambda: (tmp_path / "s" / "lock").exists() and (tmp_path / "s" / "lock").read_text())
    second = start("sleep", "60")
    assert second.wait(30) == 75
    assert f"pid {first.pid} holds" in (tmp_path / "log1").read_text()
    assert first.poll() is None
