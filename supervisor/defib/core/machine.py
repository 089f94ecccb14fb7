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
from dataclasses import replace
from typing import Any

from defib.core import budget, witnesses
from defib.core.commands import (
    Capture,
    CheckGate,
    ClearCaches,
    Command,
    Finish,
    HoldTraffic,
    KillTree,
    Launch,
    OpenTraffic,
    PauseTraffic,
    Persist,
    Probe,
    RefuseTraffic,
    Settle,
)
from defib.core.events import (
    Adopted,
    Booted,
    CanaryDone,
    CanaryOutcome,
    Done,
    Effect,
    Elapsed,
    Event,
    Exited,
    FaultClass,
    Found,
    GatewayBack,
    GatewayLost,
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    Progressed,
    Ready,
    Replayed,
    Resume,
    ResumeOrdered,
    StopOrdered,
    StoreFailed,
    Symptom,
)
from defib.core.state import Phase, Rules, State, Turn
from defib.core.witnesses import Case

EXIT_BUDGET_SPENT = 69
EXIT_CONFIG = 78
OBSERVED_END = "the worker ended; observe does not restart it"
BAD_FLAG_CODE = 2
"""argparse's exit code for arguments that a program doesn't know."""

ROOT_FOLLOWS_S = 10.0
"""While a worker starts, its root follows a dead engine process within this time, with the code that tells why."""
LOOK_S = 60.0
"""A supervisor that comes back gives a worker that it does not know at least this long to say that it is ready."""
FINISH_AGAIN_S = 10.0
"""An order to finish that nobody heard is said again."""
PAUSED_RETRY_S = 30.0

FIRST_START_SHARE = 0.6
"""A relaunch finds warm caches: on an H200 it took 34 to 37 s after a first start of 61 s, 51 to 57 s after one of 87 s
(vLLM 0.26). The first start alone would have told clients to go away who then could have been served."""

Handler = Callable[[Turn, Any], None]
Table = Mapping[Phase, Mapping[type[Event], Handler]]

RECOVERING = (Phase.CAPTURING, Phase.KILLING, Phase.GATING, Phase.CLEARING, Phase.LAUNCHING, Phase.PROVING)
"""The phases between a verdict and proof: traffic is held."""


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
        case Ready() | Found() | Exited() | HealthFailed() | Symptom() | Progressed() | Replayed():
            return event.generation == s.generation
        case CanaryDone():
            return event.ticket > 0 and event.ticket in (s.pending, s.probe)
        case Done():
            return event.ticket == s.pending and WAITS_FOR.get(s.phase) is event.effect
        case Elapsed():
            return (event.name, event.ticket) in s.waits
        case _:
            return True


# --- moving between phases ---


def _enter(t: Turn, phase: Phase) -> None:
    before = t.state.phase
    t.state = replace(t.state, phase=phase, pending=0, probe=0)
    t.forget("phase")
    if before is not phase:
        t.note("phase", phase=phase.value, before=before.value, generation=t.state.generation)
    _persist(t)


def _persist(t: Turn) -> None:
    s = t.state
    if s.generation == 0:
        return  # nothing is known yet: what an earlier supervisor remembered must stay
    t.say(
        Persist(
            Resume(
                phase=s.phase.value,
                generation=s.generation,
                proven=s.proven,
                ever_ready=s.ever_ready,
                rung=s.rung,
                incident=s.incident,
                incidents=s.incidents,
                cause=s.cause,
                bad_rungs=tuple(sorted(s.bad_rungs)),
                ledger=s.ledger,
                ready_in_s=s.ready_in_s,
                answered=s.answered,
            )
        )
    )


def _start_effect(t: Turn) -> int:
    ticket = t.ticket()
    t.state = replace(t.state, pending=ticket)
    return ticket


def _traffic(t: Turn) -> None:
    """Says (again) what the gateway should do now, and renews the lease where it is one."""
    s = t.state
    if t.rules.observe:
        if s.address and s.alive and s.proven:
            t.say(OpenTraffic(s.generation, s.address))
        return
    match s.phase:
        case Phase.SERVING | Phase.REPLAYING | Phase.PAUSED if s.address and s.alive and s.proven:
            t.say(OpenTraffic(s.generation, s.address))
        case Phase.PAUSED if not (s.alive and s.proven):
            t.say(RefuseTraffic("an operator has paused defib, and the worker is not proven", PAUSED_RETRY_S))
        case Phase.STARTING if s.generation > 1:
            t.say(HoldTraffic(s.generation - 1, "", _remaining_s(t)))
            t.wait("lease", t.rules.lease_renew_s)
        case Phase.SUSPECTING if s.case is not None and _accused(s.case):
            t.say(PauseTraffic(s.generation))
            t.wait("lease", t.rules.lease_renew_s)
        case _ if s.phase in RECOVERING:
            dead = s.generation - 1 if s.phase in (Phase.LAUNCHING, Phase.PROVING) else s.generation
            t.say(HoldTraffic(dead, s.incident or "", _remaining_s(t)))
            t.wait("lease", t.rules.lease_renew_s)
        case Phase.DOWN:
            t.say(RefuseTraffic("the launch budget is spent", _down_for(t)))
        case Phase.STUCK:
            t.say(RefuseTraffic("a process of the worker cannot be ended", t.rules.stuck_retry_s))
        case _:
            pass


def _remaining_s(t: Turn) -> float | None:
    """How long until ready, as far as earlier launches tell; None: unknown."""
    s = t.state
    if s.ready_in_s is None:
        return None
    launched = s.phase in (Phase.STARTING, Phase.LAUNCHING, Phase.PROVING)
    return max(0.0, s.launched_at + s.ready_in_s - t.at) if launched else s.ready_in_s


def _accused(case: Case) -> bool:
    """Is there more than HTTP symptoms? They alone do not stop the traffic of others."""
    return case.cause() is not None or bool(witnesses.group_w(case))


def _down_for(t: Turn) -> float:
    s = t.state
    return max(1.0, budget.frees_at(t.rules.rungs, s.bad_rungs, s.ledger, s.cause, t.rules.budget, t.at) - t.at)


def _serve(t: Turn) -> None:
    _enter(t, Phase.SERVING)
    t.forget("lease")
    t.state = replace(t.state, case=None)
    if t.state.incident is not None:  # a false alarm while replaying, or a supervisor that came back then
        _settle(t, "observed" if t.rules.observe else "recovered")
        t.wait("probation", t.rules.probation_s)
    _traffic(t)


def _suspect(t: Turn, case: Case) -> None:
    _enter(t, Phase.SUSPECTING)
    t.state = replace(t.state, case=case)
    t.note("suspecting", **_told(case), generation=t.state.generation)
    t.wait("phase", t.rules.suspect_window_s)
    _traffic(t)
    _weigh(t)
    if t.state.phase is Phase.SUSPECTING:
        _probe_suspect(t)


def _told(case: Case) -> dict[str, str]:
    return {
        "group_t": ", ".join(witnesses.group_t(case)) or "none",
        "group_w": ", ".join(witnesses.group_w(case)) or "none",
    }


def _probe_suspect(t: Turn) -> None:
    s = t.state
    if s.address is None:
        return
    ticket = t.ticket()
    t.state = replace(t.state, probe=ticket)
    t.say(Probe(ticket, s.generation, s.address, "suspect", t.rules.suspect_canary_s))


def _weigh(t: Turn) -> None:
    """The verdict, if the witnesses suffice."""
    case = t.state.case
    if case is not None and witnesses.sufficient(case):
        _convict(t, case)


def _open(t: Turn, why: str) -> None:
    """A new incident; its name is a file name."""
    number = t.state.incidents + 1
    t.state = replace(t.state, incident=f"{number:04d}-{why}", incidents=number)


def _convict(t: Turn, case: Case) -> None:
    s = t.state
    if s.incident is None:
        _open(t, f"g{s.generation}")
    t.state = replace(t.state, case=case, cause=case.fingerprint(), proven=s.proven and t.rules.observe)
    t.note(
        "verdict",
        incident=t.state.incident,
        generation=s.generation,
        fault=case.fault().value,
        initiator=case.initiator(),
        cause=t.state.cause,
        **_told(case),
        action="would have killed" if t.rules.observe else "recover",
    )
    _capture(t)


def _capture(t: Turn) -> None:
    _enter(t, Phase.CAPTURING)
    t.forget("probation")
    _traffic(t)
    ticket = _start_effect(t)
    t.wait("phase", t.rules.capture_limit_s)
    t.say(Capture(ticket, t.state.incident or "", t.state.generation, t.at + t.rules.capture_limit_s))


def _kill(t: Turn) -> None:
    t.state = replace(t.state, proven=False)
    _enter(t, Phase.KILLING)
    _traffic(t)
    ticket = _start_effect(t)
    t.wait("phase", t.rules.kill_limit_s)
    t.say(KillTree(ticket, t.state.generation, t.state.incident or ""))


def _gate(t: Turn) -> None:
    _enter(t, Phase.GATING)
    t.state = replace(t.state, alive=False)
    ticket = _start_effect(t)
    t.wait("phase", t.rules.gate_limit_s)
    t.say(CheckGate(ticket, t.state.generation))


def _clear(t: Turn) -> None:
    s = t.state
    fault = s.case.fault() if s.case else FaultClass.UNKNOWN
    if fault is not FaultClass.POISONED_CONTEXT or not t.rules.caches:
        _launch(t)
        return
    _enter(t, Phase.CLEARING)
    ticket = _start_effect(t)
    t.wait("phase", t.rules.clear_limit_s)
    t.say(ClearCaches(ticket, s.generation, s.incident or "", t.rules.caches))


def _launch(t: Turn) -> None:
    s = t.state
    index = budget.next_rung(t.rules.rungs, s.rung, s.bad_rungs, s.ledger, s.cause, t.rules.budget, t.at)
    if index is None:
        _go_down(t)
        return
    rung = t.rules.rungs[index].name
    ledger = (*budget.trimmed(s.ledger, t.rules.budget, t.at), (t.at, s.cause, rung))
    t.state = replace(
        s, rung=index, ledger=ledger, generation=s.generation + 1, launched_at=t.at, address=None, alive=False
    )
    t.state = replace(t.state, ready=False, traffic_seen=False, case=None)
    _enter(t, Phase.LAUNCHING)
    # The gateway is told of the dead generation's number; it doesn't know the new one until it is opened.
    t.wait("lease", t.rules.lease_renew_s)
    ticket = _start_effect(t)
    t.wait("phase", t.rules.launch_limit_s)
    t.note("launch", generation=t.state.generation, rung=rung, launches_counted=len(ledger))
    t.say(Launch(ticket, t.state.generation, rung))


def _go_down(t: Turn) -> None:
    s = t.state
    if not s.ever_ready:
        _finish(t, EXIT_CONFIG, "the worker has never been ready; its last output says why")
        return
    _enter(t, Phase.DOWN)
    t.note("down", cause=s.cause, launches_counted=len(s.ledger), frees_in_s=round(_down_for(t), 1))
    _settle(t, "down")
    t.forget("lease")
    _traffic(t)
    _await_budget(t)


def _await_budget(t: Turn) -> None:
    t.wait("phase", t.rules.linger_s if t.rules.on_spent == "exit" else _down_for(t))


def _finish(t: Turn, code: int, reason: str) -> None:
    _settle(t, "finished")
    _enter(t, Phase.STOPPING)
    t.state = replace(t.state, end_code=code)
    t.note("finish", code=code, reason=reason)
    t.state = replace(t.state, reason=reason)
    t.forget("lease", "probation")
    t.wait("phase", FINISH_AGAIN_S)
    t.say(Finish(code, reason))


def _finish_again(t: Turn, e: Elapsed) -> None:
    if e.name == "phase" and t.state.end_code is not None:
        t.wait("phase", FINISH_AGAIN_S)
        t.say(Finish(t.state.end_code, t.state.reason))


def _settle(t: Turn, outcome: str) -> None:
    if t.state.incident is not None:
        t.note("settled", incident=t.state.incident, outcome=outcome)
        t.say(Settle(t.state.incident, outcome))
        t.state = replace(t.state, incident=None)
        _persist(t)


def _prove(t: Turn) -> None:
    s = t.state
    _enter(t, Phase.PROVING)
    ticket = _start_effect(t)
    t.wait("phase", t.rules.prove_canary_s + 5.0)
    t.say(Probe(ticket, s.generation, s.address or "", "prove", t.rules.prove_canary_s))


# --- starting ---


def _await_ready(t: Turn, since: float) -> None:
    limit_s = t.rules.start_limit_s
    t.wait("phase", max(min(LOOK_S, limit_s), since + limit_s - t.at))


def _learn(t: Turn, share: float) -> None:
    """Remembers how long this start took, unless nobody watched it."""
    s = t.state
    took_s = max(0.0, t.at - s.launched_at)
    learnt = took_s * share if took_s <= t.rules.start_limit_s else s.ready_in_s
    t.state = replace(s, ready=True, ever_ready=True, ready_in_s=learnt)
    t.note("ready", generation=s.generation, seconds=round(took_s, 3))


def _booted(t: Turn, e: Booted) -> None:
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
        _settle(t, "paused")
        _enter(t, Phase.PAUSED)
        _traffic(t)
    elif resume.phase == Phase.DOWN and not e.running:
        _settle(t, "down")
        _enter(t, Phase.DOWN)
        _traffic(t)
        _await_budget(t)
    elif recovering and resume.phase == Phase.CAPTURING:
        t.state = replace(t.state, case=Case(t.at), proven=False)
        _capture(t)
    elif recovering and resume.phase in (Phase.KILLING, Phase.GATING, Phase.CLEARING, Phase.STUCK):
        t.state = replace(t.state, case=Case(t.at))
        _kill(t)
    elif recovering and resume.phase in (Phase.LAUNCHING, Phase.PROVING) and not e.running:
        _enter(t, Phase.LAUNCHING)
        _start_died(t, "root", e.code)
    elif not e.running:
        _died(t, "root", e.code)
    elif known and resume.proven:
        if resume.phase == Phase.SUSPECTING:
            _suspect(t, Case(t.at))  # what is parked stays parked until the canary has spoken
        else:
            _serve(t)
        t.wait("probation", t.rules.probation_s)
    else:
        _await_worker(t, e.launched_at)


def _await_worker(t: Turn, since: float) -> None:
    """A worker that runs and is not proven yet."""
    if t.rules.observe:
        _settle(t, "observed")
    _enter(t, Phase.LAUNCHING if t.state.incident else Phase.STARTING)
    _traffic(t)
    _await_ready(t, since)


def _adopted(t: Turn, e: Adopted) -> None:
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
        _enter(t, Phase.PAUSED)
        _traffic(t)
        return
    _await_worker(t, t.at)


def _starting_ready(t: Turn, e: Ready) -> None:
    _learn(t, FIRST_START_SHARE)
    if t.state.case is None or not t.state.case.exits:
        _ask_first(t)


def _ask_first(t: Turn) -> None:
    s = t.state
    ticket = _start_effect(t)
    t.wait("phase", t.rules.prove_canary_s + 5.0)
    purpose = "prove" if s.answered else "reference"
    t.say(Probe(ticket, s.generation, s.address or "", purpose, t.rules.prove_canary_s))


def _starting_canary(t: Turn, e: CanaryDone) -> None:
    """A first start is opened whatever the canary says: it has never been answered here, so it proves nothing yet."""
    answered = e.outcome in (CanaryOutcome.ANSWERED, CanaryOutcome.DIFFERS)
    t.note("canary", purpose="reference", outcome=e.outcome.value, detail=e.detail)
    case = replace(t.state.case or Case(t.at), canary=e.outcome)
    failed = e.outcome in witnesses.FAILED and (t.state.answered or witnesses.sufficient(case))
    if failed and not t.rules.observe:
        _rung_failed(t, f"the canary: {e.outcome.value} {e.detail}".rstrip(), e.outcome)
        return
    t.state = replace(t.state, proven=True, answered=t.state.answered or answered)
    if not answered:
        t.note("unproven", generation=t.state.generation, outcome=e.outcome.value)
    _serve(t)


def _starting_found(t: Turn, e: Found) -> None:
    """Before ready a finding only explains: an exit or the start limit decides."""
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=case.with_found(e))


def _starting_exited(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.ROOT:
        t.state = replace(t.state, alive=False)
        _died(t, e.kind.value, e.code)
    elif e.kind is ProcessKind.ENGINE:
        case = t.state.case or Case(t.at)
        t.state = replace(t.state, pending=0, case=replace(case, exits=(*case.exits, e.name or e.kind.value)))
        t.wait("phase", ROOT_FOLLOWS_S)
        t.note("engine_exited", generation=t.state.generation, pid=e.pid, code=e.code)


def _died(t: Turn, name: str, code: int | None) -> None:
    """The worker is gone without our order."""
    s = t.state
    case = s.case or Case(t.at)
    t.state = replace(s, case=replace(case, exits=(*case.exits, name)), end_code=code)
    t.note("exited", generation=s.generation, process=name, code=code)
    assert t.state.case is not None
    config = t.state.case.fault() is FaultClass.CONFIG_ERROR or (code == BAD_FLAG_CODE and not s.ever_ready)
    if not s.ever_ready and config and s.incident is None:
        _finish(t, EXIT_CONFIG, _why(t.state.case, code))
    elif t.rules.observe and name == ProcessKind.ROOT and s.observed == s.generation:
        _note_would(t)
        _finish(t, code if code is not None else 1, OBSERVED_END)
    else:
        _convict(t, t.state.case)


def _why(case: Case, code: int | None) -> str:
    cause = case.cause()
    said = f": {cause.text}" if cause else f" (exit code {code}); its last output says why"
    return f"the worker does not start with this configuration{said}"


def _note_would(t: Turn) -> None:
    case = t.state.case
    if case is not None:
        t.note("would_have_killed", generation=t.state.generation, **_told(case), fault=case.fault().value)


def _start_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "lease":
        _traffic(t)
        return
    if e.name != "phase":
        return
    if t.state.pending:  # the reference canary did not even report back
        t.state = replace(t.state, proven=True)
        _serve(t)
        return
    case = t.state.case or Case(t.at)
    if t.rules.observe and t.state.observed == t.state.generation:
        _await_ready(t, t.at)  # it was said once
        return
    _convict(t, case if case.exits else replace(case, start_limit=True))


# --- serving and suspecting ---


def _resting(t: Turn) -> bool:
    """In observe nothing was done about the last verdict: to reach it again at once would say nothing new."""
    return t.at < t.state.observe_rest_until


def _serving_found(t: Turn, e: Found) -> None:
    if e.cause and not _resting(t):
        _suspect(t, Case(t.at).with_found(e))


def _serving_exited(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.OTHER or (e.ordered and e.kind is not ProcessKind.ROOT):
        return
    case = t.state.case or Case(t.at)
    name = e.name or e.kind.value
    case = replace(case, exits=(*case.exits, name))
    t.state = replace(t.state, case=case, alive=t.state.alive and e.kind is not ProcessKind.ROOT)
    if t.rules.observe and e.kind is ProcessKind.ROOT:
        _died(t, ProcessKind.ROOT, e.code)
        return
    t.note("exited", generation=t.state.generation, process=name, pid=e.pid, code=e.code)
    _convict(t, case)


def _serving_health(t: Turn, e: HealthFailed) -> None:
    if not _resting(t):
        _suspect(t, replace(Case(t.at), health=True))


def _serving_symptom(t: Turn, e: Symptom) -> None:
    if t.at >= t.state.symptoms_rest_until and not _resting(t):
        _suspect(t, Case(t.at).with_symptom(e))


def _serving_progressed(t: Turn, e: Progressed) -> None:
    t.state = replace(t.state, traffic_seen=True)


def _serving_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name != "probation":
        return
    s = t.state
    if not s.traffic_seen:
        t.wait("probation", t.rules.probation_s)
        return
    t.state = replace(s, ledger=budget.forgiven(s.ledger, s.launched_at))
    t.forget("probation")
    t.note("survived_probation", generation=s.generation)
    _persist(t)


def _suspecting_found(t: Turn, e: Found) -> None:
    case = t.state.case or Case(t.at)
    known = _accused(case)
    t.state = replace(t.state, case=case.with_found(e))
    if e.cause and not known:
        _traffic(t)
    _weigh(t)


def _suspecting_symptom(t: Turn, e: Symptom) -> None:
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=case.with_symptom(e))
    _weigh(t)


def _suspecting_health(t: Turn, e: HealthFailed) -> None:
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=replace(case, health=True))
    _traffic(t)
    _weigh(t)


def _suspecting_progressed(t: Turn, e: Progressed) -> None:
    case = t.state.case
    if case is None:
        return
    t.state = replace(t.state, case=replace(case, tokens_at=max(case.tokens_at, e.token_at)))
    if not case.health and e.token_at >= case.accused_at + t.rules.refute_after_s:
        _false_alarm(t, "a token was delivered after the finding")


def _suspecting_canary(t: Turn, e: CanaryDone) -> None:
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
        _probe_suspect(t)
        return
    moved = case.tokens_at > e.sent_at
    outcome = CanaryOutcome.BLIND if e.outcome is CanaryOutcome.TIMEOUT and moved else e.outcome
    t.state = replace(t.state, case=replace(case, canary=outcome))
    if outcome is not CanaryOutcome.BLIND:
        _traffic(t)
    _weigh(t)


def _false_alarm(t: Turn, why: str) -> None:
    case = t.state.case
    if case is not None and not _accused(case):
        t.state = replace(t.state, symptoms_rest_until=t.at + t.rules.symptom_rest_s)
    t.note("false_alarm", generation=t.state.generation, why=why, **(_told(case) if case else {}))
    _serve(t)


def _suspecting_elapsed(t: Turn, e: Elapsed) -> None:
    match e.name:
        case "lease":
            _traffic(t)
        case "phase":
            case = t.state.case
            t.note("inconclusive", generation=t.state.generation, **(_told(case) if case else {}))
            _serve(t)
        case "probation":
            t.wait("probation", t.rules.suspect_window_s)  # not while it stands accused
        case _:
            pass


# --- recovery ---


def _more_evidence(t: Turn, e: Found) -> None:
    case = t.state.case or Case(t.at)
    before = case.cause()
    t.state = replace(t.state, case=case.with_found(e))
    after = t.state.case.cause() if t.state.case else None
    if before is None and after is not None and t.state.phase is Phase.CAPTURING:
        t.state = replace(t.state, cause=after.signature)
        t.note("cause", incident=t.state.incident, fault=after.fault.value, cause=after.signature)


def _captured(t: Turn, e: Done) -> None:
    t.note("captured", incident=t.state.incident, ok=e.ok, detail=e.detail)
    _after_capture(t)


def _after_capture(t: Turn) -> None:
    if not t.rules.observe:
        _kill(t)
        return
    _note_would(t)
    _settle(t, "observed")
    s = replace(t.state, observed=t.state.generation, observe_rest_until=t.at + t.rules.observe_rest_s, case=None)
    t.state = s
    if s.alive and s.proven:
        _serve(t)
    elif s.alive:
        _await_worker(t, t.at)
    else:
        _finish(t, 1 if t.state.end_code is None else t.state.end_code, OBSERVED_END)


def _capture_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "lease":
        _traffic(t)
    elif e.name == "phase":
        t.note("captured", incident=t.state.incident, ok=False, detail="deadline passed")
        _after_capture(t)


def _killed(t: Turn, e: Done) -> None:
    if e.ok:
        t.note("killed", incident=t.state.incident, generation=t.state.generation, detail=e.detail)
        _gate(t)
    else:
        _be_stuck(t, e.detail)


def _be_stuck(t: Turn, detail: str) -> None:
    _enter(t, Phase.STUCK)
    t.forget("lease")
    t.note("stuck", incident=t.state.incident, generation=t.state.generation, detail=detail)
    _traffic(t)
    t.wait("phase", t.rules.stuck_retry_s)


def _kill_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "lease":
        _traffic(t)
    elif e.name == "phase":
        _be_stuck(t, "the kill did not report back in time")


def _stuck_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "phase":
        _kill(t)


def _gated(t: Turn, e: Done) -> None:
    t.note("gated", incident=t.state.incident, ok=e.ok, detail=e.detail)
    if e.stuck:
        _be_stuck(t, e.detail)
    else:
        _clear(t)


def _gate_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "lease":
        _traffic(t)
    elif e.name == "phase":  # a measurement that fails never escalates
        t.note("gated", incident=t.state.incident, ok=False, detail="deadline passed")
        _clear(t)


def _cleared(t: Turn, e: Done) -> None:
    t.note("cleared", incident=t.state.incident, ok=e.ok, detail=e.detail)
    _launch(t)


def _clear_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "lease":
        _traffic(t)
    elif e.name == "phase":
        t.note("cleared", incident=t.state.incident, ok=False, detail="deadline passed")
        _launch(t)


def _launched(t: Turn, e: Done) -> None:
    if not e.ok:
        _not_launched(t, e.detail)
        return
    t.state = replace(t.state, address=e.address, alive=True, pending=0)
    t.note("launched", generation=t.state.generation, address=e.address)
    _await_ready(t, t.at)


def _launching_ready(t: Turn, e: Ready) -> None:
    s = t.state
    if s.address is None:
        return
    _learn(t, 1.0)
    _prove(t)


def _not_launched(t: Turn, why: str) -> None:
    """There is no such generation: the number is free again, and the one before may have left something behind."""
    t.note("launch_failed", incident=t.state.incident, generation=t.state.generation, detail=why)
    t.state = replace(t.state, generation=t.state.generation - 1)
    _kill(t)


def _launching_exited(t: Turn, e: Exited) -> None:
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
    _start_died(t, name, e.code)


def _start_died(t: Turn, name: str, code: int | None) -> None:
    s = t.state
    rung = t.rules.rungs[s.rung].name
    case = s.case or Case(t.at)
    config = code == BAD_FLAG_CODE or case.fault() is FaultClass.CONFIG_ERROR
    if s.phase is Phase.LAUNCHING and config and s.rung > 0:  # the first rung is the command that served before
        t.state = replace(s, bad_rungs=s.bad_rungs | {rung})
        t.note("bad_rung", rung=rung, code=code, why=_why(case, code))
    t.state = replace(t.state, case=replace(case, exits=(*case.exits, name)))
    _rung_failed(t, f"{name} exited (code {code})")


def _rung_failed(t: Turn, why: str, canary: CanaryOutcome | None = None) -> None:
    """This generation is no answer: end what is left of it and take the next step the budget allows."""
    if canary is not None:
        t.state = replace(t.state, case=replace(t.state.case or Case(t.at), canary=canary))
    t.note("rung_failed", incident=t.state.incident, generation=t.state.generation, why=why)
    if t.state.incident is None:
        _convict(t, t.state.case or Case(t.at))
        return
    _kill(t)


def _launch_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "lease":
        _traffic(t)
    elif e.name == "phase" and t.state.pending:
        _not_launched(t, "the launch did not report back in time")
    elif e.name == "phase":
        case = t.state.case or Case(t.at)
        why = "an engine process exited" if case.exits else "not ready within the start limit"
        t.state = replace(t.state, case=case if case.exits else replace(case, start_limit=True))
        _rung_failed(t, why)


def _proved(t: Turn, e: CanaryDone) -> None:
    t.note("canary", purpose="prove", outcome=e.outcome.value, detail=e.detail)
    same = t.state.rung == 0
    match e.outcome:
        case CanaryOutcome.ANSWERED:
            t.state = replace(t.state, answered=True)
            _replay(t)
        case CanaryOutcome.BLIND:
            _replay(t)
        case CanaryOutcome.DIFFERS if not same:
            _replay(t)  # other kernels may round otherwise; that it computes is proven
        case _:
            _rung_failed(t, f"the canary: {e.outcome.value} {e.detail}".rstrip(), e.outcome)


def _prove_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "lease":
        _traffic(t)
    elif e.name == "phase":  # it has a time limit of its own: this silence is ours, not the worker's
        t.note("canary", purpose="prove", outcome=CanaryOutcome.BLIND.value, detail="it did not report back")
        _replay(t)


def _replay(t: Turn) -> None:
    t.state = replace(t.state, proven=True, case=None)
    _enter(t, Phase.REPLAYING)
    t.forget("lease")
    t.note("proven", generation=t.state.generation, rung=t.rules.rungs[t.state.rung].name)
    t.wait("phase", t.rules.replay_limit_s)
    _traffic(t)


def _replayed(t: Turn, e: Replayed) -> None:
    t.note("replayed", incident=t.state.incident, answered=e.answered, failed=e.failed)
    _recovered(t)


def _recovered(t: Turn) -> None:
    _settle(t, "recovered")
    _enter(t, Phase.SERVING)
    t.wait("probation", t.rules.probation_s)


def _replay_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name == "phase":
        _recovered(t)


def _replaying_found(t: Turn, e: Found) -> None:
    case = t.state.case or Case(t.at)
    t.state = replace(t.state, case=case.with_found(e))
    if e.cause:
        _suspect(t, t.state.case or case)


# --- at any time ---


def _stop(t: Turn, e: StopOrdered) -> None:
    _settle(t, "stopped")
    _enter(t, Phase.STOPPING)
    t.forget("lease", "probation")


def _pause(t: Turn, e: PauseOrdered) -> None:
    s = t.state
    launch = s.pending if s.phase is Phase.LAUNCHING and s.address is None else 0
    _settle(t, "paused")
    _enter(t, Phase.PAUSED)
    t.forget("lease", "probation")
    t.state = replace(t.state, case=None, pending=launch)
    _traffic(t)
    _look(t)


def _look(t: Turn) -> None:
    """While paused we only look: may traffic reach a worker that was not proven yet?"""
    s = t.state
    if s.alive and s.ready and not s.proven and not s.pending:
        ticket = _start_effect(t)
        purpose = "prove" if s.answered else "reference"
        t.say(Probe(ticket, s.generation, s.address or "", purpose, t.rules.prove_canary_s))


def _paused_ready(t: Turn, e: Ready) -> None:
    t.state = replace(t.state, ready=True, ever_ready=True)
    _look(t)


def _paused_canary(t: Turn, e: CanaryDone) -> None:
    t.note("canary", purpose="look", outcome=e.outcome.value, detail=e.detail)
    answered = e.outcome in (CanaryOutcome.ANSWERED, CanaryOutcome.DIFFERS)
    proven = answered or e.outcome is CanaryOutcome.BLIND
    t.state = replace(t.state, pending=0, proven=proven, answered=t.state.answered or answered)
    _traffic(t)
    _persist(t)


def _paused_launched(t: Turn, e: Done) -> None:
    s = replace(t.state, pending=0)
    t.state = replace(s, address=e.address, alive=True) if e.ok else replace(s, generation=s.generation - 1)
    t.note("launched" if e.ok else "launch_failed", generation=s.generation, detail=e.detail)
    _persist(t)


def _paused_found(t: Turn, e: Found) -> None:
    if e.cause:
        t.state = replace(t.state, case=(t.state.case or Case(t.at)).with_found(e))


def _paused_health(t: Turn, e: HealthFailed) -> None:
    t.state = replace(t.state, case=replace(t.state.case or Case(t.at), health=True))


def _paused_exited(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.OTHER:
        return
    _mark_dead(t, e)
    case = t.state.case or Case(t.at)
    case = replace(case, exits=(*case.exits, e.name or e.kind.value))
    t.state = replace(t.state, proven=False, pending=0 if t.state.address else t.state.pending, case=case)
    t.note("exited", generation=t.state.generation, process=e.name or e.kind.value, pid=e.pid, code=e.code)
    _traffic(t)
    _persist(t)


def _resume_order(t: Turn, e: ResumeOrdered) -> None:
    """From down or stuck: one more try, whatever the budget says."""
    t.note("resumed", generation=t.state.generation)
    t.state = replace(t.state, ledger=(), bad_rungs=frozenset())
    if t.state.phase is Phase.DOWN:
        t.state = replace(t.state, rung=0)
        _open(t, "resume")
    _kill(t)


def _look_again(t: Turn, e: ResumeOrdered) -> None:
    """From paused: go on with what is there now."""
    t.note("resumed", generation=t.state.generation)
    s = t.state
    if s.pending and s.address is None:  # the launch that was under way still is
        _open(t, "resume")
        _enter(t, Phase.LAUNCHING)
        t.state = replace(t.state, pending=s.pending)
        _traffic(t)
        t.wait("phase", t.rules.launch_limit_s)
    elif not s.alive or (s.case is not None and s.case.exits):
        t.state = replace(s, ledger=(), bad_rungs=frozenset())
        _died(t, "root", s.end_code) if not s.alive else _convict(t, s.case or Case(t.at))
    elif s.proven:
        _serve(t)
        t.wait("probation", t.rules.probation_s)
        if s.case is not None and _accused(s.case):
            _suspect(t, s.case)
    elif s.ready and not t.rules.observe:
        _prove(t)  # it was accused, or never proven: the canary decides
    else:
        t.state = replace(s, case=None)
        _await_worker(t, t.at)
        if s.ready:
            _ask_first(t)


def _down_elapsed(t: Turn, e: Elapsed) -> None:
    if e.name != "phase":
        return
    if t.rules.on_spent == "exit":
        _finish(t, EXIT_BUDGET_SPENT, "the launch budget is spent")
        return
    t.state = replace(t.state, rung=0)
    _open(t, "retry")
    _kill(t)


def _mark_dead(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.ROOT:
        t.state = replace(t.state, alive=False, end_code=e.code)


def _gateway_lost(t: Turn, e: GatewayLost) -> None:
    t.note("gateway_lost")


def _gateway_back(t: Turn, e: GatewayBack) -> None:
    t.note("gateway_back", gate=e.gate)
    s = t.state
    suspected = s.phase is Phase.SUSPECTING and s.alive and s.proven and not t.rules.observe
    if suspected and s.address and e.gate == "starting":
        t.say(OpenTraffic(s.generation, s.address))  # a new gateway: nothing is parked there yet
    _traffic(t)
    if s.phase is Phase.REPLAYING:
        _recovered(t)


def _store_failed(t: Turn, e: StoreFailed) -> None:
    t.note("store_failed", detail=e.detail)


def _ignore(t: Turn, e: Event) -> None:
    """The named answer "nothing"."""


_ANY: Mapping[type[Event], Handler] = {
    Booted: _booted,
    Adopted: _adopted,
    StopOrdered: _stop,
    PauseOrdered: _pause,
    ResumeOrdered: _ignore,
    GatewayLost: _gateway_lost,
    GatewayBack: _gateway_back,
    StoreFailed: _store_failed,
    Exited: _mark_dead,
    Ready: _ignore,
    Found: _ignore,
    HealthFailed: _ignore,
    Symptom: _ignore,
    Progressed: _ignore,
    CanaryDone: _ignore,
    Done: _ignore,
    Replayed: _ignore,
    Elapsed: _ignore,
}
"""What a phase does with an event that its own row does not name."""

_DEAF: Mapping[type[Event], Handler] = {
    Booted: _ignore,
    Adopted: _ignore,
    StopOrdered: _ignore,
    PauseOrdered: _ignore,
    GatewayLost: _ignore,
    GatewayBack: _ignore,
}

TABLE: Table = {
    Phase.STARTING: {
        Ready: _starting_ready,
        CanaryDone: _starting_canary,
        Found: _starting_found,
        Exited: _starting_exited,
        Elapsed: _start_elapsed,
    },
    Phase.SERVING: {
        Found: _serving_found,
        Exited: _serving_exited,
        HealthFailed: _serving_health,
        Symptom: _serving_symptom,
        Progressed: _serving_progressed,
        Elapsed: _serving_elapsed,
    },
    Phase.SUSPECTING: {
        Found: _suspecting_found,
        Exited: _serving_exited,
        HealthFailed: _suspecting_health,
        Symptom: _suspecting_symptom,
        Progressed: _suspecting_progressed,
        CanaryDone: _suspecting_canary,
        Elapsed: _suspecting_elapsed,
    },
    Phase.CAPTURING: {Found: _more_evidence, Done: _captured, Elapsed: _capture_elapsed},
    Phase.KILLING: {Found: _more_evidence, Done: _killed, Elapsed: _kill_elapsed},
    Phase.GATING: {Done: _gated, Elapsed: _gate_elapsed},
    Phase.CLEARING: {Done: _cleared, Elapsed: _clear_elapsed},
    Phase.LAUNCHING: {
        Found: _starting_found,
        Ready: _launching_ready,
        Done: _launched,
        Exited: _launching_exited,
        Elapsed: _launch_elapsed,
    },
    Phase.PROVING: {
        Found: _starting_found,
        CanaryDone: _proved,
        Exited: _launching_exited,
        Elapsed: _prove_elapsed,
    },
    Phase.REPLAYING: {
        Found: _replaying_found,
        Exited: _serving_exited,
        HealthFailed: _serving_health,
        Symptom: _serving_symptom,
        Progressed: _serving_progressed,
        Replayed: _replayed,
        Elapsed: _replay_elapsed,
    },
    Phase.STOPPING: {**_DEAF, Elapsed: _finish_again},
    Phase.PAUSED: {
        PauseOrdered: _ignore,
        ResumeOrdered: _look_again,
        Ready: _paused_ready,
        CanaryDone: _paused_canary,
        Done: _paused_launched,
        Found: _paused_found,
        HealthFailed: _paused_health,
        Exited: _paused_exited,
    },
    Phase.STUCK: {ResumeOrdered: _resume_order, Elapsed: _stuck_elapsed},
    Phase.DOWN: {ResumeOrdered: _resume_order, Elapsed: _down_elapsed},
}


def _handler(table: Table, phase: Phase, kind: type[Event]) -> Handler:
    return table[phase].get(kind) or _ANY[kind]


# The effect whose end each phase waits for.
WAITS_FOR: Mapping[Phase, Effect] = {
    Phase.CAPTURING: Effect.CAPTURE,
    Phase.KILLING: Effect.KILL,
    Phase.GATING: Effect.GATE,
    Phase.CLEARING: Effect.CLEAR,
    Phase.LAUNCHING: Effect.LAUNCH,
    Phase.PAUSED: Effect.LAUNCH,
}
