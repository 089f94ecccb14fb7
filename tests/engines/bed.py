"""The test bed: a real vLLM under `defib run`, its clients, and what must be gone in the end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

START_LIMIT_S = 300.0
"""A start takes 25 s on an idle machine, 130 s were seen on a loaded one."""
EXIT_LIMIT_S = 60.0
STEP_S = 0.05
MODEL_NAME = "tiny"


def wait_until(condition: Callable[[], Any], what: str, limit_s: float) -> Any:
    """The first true value of a condition; fails with `what` after the limit."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {limit_s:.0f} s: {what}"
        time.sleep(0.02)
    return value


@dataclass(slots=True)
class Seen:
    """What was seen of the worker's processes and of the shared memory that they mapped."""

    processes: dict[int, psutil.Process] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)

    def look(self, root: int) -> None:
        """Remember all descendants of a process and their segments."""
        for process in _descendants(root):
            self.processes[process.pid] = process
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            self.segments |= set(re.findall(r"/dev/shm/(\S+)", maps))

    def named(self, title: str) -> psutil.Process | None:
        """The living process with this title, e.g. `VLLM::EngineCore`."""
        for process in self.processes.values():
            if alive(process) and " ".join(process.cmdline()).strip() == title:
                return process
        return None

    def left(self) -> list[str]:
        """What should have gone and has not."""
        out = [f"process {pid} {process.name()}" for pid, process in self.processes.items() if alive(process)]
        return out + [f"segment {name}" for name in self.segments if Path("/dev/shm", name).exists()]


def _descendants(root: int) -> list[psutil.Process]:
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(process: psutil.Process) -> bool:
    """Running, and not just waiting to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Bed:
    """One `defib run -- vllm serve ...` in a folder of its own. `direct` leaves defib out."""

    def __init__(self, venv: Path, model: Path, folder: Path, *flags: str, direct: bool = False) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.trigger = folder / "trigger"
        self.stdout_path, self.stderr_path = folder / "stdout", folder / "stderr"
        self.seen = Seen()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.runtime = Path("/tmp") / f"defib-test-{os.getpid()}-{self.port}"  # Short: a socket's path has 107 bytes.
        engine = [str(venv / "bin" / "vllm"), "serve", str(model), "--load-format", "dummy"]
        engine += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        # Not bfloat16: on a CPU with AMX the attention kernel of vLLM 0.32.0 died by SIGILL (`tilezero`) in
        # the prefill of a prompt of four tokens.
        engine += ["--dtype", "float32"]
        # What --enforce-eager does, without the flag: so the fallback can add it.
        engine += ["--compilation-config", '{"mode": 0, "cudagraph_mode": "NONE"}']
        engine += ["--max-model-len", "512", "--max-num-seqs", "3", *flags]
        own = [sys.executable, "-m", "defib.cli.main", "run", "--state-dir", str(self.state)]
        # A start takes about as long as a plain request is held by default (50 s): which of both wins would be luck.
        own += ["--runtime-dir", str(self.runtime), "--set", "gateway_hold_plain_s=300", "--"]
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", *([] if direct else own), *engine],
                stdout=out,
                stderr=err,
                env=self._environment(),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        """A home of our own: the Triton cache of whoever runs the tests is none of our business."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return dict(os.environ) | {
            "HOME": str(home),
            "TMPDIR": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "FAULTPLUG_FILE": str(self.trigger),
            "FAULTPLUG_DELAY": str(STEP_S),
        }

    def health(self) -> int:
        """The status of /health on the address of the user's command, 0 when nobody listens."""
        try:
            with httpx.Client(trust_env=False, timeout=10) as client:
                return client.get(f"{self.url}/health").status_code
        except httpx.TransportError:
            return 0

    def ready(self) -> "Bed":
        """Wait until /health says 200, and look at the processes."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"exit code {self.process.returncode}\n{self.tail()}"
            return self.health() == 200

        wait_until(is_ready, f"/health 200\n{self.tail()}", START_LIMIT_S)
        self.look()
        return self

    def look(self) -> Seen:
        """Remember the processes of this moment."""
        self.seen.look(self.process.pid)
        return self.seen

    def generation(self) -> Seen:
        """The processes and segments of the worker of this moment, without defib's own."""
        seen = Seen()
        for child in psutil.Process(self.process.pid).children():
            if any(part.endswith("/bin/vllm") for part in child.cmdline()):
                seen.processes[child.pid] = child
                seen.look(child.pid)
        return seen

    def strike(self, mode: str) -> None:
        """The next forward pass of the model fails in this way, once."""
        fresh = self.trigger.with_name("trigger.fresh")
        fresh.write_text(mode, encoding="utf-8")
        fresh.rename(self.trigger)

    def running(self) -> int:
        """`vllm:num_requests_running`, -1 when the worker can't be asked."""
        return self._gauge("vllm:num_requests_running")

    def waiting(self) -> int:
        """`vllm:num_requests_waiting`, -1 when the worker can't be asked."""
        return self._gauge("vllm:num_requests_waiting")

    def _gauge(self, name: str) -> int:
        try:
            with httpx.Client(trust_env=False, timeout=10) as client:
                page = client.get(f"{self.url}/metrics").text
        except httpx.TransportError:
            return -1
        found = re.search(rf"^{name}\{{[^}}]*\}} ([\d.]+)$", page, re.MULTILINE)
        return int(float(found[1])) if found else -1

    def incidents(self) -> list[Path]:
        """The folders of evidence, oldest first. One that is still being written begins with a dot."""
        return sorted(path for path in self.state.glob("incidents/[!.]*") if (path / "manifest.json").exists())

    def rungs(self) -> list[str]:
        """The rung of each launch that defib ordered, by its event log."""
        lines = (self.state / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [event["rung"] for event in map(json.loads, lines) if event["event"] == "launch"]

    def tail(self) -> str:
        """The end of all output, for a failing test's message."""
        return "\n".join(path.read_text("utf-8", "replace")[-3000:] for path in (self.stdout_path, self.stderr_path))

    def terminate(self) -> int:
        """SIGTERM to the root process; its exit code."""
        self.look()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(EXIT_LIMIT_S)

    def assert_nothing_left(self) -> None:
        """No process of the worker or of defib, no shared memory segment."""
        wait_until(lambda: not self.seen.left(), f"nothing left: {self.seen.left()}", 15)

    def stop(self) -> None:
        """Kill what is left, by identity, and remove what the bed made outside its folder."""
        self.look()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(EXIT_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(EXIT_LIMIT_S)
        for process in self.seen.processes.values():
            if alive(process):
                process.kill()
        shutil.rmtree(self.runtime, ignore_errors=True)


def completion(prompt: str, max_tokens: int, *, stream: bool = False) -> dict[str, Any]:
    """A completion request whose answer depends on nothing but the prompt."""
    fixed = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True}
    return {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, **fixed}


def chat(content: str, max_tokens: int, *, stream: bool = False) -> dict[str, Any]:
    """The same as a chat."""
    body = completion("", max_tokens, stream=stream)
    del body["prompt"]
    return body | {"messages": [{"role": "user", "content": content}]}


def read_json(folder: Path, pattern: str) -> dict[str, Any]:
    """The first JSON file of a folder that matches."""
    value = json.loads(sorted(folder.glob(pattern))[0].read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value
