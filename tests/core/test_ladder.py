"""The ladder: which rungs a version takes, and what they may add."""

from __future__ import annotations

import pytest

from defib.core.budget import Rung
from defib.core.ladder import Ladder, Remedy
from defib.core.launch_spec import Fresh, Gate, Grammar, SetEnv, Switch, UnsetEnv, Value

GRAMMAR = Grammar(gates={"--attention-backend": Gate("0.13")})
LADDER = Ladder(
    "e",
    (
        Remedy("same-again", "", ""),
        Remedy("eager", "", "", launches=2, edits=(Switch("--enforce-eager", True),)),
        Remedy("backend", "", "", edits=(Value("--attention-backend", ("TRITON_ATTN",)),)),
        Remedy("newer", "", "", edits=(SetEnv("RUNNER", "0"), UnsetEnv("OLD"), Fresh("triton")), gate=Gate("0.26")),
    ),
    clear=("triton", "compile"),
    grammar=GRAMMAR,
    start_limit_s=5.0,
)


@pytest.mark.parametrize(
    "version, names",
    [
        (None, ["same-again", "eager"]),
        ("0.12.0", ["same-again", "eager"]),
        ("0.13.0", ["same-again", "eager", "backend"]),
        ("0.26.0", ["same-again", "eager", "backend", "newer"]),
    ],
)
def test_a_rung_with_a_flag_that_the_version_does_not_know_is_left_out(version: str | None, names: list[str]) -> None:
    assert [rung.name for rung in LADDER.rules(version, (), observe=False).rungs] == names


def test_the_rules_take_launches_limits_and_the_caches_that_the_instance_has() -> None:
    rules = LADDER.rules(None, ["triton"], observe=True)
    assert rules.rungs == (Rung("same-again", 1), Rung("eager", 2))
    assert rules.caches == ("triton",)
    assert rules.start_limit_s == 5.0
    assert rules.observe


def test_a_rung_is_an_edit_of_the_command_that_was_given() -> None:
    delta = LADDER.delta("eager", ["vllm", "serve", "m", "--no-enforce-eager"], None)
    assert (delta.drop, delta.append) == ((3,), ("--enforce-eager",))
    same = LADDER.delta("same-again", ["vllm", "--no-enforce-eager"], None)
    assert same.message() == {"drop": [], "append": [], "env": {}, "unset": [], "fresh": []}


def test_a_rung_that_the_version_has_not_is_an_error() -> None:
    with pytest.raises(KeyError, match="newer"):
        LADDER.delta("newer", ["vllm"], "0.13")


def test_additions_are_all_that_any_rung_can_add() -> None:
    added = LADDER.additions(["vllm", "serve", "m"], "0.26")
    assert added.args == ("--enforce-eager", "--attention-backend=TRITON_ATTN")
    assert added.env == {"RUNNER": ("0",), "OLD": ()}
    assert added.fresh == ("triton",)
    assert LADDER.additions(["vllm"], None).args == ("--enforce-eager",)


def test_a_command_that_cannot_be_edited_keeps_the_rungs_without_edits() -> None:
    assert [remedy.name for remedy in LADDER.unedited().remedies] == ["same-again"]
    assert LADDER.unedited().additions(["bash"], "0.26").args == ()
