"""Our own processes killed at any time: the worker serves on, and what is lost is counted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.loop.bed import bed, until

pytestmark = pytest.mark.process


def test_kill_9_of_the_supervisor_is_forgotten_in_a_second(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "20") as b:
        stream = b.post("a stream", 200, stream=True)
        assert stream.got.first_event.wait(10)
        before = b.status()
        b.ours("supervisor").send_signal(signal.SIGKILL)
        until(lambda: b.phase() and b.status()["epoch"] > before["epoch"], 10, "a new supervisor")
        until(lambda: b.phase() == "serving", 5, "serving")
        assert b.status()["generation"] == 1 and b.status()["proven"] is True
        assert stream.result().finished
        b.fault("illegal_access")
        assert b.post("after").result().finished
        b.serving(2)


@pytest.mark.parametrize("step", ["verdict", "captured", "killed", "launch", "launched", "ready"])
def test_kill_9_of_the_supervisor_in_mid_recovery_loses_nothing(tmp_path: Path, step: str) -> None:
    with bed(tmp_path, "--fake-step-ms", "20", "--fake-start-s", "1") as b:
        answer = b.post("hello", 20).result().text
        supervisor = b.ours("supervisor")
        b.fault("illegal_access")
        client = b.post("hello", 20)
        until(lambda: b.events(step), what=step)
        supervisor.send_signal(signal.SIGKILL)
        got = client.result()
        assert got.finished and got.text == answer, (got, b.tail())
        until(lambda: b.phase() == "serving", 20, "serving")
        assert b.stop() == 0 and b.alive() == [] and b.leftover_shm() == set()


def test_kill_9_of_the_gateway_costs_its_exchanges_and_nothing_else(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "20") as b:
        pids = {p.pid for p in b.worker_processes()}
        streams = [b.post(f"stream {n}", 400, stream=True) for n in range(3)]
        assert all(s.got.first_event.wait(10) for s in streams)
        b.ours("gateway").send_signal(signal.SIGKILL)
        assert all(s.result().cut for s in streams)
        got = b.post("after").result()
        assert got.finished
        assert {p.pid for p in b.worker_processes()} == pids and b.status()["generation"] == 1
        lost = until(lambda: b.events("gateway_exited"), what="the count")
        assert lost[0]["lost_exchanges"] == 3


def test_kill_9_of_the_launcher_ends_the_instance_and_the_next_start_is_clean(tmp_path: Path) -> None:
    with bed(tmp_path) as b:
        assert b.process is not None
        b.process.kill()
        b.process.wait()
        until(lambda: not b.alive() or b.start(), 1)
        if b.process.poll() is not None:
            b.start()
        b.ready()
        assert b.post("hello").result().finished
        assert b.stop() == 0 and b.alive() == []


def test_a_full_disk_does_not_stop_a_recovery(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "20") as b:
        (b.state / "incidents").write_text("a file where the folder should be")
        b.fault("illegal_access")
        assert b.post("hello", 20).result().finished
        status = b.serving(2)
        assert status["evidence"]["failures"] > 0
        assert b.events("captured")[0]["ok"] is False


def test_an_operator_may_pause_and_resume(tmp_path: Path) -> None:
    import socket

    def say(verb: str) -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(b.runtime / "supervisor.sock"))
            file = line.makefile("rwb")
            file.readline(), file.readline()
            hello = {"type": "hello", "who": "cli", "protocol": 1, "epoch": 0}
            for message in (hello, {"type": "command", "id": 1, "verb": verb}):
                file.write(json.dumps(message).encode() + b"\n")
            file.flush()
            while (reply := json.loads(file.readline())).get("type") != "reply":
                pass
            assert reply["ok"], reply

    with bed(tmp_path, "--fake-step-ms", "20") as b:
        say("pause")
        until(lambda: b.phase() == "paused", what="paused")
        assert b.post("hello").result().finished
        say("resume")
        until(lambda: b.phase() == "serving", what="serving")
        assert b.post("hello").result().finished
