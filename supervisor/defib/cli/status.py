"""`defib status`, `pause`, `resume`: one question to an instance's supervisor over its unix socket.

It only reads the socket: a supervisor that is away says so here and is no reason to touch anything.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from defib.cli.exits import Exit, Stop
from defib.cli.folders import runtime_bases, short_enough

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 4 << 20
MAX_INSTANCES = 256


@dataclass(slots=True)
class Talk:
    """A greeted connection to a supervisor."""

    connection: socket.socket
    lines: Iterator[dict[str, Any]]
    hello: dict[str, Any]
    snapshot: dict[str, Any]


def status(options: argparse.Namespace) -> int:
    """Prints what runs. Exit code 3 if nothing does."""
    folders = _folders(options)
    if not folders:
        looked = ", ".join(str(base) for base in _bases(options))
        raise Stop(Exit.NOT_RUNNING, f"no instance of defib runs here (looked in {looked})")
    answers = [_ask(folder) for folder in folders]
    if options.json:
        print(json.dumps([answer for answer, _ in answers if answer], indent=2))
    else:
        for answer, problem in answers:
            print(_told(answer) if answer else problem)
    return Exit.ORDERED if any(answer for answer, _ in answers) else Exit.NOT_RUNNING


def order(options: argparse.Namespace) -> int:
    """`pause` or `resume`, for one instance."""
    folders = _folders(options)
    if not folders:
        raise Stop(Exit.NOT_RUNNING, "no such instance of defib runs here; `defib status` lists them")
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise Stop(Exit.USAGE, f"several instances run here ({names}); choose one with --name")
    try:
        instance, reply = _order(folders[0], options.verb)
    except (OSError, StopIteration, ValueError) as error:
        raise Stop(Exit.NOT_RUNNING, _silent(folders[0], error)) from error
    if not reply.get("ok"):
        raise Stop(Exit.FAILED, f"refused: {reply.get('message') or reply.get('reason')}")
    print(f"{instance}: {options.verb} ordered, was {reply.get('phase')}")
    return Exit.ORDERED


def _order(folder: Path, verb: str) -> tuple[str, dict[str, Any]]:
    """(the instance's name, the reply)."""
    talk = _greet(folder)
    with talk.connection:
        epoch = int(talk.snapshot.get("epoch") or 0)
        _send(talk.connection, {"type": "hello", "who": "operator", "protocol": 1, "epoch": epoch})
        _send(talk.connection, {"type": "command", "id": 1, "verb": verb, "epoch": epoch})
        reply = next(line for line in talk.lines if line.get("type") in ("reply", "refused"))
    return str(talk.hello.get("instance")), reply


def _bases(options: argparse.Namespace) -> tuple[Path, ...]:
    if options.runtime_dir:
        return (Path(options.runtime_dir),)
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return (Path(given),) if given else runtime_bases(os.environ, os.geteuid())


def _folders(options: argparse.Namespace) -> list[Path]:
    """Runtime folders with a socket of ours, of the instance asked for."""
    if options.runtime_dir:
        found = [short_enough(Path(options.runtime_dir).absolute(), os.geteuid())]
    else:
        found = [entry for base in _bases(options) for entry in _entries(base)]
    found = [folder for folder in found if (folder / "launcher.sock").exists()]
    if options.name:
        found = [folder for folder in found if folder.name == options.name or _instance(folder) == options.name]
    return found[:MAX_INSTANCES]


def _entries(base: Path) -> list[Path]:
    try:
        return [base, *sorted(entry for entry in base.iterdir() if entry.is_dir())]
    except OSError:
        return []


def _instance(folder: Path) -> str:
    answer, _ = _ask(folder)
    return str((answer or {}).get("instance"))


def _ask(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """(hello and snapshot in one, or None and why)."""
    try:
        talk = _greet(folder)
    except (OSError, StopIteration, ValueError) as error:
        return None, _silent(folder, error)
    with talk.connection:
        return {"instance": talk.hello.get("instance"), "pid": talk.hello.get("pid"), **talk.snapshot}, ""


def _silent(folder: Path, error: Exception) -> str:
    if _launcher_listens(folder):
        why = getattr(error, "strerror", None) or type(error).__name__
        return f"{folder.name}: runs, but its supervisor does not answer ({why}); it is restarted by itself"
    return f"{folder.name}: does not run (its sockets in {folder} are left over)"


def _launcher_listens(folder: Path) -> bool:
    try:
        with _connect(folder / "launcher.sock"):
            return True
    except OSError:
        return False


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(folder: Path) -> Talk:
    connection = _connect(folder / "supervisor.sock")
    try:
        lines = _lines(connection)
        return Talk(connection, lines, next(lines), next(lines))
    except BaseException:
        connection.close()
        raise


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    rest = b""
    for _ in range(MAX_ANSWER_BYTES // 4096):
        *whole, rest = rest.split(b"\n")
        for line in whole:
            message = json.loads(line)
            if isinstance(message, dict):
                yield message
        data = connection.recv(65536)
        if not data or len(rest) > MAX_ANSWER_BYTES:
            return
        rest += data


def _told(answer: dict[str, Any]) -> str:
    """A few lines for a person."""
    traffic = answer.get("gateway") or {}
    lines = [
        f"{answer.get('instance')}: {answer.get('phase')}" + (" (observing only)" if answer.get("observe") else ""),
        f"  worker     generation {answer.get('generation')} at {answer.get('address') or 'no address'}, "
        + ("proven" if answer.get("proven") else "not proven yet")
        + f", rung {answer.get('rung')}",
        f"  incidents  {answer.get('incidents', 0)} so far"
        + (f", open: {answer['incident']}" if answer.get("incident") else ""),
    ]
    if traffic:
        shown = ("accepted", "answered", "replayed", "passed_error", "ended_with_error", "refused", "given_up")
        lines.append("  traffic    " + ", ".join(f"{name} {traffic[name]}" for name in shown if name in traffic))
    return "\n".join(lines)
