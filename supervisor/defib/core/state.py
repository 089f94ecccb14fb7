"""The machine's whole memory, as one frozen value, and the rules it goes by. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from defib.core.budget import Budget, Ledger, Rung
from defib.core.commands import Command, Note, Value, Wait
from defib.core.witnesses import Case


class Phase(StrEnum):
    """Where the instance stands (design.md section 3)."""

    STARTING = "starting"
    SERVING = "serving"
    SUSPECTING = "suspecting"
    CAPTURING = "capturing"
    KILLING = "killing"
    GATING = "gating"
    CLEARING = "clearing"
    LAUNCHING = "launching"
    PROVING = "proving"
    REPLAYING = "replaying"
    STOPPING = "stopping"
    PAUSED = "paused"
    STUCK = "stuck"
    DOWN = "down"


MAX_WORKED = 64


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator may set. Seconds unless said otherwise."""

    rungs: tuple[Rung, ...] = (Rung("same-again", 1), Rung("eager", 2))
    budget: Budget = field(default_factory=Budget)
    caches: tuple[str, ...] = ("triton",)
    """Caches moved aside for a poisoned context."""
    observe: bool = False
    on_spent: str = "stay"
    """`stay` or `exit`: what a spent budget does."""
    start_limit_s: float = 900.0
    """From launch to ready; counted anew by whoever did not see the launch."""
    suspect_window_s: float = 15.0
    suspect_canary_s: float = 10.0
    prove_canary_s: float = 60.0
    capture_limit_s: float = 5.0
    kill_limit_s: float = 30.0
    gate_limit_s: float = 60.0
    clear_limit_s: float = 20.0
    launch_limit_s: float = 20.0
    replay_limit_s: float = 120.0
    probation_s: float = 120.0
    lease_renew_s: float = 10.0
    stuck_retry_s: float = 30.0
    launch_retry_s: float = 5.0
    """A launch that could not even be made (no disk, no process) is tried again after this long."""
    linger_s: float = 60.0
    refute_after_s: float = 0.25
    observe_rest_s: float = 300.0
    """In observe, a worker whose end would have been ordered is accused again only after this long."""
    stall_rest_s: float = 60.0
    """After a suspicion that a stall had raised and that came to nothing, silence alone raises none for this long."""
    symptom_rest_s: float = 2.0
    """After a false alarm that only symptoms had raised, symptoms alone raise none for this long."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything the machine knows. `waits` maps the name of a deadline to its current ticket."""

    phase: Phase = Phase.STARTING
    generation: int = 0
    address: str | None = None
    launched_at: float = 0.0
    alive: bool = False
    """The root process of the generation is there, as far as we were told."""
    ready: bool = False
    """This generation said so; it says it once."""
    proven: bool = False
    ever_ready: bool = False
    rung: int = 0
    unmade: bool = False
    """LAUNCHING only: the launch could not be made and is tried again soon; `generation` is still the dead one."""
    ticket: int = 0
    pending: int = 0
    """Ticket of the effect or canary that we wait for; 0: none."""
    probe: int = 0
    """Ticket of the suspect canary under way; 0: none."""
    waits: tuple[tuple[str, int], ...] = ()
    case: Case | None = None
    incident: str | None = None
    incidents: int = 0
    cause: str = ""
    bad_rungs: frozenset[str] = frozenset()
    ledger: Ledger = ()
    ready_in_s: float | None = None
    answered: bool = False
    """The canary was answered once by this instance: an error is news from then on."""
    symptoms_rest_until: float = 0.0
    stall_rest_until: float = 0.0
    observe_rest_until: float = 0.0
    traffic_seen: bool = False
    worked: tuple[tuple[str, str], ...] = ()
    """(cause, rung) pairs that survived probation, oldest first, at most MAX_WORKED."""
    end_code: int | None = None
    """Exit code of the worker's root that we saw last, or the one that we finish with."""
    reason: str = ""
    """Why we finish, or what we are stuck at."""
    observed: int = 0
    """In observe: the generation whose death is on record already."""


class Turn:
    """One step in the making: a state to replace piece by piece, and the commands said so far."""

    __slots__ = ("at", "commands", "rules", "state")

    def __init__(self, state: State, rules: Rules, at: float) -> None:
        self.state, self.rules, self.at = state, rules, at
        self.commands: list[Command] = []

    def say(self, command: Command) -> None:
        self.commands.append(command)

    def note(self, name: str, **fields: Value) -> None:
        self.commands.append(Note(name, tuple(fields.items())))

    def ticket(self) -> int:
        """A number that no earlier command carried."""

        self.state = replace(self.state, ticket=self.state.ticket + 1)
        return self.state.ticket

    def wait(self, name: str, seconds: float) -> None:
        """(Re)arms the deadline of this name."""

        ticket = self.ticket()
        others = tuple(w for w in self.state.waits if w[0] != name)
        self.state = replace(self.state, waits=(*others, (name, ticket)))
        self.say(Wait(name, self.at + seconds, ticket))

    def forget(self, *names: str) -> None:
        """Disarms deadlines."""

        self.state = replace(self.state, waits=tuple(w for w in self.state.waits if w[0] not in names))
