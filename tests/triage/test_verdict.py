"""Findings to a verdict: initiator first, collateral after, consequences never."""

from __future__ import annotations

from defib.triage.records import Place
from defib.triage.signatures import Finding
from defib.triage.verdict import MAX_COLLATERAL, MOMENT_S, judge


def found(
    signature: str,
    role: str = "cause",
    at: float = 1.0,
    trust: str = "library",
    fault: str = "poisoned_context",
    line: int = 1,
) -> Finding:
    return Finding(
        signature, fault, role, trust, "true", Place.EXCEPTION, "stdout", line, "Worker_TP1", 7, 1, signature, at
    )


def test_no_findings_mean_healthy() -> None:
    assert judge([found("vllm_ready", "hint", fault="healthy")]).fault == "healthy"
    assert judge([]).fault == "healthy"


def test_the_first_cause_is_the_initiator_and_the_rest_is_collateral() -> None:
    first, second, third = found("a"), found("b", at=5.0), found("c", "consequence", 6.0, "wrapper", "unknown")
    verdict = judge([first, second, third, found("h", "hint")])
    assert verdict.initiator is first and verdict.collateral == (second, third)
    assert (verdict.fault, verdict.restart_helps) == ("poisoned_context", "true")
    assert "a at stdout line 1 of Worker_TP1" in verdict.why and "b, c" in verdict.why


def test_within_one_moment_the_more_trusted_source_wins() -> None:
    peer, kernel = found("peer", trust="peer"), found("assertion", at=1.0 + MOMENT_S, trust="assertion")
    assert judge([peer, kernel]).initiator is kernel
    late = found("assertion", at=1.1 + MOMENT_S, trust="assertion")
    assert judge([peer, late]).initiator is peer


def test_of_equal_trust_and_time_the_first_found_wins() -> None:
    first, second = found("a", line=9), found("b", line=3)
    assert judge([first, second]).initiator is first


def test_either_is_a_cause_only_without_a_real_one() -> None:
    either, cause = found("e", "either", 1.0), found("c", "cause", 9.0)
    assert judge([either, cause]).initiator is cause
    assert judge([either, found("x", "consequence", 2.0)]).initiator is either


def test_consequences_alone_are_unknown() -> None:
    verdict = judge([found("d", "consequence", fault="poisoned_context")])
    assert (verdict.fault, verdict.initiator) == ("unknown", None)
    assert "only consequences" in verdict.why


def test_what_follows_a_planned_stop_is_a_shutdown() -> None:
    stop = found("planned_stop", "hint", 1.0, fault="shutdown")
    verdict = judge([stop, found("c", "cause", 1.0), found("d", "consequence", 2.0)])
    assert (verdict.fault, verdict.initiator, verdict.restart_helps) == ("shutdown", stop, "false")


def test_a_cause_before_the_stop_is_not_excused_by_it() -> None:
    cause, stop = found("c", "cause", 1.0), found("planned_stop", "hint", 1.0, fault="shutdown")
    assert judge([cause, stop]).initiator is cause


def test_a_stop_after_the_engine_s_death_is_the_server_s_own() -> None:
    died, stop = found("vllm_engine_died", "consequence", 1.0), found("planned_stop", "hint", 2.0, fault="shutdown")
    assert judge([died, stop]).fault == "unknown"


def test_collateral_is_bounded() -> None:
    verdict = judge([found("a"), *(found(f"s{n}", at=2.0) for n in range(200))])
    assert len(verdict.collateral) == MAX_COLLATERAL
