"""Two witnesses or no kill: every combination that matters, and the ones that clients could stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from defib.core.events import CanaryOutcome, FaultClass, Found, Symptom
from defib.core.witnesses import MAX_FINDINGS, Case, group_t, group_w, sufficient

FOUND = Found(1.0, 1, "ima", FaultClass.POISONED_CONTEXT, True, "Worker")
HINT = Found(1.0, 1, "hint", FaultClass.UNKNOWN, False)


def symptoms(*pairs: tuple[str, str]) -> tuple[Symptom, ...]:
    return tuple(Symptom(2.0, 1, f"x{n}", c, b, "status") for n, (c, b) in enumerate(pairs))


THREE = symptoms(("c1", "b1"), ("c2", "b2"), ("c3", "b3"))


@pytest.mark.parametrize(
    ("case", "enough"),
    [
        (Case(0), False),
        (Case(0, findings=(FOUND,)), False),
        (Case(0, findings=(FOUND,) * 50), False),
        (Case(0, symptoms=THREE), False),
        (Case(0, findings=(FOUND,), symptoms=THREE), False),
        (Case(0, findings=(FOUND,), symptoms=THREE, canary=CanaryOutcome.BLIND), False),
        (Case(0, health=True), False),
        (Case(0, canary=CanaryOutcome.TIMEOUT), False),
        (Case(0, findings=(HINT,), health=True), False),
        (Case(0, findings=(FOUND,), canary=CanaryOutcome.BLIND), False),
        (Case(0, exits=("VLLM::EngineCore",)), True),
        (Case(0, start_limit=True), True),
        (Case(0, findings=(FOUND,), health=True), True),
        (Case(0, findings=(FOUND,), canary=CanaryOutcome.ERROR), True),
        (Case(0, findings=(FOUND,), canary=CanaryOutcome.REFUSED), True),
        (Case(0, symptoms=THREE[:1], canary=CanaryOutcome.ERROR), True),
        (Case(0, symptoms=THREE, canary=CanaryOutcome.TIMEOUT), True),
        (Case(0, health=True, canary=CanaryOutcome.ERROR), True),
    ],
)
def test_what_is_enough_for_a_kill(case: Case, enough: bool) -> None:
    assert sufficient(case) is enough


def test_three_symptoms_count_only_from_unlike_exchanges() -> None:
    assert "symptoms:3" in group_w(Case(0, symptoms=THREE))
    one_connection = symptoms(("c", "b1"), ("c", "b2"), ("c", "b3"))
    one_body = symptoms(("c1", "b"), ("c2", "b"), ("c3", "b"))
    assert group_w(Case(0, symptoms=one_connection)) == group_w(Case(0, symptoms=one_body)) == ()


def test_group_t_counts_once_however_much_there_is() -> None:
    assert group_t(Case(0, findings=(FOUND,) * 9, symptoms=THREE)) == ("log:ima", "symptom")


def test_findings_are_bounded_at_the_limit() -> None:
    case = Case(0)
    for _ in range(MAX_FINDINGS + 5):
        case = case.with_found(FOUND)
    assert len(case.findings) == MAX_FINDINGS


def test_the_initiator_is_the_first_named_process_and_hints_name_none() -> None:
    bare = replace(FOUND, process="")
    assert Case(0, findings=(HINT, bare, FOUND)).initiator() == "Worker"
    assert Case(0, exits=("VLLM::EngineCore",)).initiator() == "VLLM::EngineCore"
    assert Case(0).initiator() == "unknown"


def test_the_fingerprint_prefers_the_cause_over_the_exit() -> None:
    assert Case(0, findings=(HINT, FOUND), exits=("root",)).fingerprint() == "ima"
    assert Case(0, exits=("root",)).fingerprint() == "exit:root"
    assert Case(0, start_limit=True).fingerprint() == "start-limit"
