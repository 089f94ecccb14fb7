"""What the three processes of the fake worker say to each other, pickled over pipes."""

from dataclasses import dataclass, field

from defib.demo.faults import Fault


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the worker must know of a request before its first step."""

    id: str
    prompt_ids: list[int]
    fault: Fault | None
    wait_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step: requests that are new, those that run (new ones included), those that are gone."""

    new: list[NewRequest]
    running: list[str]
    gone: list[str]


@dataclass(slots=True)
class Result:
    """Tokens by request; requests that failed alone; or the error that ends the engine."""

    tokens: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Loading is over. `worker_pid` is None in the one-GPU layout."""

    worker_pid: int | None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Loading failed; the log says why."""


@dataclass(frozen=True, slots=True)
class Add:
    """A request for the engine."""

    request: NewRequest
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of this request has gone."""

    id: str


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one step gave: (request, token or None if it failed alone), and the engine's gauges."""

    items: list[tuple[str, int | None]]
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Dead:
    """The engine has failed; nothing will come any more."""
