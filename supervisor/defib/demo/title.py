"""Renames a process the way vLLM does (setproctitle), with the side effect that erases its environment.

setproctitle overwrites the memory of the arguments *and of the environment*, so that
`/proc/PID/environ` reads as zeros. With `SPT_NOENV` set it keeps to the arguments. Where the module
isn't installed the same is done here by hand. Must not fail: a process without a title still works.
"""

import ctypes
import os
from pathlib import Path

_PR_SET_NAME = 15
_COMM_BYTES = 15
# Numbers of the fields of /proc/self/stat that hold the two areas (man 5 proc), from 1.
_ARG_START, _ENV_END = 48, 51


def set_title(title: str, *, erase_environment: bool = False) -> None:
    """Give this process the title; `erase_environment` forces the erasure in spite of `SPT_NOENV`."""
    if erase_environment:
        _write_by_hand(title, keep_environment=False)
        return
    try:
        import setproctitle
    except ImportError:
        _write_by_hand(title, keep_environment=bool(os.environ.get("SPT_NOENV")))
    else:
        setproctitle.setproctitle(title)


def _write_by_hand(title: str, *, keep_environment: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:_COMM_BYTES] + b"\0", 0, 0, 0)
    arg_start, arg_end, env_start, env_end = _areas()
    if not 0 < arg_start < arg_end:
        return
    if not keep_environment and 0 < env_start < env_end:
        _move_environment()
        ctypes.memset(env_start, 0, env_end - env_start)
    room = arg_end - arg_start
    ctypes.memmove(arg_start, title.encode()[: room - 1].ljust(room, b"\0"), room)


def _areas() -> tuple[int, int, int, int]:
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    # The command name may hold blanks and brackets; what follows its last bracket starts with field 3.
    fields = stat[stat.rindex(")") + 2 :].split()
    start, end, env_start, env_end = (int(field) for field in fields[_ARG_START - 3 : _ENV_END - 2])
    return start, end, env_start, env_end


def _move_environment() -> None:
    """Give every variable fresh memory first: the C library must not read from what is erased."""
    for name, value in os.environ.items():
        os.putenv(name, value)
