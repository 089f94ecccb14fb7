"""A request's body on its way in: kept as a whole if it is small enough, else handed on part by part."""

from __future__ import annotations

from typing import Protocol

from defib.gateway.framing import LAST_CHUNK, ChunkScanner, LengthScanner, Piece, Scanner, chunk
from defib.gateway.rules import Limits


class Memory(Protocol):
    """Who counts the bytes of bodies in memory."""

    body_bytes: int
    limits: Limits


class BodyReader:
    """One body. `length` -1: chunked. It is `streamed` as soon as it is known to be too large to keep."""

    __slots__ = ("_chunked", "_keep_bytes", "_memory", "_parts", "_scanner", "_taken", "done", "size", "streamed")

    def __init__(self, length: int, memory: Memory, keep_bytes: int) -> None:
        self._memory, self._keep_bytes = memory, keep_bytes
        self._chunked = length < 0
        self._scanner: Scanner = ChunkScanner() if length < 0 else LengthScanner(length)
        self._parts: list[bytes] = []
        self._taken = 0
        self.size = 0
        self.done = length == 0
        self.streamed = length > keep_bytes or not self._room(max(0, length))

    def feed(self, data: bytes) -> int:
        """Takes what belongs to the body and returns how much that was. Raises BadFraming."""
        pieces: list[Piece] = []
        end = self._scanner.feed(data, pieces)
        self.done = end >= 0
        for start, stop, _ in pieces:
            self._parts.append(data if stop - start == len(data) else data[start:stop])
            self.size += stop - start
            self._taken += stop - start
            self._memory.body_bytes += stop - start
        if not self.streamed and (self.size > self._keep_bytes or not self._room(0)):
            self.streamed = True
        return len(data) if end < 0 else end

    def whole(self) -> bytes:
        """The kept body; its bytes stay counted until `free`."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        return body

    def drain(self) -> list[bytes]:
        """What came of a streamed body since the last time, framed for the worker."""
        parts, self._parts = self._parts, []
        self.free()
        if self._chunked:
            parts = [chunk(part) for part in parts]
            if self.done:
                parts.append(LAST_CHUNK)
        return parts

    def free(self) -> None:
        """Nothing of it is in memory any more."""
        self._memory.body_bytes -= self._taken
        self._taken = 0

    def _room(self, more: int) -> bool:
        return self._memory.body_bytes + more <= self._memory.limits.bodies_bytes
