"""`defib demo`, as a newcomer runs it, and its parts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from defib.cli.demo_clients import Client
from defib.cli.demo_timeline import Timeline, read_events, told

DEMO = (sys.executable, "-m", "defib.cli.main", "demo")
STEPS = {
    *("fault", "suspect", "verdict", "evidence", "kill", "gate", "caches"),
    *("launch", "ready", "canary", "proven", "replay", "settled", "report"),
}


@pytest.mark.process
def test_the_demo_shows_every_step_and_leaves_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        DEMO, env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 60
    lines = [line.split() for line in done.stdout.splitlines()]
    shown = [words[3] for words in lines if len(words) > 3 and words[1] == "s"]
    assert set(shown) >= STEPS
    assert "poisoned_context" in done.stdout
    assert "--enforce-eager" in done.stdout
    assert done.stdout.count("complete answer of") == 3
    assert list(tmp_path.glob("defib-*")) == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


@pytest.mark.process
def test_a_demo_that_cannot_start_says_why_and_keeps_its_log(tmp_path: Path) -> None:
    # The demo's folder is made before it starts, with a file where its state should be.
    broken = tmp_path / "broken"
    broken.mkdir()
    code = "import tempfile, sys; tempfile.mkdtemp = lambda **_: sys.argv.pop(); from defib.cli.main import main; "
    (broken / "state").write_text("in the way")
    command = (sys.executable, "-c", f"{code}raise SystemExit(main(['demo']))", str(broken))
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "The demo failed: the instance ended by itself with code 73" in done.stderr
    assert "cannot be written" in done.stderr
    assert "Kept in" in done.stdout


# --- clients ---


@pytest.fixture
def serve() -> Iterator[Callable[[int, str, bytes], int]]:
    servers: list[HTTPServer] = []

    def start(status: int, kind: str, body: bytes) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return int(servers[-1].server_port)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def choice(text: str, finish: str | None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish}]})


@pytest.mark.parametrize(
    "status, stream, body, complete, problem",
    [
        (200, False, choice("a", "length"), True, ""),
        (200, False, choice("a", None), False, "without a finish reason"),
        (500, False, '{"error": {}}', False, "HTTP 500"),
        (200, False, "nonsense", False, "JSONDecodeError"),
        (200, True, f"data: {choice('a', None)}\n\ndata: {choice('', 'stop')}\n\ndata: [DONE]\n\n", True, ""),
        (200, True, f": comment\n\ndata: {choice('a', 'stop')}\n\ndata: [DONE]\n\n", True, ""),
        (200, True, f"data: {choice('a', None)}\n\ndata: [DONE]\n\n", False, "without a finish reason"),
        (200, True, 'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n', False, "an error object"),
        (503, True, "", False, "HTTP 503"),
    ],
)
def test_a_client_calls_complete_what_is_complete(
    serve: Callable[[int, str, bytes], int], status: int, stream: bool, body: str, complete: bool, problem: str
) -> None:
    port = serve(status, "text/event-stream" if stream else "application/json", body.encode())
    client = Client(port, "m", "name", "prompt", 4, stream).wait(20)
    assert client.complete is complete
    assert problem in client.problem
    assert client.text == "a" if complete else True


# --- timeline ---


def test_a_line_says_when_and_how_long_since_the_one_before() -> None:
    timeline = Timeline(fault_at=100.0)
    assert timeline.line(100.0, "fault", "x") == "    0.00 s  +0.00  fault      x"
    assert timeline.line(101.25, "kill", "y") == "    1.25 s  +1.25  kill       y"
    assert timeline.line(101.5, "gate", "z") == "    1.50 s  +0.25  gate       z"


def test_steps_that_a_newcomer_needs_not_are_left_out() -> None:
    assert list(told(Timeline(0.0), {"event": "phase", "at": 1.0})) == []
    assert list(told(Timeline(0.0), {"event": "killed"})) == []
    (line,) = told(Timeline(0.0), {"event": "launch", "at": 1.0, "generation": 2, "rung": "eager"})
    assert "generation 2, with the fallback flag --enforce-eager" in line


def test_an_event_log_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert read_events(log) == []
    log.write_text('{"event": "a"}\nnonsense\n[]\n{"event": "b"}\n{"event": "half')
    assert [event["event"] for event in read_events(log)] == ["a", "b"]
