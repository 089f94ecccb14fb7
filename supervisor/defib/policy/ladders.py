"""Ladders: `policies/ladders/ENGINE.toml` to `core.ladder.Ladder`, checked against the engine's profile.

What each key means is in `docs/policies-engines.md`. Nothing here decides which rung is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from defib.core.ladder import MAX_RUNGS, Ladder, Remedy
from defib.core.launch_spec import Edit, Fresh, Grammar, Remove, SetEnv, UnsetEnv, parse_edit
from defib.policy.engines import EngineProfile, load_engine, read_gate
from defib.policy.reading import Table, read_table

__all__ = ["Ladder", "load_ladder"]

VALUED = " *"
"""A `remove` text that ends in this takes the option's value with it."""


def load_ladder(policies: Path, engine: str) -> Ladder:
    """The ladder of an engine. Raises PolicyError, for its profile too."""
    profile = load_engine(policies, engine)
    root = read_table(policies / "ladders" / f"{engine}.toml")
    if root.text("engine") != engine:
        raise root.error("engine", f"expected {engine!r}, the name of the file")
    clear = root.texts("clear", ())
    for name in clear:
        if name not in {rule.name for rule in profile.caches}:
            raise root.error("clear", f"the profile {engine} has no cache {name!r}")
    remedies = tuple(_remedy(table, profile) for table in root.tables("rung"))
    _check_rungs(root, remedies)
    root.done()
    return Ladder(engine, remedies, clear, profile.grammar, profile.ready.limit_s)


def _check_rungs(root: Table, remedies: tuple[Remedy, ...]) -> None:
    names = [remedy.name for remedy in remedies]
    if not 0 < len(names) <= MAX_RUNGS:
        raise root.error("rung", f"expected 1 to {MAX_RUNGS} rungs, found {len(names)}")
    if len(set(names)) < len(names):
        raise root.error("rung", f"two rungs have one name: {', '.join(names)}")
    if not any(not remedy.edits and remedy.gate.allows(None) for remedy in remedies):
        raise root.error("rung", "expected one rung without edits and versions, which every engine takes")


def _remedy(table: Table, profile: EngineProfile) -> Remedy:
    remedy = Remedy(
        name=table.text("name"),
        title=table.text("title"),
        cost=table.text("cost"),
        launches=table.whole("launches", 1),
        edits=_edits(table, profile),
        gate=read_gate(table),
    )
    if not 1 <= remedy.launches <= 10:
        raise table.error("launches", f"expected 1 to 10, found {remedy.launches}")
    table.done()
    return remedy


def _edits(table: Table, profile: EngineProfile) -> tuple[Edit, ...]:
    edits: list[Edit] = []
    for key, read in (("flags", parse_edit), ("remove", _remove)):
        edits += [_one(table, key, text, profile.grammar, read) for text in table.texts(key, ())]
    variables = table.table("env")
    edits += [SetEnv(name, variables.text(name)) for name, _ in variables.items()]
    edits += [UnsetEnv(name) for name in table.texts("unset", ())]
    for cache in table.texts("fresh", ()):
        if cache not in profile.fresh_env:
            raise table.error("fresh", f"the profile {profile.name} has no fresh_env.{cache}")
        edits.append(Fresh(cache))
    return tuple(edits)


def _one(table: Table, key: str, text: str, grammar: Grammar, read: Callable[[str, Grammar], Edit]) -> Edit:
    try:
        return read(text, grammar)
    except ValueError as error:
        raise table.error(key, str(error)) from error


def _remove(text: str, grammar: Grammar) -> Edit:
    name = text.removesuffix(VALUED)
    if not name.startswith("-") or " " in name or "=" in name:
        raise ValueError(f"expected a flag, or a flag and {VALUED.strip()} for its value, found {text!r}")
    return Remove(grammar.name(name), text.endswith(VALUED))
