"""The machine: events in, commands out. Its rules:

1. One table answers every (phase, event) pair; what is not listed for a phase is ignored there, by name.
2. Facts of another generation, and ends of effects whose ticket is not pending, are dropped before the table.
3. At most one generation lives. A launch is ordered only after KillTree of the one before it was done.
4. No kill without sufficient witnesses (`witnesses.sufficient`), a start limit or a failed proof; none in observe,
   none while paused.
5. Traffic reaches a generation only after its canary was answered (or could not be sent: blind). Where none has ever
   been answered it proves nothing: that first start is opened whatever it says.
6. From the verdict until the next generation is proven, traffic is held, refused or stopped, never open.
7. Every phase that waits has a deadline that leads out of it.
8. A launch is entered in the ledger when it is ordered, and leaves it after probation under traffic.
9. Once stopping, nothing is suspected, killed or launched; only an order to finish is said until it is heard.
10. Every incident that opens settles.

Time arrives on the event; timers leave as Wait. The machine never asks the world a question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from defib.core import moves, orders, recovering, starting, watching
from defib.core.commands import Command
from defib.core.events import (
    Adopted,
    Booted,
    CanaryDone,
    Done,
    Effect,
    Elapsed,
    Event,
    Exited,
    Found,
    GatewayBack,
    GatewayLost,
    GpuFault,
    HealthFailed,
    PauseOrdered,
    Progressed,
    Ready,
    Replayed,
    RestartOrdered,
    ResumeOrdered,
    Stalled,
    StopOrdered,
    StoreFailed,
    Symptom,
)
from defib.core.state import Phase, Rules, State, Turn

Handler = Callable[[Turn, Any], None]
Table = Mapping[Phase, Mapping[type[Event], Handler]]


class Machine:
    """Holds the state of one instance and steps it. One owner, one thread; `state` may be read by anyone."""

    def __init__(self, rules: Rules, state: State | None = None, table: Table | None = None) -> None:
        self.rules = rules
        self.state = state or State()
        self.table = TABLE if table is None else table

    def step(self, event: Event) -> list[Command]:
        """The commands that this event leads to, in the order in which they are to be done."""
        turn = Turn(self.state, self.rules, event.at)
        if _current(turn.state, event):
            _handler(self.table, turn.state.phase, type(event))(turn, event)
        self.state = turn.state
        return turn.commands


def _current(s: State, event: Event) -> bool:
    """Rule 2."""
    match event:
        case (
            Ready()
            | Found()
            | Exited()
            | HealthFailed()
            | Symptom()
            | Progressed()
            | Replayed()
            | Stalled()
            | GpuFault()
        ):
            return event.generation == s.generation
        case CanaryDone():
            return event.ticket > 0 and event.ticket in (s.pending, s.probe)
        case Done():
            return event.ticket == s.pending and WAITS_FOR.get(s.phase) is event.effect
        case Elapsed():
            return (event.name, event.ticket) in s.waits
        case _:
            return True


def _on_time(**answers: Handler) -> Handler:
    """An answer for each deadline by its name. A lease is answered alike everywhere: what traffic should do is said
    again."""

    def answer(t: Turn, e: Elapsed) -> None:
        if e.name == "lease":
            moves.traffic(t)
        elif e.name in answers:
            answers[e.name](t, e)

    return answer


ANY: Mapping[type[Event], Handler] = {
    Booted: starting.booted,
    Adopted: starting.adopted,
    StopOrdered: orders.stop,
    PauseOrdered: orders.pause,
    ResumeOrdered: orders.ignore,
    RestartOrdered: orders.restart,
    GatewayLost: orders.gateway_lost,
    GatewayBack: orders.gateway_back,
    StoreFailed: orders.store_failed,
    Exited: orders.mark_dead,
    Ready: orders.ignore,
    Found: orders.ignore,
    HealthFailed: orders.ignore,
    Symptom: orders.ignore,
    Progressed: orders.ignore,
    Stalled: orders.ignore,
    GpuFault: orders.only_note_xid,
    CanaryDone: orders.ignore,
    Done: orders.ignore,
    Replayed: orders.ignore,
    Elapsed: orders.ignore,
}
"""What a phase does with an event that its own row does not name."""

_DEAF: Mapping[type[Event], Handler] = {
    Booted: orders.ignore,
    Adopted: orders.ignore,
    StopOrdered: orders.ignore,
    PauseOrdered: orders.ignore,
    RestartOrdered: orders.ignore,
    GatewayLost: orders.ignore,
    GatewayBack: orders.ignore,
}

TABLE: Table = {
    Phase.STARTING: {
        GpuFault: recovering.more_xids,
        Ready: starting.starting_ready,
        CanaryDone: starting.starting_canary,
        Found: starting.starting_found,
        Exited: starting.starting_exited,
        Elapsed: _on_time(phase=starting.start_late),
    },
    Phase.SERVING: {
        Found: watching.serving_found,
        Exited: watching.serving_exited,
        HealthFailed: watching.serving_health,
        Symptom: watching.serving_symptom,
        Stalled: watching.serving_stalled,
        GpuFault: watching.serving_gpu_fault,
        Progressed: watching.serving_progressed,
        Elapsed: _on_time(probation=watching.survived),
    },
    Phase.SUSPECTING: {
        Found: watching.suspecting_found,
        Exited: watching.serving_exited,
        HealthFailed: watching.suspecting_health,
        Symptom: watching.suspecting_symptom,
        Stalled: watching.suspecting_stalled,
        GpuFault: watching.suspecting_gpu_fault,
        Progressed: watching.suspecting_progressed,
        CanaryDone: watching.suspecting_canary,
        Elapsed: _on_time(phase=watching.inconclusive, probation=watching.survives_later),
    },
    Phase.CAPTURING: {
        Found: recovering.more_evidence,
        GpuFault: recovering.more_xids,
        RestartOrdered: orders.restart_later,
        Done: recovering.captured,
        Elapsed: _on_time(phase=recovering.capture_late),
    },
    Phase.KILLING: {
        Found: recovering.more_evidence,
        GpuFault: recovering.more_xids,
        RestartOrdered: orders.restart_later,
        Done: recovering.killed,
        Elapsed: _on_time(phase=recovering.kill_late),
    },
    Phase.GATING: {
        RestartOrdered: orders.restart_later,
        Done: recovering.gated,
        Elapsed: _on_time(phase=recovering.gate_late),
    },
    Phase.CLEARING: {
        RestartOrdered: orders.restart_later,
        Done: recovering.cleared,
        Elapsed: _on_time(phase=recovering.clear_late),
    },
    Phase.LAUNCHING: {
        RestartOrdered: orders.restart_launching,
        GpuFault: recovering.more_xids,
        Found: starting.starting_found,
        Ready: recovering.launching_ready,
        Done: recovering.launched,
        Exited: recovering.launching_exited,
        Elapsed: _on_time(phase=recovering.launch_late),
    },
    Phase.PROVING: {
        RestartOrdered: orders.restart_launching,
        GpuFault: recovering.more_xids,
        Found: starting.starting_found,
        CanaryDone: recovering.proved,
        Exited: recovering.launching_exited,
        Elapsed: _on_time(phase=recovering.prove_late),
    },
    Phase.REPLAYING: {
        Found: watching.replaying_found,
        Exited: watching.serving_exited,
        HealthFailed: watching.serving_health,
        Symptom: watching.serving_symptom,
        Stalled: watching.serving_stalled,
        GpuFault: watching.serving_gpu_fault,
        Progressed: watching.serving_progressed,
        Replayed: recovering.replayed,
        Elapsed: _on_time(phase=recovering.replay_late),
    },
    Phase.STOPPING: {**_DEAF, Elapsed: _on_time(phase=orders.finish_again)},
    Phase.PAUSED: {
        PauseOrdered: orders.ignore,
        RestartOrdered: orders.refused_while_paused,
        ResumeOrdered: orders.look_again,
        GpuFault: orders.paused_gpu_fault,
        Ready: orders.paused_ready,
        CanaryDone: orders.paused_canary,
        Done: orders.paused_launched,
        Found: orders.paused_found,
        HealthFailed: orders.paused_health,
        Exited: orders.paused_exited,
    },
    Phase.STUCK: {ResumeOrdered: orders.resume_order, Elapsed: _on_time(phase=recovering.stuck_again)},
    Phase.DOWN: {ResumeOrdered: orders.resume_order, Elapsed: _on_time(phase=orders.down_over)},
}


def _handler(table: Table, phase: Phase, kind: type[Event]) -> Handler:
    return table[phase].get(kind) or ANY[kind]


# The effect whose end each phase waits for.
WAITS_FOR: Mapping[Phase, Effect] = {
    Phase.CAPTURING: Effect.CAPTURE,
    Phase.KILLING: Effect.KILL,
    Phase.GATING: Effect.GATE,
    Phase.CLEARING: Effect.CLEAR,
    Phase.LAUNCHING: Effect.LAUNCH,
    Phase.PAUSED: Effect.LAUNCH,
}
