"""Engine profiles: what an engine is called, where it reads its address, what may be replayed, where its caches are.

A profile is data (`policies/engines/NAME.toml`); this module turns the file into values and interprets nothing of
a running worker. What each key means is in `docs/policies-engines.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from defib.core.launch_spec import Gate, Grammar, is_version
from defib.policy.reading import PolicyError, Table, read_table

GENERIC = "generic"
"""The profile of a server that no other profile recognises."""

ROLES = ("engine", "front", "tracker", "other")
READ_KEYS = ("config_file", "host", "port", "uds", "tls", "headless", "served_model", "model", "api_key")
METHODS = ("GET", "HEAD", "POST")


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """Requests that may be sent a second time when nothing of their answer was delivered.

    `path` is exact, without the query. `forbid_if`: top-level keys of the JSON body; one that is present and
    neither null nor false forbids the replay.
    """

    method: str
    path: str
    forbid_if: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recognise:
    """A command of this engine: a program's file name or a `python -m` module, then these words."""

    program: str | None
    module: str | None
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Where one value is read from, in order of precedence.

    The word after `positional_after`; the last of `flags`; these flags in the engine's config file; the first set
    variable of `env`; `default`. A `switch` is read instead of all that: there or not.
    """

    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    default: str | None = None
    positional_after: str | None = None
    switch: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The path whose 200 means ready (empty: a port that accepts), and how long a start may take in seconds."""

    path: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Canary:
    """A short deterministic request that makes the engine compute."""

    task: str
    path: str
    body: Mapping[str, Any]

    def body_for(self, model: str | None) -> dict[str, Any]:
        """The JSON body; `model` is left out when it is unknown."""
        return {**({"model": model} if model else {}), **self.body}


@dataclass(frozen=True, slots=True)
class ProcessRule:
    """Processes whose title (command line, else kernel name) matches `title` have this role."""

    role: str
    title: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class CacheRule:
    """Where a cache may be: the first of `roots` whose variables are all set, and globs below it."""

    name: str
    roots: tuple[str, ...]
    globs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine. `reads` is its address table; `edit` maps `host` and `port` to the flags that set them."""

    name: str
    title: str
    dialect: str
    distributions: tuple[str, ...]
    recognise: tuple[Recognise, ...]
    reads: Mapping[str, Read]
    edit: Mapping[str, str]
    grammar: Grammar
    ready: Ready
    canary: Canary | None
    processes: tuple[ProcessRule, ...]
    replay: tuple[ReplayRule, ...]
    probe_paths: frozenset[str]
    caches: tuple[CacheRule, ...]
    env_set: Mapping[str, str]
    fresh_env: Mapping[str, str]
    exit_before_ready: Mapping[int, str]
    progress_metric: str | None = None
    file: str = field(default="", compare=False)

    def kind_of(self, cmdline: str, name: str) -> str:
        """The role of a process: `engine`, `front`, `tracker` or `other`."""
        for rule in self.processes:
            if rule.title.search(cmdline) or rule.title.search(name):
                return rule.role
        return "other"


def load_engine(policies: Path, name: str) -> EngineProfile:
    """The profile `engines/NAME.toml` below the policies folder. Raises PolicyError."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise PolicyError(str(policies / "engines"), name, "an engine's name has letters, digits, - and _ only")
    root = read_table(policies / "engines" / f"{name}.toml")
    if root.text("name") != name:
        raise root.error("name", f"expected {name!r}, the name of the file")
    profile = _profile(root)
    root.done()
    return profile


def load_engines(policies: Path) -> tuple[EngineProfile, ...]:
    """Every profile, by name. Raises PolicyError, also when `generic` is missing."""
    folder = policies / "engines"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if GENERIC not in names:
        raise PolicyError(str(folder), "", f"{GENERIC}.toml is missing; is this a folder of policies?")
    return tuple(load_engine(policies, name) for name in names)


def _profile(root: Table) -> EngineProfile:
    return EngineProfile(
        name=root.text("name"),
        title=root.text("title"),
        dialect=root.text("dialect"),
        distributions=root.texts("distributions", ()),
        recognise=tuple(_recognise(t) for t in root.tables("recognise")),
        reads=_reads(root.table("reads")),
        edit=_edit(root.table("edit")),
        grammar=Grammar(_names(root.table("aliases"), "-"), _gates(root.table("flags"))),
        ready=_ready(root.table("ready")),
        canary=_canary(root.table("canary")),
        processes=tuple(_process(t) for t in root.tables("process")),
        replay=tuple(_replay(t) for t in root.tables("replay")),
        probe_paths=_probes(root.table("probes")),
        caches=tuple(_cache(t) for t in root.tables("cache")),
        env_set=_names(root.table("env_set")),
        fresh_env=_names(root.table("fresh_env")),
        exit_before_ready=_exits(root.table("exit_before_ready")),
        progress_metric=root.optional_text("progress_metric"),
        file=root.file,
    )


def _recognise(table: Table) -> Recognise:
    rule = Recognise(table.optional_text("program"), table.optional_text("module"), table.texts("words", ()))
    if (rule.program is None) == (rule.module is None):
        raise table.error("program", "expected either program or module")
    table.done()
    return rule


def _reads(table: Table) -> Mapping[str, Read]:
    found = {key: _read(table.table(key)) for key in READ_KEYS if key in table.values}
    table.asked.update(READ_KEYS)
    table.done()
    return MappingProxyType(found)


def _read(table: Table) -> Read:
    flags = table.texts("flags", ())
    for flag in flags:
        if not flag.startswith("-"):
            raise table.error("flags", f"expected flags that begin with -, found {flag!r}")
    read = Read(
        flags=flags,
        env=table.texts("env", ()),
        default=table.optional_text("default"),
        positional_after=table.optional_text("positional_after"),
        switch=table.optional_text("switch"),
    )
    table.done()
    return read


def _edit(table: Table) -> Mapping[str, str]:
    edit = {key: table.text(key) for key in ("host", "port") if key in table.values}
    table.asked.update(("host", "port"))
    table.done()
    return MappingProxyType(edit)


def _names(table: Table, begins: str = "") -> Mapping[str, str]:
    """A table whose keys and values are texts."""
    for key, value in table.items():
        if not isinstance(value, str) or not value.startswith(begins) or not key.startswith(begins):
            raise table.error(key, f"expected a text{f' that begins with {begins}' if begins else ''}, found {value!r}")
    return MappingProxyType(dict(table.values))


def _gates(table: Table) -> Mapping[str, Gate]:
    gates = {}
    for flag, _ in table.items():
        row = table.table(flag)
        gates[flag] = read_gate(row)
        row.done()
    return MappingProxyType(gates)


def read_gate(table: Table) -> Gate:
    """`since` and `gone` of a table: the first version with a thing, the first without it again."""
    since, gone = table.optional_text("since"), table.optional_text("gone")
    for key, value in (("since", since), ("gone", gone)):
        if value is not None and not is_version(value):
            raise table.error(key, f"expected a version like 0.13, found {value!r}")
    return Gate(since, gone)


def _ready(table: Table) -> Ready:
    ready = Ready(table.text("path"), table.number("limit_s"))
    if ready.path and not ready.path.startswith("/"):
        raise table.error("path", f"expected a path that begins with /, found {ready.path!r}")
    if ready.limit_s <= 0:
        raise table.error("limit_s", "expected seconds above 0")
    table.done()
    return ready


def _canary(table: Table) -> Canary | None:
    if not table.values:
        return None
    body = table.table("body")
    canary = Canary(table.text("task"), _path(table), MappingProxyType(dict(body.items())))
    table.done()
    return canary


def _path(table: Table) -> str:
    path = table.text("path")
    if not path.startswith("/") or "?" in path:
        raise table.error("path", f"expected a path that begins with / and has no query, found {path!r}")
    return path


def _process(table: Table) -> ProcessRule:
    role, text = table.choice("role", ROLES), table.text("title")
    try:
        title = re.compile(text)
    except re.error as error:
        raise table.error("title", f"not a regular expression ({error})") from error
    table.done()
    return ProcessRule(role, title)


def _replay(table: Table) -> ReplayRule:
    rule = ReplayRule(table.choice("method", METHODS), _path(table), table.texts("forbid_if", ()))
    table.done()
    return rule


def _probes(table: Table) -> frozenset[str]:
    paths = table.texts("paths", ())
    for path in paths:
        if not path.startswith("/"):
            raise table.error("paths", f"expected paths that begin with /, found {path!r}")
    table.done()
    return frozenset(paths)


def _cache(table: Table) -> CacheRule:
    rule = CacheRule(table.text("name"), table.texts("roots"), table.texts("globs"))
    for glob in rule.globs:
        if glob.startswith("/") or ".." in glob.split("/"):
            raise table.error("globs", f"expected a pattern below the root, found {glob!r}")
    table.done()
    return rule


def _exits(table: Table) -> Mapping[int, str]:
    found = {}
    for key, value in table.items():
        if not key.isdigit() or not isinstance(value, str):
            raise table.error(key, f'expected CODE = "meaning", found {value!r}')
        found[int(key)] = value
    return MappingProxyType(found)
