"""The tracebacks of vLLM 0.32.0 as it prints them, frame for frame. Text only; decides nothing."""

from collections.abc import Iterable
from typing import NamedTuple

SITE = "/usr/local/lib/python3.11/site-packages/"
LIBRARY = "/usr/local/lib/python3.11/"
ENGINE_DEAD_TEXT = "EngineCore encountered an issue. See stack trace (above) for the root cause."
ENGINE_DEAD = f"vllm.v1.engine.exceptions.EngineDeadError: {ENGINE_DEAD_TEXT}"


class Frame(NamedTuple):
    """One frame: file below site-packages, line, function, source, and the part underlined (or "")."""

    file: str
    line: int
    function: str
    source: str
    underlined: str = ""


def render(frames: Iterable[Frame], last: str) -> str:
    """A whole traceback that ends with the exception's own text."""
    out = ["Traceback (most recent call last):"]
    for frame in frames:
        root = LIBRARY if frame.file.startswith(("concurrent/", "asyncio/", "multiprocessing/")) else SITE
        root = "" if frame.file.startswith("<") else root
        out.append(f'  File "{root}{frame.file}", line {frame.line}, in {frame.function}')
        out.append(f"    {frame.source}")
        if frame.underlined:
            out.append(" " * (4 + frame.source.index(frame.underlined)) + "^" * len(frame.underlined))
    return "\n".join([*out, last])


def _call(file: str, line: int, function: str, source: str) -> Frame:
    """A frame whose underlined part is the call on the right-hand side."""
    for opening in ("= ", "return "):
        if opening in source:
            return Frame(file, line, function, source, source.split(opening, 1)[1])
    return Frame(file, line, function, source)


WORKER_STEP = (
    _call("vllm/v1/executor/multiproc_executor.py", 1055, "_execute_worker_rpc", "output = func(*args, **kwargs)"),
    _call("vllm/v1/worker/worker_base.py", 370, "execute_model", "return self.worker.execute_model(scheduler_output)"),
    _call("torch/utils/_contextlib.py", 124, "decorate_context", "return func(*args, **kwargs)"),
    _call("vllm/v1/worker/gpu_worker.py", 1328, "execute_model", "output = self.model_runner.execute_model("),
    _call("torch/utils/_contextlib.py", 124, "decorate_context", "return func(*args, **kwargs)"),
    _call("vllm/v1/worker/gpu_model_runner.py", 4207, "execute_model", "model_output = self._model_forward("),
    _call("vllm/v1/worker/gpu_model_runner.py", 3645, "_model_forward", "return self.model("),
    _call("torch/nn/modules/module.py", 1778, "_wrapped_call_impl", "return self._call_impl(*args, **kwargs)"),
    _call("torch/nn/modules/module.py", 1789, "_call_impl", "return forward_call(*args, **kwargs)"),
    _call("vllm/model_executor/models/qwen2.py", 583, "forward", "hidden_states = self.model("),
)
_ENGINE_LOOP = (
    Frame("vllm/v1/engine/core.py", 1496, "run_engine_core", "engine_core.run_busy_loop()"),
    Frame("vllm/v1/fault_tolerance/engine_core_sentinel.py", 178, "run_with_fault_tolerance", "busy_loop_func(self)"),
    Frame("vllm/v1/engine/core.py", 1555, "run_busy_loop", "self._process_engine_step()"),
    _call("vllm/v1/engine/core.py", 1606, "_process_engine_step", "outputs, model_executed = self.step_fn()"),
    _call("vllm/v1/engine/core.py", 674, "step", "model_output = future.result()"),
    _call("vllm/v1/executor/multiproc_executor.py", 99, "result", "return super().result()"),
    _call("concurrent/futures/_base.py", 449, "result", "return self.__get_result()"),
    Frame("concurrent/futures/_base.py", 401, "__get_result", "raise self._exception"),
)
_RESPONSE = "vllm/v1/executor/multiproc_executor.py"
ENGINE_WORKER_FAILED = (
    *_ENGINE_LOOP,
    _call(_RESPONSE, 103, "_wait_for_response", "response = self.aggregate(self.get_response())"),
    Frame(_RESPONSE, 444, "get_response", "raise RuntimeError("),
)
ENGINE_CANCELLED = (
    *_ENGINE_LOOP,
    _call(_RESPONSE, 103, "_wait_for_response", "response = self.aggregate(self.get_response())"),
    _call(_RESPONSE, 440, "get_response", "status, result = mq.dequeue(timeout=dequeue_timeout)"),
    Frame(
        "vllm/distributed/device_communicators/shm_broadcast.py",
        971,
        "dequeue",
        "with self.acquire_read(timeout, indefinite) as buf:",
    ),
    Frame(
        "vllm/distributed/device_communicators/shm_broadcast.py", 867, "acquire_read", 'raise RuntimeError("cancelled")'
    ),
)
ENGINE_TIMED_OUT = (
    *_ENGINE_LOOP,
    _call(_RESPONSE, 103, "_wait_for_response", "response = self.aggregate(self.get_response())"),
    Frame(_RESPONSE, 447, "get_response", 'raise TimeoutError(f"RPC call to {method} timed out.") from e'),
)
ENGINE_UNI = (
    *_ENGINE_LOOP[:5],
    _call("vllm/v1/executor/uniproc_executor.py", 42, "result", "return super().result()"),
    *_ENGINE_LOOP[6:],
    _call("vllm/v1/executor/uniproc_executor.py", 38, "result", "output = self.async_output.get_output()"),
    Frame("vllm/v1/worker/gpu/async_utils.py", 50, "get_output", "self.copy_event.synchronize()"),
    Frame("torch/cuda/streams.py", 254, "synchronize", "super().synchronize()"),
)
ENGINE_START = (
    _call("vllm/v1/engine/core.py", 1470, "run_engine_core", "engine_core = EngineCoreProc(*args, **kwargs)"),
    Frame("vllm/v1/engine/core.py", 1120, "__init__", "super().__init__("),
    _call("vllm/v1/engine/core.py", 118, "__init__", "self.model_executor = executor_class(vllm_config)"),
    Frame("vllm/v1/executor/abstract.py", 109, "__init__", "self._init_executor()"),
)
OUTPUT_HANDLER = (
    _call("vllm/v1/engine/async_llm.py", 849, "output_handler", "outputs = await engine_core.get_output_async()"),
    Frame(
        "vllm/v1/engine/core_client.py",
        1235,
        "get_output_async",
        "raise self._format_exception(outputs) from None",
    ),
)
_MERGED = (
    Frame(
        "vllm/utils/async_utils.py",
        104,
        "merge_async_iterators",
        "async for item in iterator:  # type: ignore[union-attr]",
    ),
)
_GENERATE = (
    _call("vllm/v1/engine/async_llm.py", 767, "generate", "out = q.get_nowait() or await q.get()")._replace(
        underlined="await q.get()"
    ),
    Frame("vllm/v1/engine/output_processor.py", 92, "get", "raise output"),
    *OUTPUT_HANDLER,
)
COMPLETION_STREAM = (
    Frame(
        "vllm/entrypoints/openai/completion/serving.py",
        306,
        "completion_stream_generator",
        "async for prompt_idx, res in result_generator:",
    ),
    *_MERGED,
    *_GENERATE,
)
CHAT_STREAM = (
    Frame(
        "vllm/entrypoints/openai/chat_completion/serving.py",
        527,
        "chat_completion_stream_generator",
        "async for res in result_generator:",
    ),
    *_GENERATE,
)
API_START = (
    Frame("vllm/entrypoints/cli/main.py", 95, "main", "args.dispatch_function(args)"),
    Frame("vllm/entrypoints/cli/serve.py", 148, "cmd", "uvloop.run(run_server(args))"),
    Frame("vllm/entrypoints/openai/api_server.py", 773, "run_server_worker", "async with build_async_engine_client("),
    Frame("vllm/v1/engine/utils.py", 1213, "launch_core_engines", "wait_for_engine_startup("),
    Frame("vllm/v1/engine/utils.py", 1272, "wait_for_engine_startup", "raise RuntimeError("),
)
BIND = (
    Frame("vllm/entrypoints/cli/main.py", 95, "main", "args.dispatch_function(args)"),
    Frame("vllm/entrypoints/cli/serve.py", 148, "cmd", "uvloop.run(run_server(args))"),
    Frame("vllm/entrypoints/openai/api_server.py", 640, "create_server_socket", "sock.bind(addr)"),
)
ASGI = (
    _call("uvicorn/protocols/http/httptools_impl.py", 416, "run_asgi", "result = await app("),
    Frame("fastapi/applications.py", 1160, "__call__", "await super().__call__(scope, receive, send)"),
    Frame("starlette/middleware/errors.py", 186, "__call__", "raise exc"),
    Frame("starlette/routing.py", 288, "handle", "await self.app(scope, receive, send)"),
    Frame("vllm/entrypoints/serve/fake/api_router.py", 21, "fake_raise", "raise ValueError(text)"),
)
