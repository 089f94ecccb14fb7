"""The model that fails on request: a Qwen2 whose forward looks for a trigger first.

Triggers, looked for at each forward pass of a served batch:

- the file named by `FAULTPLUG_FILE`, whose content is `MODE` or `MODE N`: strike `N` times over all
  generations (default 1), then the file is gone; `MODE always` strikes for ever;
- a magic token in the batch: `<|fault|>` (illegal access) or `<|hang|>`, by the ids in
  `FAULTPLUG_FAULT_ID` and `FAULTPLUG_HANG_ID`. 0 turns it off, which is the default: random prompts
  of a load generator contain special tokens.

`FAULTPLUG_DELAY` seconds are slept in each pass, so that streams last long enough to be watched.
Modes: illegal, assert, oom, exception, hang, segv, kill, exit.
"""

import os
import signal
import time

import torch
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

_CUDA = {
    "illegal": ("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
    "assert": ("device-side assert triggered", "cudaErrorAssert"),
}


def cuda_error(mode):
    """The exception that PyTorch 2.13 raises for a sticky CUDA error, word for word."""
    text, name = _CUDA[mode]
    return torch.AcceleratorError(
        f"CUDA error: {text}\n"
        f"Search for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


def strike(mode):
    """Do what `mode` says. Returns only for a mode that it doesn't know, which is an error."""
    if mode in _CUDA:
        raise cuda_error(mode)
    if mode == "oom":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
            "of which 1.06 GiB is free."
        )
    if mode == "exception":
        raise RuntimeError("The size of tensor a (64) must match the size of tensor b (65)")
    if mode == "hang":
        while True:
            time.sleep(3600)
    if mode in ("segv", "kill"):
        os.kill(os.getpid(), signal.SIGSEGV if mode == "segv" else signal.SIGKILL)
        time.sleep(60)
    if mode == "exit":
        os._exit(1)
    raise ValueError(f"defib_faultplug: unknown mode {mode!r}")


def take(path):
    """Read the trigger file and use up one strike; None if there is no (complete) trigger."""
    try:
        with open(path, encoding="utf-8") as file:
            words = file.read().split()
    except FileNotFoundError:
        return None
    if not words:
        return None
    mode, count = words[0], words[1] if len(words) > 1 else "1"
    if count == "1":
        os.unlink(path)
    elif count != "always":
        _replace(path, f"{mode} {int(count) - 1}")
    return mode


def _replace(path, text):
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


class FaultyQwen2ForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with a trigger in front of its forward pass."""

    FAULT_ID = int(os.environ.get("FAULTPLUG_FAULT_ID", "0"))
    HANG_ID = int(os.environ.get("FAULTPLUG_HANG_ID", "0"))
    DELAY_S = float(os.environ.get("FAULTPLUG_DELAY", "0"))
    FILE = os.environ.get("FAULTPLUG_FILE", "")

    def forward(self, input_ids, positions, *args, **kwargs):
        if self.FILE and (mode := take(self.FILE)):
            strike(mode)
        if self.DELAY_S:
            time.sleep(self.DELAY_S)
        if input_ids is not None:
            for token, mode in ((self.FAULT_ID, "illegal"), (self.HANG_ID, "hang")):
                if token and bool((input_ids == token).any()):
                    strike(mode)
        return super().forward(input_ids, positions, *args, **kwargs)
