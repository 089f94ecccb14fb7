"""From the verdict to proof: how each step of a recovery ends. Pure."""

from __future__ import annotations

from dataclasses import replace

from defib.core import budget
from defib.core.events import (
    CanaryDone,
    CanaryOutcome,
    Done,
    Elapsed,
    Exited,
    Found,
    GpuFault,
    ProcessKind,
    Ready,
    Replayed,
)
from defib.core.moves import (
    await_ready,
    await_worker,
    enter,
    finish,
    learn,
    note_would,
    note_xid,
    persist,
    serve,
    settle,
)
from defib.core.starting import ROOT_FOLLOWS_S
from defib.core.state import Phase, Turn
from defib.core.steps import OBSERVED_END, be_stuck, clear, gate, kill, launch, prove, replay, rung_failed, start_died
from defib.core.witnesses import Case


def more_evidence(t: Turn, e: Found) -> None:
    case = t.state.case or Case(t.at)
    before = case.cause()
    t.state = replace(t.state, case=case.with_found(e))
    after = t.state.case.cause() if t.state.case else None
    if before is None and after is not None and t.state.phase is Phase.CAPTURING:
        t.state = replace(t.state, cause=after.signature)
        t.note("cause", incident=t.state.incident, fault=after.fault.value, cause=after.signature)


def more_xids(t: Turn, e: GpuFault) -> None:
    note_xid(t, e)
    if e.ours:
        t.state = replace(t.state, case=(t.state.case or Case(t.at)).with_xid(e))
        persist(t)


def captured(t: Turn, e: Done) -> None:
    t.note("captured", incident=t.state.incident, ok=e.ok, detail=e.detail)
    _after_capture(t)


def _after_capture(t: Turn) -> None:
    if not t.rules.observe:
        kill(t)
        return
    note_would(t)
    settle(t, "observed")
    s = replace(t.state, observed=t.state.generation, observe_rest_until=t.at + t.rules.observe_rest_s, case=None)
    t.state = s
    if s.alive and s.proven:
        serve(t)
    elif s.alive:
        await_worker(t, t.at)
    else:
        finish(t, 1 if t.state.end_code is None else t.state.end_code, OBSERVED_END)


def capture_late(t: Turn, e: Elapsed) -> None:
    t.note("captured", incident=t.state.incident, ok=False, detail="deadline passed")
    _after_capture(t)


def killed(t: Turn, e: Done) -> None:
    if e.ok:
        t.note("killed", incident=t.state.incident, generation=t.state.generation, detail=e.detail)
        gate(t)
    else:
        be_stuck(t, e.detail)


def kill_late(t: Turn, e: Elapsed) -> None:
    be_stuck(t, "the kill did not report back in time")


def stuck_again(t: Turn, e: Elapsed) -> None:
    kill(t)


def gated(t: Turn, e: Done) -> None:
    t.note("gated", incident=t.state.incident, ok=e.ok, detail=e.detail)
    if e.stuck:
        be_stuck(t, e.detail)
    else:
        clear(t)


def gate_late(t: Turn, e: Elapsed) -> None:
    """A measurement that fails never escalates."""
    t.note("gated", incident=t.state.incident, ok=False, detail="deadline passed")
    clear(t)


def cleared(t: Turn, e: Done) -> None:
    t.note("cleared", incident=t.state.incident, ok=e.ok, detail=e.detail)
    launch(t)


def clear_late(t: Turn, e: Elapsed) -> None:
    t.note("cleared", incident=t.state.incident, ok=False, detail="deadline passed")
    launch(t)


def launched(t: Turn, e: Done) -> None:
    if not e.ok:
        _not_launched(t, e.detail)
        return
    t.state = replace(t.state, address=e.address, alive=True, pending=0)
    t.note("launched", generation=t.state.generation, address=e.address)
    await_ready(t, t.at)


def launching_ready(t: Turn, e: Ready) -> None:
    s = t.state
    if s.address is None:
        return
    learn(t, 1.0)
    prove(t)


def _not_launched(t: Turn, why: str) -> None:
    """There is no such generation: the number is free again. It says nothing of the rung (a full disk, no process to
    be had): only the overall budget counts it. Should only the answer have been lost, the launcher tells of that
    generation before we try again."""
    s = t.state
    t.note("launch_failed", incident=s.incident, generation=s.generation, detail=why)
    ledger = budget.without_rung(s.ledger, s.launched_at)
    t.state = replace(s, ledger=ledger, pending=0, unmade=True, generation=s.generation - 1)
    t.wait("phase", t.rules.launch_retry_s)
    persist(t)


def launching_exited(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.OTHER:
        return
    name = e.name or e.kind.value
    if e.kind is ProcessKind.ROOT:
        t.state = replace(t.state, alive=False, end_code=e.code)
    elif t.state.phase is Phase.LAUNCHING:
        case = t.state.case or Case(t.at)
        t.state = replace(t.state, case=replace(case, exits=(*case.exits, name)))
        t.wait("phase", ROOT_FOLLOWS_S)
        return
    start_died(t, name, e.code)


def launch_late(t: Turn, e: Elapsed) -> None:
    s = t.state
    if s.pending:
        _not_launched(t, "the launch did not report back in time")
    elif s.unmade:
        kill(t)  # the generation before may have left something behind
    else:
        case = s.case or Case(t.at)
        why = "an engine process exited" if case.exits else "not ready within the start limit"
        t.state = replace(s, case=case if case.exits else replace(case, start_limit=True))
        rung_failed(t, why)


def proved(t: Turn, e: CanaryDone) -> None:
    t.note("canary", purpose="prove", outcome=e.outcome.value, detail=e.detail)
    same = t.state.rung == 0
    match e.outcome:
        case CanaryOutcome.ANSWERED:
            t.state = replace(t.state, answered=True)
            replay(t)
        case CanaryOutcome.BLIND:
            replay(t)
        case CanaryOutcome.DIFFERS if not same:
            replay(t)  # other kernels may round otherwise; that it computes is proven
        case _:
            rung_failed(t, f"the canary: {e.outcome.value} {e.detail}".rstrip(), e.outcome)


def prove_late(t: Turn, e: Elapsed) -> None:
    """It has a time limit of its own: this silence is ours, not the worker's."""
    t.note("canary", purpose="prove", outcome=CanaryOutcome.BLIND.value, detail="it did not report back")
    replay(t)


def replayed(t: Turn, e: Replayed) -> None:
    t.note("replayed", incident=t.state.incident, answered=e.answered, failed=e.failed)
    recovered(t)


def recovered(t: Turn) -> None:
    settle(t, "recovered")
    enter(t, Phase.SERVING)
    t.wait("probation", t.rules.probation_s)


def replay_late(t: Turn, e: Elapsed) -> None:
    recovered(t)
