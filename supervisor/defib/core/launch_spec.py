"""The launch spec: argv, environment and working directory of a launch, and edits as a person would make them. Pure.

It knows how an engine's command line is spelled (`--flag value`, `--flag=value`, `--x`/`--no-x`, underscores for
dashes, short aliases, dotted JSON options) and says an edit in the launcher's form (docs/seam.md): which arguments
to drop, which to append. It runs nothing, reads no file and never touches `argv[0]`.

Rules of the spelling, as vLLM's parser has them (0.9 to 0.33):
- the last spelling of an option wins, so what we append wins;
- dotted options of one name are merged with each other, and their union *replaces* a JSON object given to the plain
  option, wherever that stands: a dotted edit of an option that is there as JSON must edit the JSON.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, assert_never

MAX_ARGS = 4096
"""More arguments than this are not edited."""

_LONG = re.compile(r"--[^.=]+")
_NUMBER = re.compile(r"-\d+(\.\d*)?([eE][-+]?\d+)?|-\.\d+")
_VERSION = re.compile(r"\d+(?:\.\d+)*")


def version_key(version: str) -> tuple[int, ...]:
    """The release numbers of a version; `0.32.0rc1+cpu` is (0, 32, 0). Empty if there are none."""
    match = _VERSION.match(version.strip().lstrip("v"))
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_version(text: str) -> bool:
    """Whether a policy file may name this version."""
    return bool(re.fullmatch(_VERSION, text))


@dataclass(frozen=True, slots=True)
class Gate:
    """Versions that know a thing: from `since` on, before `gone`."""

    since: str | None = None
    gone: str | None = None

    def allows(self, version: str | None) -> bool:
        """Whether this version knows it. An unknown version only knows what has no gate."""
        if self.since is None and self.gone is None:
            return True
        key = version_key(version or "")
        if not key:
            return False
        return (self.since is None or _padded(key) >= _padded(version_key(self.since))) and (
            self.gone is None or _padded(key) < _padded(version_key(self.gone))
        )


UNGATED = Gate()
"""Known to every version."""


def _padded(key: tuple[int, ...]) -> tuple[int, ...]:
    return (*key, 0, 0, 0, 0)[: max(4, len(key))]


@dataclass(frozen=True, slots=True)
class Grammar:
    """How an engine spells options: aliases (`-cc` for `--compilation-config`), and flags with version gates."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    gates: Mapping[str, Gate] = field(default_factory=dict)

    def name(self, token: str) -> str:
        """The option's own name, without `.path` and `=value`, dashes for underscores, alias resolved."""
        if token.startswith("--"):
            match = _LONG.match(token)
            return match[0].replace("_", "-") if match else token
        bare = re.split(r"[.=]", token, maxsplit=1)[0]
        return self.aliases.get(bare, bare)

    def knows(self, flag: str, version: str | None) -> bool:
        """Whether an engine of this version knows the flag (`--no-x` is known where `--x` is)."""
        name = self.name(flag)
        gate = self.gates.get(name) or self.gates.get(_positive(name))
        return gate is None or gate.allows(version)


PLAIN = Grammar()
"""A grammar without aliases and gates."""


@dataclass(frozen=True, slots=True)
class Switch:
    """`--x` (on) or `--no-x`."""

    name: str
    on: bool


@dataclass(frozen=True, slots=True)
class Value:
    """`--x=value`, or `--x value value` for several."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a JSON option: `--x.a.b=value`."""

    name: str
    path: tuple[str, ...]
    value: str


@dataclass(frozen=True, slots=True)
class Remove:
    """The option goes, in every spelling; `valued`: with the value that follows it."""

    name: str
    valued: bool


@dataclass(frozen=True, slots=True)
class SetEnv:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class UnsetEnv:
    name: str


@dataclass(frozen=True, slots=True)
class Fresh:
    """A new empty private folder for this cache."""

    cache: str


Edit = Switch | Value | Key | Remove | SetEnv | UnsetEnv | Fresh


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a launch consists of. `env` and `unset` are laid over the environment that the launcher gives anyway."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """An edit in the launcher's form: indexes of the base argv to drop (never 0), arguments to append."""

    drop: tuple[int, ...] = ()
    append: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()

    def message(self) -> dict[str, Any]:
        """The `delta` of the launcher's `launch` verb."""
        return {
            "drop": list(self.drop),
            "append": list(self.append),
            "env": dict(self.env),
            "unset": list(self.unset),
            "fresh": list(self.fresh),
        }


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One spelling of an option in an argv: indexes `start` to `stop`, dotted `path`, its values."""

    name: str
    start: int
    stop: int
    path: tuple[str, ...]
    values: tuple[str, ...]


def is_option(token: str) -> bool:
    """Whether an argument is an option and not a value: `-1` is a value."""
    return len(token) > 1 and token.startswith("-") and not _NUMBER.fullmatch(token)


def occurrences(argv: Sequence[str], grammar: Grammar, first: int = 1) -> tuple[Occurrence, ...]:
    """Every option from index `first` on. `values` are all arguments up to the next option, or the one after `=`."""
    found = []
    starts = [i for i in range(first, len(argv)) if is_option(argv[i])]
    for start, stop in pairwise((*starts, len(argv))):
        head, equals, value = argv[start].partition("=")
        path = tuple(head.split(".")[1:])
        values = (value,) if equals else tuple(argv[start + 1 : stop])
        found.append(Occurrence(grammar.name(head), start, start + 1 if equals else stop, path, values))
    return tuple(found)


def last_value(argv: Sequence[str], grammar: Grammar, names: Sequence[str], first: int = 1) -> str | None:
    """The first value of the last spelling of any of these options; None if there is none."""
    value = None
    for seen in occurrences(argv, grammar, first):
        if seen.name in names and not seen.path and seen.values:
            value = seen.values[0]
    return value


def switched(argv: Sequence[str], grammar: Grammar, name: str, first: int = 1) -> bool | None:
    """What the last spelling of a switch says: True for `--x`, False for `--no-x`, None if it isn't there."""
    state = None
    for seen in occurrences(argv, grammar, first):
        if _positive(seen.name) == name:
            state = seen.name == name
    return state


def parse_edit(text: str, grammar: Grammar = PLAIN) -> Edit:
    """`--x`, `--no-x`, `--x VALUE ...`, `--x=VALUE` or `--x.key VALUE`. Raises ValueError."""
    tokens = shlex.split(text)
    if not tokens or not is_option(tokens[0]):
        raise ValueError(f"expected a flag and its value, found {text!r}")
    seen = occurrences(("", *tokens), grammar)
    if len(seen) != 1 or seen[0].stop != len(tokens) + 1:
        raise ValueError(f"expected one flag and its value, found {text!r}")
    flag = seen[0]
    if flag.path:
        if len(flag.values) != 1:
            raise ValueError(f"expected one value for {tokens[0]}, found {text!r}")
        return Key(flag.name, flag.path, flag.values[0])
    if flag.values:
        return Value(flag.name, flag.values)
    return Switch(_positive(flag.name), on=_positive(flag.name) == flag.name)


def edit(spec: LaunchSpec, edits: Sequence[Edit], grammar: Grammar = PLAIN) -> LaunchSpec:
    """The spec with these edits. Doing it twice is doing it once; what is right already stays untouched."""
    if len(spec.argv) > MAX_ARGS:
        raise ValueError(f"a command of more than {MAX_ARGS} arguments is not edited")
    for change in edits:
        spec = _edited(spec, change, grammar)
    return spec


def _edited(spec: LaunchSpec, change: Edit, grammar: Grammar) -> LaunchSpec:
    match change:
        case Switch():
            return replace(spec, argv=_switched(spec.argv, change, grammar))
        case Value():
            return replace(spec, argv=_valued(spec.argv, change, grammar))
        case Key():
            return replace(spec, argv=_keyed(spec.argv, change, grammar))
        case Remove():
            return replace(spec, argv=_removed(spec.argv, change, grammar))
        case SetEnv(name, value):
            return replace(spec, env={**spec.env, name: value}, unset=spec.unset - {name})
        case UnsetEnv(name):
            env = {key: value for key, value in spec.env.items() if key != name}
            return replace(spec, env=env, unset=spec.unset | {name})
        case Fresh(cache):
            return replace(spec, fresh=spec.fresh | {cache})
        case _:
            assert_never(change)


def _without(argv: tuple[str, ...], spans: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    gone = {index for start, stop in spans for index in range(start, stop)}
    return tuple(token for index, token in enumerate(argv) if index not in gone)


def _switched(argv: tuple[str, ...], change: Switch, grammar: Grammar) -> tuple[str, ...]:
    seen = [o for o in occurrences(argv, grammar) if _positive(o.name) == change.name]
    spelled = change.name if change.on else f"--no-{change.name[2:]}"
    if len(seen) == 1 and seen[0].name == spelled:
        return argv
    # A word after a switch is not its value (it can be the model's name): only the switch itself goes.
    return (*_without(argv, [(o.start, o.start + 1) for o in seen]), spelled)


def _span(seen: Occurrence, values: int) -> tuple[int, int]:
    """The arguments of one spelling of an option that takes this many values; words after them aren't its own."""
    return seen.start, seen.stop if values > 1 else min(seen.stop, seen.start + 1 + values)


def _valued(argv: tuple[str, ...], change: Value, grammar: Grammar) -> tuple[str, ...]:
    seen = [o for o in occurrences(argv, grammar) if o.name == change.name]
    count = len(change.values)
    if len(seen) == 1 and not seen[0].path and seen[0].values[: max(1, count)] == change.values:
        return argv
    spelled = (f"{change.name}={change.values[0]}",) if count == 1 else (change.name, *change.values)
    return (*_without(argv, [_span(o, count) for o in seen]), *spelled)


def _keyed(argv: tuple[str, ...], change: Key, grammar: Grammar) -> tuple[str, ...]:
    seen = [o for o in occurrences(argv, grammar) if o.name == change.name]
    dotted = [o for o in seen if o.path]
    if not dotted and seen:
        return _keyed_in_json(argv, change, seen)
    same = [o for o in dotted if o.path[: len(change.path)] == change.path]
    if len(same) == 1 and same[0].path == change.path and same[0].values[:1] == (change.value,):
        return argv
    spelled = f"{change.name}.{'.'.join(change.path)}={change.value}"
    return (*_without(argv, [_span(o, 1) for o in same]), spelled)


def _keyed_in_json(argv: tuple[str, ...], change: Key, seen: Sequence[Occurrence]) -> tuple[str, ...]:
    given = _json_or_text(seen[-1].values[0]) if seen[-1].values else None
    given = dict(given) if isinstance(given, dict) else {}
    wanted = _with_key(given, change.path, _json_or_text(change.value))
    if len(seen) == 1 and wanted == given and given:
        return argv
    spelled = f"{change.name}={json.dumps(wanted, separators=(',', ':'))}"
    return (*_without(argv, [_span(o, 1) for o in seen]), spelled)


def _with_key(given: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, rest = path[0], path[1:]
    below = given.get(first)
    inner = value if not rest else _with_key(below if isinstance(below, dict) else {}, rest, value)
    return {**given, first: inner}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _removed(argv: tuple[str, ...], change: Remove, grammar: Grammar) -> tuple[str, ...]:
    name = _positive(change.name)
    seen = [o for o in occurrences(argv, grammar) if _positive(o.name) == name]
    return _without(argv, [_span(o, 1 if change.valued else 0) for o in seen])


def delta_from(base: LaunchSpec, edited: LaunchSpec) -> Delta:
    """The delta that turns `base` into `edited`. Raises ValueError where the program itself differs.

    What stays is the longest beginning of the edited argv that can be had by dropping from the base's.
    """
    if base.argv[:1] != edited.argv[:1] or base.cwd != edited.cwd:
        raise ValueError("a delta changes neither the program nor the working directory")
    drop, kept = [], 0
    for index, token in enumerate(base.argv):
        if kept < len(edited.argv) and edited.argv[kept] == token:
            kept += 1
        else:
            drop.append(index)
    return Delta(
        drop=tuple(drop),
        append=edited.argv[kept:],
        env={name: value for name, value in edited.env.items() if base.env.get(name) != value},
        unset=tuple(sorted(edited.unset - base.unset)),
        fresh=tuple(sorted(edited.fresh - base.fresh)),
    )


def applied(base: LaunchSpec, delta: Delta) -> LaunchSpec:
    """What the launcher makes of a delta."""
    gone = set(delta.drop)
    return LaunchSpec(
        argv=(*(token for index, token in enumerate(base.argv) if index not in gone), *delta.append),
        env={**{k: v for k, v in base.env.items() if k not in delta.unset}, **delta.env},
        unset=(base.unset - delta.env.keys()) | set(delta.unset),
        fresh=base.fresh | set(delta.fresh),
        cwd=base.cwd,
    )


def _positive(name: str) -> str:
    return "--" + name[5:] if name.startswith("--no-") else name
