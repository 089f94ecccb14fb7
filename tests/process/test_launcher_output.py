"""The worker's output: told at once, echoed without blocking anybody, given back to the disk, nothing lost unsaid."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.process.conftest import LAUNCHER, Client, Start, alive, until

pytestmark = pytest.mark.process

QUICK = [sys.executable, "-I", "-S", "-c"]
MIB = 1 << 20

FLOOD = """
import hashlib, os, sys, time
total, sink = int(sys.argv[1]), hashlib.sha256()
number = done = 0
while done < total:
    line = b"%d %s\\n" % (number, b"x" * (number % 900))
    os.write(1, line); sink.update(line)
    number += 1; done += len(line)
open("digest.new", "w").write(f"{done} {sink.hexdigest()}"); os.rename("digest.new", "digest")
time.sleep(600)
"""


class Reader:
    """Reads the launcher's stdout in a thread, as a person's terminal would."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.sink = hashlib.sha256()
        self.size = 0
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        os.close(self.write_end)
        self._thread.start()

    def _run(self) -> None:
        while data := os.read(self.read_end, 1 << 16):
            self.sink.update(data)
            self.size += len(data)
        os.close(self.read_end)

    def join(self) -> None:
        self._thread.join()


def blocks(path: str | Path) -> int:
    """Bytes on disk."""
    return os.stat(path).st_blocks * 512


def consume(client: Client, generation: int = 1) -> None:
    """Acknowledges everything that was told, as a supervisor does that keeps up."""
    sizes = client.event("output", generation=generation)
    client.call("consumed", generation=generation, stdout=sizes["stdout"], stderr=sizes["stderr"])


def test_a_flood_is_echoed_whole_and_its_disk_stays_bounded(launcher: Start, short_path: Path) -> None:
    reader = Reader()
    total = 48 * MIB
    run = launcher(argv=[*QUICK, FLOOD, str(total)], stdout=reader.write_end)
    reader.start()
    client = run.client()
    path = client.snapshot["output"]["stdout"]["path"]
    most = 0
    while not (short_path / "digest").exists():
        consume(client)
        most = max(most, blocks(path))
    done, digest = (short_path / "digest").read_text().split()
    until(lambda: reader.size == int(done), "all of it is echoed")
    client.call("consumed", generation=1, stdout=int(done), stderr=0)
    client.call("tree", generation=1)
    assert reader.sink.hexdigest() == digest
    assert os.stat(path).st_size == int(done) >= total
    assert most < 24 * MIB, "two readers' lag and one reserve at most"
    until(lambda: client.call("consumed", generation=1, stdout=int(done), stderr=0) and blocks(path) < 3 * MIB)
    with run.client() as again:
        assert again.snapshot["output"]["stdout"]["lost_bytes"] == 0
    run.process.terminate()
    assert run.wait() == 0
    reader.join()


def test_without_a_supervisor_the_oldest_output_goes_at_the_cap_and_is_counted(
    launcher: Start, short_path: Path
) -> None:
    cap = 8 * MIB
    limits = {"drain_s": 0, "term_s": 1, "output_cap_bytes": cap}
    run = launcher(argv=[*QUICK, FLOOD, str(40 * MIB)], limits=limits)
    client = run.client()
    path = client.snapshot["output"]["stdout"]["path"]
    done = int(until(lambda: (short_path / "digest").exists() and (short_path / "digest").read_text()).split()[0])
    client.event("output", stdout=done)
    with run.client() as again:
        told = again.snapshot["output"]["stdout"]
    assert 0 < done - cap - MIB <= told["lost_bytes"] <= done
    assert told["consumed"] >= told["lost_bytes"] - 4096, "a new supervisor begins where something is left"
    assert blocks(path) <= cap + 2 * MIB
    with open(path, "rb") as file:
        file.seek(told["consumed"])
        assert b"\0" not in file.read() and file.tell() == done


def test_a_stuck_reader_of_the_echo_holds_up_nobody(launcher: Start, short_path: Path) -> None:
    read_end, write_end = os.pipe()
    run = launcher(argv=[*QUICK, FLOOD, str(40 * MIB)], stdout=write_end)
    os.close(write_end)
    client = run.client()
    path = client.snapshot["output"]["stdout"]["path"]
    while not (short_path / "digest").exists():  # the worker finishes, though nobody reads
        consume(client)
    done = (short_path / "digest").read_text().split()[0]
    began = time.monotonic()
    client.call("consumed", generation=1, stdout=int(done), stderr=0)
    assert time.monotonic() - began < 1.0
    until(lambda: client.call("consumed", generation=1, stdout=int(done), stderr=0) and blocks(path) < 20 * MIB)
    data = bytearray()
    while len(data) < 70_000 or not data.endswith(b"\n") or b"skipped" not in run.said().encode():
        data += os.read(read_end, 1 << 16)
    assert b"\0" not in data, "a hole is never echoed"
    skipped = int(run.said().partition("echo skipped bytes=")[2].split()[0])
    assert skipped >= int(done) - 17 * MIB
    os.close(read_end)


def test_a_closed_echo_ends_quietly(launcher: Start, short_path: Path) -> None:
    read_end, write_end = os.pipe()
    run = launcher(argv=[*QUICK, FLOOD, str(2 * MIB)], stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    client = run.client()
    done = int(until(lambda: (short_path / "digest").exists() and (short_path / "digest").read_text()).split()[0])
    path = client.snapshot["output"]["stdout"]["path"]
    until(lambda: client.call("consumed", generation=1, stdout=done, stderr=0) and blocks(path) < 1.5 * MIB)
    assert "bug" not in run.said() and alive(client.snapshot["root"][0])


def test_a_stuck_terminal_for_errors_does_not_stop_the_loop(launcher: Start) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    while True:
        try:
            os.write(write_end, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write_end, True)
    run = launcher(argv=[*QUICK, "import os\nos._exit(3)"], stderr=write_end)
    os.close(write_end)
    client = run.client()
    until(lambda: client.call("tree", generation=1)["tree"] == [])
    run.process.terminate()
    assert run.wait() == 0, "it gives the echo a second and leaves"
    os.close(read_end)


def test_output_is_told_within_milliseconds_and_at_most_200_times_a_second(launcher: Start, short_path: Path) -> None:
    script = (
        "import os,time\nwhile not os.path.exists('go'): time.sleep(0.005)\nos.write(2,b'first\\n')\n"
        "open('t','w').write(str(time.clock_gettime(time.CLOCK_BOOTTIME)))\nos.rename('t','wrote')\n"
        "end=time.time()+1\nwhile time.time()<end: os.write(1,b'a line\\n')\n"
        "os.rename('wrote','done')\ntime.sleep(600)"
    )
    client = launcher(argv=[*QUICK, script]).client()
    (short_path / "go").touch()
    client.event("output", stderr=6)
    came = time.clock_gettime(time.CLOCK_BOOTTIME)
    path = until(lambda: next((p for p in (short_path / "wrote", short_path / "done") if p.exists()), None))
    assert came - float(path.read_text()) < 0.1
    until((short_path / "done").exists)
    client.call("tree", generation=1)
    outputs = [e for e in client.events if e.get("event") == "output"]
    assert 10 < len(outputs) <= 260, "a little over a second of them"


def test_an_exit_is_told_after_the_last_output(launcher: Start) -> None:
    client = launcher(argv=[*QUICK, "import os\nos.write(2, b'last words')\nos._exit(1)"]).client()
    if client.snapshot["state"] == "running":
        client.event("exited", root=True)
    with_output = client.snapshot["output"]["stderr"]["size"] == 10 or any(
        e.get("event") == "output" and e["stderr"] == 10 for e in client.events
    )
    assert with_output


def test_old_output_goes_when_it_is_read_and_not_before(launcher: Start) -> None:
    run = launcher(argv=[*QUICK, "import os\nos.write(1, b'x' * 100)\nos._exit(1)"])
    client = run.client()
    until(lambda: client.call("tree", generation=1)["tree"] == [])
    first = Path(client.snapshot["output"]["stdout"]["path"])
    assert until(lambda: [r for r in [client.call("launch", generation=2, delta={})] if r["ok"]])
    assert first.exists() and first.stat().st_size == 100
    client.call("consumed", generation=1, stdout=100, stderr=0)
    until(lambda: client.call("consumed", generation=1, stdout=100, stderr=0) and not first.exists())


def test_the_last_output_of_an_earlier_run_is_kept_once(launcher: Start) -> None:
    for word in ("one", "two"):
        run = launcher(argv=[*QUICK, f"import os,time\nos.write(1, b'{word}')\ntime.sleep(600)"])
        client = run.client()
        if client.snapshot["output"]["stdout"]["size"] == 0:
            client.event("output")
        client.connection.close()
        run.process.terminate()
        run.wait()
    folder = run.state / "output"
    assert (folder / "previous.stdout").read_text() == "one" and (folder / "g1.stdout").read_text() == "two"


# ---- one file, without a launcher


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launcher_under_test", LAUNCHER)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_where_holes_cannot_be_made_the_file_is_emptied_at_the_cap_and_offsets_still_grow(
    module: ModuleType, tmp_path: Path
) -> None:
    file: Any = module.OutputFile(str(tmp_path / "out"), 1)
    file.can_punch = False
    writer = os.open(tmp_path / "out", os.O_WRONLY | os.O_APPEND)
    cap, written = 1 * MIB, 0
    for _ in range(40):
        written += os.write(writer, b"y" * 65536)
        file.look()
        file.trim(file.size, cap)
        assert blocks(tmp_path / "out") <= cap + 131072
    assert file.size == written
    assert file.lost_bytes == file.begin > cap, "nobody had read it"
    lost = file.lost_bytes
    for _ in range(40):
        written += os.write(writer, b"z" * 65536)
        file.look()
        file.consumed = file.size
        file.trim(file.size, cap)
    assert file.size == written and file.lost_bytes == lost, "what was read is not lost"
    os.close(writer)
    os.close(file.fd)


@pytest.fixture
def small_disk(short_path: Path) -> Any:
    folder = short_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)], check=False)
    if done.returncode:
        pytest.skip("cannot mount a small disk here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_on_a_full_disk_the_worker_can_still_print(launcher: Start, small_disk: Path) -> None:
    script = (
        "import os,time\nfor i in range(300):\n os.write(1, b'x'*65536)\n time.sleep(0.01)\n"
        "open('finished','w')\ntime.sleep(600)"
    )
    run = launcher(argv=[*QUICK, script], state=str(small_disk / "state"))
    client = run.client()
    ballast = os.open(small_disk / "ballast", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(ballast, b"b" * 65536)
    except OSError:
        pass
    os.close(ballast)
    until((run.state.parent.parent / "finished").exists, "the worker printed all it had")
    with run.client() as again:
        told = again.snapshot["output"]["stdout"]
    assert told["size"] == 300 * 65536 and told["lost_bytes"] > 0 and again.snapshot["state"] == "running"
    assert client.call("tree", generation=1)["ok"]


def test_a_read_of_proc_that_never_returns_costs_a_thread_and_half_a_second(module: ModuleType) -> None:
    """The memory lock of a process that sits in a driver: whoever reads its command line waits for ever."""
    guard: Any = module.Guard()
    never = threading.Event()
    began = time.monotonic()
    assert guard.call(77, lambda pid: never.wait(), "otherwise") == "otherwise"
    assert time.monotonic() - began < 2
    assert guard.call(77, lambda pid: "not asked again", "otherwise") == "otherwise"
    assert guard.call(78, lambda pid: pid + 1, 0) == 79, "others are still read"
    never.set()


class PunchedAway:
    """A file whose beginning is punched out while the echo reads it."""

    def __init__(self, path: Path) -> None:
        self.fd, self.generation, self.size = os.open(path, os.O_RDONLY), 1, 8
        self.echoed, self._asked, self.left_by_echo = 0, 0, False

    @property
    def begin(self) -> int:
        self._asked += 1
        return 0 if self._asked == 1 else 4


def test_what_is_punched_out_while_it_is_read_is_not_echoed(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"\0\0\0\0last")
    read_end, write_end = os.pipe()
    echo: Any = module.Echo(write_end)
    file = PunchedAway(tmp_path / "out")
    echo.follow(file)
    while echo._step():
        pass
    os.close(write_end)
    os.close(file.fd)
    with os.fdopen(read_end, "rb") as sink:
        words = sink.read()
    assert words == b"last\ndefib launcher: echo skipped bytes=4 generation=1\n"
