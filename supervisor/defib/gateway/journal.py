"""The journal: which exchanges are under way, on disk, so that a killed gateway's losses can be counted.

Append-only, one `write` a line, no fsync: a line survives our death, not the host's (nor would the client's
connection). Never a body, a query or a header. A disk that is full costs the journal, not the traffic: lines that
could not be written are counted.

    J <pid>-<start>                                    who writes; first line of a file
    B <id> <method> <path> <bytes> <generation>        accepted
    E <id> <outcome>                                   ended
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_UNSAFE = re.compile(r"[^!-~]")
_SAFE = re.compile(r"[!-~]+")
MAX_PATH_CHARS = 200


class Journal:
    """Writes one journal file. `owner` is `<pid>-<start>`."""

    def __init__(self, path: Path | None, owner: str, size_bytes: int) -> None:
        self.path, self._owner, self._limit = path, owner, size_bytes
        self.unwritten = 0
        """Lines that did not reach the file."""
        self._open: dict[str, bytes] = {}
        self._fd = -1
        self._size = 0
        self._torn = False
        self._rotate()

    def begin(self, exchange: str, method: str, path: str, size: int, generation: int) -> None:
        """An exchange was accepted."""
        safe = path
        if len(path) > MAX_PATH_CHARS or _SAFE.fullmatch(path) is None:
            safe = _UNSAFE.sub("?", path[:MAX_PATH_CHARS]) or "?"
        line = f"B {exchange} {method} {safe} {size} {generation}\n".encode("ascii", "replace")
        self._append(line)  # first: a rotation writes those that are in `_open`
        self._open[exchange] = line

    def end(self, exchange: str, outcome: str) -> None:
        """An exchange has ended."""
        if self._open.pop(exchange, None) is not None:
            self._append(("E " + exchange + " " + outcome + "\n").encode())

    def close(self) -> None:
        """No more lines."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _append(self, line: bytes) -> None:
        if self._size + len(line) > self._limit:
            self._rotate()
        if self._fd < 0:
            self.unwritten += 1
            return
        if self._torn:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError:
            self.unwritten += 1
            return
        self._size += written
        self._torn = written != len(line)
        self.unwritten += self._torn

    def _rotate(self) -> None:
        """A new file with the open exchanges in it, put in the old one's place in one step."""
        if self.path is None:
            return
        lines = f"J {self._owner}\n".encode() + b"".join(self._open.values())
        fresh = self.path.with_name(f".{self.path.name}.new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            self._size = 0  # the old file goes on; tried again after as many bytes
            return
        try:
            if os.write(fd, lines) != len(lines):
                raise OSError("short write")
            fresh.replace(self.path)
        except OSError:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            self._size = 0
            return
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._torn = fd, len(lines), False
        # What is open alone can fill the file: then it is allowed to grow by as much again.
        self._limit = max(self._limit, 2 * len(lines))
