"""The fake worker against the real vLLM: what it imitates is asked of both and must look the same.

One start of each. The numbers and texts differ; names, order and shapes must not.
"""

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.demo.conftest import Fake
from tests.engines.bed import MODEL_NAME, Bed, chat, completion, wait_until
from tests.engines.clients import Client

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
IGNORED_HEADERS = {"date", "content-length"}
# Of a plain answer the fake leaves out what no client of ours reads.
OPTIONAL_KEYS = {
    "prompt_logprobs",
    "prompt_token_ids",
    "routed_experts",
    "prompt_text",
    "ec_transfer_params",
    "metrics",
}


def shape(value: object) -> object:
    """Names and types of a JSON value, without its numbers and texts."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items() if name not in OPTIONAL_KEYS}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def look(client: Client) -> dict[str, object]:
    """What can be compared of an answer."""
    first, last = client.objects[0], client.objects[-1]
    return {
        "status": client.status,
        "headers": {name: value for name, value in client.headers.items() if name not in IGNORED_HEADERS},
        "first": shape(first),
        "last": shape(last),
        "events": len(client.events),
        "end": client.events[-1] if client.body.get("stream") else None,
        "finish": client.finish_reason,
    }


def requests(url: str) -> dict[str, Client]:
    ids = {"return_token_ids": True}
    usage = {"stream_options": {"include_usage": True}}
    bodies = {
        "plain": ("/v1/completions", completion("hello", 4)),
        "stream": ("/v1/completions", completion("hello", 4, stream=True)),
        "ids": ("/v1/completions", completion("hello", 4, stream=True) | ids),
        "usage": ("/v1/completions", completion("hello", 4, stream=True) | usage),
        "chat": ("/v1/chat/completions", chat("hello", 4)),
        "chat stream": ("/v1/chat/completions", chat("hello", 4, stream=True)),
        "chat ids": ("/v1/chat/completions", chat("hello", 4, stream=True) | ids),
        "chat usage": ("/v1/chat/completions", chat("hello", 4, stream=True) | usage),
        "no model": ("/v1/completions", completion("hello", 4) | {"model": "other"}),
        "too long": ("/v1/completions", completion("hello", 5000)),
        "none": ("/v1/completions", completion("hello", 0)),
    }
    return {name: Client(url, path, body).start().join(60) for name, (path, body) in bodies.items()}


def die(strike: Callable[[], None], running: Callable[[], int], url: str) -> list[tuple[int, list[str]]]:
    """An illegal access under two streams and a plain request: status and last events of each."""
    clients = [Client(url, "/v1/completions", completion("one", 400, stream=True)).start()]
    assert clients[0].delivering.wait(60)
    clients.append(Client(url, "/v1/chat/completions", chat("two", 400, stream=True)).start())
    assert clients[1].delivering.wait(60)
    clients.append(Client(url, "/v1/completions", completion("three", 400)).start())
    wait_until(lambda: running() == 3, "three run", 30)
    strike()
    out = []
    for client in clients:
        client.join(60)
        last = client.events[-2:] if client.body["stream"] else [bytes(client.raw).decode()]
        out.append((client.status, last))
    return out


def records(path: Path) -> dict[str, list[str]]:
    """Process, level, file and beginning of each record from the first error on; frames left out."""
    out: dict[str, list[str]] = {}
    text = path.read_text("utf-8", "replace")
    for line in text[text.rindex("\n", 0, text.index("WorkerProc hit")) :].splitlines():
        if match := re.match(r"\((\w+) pid=\d+\) (\w+) \S+ \S+ \[([\w.]+):\d+\] (\S.*)", line):
            start = re.sub(r"pid \d+", "pid N", match[4])[:60]
            out.setdefault(match[1], []).append(f"{match[2]} {match[3]} {start}")
    return out


def test_the_fake_worker_looks_like_the_real_one(start: Callable[..., Bed], tmp_path: Path) -> None:
    flags = ("--fake-step-ms", "20", "--served-model-name", MODEL_NAME, "--max-model-len", "512")
    fake = Fake(tmp_path, flags, {})
    try:
        real = start(direct=True).ready()
        fake.ready()
        theirs, ours = requests(real.url), requests(fake.url)
        for name, client in theirs.items():
            assert look(ours[name]) == look(client), name
        for path in ("/health", "/version", "/load", "/ping", "/nope"):
            a, b = (httpx.get(url + path, trust_env=False) for url in (real.url, fake.url))
            assert (a.status_code, a.content, set(a.headers)) == (b.status_code, b.content, set(b.headers))

        def running() -> int:
            page = fake.client.get("/metrics").text
            found = re.search(r"^vllm:num_requests_running\{.*\} ([\d.]+)$", page, re.MULTILINE)
            return int(float(found[1])) if found else -1

        told_by_real = die(lambda: real.strike("illegal"), real.running, real.url)
        told_by_fake = die(lambda: fake.strike("illegal_access"), running, fake.url)
        assert told_by_fake == told_by_real
        assert (fake.exit_code(), real.process.wait(60)) == (0, 0)
        assert records(fake.stdout_path) == records(real.stdout_path)
    finally:
        fake.stop()
