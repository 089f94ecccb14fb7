"""Writes log records as vLLM 0.32.0 does, byte for byte in shape, and holds the fixed ones.

A record goes out with one write, so that lines of different processes never mix. Continuation lines
repeat the prefix and are joined by CR LF: measured on the CPU build, every line of a traceback but
the last ends in a carriage return.
"""

import os
import time

from defib.demo.options import VERSION, Options

STDOUT, STDERR = 1, 2
_CYAN, _RESET = "\x1b[0;36m", "\x1b[0;0m"


class Log:
    """The logger of one process, named as vLLM names it (`APIServer`, `EngineCore`, `Worker`)."""

    def __init__(self, name: str, *, ansi: bool = False) -> None:
        self._name = name
        self._ansi = ansi

    def rename(self, name: str) -> None:
        """vLLM's worker is `VllmWorker-0` until its device is ready, then `Worker`."""
        self._name = name

    def info(self, source: str, text: str) -> None:
        """`source` is `file.py:line`."""
        self._record("INFO", source, text)

    def warning(self, source: str, text: str) -> None:
        """As `info`."""
        self._record("WARNING", source, text)

    def error(self, source: str, text: str) -> None:
        """As `info`; a traceback is part of the text."""
        self._record("ERROR", source, text)

    def _record(self, level: str, source: str, text: str) -> None:
        tag = f"({self._name} pid={os.getpid()})"
        if self._ansi:
            tag = f"{_CYAN}{tag}{_RESET}"
        prefix = f"{tag} {level} {time.strftime('%m-%d %H:%M:%S')} [{source}] "
        write(STDOUT, prefix + text.replace("\n", "\r\n" + prefix) + "\n")


def write(descriptor: int, text: str) -> None:
    """Write all of a text, blocking as Python's own streams do; a closed pipe is forgotten."""
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        pass


def access(client: str, method: str, target: str, status: int, phrase: str) -> None:
    """uvicorn's access line, on stdout, without any prefix."""
    write(STDOUT, f'INFO:     {client} - "{method} {target} HTTP/1.1" {status} {phrase}\n')


def uvicorn(text: str, level: str = "INFO") -> None:
    """uvicorn's own lines, on stderr."""
    write(STDERR, f"{level + ':':<10}{text}\n")


def banner(log: Log, options: Options) -> None:
    """What the API server says before anything is loaded."""
    for line in (
        "",
        "       █     █     █▄   ▄█",
        f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {VERSION}",
        f"  █▄█▀ █     █     █     █  model   {options.model}",
        "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
        "",
    ):
        log.info("api_utils.py:347", line)
    log.info("api_utils.py:286", f"non-default args: {options.given}")
    log.info("model.py:733", "Resolved architecture: Qwen2ForCausalLM")
    log.info("model.py:2152", f"Using max model len {options.max_model_len}")
    if options.enforce_eager:
        log.warning(
            "vllm.py:1703",
            "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup. This is equivalent "
            "to setting -cc.mode=none -cc.cudagraph_mode=none and --kernel_config.enable_jit_warmup=False",
        )
    log.info("compilation.py:317", "Enabled custom fusions: norm_quant, act_quant")


def config_text(options: Options) -> str:
    """The long description of the engine's configuration, as in the start line and in the dump."""
    return (
        f"model='{options.model}', speculative_config=None, tokenizer='{options.model}', "
        "skip_tokenizer_init=False, tokenizer_mode=auto, revision=None, tokenizer_revision=None, "
        f"trust_remote_code=False, dtype=torch.bfloat16, max_seq_len={options.max_model_len}, "
        "download_dir=None, load_format=auto, tensor_parallel_size=1, pipeline_parallel_size=1, "
        "data_parallel_size=1, decode_context_parallel_size=1, disable_custom_all_reduce=True, "
        f"quantization=None, enforce_eager={options.enforce_eager}, kv_cache_dtype=auto, device_config=cuda, "
        "structured_outputs_config=StructuredOutputsConfig(backend='auto'), seed=0, "
        f"served_model_name={options.served_names[0]}, enable_prefix_caching=True, enable_chunked_prefill=True"
    )


def engine_ready(log: Log, options: Options) -> None:
    """What EngineCore says at the end of loading."""
    log.info("kv_cache_utils.py:2327", "GPU KV cache size: 2,097,152 tokens, Maximum concurrency: 4096.00x")
    log.info("core.py:402", "init engine (profile, create kv cache, warmup model) took 0.36 s")
    if not options.enforce_eager:
        log.info("gpu_model_runner.py:6120", "Graph capturing finished in 1 secs, took 0.04 GiB")


ROUTES = (
    ("/openapi.json", "GET, HEAD"),
    ("/docs", "GET, HEAD"),
    ("/docs/oauth2-redirect", "GET, HEAD"),
    ("/redoc", "GET, HEAD"),
    ("/load", "GET"),
    ("/version", "GET"),
    ("/kv_event_sources", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/systemone", "POST"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/invocations", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/chat/completions/batch", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}/cancel", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/generative_scoring", "POST"),
    ("/scale_elastic_ep", "POST"),
    ("/is_scaling_elastic_ep", "POST"),
    ("/v1/chat/completions/render", "POST"),
    ("/v1/messages/render", "POST"),
    ("/v1/completions/render", "POST"),
    ("/v1/responses/render", "POST"),
    ("/v1/chat/completions/derender", "POST"),
    ("/v1/completions/derender", "POST"),
    ("/inference/v1/generate", "POST"),
    ("/inference/v1/abort_requests", "POST"),
)


def serving(log: Log, address: str) -> None:
    """What the API server says when the engine is ready; uvicorn's own lines follow."""
    log.info("entry.py:136", "Supported tasks: ['generate']")
    log.info("entry.py:140", f"Starting vLLM server on {address}")
    log.info("launcher.py:186", "Available routes are:")
    for path, methods in ROUTES:
        log.info("launcher.py:195", f"Route: {path}, Methods: {methods}")


def engine_manager_stop(log: Log, engine_pid: int, worker_pid: int | None) -> None:
    """How the API server puts an end to the engine that it finds still there."""
    log.info("core_client.py:770", "[shutdown] MPClient: start timeout=0s")
    log.info("core_client.py:772", "[shutdown] MPClient: stopping engine manager")
    log.info("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
    log.warning("utils.py:648", "[shutdown] Process manager: force killing remaining processes count=1")
    log.warning(
        "utils.py:653",
        f"[shutdown] Process manager: force killing remaining process EngineCore pid {engine_pid}",
    )
    if worker_pid is not None:
        log.warning("system_utils.py:225", f"[shutdown] force killing sub process VLLM::Worker pid {worker_pid}")


def engine_manager_stopped(log: Log) -> None:
    """The end of the same."""
    log.info("core_client.py:774", "[shutdown] MPClient: engine manager stopped")
    log.info("core_client.py:775", "[shutdown] MPClient: cleaning up background resources")
    log.info("core_client.py:777", "[shutdown] MPClient: complete")
