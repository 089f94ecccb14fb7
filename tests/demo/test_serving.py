"""The fake worker while nothing is wrong: processes, answers, metrics, starts that fail."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.demo.clients import Client
from tests.demo.conftest import Fake, completion, segments, wait_until

from defib.demo.tokens import decode

pytestmark = pytest.mark.process
Start = Callable[..., Fake]


def environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0")


def without_setproctitle(folder: Path) -> dict[str, str]:
    (folder / "setproctitle.py").write_text("raise ImportError\n")
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', 'supervisor')}"}


def test_it_has_the_processes_of_vllm_with_their_names(fake: Start) -> None:
    worker = fake().ready()
    tree = worker.tree()
    assert tree["engine"].ppid() == tree["tracker"].ppid() == tree["root"].pid
    assert tree["worker"].ppid() == tree["engine"].pid
    assert Path(f"/proc/{tree['engine'].pid}/comm").read_text() == "VLLM::EngineCor\n"
    assert tree["worker"].cmdline()[0].strip() == "VLLM::Worker"
    assert {os.getsid(process.pid) for process in tree.values()} == {worker.process.pid}


@pytest.mark.parametrize("by_hand", [False, True])
def test_renaming_erases_the_environment_unless_spt_noenv_is_set(fake: Start, tmp_path: Path, by_hand: bool) -> None:
    extra = without_setproctitle(tmp_path) if by_hand else {}
    plain = fake(DEFIB_MARK="mark", **extra).ready().tree()
    kept = fake(DEFIB_MARK="mark", SPT_NOENV="1", **extra).ready().tree()
    hidden = fake("--fake-hide-mark", DEFIB_MARK="mark", SPT_NOENV="1", **extra).ready().tree()
    for name in ("engine", "worker"):
        assert b"DEFIB_MARK=mark" not in environ(plain[name].pid)
        assert b"DEFIB_MARK=mark" in environ(kept[name].pid)
        assert b"DEFIB_MARK=mark" not in environ(hidden[name].pid)
        assert hidden[name].name().startswith("VLLM::")
    assert b"DEFIB_MARK=mark" in environ(plain["root"].pid)


def test_a_stream_and_a_plain_answer_say_the_same_in_every_generation(fake: Start) -> None:
    texts = set()
    for worker in (fake().ready(), fake("--enforce-eager").ready()):
        for path, body in (
            ("/v1/completions", completion()),
            ("/v1/completions", completion(stream=True)),
        ):
            texts.add(Client(worker.url, path, body).start().join().text)
    assert len(texts) == 1
    assert texts.pop().count(" ") == 8


def test_different_prompts_get_different_answers_and_chat_answers_too(fake: Start) -> None:
    worker = fake().ready()
    messages = [{"role": "user", "content": "hello"}]
    chat = Client(worker.url, "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "stream": True})
    chat.start().join()
    assert chat.objects[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat.objects[-1]["choices"][0]["finish_reason"] == "length"
    assert chat.events[-1] == "[DONE]"
    one = worker.client.post("/v1/completions", json=completion("one")).json()
    two = worker.client.post("/v1/completions", json=completion("two")).json()
    assert len({one["choices"][0]["text"], two["choices"][0]["text"], chat.text}) == 3
    assert one["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 11,
        "completion_tokens": 8,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_a_continuation_by_token_ids_gives_the_rest_of_the_answer(fake: Start) -> None:
    worker = fake().ready()
    whole = worker.client.post("/v1/completions", json=completion(return_token_ids=True)).json()
    ids = whole["choices"][0]["token_ids"]
    prompt = [*worker.client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"], *ids[:3]]
    rest = worker.client.post("/v1/completions", json=completion(max_tokens=5) | {"prompt": prompt}).json()
    assert rest["choices"][0]["text"] == decode(ids[3:])


def test_heads_are_those_of_uvicorn(fake: Start) -> None:
    worker = fake().ready()
    stream = Client(worker.url, "/v1/completions", completion(stream=True)).start().join()
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["transfer-encoding"] == "chunked"
    assert list(stream.headers)[:2] == ["date", "server"]
    assert stream.headers["server"] == "uvicorn"
    health = worker.client.get("/health")
    assert (health.content, health.headers["content-length"]) == (b"", "0")


def test_the_clients_request_id_is_part_of_the_answers_id(fake: Start) -> None:
    worker = fake("--enable-log-requests").ready()
    answer = worker.client.post("/v1/completions", json=completion(), headers={"X-Request-Id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"
    assert "Received request cmpl-mine-0: params: SamplingParams(" in worker.stdout


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/completions", completion(model="other"), 404, "NotFoundError"),
        ("/v1/completions", completion(max_tokens=0), 400, "BadRequestError"),
        ("/v1/completions", completion(max_tokens=600), 400, "BadRequestError"),
        ("/v1/completions", completion("x" * 600), 400, "BadRequestError"),
        ("/v1/completions", {"max_tokens": 3}, 400, "BadRequestError"),
        ("/v1/chat/completions", completion(), 400, "Bad Request"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_answered(
    fake: Start, path: str, body: dict[str, object], status: int, kind: str
) -> None:
    worker = fake("--max-model-len", "512").ready()
    answer = worker.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert worker.client.post("/v1/completions", json=completion()).status_code == 200


def test_bytes_that_are_no_request_cost_only_their_own_connection(fake: Start) -> None:
    worker = fake().ready()
    for content in (b"{bad", b"[1]", b"\xff\xfe"):
        assert worker.client.post("/v1/completions", content=content).status_code == 400
    with httpx.Client(base_url=worker.url, trust_env=False) as client:
        assert client.get("/health", headers={"x": "y" * 70_000}).status_code == 400
    assert worker.health() == 200


def test_a_key_is_asked_for_where_vllm_asks(fake: Start) -> None:
    worker = fake("--api-key", "secret").ready()
    assert worker.client.post("/v1/completions", json=completion()).json() == {"error": "Unauthorized"}
    good = worker.client.post("/v1/completions", json=completion(), headers={"Authorization": "Bearer secret"})
    assert good.status_code == 200
    assert "secret" not in worker.stdout + worker.stderr


def test_the_socket_of_uds_serves_too(fake: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    worker = fake("--uds", str(path))
    wait_until(lambda: "Application startup complete" in worker.stderr, "it listens")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://worker") as client:
        assert client.post("/v1/completions", json=completion()).status_code == 200


def metric(worker: Fake, name: str) -> float:
    for line in worker.client.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name}")


def test_metrics_count_steps_and_a_client_that_leaves_is_aborted(fake: Start) -> None:
    worker = fake("--fake-step-ms", "10").ready()
    worker.client.post("/v1/completions", json=completion()).raise_for_status()
    assert metric(worker, "vllm:iteration_tokens_total_count") == 8
    assert metric(worker, "vllm:generation_tokens_total") == 8
    with worker.client.stream("POST", "/v1/completions", json=completion(max_tokens=2000, stream=True)) as answer:
        next(answer.iter_raw())
        assert metric(worker, "vllm:num_requests_running") == 1
    aborted = 'finished_reason="abort",model_name="tiny"} 1.0'
    wait_until(lambda: aborted in worker.client.get("/metrics").text, "the abort is counted")
    steps = metric(worker, "vllm:iteration_tokens_total_count")
    worker.client.post("/v1/completions", json=completion(max_tokens=1)).raise_for_status()
    assert metric(worker, "vllm:num_requests_running") == 0
    assert metric(worker, "vllm:iteration_tokens_total_count") < steps + 50


def test_a_plain_request_is_aborted_when_its_client_leaves(fake: Start) -> None:
    worker = fake("--fake-step-ms", "10").ready()
    with pytest.raises(httpx.ReadTimeout):
        worker.client.post("/v1/completions", json=completion(max_tokens=30_000), timeout=0.3)
    aborted = 'finished_reason="abort",model_name="tiny"} 1.0'
    wait_until(lambda: aborted in worker.client.get("/metrics").text, "the abort is counted", 5)


def test_it_writes_a_triton_cache_and_two_segments(fake: Start) -> None:
    before = segments()
    worker = fake().ready()
    assert len(list((worker.folder / "triton").rglob("*.cubin"))) == 2
    assert len(segments() - before) >= 2
    assert [path.name for path in worker.folder.iterdir() if path.name.startswith("vllm_dist_")]


def test_a_clean_sigterm_ends_with_0_and_leaves_nothing(fake: Start) -> None:
    before = segments()
    worker = fake().ready()
    mine = segments() - before
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    worker.wait_gone()
    assert "[shutdown] API server: shutdown triggered" in worker.stdout
    assert "EngineDeadError" not in worker.stdout
    wait_until(lambda: not mine & segments(), "the tracker removed the segments")


def test_an_unknown_flag_ends_with_2_before_anything_starts(fake: Start) -> None:
    worker = fake("--enforce-eagerly", "3")
    assert worker.exit_code() == 2
    assert worker.stderr.endswith("vllm: error: unrecognized arguments: --enforce-eagerly 3\n")
    assert worker.stdout == ""


def test_flags_are_understood_in_all_spellings(fake: Start) -> None:
    fake("--max_num_seqs=4", "-O0", "-cc.cudagraph_mode=NONE", "--attention-config.backend", "X").ready()


@pytest.mark.parametrize("extra", [(), ("--fake-uni",)])
def test_a_failed_start_ends_with_1_and_names_the_cause(fake: Start, extra: tuple[str, ...]) -> None:
    worker = fake("--fake-start-fault", "illegal_access", *extra)
    assert worker.exit_code() == 1
    assert "EngineCore failed to start." in worker.stdout
    assert "an illegal memory access was encountered" in worker.stdout
    assert "RuntimeError: Engine core initialization failed. See root cause above." in worker.stderr


def test_a_taken_port_ends_with_1(fake: Start) -> None:
    first = fake().ready()
    second = fake("--port", str(first.port))
    assert second.exit_code() == 1
    assert "Address already in use" in second.stderr


def test_one_that_never_gets_ready_keeps_its_port_closed(fake: Start) -> None:
    worker = fake("--fake-never-ready")
    wait_until(lambda: "Initializing model took" in worker.stdout, "the worker has loaded")
    assert worker.health() == 0
    assert worker.process.poll() is None


def test_a_slow_start_takes_its_time(fake: Start) -> None:
    began = time.monotonic()
    fake("--fake-start-s", "0.7").ready()
    assert time.monotonic() - began >= 0.7
