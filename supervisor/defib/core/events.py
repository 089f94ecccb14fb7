"""What the machine is told: facts in the past, each with the time (`at`, CLOCK_BOOTTIME seconds) it was learnt.

Nothing here decides. A fact about the worker carries its generation; a result of an effect carries the ticket of
the command that started it, so that late ones can be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FaultClass(StrEnum):
    """What kind of failure a finding speaks of (design.md section 5)."""

    POISONED_CONTEXT = "poisoned_context"
    GPU_HARDWARE = "gpu_hardware"
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    HANG = "hang"
    COMM_FAILURE = "comm_failure"
    CONFIG_ERROR = "config_error"
    ENGINE_BUG_HOST = "engine_bug_host"
    SHUTDOWN = "shutdown"
    HEALTHY = "healthy"
    UNKNOWN = "unknown"


class ProcessKind(StrEnum):
    """What a process of the worker is to its engine; only ROOT and ENGINE exits are witnesses."""

    ROOT = "root"
    ENGINE = "engine"
    OTHER = "other"


class Effect(StrEnum):
    """The slow things that the machine starts and hears back from."""

    CAPTURE = "capture"
    KILL = "kill"
    GATE = "gate"
    CLEAR = "clear"
    LAUNCH = "launch"


class CanaryOutcome(StrEnum):
    """How a canary ended.

    REFUSED: nothing listens any more where the worker listened. BLIND: it could not be sent for another reason, or
    was turned away for its key or form; never a failure.
    """

    ANSWERED = "answered"
    DIFFERS = "differs"
    ERROR = "error"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    BLIND = "blind"


@dataclass(frozen=True, slots=True)
class Resume:
    """What an earlier supervisor of this instance knew, as persisted; the default is a first start."""

    phase: str = "starting"
    generation: int = 1
    proven: bool = False
    ever_ready: bool = False
    rung: int = 0
    incident: str | None = None
    incidents: int = 0
    cause: str = ""
    bad_rungs: tuple[str, ...] = ()
    ledger: tuple[tuple[float, str, str], ...] = ()
    """Launches that count: (at, cause, rung); `at` already turned into this boot's clock."""
    ready_in_s: float | None = None
    answered: bool = False
    fault: str = ""
    """Class of the incident under way: a successor must know which caches to clear."""
    worked: tuple[tuple[str, str], ...] = ()
    """(cause, rung) of what survived probation, oldest first: tried first when the cause comes back."""


@dataclass(frozen=True, slots=True)
class Booted:
    """The supervisor came up and took its first snapshot of the launcher."""

    at: float
    generation: int
    running: bool
    address: str | None
    launched_at: float
    code: int | None = None
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class Adopted:
    """The worker was replaced by someone else (kubelet, systemd): a generation that we did not launch."""

    at: float
    generation: int
    address: str | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine says that it is ready (its health endpoint answered 200)."""

    at: float
    generation: int


@dataclass(frozen=True, slots=True)
class Found:
    """A signature matched a record (group T). `cause` is False for consequences and hints."""

    at: float
    generation: int
    signature: str
    fault: FaultClass
    cause: bool
    process: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """A process of the worker ended. `code` and `signal` are None where the kernel did not tell."""

    at: float
    generation: int
    pid: int
    kind: ProcessKind
    code: int | None = None
    signal: int | None = None
    ordered: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class HealthFailed:
    """The health endpoint answered 503: the engine says of itself that it is dead (group W)."""

    at: float
    generation: int
    status: int


@dataclass(frozen=True, slots=True)
class Symptom:
    """The gateway parked or lost an answer that smells of engine death (group T; three unlike ones are W)."""

    at: float
    generation: int
    exchange: str
    connection: str
    body: str
    kind: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """A token reached the gateway from this generation at `token_at`; `step`: none did, but the engine counted one
    more step of its own. A step refutes that the engine hangs, and nothing else."""

    at: float
    generation: int
    token_at: float
    step: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """Exchanges are in flight and the engine has made no progress for `silent_s`, longer than `limit_s`, which was
    learnt from this worker's own steps (group T: one long request can look like this). Said again while it lasts."""

    at: float
    generation: int
    silent_s: float
    limit_s: float
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class GpuFault:
    """The driver reported an Xid, by NVML or by the kernel log.

    `ours`: it names a process of this generation, or it names none and the whole GPU is ours (then it is group W);
    otherwise it is only worth a note. `source`: `nvml` or `kmsg`. `gpu`: PCI bus id or UUID, as the source says.
    """

    at: float
    generation: int
    xid: int
    gpu: str
    ours: bool
    fault: FaultClass = FaultClass.POISONED_CONTEXT
    pid: int | None = None
    source: str = "nvml"
    text: str = ""


@dataclass(frozen=True, slots=True)
class CanaryDone:
    """A canary ended. `sent_at`: an answer only refutes what was found before it was sent."""

    at: float
    ticket: int
    outcome: CanaryOutcome
    sent_at: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """An effect ended. `ok` False is an expected failure, `detail` says which; `values` are facts for later steps."""

    at: float
    ticket: int
    effect: Effect
    ok: bool
    detail: str = ""
    address: str | None = None
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Replayed:
    """The gateway has replayed what it held for this generation."""

    at: float
    generation: int
    answered: int
    failed: int


@dataclass(frozen=True, slots=True)
class Elapsed:
    """A deadline that the machine asked for has come."""

    at: float
    name: str
    ticket: int


@dataclass(frozen=True, slots=True)
class GatewayLost:
    at: float


@dataclass(frozen=True, slots=True)
class GatewayBack:
    at: float
    generation: int
    gate: str


@dataclass(frozen=True, slots=True)
class StopOrdered:
    """The instance stops: whatever the worker does from now on is no fault."""

    at: float


@dataclass(frozen=True, slots=True)
class PauseOrdered:
    """An operator wants us to keep our hands off."""

    at: float


@dataclass(frozen=True, slots=True)
class ResumeOrdered:
    """An operator gives the worker back to us; also frees a spent budget once."""

    at: float


@dataclass(frozen=True, slots=True)
class RestartOrdered:
    """An operator wants the worker restarted now: on this rung, or (empty) on the one that it has."""

    at: float
    rung: str = ""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The state store could not be written: we go on in memory."""

    at: float
    detail: str = field(default="")


Event = (
    Booted
    | Adopted
    | Ready
    | Found
    | Exited
    | HealthFailed
    | Symptom
    | Progressed
    | Stalled
    | GpuFault
    | CanaryDone
    | Done
    | Replayed
    | Elapsed
    | GatewayLost
    | GatewayBack
    | StopOrdered
    | PauseOrdered
    | ResumeOrdered
    | RestartOrdered
    | StoreFailed
)

EVENTS: tuple[type[Event], ...] = (
    Booted,
    Adopted,
    Ready,
    Found,
    Exited,
    HealthFailed,
    Symptom,
    Progressed,
    Stalled,
    GpuFault,
    CanaryDone,
    Done,
    Replayed,
    Elapsed,
    GatewayLost,
    GatewayBack,
    StopOrdered,
    PauseOrdered,
    ResumeOrdered,
    RestartOrdered,
    StoreFailed,
)
