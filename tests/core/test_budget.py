"""The budget at its edges."""

from __future__ import annotations

from defib.core.budget import MAX_LEDGER, Budget, Rung, forgiven, frees_at, next_rung, trimmed

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


def test_a_bad_rung_is_skipped_and_a_proven_launch_forgiven() -> None:
    assert next_rung(RUNGS, 0, frozenset({"same-again"}), (), "ima", Budget(), 0.0) == 1
    ledger = ((1.0, "ima", "same-again"), (2.0, "ima", "eager"))
    assert forgiven(ledger, 2.0) == ledger[:1]


def test_the_ledger_is_bounded() -> None:
    long = tuple((float(n), "ima", "eager") for n in range(MAX_LEDGER + 9))
    assert len(trimmed(long, Budget(window_s=1e9), 100.0)) == MAX_LEDGER
