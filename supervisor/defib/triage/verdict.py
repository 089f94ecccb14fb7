"""Findings to a verdict: what failed first, what failed because of it, and why we say so. Pure.

The log is one witness; whether a kill follows is decided elsewhere. Consequences and hints are never causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from defib.triage.signatures import TRUSTS, Finding

MOMENT_S = 1.0
"""Causes within this time of the first belong to one moment, in which the more trustworthy source wins: the peers of
a dead rank complain within milliseconds of it, in any order."""

PLANNED_STOP = "planned_stop"
"""The hint that somebody asked the server to stop: what follows looks exactly like a crash. After a failure it means
nothing: the API server stops the engine then by the same signal."""

MAX_COLLATERAL = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the log alone supports. `fault` is a class of design.md section 5; `initiator` None without a cause."""

    fault: str
    initiator: Finding | None
    collateral: tuple[Finding, ...]
    restart_helps: str
    why: str


def judge(findings: Sequence[Finding]) -> Verdict:
    """The verdict over one incident's findings, given in the order in which they were found."""
    causes = [f for f in findings if f.role == "cause"] or [f for f in findings if f.role == "either"]
    stop = next((f for f in findings if f.signature == PLANNED_STOP), None)
    if stop is not None and not any(_before(f, stop, findings) for f in findings if f.role != "hint"):
        rest = _others(findings, stop)
        return Verdict(
            "shutdown", stop, rest, "false", f"somebody asked the server to stop ({_at(stop)}); {_then(rest)}"
        )
    if not causes:
        return _without_cause(findings)
    initiator = _first(causes)
    rest = _others(findings, initiator)
    why = f"{initiator.signature} at {_at(initiator)}: {initiator.text[:160]}; {_then(rest)}"
    return Verdict(initiator.fault, initiator, rest, initiator.restart_helps, why)


def _first(causes: Sequence[Finding]) -> Finding:
    """The most trusted of the first moment, the earliest of those. Findings keep their order where times are equal."""
    begin = min(f.at for f in causes)
    moment = [f for f in causes if f.at - begin <= MOMENT_S]
    return min(moment, key=lambda f: (TRUSTS.index(f.trust), f.at))


def _without_cause(findings: Sequence[Finding]) -> Verdict:
    consequences = tuple(f for f in findings if f.role == "consequence")[:MAX_COLLATERAL]
    if not consequences:
        return Verdict("healthy", None, (), "false", "nothing in the log speaks of a failure")
    why = f"only consequences were logged, first {consequences[0].signature} at {_at(consequences[0])}"
    return Verdict("unknown", None, consequences, "true", why)


def _before(finding: Finding, stop: Finding, findings: Sequence[Finding]) -> bool:
    if finding.at != stop.at:
        return finding.at < stop.at
    return list(findings).index(finding) < list(findings).index(stop)


def _others(findings: Sequence[Finding], initiator: Finding) -> tuple[Finding, ...]:
    return tuple(f for f in findings if f is not initiator and f.role != "hint")[:MAX_COLLATERAL]


def _at(finding: Finding) -> str:
    who = f" of {finding.process}" if finding.process else ""
    return f"{finding.stream} line {finding.line}{who}"


def _then(rest: tuple[Finding, ...]) -> str:
    if not rest:
        return "nothing followed from it"
    names = list(dict.fromkeys(f.signature for f in rest))
    return "what followed: " + ", ".join(names[:6])
