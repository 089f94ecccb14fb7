"""Serving and suspecting: what speaks against a worker, and what refutes it. Pure."""

from __future__ import annotations

from dataclasses import replace

from defib.core import budget
from defib.core.events import (
    CanaryDone,
    CanaryOutcome,
    Elapsed,
    Exited,
    Found,
    GpuFault,
    HealthFailed,
    ProcessKind,
    Progressed,
    Stalled,
    Symptom,
)
from defib.core.moves import accused, note_xid, persist, probe_suspect, serve, told, traffic
from defib.core.state import MAX_WORKED, Turn
from defib.core.steps import convict, died, suspect, weigh
from defib.core.witnesses import Case


def _resting(t: Turn) -> bool:
    """In observe nothing was done about the last verdict: to reach it again at once would say nothing new."""
    return t.at < t.state.observe_rest_until


def serving_found(t: Turn, e: Found) -> None:
    if e.cause and not _resting(t):
        suspect(t, Case(t.at).with_found(e))


def serving_exited(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.OTHER or (e.ordered and e.kind is not ProcessKind.ROOT):
        return
    case = t.state.case or Case(t.at)
    name = e.name or e.kind.value
    case = replace(case, exits=(*case.exits, name))
    t.state = replace(t.state, case=case, alive=t.state.alive and e.kind is not ProcessKind.ROOT)
    if t.rules.observe and e.kind is ProcessKind.ROOT:
        died(t, ProcessKind.ROOT, e.code)
        return
    t.note("exited", generation=t.state.generation, process=name, pid=e.pid, code=e.code)
    convict(t, case)


def serving_health(t: Turn, e: HealthFailed) -> None:
    if not _resting(t):
        suspect(t, replace(Case(t.at), health=True))


def serving_symptom(t: Turn, e: Symptom) -> None:
    if t.at >= t.state.symptoms_rest_until and not _resting(t):
        suspect(t, Case(t.at).with_symptom(e))


def serving_stalled(t: Turn, e: Stalled) -> None:
    if t.at >= t.state.stall_rest_until and not _resting(t):
        t.note("stalled", generation=e.generation, silent_s=round(e.silent_s, 1), limit_s=round(e.limit_s, 1))
        suspect(t, replace(Case(t.at), stalled_at=t.at))


def serving_gpu_fault(t: Turn, e: GpuFault) -> None:
    note_xid(t, e)
    if e.ours and not _resting(t):
        suspect(t, Case(t.at).with_xid(e))


def serving_progressed(t: Turn, e: Progressed) -> None:
    if not e.step:
        t.state = replace(t.state, traffic_seen=True)


def survived(t: Turn, e: Elapsed) -> None:
    """The end of probation, if there was traffic."""
    s = t.state
    if not s.traffic_seen:
        t.wait("probation", t.rules.probation_s)
        return
    t.state = replace(s, ledger=budget.forgiven(s.ledger, s.launched_at), worked=_with_this(t))
    t.forget("probation")
    t.note("survived_probation", generation=s.generation)
    persist(t)


def _with_this(t: Turn) -> tuple[tuple[str, str], ...]:
    """What worked, with this rung for the cause that led here."""
    s = t.state
    if not s.cause:
        return s.worked
    others = tuple(pair for pair in s.worked if pair[0] != s.cause)
    return (*others, (s.cause, t.rules.rungs[s.rung].name))[-MAX_WORKED:]


def suspecting_found(t: Turn, e: Found) -> None:
    case = t.state.case or Case(t.at)
    known = accused(case)
    t.state = replace(t.state, case=case.with_found(e))
    if e.cause and not known:
        traffic(t)
    weigh(t)


def suspecting_symptom(t: Turn, e: Symptom) -> None:
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=case.with_symptom(e))
    weigh(t)


def suspecting_health(t: Turn, e: HealthFailed) -> None:
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=replace(case, health=True))
    traffic(t)
    weigh(t)


def suspecting_stalled(t: Turn, e: Stalled) -> None:
    """Said again while it lasts; only the first is an accusation, or no answer could ever be late enough."""
    case = t.state.case or Case(t.at)
    if case.stalled_at is None:
        t.state = replace(t.state, case=replace(case, stalled_at=t.at))
        weigh(t)


def suspecting_gpu_fault(t: Turn, e: GpuFault) -> None:
    note_xid(t, e)
    if e.ours:
        case = t.state.case or Case(t.at)
        t.state = replace(t.state, case=case.with_xid(e))
        traffic(t)
        weigh(t)


def suspecting_progressed(t: Turn, e: Progressed) -> None:
    case = t.state.case
    if case is None:
        return
    t.state = replace(t.state, case=replace(case, tokens_at=max(case.tokens_at, e.token_at)))
    if e.step:
        _stepped(t, case, e)
    elif not case.health and e.token_at >= case.accused_at + t.rules.refute_after_s:
        _false_alarm(t, "a token was delivered after the finding")


def _stepped(t: Turn, case: Case, e: Progressed) -> None:
    """The engine works: so it does not hang. Whether its answers are any good, a step does not say."""
    if case.stalled_at is None or e.token_at < case.stalled_at:
        return
    case = replace(case, stalled_at=None)
    if case.symptoms or accused(case):
        t.state = replace(t.state, case=case)
    else:
        _false_alarm(t, "the engine counted a step")


def suspecting_canary(t: Turn, e: CanaryDone) -> None:
    case = t.state.case
    if case is None:
        return
    t.state = replace(t.state, probe=0)
    t.note("canary", purpose="suspect", outcome=e.outcome.value, detail=e.detail)
    good = e.outcome in (CanaryOutcome.ANSWERED, CanaryOutcome.DIFFERS)
    if good and e.sent_at >= case.accused_at:
        _false_alarm(t, "the canary was answered")
        return
    if good:  # sent before the latest accusation: ask again
        probe_suspect(t)
        return
    moved = case.tokens_at > e.sent_at
    outcome = CanaryOutcome.BLIND if e.outcome is CanaryOutcome.TIMEOUT and moved else e.outcome
    t.state = replace(t.state, case=replace(case, canary=outcome))
    if outcome is not CanaryOutcome.BLIND:
        traffic(t)
    weigh(t)


def _false_alarm(t: Turn, why: str) -> None:
    case = t.state.case
    if case is not None and not accused(case):
        t.state = replace(t.state, symptoms_rest_until=t.at + t.rules.symptom_rest_s)
    _rest_stall(t)
    t.note("false_alarm", generation=t.state.generation, why=why, **(told(case) if case else {}))
    serve(t)


def _rest_stall(t: Turn) -> None:
    if t.state.case is not None and t.state.case.stalled_at is not None:
        t.state = replace(t.state, stall_rest_until=t.at + t.rules.stall_rest_s)


def inconclusive(t: Turn, e: Elapsed) -> None:
    case = t.state.case
    t.note("inconclusive", generation=t.state.generation, **(told(case) if case else {}))
    _rest_stall(t)
    serve(t)


def survives_later(t: Turn, e: Elapsed) -> None:
    """Not while it stands accused."""
    t.wait("probation", t.rules.suspect_window_s)


def replaying_found(t: Turn, e: Found) -> None:
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=case.with_found(e))
    if e.cause:
        suspect(t, t.state.case or case)
