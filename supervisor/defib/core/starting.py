"""A supervisor that comes up, a worker that starts for the first time or was replaced by someone else. Pure."""

from __future__ import annotations

from dataclasses import replace

from defib.core import budget, witnesses
from defib.core.events import (
    Adopted,
    Booted,
    CanaryDone,
    CanaryOutcome,
    Elapsed,
    Exited,
    FaultClass,
    Found,
    ProcessKind,
    Ready,
    Resume,
)
from defib.core.moves import await_budget, await_ready, await_worker, enter, learn, serve, settle, traffic
from defib.core.state import Phase, Turn
from defib.core.steps import ask_first, capture, convict, died, kill, rung_failed, start_died, suspect
from defib.core.witnesses import Case

ROOT_FOLLOWS_S = 10.0
"""While a worker starts, its root follows a dead engine process within this time, with the code that tells why."""
FIRST_START_SHARE = 0.6
"""A relaunch finds warm caches: on an H200 it took 34 to 37 s after a first start of 61 s, 51 to 57 s after one of 87 s
(vLLM 0.26). The first start alone would have told clients to go away who then could have been served."""


def booted(t: Turn, e: Booted) -> None:
    resume = e.resume or Resume(generation=e.generation)
    known = resume.generation == e.generation
    t.state = replace(
        t.state,
        generation=e.generation,
        address=e.address,
        launched_at=budget.ordered_at(resume.ledger, e.launched_at),
        end_code=e.code,
        alive=e.running,
        ready=resume.proven and known,
        proven=resume.proven and known,
        ever_ready=resume.ever_ready,
        rung=min(resume.rung, len(t.rules.rungs) - 1),
        incident=resume.incident,
        incidents=resume.incidents,
        cause=resume.cause,
        bad_rungs=frozenset(resume.bad_rungs),
        ledger=resume.ledger,
        ready_in_s=resume.ready_in_s,
        answered=resume.answered,
        worked=resume.worked,
    )
    t.note("booted", generation=e.generation, running=e.running, resumed=resume.phase)
    if e.resume is not None and resume.generation > 0 and not known and e.running:
        t.note("adopted", generation=e.generation)
    if t.state.phase is Phase.PAUSED:  # an operator was faster than the launcher's snapshot
        resume = replace(resume, phase=Phase.PAUSED.value)
    _resume(t, e, resume, known)


def _resume(t: Turn, e: Booted, resume: Resume, known: bool) -> None:
    recovering = known and resume.incident is not None and not t.rules.observe
    if resume.phase == Phase.PAUSED:
        settle(t, "paused")
        enter(t, Phase.PAUSED)
        traffic(t)
    elif resume.phase == Phase.DOWN and not e.running:
        settle(t, "down")
        enter(t, Phase.DOWN)
        traffic(t)
        await_budget(t)
    elif recovering and resume.phase == Phase.CAPTURING:
        t.state = replace(t.state, case=_resumed(t, resume), proven=False)
        capture(t)
    elif recovering and resume.phase in (Phase.KILLING, Phase.GATING, Phase.CLEARING, Phase.STUCK):
        t.state = replace(t.state, case=_resumed(t, resume))
        kill(t)
    elif recovering and resume.phase in (Phase.LAUNCHING, Phase.PROVING) and not e.running:
        enter(t, Phase.LAUNCHING)
        start_died(t, "root", e.code)
    elif not e.running:
        died(t, "root", e.code)
    elif known and resume.proven:
        if resume.phase == Phase.SUSPECTING:
            suspect(t, Case(t.at))  # what is parked stays parked until the canary has spoken
        else:
            serve(t)
        t.wait("probation", t.rules.probation_s)
    else:
        await_worker(t, e.launched_at)


def _resumed(t: Turn, resume: Resume) -> Case:
    """All that is left of what an earlier supervisor knew against this generation."""
    return Case(t.at, resumed=FaultClass(resume.fault) if resume.fault in set(FaultClass) else None)


def adopted(t: Turn, e: Adopted) -> None:
    """Someone else put a new worker in place of ours: it is watched like one of ours, from its start."""
    s = t.state
    awaited = s.phase is Phase.LAUNCHING and s.generation == e.generation
    if e.generation <= s.generation and not awaited:
        return
    t.note("adopted", generation=e.generation)
    t.forget("lease", "probation")
    t.state = replace(
        t.state,
        generation=e.generation,
        address=e.address,
        launched_at=t.at,
        alive=True,
        ready=False,
        proven=False,
        traffic_seen=False,
        case=None,
    )
    if t.state.phase is Phase.PAUSED:  # hands off stays hands off
        enter(t, Phase.PAUSED)
        traffic(t)
        return
    await_worker(t, t.at)


def starting_ready(t: Turn, e: Ready) -> None:
    learn(t, FIRST_START_SHARE)
    if t.state.case is None or not t.state.case.exits:
        ask_first(t)


def starting_canary(t: Turn, e: CanaryDone) -> None:
    """A first start is opened whatever the canary says: it has never been answered here, so it proves nothing yet."""
    answered = e.outcome in (CanaryOutcome.ANSWERED, CanaryOutcome.DIFFERS)
    t.note("canary", purpose="reference", outcome=e.outcome.value, detail=e.detail)
    case = replace(t.state.case or Case(t.at), canary=e.outcome)
    failed = e.outcome in witnesses.FAILED and (t.state.answered or witnesses.sufficient(case))
    if failed and not t.rules.observe:
        rung_failed(t, f"the canary: {e.outcome.value} {e.detail}".rstrip(), e.outcome)
        return
    t.state = replace(t.state, proven=True, answered=t.state.answered or answered)
    if not answered:
        t.note("unproven", generation=t.state.generation, outcome=e.outcome.value)
    serve(t)


def starting_found(t: Turn, e: Found) -> None:
    """Before ready a finding only explains: an exit or the start limit decides."""
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=case.with_found(e))


def starting_exited(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.ROOT:
        t.state = replace(t.state, alive=False)
        died(t, e.kind.value, e.code)
    elif e.kind is ProcessKind.ENGINE:
        case = t.state.case or Case(t.at)
        t.state = replace(t.state, pending=0, case=replace(case, exits=(*case.exits, e.name or e.kind.value)))
        t.wait("phase", ROOT_FOLLOWS_S)
        t.note("engine_exited", generation=t.state.generation, pid=e.pid, code=e.code)


def start_late(t: Turn, e: Elapsed) -> None:
    if t.state.pending:  # the reference canary did not even report back
        t.state = replace(t.state, proven=True)
        serve(t)
        return
    case = t.state.case or Case(t.at)
    if t.rules.observe and t.state.observed == t.state.generation:
        await_ready(t, t.at)  # it was said once
        return
    convict(t, case if case.exits else replace(case, start_limit=True))
