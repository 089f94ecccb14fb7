"""The launcher's side of docs/seam.md, message by message."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.process.conftest import Client, Cut, Start, launcher, short_path, start_time, until

__all__ = ["launcher", "short_path"]  # fixtures

pytestmark = pytest.mark.process

SNAPSHOT = {
    "type", "instance", "boot", "epoch", "generation", "state", "root", "exit", "address", "launched_at", "delta",
    "planned_stop", "output", "tree", "gateway",
}  # fmt: skip
PROCESS = {"pid", "start", "ppid", "session", "generation", "root", "name", "cmdline", "state", "proofs"}


def test_hello_and_one_full_snapshot_come_first(launcher: Start) -> None:
    run = launcher()
    client = run.client()
    assert client.hello == {"type": "hello", "who": "launcher", "protocol": 1, "instance": "test", "pid": run.pid}
    assert set(client.snapshot) >= SNAPSHOT
    assert set(client.snapshot["tree"][0]) == PROCESS
    assert set(client.snapshot["output"]) == {"stdout", "stderr"}
    assert set(client.snapshot["output"]["stdout"]) >= {"path", "size", "consumed", "lost_bytes"}
    assert set(client.snapshot["delta"]) >= {"drop", "append", "env", "fresh"}
    assert client.snapshot["root"] == [client.snapshot["root"][0], start_time(client.snapshot["root"][0])]
    assert client.snapshot["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_commands_need_a_hello_first(launcher: Start) -> None:
    client = launcher().client(greet=False)
    assert client.call("ports")["ok"] is False
    client.say({"type": "hello", "who": "supervisor", "protocol": 1, "epoch": client.epoch})
    assert client.call("ports")["ok"] is True


def test_another_protocol_is_refused_and_closed(launcher: Start) -> None:
    client = launcher().client(greet=False)
    client.say({"type": "hello", "who": "supervisor", "protocol": 2, "epoch": 1})
    assert client.read()["type"] == "refused"
    with pytest.raises(Cut):
        client.read()


def test_the_newest_epoch_wins(launcher: Start) -> None:
    run = launcher()
    old, new = run.client(epoch=5), None
    assert old.call("ports")["ok"]
    new = run.client(epoch=6)
    assert new.call("ports")["ok"]
    assert old.call("ports")["error"] == "stale_epoch"
    late = run.client(epoch=5)
    assert late.read()["type"] == "refused"
    with pytest.raises(Cut):
        late.read()
    assert new.call("tree", generation=1)["ok"]
    with run.client() as reader:
        assert reader.snapshot["epoch"] == 6


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("tree", {}),
        ("signal", {"targets": [], "signal": 9}),
        ("facts", {"pid": 1, "start": 1, "names": []}),
        ("consumed", {"stdout": 0, "stderr": 0}),
        ("clear", {"cache": "triton", "incident": "i"}),
        ("sweep", {}),
        ("launch", {"delta": {}}),
    ],
)
def test_a_command_for_a_generation_that_never_was_is_refused(launcher: Start, verb: str, arguments: Any) -> None:
    client = launcher().client()
    reply = client.call(verb, generation=7, **arguments)
    assert (reply["ok"], reply["error"]) == (False, "stale_generation") and reply["message"]
    assert client.call(verb, **arguments)["error"] == "bad_request", "no generation at all"


def test_old_generations_are_refused_except_where_the_table_says_otherwise(launcher: Start) -> None:
    client = launcher().client()
    client.call("signal", generation=1, targets=[client.snapshot["root"]], signal=9)
    client.event("exited", root=True)
    assert until(lambda: client.call("launch", generation=2, delta={})["ok"])
    for verb, arguments in (("tree", {}), ("clear", {"cache": "x", "incident": "i"}), ("launch", {"delta": {}})):
        generation = 2 if verb == "launch" else 1
        assert client.call(verb, generation=generation, **arguments)["error"] == "stale_generation"
    assert client.call("signal", generation=1, targets=[client.snapshot["root"]], signal=9)["gone"]
    assert client.call("sweep", generation=1)["ok"]


@pytest.mark.parametrize(
    ("verb", "arguments", "error"),
    [
        ("reboot", {}, "unknown_verb"),
        (None, {}, "unknown_verb"),
        ("signal", {"generation": 1, "targets": [[1]], "signal": 9}, "bad_request"),
        ("signal", {"generation": 1, "targets": [[0, 0]], "signal": 9}, "bad_request"),
        ("signal", {"generation": 1, "targets": [[-1, 5]], "signal": 9}, "bad_request"),
        ("signal", {"generation": 1, "targets": "all", "signal": 9}, "bad_request"),
        ("signal", {"generation": 1, "targets": [], "signal": True}, "bad_request"),
        ("consumed", {"generation": 1, "stdout": "1", "stderr": 0}, "bad_request"),
        ("finish", {"code": -1, "reason": ""}, "bad_request"),
        ("launch", {"generation": 2, "delta": 3}, "bad_request"),
    ],
)
def test_a_command_that_makes_no_sense_gets_a_reply(launcher: Start, verb: Any, arguments: Any, error: str) -> None:
    client = launcher().client()
    reply = client.call(verb, **arguments)
    assert (reply["ok"], reply["error"]) == (False, error)
    assert client.call("ports")["ok"], "the connection goes on"


@pytest.mark.parametrize("line", [b"{not json\n", b"[1]\n", b"\xff\xfe\n", b'"text"\n', b"[" * 100_000 + b"\n"])
def test_a_bad_line_closes_that_connection_and_nothing_else(launcher: Start, line: bytes) -> None:
    run = launcher()
    bad, good = run.client(), run.client()
    bad.connection.sendall(line)
    with pytest.raises(Cut):
        bad.read()
    assert good.call("ports")["ok"] and "bug" not in run.said()


def test_a_line_longer_than_1_mib_closes_the_connection(launcher: Start) -> None:
    run = launcher()
    client = run.client()
    just_fits = {"type": "command", "id": 1, "verb": "ports", "epoch": client.epoch, "pad": ""}
    just_fits["pad"] = "x" * ((1 << 20) - 1 - len(json.dumps(just_fits)))
    client.say(just_fits)
    assert client.read()["ok"] is True
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.connection.sendall(b"x" * (1 << 20))
    with pytest.raises(Cut):
        client.read()
    assert run.client().call("ports")["ok"]


def test_a_half_line_waits_for_its_other_half(launcher: Start) -> None:
    client = launcher().client()
    line = json.dumps({"type": "command", "id": 9, "verb": "ports", "epoch": client.epoch}).encode() + b"\n"
    client.connection.sendall(line[:10])
    with pytest.raises(TimeoutError):
        client.read(0.2)
    client.connection.sendall(line[10:] + line)
    assert client.read()["id"] == 9 and client.read()["id"] == 9


def test_a_reader_that_is_too_slow_is_cut_off(launcher: Start) -> None:
    run = launcher(env_set={f"NAME_{n}": "x" for n in range(1500)})
    slow, other = run.client(), run.client()
    pid, start = slow.snapshot["root"]
    command = {"type": "command", "id": 1, "verb": "facts", "epoch": slow.epoch, "generation": 1, "pid": pid}
    command |= {"start": start, "names": ["environ_names"]}
    slow.connection.settimeout(0.2)
    with contextlib.suppress(OSError):  # we never read: its replies fill the pipe, then the backlog, then it closes
        while True:
            slow.say(command)
            assert other.call("ports")["ok"]
    with contextlib.suppress(Cut):
        for _ in range(10_000):
            slow.read()
        pytest.fail("it was not cut off")
    assert other.call("ports")["ok"]


def test_unknown_fields_and_types_are_ignored(launcher: Start) -> None:
    client = launcher().client()
    client.say({"type": "event", "event": "from the future"})
    client.say({"type": "telemetry"})
    assert client.call("ports", colour="green")["ok"]


PEER = """
import os, socket, sys
folder = os.open(sys.argv[1], os.O_PATH)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.settimeout(10)
try:
    s.connect(f"/proc/self/fd/{folder}/launcher.sock")
except PermissionError:
    print("denied"); sys.exit()
try:
    print(repr(s.recv(100)))
except ConnectionResetError:
    print("b''")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_peer_of_another_uid_is_cut_without_a_word(launcher: Start) -> None:
    run = launcher()
    run.client()

    def peer() -> str:
        command = [sys.executable, "-I", "-S", "-c", PEER, str(run.socket.parent)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    assert peer() == "denied", "folder and socket keep strangers out"
    run.socket.parent.chmod(0o755)
    run.socket.chmod(0o666)
    assert peer() == "b''", "and if they did not, its uid does"
    assert run.client().call("ports")["ok"]


def test_no_more_than_32_connections_are_served(launcher: Start) -> None:
    run = launcher()
    clients = [run.client() for _ in range(32)]
    extra = socket.socket(socket.AF_UNIX)
    extra.settimeout(10)
    extra.connect(str(run.socket))
    assert extra.recv(100) == b""
    extra.close()
    assert clients[31].call("ports")["ok"]
    clients.pop().connection.close()
    until(lambda: _can_connect(run.socket))


def _can_connect(path: Path) -> bool:
    try:
        with Client(path):
            return True
    except (Cut, OSError):
        return False


def test_ports_tells_whether_the_address_can_be_bound(launcher: Start, short_path: Path) -> None:
    script = (
        "import socket,sys,time,os\ns=socket.socket(); s.bind(('127.0.0.1',int(sys.argv[1]))); s.listen()\n"
        "open('bound','w')\ntime.sleep(600)"
    )
    run = launcher(argv=[sys.executable, "-I", "-S", "-c", script, "@DEFIB_PORT@"])
    client = run.client()
    until((short_path / "bound").exists)
    host, port = client.snapshot["address"].split(":")
    with socket.create_connection((host, int(port))):
        pass
    assert client.call("ports")["address_free"] is False
    client.call("signal", generation=1, targets=[client.snapshot["root"]], signal=9)
    client.event("exited", root=True)
    assert client.call("ports")["address_free"] is True
