"""The fake worker's faults: what the log says, what each client gets, who is left, how it ends."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.demo.clients import Client
from tests.demo.conftest import Fake, alive, completion, segments, stays, wait_until

from defib.demo.faults import ERRORS

pytestmark = pytest.mark.process
Start = Callable[..., Fake]
SLOW = ("--fake-step-ms", "10")
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
ERROR_EVENT = (
    '{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
    '"type": "InternalServerError", "param": null, "code": 500}}'
)


def traffic(worker: Fake, tokens: int = 1000) -> tuple[Client, Client, Client]:
    """A completion stream, a chat stream, a plain request, all in flight and streaming."""
    messages = [{"role": "user", "content": "hello"}]
    clients = (
        Client(worker.url, "/v1/completions", completion(max_tokens=tokens, stream=True)),
        Client(
            worker.url,
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": tokens, "stream": True},
        ),
        Client(worker.url, "/v1/completions", completion("plain", max_tokens=tokens)),
    )
    for client in clients[:2]:
        assert client.start().first.wait(10)  # One by one: the log tells of them in the order they came.
    clients[2].start()
    wait_until(lambda: 'vllm:num_requests_running{engine="0",model_name="tiny"} 3.0' in page(worker), "3 run")
    return clients


def assert_told(clients: tuple[Client, Client, Client]) -> None:
    """The streams got vLLM's error event and [DONE] under 200, the plain one a 500."""
    for client in clients[:2]:
        client.join()
        assert client.status == 200
        assert client.events[-2:] == [ERROR_EVENT, "[DONE]"]
    plain = clients[2].join()
    assert plain.status == 500
    assert plain.objects[0]["error"]["message"] == DEAD


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_an_error_in_a_step_ends_the_engine_as_in_vllm(fake: Start, kind: str) -> None:
    before = segments()
    worker = fake(*SLOW).ready()
    mine = segments() - before
    clients = traffic(worker)
    worker.strike(kind, min_running=3)
    assert_told(clients)
    assert worker.exit_code() == 0
    worker.wait_gone()
    wait_until(lambda: not mine & segments(), "segments removed")
    name, text = ERRORS[kind]
    assert worker.stdout.count(f"{name}: {text.splitlines()[0]}") == 2
    assert "RuntimeError: Worker failed with error '" + text.splitlines()[0] in worker.stdout
    assert ("Assertion `srcIndex" in worker.stderr) == (kind == "assert")
    assert not worker.control.exists()


def records(text: str) -> dict[str, list[str]]:
    """Shape of the records from the first error on, by process; as in the golden file."""
    out: dict[str, list[str]] = {}
    lines = text.split("WorkerProc hit", 1)
    for line in (lines[0].splitlines()[-1] + "WorkerProc hit" + lines[1]).splitlines():
        match = re.match(r"\((\w+) pid=\d+\) (\w+) \S+ \S+ \[([\w.]+):\d+\] (\S.*)", line)
        if match:
            text = re.sub(r"pid \d+", "pid N", match[4])
            out.setdefault(match[1], []).append(f"{match[2]} {match[3]} {text[:60]}".rstrip())
    return out


def test_the_records_of_an_illegal_access_are_those_of_a_real_vllm(fake: Start) -> None:
    golden: dict[str, list[str]] = {}
    path = Path(__file__).with_name("vllm-0.32.0-illegal-access.txt")
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            process, _, rest = line.partition(" ")
            golden.setdefault(process, []).append(rest.rstrip())
    worker = fake(*SLOW, "--fake-time-scale", "1").ready()
    clients = traffic(worker)
    worker.strike("illegal_access", min_running=3)
    assert_told(clients)
    assert worker.exit_code() == 0
    assert records(worker.stdout) == golden
    traceback = worker.stdout_path.read_bytes().split(b"WorkerProc hit")[1].split(b"(EngineCore")[0]
    lines = traceback.split(b"\n")
    assert all(line.endswith(b"\r") for line in lines[:-2])
    assert not lines[-2].endswith(b"\r")


def test_the_dump_names_the_requests_of_the_batch(fake: Start) -> None:
    worker = fake(*SLOW).ready()
    clients = traffic(worker)
    worker.strike("illegal_access", min_running=3)
    assert_told(clients)
    worker.exit_code()
    ids = {client.objects[0]["id"] for client in clients[:2]}
    dump = next(line for line in worker.stdout.splitlines() if "Dumping scheduler output" in line)
    assert all(name in dump for name in ids)
    assert "num_running_reqs=3" in worker.stdout


def test_health_says_503_between_the_engines_death_and_the_end(fake: Start) -> None:
    worker = fake(*SLOW, "--fake-time-scale", "10").ready()
    clients = traffic(worker)
    worker.strike("illegal_access")
    assert_told(clients)
    assert worker.health() == 503
    wait_until(lambda: worker.health() == 0, "the port is closed")


@pytest.mark.parametrize(("kind", "code"), [("worker_kill", -9), ("segv", -11), ("onnx", -6)])
def test_a_worker_that_dies_by_a_signal_takes_the_server_along(fake: Start, kind: str, code: int) -> None:
    worker = fake(*SLOW).ready()
    clients = traffic(worker)
    worker.strike(kind)
    assert_told(clients)
    assert worker.exit_code() == 0
    worker.wait_gone()
    assert f"Worker proc VllmWorker-0 died unexpectedly (exit code: {code})" in worker.stdout
    assert "RuntimeError: cancelled" in worker.stdout
    assert ("CUDA failure 700: an illegal memory access" in worker.stderr) == (kind == "onnx")


def test_an_engine_that_is_killed_says_nothing_and_its_worker_lives_on(fake: Start) -> None:
    worker = fake(*SLOW).ready()
    engine = worker.tree()["engine"]
    clients = traffic(worker)
    worker.strike("silent_death")
    assert_told(clients)
    assert worker.exit_code() == 0
    assert not alive(engine)
    worker.wait_gone()
    assert "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup" in worker.stdout
    assert "Dumping" not in worker.stdout
    assert "Parent process exited, terminating worker queues" in worker.stdout


def test_an_idle_engine_can_die_too(fake: Start) -> None:
    worker = fake().ready()
    worker.strike("worker_kill")
    assert worker.exit_code() == 0
    worker.wait_gone()


def test_a_killed_api_server_leaves_engine_and_worker_alive_with_the_port_free(fake: Start) -> None:
    worker = fake(*SLOW).ready()
    tree = worker.tree()
    clients = traffic(worker)
    worker.strike("root_kill")
    assert worker.exit_code() == -signal.SIGKILL
    assert all(client.join().broken for client in clients)
    assert worker.health() == 0
    wait_until(lambda: tree["engine"].ppid() != worker.process.pid, "re-parented")
    stays(lambda: alive(tree["engine"]) and alive(tree["worker"]), "engine and worker alive")


def test_in_a_hang_health_is_200_and_the_counters_freeze(fake: Start) -> None:
    worker = fake(*SLOW).ready()
    tree = worker.tree()
    clients = traffic(worker)
    worker.strike("hang")
    wait_until(lambda: not worker.control.exists(), "it hangs")
    frozen = wait_until(lambda: (page(worker) == page(worker)) and page(worker), "the counters stand still")
    late = Client(worker.url, "/v1/completions", completion("late")).start()
    assert worker.health() == 200
    assert page(worker) == frozen
    assert "num_requests_running" in frozen
    tree["worker"].terminate()
    stays(lambda: alive(tree["worker"]), "a hung worker is deaf for SIGTERM")
    worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not alive(tree["worker"]), "the engine is killed")
    wait_until(lambda: "Waiting for connections to close" in worker.stderr, "it waits for its clients")
    assert worker.process.poll() is None
    worker.stop()
    assert all(client.join().broken for client in (*clients, late))


def page(worker: Fake) -> str:
    names = ("vllm:num_requests_running", "vllm:iteration_tokens_total_count", "vllm:generation_tokens_total")
    lines = worker.client.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if line.startswith(names))


def test_a_hang_times_out_when_the_engine_is_told_so(fake: Start) -> None:
    worker = fake(*SLOW, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="0.3").ready()
    clients = traffic(worker)
    worker.strike("hang")
    assert_told(clients)
    assert worker.exit_code() == 0
    assert "TimeoutError: RPC call to execute_model timed out." in worker.stdout


def test_a_stop_with_traffic_looks_like_a_crash_to_the_clients(fake: Start) -> None:
    worker = fake(*SLOW).ready()
    clients = traffic(worker)
    worker.process.send_signal(signal.SIGTERM)
    assert_told(clients)
    assert worker.exit_code() == 0
    worker.wait_gone()
    assert "[shutdown] API server: shutdown triggered" in worker.stdout
    assert "vllm.v1.engine.exceptions.EngineDeadError" in worker.stdout
    assert "CUDA error" not in worker.stdout


def test_one_that_ignores_sigterm_serves_on(fake: Start) -> None:
    worker = fake("--fake-ignore-sigterm").ready()
    for process in worker.tree().values():
        process.terminate()
    assert worker.client.post("/v1/completions", json=completion()).status_code == 200


def test_with_keep_alive_it_says_503_for_ever(fake: Start) -> None:
    worker = fake(*SLOW, VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1").ready()
    tree = worker.tree()
    clients = traffic(worker)
    worker.strike("illegal_access")
    assert_told(clients)
    wait_until(lambda: not alive(tree["engine"]) and not alive(tree["worker"]), "the engine has gone")
    assert worker.health() == 503
    assert worker.client.post("/v1/completions", json=completion()).status_code == 500
    assert worker.client.get("/v1/models").status_code == 200
    assert "Process EngineCore:\nTraceback" in worker.stderr
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0


def test_the_one_gpu_layout_has_no_worker_and_fails_in_the_engine(fake: Start) -> None:
    worker = fake(*SLOW, "--fake-uni").ready()
    assert set(worker.tree()) == {"root", "tracker", "engine"}
    clients = traffic(worker)
    worker.strike("illegal_access")
    assert_told(clients)
    assert worker.exit_code() == 0
    assert "(Worker" not in worker.stdout
    fatal = worker.stdout.split("EngineCore encountered a fatal error.")[1]
    assert "torch.AcceleratorError: CUDA error: an illegal memory access" in fatal


def test_a_magic_word_in_a_prompt_strikes_when_its_request_runs(fake: Start) -> None:
    worker = fake(*SLOW).ready()
    poison = Client(worker.url, "/v1/completions", completion("<|fault:illegal_access@3|>", 50, stream=True))
    assert poison.start().join().events[-2:] == [ERROR_EVENT, "[DONE]"]
    assert len(poison.objects) - 1 == 3
    assert worker.exit_code() == 0


def test_a_fault_strikes_as_often_as_the_control_file_says(fake: Start) -> None:
    for left in (1, 0):
        worker = fake().ready()
        if left:
            worker.strike("illegal_access", times=2)
            control = worker.control
        else:
            control.rename(worker.control)
        assert worker.client.post("/v1/completions", json=completion()).status_code == 500
        assert worker.exit_code() == 0
        control = worker.control
        assert control.exists() == bool(left)


def test_the_fallback_cures_a_fault_that_is_made_so(fake: Start) -> None:
    for flags, expected in (((), 500), (("--enforce-eager",), 200)):
        worker = fake("--fake-fault", '{"fault": "illegal_access", "unless_eager": true}', *flags).ready()
        assert worker.client.post("/v1/completions", json=completion()).status_code == expected
        cured = fake("--fake-fault", "illegal_access", "--fake-eager-cures", *flags).ready()
        assert cured.client.post("/v1/completions", json=completion()).status_code == expected


def test_a_fault_can_wait_for_the_removal_of_a_file(fake: Start, tmp_path: Path) -> None:
    bad = tmp_path / "bad.cubin"
    worker = fake("--fake-fault", f'{{"fault": "illegal_access", "while_file": "{bad}"}}').ready()
    assert worker.client.post("/v1/completions", json=completion()).status_code == 200
    bad.touch()
    assert worker.client.post("/v1/completions", json=completion()).status_code == 500


def test_an_error_inside_one_stream_leaves_the_others_alone(fake: Start) -> None:
    worker = fake(*SLOW).ready()
    good = Client(worker.url, "/v1/completions", completion(max_tokens=60, stream=True)).start()
    bad = Client(worker.url, "/v1/completions", completion("<|fault:stream_error@2|>", 60, stream=True)).start()
    assert bad.join().events[-2:] == [ERROR_EVENT, "[DONE]"]
    assert good.join().objects[-1]["choices"][0]["finish_reason"] == "length"
    assert worker.health() == 200
    assert worker.client.post("/v1/completions", json=completion()).status_code == 200


@pytest.mark.parametrize("form", ["open", "closed"])
def test_an_orphan_stays_behind_without_a_mark(fake: Start, form: str) -> None:
    worker = fake("--fake-orphan", form, DEFIB_MARK="mark", SPT_NOENV="1").ready()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    worker.wait_gone()
    orphan = wait_until(
        lambda: [child for child in psutil.Process().children() if child.name() == "VLLM::Orphan"], "an orphan"
    )[0]
    assert b"DEFIB_MARK" not in Path(f"/proc/{orphan.pid}/environ").read_bytes()
    files = {str(path.resolve()) for path in Path(f"/proc/{orphan.pid}/fd").iterdir()}
    assert (str(worker.stdout_path) in files) == (form == "open")
    assert not files or form == "open"
    orphan.terminate()
    assert alive(orphan)


def test_a_flood_writes_carriage_returns_and_colours_while_it_serves(fake: Start) -> None:
    worker = fake().ready()
    worker.strike("flood", lines_per_s=5000, seconds=0.5)
    wait_until(lambda: worker.stderr.count("% Completed") > 1000, "a flood")
    assert "\r\x1b[36m" in worker.stderr_path.read_bytes().decode()
    assert worker.client.post("/v1/completions", json=completion()).status_code == 200


def test_the_clients_text_is_echoed_on_demand(fake: Start) -> None:
    worker = fake("--fake-echo-prompts", "--fake-ansi").ready()
    text = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert worker.client.post("/v1/completions", json=completion(text)).status_code == 200
    line = next(line for line in worker.stdout.splitlines() if text in line)
    assert re.match(r"\x1b\[0;36m\(APIServer pid=\d+\)\x1b\[0;0m INFO .*Received request cmpl-", line)


def test_a_route_that_raises_logs_the_clients_text_in_a_traceback(fake: Start) -> None:
    worker = fake().ready()
    text = "x\nRuntimeError: CUDA error: an illegal memory access was encountered"
    answer = worker.client.post("/fake/raise", content=text)
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    wait_until(lambda: text in worker.stderr, "logged")
    assert "ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n" in worker.stderr
    assert worker.health() == 200
