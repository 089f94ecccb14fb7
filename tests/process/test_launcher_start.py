"""Starting a launcher: what it needs, what it says when it cannot have it, what it costs, on every Python."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.conftest import LAUNCHER, Start, alive, until

pytestmark = pytest.mark.process

QUICK = [sys.executable, "-I", "-S", "-c"]


def python38() -> str | None:
    """An interpreter of the oldest version that the launcher promises to run on."""
    check = "import sys; sys.exit(sys.version_info[:2] != (3, 8))"
    for name in ("python3.8", *_pyenv()):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", check], check=False, capture_output=True).returncode == 0:
            return path
    return None


def _pyenv() -> list[str]:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return [str(path / "bin/python") for path in root.glob("3.8.*")]


def test_it_runs_on_python_3_8(launcher: Start) -> None:
    python = python38()
    if python is None:
        pytest.skip("no Python 3.8 here")
    script = "import subprocess,time,os\nsubprocess.Popen(['sleep','600'])\nos.write(1,b'hello')\ntime.sleep(600)"
    run = launcher(argv=[*QUICK, script], python=python)
    client = run.client()
    tree = until(lambda: [t for t in [client.call("tree", generation=1)["tree"]] if len(t) == 2])[0]
    child = next(p for p in tree if not p["root"])
    client.call("signal", generation=1, targets=[[child["pid"], child["start"]]], signal=9)
    assert client.event("exited", pid=child["pid"])["ordered"] is True
    client.call("signal", generation=1, targets=[client.snapshot["root"]], signal=9)
    assert client.event("exited", root=True)["signal"] == 9
    until(lambda: client.call("launch", generation=2, delta={})["ok"])
    run.process.terminate()
    assert run.wait() == 0 and "bug" not in run.said()


def test_the_file_uses_nothing_newer_than_python_3_8() -> None:
    import ast

    ast.parse(LAUNCHER.read_text(), feature_version=(3, 8))


def test_the_file_imports_the_standard_library_only() -> None:
    import ast

    names = set()
    for node in ast.walk(ast.parse(LAUNCHER.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add((node.module or "").partition(".")[0])
    assert names <= sys.stdlib_module_names


def test_a_second_start_says_who_holds_the_instance(launcher: Start) -> None:
    first = launcher()
    first.client()
    assert (first.state / "lock").read_text().strip() == str(first.pid)
    second = launcher()
    assert second.wait() == 75
    assert f"pid {first.pid} holds" in second.said() and "instance test runs already" in second.said()
    assert alive(first.client().snapshot["root"][0])


def test_the_lock_is_not_inherited_by_the_worker(launcher: Start) -> None:
    run = launcher()
    run.client()
    run.process.kill()
    run.wait()
    with (run.state / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_says_who_has_it(launcher: Start, host: str) -> None:
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.bind((host, 0))
    except OSError:
        holder.close()
        pytest.skip("no IPv6 here")
    with holder:
        holder.listen()
        run = launcher(listen={"host": host, "port": holder.getsockname()[1]})
        assert run.wait() == 75
        assert f"in use by pid {os.getpid()} (" in run.said() and "pytest" in run.said()
    assert not (run.state / "worker.json").exists(), "nothing was launched"


def test_both_kinds_of_address_are_listened_on(launcher: Start, short_path: Path) -> None:
    script = (
        "import socket,sys,time\ns=socket.socket(fileno=int(sys.argv[4]))\n"
        "open(%r,'w').write(repr(s.getsockname()[:2]))\ntime.sleep(600)"
    )
    for number, host in enumerate(["127.0.0.1", "0.0.0.0", "localhost", "::1", ""]):
        path = short_path / f"address{number}"
        folders = {"state": str(short_path / f"s{number}"), "runtime": str(short_path / f"r{number}")}
        run = launcher(gateway=[*QUICK, script % str(path)], listen={"host": host, "port": 0}, **folders)
        address = eval(until(lambda: path.exists() and path.read_text()))  # noqa: B023
        assert address[1] > 0 and address[0] in {host, "127.0.0.1", "::1", "0.0.0.0", "::"}
        run.process.terminate()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version: expected 1, found 2"),
        ({"argv": "vllm serve"}, "argv: expected list"),
        ({"executable": 7}, "executable: expected str"),
        ({"instance": None}, "instance: expected str"),
        ({"listen": {"host": "", "port": "8000"}}, "listen.port: expected 0 to 65535"),
        ({"env_set": {"A": 1}}, "env_set: expected strings"),
        ({"caches": {"triton": "~/.triton"}}, "caches.triton: expected a list"),
        ({"limits": {"drain_s": "soon"}}, "limits.drain_s: expected a number"),
        ({"limits": {"term_s": -1}}, "limits.term_s"),
        ({"allow_args": "--x"}, "allow_args: expected list"),
        ({"gateway": [1]}, "gateway: expected a list of strings"),
        ({"listen": {"host": "no.such.host.invalid", "port": 1}}, "cannot listen on no.such.host.invalid"),
        ({"runtime": "/tmp/" + "r" * 120}, "the path of the socket is longer than 107 bytes"),
    ],
)
def test_a_configuration_that_cannot_be_used_says_which_key(
    launcher: Start, changes: dict[str, object], says: str
) -> None:
    run = launcher(**changes)
    assert run.wait() == 78 and says in run.said(), run.said()
    if "runtime" in changes:
        os.rmdir(str(changes["runtime"]))


def test_no_descriptor_or_no_json_is_said(tmp_path: Path) -> None:
    for arguments, says in (
        ([], "usage"),
        (["--config-fd", "0"], "not JSON"),
        (["--config-fd", "99"], "descriptor 99"),
    ):
        command = [sys.executable, str(LAUNCHER), *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 78 and says in done.stderr


def test_a_state_folder_that_cannot_be_made_is_said(launcher: Start, short_path: Path) -> None:
    (short_path / "file").write_text("in the way")
    run = launcher(state=str(short_path / "file/state"))
    assert run.wait() == 73 and f"{short_path}/file/state cannot be written" in run.said()


def test_folders_and_socket_are_for_the_owner_alone(launcher: Start) -> None:
    run = launcher()
    run.client()
    folders = ((run.state, 0o700), (run.socket.parent, 0o700))
    for path, mode in (*folders, (run.socket, 0o600), (run.state / "lock", 0o600)):
        assert path.stat().st_mode & 0o777 == mode, path
    for path in (run.state / "output").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_closed_standard_descriptors_do_no_harm(launcher: Start, short_path: Path) -> None:
    import json

    config = launcher().config
    config = {**config, "instance": "closed", "state": str(short_path / "s2"), "runtime": str(short_path / "r2")}
    descriptor = os.memfd_create("config", 0)
    os.write(descriptor, json.dumps(config).encode())
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$0" "$1" --config-fd {descriptor} <&- >&- 2>&-', sys.executable, str(LAUNCHER)],
        pass_fds=(descriptor,),
    )
    os.close(descriptor)
    try:
        until((short_path / "r2/launcher.sock").exists)
        until(lambda: (short_path / "s2/output/g1.stdout").exists())
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_hangup_that_our_parent_ignores_is_ignored(launcher: Start, short_path: Path) -> None:
    """`nohup defib run ...` outlives its terminal."""
    wrapper = short_path / "python"
    wrapper.write_text(f'#!/bin/sh\ntrap "" HUP\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    run = launcher(python=str(wrapper))
    client = run.client()
    run.process.send_signal(signal.SIGHUP)
    assert client.call("tree", generation=1)["ok"] and client.call("tree", generation=1)["ok"]
    with run.client() as again:
        assert again.snapshot["state"] == "running"


def test_it_is_small(launcher: Start) -> None:
    run = launcher()
    client = run.client()
    until(lambda: client.call("tree", generation=1)["tree"])
    status = Path(f"/proc/{run.pid}/status").read_text()
    rss_kb = int(status.partition("VmRSS:")[2].split()[0])
    assert rss_kb <= 18_000, f"{rss_kb} kB resident"


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b'{"half',
        b"[]",
        b"\xff\x00",
        b'{"boot": "BOOT", "pidns": "NS", "launcher": 7, "processes": [[1]], "leavings": [{}]}',
        b'{"leavings": [{"tmpdir": "/etc", "uds": "/etc/passwd", "shm": [["../../etc/passwd", 1]]}]}',
        b'{"leavings": [{"tmpdir": "/", "fresh": ["/home"]}]}',
        b'{"leavings": [3]}',
    ],
)
def test_a_damaged_record_of_an_earlier_run_harms_nothing(launcher: Start, short_path: Path, record: bytes) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    record = record.replace(b"BOOT", boot).replace(b"NS", os.readlink("/proc/self/ns/pid").encode())
    (short_path / "state").mkdir()
    (short_path / "state/worker.json").write_bytes(record)
    with (short_path / "open").open("w") as file:
        writer = subprocess.Popen(["sleep", "600"], stdout=file)  # writes below "/"
    try:
        run = launcher()
        assert run.client().snapshot["state"] == "running"
        assert writer.poll() is None and "leftover" not in run.said()
    finally:
        writer.kill()
        writer.wait()
    assert Path("/etc/passwd").exists() and Path("/home").exists()


class Outside:
    """What a person does from outside of a container: enters it, starts something, leaves."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(self, command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-p", "-m", "sh", "-c", command], check=True, timeout=20)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs namespaces")
def test_as_pid_1_it_reaps_everybody_and_owns_only_the_worker(launcher: Start, short_path: Path) -> None:
    """The root of a container is given the orphans of whoever was in it, also those of a person's shell."""
    wrapper = short_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec unshare --pid --fork --mount-proc --kill-child {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    child = "import subprocess,time\nsubprocess.Popen(['sleep','77'])\ntime.sleep(600)"
    script = (
        f"import subprocess,time\np=subprocess.Popen({[*QUICK, child]!r})\ntime.sleep(0.2)\np.kill()\ntime.sleep(600)"
    )
    run = launcher(argv=[*QUICK, script], python=str(wrapper))
    client = run.client()
    assert client.hello["pid"] == 1
    init = until(lambda: Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())[0]
    Outside(int(init)).run(f"sleep 88 & true; (sleep 0.05 &) ; echo > {short_path}/done")
    until(lambda: "sleep 77" in {p["cmdline"] for p in client.call("tree", generation=1)["tree"] if p["ppid"] == 1})
    tree = client.call("tree", generation=1)["tree"]
    assert sorted(p["cmdline"] for p in tree if p["name"] == "sleep") == ["sleep 77"]
    Outside(int(init)).run("grep -l 88 /proc/[0-9]*/cmdline > /dev/null")
    until(lambda: _zombies_below(int(init)) == 0, "no zombie stays")


def _zombies_below(pid: int) -> int:
    states = [Path(f"/proc/{p}/stat").read_text() for p in os.listdir("/proc") if p.isdigit() and _exists(p)]
    return sum(1 for s in states if s.rpartition(")")[2].split()[:2] == ["Z", str(pid)])


def _exists(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").exists()
