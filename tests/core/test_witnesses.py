"""Two witnesses or no kill: every combination that matters, and the ones that clients could stage."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from defib.core.events import CanaryOutcome, FaultClass, Found, Symptom
from defib.core.witnesses import MAX_FINDINGS, UNLIKE_EXCHANGES, Case, group_t, group_w, sufficient

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
        (Case(0, symptoms=THREE[:2], canary=CanaryOutcome.TIMEOUT), False),
        (Case(0, findings=(FOUND,), canary=CanaryOutcome.TIMEOUT), True),
        (Case(0, symptoms=THREE[:1], canary=CanaryOutcome.REFUSED), True),
        (Case(0, symptoms=THREE[:1], health=True), True),
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


def _most_unlike(pairs: list[tuple[str, str]]) -> int:
    """By trying everything."""
    for count in range(min(len(pairs), UNLIKE_EXCHANGES), 0, -1):
        for chosen in itertools.combinations(pairs, count):
            if len({c for c, _ in chosen}) == len({b for _, b in chosen}) == count:
                return count
    return 0


def test_unlike_exchanges_are_counted_as_by_trying_everything_whatever_came_before() -> None:
    dice = random.Random(1)
    met = set()
    for _ in range(3000):
        pairs = [(f"c{dice.randint(1, 4)}", f"b{dice.randint(1, 4)}") for _ in range(dice.randint(0, 12))]
        case = Case(0)
        for symptom in symptoms(*pairs):
            case = case.with_symptom(symptom)
        expected = _most_unlike(pairs) >= UNLIKE_EXCHANGES
        assert ("symptoms:3" in group_w(case)) is expected, pairs
        met.add((expected, len(case.symptoms) < len(pairs)))
    assert len(met) == 4, "with and without symptoms that were not kept"


def test_what_one_client_says_at_length_hides_nobody_else() -> None:
    case = Case(0)
    for n in range(500):
        case = case.with_symptom(Symptom(2.0 + n, 1, f"x{n}", "loud", f"b{n}", "status"))
    assert len(case.symptoms) == UNLIKE_EXCHANGES and case.accused_at == 501.0
    for symptom in THREE[:2]:
        case = case.with_symptom(symptom)
    assert "symptoms:3" in group_w(case)
    assert case.accused_at == 501.0, "an older one does not turn the time back"


def test_many_consequences_do_not_hide_the_cause() -> None:
    case = Case(0)
    for _ in range(MAX_FINDINGS + 5):
        case = case.with_found(HINT)
    case = case.with_found(FOUND)
    assert case.cause() == FOUND and len(case.findings) == MAX_FINDINGS


def test_an_accusation_is_as_old_as_its_latest_cause_or_symptom() -> None:
    case = Case(5.0)
    assert case.accused_at == 5.0
    case = case.with_found(replace(HINT, at=9.0))
    assert case.accused_at == 5.0, "a consequence accuses nobody"
    case = case.with_found(replace(FOUND, at=7.0)).with_symptom(replace(THREE[0], at=6.0))
    assert case.accused_at == 7.0
    assert case.with_symptom(replace(THREE[0], at=8.0)).accused_at == 8.0


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
