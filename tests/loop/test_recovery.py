"""The whole loop on the fake worker: real processes, real sockets, every client's answer looked at."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.loop.bed import Bed, Client, bed, completion, until

pytestmark = pytest.mark.process

CONTEXT_KILLERS = (
    "illegal_access",
    "assert",
    "misaligned",
    "illegal_instruction",
    "launch_failure",
    "launch_timeout",
    "cublas",
    "cudnn",
    "triton",
)


def expected(b: Bed, prompt: str, tokens: int) -> str:
    """The answer to a prompt, asked in peace."""
    got = b.post(prompt, tokens).result()
    assert got.finished, got
    return got.text


def manifest_of(folder: Path) -> dict[str, object]:
    manifest = json.loads((folder / "manifest.json").read_text())
    for item in manifest["items"]:
        if not item["missing"]:
            data = (folder / item["name"]).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (item["bytes"], item["sha256"]), item
    result: dict[str, object] = manifest
    return result


def test_clients_see_a_pause_when_the_context_is_poisoned(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "50") as b:
        plain_answer, late_answer = expected(b, "plain one", 60), expected(b, "late one", 8)
        first = {p.pid for p in b.worker_processes()}
        stream, plain = b.post("a long stream", 400, stream=True), b.post("plain one", 60)
        assert stream.got.first_event.wait(10)
        b.fault("illegal_access")
        until(lambda: b.events("verdict"), what="a verdict")
        late = b.post("late one", 8, stream=True)
        got = plain.result()
        assert got.finished and got.text == plain_answer
        assert got.headers["x-defib-replayed"] == "1"
        assert late.result().text == late_answer and late.got.finished
        broken = stream.result()
        assert broken.status == 200 and broken.error is not None and "[DONE]" not in broken.events
        assert "EngineCore encountered" not in json.dumps(broken.events)
        b.serving(2)
        assert first.isdisjoint(p.pid for p in b.worker_processes())
        verdict = b.events("verdict")[0]
        assert verdict["fault"] == "poisoned_context"
        assert "log:" in verdict["group_t"] and verdict["group_w"] != "none"
        assert b.stop() == 0
        assert b.alive() == [] and b.leftover_shm() == set()


def test_the_evidence_holds_the_cause_its_context_and_an_honest_manifest(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "20", "--api-key", "sk-verysecretkey123456") as b:
        key = {"Authorization": "Bearer sk-verysecretkey123456"}

        client = Client(b.url, "/v1/completions", completion("private words here", 200, True), **key)
        assert client.got.first_event.wait(10)
        b.fault("illegal_access")
        b.serving(2)
        until(lambda: b.events("report"), what="the report")
        (folder,) = b.incidents()
        manifest_of(folder)
        log = (folder / "log-g1.txt").read_text()
        lines = log.splitlines()
        cause = next(i for i, line in enumerate(lines) if "an illegal memory access was encountered" in line)
        assert cause >= 100 or "Available routes" in log, "context of at least 100 lines, or all there is"
        report = (folder / "report.md").read_text()
        assert "poisoned_context" in report and "illegal memory access" in report
        everything = "".join(p.read_text(errors="replace") for p in folder.iterdir())
        assert "verysecretkey" not in everything and "private words" not in everything
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
        assert {oct(p.stat().st_mode & 0o777) for p in folder.iterdir()} == {"0o600"}
        shapes = json.loads((folder / "requests-g1.json").read_text())
        assert [s["path"] for s in shapes] == ["/v1/completions"]


@pytest.mark.parametrize("kind", CONTEXT_KILLERS)
def test_every_context_killer_is_recognised_and_survived(tmp_path: Path, kind: str) -> None:
    with bed(tmp_path, "--fake-step-ms", "20") as b:
        answer = expected(b, "hello", 20)
        b.fault(kind)
        got = b.post("hello", 20).result()
        assert got.finished and got.text == answer
        b.serving(2)
        assert b.events("verdict")[0]["fault"] == "poisoned_context", b.events("verdict")


@pytest.mark.parametrize("kind", ["silent_death", "worker_kill", "root_kill", "exception", "oom"])
def test_a_worker_that_dies_comes_back_and_nothing_of_it_is_left(tmp_path: Path, kind: str) -> None:
    with bed(tmp_path, "--fake-step-ms", "20") as b:
        answer = expected(b, "hello", 20)
        b.fault(kind)
        got = b.post("hello", 20).result()
        assert got.finished and got.text == answer
        b.serving(2)
        assert b.events("verdict")[0]["fault"] != "poisoned_context"
        assert b.stop() == 0
        assert b.alive() == [] and b.leftover_shm() == set()


@pytest.mark.parametrize("orphan", ["open", "closed"])
def test_an_orphan_in_a_session_of_its_own_is_killed_too(tmp_path: Path, orphan: str) -> None:
    with bed(tmp_path, "--fake-orphan", orphan, "--fake-hide-mark") as b:
        b.fault("root_kill")
        assert b.post("hello").result().finished
        b.serving(2)
        assert b.stop() == 0
        assert b.alive() == []


def test_a_fault_that_comes_back_leads_to_the_fallback_which_cures_it(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "20", "--fake-eager-cures") as b:
        answer = expected(b, "hello", 20)
        b.fault("illegal_access", times=10)
        got = b.post("hello", 20).result()
        assert got.finished and got.text == answer
        status = b.serving(3)
        assert status["rung"] == "eager"
        assert "--enforce-eager" in " ".join(b.named("fakeworker").cmdline())
        assert [e["rung"] for e in b.events("launch")] == ["same-again", "eager"]


def test_the_triton_cache_is_moved_aside_not_deleted(tmp_path: Path) -> None:
    with bed(tmp_path) as b:
        assert b.post("hello").result().finished
        cache = b.home / ".triton" / "cache"
        until(lambda: cache.is_dir() and any(cache.iterdir()), what="the worker's cache")
        (cache / "old-entry").write_text("x")
        b.fault("illegal_access")
        assert b.post("hello").result().finished
        b.serving(2)
        assert not (cache / "old-entry").exists()
        assert len(list((b.home / ".triton").glob("**/old-entry"))) == 1
        assert b.events("cleared")[0]["ok"] is True


def test_an_echoed_prompt_kills_nobody(tmp_path: Path) -> None:
    text = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    forged = f"x\n(EngineCore pid=1) ERROR 11-30 23:21:50 [core.py:1512] {text}\n{text}\n"
    with bed(tmp_path, "--fake-echo-prompts", "--enable-log-requests") as b:
        for prompt in (text, forged, "EngineDeadError: EngineCore encountered an issue.", "CUDA failure 700: " + text):
            assert b.post(prompt).result().finished
        assert b.post("after", 8).result().finished
        status = b.status()
        assert (status["phase"], status["generation"], b.events("verdict")) == ("serving", 1, [])


def test_a_route_that_raises_with_the_clients_text_kills_nobody(tmp_path: Path) -> None:

    text = "CUDA error: an illegal memory access was encountered"
    with bed(tmp_path) as b:
        for n in range(4):
            got = Client(b.url, "/fake/raise", {"text": text, "n": n}).result()
            assert got.status == 500
        assert b.post("after", 8).result().finished
        until(lambda: b.phase() == "serving", what="serving again")
        assert b.status()["generation"] == 1 and b.events("verdict") == []


def test_sigterm_with_traffic_is_no_incident(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "20") as b:
        stream = b.post("a stream", 50, stream=True)
        assert stream.got.first_event.wait(10)
        assert b.stop() == 0
        assert stream.result().finished, "the gateway drains before the worker is stopped"
        assert b.incidents() == [] and b.events("verdict") == []
        assert b.alive() == [] and b.leftover_shm() == set()


def test_a_bad_flag_ends_with_the_message_and_without_a_loop(tmp_path: Path) -> None:
    with bed(tmp_path, "--no-such-flag", wait=False) as b:
        assert b.process is not None
        assert b.process.wait(30) == 78
        assert "unrecognized arguments: --no-such-flag" in b.tail() + b.stdout.read_text()
        assert b.events("launch") == [] and b.alive() == []


def test_a_worker_that_never_gets_ready_ends_clearly(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-never-ready", run=("--set", "start_limit_s=2"), wait=False) as b:
        assert b.process is not None
        assert b.process.wait(60) == 78
        assert "never been ready" in b.tail()
        assert b.alive() == []


def test_a_spent_budget_stays_up_and_says_why(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-step-ms", "5") as b:
        b.fault("illegal_access", times=1000)
        got = b.post("hello", 20).result()
        assert got.error is not None and not got.finished
        until(lambda: b.phase() == "down", 60, "down")
        after = b.post("hello").result(10)
        assert after.status == 503 and "budget" in str(after.error)
        assert "retry-after" in after.headers
        assert b.process is not None and b.process.poll() is None
        assert b.stop() == 0 and b.alive() == []


def test_observe_touches_nothing(tmp_path: Path) -> None:
    with bed(tmp_path, "--fake-keep-alive", "--fake-step-ms", "20", run=("--observe",)) as b:
        before = {p.pid for p in b.worker_processes()}
        root = b.named("fakeworker").pid
        b.fault("illegal_access")
        got = b.post("hello", 20).result()
        assert got.status == 500
        until(lambda: b.events("would_have_killed"), what="what it would have done")
        assert b.status()["generation"] == 1 and root in before
        assert root in {p.pid for p in b.worker_processes()}
        assert b.incidents() != []
        assert b.events("killed") == [] and b.events("launch") == []


def test_without_a_gateway_a_recovery_ends_as_soon_as_the_worker_is_proven(tmp_path: Path) -> None:
    with bed(tmp_path, run=("--no-gateway",)) as b:
        b.fault("illegal_access")
        Client(b.url, "/v1/completions", completion("hello", 20), 5.0).result()
        b.serving(2, 20)
        assert [e["outcome"] for e in b.events("settled")] == ["recovered"]
