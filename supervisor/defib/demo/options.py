"""The command line of the fake worker: vLLM's flags as far as they matter, and its own, all `--fake-*`.

vLLM's flags are accepted and mostly ignored, so that a real command runs unchanged; one that isn't
in the table ends with vLLM's message and exit code 2.
"""

import argparse
import re
import sys
from dataclasses import dataclass, field

VERSION = "0.32.0"
USAGE_EXIT_CODE = 2

_VALUED = [
    "tokenizer",
    "tokenizer-mode",
    "revision",
    "code-revision",
    "tokenizer-revision",
    "dtype",
    "kv-cache-dtype",
    "load-format",
    "download-dir",
    "quantization",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "distributed-executor-backend",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "max-num-batched-tokens",
    "block-size",
    "seed",
    "compilation-config",
    "attention-config",
    "attention-backend",
    "optimization-level",
    "kernel-config",
    "speculative-config",
    "moe-backend",
    "linear-backend",
    "cudagraph-capture-sizes",
    "max-cudagraph-capture-size",
    "shutdown-timeout",
    "uvicorn-log-level",
    "chat-template",
    "chat-template-content-format",
    "response-role",
    "tool-call-parser",
    "reasoning-parser",
    "lora-modules",
    "max-loras",
    "max-lora-rank",
    "api-server-count",
    "hf-overrides",
    "generation-config",
    "override-generation-config",
    "logits-processors",
    "middleware",
    "root-path",
    "ssl-keyfile",
    "ssl-certfile",
    "swap-space-gb",
    "cpu-offload-gb",
    "max-num-queued-reqs",
    "max-num-queued-tokens",
    "sse-keep-alive-interval",
]
_SWITCHES = [
    "trust-remote-code",
    "enable-prefix-caching",
    "enable-chunked-prefill",
    "async-scheduling",
    "enable-lora",
    "enable-sleep-mode",
    "enable-expert-parallel",
    "enable-auto-tool-choice",
    "enable-log-outputs",
    "enable-request-id-headers",
    "enable-server-load-tracking",
    "disable-custom-all-reduce",
    "disable-cascade-attn",
    "enable-flashinfer-autotune",
    "disable-uvicorn-access-log",
    "disable-fastapi-docs",
    "enable-force-include-usage",
    "skip-tokenizer-init",
    "enable-fault-tolerance",
]


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that the processes of one fake worker need to know."""

    model: str
    served_names: tuple[str, ...]
    host: str
    port: int
    uds: str | None
    api_keys: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    enforce_eager: bool
    log_requests: bool
    log_stats: bool
    start_s: float
    step_s: float
    first_token_s: float
    control: str | None
    faults: tuple[str, ...]
    eager_cures: bool
    start_fault: str | None
    never_ready: bool
    ignore_sigterm: bool
    hide_mark: bool
    uni: bool
    keep_alive: bool
    echo_prompts: bool
    ansi: bool
    flood_lines_per_s: float
    orphan: str | None
    time_scale: float
    max_life_s: int
    given: dict[str, object] = field(default_factory=dict)


def parse(argv: list[str], environment: dict[str, str]) -> Options:
    """Options of `argv` (without the program's name). Leaves with exit code 2 on what vLLM refuses."""
    arguments, unknown = _parser().parse_known_args(_spelled_as_declared(argv))
    if unknown:
        _refuse(f"unrecognized arguments: {' '.join(unknown)}")
    model = arguments.model_flag or arguments.model_tag or "fake/model"
    keys = list(arguments.api_key or [])
    if not keys and environment.get("VLLM_API_KEY"):
        keys = [environment["VLLM_API_KEY"]]
    faults = arguments.fake_fault or []
    return Options(
        model=model,
        served_names=tuple(arguments.served_model_name or [model]),
        host=arguments.host or "",
        port=arguments.port,
        uds=arguments.uds,
        api_keys=tuple(keys),
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        enforce_eager=arguments.enforce_eager,
        log_requests=arguments.enable_log_requests,
        log_stats=not arguments.disable_log_stats,
        start_s=arguments.fake_start_s,
        step_s=arguments.fake_step_ms / 1000,
        first_token_s=arguments.fake_first_token_ms / 1000,
        control=arguments.fake_control or environment.get("FAKE_CONTROL") or None,
        faults=tuple(faults),
        eager_cures=arguments.fake_eager_cures,
        start_fault=arguments.fake_start_fault,
        never_ready=arguments.fake_never_ready,
        ignore_sigterm=arguments.fake_ignore_sigterm,
        hide_mark=arguments.fake_hide_mark,
        uni=arguments.fake_uni,
        keep_alive=arguments.fake_keep_alive or environment.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1",
        echo_prompts=arguments.fake_echo_prompts,
        ansi=arguments.fake_ansi,
        flood_lines_per_s=arguments.fake_flood,
        orphan=arguments.fake_orphan,
        time_scale=arguments.fake_time_scale,
        max_life_s=arguments.fake_max_life_s,
        given=_given(arguments),
    )


def _spelled_as_declared(argv: list[str]) -> list[str]:
    """`--max_num_seqs` and `--compilation-config.mode 0` mean what vLLM makes of them."""
    out = []
    for argument in argv:
        if match := re.match(r"(--[A-Za-z0-9_-]+)(\.[\w.]+)?(=.*)?$", argument, re.DOTALL):
            name = match[1].replace("_", "-")
            argument = name + (match[3] or "")
        elif re.match(r"-cc(\.[\w.]+)?(=|$)", argument):
            argument = "--compilation-config" + ("=" + argument.split("=", 1)[1] if "=" in argument else "")
        elif re.fullmatch(r"-O\d", argument):
            argument = f"--optimization-level={argument[2:]}"
        out.append(argument)
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fakeworker serve",
        description="A fake vLLM server: true log lines, true processes, faults on command.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = _refuse  # type: ignore[method-assign, assignment]
    real = parser.add_argument_group("flags of vLLM that do something here")
    real.add_argument("model_tag", nargs="?")
    real.add_argument("--model", dest="model_flag")
    real.add_argument("--served-model-name", nargs="+")
    real.add_argument("--host")
    real.add_argument("--port", type=int, default=8000)
    real.add_argument("--uds")
    real.add_argument("--api-key", nargs="+")
    real.add_argument("--max-model-len", type=int, default=32768)
    real.add_argument("--max-num-seqs", type=int, default=256)
    real.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    real.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction, default=False)
    real.add_argument("--disable-log-stats", action="store_true")
    for name in _VALUED:
        real.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in _SWITCHES:
        real.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    _add_fake(parser.add_argument_group("its own"))
    return parser


def _add_fake(own: "argparse._ArgumentGroup") -> None:
    def number(name: str, default: float, text: str) -> None:
        own.add_argument(name, type=float, default=default, help=f"{text} (default {default})")

    def switch(name: str, text: str) -> None:
        own.add_argument(name, action="store_true", help=text)

    number("--fake-start-s", 0.0, "seconds of loading before ready")
    number("--fake-step-ms", 2.0, "milliseconds of one engine step: one token of every running request")
    number("--fake-first-token-ms", 0.0, "milliseconds before the first token of a request")
    number("--fake-flood", 0.0, "lines a second of progress bars with carriage returns and ANSI colours")
    number("--fake-time-scale", 1.0, "factor on the pauses of dying (1: as on a real GPU, 0: none)")
    own.add_argument("--fake-max-life-s", type=int, default=3600, help="every process ends itself then; 0: never")
    own.add_argument("--fake-control", metavar="FILE", help="control file that the worker watches; also FAKE_CONTROL")
    own.add_argument("--fake-fault", action="append", metavar="FAULT", help="a fault from the start on (see below)")
    own.add_argument("--fake-start-fault", metavar="KIND", help="fails while loading with this fault: exit code 1")
    own.add_argument("--fake-orphan", choices=("open", "closed"), help="leaves a setsid'ed grandchild behind")
    switch("--fake-eager-cures", "no fault strikes when --enforce-eager is given")
    switch("--fake-never-ready", "loads for ever; the port stays closed")
    switch("--fake-ignore-sigterm", "all processes ignore SIGTERM")
    switch("--fake-hide-mark", "erases the environment of the children in spite of SPT_NOENV")
    switch("--fake-uni", "one-GPU layout: EngineCore itself is the worker")
    switch("--fake-keep-alive", "as VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1: 503 for ever after an engine death")
    switch("--fake-echo-prompts", "logs the client's text with each request, as old versions do")
    switch("--fake-ansi", "colours the process tags as vLLM 0.12 to 0.30 do")


def _given(arguments: argparse.Namespace) -> dict[str, object]:
    """What vLLM prints as `non-default args`; never a key."""
    shown = {
        name: value
        for name, value in vars(arguments).items()
        if value not in (None, False) and not name.startswith("fake_") and name != "api_key"
    }
    model = shown.pop("model_flag", None) or shown.get("model_tag")
    return shown | {"model": model}


def _refuse(message: str) -> None:
    sys.stderr.write(
        "usage: vllm [-h] [-v]\n"
        "            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}\n"
        f"            ...\nvllm: error: {message}\n"
    )
    sys.exit(USAGE_EXIT_CODE)


EPILOG = """\
A FAULT is a kind or a JSON object, in --fake-fault, in the control file, or in a prompt as <|fault:KIND|>
(<|fault:KIND@N|>: when that request has N tokens; <|wait:MS|>: its first token comes MS later):

  {"fault": KIND, "times": 1, "at": "step", "after_tokens": 0, "min_running": 1,
   "unless_eager": false, "while_file": PATH, "lines_per_s": N, "seconds": S}

  times         strikes over all generations; each uses one up in the control file, the last removes it.
                Without it the fault strikes for ever.
  at            "step": in a step with a request (default of the kinds of the first group),
                "now": at once, idle or not (default of the others), "start": while loading
  after_tokens  not before a running request has that many tokens
  min_running   not before that many requests run
  unless_eager  never with --enforce-eager, so that the fallback cures it
  while_file    only while that file exists, so that clearing a cache cures it

kinds, in a step:  illegal_access assert misaligned illegal_instruction launch_failure launch_timeout
                   cublas cudnn triton nccl oom exception (engine dies by an error)
                   onnx segv (worker dies by a signal)  hang (no step any more, /health stays 200)
                   stream_error (an error object inside one 200 stream; the server goes on)
kinds, at once:    worker_kill  silent_death (EngineCore gone by SIGKILL)  root_kill (API server gone,
                   engine and worker stay)  orphan orphan_closed (a grandchild stays, with its output
                   open or with all files closed)  flood (lines_per_s for seconds)

POST /fake/raise answers 500 and logs the body inside the traceback of an unhandled exception.
Caches: a few files in $TRITON_CACHE_DIR or ~/.triton/cache. Shared memory: two psm_* segments.
"""
