"""The steps of a recovery, each as the way into its phase (design.md section 3). Pure."""

from __future__ import annotations

from dataclasses import replace

from defib.core import budget, witnesses
from defib.core.commands import (
    Capture,
    CheckGate,
    ClearCaches,
    KillTree,
    Launch,
    Probe,
)
from defib.core.events import (
    CanaryOutcome,
    FaultClass,
    ProcessKind,
)
from defib.core.moves import (
    await_budget,
    down_for,
    enter,
    finish,
    note_would,
    open_incident,
    probe_suspect,
    rung_index,
    settle,
    start_effect,
    told,
    traffic,
)
from defib.core.state import Phase, Turn
from defib.core.witnesses import Case

EXIT_BUDGET_SPENT = 69
EXIT_CONFIG = 78
OBSERVED_END = "the worker ended; observe does not restart it"
BAD_FLAG_CODE = 2
"""argparse's exit code for arguments that a program doesn't know."""


def suspect(t: Turn, case: Case) -> None:
    enter(t, Phase.SUSPECTING)
    t.state = replace(t.state, case=case)
    t.note("suspecting", **told(case), generation=t.state.generation)
    t.wait("phase", t.rules.suspect_window_s)
    traffic(t)
    weigh(t)
    if t.state.phase is Phase.SUSPECTING:
        probe_suspect(t)


def weigh(t: Turn) -> None:
    """The verdict, if the witnesses suffice."""
    case = t.state.case
    if case is not None and witnesses.sufficient(case):
        convict(t, case)


def convict(t: Turn, case: Case) -> None:
    s = t.state
    if s.incident is None:
        open_incident(t, f"g{s.generation}")
    t.state = replace(t.state, case=case, cause=case.fingerprint(), proven=s.proven and t.rules.observe)
    t.note(
        "verdict",
        incident=t.state.incident,
        generation=s.generation,
        fault=case.fault().value,
        initiator=case.initiator(),
        cause=t.state.cause,
        **told(case),
        action="would have killed" if t.rules.observe else "recover",
    )
    capture(t)


def capture(t: Turn) -> None:
    enter(t, Phase.CAPTURING)
    t.forget("probation")
    traffic(t)
    ticket = start_effect(t)
    t.wait("phase", t.rules.capture_limit_s)
    t.say(Capture(ticket, t.state.incident or "", t.state.generation, t.at + t.rules.capture_limit_s))


def kill(t: Turn) -> None:
    t.state = replace(t.state, proven=False)
    enter(t, Phase.KILLING)
    traffic(t)
    ticket = start_effect(t)
    t.wait("phase", t.rules.kill_limit_s)
    t.say(KillTree(ticket, t.state.generation, t.state.incident or ""))


def gate(t: Turn) -> None:
    enter(t, Phase.GATING)
    t.state = replace(t.state, alive=False)
    ticket = start_effect(t)
    t.wait("phase", t.rules.gate_limit_s)
    t.say(CheckGate(ticket, t.state.generation))


def clear(t: Turn) -> None:
    s = t.state
    fault = s.case.fault() if s.case else FaultClass.UNKNOWN
    if fault is not FaultClass.POISONED_CONTEXT or not t.rules.caches:
        launch(t)
        return
    enter(t, Phase.CLEARING)
    ticket = start_effect(t)
    t.wait("phase", t.rules.clear_limit_s)
    t.say(ClearCaches(ticket, s.generation, s.incident or "", t.rules.caches))


def launch(t: Turn) -> None:
    s = t.state
    index = _next_rung(t)
    if index is None:
        _go_down(t)
        return
    rung = t.rules.rungs[index].name
    ledger = (*budget.trimmed(s.ledger, t.rules.budget, t.at), (t.at, s.cause, rung))
    t.state = replace(
        s, rung=index, ledger=ledger, generation=s.generation + 1, launched_at=t.at, address=None, alive=False
    )
    t.state = replace(t.state, ready=False, traffic_seen=False, case=None)
    enter(t, Phase.LAUNCHING)
    # The gateway is told of the dead generation's number; it doesn't know the new one until it is opened.
    t.wait("lease", t.rules.lease_renew_s)
    ticket = start_effect(t)
    t.wait("phase", t.rules.launch_limit_s)
    t.note("launch", generation=t.state.generation, rung=rung, launches_counted=len(ledger))
    t.say(Launch(ticket, t.state.generation, rung))


def _next_rung(t: Turn) -> int | None:
    """What worked for this cause before is tried first; should it be spent, the ladder as usual."""
    s = t.state
    first = rung_index(t, dict(s.worked).get(s.cause, ""))
    for start in (s.rung if first is None else max(first, s.rung), s.rung):
        index = budget.next_rung(t.rules.rungs, start, s.bad_rungs, s.ledger, s.cause, t.rules.budget, t.at)
        if index is not None:
            return index
    return None


def _go_down(t: Turn) -> None:
    s = t.state
    if not s.ever_ready:
        finish(t, EXIT_CONFIG, "the worker has never been ready; its last output says why")
        return
    enter(t, Phase.DOWN)
    t.note("down", cause=s.cause, launches_counted=len(s.ledger), frees_in_s=round(down_for(t), 1))
    settle(t, "down")
    t.forget("lease")
    traffic(t)
    await_budget(t)


def prove(t: Turn) -> None:
    s = t.state
    enter(t, Phase.PROVING)
    ticket = start_effect(t)
    t.wait("phase", t.rules.prove_canary_s + 5.0)
    t.say(Probe(ticket, s.generation, s.address or "", "prove", t.rules.prove_canary_s))


def replay(t: Turn) -> None:
    t.state = replace(t.state, proven=True, case=None)
    enter(t, Phase.REPLAYING)
    t.forget("lease")
    t.note("proven", generation=t.state.generation, rung=t.rules.rungs[t.state.rung].name)
    t.wait("phase", t.rules.replay_limit_s)
    traffic(t)


def died(t: Turn, name: str, code: int | None) -> None:
    """The worker is gone without our order."""
    s = t.state
    case = s.case or Case(t.at)
    t.state = replace(s, case=replace(case, exits=(*case.exits, name)), end_code=code)
    t.note("exited", generation=s.generation, process=name, code=code)
    assert t.state.case is not None
    config = t.state.case.fault() is FaultClass.CONFIG_ERROR or (code == BAD_FLAG_CODE and not s.ever_ready)
    if not s.ever_ready and config and s.incident is None:
        finish(t, EXIT_CONFIG, _why(t.state.case, code))
    elif t.rules.observe and name == ProcessKind.ROOT and s.observed == s.generation:
        note_would(t)
        finish(t, code if code is not None else 1, OBSERVED_END)
    else:
        convict(t, t.state.case)


def _why(case: Case, code: int | None) -> str:
    cause = case.cause()
    said = f": {cause.text}" if cause else f" (exit code {code}); its last output says why"
    return f"the worker does not start with this configuration{said}"


def start_died(t: Turn, name: str, code: int | None) -> None:
    s = t.state
    rung = t.rules.rungs[s.rung].name
    case = s.case or Case(t.at)
    config = code == BAD_FLAG_CODE or case.fault() is FaultClass.CONFIG_ERROR
    if s.phase is Phase.LAUNCHING and config and s.rung > 0:  # the first rung is the command that served before
        t.state = replace(s, bad_rungs=s.bad_rungs | {rung})
        t.note("bad_rung", rung=rung, code=code, why=_why(case, code))
    t.state = replace(t.state, case=replace(case, exits=(*case.exits, name)))
    rung_failed(t, f"{name} exited (code {code})")


def rung_failed(t: Turn, why: str, canary: CanaryOutcome | None = None) -> None:
    """This generation is no answer: end what is left of it and take the next step the budget allows."""
    if canary is not None:
        t.state = replace(t.state, case=replace(t.state.case or Case(t.at), canary=canary))
    t.note("rung_failed", incident=t.state.incident, generation=t.state.generation, why=why)
    tried = (t.state.cause, t.rules.rungs[t.state.rung].name)
    t.state = replace(t.state, worked=tuple(pair for pair in t.state.worked if pair != tried))
    if t.state.incident is None:
        convict(t, t.state.case or Case(t.at))
        return
    kill(t)


def be_stuck(t: Turn, detail: str) -> None:
    enter(t, Phase.STUCK)
    t.state = replace(t.state, reason=detail)
    t.forget("lease")
    t.note("stuck", incident=t.state.incident, generation=t.state.generation, detail=detail)
    traffic(t)
    t.wait("phase", t.rules.stuck_retry_s)


def ask_first(t: Turn) -> None:
    s = t.state
    ticket = start_effect(t)
    t.wait("phase", t.rules.prove_canary_s + 5.0)
    purpose = "prove" if s.answered else "reference"
    t.say(Probe(ticket, s.generation, s.address or "", purpose, t.rules.prove_canary_s))
