"""The gateway as a process of its own: how it starts, stops, and what its sudden death leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.bed import (
    COMPLETIONS,
    LAST,
    STREAM_BODY,
    Caller,
    Talk,
    Worker,
    chunk,
    plain,
    request,
    run,
    silent,
    stream,
    token,
    until,
)

from defib.app.gateway import ConfigError, read_config
from defib.runtime.seam import SeamClient

pytestmark = pytest.mark.process
POLICIES = Path(__file__).parents[2] / "policies"
SUPERVISOR = Path(__file__).parents[2] / "supervisor"


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "instance": "t",
        "engine": "vllm",
        "state": str(folder),
        "runtime": str(folder),
        "policies": str(POLICIES),
        "limits": {"drain_s": 10},
        "settings": {},
        **changes,
    }


LAUNCHER = """
import subprocess, sys
subprocess.Popen(sys.argv[3:], pass_fds=[int(number) for number in sys.argv[1:3]]).wait()
"""


def command(config_fd: int, listen_fd: int) -> list[str]:
    fds = ("--config-fd", str(config_fd), "--listen-fd", str(listen_fd))
    return [sys.executable, "-m", "defib.app.gateway", *fds]


def memfd(value: Any) -> int:
    descriptor = os.memfd_create("config")
    os.pwrite(descriptor, value if isinstance(value, bytes) else json.dumps(value).encode(), 0)
    return descriptor


class Running:
    """Gateways on one listening socket, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(16)
        self.port: int = self.sock.getsockname()[1]
        self.callers: list[Any] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.snapshots: list[Any] = []
        self.seam = SeamClient(
            folder / "gateway.sock", "supervisor", 1, self.snapshots.append, lambda m: None, lambda r: None
        )

    async def launch(self, **changes: Any) -> subprocess.Popen[bytes]:
        descriptor = memfd(config(self.folder, **changes))
        number = len(self.snapshots)
        process = subprocess.Popen(
            command(descriptor, self.sock.fileno()),
            pass_fds=(descriptor, self.sock.fileno()),
            env={**os.environ, "PYTHONPATH": str(SUPERVISOR)},
            # A shell without job control ignores SIGINT for what runs in its background, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(descriptor)
        self.processes.append(process)
        await until(lambda: len(self.snapshots) > number and self.seam.connected, "a gateway")
        return process

    async def open(self, worker: Worker, generation: int = 1) -> None:
        await self.seam.call("open", generation=generation, address=worker.address, ramp_per_s=0)

    async def ask(self, raw: bytes) -> Caller:
        caller = await Caller(self).open()  # type: ignore[arg-type]
        return await caller.send(raw)


@contextlib.asynccontextmanager
async def running(folder: Path, *workers: Worker) -> AsyncIterator[Running]:
    made = Running(folder)
    made.seam.start()
    for worker in workers:
        await worker.start()
    try:
        yield made
    finally:
        for caller in made.callers:
            await caller.close()
        await made.seam.stop()
        for process in made.processes:
            process.kill()
            process.wait()
        for worker in workers:
            await worker.stop()
        made.sock.close()


def unfinished(journal: Path) -> list[str]:
    lines = [line.split() for line in journal.read_text().splitlines()]
    ended = {line[1] for line in lines if line[0] == "E"}
    return [line[3] for line in lines if line[0] == "B" and line[1] not in ended]


def test_sigterm_finishes_what_is_under_way_and_leaves_with_0(tmp_path: Path) -> None:
    async def story() -> None:
        go_on = asyncio.Event()

        async def act(talk: Talk) -> None:
            await stream(token("a"), end=b"")(talk)
            await go_on.wait()
            await talk.send(chunk(token("b", '"stop"')), chunk(b"data: [DONE]\n\n"), LAST)

        worker, second = Worker(act), Worker(plain(b"served by the next one"))
        async with running(tmp_path, worker, second) as place:
            process = await place.launch()
            await place.open(worker)
            caller = await place.ask(request(body=STREAM_BODY))
            await caller.until(b'"a"')
            process.send_signal(signal.SIGINT)  # the terminal's Ctrl-C is not for us
            process.send_signal(signal.SIGTERM)
            await until(lambda: _draining(place), "draining")
            late = await place.ask(request())  # waits in the launcher's socket for the next gateway
            go_on.set()
            await until(lambda: process.poll() is not None, "its end")
            assert process.returncode == 0
            got = await caller.all()
            assert got.complete
            assert got.data[-1] == "[DONE]"
            assert unfinished(tmp_path / "journal") == []
            assert not (tmp_path / "gateway.sock").exists()
            await place.launch()
            await place.open(second, 2)
            assert (await late.all()).body == b"served by the next one"

    run(story())


def test_a_second_sigterm_is_at_once_and_still_tells_everybody(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(silent)
        async with running(tmp_path, worker) as place:
            process = await place.launch(limits={"drain_s": 1000})
            await place.open(worker)
            caller = await place.ask(request())
            await until(lambda: worker.talks)
            process.send_signal(signal.SIGTERM)
            await until(lambda: _draining(place), "draining")
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None, "its end")
            assert process.returncode == 0
            assert (await caller.all()).status == 503
            assert unfinished(tmp_path / "journal") == []

    run(story())


def _draining(place: Running) -> bool:
    """A stopping gateway has closed its listening socket: nobody but us has it open any more."""
    inode = os.fstat(place.sock.fileno()).st_ino
    folder = Path("/proc", str(place.processes[-1].pid), "fd")
    return f"socket:[{inode}]" not in map(_target, folder.iterdir())


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # closed since its folder was listed
        return ""


def test_kill_9_costs_its_exchanges_only_and_the_journal_names_them(tmp_path: Path) -> None:
    async def story() -> None:
        worker = Worker(plain(), silent, silent, plain(b"by the next one"))
        async with running(tmp_path, worker) as place:
            first = await place.launch()
            await place.open(worker)
            answered = await place.ask(request())
            await answered.all()
            lost = [await place.ask(request(path)) for path in (COMPLETIONS, "/pooling?secret=1")]
            await until(lambda: len(worker.talks) == 3)
            first.kill()
            first.wait()
            assert sorted(unfinished(tmp_path / "journal")) == ["/pooling", COMPLETIONS]
            stat_start = (tmp_path / "journal").read_text().split()[1]
            assert stat_start.startswith(f"{first.pid}-")
            for caller in lost:
                await until(lambda c=caller: c.ended)  # type: ignore[misc]
                assert caller.raw == b""
            waiting = await place.ask(request())
            await place.launch()
            assert place.snapshots[-1]["gate"] == "starting"
            await place.open(worker)
            assert (await waiting.all()).body == b"by the next one"
            assert (await place.seam.call("counts"))["counts"]["accepted"] == 1

    run(story())


def test_a_gateway_whose_launcher_died_gives_the_address_free(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path) as place:
            descriptor = memfd(config(tmp_path))
            fds = (descriptor, place.sock.fileno())
            parent = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, *map(str, fds), *command(*fds)],
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": str(SUPERVISOR)},
            )
            os.close(descriptor)
            place.processes.append(parent)
            await until(lambda: place.seam.connected)
            child = place.seam.hello["pid"]
            parent.kill()
            parent.wait()
            await until(lambda: not os.path.exists(f"/proc/{child}") or _is_zombie(child), "its end")

    run(story())


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_an_idle_gateway_is_small_and_loads_nothing_that_traffic_does_not_need(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path) as place:
            process = await place.launch()
            status = Path(f"/proc/{process.pid}/status").read_text()
            resident_kb = int(status.split("VmRSS:")[1].split()[0])
            assert resident_kb < 32 * 1024

    run(story())
    code = "import sys, defib.app.gateway; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(SUPERVISOR)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, text=True)
    heavy = {"httpx", "psutil", "prometheus_client", "pynvml", "re2", "tenacity", "h11"}
    assert heavy.isdisjoint(found.stdout.split())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"no json", "not JSON"),
        (b"[]", "not a JSON object"),
        ({}, "state: expected a text"),
        ({"engine": "nonesuch"}, "nonesuch"),
        ({"settings": {"gateway_parks": 1}}, "setting gateway_parks: unknown; known are gateway_"),
        ({"settings": {"gateway_park_s": "soon"}}, "setting gateway_park_s: expected a number"),
        ({"settings": {"gateway_park_s": -1}}, "at least 0"),
        ({"settings": {"gateway_own_request_ids": "maybe"}}, "true or false"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named_and_ends_with_2(tmp_path: Path, value: Any, says: str) -> None:
    if isinstance(value, dict) and value:
        value = config(tmp_path, **value)
    descriptor = memfd(value)
    done = subprocess.run(
        command(descriptor, 0),
        pass_fds=(descriptor,),
        env={**os.environ, "PYTHONPATH": str(SUPERVISOR)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    os.close(descriptor)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_runtime_folder_that_cannot_be_written_is_named_and_ends_with_1(tmp_path: Path) -> None:
    descriptor, sock = memfd(config(tmp_path, runtime=str(tmp_path / "missing"))), socket.socket()
    sock.bind(("127.0.0.1", 0))
    done = subprocess.run(
        command(descriptor, sock.fileno()),
        pass_fds=(descriptor, sock.fileno()),
        env={**os.environ, "PYTHONPATH": str(SUPERVISOR)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    os.close(descriptor)
    sock.close()
    assert done.returncode == 1
    assert "missing/gateway.sock" in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_reach_the_limits_and_the_profile_the_rules(tmp_path: Path) -> None:
    descriptor = memfd(
        config(tmp_path, settings={"gateway_park_s": "1.5", "gateway_held": 7, "gateway_own_request_ids": "false"})
    )
    found = read_config(descriptor)
    assert (found.limits.park_s, found.limits.held, found.drain_s) == (1.5, 7, 10.0)
    assert not found.rules.own_request_ids
    assert found.rules.replay_rule("POST", COMPLETIONS) is not None
    assert found.rules.replay_rule("POST", "/v1/files") is None
    assert "/health" in found.rules.probe_paths
    os.close(descriptor)
    with pytest.raises(ConfigError):
        read_config(descriptor := memfd({"instance": 7}))
    os.close(descriptor)
