"""Reading the worker's two files: all of it, in bounded pieces, and nothing that is not there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from defib.core.events import FaultClass, Found
from defib.sensors.output import MAX_FINDINGS, READ_BYTES, Output
from defib.sensors.ring import Ring


@dataclass(frozen=True)
class Line:
    stream: str
    number: int
    text: str


@dataclass(frozen=True)
class Finding:
    signature: str
    role: str
    fault: str = "poisoned_context"
    process: str = "EngineCore"
    text: str = "the line"


@dataclass(frozen=True)
class Scanned:
    lines: tuple[Line, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass
class Scan:
    """Every complete line is a line; one that begins with `find ROLE NAME` is a finding too."""

    ready: bool
    rest: bytes = b""
    got: dict[str, bytes] = field(default_factory=dict)

    def feed(self, stream: str, data: bytes, at: float) -> Scanned:
        self.got[stream] = self.got.get(stream, b"") + data
        *whole, self.rest = (self.rest + data).split(b"\n")
        return self._scanned(stream, whole)

    def flush(self, at: float) -> Scanned:
        rest, self.rest = self.rest, b""
        return self._scanned("stdout", [rest] if rest else [])

    def _scanned(self, stream: str, lines: list[bytes]) -> Scanned:
        texts = [line.decode() for line in lines]
        found = [Finding(t.split()[2], t.split()[1]) for t in texts if t.startswith("find ")]
        return Scanned(tuple(Line(stream, n, t) for n, t in enumerate(texts)), tuple(found))


class Bed:
    """An Output over two files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ring = Ring()
        self.scans: list[Scan] = []
        self.found: list[Found] = []
        self.hints: list[str] = []
        self.output = Output(self.ring, self._scan, lambda: 42.0, self.found.append, self.hints.append)

    def _scan(self, ready: bool) -> Scan:
        self.scans.append(Scan(ready))
        return self.scans[-1]

    def write(self, generation: int, stdout: bytes = b"", stderr: bytes = b"") -> None:
        for name, data in (("stdout", stdout), ("stderr", stderr)):
            with (self.folder / f"g{generation}.{name}").open("ab") as file:
                file.write(data)

    def told(self, generation: int, **consumed: int) -> dict[str, dict[str, object]]:
        """What the launcher says of the files."""
        paths = {name: self.folder / f"g{generation}.{name}" for name in ("stdout", "stderr")}
        return {
            name: {"path": str(path), "size": path.stat().st_size, "consumed": consumed.get(name, 0), "lost_bytes": 0}
            for name, path in paths.items()
        }

    def texts(self, generation: int = 1) -> list[str]:
        return [kept.text for kept in self.ring.of(generation)]


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_both_files_are_read_as_they_grow(bed: Bed) -> None:
    bed.write(1, b"one\n", b"err\n")
    bed.output.follow(1, bed.told(1))
    assert bed.output.pump() is False and bed.texts() == ["one", "err"]
    bed.write(1, b"two\n")
    assert bed.output.pump() is False and len(bed.texts()) == 2, "the launcher has not said so yet"
    bed.output.grown(1, {"stdout": 8, "stderr": 4})
    bed.output.pump()
    assert bed.texts() == ["one", "err", "two"] and bed.output.acknowledged() == (1, 8, 4)
    assert {(kept.at, kept.generation) for kept in bed.ring.of(1)} == {(42.0, 1)}


def test_a_flood_is_read_in_bounded_pieces(bed: Bed) -> None:
    bed.write(1, b"x" * (2 * READ_BYTES) + b"\n")
    bed.output.follow(1, bed.told(1))
    assert bed.output.pump() is True
    assert bed.output.acknowledged()[1] == READ_BYTES
    assert bed.output.pump() is True and bed.output.pump() is False
    assert bed.texts() == ["x" * (2 * READ_BYTES)]


def test_an_incomplete_line_is_taken_when_nothing_follows(bed: Bed) -> None:
    bed.write(1, b"half")
    bed.output.follow(1, bed.told(1))
    bed.output.pump()
    assert bed.texts() == [] and bed.output.unflushed
    bed.output.flush()
    assert bed.texts() == ["half"] and not bed.output.unflushed


def test_a_reader_goes_on_where_the_last_one_acknowledged(bed: Bed) -> None:
    bed.write(1, b"old\nnew\n")
    bed.output.follow(1, bed.told(1, stdout=4))
    bed.output.pump()
    assert bed.texts() == ["new"] and bed.scans[-1].ready is True, "the start lies behind"
    bed.write(2)
    bed.output.follow(2, bed.told(2))
    assert bed.scans[-1].ready is False


def test_sizes_of_another_generation_and_sizes_that_shrink_change_nothing(bed: Bed) -> None:
    bed.write(1, b"one\n")
    bed.output.follow(1, bed.told(1))
    bed.output.grown(2, {"stdout": 9999, "stderr": 9999})
    bed.output.grown(1, {"stdout": 0})
    bed.output.grown(1, {"stdout": None, "other": 7})
    assert bed.output.pump() is False and bed.texts() == ["one"]


def test_the_same_generation_again_goes_on_and_loses_nothing(bed: Bed) -> None:
    bed.write(1, b"one\n")
    bed.output.follow(1, bed.told(1))
    bed.output.pump()
    bed.write(1, b"two\n")
    bed.output.follow(1, bed.told(1))  # the connection to the launcher came back: a snapshot
    bed.output.pump()
    assert bed.texts() == ["one", "two"] and len(bed.scans) == 2


def test_a_file_that_is_shorter_than_told_does_not_keep_us_reading(bed: Bed) -> None:
    bed.write(1, b"one\n")
    told = bed.told(1)
    told["stdout"]["size"] = 400
    bed.output.follow(1, told)
    rounds = 0
    while bed.output.pump():
        rounds += 1
        assert rounds < 5
    assert bed.texts() == ["one"]


def test_a_file_that_is_gone_is_nothing_to_read(bed: Bed) -> None:
    bed.write(1, b"one\n")
    told = bed.told(1)
    (bed.folder / "g1.stdout").unlink()
    bed.output.follow(1, told)
    assert bed.output.pump() is False and bed.texts() == []


def test_a_hole_is_left_out_and_counted(bed: Bed) -> None:
    bed.write(1, b"\0" * 4096 + b"after\n")
    bed.output.follow(1, bed.told(1))
    bed.output.pump()
    assert bed.texts() == ["after"] and bed.output.holes == 1
    assert bed.output.acknowledged()[1] == 4096 + 6


def test_roles_become_causes_consequences_and_hints(bed: Bed) -> None:
    bed.write(1, b"find cause a\nfind either b\nfind consequence c\nfind hint d\n")
    bed.output.follow(1, bed.told(1))
    bed.output.pump()
    assert [(f.signature, f.cause) for f in bed.found] == [("a", True), ("b", True), ("c", False)]
    first = bed.found[0]
    assert (first.generation, first.fault, first.at) == (1, FaultClass.POISONED_CONTEXT, 42.0)
    assert bed.hints == ["d"]


def test_findings_are_remembered_for_two_generations_and_bounded(bed: Bed) -> None:
    for generation in (1, 2, 3):
        bed.write(generation, b"find cause a\n" * (MAX_FINDINGS // 2 + 1))
        bed.output.follow(generation, bed.told(generation))
        bed.output.pump()
    assert {generation for generation, _ in bed.output.findings} == {2, 3}
    assert len(bed.output.findings) <= MAX_FINDINGS
    assert len(bed.found) == 3 * (MAX_FINDINGS // 2 + 1), "all of them are told"


def test_no_descriptor_is_left_open(bed: Bed) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for generation in range(1, 6):
        bed.write(generation, b"x\n", b"y\n")
        bed.output.follow(generation, bed.told(generation))
        bed.output.pump()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    bed.output.close()
    assert len(os.listdir("/proc/self/fd")) == before
