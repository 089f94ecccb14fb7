"""What an operator orders, what the gateway and the store report, and what is heard while our hands are off. Pure."""

from __future__ import annotations

from dataclasses import replace

from defib.core.commands import (
    Finish,
    OpenTraffic,
    Probe,
)
from defib.core.events import (
    CanaryDone,
    CanaryOutcome,
    Done,
    Elapsed,
    Event,
    Exited,
    Found,
    GatewayBack,
    GatewayLost,
    GpuFault,
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    Ready,
    RestartOrdered,
    ResumeOrdered,
    StopOrdered,
    StoreFailed,
)
from defib.core.moves import (
    FINISH_AGAIN_S,
    accused,
    await_worker,
    enter,
    finish,
    note_xid,
    open_incident,
    persist,
    rung_index,
    serve,
    settle,
    start_effect,
    traffic,
)
from defib.core.recovering import recovered
from defib.core.state import Phase, Turn
from defib.core.steps import EXIT_BUDGET_SPENT, ask_first, convict, died, kill, prove, suspect
from defib.core.witnesses import Case


def stop(t: Turn, e: StopOrdered) -> None:
    settle(t, "stopped")
    enter(t, Phase.STOPPING)
    t.forget("lease", "probation")


def pause(t: Turn, e: PauseOrdered) -> None:
    s = t.state
    launch = s.pending if s.phase is Phase.LAUNCHING and s.address is None else 0
    settle(t, "paused")
    enter(t, Phase.PAUSED)
    t.forget("lease", "probation")
    t.state = replace(t.state, case=None, pending=launch)
    traffic(t)
    _look(t)


def _look(t: Turn) -> None:
    """While paused we only look: may traffic reach a worker that was not proven yet?"""
    s = t.state
    if s.alive and s.ready and not s.proven and not s.pending:
        ticket = start_effect(t)
        purpose = "prove" if s.answered else "reference"
        t.say(Probe(ticket, s.generation, s.address or "", purpose, t.rules.prove_canary_s))


def paused_ready(t: Turn, e: Ready) -> None:
    t.state = replace(t.state, ready=True, ever_ready=True)
    _look(t)


def paused_canary(t: Turn, e: CanaryDone) -> None:
    t.note("canary", purpose="look", outcome=e.outcome.value, detail=e.detail)
    answered = e.outcome in (CanaryOutcome.ANSWERED, CanaryOutcome.DIFFERS)
    proven = answered or e.outcome is CanaryOutcome.BLIND
    t.state = replace(t.state, pending=0, proven=proven, answered=t.state.answered or answered)
    traffic(t)
    persist(t)


def paused_launched(t: Turn, e: Done) -> None:
    s = replace(t.state, pending=0)
    t.state = replace(s, address=e.address, alive=True) if e.ok else replace(s, generation=s.generation - 1)
    t.note("launched" if e.ok else "launch_failed", generation=s.generation, detail=e.detail)
    persist(t)


def paused_found(t: Turn, e: Found) -> None:
    if e.cause:
        t.state = replace(t.state, case=(t.state.case or Case(t.at)).with_found(e))


def paused_gpu_fault(t: Turn, e: GpuFault) -> None:
    note_xid(t, e)
    if e.ours:
        t.state = replace(t.state, case=(t.state.case or Case(t.at)).with_xid(e))


def only_note_xid(t: Turn, e: GpuFault) -> None:
    note_xid(t, e)


def paused_health(t: Turn, e: HealthFailed) -> None:
    t.state = replace(t.state, case=replace(t.state.case or Case(t.at), health=True))


def paused_exited(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.OTHER:
        return
    mark_dead(t, e)
    case = t.state.case or Case(t.at)
    case = replace(case, exits=(*case.exits, e.name or e.kind.value))
    t.state = replace(t.state, proven=False, pending=0 if t.state.address else t.state.pending, case=case)
    t.note("exited", generation=t.state.generation, process=e.name or e.kind.value, pid=e.pid, code=e.code)
    traffic(t)
    persist(t)


def resume_order(t: Turn, e: ResumeOrdered) -> None:
    """From down or stuck: one more try, whatever the budget says."""
    t.note("resumed", generation=t.state.generation)
    t.state = replace(t.state, ledger=(), bad_rungs=frozenset())
    if t.state.phase is Phase.DOWN:
        t.state = replace(t.state, rung=0)
        open_incident(t, "resume")
    kill(t)


def look_again(t: Turn, e: ResumeOrdered) -> None:
    """From paused: go on with what is there now."""
    t.note("resumed", generation=t.state.generation)
    s = t.state
    if s.pending and s.address is None:  # the launch that was under way still is
        open_incident(t, "resume")
        enter(t, Phase.LAUNCHING)
        t.state = replace(t.state, pending=s.pending)
        traffic(t)
        t.wait("phase", t.rules.launch_limit_s)
    elif not s.alive or (s.case is not None and s.case.exits):
        t.state = replace(s, ledger=(), bad_rungs=frozenset())
        died(t, "root", s.end_code) if not s.alive else convict(t, s.case or Case(t.at))
    elif s.proven:
        serve(t)
        t.wait("probation", t.rules.probation_s)
        if s.case is not None and accused(s.case):
            suspect(t, s.case)
    elif s.ready and not t.rules.observe:
        prove(t)  # it was accused, or never proven: the canary decides
    else:
        t.state = replace(s, case=None)
        await_worker(t, t.at)
        if s.ready:
            ask_first(t)


def restart(t: Turn, e: RestartOrdered) -> None:
    """A planned outage. Clients are held as in any recovery; nothing is wrong, so nothing counts against a cause."""
    if t.rules.observe or not _take_rung(t, e):
        return
    t.note("restart_ordered", generation=t.state.generation, rung=e.rung)
    t.state = replace(t.state, ledger=(), cause="", case=None)
    if t.state.incident is None:
        open_incident(t, "restart")
    kill(t)


def restart_later(t: Turn, e: RestartOrdered) -> None:
    """A recovery is under way, and its next launch takes the rung."""
    if _take_rung(t, e):
        t.note("restart_ordered", generation=t.state.generation, rung=e.rung)
        worked = tuple(pair for pair in t.state.worked if pair[0] != t.state.cause)
        t.state = replace(t.state, ledger=(), worked=worked)  # who orders knows better than our memory
        persist(t)


def restart_launching(t: Turn, e: RestartOrdered) -> None:
    """What is starting now is not what was ordered; a launch that has not reported back is waited for."""
    s = t.state
    if (s.pending and s.phase is Phase.LAUNCHING) or not e.rung:
        restart_later(t, e)
    else:
        restart(t, e)


def refused_while_paused(t: Turn, e: RestartOrdered) -> None:
    t.note("order_refused", why="paused: resume first")


def _take_rung(t: Turn, e: RestartOrdered) -> bool:
    """Whether the order can be followed; the rung that it names is forgiven what made it a bad one."""
    index = rung_index(t, e.rung) if e.rung else t.state.rung
    if index is None:
        t.note("order_refused", why=f"there is no rung {e.rung!r}")
        return False
    name = t.rules.rungs[index].name
    t.state = replace(t.state, rung=index, bad_rungs=t.state.bad_rungs - {name})
    return True


def down_over(t: Turn, e: Elapsed) -> None:
    if t.rules.on_spent == "exit":
        finish(t, EXIT_BUDGET_SPENT, "the launch budget is spent")
        return
    t.state = replace(t.state, rung=0)
    open_incident(t, "retry")
    kill(t)


def finish_again(t: Turn, e: Elapsed) -> None:
    if t.state.end_code is not None:
        t.wait("phase", FINISH_AGAIN_S)
        t.say(Finish(t.state.end_code, t.state.reason))


def mark_dead(t: Turn, e: Exited) -> None:
    if e.kind is ProcessKind.ROOT:
        t.state = replace(t.state, alive=False, end_code=e.code)


def gateway_lost(t: Turn, e: GatewayLost) -> None:
    t.note("gateway_lost")


def gateway_back(t: Turn, e: GatewayBack) -> None:
    t.note("gateway_back", gate=e.gate)
    s = t.state
    suspected = s.phase is Phase.SUSPECTING and s.alive and s.proven and not t.rules.observe
    if suspected and s.address and e.gate == "starting":
        t.say(OpenTraffic(s.generation, s.address))  # a new gateway: nothing is parked there yet
    traffic(t)
    if s.phase is Phase.REPLAYING:
        recovered(t)


def store_failed(t: Turn, e: StoreFailed) -> None:
    t.note("store_failed", detail=e.detail)


def ignore(t: Turn, e: Event) -> None:
    """The named answer "nothing"."""
