"""Gateway and supervisor under the launcher: started, told what they need, restarted on the same socket, counted."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.process.conftest import Running, Start, alive, start_time, until

pytestmark = pytest.mark.process

QUICK = [sys.executable, "-I", "-S", "-c"]

GATEWAY = """
import json, os, socket, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = json.loads(os.pread(int(arguments["--config-fd"]), 1 << 20, 0))
listener = socket.socket(fileno=int(arguments["--listen-fd"]))
pid = os.getpid()
start = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
with open(config["state"] + "/journal", "a") as journal:
    journal.write(f"J {pid}-{start}\\n")
while True:
    connection, _ = listener.accept()
    word = connection.recv(100).decode()
    with open(config["state"] + "/journal", "a") as journal:
        journal.write(f"B {word}\\n")
        if word.startswith("ends"):
            journal.write(f"E {word} answered\\n")
    connection.sendall(str(pid).encode())
    connection.close()
"""

SUPERVISOR = """
import json, os, socket, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = json.loads(os.pread(int(arguments["--config-fd"]), 1 << 20, 0))
with open(config["state"] + "/epochs", "a") as file:
    file.write(f"{arguments['--epoch']} {os.getpid()} {sorted(arguments)}\\n")
time.sleep(600)
"""


def ask(port: int, word: str) -> int:
    """The pid of the gateway that answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(word.encode())
        return int(connection.recv(100))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def epochs(run: Running) -> list[list[str]]:
    path = run.state / "epochs"
    return [line.split(None, 2) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_gateway_comes_back_on_the_same_socket_and_its_exchanges_are_counted(
    launcher: Start, port: int
) -> None:
    run = launcher(gateway=[*QUICK, GATEWAY], listen={"host": "127.0.0.1", "port": port})
    client = run.client()
    first = ask(port, "ends-1")
    for word in ("lost-1", "ends-2", "lost-2"):
        assert ask(port, word) == first
    with (run.state / "journal").open("a") as journal:
        journal.write("B torn")
    os.kill(first, signal.SIGKILL)
    until(lambda: not alive(first))
    second = ask(port, "waits-in-the-backlog")  # refused by nobody: the listening socket never closed
    assert second != first
    event = client.event("gateway", state="exited", pid=first)
    assert (event["restarts"], event["lost_exchanges"]) == (1, 2)
    assert client.event("gateway", state="started", pid=second)["restarts"] == 1
    with run.client() as again:
        assert again.snapshot["gateway"] == {"pid": second, "restarts": 1, "lost_exchanges": 2}
    assert client.snapshot["root"] == again.snapshot["root"]
    assert "lost_exchanges=2" in run.said()


def test_a_journal_of_another_run_counts_nothing(launcher: Start, port: int) -> None:
    run = launcher(gateway=[*QUICK, "import time; time.sleep(600)"], listen={"host": "127.0.0.1", "port": port})
    client = run.client()
    (run.state / "journal").write_text("J 1-1\nB a\nB b\n")
    gateway = until(lambda: client.snapshot["gateway"]["pid"] or client.event("gateway", state="started")["pid"])
    os.kill(gateway, signal.SIGKILL)
    assert client.event("gateway", state="exited")["lost_exchanges"] == 0


def test_a_killed_supervisor_comes_back_with_the_next_epoch_and_the_worker_does_not_notice(launcher: Start) -> None:
    run = launcher(supervisor=[*QUICK, SUPERVISOR])
    client = run.client()
    worker = client.snapshot["root"]
    for epoch in (1, 2, 3):
        found = until(lambda: [e for e in epochs(run) if e[0] == str(epoch)], f"epoch {epoch}")[0]  # noqa: B023
        assert found[2] == "['--config-fd', '--epoch']"
        began = time.monotonic()
        os.kill(int(found[1]), signal.SIGKILL)
    until(lambda: len(epochs(run)) == 4)
    assert time.monotonic() - began < 3
    with run.client() as again:
        assert again.snapshot["epoch"] == 4 and again.snapshot["root"] == worker
        assert start_time(worker[0]) == worker[1]


def test_a_companion_that_always_dies_is_started_less_and_less_often(launcher: Start) -> None:
    script = SUPERVISOR.replace(
        "time.sleep(600)", "open(config['state'] + '/times', 'a').write(f'{time.monotonic()} ')"
    )
    run = launcher(supervisor=[*QUICK, script])
    until(lambda: len(epochs(run)) >= 5)
    until(lambda: len((run.state / "times").read_text().split()) >= 5)
    times = [float(t) for t in (run.state / "times").read_text().split()]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[3] > gaps[0] and gaps[3] >= 0.4 and alive(run.pid)


def test_a_companion_that_cannot_be_executed_is_said_and_tried_again(launcher: Start) -> None:
    run = launcher(supervisor=["/no/such/supervisor"])
    until(lambda: run.said().count("supervisor cannot be started") >= 3)
    assert run.client(epoch=100).snapshot["state"] == "running"


def test_without_a_listen_address_there_is_no_gateway(launcher: Start) -> None:
    run = launcher(gateway=[*QUICK, GATEWAY], listen=None)
    assert run.client().snapshot["gateway"] == {"pid": 0, "restarts": 0, "lost_exchanges": 0}


def test_the_companions_environment_is_the_users_with_the_workers_mark_left_out(
    launcher: Start, short_path: Path
) -> None:
    script = "import json,os,time\njson.dump(dict(os.environ),open(%r,'w'))\ntime.sleep(600)"
    env = {"PATH": os.environ["PATH"], "VLLM_API_KEY": "k", "DEFIB_MARK": "another:x:1-1:1", "NOTIFY_SOCKET": "/n"}
    launcher(supervisor=[*QUICK, script % str(short_path / "env")], env=env)
    found = json.loads(until(lambda: (short_path / "env").exists() and (short_path / "env").read_text()))
    assert found["VLLM_API_KEY"] == "k" and found["NOTIFY_SOCKET"] == "/n" and "DEFIB_MARK" not in found
