"""What every part of the machine uses: into a phase, traffic, deadlines, incidents. Pure."""

from __future__ import annotations

from dataclasses import replace

from defib.core import budget, witnesses
from defib.core.commands import (
    Finish,
    HoldTraffic,
    OpenTraffic,
    PauseTraffic,
    Persist,
    Probe,
    RefuseTraffic,
    Settle,
)
from defib.core.events import GpuFault, Resume
from defib.core.state import Phase, Turn
from defib.core.witnesses import Case

LOOK_S = 60.0
"""A supervisor that comes back gives a worker that it does not know at least this long to say that it is ready."""
FINISH_AGAIN_S = 10.0
"""An order to finish that nobody heard is said again."""
PAUSED_RETRY_S = 30.0

RECOVERING = (Phase.CAPTURING, Phase.KILLING, Phase.GATING, Phase.CLEARING, Phase.LAUNCHING, Phase.PROVING)
"""The phases between a verdict and proof: traffic is held."""


def enter(t: Turn, phase: Phase) -> None:
    before = t.state.phase
    t.state = replace(t.state, phase=phase, pending=0, probe=0, unmade=False)
    t.forget("phase")
    if before is not phase:
        t.note("phase", phase=phase.value, before=before.value, generation=t.state.generation)
    persist(t)


def persist(t: Turn) -> None:
    s = t.state
    if s.generation == 0:
        return  # nothing is known yet: what an earlier supervisor remembered must stay
    t.say(
        Persist(
            Resume(
                phase=Phase.KILLING.value if s.unmade else s.phase.value,
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
                fault=s.case.fault().value if s.case is not None and s.incident is not None else "",
                worked=s.worked,
            )
        )
    )


def start_effect(t: Turn) -> int:
    ticket = t.ticket()
    t.state = replace(t.state, pending=ticket)
    return ticket


def traffic(t: Turn) -> None:
    """Says (again) what the gateway should do now, and renews the lease where it is one."""
    s = t.state
    if t.rules.observe:
        if s.address and s.alive and s.proven and s.phase is not Phase.STOPPING:
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
        case Phase.SUSPECTING if s.case is not None and accused(s.case):
            t.say(PauseTraffic(s.generation))
            t.wait("lease", t.rules.lease_renew_s)
        case _ if s.phase in RECOVERING:
            launched = s.phase in (Phase.LAUNCHING, Phase.PROVING) and not s.unmade
            dead = s.generation - 1 if launched else s.generation
            t.say(HoldTraffic(dead, s.incident or "", _remaining_s(t)))
            t.wait("lease", t.rules.lease_renew_s)
        case Phase.DOWN:
            t.say(RefuseTraffic("the launch budget is spent", down_for(t)))
        case Phase.STUCK:
            t.say(RefuseTraffic(f"the worker can't be replaced: {s.reason}", t.rules.stuck_retry_s))
        case _:
            pass


def _remaining_s(t: Turn) -> float | None:
    """How long until ready, as far as earlier launches tell; None: unknown."""
    s = t.state
    if s.ready_in_s is None:
        return None
    launched = s.phase in (Phase.STARTING, Phase.LAUNCHING, Phase.PROVING)
    return max(0.0, s.launched_at + s.ready_in_s - t.at) if launched else s.ready_in_s


def accused(case: Case) -> bool:
    """Is there more than HTTP symptoms or silence? Those alone do not stop the traffic of others."""
    return case.cause() is not None or bool(witnesses.group_w(case))


def down_for(t: Turn) -> float:
    s = t.state
    return max(1.0, budget.frees_at(t.rules.rungs, s.bad_rungs, s.ledger, s.cause, t.rules.budget, t.at) - t.at)


def told(case: Case) -> dict[str, str]:
    return {
        "group_t": ", ".join(witnesses.group_t(case)) or "none",
        "group_w": ", ".join(witnesses.group_w(case)) or "none",
    }


def open_incident(t: Turn, why: str) -> None:
    """A new incident; its name is a file name."""
    number = t.state.incidents + 1
    t.state = replace(t.state, incident=f"{number:04d}-{why}", incidents=number)


def settle(t: Turn, outcome: str) -> None:
    if t.state.incident is not None:
        t.note("settled", incident=t.state.incident, outcome=outcome)
        t.say(Settle(t.state.incident, outcome))
        t.state = replace(t.state, incident=None)
        persist(t)


def await_budget(t: Turn) -> None:
    t.wait("phase", t.rules.linger_s if t.rules.on_spent == "exit" else down_for(t))


def finish(t: Turn, code: int, reason: str) -> None:
    settle(t, "finished")
    enter(t, Phase.STOPPING)
    t.state = replace(t.state, end_code=code)
    t.note("finish", code=code, reason=reason)
    t.state = replace(t.state, reason=reason)
    t.forget("lease", "probation")
    t.wait("phase", FINISH_AGAIN_S)
    t.say(Finish(code, reason))


def note_xid(t: Turn, e: GpuFault) -> None:
    t.note("xid", generation=e.generation, xid=e.xid, gpu=e.gpu, pid=e.pid, ours=e.ours, source=e.source)


def rung_index(t: Turn, name: str) -> int | None:
    """Where this rung stands on the ladder."""
    return next((i for i, rung in enumerate(t.rules.rungs) if rung.name == name), None)


def serve(t: Turn) -> None:
    enter(t, Phase.SERVING)
    t.forget("lease")
    t.state = replace(t.state, case=None)
    if t.state.incident is not None:  # a false alarm while replaying, or a supervisor that came back then
        settle(t, "observed" if t.rules.observe else "recovered")
        t.wait("probation", t.rules.probation_s)
    traffic(t)


def await_ready(t: Turn, since: float) -> None:
    limit_s = t.rules.start_limit_s
    t.wait("phase", max(min(LOOK_S, limit_s), since + limit_s - t.at))


def await_worker(t: Turn, since: float) -> None:
    """A worker that runs and is not proven yet."""
    if t.rules.observe:
        settle(t, "observed")
    enter(t, Phase.LAUNCHING if t.state.incident else Phase.STARTING)
    traffic(t)
    await_ready(t, since)


def learn(t: Turn, share: float) -> None:
    """Remembers how long this start took, unless nobody watched it."""
    s = t.state
    took_s = max(0.0, t.at - s.launched_at)
    learnt = took_s * share if took_s <= t.rules.start_limit_s else s.ready_in_s
    t.state = replace(s, ready=True, ever_ready=True, ready_in_s=learnt)
    t.note("ready", generation=s.generation, seconds=round(took_s, 3))


def note_would(t: Turn) -> None:
    case = t.state.case
    if case is not None:
        t.note("would_have_killed", generation=t.state.generation, **told(case), fault=case.fault().value)


def probe_suspect(t: Turn) -> None:
    s = t.state
    if s.address is None:
        return
    ticket = t.ticket()
    t.state = replace(t.state, probe=ticket)
    t.say(Probe(ticket, s.generation, s.address, "suspect", t.rules.suspect_canary_s))
