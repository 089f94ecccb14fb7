"""Where a body ends, and which of its bytes are payload. Pure: bytes in, offsets out.

Three framings of HTTP/1.1 with one interface: `feed(data, pieces)` takes the next raw bytes, appends the slices of
them that are payload, and returns the offset after the body's last byte, or -1 while it goes on.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from defib.gateway.heads import Framing

MAX_SIZE_LINE_BYTES = 1024
"""A chunk's size line with its extensions."""
MAX_TRAILER_BYTES = 16 << 10
_HEX = frozenset(b"0123456789abcdefABCDEF")
_MAX_KNOWN_SIZES = 4096
_sizes: dict[bytes, int] = {}


known_size = _sizes.get
"""The size that a size line says if `chunk_size` has read the same one before; never that of a bad one."""


class BadFraming(Exception):
    """Chunked framing that can't be followed."""


class Piece(NamedTuple):
    """A slice of payload: data[start:stop]; `left`: bytes of its chunk (or body) that come after it."""

    start: int
    stop: int
    left: int


class Scanner(Protocol):
    """Follows one body."""

    def feed(self, data: bytes, pieces: list[Piece] | None = None) -> int:
        """The offset after the body's end in `data`, or -1. Raises BadFraming."""
        ...


def chunk_size(line: bytes) -> int:
    """The size that a chunk's first line says; extensions are allowed, blanks before `;` too. Raises BadFraming."""
    known = _sizes.get(line)
    if known is not None:
        return known
    digits = line.partition(b";")[0].rstrip(b" \t")
    if not digits or len(digits) > 15 or not _HEX.issuperset(digits) or b"\n" in line or b"\r" in line:
        raise BadFraming("a chunk's size is not a hexadecimal number")
    size = int(digits, 16)
    if len(_sizes) < _MAX_KNOWN_SIZES and len(line) < 16:
        _sizes[line] = size
    return size


class ChunkScanner:
    """`Transfer-Encoding: chunked`."""

    __slots__ = ("_line", "_need", "_state", "_trailer_bytes", "left")

    SIZE, DATA, AFTER, TRAILER, ENDED = range(5)

    def __init__(self) -> None:
        self._state = self.SIZE
        self._line = b""
        self._need = b""
        self._trailer_bytes = 0
        self.left = 0
        """Payload bytes that the current chunk still owes."""

    @property
    def between(self) -> bool:
        """Whether the next byte is the first of a chunk's size line."""
        return self._state == self.SIZE and not self._line

    def feed(self, data: bytes, pieces: list[Piece] | None = None) -> int:
        """See Scanner."""
        pos, size = 0, len(data)
        while pos < size:
            state = self._state
            if state == self.DATA:
                stop = min(size, pos + self.left)
                self.left -= stop - pos
                if pieces is not None:
                    pieces.append(Piece(pos, stop, self.left))
                pos = stop
                if not self.left:
                    self._state, self._need = self.AFTER, b"\r\n"
            elif state == self.AFTER:
                pos = self._skip(data, pos)
            elif state == self.ENDED:
                return pos
            else:
                pos = self._take_line(data, pos)
        return size if self._state == self.ENDED else -1

    def _skip(self, data: bytes, pos: int) -> int:
        take = data[pos : pos + len(self._need)]
        if not self._need.startswith(take):
            raise BadFraming("a chunk is longer than it says")
        self._need = self._need[len(take) :]
        if not self._need:
            self._state = self.SIZE
        return pos + len(take)

    def _take_line(self, data: bytes, pos: int) -> int:
        end = data.find(b"\n", pos)
        line = self._line + (data[pos:] if end < 0 else data[pos : end + 1])
        if len(line) > MAX_SIZE_LINE_BYTES and self._state == self.SIZE:
            raise BadFraming("a chunk's size line is too long")
        if self._trailer_bytes + len(line) > MAX_TRAILER_BYTES:
            raise BadFraming("the trailer is too long")
        if end < 0:
            self._line = line
            return len(data)
        self._line = b""
        if not line.endswith(b"\r\n"):
            raise BadFraming("a line of the chunked framing ends without CRLF")
        if self._state == self.SIZE:
            self.left = chunk_size(line[:-2])
            self._state = self.DATA if self.left else self.TRAILER
        elif line == b"\r\n":
            self._state = self.ENDED
        else:
            self._trailer_bytes += len(line)
        return end + 1


class LengthScanner:
    """`Content-Length`."""

    __slots__ = ("left",)

    def __init__(self, length: int) -> None:
        self.left = length

    def feed(self, data: bytes, pieces: list[Piece] | None = None) -> int:
        """See Scanner."""
        stop = min(len(data), self.left)
        self.left -= stop
        if pieces is not None and stop:
            pieces.append(Piece(0, stop, self.left))
        return -1 if self.left else stop


class CloseScanner:
    """A body that ends with its connection."""

    __slots__ = ()

    def feed(self, data: bytes, pieces: list[Piece] | None = None) -> int:
        """See Scanner."""
        if pieces is not None:
            pieces.append(Piece(0, len(data), 0))
        return -1


def scanner_for(framing: Framing, length: int) -> Scanner:
    """The scanner of a body."""
    if framing == "chunked":
        return ChunkScanner()
    return CloseScanner() if framing == "close" else LengthScanner(length)


def chunk(payload: bytes) -> bytes:
    """One chunk. Not for an empty payload, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = b"0\r\n\r\n"
