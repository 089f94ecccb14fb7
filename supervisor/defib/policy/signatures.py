"""Reads `policies/signatures/*.toml` into signatures; every error names file and key. No matching happens here."""

from __future__ import annotations

from pathlib import Path

from defib.policy.reading import PolicyError, Table, read_table
from defib.triage.cuda import CudaError, spellings
from defib.triage.records import Place
from defib.triage.scanner import check_examples
from defib.triage.signatures import (
    CLASSES,
    RESTARTS,
    ROLES,
    TRUSTS,
    WHENS,
    Example,
    Signature,
    SignatureError,
    Where,
)

MAX_FILES = 256
MAX_SIGNATURES = 1024

_PLACES = tuple(place.value for place in Place if place is not Place.NONE)


def load_signatures(folder: Path) -> tuple[Signature, ...]:
    """All signatures of a folder's TOML files, in the order of file names, tried on their own examples.

    Raises PolicyError for the first thing that is wrong: a file, a key, a double id, a pattern that RE2 refuses or
    that misses its own example.
    """
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise PolicyError(str(folder), "", "holds no signature file (*.toml)")
    if len(paths) > MAX_FILES:
        raise PolicyError(str(folder), "", f"holds more than {MAX_FILES} files")
    found: dict[str, tuple[Signature, Table]] = {}
    for path in paths:
        root = read_table(path)
        for table in root.tables("signature"):
            signature = _signature(table)
            if signature.id in found:
                raise table.error("id", f"{signature.id!r} is taken by {found[signature.id][1].file}")
            found[signature.id] = (signature, table)
        root.done()
    if not 0 < len(found) <= MAX_SIGNATURES:
        raise PolicyError(str(folder), "signature", f"expected 1 to {MAX_SIGNATURES} signatures, found {len(found)}")
    signatures = tuple(signature for signature, _ in found.values())
    try:
        check_examples(signatures)
    except SignatureError as error:
        owner = found.get(error.signature)
        if owner is None:
            raise PolicyError(str(folder), error.key, error.expected) from error
        raise owner[1].error(error.key, f"{error.signature}: {error.expected}") from error
    return signatures


def _signature(table: Table) -> Signature:
    signature = Signature(
        id=_id(table),
        title=table.text("title"),
        meaning=table.text("meaning"),
        fault=table.choice("class", CLASSES),
        role=table.choice("role", ROLES),
        where=_where(table),
        root_layer=table.text("root_layer"),
        restart_helps=table.choice("restart_helps", RESTARTS),
        trust=table.choice("trust", TRUSTS, "library"),
        when=table.choice("when", WHENS, "any"),
        fallback=table.flag("fallback", False),
        not_patterns=table.texts("not_patterns", ()),
        sources=_sources(table),
        examples=_examples(table, "example"),
        near_misses=_examples(table, "near_miss"),
    )
    table.done()
    return signature


def _id(table: Table) -> str:
    value = table.text("id")
    if not value.replace("_", "").isalnum() or not value.isascii() or value != value.lower():
        raise table.error("id", f"expected lower-case letters, digits and _; found {value!r:.80}")
    return value


def _sources(table: Table) -> tuple[str, ...]:
    sources = table.texts("sources")
    if not sources:
        raise table.error("sources", "expected at least one source")
    return sources


def _where(table: Table) -> tuple[Where, ...]:
    places = [_place(entry) for entry in table.tables("where")]
    for entry in table.tables("cuda"):
        places.extend(spellings(_cuda(entry)))
    return tuple(places)


def _place(table: Table) -> Where:
    where = Where(
        place=Place(table.choice("place", _PLACES)),
        patterns=table.texts("patterns"),
        files=table.texts("files", ()),
        levels=table.texts("levels", ("ERROR", "CRITICAL")),
        within=table.texts("within", ()),
    )
    table.done()
    return where


def _cuda(table: Table) -> CudaError:
    error = CudaError(
        text=table.text("text"),
        code=table.whole("code"),
        runtime=table.text("runtime"),
        driver=table.text("driver"),
        exceptions=table.texts("exceptions", ()),
    )
    table.done()
    return error


def _examples(table: Table, key: str) -> tuple[Example, ...]:
    examples = []
    for entry in table.tables(key):
        stream = entry.choice("stream", ("stdout", "stderr"), "stdout")
        examples.append(Example(entry.text("text").strip("\n"), stream))
        entry.done()
    return tuple(examples)
