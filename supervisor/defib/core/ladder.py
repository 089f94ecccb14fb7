"""The ladder: ordered remedies, and what each makes of a launch. Pure.

Which rung comes next is the budget's business (`core/budget.py`); this module says which rungs an engine of this
version can take at all, and what they change. A remedy with a flag that the version doesn't know is left out, since
such a flag kills the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from defib.core.budget import Rung
from defib.core.launch_spec import (
    PLAIN,
    UNGATED,
    Delta,
    Edit,
    Gate,
    Grammar,
    Key,
    LaunchSpec,
    Switch,
    Value,
    delta_from,
    edit,
)
from defib.core.state import Rules

MAX_RUNGS = 16
"""A longer ladder is refused: at a minute a launch nobody waits that long."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A named change to the launch spec. `launches`: how often per cause and window; `cost`: for people."""

    name: str
    title: str
    cost: str
    launches: int = 1
    edits: tuple[Edit, ...] = ()
    gate: Gate = UNGATED

    def usable(self, grammar: Grammar, version: str | None) -> bool:
        """Whether an engine of this version (None: unknown) takes it."""
        return self.gate.allows(version) and all(_known(change, grammar, version) for change in self.edits)


def _known(change: Edit, grammar: Grammar, version: str | None) -> bool:
    match change:
        case Switch() | Value() | Key():
            return grammar.knows(change.name, version)
        case _:
            return True


@dataclass(frozen=True, slots=True)
class Additions:
    """Everything that a ladder can add to a launch: the launcher accepts nothing else (docs/seam.md)."""

    args: tuple[str, ...]
    env: Mapping[str, tuple[str, ...]]
    fresh: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ladder:
    """The remedies of one engine, in order. `clear`: caches moved aside for a poisoned context."""

    engine: str
    remedies: tuple[Remedy, ...]
    clear: tuple[str, ...] = ()
    grammar: Grammar = field(default=PLAIN)
    start_limit_s: float = 900.0

    def usable(self, version: str | None) -> tuple[Remedy, ...]:
        """The rungs that an engine of this version takes."""
        return tuple(remedy for remedy in self.remedies if remedy.usable(self.grammar, version))

    def unedited(self) -> Ladder:
        """For a command that can't be edited (a shell's `-c`, a container's): only rungs that change nothing."""
        return replace(self, remedies=tuple(remedy for remedy in self.remedies if not remedy.edits))

    def rules(self, version: str | None, caches: Sequence[str], observe: bool, argv: Sequence[str] = ()) -> Rules:
        """The machine's rules; only caches that the instance knows are cleared.

        A rung that changes nothing in this command (`eager` where it is eager already) is no other configuration:
        it is left out.
        """
        remedies = [r for r in self.usable(version) if not r.edits or not argv or self._changes(r, argv)]
        return Rules(
            rungs=tuple(Rung(remedy.name, remedy.launches) for remedy in remedies),
            caches=tuple(name for name in self.clear if name in caches),
            observe=observe,
            start_limit_s=self.start_limit_s,
        )

    def _changes(self, remedy: Remedy, argv: Sequence[str]) -> bool:
        base = LaunchSpec(tuple(argv))
        return delta_from(base, edit(base, remedy.edits, self.grammar)) != Delta()

    def delta(self, rung: str, argv: Sequence[str], version: str | None) -> Delta:
        """What the rung of this name makes of a command. Raises KeyError for a rung that this version hasn't."""
        base = LaunchSpec(tuple(argv))
        for remedy in self.usable(version):
            if remedy.name == rung:
                return delta_from(base, edit(base, remedy.edits, self.grammar))
        raise KeyError(f"no rung {rung!r} for {self.engine} {version or '(version unknown)'}")

    def additions(self, argv: Sequence[str], version: str | None) -> Additions:
        """The arguments, variables and fresh caches that any rung can add to this command."""
        args: dict[str, None] = {}
        env: dict[str, dict[str, None]] = {}
        fresh: dict[str, None] = {}
        for remedy in self.usable(version):
            delta = self.delta(remedy.name, argv, version)
            args |= dict.fromkeys(delta.append)
            fresh |= dict.fromkeys(delta.fresh)
            for name, value in delta.env.items():
                env.setdefault(name, {})[value] = None
            for name in delta.unset:
                env.setdefault(name, {})
        return Additions(tuple(args), {name: tuple(values) for name, values in env.items()}, tuple(fresh))
