"""The exit codes of `defib`, in one table, and the exception that ends a command with one of them.

Codes from 64 on have the meaning that sysexits.h gives them; `docs/operating.md` lists all.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Every code that `defib` itself ends with."""

    ORDERED = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    BUDGET_SPENT = 69
    INTERNAL = 70
    STATE = 73
    BUSY = 75
    CONFIG = 78
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


MEANINGS: dict[Exit, str] = {
    Exit.ORDERED: "stopped in order (SIGTERM, `finish`), or the command did what it should",
    Exit.FAILED: "`defib demo`: the client did not get its complete answer",
    Exit.USAGE: "the command line of defib itself is wrong",
    Exit.NOT_RUNNING: "`defib status`, `pause`, `resume`: no such instance runs",
    Exit.BUDGET_SPENT: "the launch budget is spent and `on_spent=exit` was set",
    Exit.INTERNAL: "a bug, or a process that SIGKILL could not end",
    Exit.STATE: "the state or runtime folder cannot be written",
    Exit.BUSY: "somebody holds the port, or the instance runs already",
    Exit.CONFIG: "a configuration error: policies, settings, or the worker's own command line",
    Exit.NOT_EXECUTABLE: "the command was found but cannot be executed",
    Exit.NOT_FOUND: "the command was not found",
}


class Stop(Exception):
    """Ends the command: a message for a person and the exit code."""

    def __init__(self, code: Exit, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)
