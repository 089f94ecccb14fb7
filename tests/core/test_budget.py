"""The budget at its edges."""

from __future__ import annotations

import pytest

from defib.core.budget import MAX_LEDGER, Budget, Rung, forgiven, frees_at, next_rung, ordered_at, trimmed

RUNGS = (Rung("same-again", 1), Rung("eager", 2))
NONE: frozenset[str] = frozenset()


def test_each_rung_is_used_as_often_as_it_may_and_then_the_next() -> None:
    ledger: tuple[tuple[float, str, str], ...] = ()
    taken = []
    for at in range(5):
        index = next_rung(RUNGS, 0, NONE, ledger, "ima", Budget(), float(at))
        taken.append(index)
        if index is not None:
            ledger = (*ledger, (float(at), "ima", RUNGS[index].name))
    assert taken == [0, 1, 1, None, None]


def test_another_cause_has_its_own_count_and_shares_the_overall_one() -> None:
    ledger = tuple((float(n), "ima", "eager") for n in range(2))
    assert next_rung(RUNGS, 1, NONE, ledger, "ima", Budget(), 3.0) is None
    assert next_rung(RUNGS, 1, NONE, ledger, "exit:root", Budget(), 3.0) == 1
    assert next_rung(RUNGS, 1, NONE, ledger, "exit:root", Budget(overall=2), 3.0) is None


def test_a_launch_leaves_the_window_exactly_at_its_end() -> None:
    ledger = ((10.0, "ima", "same-again"),)
    budget = Budget(window_s=100.0)
    assert trimmed(ledger, budget, 109.999) == ledger
    assert trimmed(ledger, budget, 110.0) == ()
    assert frees_at(RUNGS[:1], NONE, ledger, "ima", budget, 50.0) == 110.0
    assert frees_at(RUNGS[:1], NONE, (), "ima", budget, 50.0) == 50.0


def test_the_budget_frees_when_some_rung_may_be_launched_not_when_any_entry_goes() -> None:
    budget = Budget(window_s=100.0, overall=6)
    ledger = (
        (10.0, "other", "same-again"),
        (20.0, "ima", "same-again"),
        (30.0, "ima", "eager"),
        (40.0, "ima", "eager"),
    )
    assert next_rung(RUNGS, 0, NONE, ledger, "ima", budget, 50.0) is None
    assert frees_at(RUNGS, NONE, ledger, "ima", budget, 50.0) == 120.0
    assert frees_at(RUNGS, frozenset({"same-again"}), ledger, "ima", budget, 50.0) == 130.0
    assert frees_at(RUNGS, NONE, ledger, "ima", Budget(100.0, 2), 50.0) == 130.0
    assert frees_at(RUNGS, NONE, ledger, "new", budget, 50.0) == 50.0


def test_where_time_does_not_help_a_window_is_waited_for() -> None:
    bad = frozenset({"same-again", "eager"})
    assert frees_at(RUNGS, bad, (), "ima", Budget(100.0), 50.0) == 150.0
    assert frees_at(RUNGS, NONE, (), "ima", Budget(100.0, 0), 50.0) == 150.0


@pytest.mark.parametrize("at", [0.1, 2834.748, 13436.424, 65159.297])
def test_at_the_time_that_was_told_a_launch_is_possible(at: float) -> None:
    """Sums of floats differ in the last digit: to be woken a digit too early would mean to wait another window."""
    budget = Budget(3600.0, 1)
    ledger = ((at, "ima", "same-again"),)
    told = frees_at(RUNGS, NONE, ledger, "ima", budget, at + 1.0)
    assert told == at + 3600.0
    assert next_rung(RUNGS, 0, NONE, ledger, "ima", budget, told) is not None


def test_an_overall_limit_beyond_the_ledger_still_limits() -> None:
    ledger = tuple((float(n), f"cause{n}", "eager") for n in range(MAX_LEDGER))
    assert next_rung(RUNGS, 0, NONE, ledger, "ima", Budget(1e9, 1000), 100.0) is None


def test_a_restarted_supervisor_finds_the_order_of_the_launch_it_is_told_of() -> None:
    ledger = ((1.0, "ima", "same-again"), (500.0001, "ima", "eager"))
    assert ordered_at(ledger, 500.1) == 500.0001
    assert forgiven(ledger, ordered_at(ledger, 500.1)) == ledger[:1]
    assert ordered_at(ledger, 503.0) == 503.0, "another launch: this one was forgiven before"
    assert ordered_at((), 5.0) == 5.0


def test_a_bad_rung_is_skipped_and_a_proven_launch_forgiven() -> None:
    assert next_rung(RUNGS, 0, frozenset({"same-again"}), (), "ima", Budget(), 0.0) == 1
    ledger = ((1.0, "ima", "same-again"), (2.0, "ima", "eager"))
    assert forgiven(ledger, 2.0) == ledger[:1]


def test_the_ledger_is_bounded() -> None:
    long = tuple((float(n), "ima", "eager") for n in range(MAX_LEDGER + 9))
    assert len(trimmed(long, Budget(window_s=1e9), 100.0)) == MAX_LEDGER
