"""The evidence of an incident: a folder, written atomically, with a manifest and a report to paste into a bug report.

Everything is gathered from rings and from short questions before the kill; what can't be had is named in the
manifest with the reason. Nothing here blocks a recovery: the caller gives a deadline. Bodies never come here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from defib.core.redact import redact_text, redact_value
from defib.runtime.clock import stamp, wall
from defib.runtime.store import write_atomically

CONTEXT_LINES = 400
"""Lines kept before the causal one. The contract is at least 100."""
MAX_LOG_BYTES = 8 << 20
MAX_INCIDENTS = 50
MAX_TOTAL_BYTES = 512 << 20
MAX_AGE_S = 30 * 86400.0
HALF_WRITTEN_S = 3600.0
"""A folder that is hidden for longer than this was given up."""


class Line(Protocol):
    """A kept line of the worker's output."""

    @property
    def at(self) -> float: ...
    @property
    def stream(self) -> str: ...
    @property
    def text(self) -> str: ...


L = TypeVar("L", bound=Line)


@dataclass(slots=True)
class Item:
    """One thing in the folder, or why it is missing."""

    name: str
    source: str
    time: str
    bytes: int = 0
    sha256: str = ""
    missing: str = ""


@dataclass(slots=True)
class Incident:
    """An open folder. `items` by file name."""

    id: str
    folder: Path
    opened_at: float
    generation: int
    items: dict[str, Item] = field(default_factory=dict)


class Evidence:
    """Writes the folders below `root`. Raises nothing: failures are counted and named."""

    def __init__(self, root: Path, secrets: Sequence[str] = ()) -> None:
        self.root, self.secrets = root, tuple(secrets)
        self.failures = 0
        self.last_error = ""

    def open(self, incident: str, generation: int, at: float) -> Incident:
        """The (perhaps already existing) folder of this incident."""
        known = sorted(self.root.glob(f"*-{incident}"), key=lambda folder: folder.name.removeprefix("."))
        if known and (folder := _unveiled(known[-1])) is not None:
            return self._read(folder, incident, generation, at)
        name = f"{stamp().replace('-', '').replace(':', '').split('.')[0]}Z-{incident}"
        return Incident(incident, self.root / name, at, generation)

    def _read(self, folder: Path, incident: str, generation: int, at: float) -> Incident:
        opened = Incident(incident, folder, at, generation)
        try:
            manifest = json.loads((folder / "manifest.json").read_bytes())
            opened.items = {i["name"]: Item(**i) for i in manifest["items"]}
            opened.opened_at = float(manifest["opened_at"])
            opened.generation = int(manifest["generation"])
        except (OSError, ValueError, LookupError, TypeError):
            pass
        for item in _unlisted(folder, opened.items):
            opened.items[item.name] = item
        return opened

    def write(self, incident: Incident, files: Mapping[str, tuple[str, bytes | None, str]]) -> bool:
        """Adds files: name -> (source, content or None, why missing). The folder appears whole or grows whole.

        Returns False if anything could not be written; what went wrong is in `last_error`.
        """
        new = not incident.folder.exists()
        folder = incident.folder.with_name("." + incident.folder.name) if new else incident.folder
        good = True
        try:
            if new:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700)
            for name, (source, content, missing) in files.items():
                good = self._one(incident, folder, name, source, content, missing) and good
            self._manifest(incident, folder)
            if new:
                os.replace(folder, incident.folder)
        except OSError as error:
            self._failed(error)
            return False
        return good

    def _one(
        self, incident: Incident, folder: Path, name: str, source: str, content: bytes | None, missing: str
    ) -> bool:
        item = Item(name, source, stamp(), missing=missing)
        incident.items[name] = item
        if content is None:
            return True
        try:
            write_atomically(folder / name, content)
        except OSError as error:
            item.missing = f"could not be written: {error.strerror}"
            self._failed(error)
            return False
        item.bytes, item.sha256 = len(content), hashlib.sha256(content).hexdigest()
        return True

    def _manifest(self, incident: Incident, folder: Path) -> None:
        manifest = {
            "incident": incident.id,
            "generation": incident.generation,
            "opened_at": incident.opened_at,
            "written": stamp(),
            "items": [
                {"name": i.name, "source": i.source, "time": i.time, "bytes": i.bytes, "sha256": i.sha256,
                 "missing": i.missing}
                for i in incident.items.values()
            ],
        }  # fmt: skip
        write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1).encode())

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self.last_error = f"{error.filename or self.root}: {error.strerror or error}"

    def lines(self, lines: Sequence[Line]) -> bytes:
        """A log excerpt: time, stream and text, redacted, at most MAX_LOG_BYTES (the end is kept)."""
        text = "".join(f"{line.at:.3f} {line.stream} {redact_text(line.text, self.secrets)}\n" for line in lines)
        return text.encode("utf-8", "replace")[-MAX_LOG_BYTES:]

    def json(self, value: Any) -> bytes:
        """A value as JSON, redacted before it is one: what quotes and escapes are made of stays whole."""
        return json.dumps(redact_value(value, self.secrets), indent=1, default=str).encode()

    def tidy(self) -> list[str]:
        """Forgets the oldest incidents beyond the limits of count, bytes and age. Returns the folders' names."""
        gone: list[str] = []
        total = 0
        try:
            folders = sorted((p for p in self.root.iterdir() if p.is_dir() and not _in_work(p)), reverse=True)
        except OSError:
            return gone
        for count, folder in enumerate(folders):
            size, age = _size(folder), wall() - _mtime(folder)
            total += size
            if count and (count >= MAX_INCIDENTS or total > MAX_TOTAL_BYTES or age > MAX_AGE_S):
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder.name)
        return gone


def _unveiled(folder: Path) -> Path | None:
    """The visible folder. A hidden one is a first write that kill -9 cut short: what it has is kept."""
    if not folder.name.startswith("."):
        return folder
    visible = folder.with_name(folder.name[1:])
    try:
        os.replace(folder, visible)
    except OSError:
        return None
    return visible


def _unlisted(folder: Path, items: Mapping[str, Item]) -> list[Item]:
    """Files that were written before the manifest could name them."""
    found: list[Item] = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.name in items or path.name == "manifest.json" or path.name.startswith("."):
                continue
            item = Item(path.name, "a supervisor that was killed meanwhile", stamp(_mtime(path)))
            with path.open("rb") as file:
                item.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            item.bytes = path.stat().st_size
            found.append(item)
    return found


def _in_work(folder: Path) -> bool:
    """Is somebody writing this one for the first time?"""
    return folder.name.startswith(".") and wall() - _mtime(folder) < HALF_WRITTEN_S


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        total = sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    return total


def _mtime(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return wall()


def context(lines: Sequence[L], cause: Callable[[L], bool], before: int = CONTEXT_LINES) -> list[L]:
    """The lines from `before` lines ahead of the first causal one to the end; the last 2 x `before` if none is."""
    for index, line in enumerate(lines):
        if cause(line):
            return list(lines[max(0, index - before) :])
    return list(lines[-2 * before :])
