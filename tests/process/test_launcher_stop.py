"""How an instance ends: in order, within limits, at once when asked twice, and with nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.conftest import Start, alive, start_time, until

pytestmark = pytest.mark.process

QUICK = [sys.executable, "-I", "-S", "-c"]

WITNESS = """
import os, signal, sys, time
def note(text):
    with open(%(folder)r + "/order", "a") as file:
        file.write(text + "\\n")
def end(number, frame):
    note(%(name)r + " SIGTERM")
    time.sleep(%(takes)g)
    note(%(name)r + " ends")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open(%(folder)r + "/" + %(name)r, "w").write(str(os.getpid()))
while True: time.sleep(0.01)
"""

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(%r, "w").write(str(os.getpid()))
time.sleep(600)
"""


def witness(folder: Path, name: str, takes: float = 0.05) -> list[str]:
    return [*QUICK, WITNESS % {"folder": str(folder), "name": name, "takes": takes}]


def order(folder: Path) -> list[str]:
    return (folder / "order").read_text().splitlines()


def pid_in(path: Path) -> int:
    return int(until(lambda: path.exists() and path.read_text(), str(path)))


def everyone(launcher: Start, folder: Path, **changes: object) -> tuple[object, dict[str, int]]:
    run = launcher(
        argv=witness(folder, "worker"),
        gateway=witness(folder, "gateway"),
        supervisor=witness(folder, "supervisor"),
        listen={"host": "127.0.0.1", "port": 0},
        **changes,
    )
    return run, {name: pid_in(folder / name) for name in ("worker", "gateway", "supervisor")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_goes_gateway_worker_supervisor(launcher: Start, short_path: Path, number: int) -> None:
    run, found = everyone(launcher, short_path)
    client = run.client(epoch=100)  # type: ignore[attr-defined]
    os.kill(run.pid, number)  # type: ignore[attr-defined]
    event = client.event("stopping")
    assert 0 < event["deadline"] - time.clock_gettime(time.CLOCK_BOOTTIME) <= 4
    assert run.wait() == 0  # type: ignore[attr-defined]
    names = [f"{name} {what}" for name in ("gateway", "worker", "supervisor") for what in ("SIGTERM", "ends")]
    assert order(short_path) == names
    assert not [pid for pid in found.values() if alive(pid)]
    state = run.state  # type: ignore[attr-defined]
    assert not (state / "worker.json").exists() and not run.socket.exists()  # type: ignore[attr-defined]


def test_a_snapshot_during_a_stop_says_so_and_a_launch_is_refused(launcher: Start, short_path: Path) -> None:
    run = launcher(argv=witness(short_path, "worker", takes=1.0))
    pid_in(short_path / "worker")
    client = run.client()
    run.process.terminate()
    client.event("stopping")
    with run.client() as late:
        assert late.snapshot["state"] == "stopping" and late.snapshot["planned_stop"] is True
    assert client.call("launch", generation=2, delta={})["error"] == "refused"
    assert run.wait() == 0


def test_a_gateway_that_drains_too_long_is_killed_at_its_limit(launcher: Start, short_path: Path) -> None:
    run = launcher(
        gateway=witness(short_path, "gateway", takes=60),
        listen={"host": "127.0.0.1", "port": 0},
        limits={"drain_s": 0.5, "term_s": 1},
    )
    gateway = pid_in(short_path / "gateway")
    began = time.monotonic()
    run.process.terminate()
    assert run.wait() == 0
    assert 0.5 <= time.monotonic() - began < 5 and not alive(gateway)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_deadline(launcher: Start, short_path: Path) -> None:
    run = launcher(argv=[*QUICK, STUBBORN % str(short_path / "worker")], limits={"drain_s": 0, "term_s": 0.5})
    worker = pid_in(short_path / "worker")
    began = time.monotonic()
    run.process.terminate()
    assert run.wait() == 0
    assert 0.5 <= time.monotonic() - began < 5 and not alive(worker)


def test_the_rest_of_the_tree_does_not_outlive_its_root(launcher: Start, short_path: Path) -> None:
    child = STUBBORN % str(short_path / "child")
    script = (
        f"import subprocess,sys,time\nsubprocess.Popen({[*QUICK, child]!r}, start_new_session=True)\ntime.sleep(600)"
    )
    run = launcher(argv=[*QUICK, script])
    pid = pid_in(short_path / "child")
    run.process.terminate()
    assert run.wait() == 0 and not alive(pid)


def test_a_second_signal_ends_everything_at_once(launcher: Start, short_path: Path) -> None:
    run = launcher(
        argv=[*QUICK, STUBBORN % str(short_path / "worker")],
        gateway=witness(short_path, "gateway", takes=60),
        supervisor=witness(short_path, "supervisor", takes=60),
        listen={"host": "127.0.0.1", "port": 0},
        limits={"drain_s": 60, "term_s": 60},
    )
    pids = [pid_in(short_path / name) for name in ("worker", "gateway", "supervisor")]
    client = run.client(epoch=100)
    run.process.terminate()
    client.event("stopping")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    assert time.monotonic() - began < 2.5
    assert not [pid for pid in pids if alive(pid)]


def test_finish_ends_the_instance_with_its_code(launcher: Start) -> None:
    run = launcher()
    client = run.client()
    assert client.call("finish", code=300, reason="x")["error"] == "bad_request"
    assert client.call("finish", code=42, reason="budget spent")["ok"]
    client.event("stopping")
    assert run.wait() == 42 and "budget spent" in run.said()


TRACKED = """
import os, signal, sys, time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=8192)
tracker = resource_tracker._resource_tracker._pid
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if %(kill)r:
    os.kill(tracker, signal.SIGKILL)
open(%(folder)r + "/new", "w").write(segment.name + " " + str(tracker))
os.rename(%(folder)r + "/new", %(folder)r + "/segment")
time.sleep(600)
"""


def test_the_resource_tracker_goes_last_and_no_shared_memory_stays(launcher: Start, short_path: Path) -> None:
    foreign = Path("/dev/shm/not-the-workers")
    foreign.write_bytes(b"x")
    try:
        run = launcher(
            argv=[sys.executable, "-c", TRACKED % {"folder": str(short_path), "kill": False}],
            limits={"term_s": 0.2},
        )
        name, tracker = until(
            lambda: (short_path / "segment").exists() and (short_path / "segment").read_text().split()
        )
        segment = Path("/dev/shm") / name
        assert segment.exists() and alive(int(tracker))
        run.process.terminate()
        assert run.wait() == 0
        assert not segment.exists() and not alive(int(tracker)) and foreign.exists()
    finally:
        foreign.unlink()


def test_shared_memory_that_nobody_cleans_is_swept_if_the_worker_had_it(launcher: Start, short_path: Path) -> None:
    script = TRACKED % {"folder": str(short_path), "kill": True}
    run = launcher(argv=[sys.executable, "-c", script], limits={"term_s": 0.2})
    name = until(lambda: (short_path / "segment").exists() and (short_path / "segment").read_text().split())[0]
    segment = Path("/dev/shm") / name
    client = run.client()
    until(
        lambda: (
            name
            in json.dumps(
                client.call(
                    "facts",
                    generation=1,
                    pid=client.snapshot["root"][0],
                    start=client.snapshot["root"][1],
                    names=["shm"],
                )
            )
        )
    )
    until(lambda: name in (run.state / "worker.json").read_text(), "it is recorded as the worker's")
    root = client.snapshot["root"]
    assert segment.exists()
    assert client.call("sweep", generation=1)["error"] == "refused", "its generation lives"
    client.call("signal", generation=1, targets=[root], signal=9)
    client.event("exited", root=True)
    until(lambda: client.call("tree", generation=1)["tree"] == [])
    removed = client.call("sweep", generation=1)["removed"]
    assert str(segment) in removed and not segment.exists()


def test_the_private_folder_of_a_dead_generation_is_swept(launcher: Start, short_path: Path) -> None:
    script = (
        "import os,time\nt=os.environ['TMPDIR']\nos.makedirs(t+'/a/b'); open(t+'/a/b/c','w')\n"
        "os.symlink('/etc', t+'/link')\nopen('new','w').write(t); os.rename('new','tmpdir')\ntime.sleep(600)"
    )
    run = launcher(argv=[*QUICK, script])
    folder = Path(until(lambda: (short_path / "tmpdir").exists() and (short_path / "tmpdir").read_text()))
    client = run.client()
    client.call("signal", generation=1, targets=[client.snapshot["root"]], signal=9)
    client.event("exited", root=True)
    assert str(folder) in client.call("sweep", generation=1)["removed"]
    assert not folder.exists() and Path("/etc/passwd").exists()


def parent_of_an_orphan(folder: Path) -> list[str]:
    """A worker with a child in another session that holds none of our files; both say where they are."""
    child = f"import os,time\nopen({str(folder / 'child')!r},'w').write(str(os.getpid()))\ntime.sleep(600)"
    start = f"subprocess.Popen({[*QUICK, child]!r}, start_new_session=True, stdout=-3, stderr=-3)"
    return [*QUICK, f"import os,subprocess,time\n{start}\nopen('tmp','w').write(os.environ['TMPDIR'])\ntime.sleep(600)"]


def test_killing_the_launcher_takes_its_children_and_the_next_start_ends_the_rest(
    launcher: Start, short_path: Path
) -> None:
    run = launcher(
        argv=parent_of_an_orphan(short_path),
        gateway=witness(short_path, "gateway"),
        supervisor=witness(short_path, "supervisor"),
        listen={"host": "127.0.0.1", "port": 0},
    )
    pids = [pid_in(short_path / name) for name in ("gateway", "supervisor")]
    orphan = pid_in(short_path / "child")
    client = run.client(epoch=100)
    until(lambda: len(client.call("tree", generation=1)["tree"]) == 2)
    until(lambda: str(orphan) in (run.state / "worker.json").read_text())
    bystander = os.posix_spawn("/bin/sleep", ["sleep", "600"], {"DEFIB_MARK": f"test:other-boot:{run.pid}-1:1"})
    try:
        run.process.kill()
        run.wait()
        root = client.snapshot["root"][0]
        until(lambda: not any(alive(pid) for pid in [root, *pids]), "our direct children die with us")
        assert alive(orphan), "the kernel doesn't end grandchildren"
        again = launcher()
        again.client()
        assert not alive(orphan) and alive(bystander)
        assert f"leftover of an earlier run killed pid={orphan}" in again.said()
        assert not Path((short_path / "tmp").read_text()).exists(), "its private folder goes too"
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)


def test_a_leftover_is_known_by_its_mark_even_without_a_record(launcher: Start, short_path: Path) -> None:
    run = launcher(argv=parent_of_an_orphan(short_path))
    orphan = pid_in(short_path / "child")
    run.client()
    run.process.kill()
    run.wait()
    (run.state / "worker.json").unlink()
    other = launcher(instance="another", state=str(short_path / "s2"), runtime=str(short_path / "r2"))
    other.client()
    assert alive(orphan), "another instance leaves it alone"
    again = launcher()
    again.client()
    assert not alive(orphan)


def test_nothing_of_a_living_launcher_is_touched(launcher: Start, short_path: Path) -> None:
    """The same instance name with other folders: the first one's worker carries a mark whose owner lives."""
    run = launcher()
    worker = run.client().snapshot["root"][0]
    other = launcher(state=str(short_path / "s2"), runtime=str(short_path / "r2"))
    other.client()
    assert alive(worker) and start_time(worker) and "leftover" not in other.said()


@pytest.fixture
def freezer(short_path: Path) -> Iterator[Path]:
    """A place whose processes SIGKILL cannot end, as if they sat in a driver."""
    mounted, group = short_path / "freezer", short_path / "freezer/defib-test"
    mounted.mkdir()
    command = ["mount", "-t", "cgroup", "-o", "freezer", "none", str(mounted)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no freezer here")
    group.mkdir(exist_ok=True)
    yield group
    (group / "freezer.state").write_text("THAWED")
    until(lambda: not (group / "tasks").read_text())
    group.rmdir()
    subprocess.run(["umount", str(mounted)], check=True)


def test_a_process_that_sigkill_cannot_end_is_named_and_nothing_is_launched_beside_it(
    launcher: Start, freezer: Path
) -> None:
    run = launcher(limits={"drain_s": 0, "term_s": 0})
    pid, start = run.client().snapshot["root"]
    (freezer / "tasks").write_text(str(pid))
    (freezer / "freezer.state").write_text("FROZEN")
    run.process.terminate()
    assert run.wait(30) == 70
    assert f"alive after SIGKILL pid={pid} start={start}" in run.said() and "wchan=" in run.said()
    again = launcher()
    assert again.wait(30) == 70
    assert f"[{pid}]" in again.said() and "survive SIGKILL" in again.said()
    (freezer / "freezer.state").write_text("THAWED")
    until(lambda: not alive(pid))
    assert launcher().client().snapshot["state"] == "running"
