"""Reads the flat YAML of an engine's `--config` file: top-level `key: value` lines, and lists of plain values.

It is no YAML parser: a value of another form reads as NOT_PLAIN, and whoever needs that very key must say so to a
person. Nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

MAX_LINES = 10_000


class NotPlain(Enum):
    """The type of NOT_PLAIN."""

    VALUE = "a value that is not plain"


NOT_PLAIN = NotPlain.VALUE

Value = str | tuple[str, ...] | None | NotPlain

_KEY = re.compile(r"""(?P<quote>["']?)(?P<key>[A-Za-z0-9_.-]+)(?P=quote)\s*:(?:\s+(?P<value>.*))?$""")
_LIST_ITEM = re.compile(r"\s*-\s+(.*)$")


def read_flat(text: str) -> dict[str, Value]:
    """Top-level keys, with dashes for underscores, and their values; an empty value is None."""
    values: dict[str, Value] = {}
    lines = [line for line in text.splitlines()[:MAX_LINES] if line.strip() and not line.lstrip().startswith("#")]
    position = 0
    while position < len(lines):
        match = _KEY.match(lines[position].rstrip())
        position += 1
        if match is None:
            continue
        block = position
        while position < len(lines) and lines[position][0] in " \t-" and not lines[position].startswith("---"):
            position += 1
        values[match["key"].replace("_", "-")] = _value((match["value"] or "").strip(), lines[block:position])
    return values


def _value(text: str, block: list[str]) -> Value:
    if not block:
        return _flow_list(text) if text.startswith("[") else _scalar(text)
    if text and not text.startswith("#"):
        return NOT_PLAIN
    items = [_LIST_ITEM.match(line) for line in block]
    if any(item is None for item in items):
        return NOT_PLAIN
    return _texts(item[1] for item in items if item is not None)


def _flow_list(text: str) -> Value:
    match = re.fullmatch(r"\[([^\[\]{}]*)\]\s*(?:#.*)?", text)
    if match is None:
        return NOT_PLAIN
    return _texts(part.strip() for part in match[1].split(",") if part.strip())


def _texts(items: Iterable[str]) -> Value:
    values = [_scalar(item) for item in items]
    if not all(isinstance(value, str) for value in values):
        return NOT_PLAIN
    return tuple(str(value) for value in values)


def _scalar(text: str) -> Value:
    quoted = re.fullmatch(r"""(?:"([^"\\]*)"|'([^']*)')\s*(?:#.*)?""", text)
    if quoted:
        return quoted[1] if quoted[1] is not None else quoted[2]
    text = re.split(r"(?:^|\s)#", text, maxsplit=1)[0].strip()
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    return NOT_PLAIN if text[0] in "\"'&*!|>{[%@`" or re.search(r":\s|:$", text) else text
