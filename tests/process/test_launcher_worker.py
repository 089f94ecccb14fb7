"""The worker under the launcher: started with the right environment, found whole, signalled, its exits told."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.process.conftest import Client, Running, Start, alive, start_time, until

pytestmark = pytest.mark.process

QUICK = [sys.executable, "-I", "-S", "-c"]


def first_tree(client: Client, count: int, generation: int = 1) -> list[dict[str, Any]]:
    """The tree, once it has so many processes."""
    found: list[dict[str, Any]] = until(
        lambda: [t for t in [client.call("tree", generation=generation)["tree"]] if len(t) == count],
        f"a tree of {count}",
    )[0]
    return found


def root_of(client: Client) -> list[int]:
    root: list[int] = client.snapshot["root"]
    return root


def kill_root(client: Client, generation: int = 1) -> None:
    root = next(p for p in client.call("tree", generation=generation)["tree"] if p["root"])
    client.call("signal", generation=generation, targets=[[root["pid"], root["start"]]], signal=9)
    client.event("exited", root=True, generation=generation)


def test_the_worker_is_launched_before_and_without_a_supervisor(launcher: Start) -> None:
    client = launcher().client()
    snapshot = client.snapshot
    assert (snapshot["generation"], snapshot["state"], snapshot["exit"]) == (1, "running", None)
    assert snapshot["root"] == [snapshot["root"][0], start_time(snapshot["root"][0])]
    assert snapshot["delta"] == {"drop": [], "append": [], "env": {}, "unset": [], "fresh": []}


def test_the_worker_gets_its_environment_without_ours(launcher: Start, short_path: Path) -> None:
    script = (
        "import json,os; json.dump([dict(os.environ), os.getsid(0)], open('env.new','w')); os.rename('env.new','env')"
    )
    secret = {"DEFIB_STATE": "x", "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "LISTEN_FDS": "1", "DEFIB_ASIDE": "1"}
    env = {"PATH": os.environ["PATH"], "TMPDIR": "/var/tmp", "KEPT": "k", "UNSET": "u", **secret}
    run = launcher(
        argv=[*QUICK, script], env=env, env_set={"SPT_NOENV": "1", "KEPT": "set"}, env_unset=["UNSET"], instance="a:b"
    )
    found, session = json.loads(until(lambda: (short_path / "env").exists() and (short_path / "env").read_text()))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    tmpdir = found.pop("TMPDIR")
    assert found.pop("DEFIB_MARK") == f"a:b:{boot}:{run.pid}-{start_time(run.pid)}:1"
    assert not [name for name in found if name.startswith("DEFIB_")] and not set(secret) & set(found)
    assert found["KEPT"] == "set" and found["SPT_NOENV"] == "1" and "UNSET" not in found
    assert tmpdir.startswith("/var/tmp/defib-") and Path(tmpdir).stat().st_mode & 0o777 == 0o700
    assert session == root_of(run.client())[0]


def test_the_workers_standard_input_is_empty_and_no_descriptor_of_ours_leaks(launcher: Start, short_path: Path) -> None:
    script = (
        "import os; d='/proc/self/fd/'\n"
        "n={int(i):os.readlink(d+i) for i in os.listdir(d) if os.path.lexists(d+i)}\n"
        "open('fds.new','w').write(repr(n)); os.rename('fds.new','fds')"
    )
    launcher(argv=[*QUICK, script], listen={"host": "127.0.0.1", "port": 0})
    found = eval(until(lambda: (short_path / "fds").exists() and (short_path / "fds").read_text()))
    assert found[0] == "/dev/null" and found[1].endswith("output/g1.stdout") and found[2].endswith("output/g1.stderr")
    assert not [link for link in found.values() if "memfd" in link or "socket" in link or link.endswith("lock")]


def test_placeholders_become_a_free_port_below_the_kernels_own_range(launcher: Start, short_path: Path) -> None:
    script = "import sys; open('argv.new','w').write(' '.join(sys.argv[1:])); import os; os.rename('argv.new','argv')"
    run = launcher(argv=[*QUICK, script, "--port=@DEFIB_PORT@", "@DEFIB_UDS@"])
    port, uds = until(lambda: (short_path / "argv").exists() and (short_path / "argv").read_text()).split()
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 <= int(port.partition("=")[2]) < lowest
    client = run.client()
    assert client.snapshot["address"] == f"unix:{uds}" and uds.startswith(str(run.state.parent / "run"))


def test_a_command_that_cannot_be_executed_is_an_exit_127(launcher: Start, short_path: Path) -> None:
    client = launcher(argv=["/no/such/command"]).client()
    assert client.snapshot["state"] == "exited" and client.snapshot["root"] is None
    assert client.snapshot["exit"]["code"] == 127 and "/no/such/command" in client.snapshot["exit"]["message"]


def test_a_file_that_may_not_be_executed_is_an_exit_126(launcher: Start, short_path: Path) -> None:
    (short_path / "plain").write_text("no program")
    run = launcher(argv=[str(short_path / "plain")])
    assert run.client().snapshot["exit"]["code"] == 126
    assert "cannot start the command" in run.said()


def test_the_exit_of_the_root_tells_code_and_signal(launcher: Start) -> None:
    client = launcher(argv=[*QUICK, "import os,sys; sys.stdin.read(); os._exit(7)"]).client()
    if client.snapshot["exit"] is None:
        assert client.event("exited", root=True)["code"] == 7
    again = until(lambda: [s for s in [launch_again(client)] if s["ok"]])[0]
    event = client.event("exited", root=True, generation=2)
    assert (event["pid"], event["code"], event["signal"], event["ordered"]) == (again["root"][0], 7, None, False)


def launch_again(client: Client) -> dict[str, Any]:
    return client.call("launch", generation=2, delta={})


def test_a_grandchilds_exit_is_told_within_50_ms_and_with_its_signal(launcher: Start, short_path: Path) -> None:
    script = "import subprocess,time\nwhile True:\n p=subprocess.Popen(['sleep','600']); p.wait()"
    client = launcher(argv=[*QUICK, script]).client()
    delays = []
    known: set[int] = set()

    def next_sleeper() -> list[int]:
        tree = client.call("tree", generation=1)["tree"]
        return [p["pid"] for p in tree if p["name"] == "sleep" and p["pid"] not in known]

    for _ in range(9):
        pid = until(next_sleeper)[0]
        known.add(pid)
        began = time.monotonic()
        os.kill(pid, signal.SIGSEGV)
        event = client.event("exited", pid=pid)
        delays.append(time.monotonic() - began)
        assert event["root"] is False and event["name"] == "sleep" and event["ordered"] is False
        assert event["signal"] in (signal.SIGSEGV, None)  # None only where the kernel doesn't tell (before 6.15)
    assert statistics.median(delays) <= 0.05, delays


ORPHAN = """
import os, subprocess, sys, time
if len(sys.argv) > 1:
    os.setsid()
    if os.fork():
        os._exit(0)
    # what setproctitle does to the environment: the kernel shows what lies there now
    import ctypes
    libc = ctypes.CDLL(None)
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    address = ctypes.cast(environ, ctypes.POINTER(ctypes.c_void_p))[0]
    ctypes.memset(address, 0, sum(len(f"{k}={v}".encode()) + 1 for k, v in os.environ.items()))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1); os.dup2(null, 2)
    open("orphan.new", "w").write(str(os.getpid())); os.rename("orphan.new", "orphan")
    time.sleep(600)
subprocess.Popen([sys.executable, "-I", "-S", __file__, "again"], close_fds=True).wait()
time.sleep(600)
"""


def with_orphan(launcher: Start, folder: Path) -> tuple[Running, Client, int]:
    """A worker whose grandchild has left its session, its parent, its output and its environment behind."""
    (folder / "orphan.py").write_text(ORPHAN)
    run = launcher(argv=[sys.executable, "-I", "-S", str(folder / "orphan.py")])
    pid = int(until(lambda: (folder / "orphan").exists() and (folder / "orphan").read_text()))
    return run, run.client(), pid


def test_an_orphan_in_its_own_session_with_an_erased_environment_is_found_and_killed(
    launcher: Start, short_path: Path
) -> None:
    _, client, orphan = with_orphan(launcher, short_path)
    assert b"DEFIB_MARK" not in Path(f"/proc/{orphan}/environ").read_bytes()
    kill_root(client)
    tree = client.call("tree", generation=1)["tree"]
    assert [p["pid"] for p in tree] == [orphan] and "reparented" in tree[0]["proofs"]
    refused = client.call("launch", generation=2, delta={})
    assert refused["error"] == "refused" and str(orphan) in refused["message"]
    target = [orphan, tree[0]["start"]]
    assert client.call("signal", generation=1, targets=[target], signal=9)["sent"] == [target]
    assert client.event("exited", pid=orphan)["signal"] == 9
    assert client.call("launch", generation=2, delta={})["ok"]


def test_the_tree_says_why_each_process_is_the_workers(launcher: Start) -> None:
    script = "import subprocess,time; subprocess.Popen(['sleep','600']); time.sleep(600)"
    client = launcher(argv=[*QUICK, script]).client()
    first_tree(client, 2)
    until(
        lambda: all("mark" in p["proofs"] for p in client.call("tree", generation=1)["tree"]), "both were looked into"
    )
    root, child = sorted(first_tree(client, 2), key=lambda p: not p["root"])
    assert set(root["proofs"]) == {"descendant", "session", "mark", "output"}
    assert set(child["proofs"]) == {"descendant", "session", "mark", "output"}
    assert child["ppid"] == root["pid"] and child["session"] == root["pid"]


def test_a_reader_of_the_output_is_not_the_worker(launcher: Start, short_path: Path) -> None:
    import subprocess

    client = launcher().client()
    path = client.snapshot["output"]["stdout"]["path"]
    reader = subprocess.Popen(["tail", "-f", path], stdout=subprocess.DEVNULL)
    try:
        until(lambda: path in {os.readlink(f"/proc/{reader.pid}/fd/{n}") for n in os.listdir(f"/proc/{reader.pid}/fd")})
        assert len(client.call("tree", generation=1)["tree"]) == 1
        target = [reader.pid, start_time(reader.pid)]
        refused = client.call("signal", generation=1, targets=[target], signal=9)["refused"]
        assert refused[0]["target"] == target and alive(reader.pid)
    finally:
        reader.kill()
        reader.wait()


def test_a_signal_reaches_only_the_process_with_that_start_time(launcher: Start) -> None:
    client = launcher().client()
    pid, start = root_of(client)
    reply = client.call("signal", generation=1, targets=[[pid, start + 1], [1, start_time(1)]], signal=9)
    assert reply["gone"] == [[pid, start + 1]]
    assert [item["target"] for item in reply["refused"]] == [[1, start_time(1)]] and alive(pid)


@pytest.mark.parametrize("number", [1, 19, 0, 64])
def test_other_signals_are_refused(launcher: Start, number: int) -> None:
    client = launcher().client()
    assert client.call("signal", generation=1, targets=[], signal=number)["error"] == "bad_request"


def test_new_processes_and_new_names_are_seen(launcher: Start, short_path: Path) -> None:
    script = (
        "import subprocess,time,os\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "p=subprocess.Popen(['sleep','600'])\nopen('/proc/self/comm','w').write('VLLM::EngineCor')\ntime.sleep(600)"
    )
    client = launcher(argv=[*QUICK, script]).client()
    (short_path / "go").touch()
    event = client.event("spawned", generation=1)
    assert event["tree"][0]["name"] in ("sleep", "python")
    until(lambda: any(p["name"] == "VLLM::EngineCor" for p in client.call("tree", generation=1)["tree"]))


def test_facts_tell_names_of_the_environment_and_never_its_values(launcher: Start) -> None:
    client = launcher(env_set={"VLLM_API_KEY": "sk-secret"}).client()
    pid, start = root_of(client)
    names = ["status", "wchan", "stack", "cmdline", "io", "environ_names", "shm"]
    reply = client.call("facts", generation=1, pid=pid, start=start, names=names)
    assert set(reply["facts"]) == set(names) and "VLLM_API_KEY" in reply["facts"]["environ_names"]
    assert "sk-secret" not in json.dumps(reply) and "State:" in reply["facts"]["status"]
    assert client.call("facts", generation=1, pid=pid, start=start, names=["environ"])["error"] == "bad_request"
    assert client.call("facts", generation=1, pid=1, start=start_time(1), names=["status"])["error"] == "refused"


TELL = """
import sys, os, json, time
json.dump([sys.argv[1:], dict(os.environ)], open("new", "w"))
os.rename("new", "run" + os.environ["DEFIB_MARK"][-1])
time.sleep(600)
"""
DELTA: dict[str, Any] = {
    "argv": [*QUICK, TELL, "--a", "--b"],
    "allow_args": ["--enforce-eager"],
    "allow_env": {"CUDA_LAUNCH_BLOCKING": ["1"]},
    "fresh_env": {"triton": "TRITON_CACHE_DIR"},
    "env_set": {"CUDA_LAUNCH_BLOCKING": "0"},
}


def test_a_delta_edits_the_command_that_was_given(launcher: Start, short_path: Path) -> None:
    client = launcher(**DELTA).client()
    until((short_path / "run1").exists)
    kill_root(client)
    last = len(DELTA["argv"]) - 1
    delta = {"drop": [last], "append": ["--enforce-eager"], "env": {"CUDA_LAUNCH_BLOCKING": "1"}, "fresh": ["triton"]}
    assert client.call("launch", generation=2, delta=delta)["ok"]
    argv, env = json.loads(until(lambda: (short_path / "run2").exists() and (short_path / "run2").read_text()))
    assert argv == ["--a", "--enforce-eager"] and env["CUDA_LAUNCH_BLOCKING"] == "1"
    fresh = Path(env["TRITON_CACHE_DIR"])
    assert fresh.is_dir() and not list(fresh.iterdir()) and fresh.is_relative_to(short_path / "state")
    kill_root(client, 2)
    assert client.call("launch", generation=3, delta={"unset": ["CUDA_LAUNCH_BLOCKING"]})["ok"]
    argv, env = json.loads(until(lambda: (short_path / "run3").exists() and (short_path / "run3").read_text()))
    assert argv == ["--a", "--b"] and "CUDA_LAUNCH_BLOCKING" not in env
    until(lambda: not fresh.exists(), "the fresh folder of generation 2 is removed")


@pytest.mark.parametrize(
    ("delta", "error"),
    [
        ({"drop": [0]}, "refused"),
        ({"drop": [99]}, "refused"),
        ({"drop": ["1"]}, "bad_request"),
        ({"append": ["--trust-remote-code"]}, "refused"),
        ({"env": {"LD_PRELOAD": "/x"}}, "refused"),
        ({"env": {"CUDA_LAUNCH_BLOCKING": "2"}}, "refused"),
        ({"unset": ["PATH"]}, "refused"),
        ({"fresh": ["home"]}, "refused"),
        ([], "ok"),
        ("x", "bad_request"),
    ],
)
def test_a_delta_beyond_what_is_allowed_launches_nothing(launcher: Start, delta: Any, error: str) -> None:
    client = launcher(**DELTA).client()
    kill_root(client)
    reply = client.call("launch", generation=2, delta=delta)
    assert reply.get("error", "ok") == error
    assert client.call("tree", generation=2 if error == "ok" else 1)["ok"]


def test_a_launch_that_fails_uses_up_no_generation(launcher: Start, short_path: Path) -> None:
    command = short_path / "worker"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o755)
    client = launcher(argv=[str(command)]).client()
    kill_root(client)
    command.rename(short_path / "away")
    reply = client.call("launch", generation=2, delta={})
    assert reply["error"] == "failed" and "worker" in reply["message"]
    assert client.call("launch", generation=3, delta={})["error"] == "stale_generation"
    (short_path / "away").rename(command)
    assert client.call("launch", generation=2, delta={})["ok"]


def test_a_launch_beside_a_living_worker_is_refused(launcher: Start) -> None:
    client = launcher().client()
    reply = client.call("launch", generation=2, delta={})
    assert reply["error"] == "refused" and alive(root_of(client)[0])


def test_the_tree_has_a_limit_and_what_is_beyond_it_is_found_all_the_same(launcher: Start) -> None:
    script = "import subprocess,time\nfor i in range(20): subprocess.Popen(['sleep','600'])\ntime.sleep(600)"
    limits = {"drain_s": 0, "term_s": 0.2, "tracked_processes": 8}
    run = launcher(argv=[*QUICK, script], limits=limits)
    client = run.client()
    until(lambda: client.call("tree", generation=1)["untracked"] == 13)
    assert len(client.call("tree", generation=1)["tree"]) == 8
    kill_root(client)
    assert client.call("launch", generation=2, delta={})["error"] == "refused"
    sleepers = set()
    for _ in range(4):  # who kills what is listed gets to see the rest
        tree = client.call("tree", generation=1)["tree"]
        sleepers |= {p["pid"] for p in tree}
        client.call("signal", generation=1, targets=[[p["pid"], p["start"]] for p in tree], signal=9)
        for process in tree:
            client.event("exited", pid=process["pid"])
    assert len(sleepers) == 20 and client.call("launch", generation=2, delta={})["ok"]


def test_a_fork_bomb_is_ended_by_a_stop(launcher: Start) -> None:
    bomb = (
        "import os,time\n"
        "def fork(n):\n return any(os.fork()==0 for _ in range(n))\n"
        "if fork(12):\n os.setsid()\n fork(11)\n"
        "time.sleep(600)"
    )  # 12 sessions of 12: bounded, should the launcher fail
    run = launcher(argv=[*QUICK, bomb], limits={"drain_s": 0, "term_s": 0, "tracked_processes": 32})
    client = run.client()
    until(lambda: client.call("tree", generation=1)["untracked"] == 145 - 32)
    everyone = [int(p) for p in os.listdir("/proc") if p.isdigit() and _marked(int(p), run)]
    assert len(everyone) == 145
    run.process.terminate()
    assert run.wait() == 0
    assert not [pid for pid in everyone if alive(pid)]


def _marked(pid: int, run: Running) -> bool:
    try:
        return f":{run.pid}-".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_children_of_the_gateway_and_the_supervisor_are_not_the_workers(launcher: Start, short_path: Path) -> None:
    aside = (
        f"import subprocess,time,os\nos.chdir({str(short_path)!r})\n"
        "p=subprocess.Popen(['sleep','600'],start_new_session=True)\n"
        "open('aside','w').write(str(p.pid))\ntime.sleep(600)"
    )
    run = launcher(supervisor=[*QUICK, aside])
    pid = int(until(lambda: (short_path / "aside").exists() and (short_path / "aside").read_text()))
    client = run.client(epoch=1000)
    try:
        assert len(client.call("tree", generation=1)["tree"]) == 1
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        until(lambda: f" {run.pid} " in Path(f"/proc/{pid}/stat").read_text(), "it is re-parented to the launcher")
        assert [p["pid"] for p in client.call("tree", generation=1)["tree"]] == [root_of(client)[0]]
        assert client.call("signal", generation=1, targets=[[pid, start_time(pid)]], signal=9)["refused"]
    finally:
        os.kill(pid, signal.SIGKILL)


def test_an_orphan_of_the_supervisor_that_no_scan_has_seen_is_not_the_workers(
    launcher: Start, short_path: Path
) -> None:
    orphan = f"import os,time\nopen({str(short_path / 'orphan')!r},'w').write(str(os.getpid()))\ntime.sleep(600)"
    between = f"import subprocess\nsubprocess.Popen({[*QUICK, orphan]!r}, start_new_session=True)"
    aside = f"import subprocess,time\nsubprocess.run({[*QUICK, between]!r}, start_new_session=True)\ntime.sleep(600)"
    run = launcher(supervisor=[*QUICK, aside])
    pid = int(until(lambda: (short_path / "orphan").exists() and (short_path / "orphan").read_text()))
    client = run.client(epoch=1000)
    try:
        until(lambda: f" {run.pid} " in Path(f"/proc/{pid}/stat").read_text(), "it is re-parented to the launcher")
        assert [p["pid"] for p in client.call("tree", generation=1)["tree"]] == [root_of(client)[0]]
        run.process.terminate()
        assert run.wait() == 0 and alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_worker_without_bytecode_gets_a_folder_for_it(launcher: Start, short_path: Path) -> None:
    """A Python whose packages have no bytecode and that was told not to write any."""
    packages = short_path / "venv/lib/python3.11/site-packages"
    for name in ("a", "b"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    (short_path / "venv/bin").mkdir()
    (short_path / "venv/bin/python3").symlink_to(sys.executable)
    command = short_path / "serve"
    command.write_text(
        f"#!{short_path}/venv/bin/python3\nimport os,json,time\njson.dump(dict(os.environ),open('new','w'))\n"
        "os.rename('new','run'+os.environ['DEFIB_MARK'][-1])\ntime.sleep(600)\n"
    )
    command.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    client = launcher(argv=[str(command)], env=env).client()
    found = json.loads(until(lambda: (short_path / "run1").exists() and (short_path / "run1").read_text()))
    assert found["PYTHONPYCACHEPREFIX"] == str(short_path / "state/pycache")
    assert "PYTHONDONTWRITEBYTECODE" not in found and Path(found["PYTHONPYCACHEPREFIX"]).is_dir()
    for name in ("a", "b"):
        (packages / name / "__pycache__").mkdir()
        (packages / name / "__pycache__/__init__.cpython-311.pyc").touch()
    kill_root(client)
    assert client.call("launch", generation=2, delta={})["ok"]
    found = json.loads(until(lambda: (short_path / "run2").exists() and (short_path / "run2").read_text()))
    assert "PYTHONPYCACHEPREFIX" not in found and found["PYTHONDONTWRITEBYTECODE"] == "1"


def test_an_argument_that_the_kernel_cannot_take_is_said(launcher: Start) -> None:
    run = launcher(argv=[*QUICK, "pass", "a\0b"])
    assert run.client().snapshot["exit"]["code"] == 127 and "null byte" in run.said() and "bug" not in run.said()
