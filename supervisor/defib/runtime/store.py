"""The state store: one small JSON file, replaced atomically. Unreadable content reads as nothing, and is said."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

MAX_STATE_BYTES = 1 << 20


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file with mode 0600. Raises OSError; the old content stays then, and no half file is left."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class Store:
    """`save` and `load` of one JSON object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0

    def save(self, value: dict[str, Any]) -> str | None:
        """Writes; returns None, or why it could not (we go on in memory)."""
        try:
            write_atomically(self.path, json.dumps(value).encode())
        except OSError as error:
            self.failures += 1
            return f"{self.path}: {error.strerror or error}"
        return None

    def load(self) -> tuple[dict[str, Any], str | None]:
        """The last saved object (empty if none), and what was wrong with the file, if anything."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_STATE_BYTES + 1)
            if len(data) > MAX_STATE_BYTES:
                raise ValueError(f"larger than {MAX_STATE_BYTES} bytes")
            value = json.loads(data)
        except FileNotFoundError:
            return {}, None
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"{self.path}: not usable ({error}); starting with an empty memory"
        if not isinstance(value, dict):
            return {}, f"{self.path}: not an object; starting with an empty memory"
        return value, None
