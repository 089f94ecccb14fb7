"""Reads policy files (TOML) into values, and says which file and key is wrong.

Every policy file is read through `Table`: a typed getter per kind of value, and `done()`, which refuses keys
that nobody asked for (a misspelt key must not be ignored in silence). No policy is interpreted here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_POLICY_BYTES = 1 << 20
"""A policy file larger than this is refused: it is not one of ours."""

_MISSING = object()


class PolicyError(Exception):
    """A policy file that cannot be used: names the file, the key and what was expected."""

    def __init__(self, file: str, key: str, expected: str) -> None:
        self.file, self.key, self.expected = file, key, expected
        super().__init__(f"{file}: {key or '(the file)'}: {expected}")


@dataclass(slots=True)
class Table:
    """One TOML table, read key by key. `where` is the dotted path of the table inside the file."""

    file: str
    where: str
    values: Mapping[str, Any]
    asked: set[str] = field(default_factory=set)

    def error(self, key: str, expected: str) -> PolicyError:
        """The error for a key of this table."""
        return PolicyError(self.file, self._path(key), expected)

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where and key else (self.where or key)

    def _take(self, key: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        self.asked.add(key)
        if key not in self.values:
            if default is _MISSING:
                raise self.error(key, f"missing; expected {expected}")
            return default
        value = self.values[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"expected {expected}, found {type(value).__name__} {value!r:.80}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value: str = self._take(key, str, "a text", default)
        return value

    def optional_text(self, key: str) -> str | None:
        value: str | None = self._take(key, str, "a text", None)
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: Any = _MISSING) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.error(key, f"expected one of {', '.join(choices)}; found {value!r:.80}")
        return value

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value: bool = self._take(key, bool, "true or false", default)
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        return float(self._take(key, (int, float), "a number", default))

    def whole(self, key: str, default: Any = _MISSING) -> int:
        value: int = self._take(key, int, "a whole number", default)
        return value

    def texts(self, key: str, default: Any = _MISSING) -> tuple[str, ...]:
        values = self._take(key, (list, tuple), "a list of texts", default)
        for value in values:
            if not isinstance(value, str):
                raise self.error(key, f"expected a list of texts, found {value!r:.80} in it")
        return tuple(values)

    def table(self, key: str) -> Table:
        """A sub-table; an absent one reads as empty."""
        return Table(self.file, self._path(key), self._take(key, dict, "a table", {}))

    def tables(self, key: str) -> tuple[Table, ...]:
        """An array of tables (`[[key]]`); an absent one is empty."""
        values = self._take(key, list, "an array of tables", [])
        found = []
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(key, f"expected an array of tables, found {value!r:.80} in it")
            found.append(Table(self.file, f"{self._path(key)}[{index}]", value))
        return tuple(found)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every key and value: for tables whose keys are data."""
        self.asked.update(self.values)
        return iter(self.values.items())

    def done(self) -> None:
        """Raises PolicyError for the first key that was never asked for."""
        for key in self.values:
            if key not in self.asked:
                raise self.error(key, f"unknown key; known here: {', '.join(sorted(self.asked))}")


def read_table(path: Path) -> Table:
    """The root table of one file. Raises PolicyError: not readable, too large, not TOML."""
    name = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyError(name, "", f"cannot be read ({error.strerror})") from error
    if len(data) > MAX_POLICY_BYTES:
        raise PolicyError(name, "", f"larger than {MAX_POLICY_BYTES} bytes")
    try:
        return Table(name, "", tomllib.loads(data.decode("utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(name, "", f"not valid TOML ({error})") from error


def policies_folder() -> Path:
    """The folder of the shipped policies: inside the wheel, else beside `supervisor/` in a checkout.

    Raises PolicyError when neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    shipped, checkout = package / "_policies", package.parent.parent / "policies"
    for folder in (shipped, checkout):
        if (folder / "engines").is_dir():
            return folder
    raise PolicyError(str(shipped), "", "the policies folder is missing; reinstall defib")
