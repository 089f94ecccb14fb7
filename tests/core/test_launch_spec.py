"""Edits of command lines, held against an independent reading of them: argparse with vLLM's rules in front."""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from defib.core.launch_spec import (
    MAX_ARGS,
    Delta,
    Edit,
    Fresh,
    Gate,
    Grammar,
    Key,
    LaunchSpec,
    Remove,
    SetEnv,
    Switch,
    UnsetEnv,
    Value,
    applied,
    delta_from,
    edit,
    is_version,
    last_value,
    occurrences,
    parse_edit,
    switched,
    version_key,
)

SWEEP = settings(deadline=None, max_examples=150)
GRAMMAR = Grammar(aliases={"-cc": "--compilation-config"})


def edited(argv: str | list[str], *edits: Edit) -> tuple[str, ...]:
    given_argv = argv.split() if isinstance(argv, str) else argv
    return edit(LaunchSpec(tuple(given_argv)), edits, GRAMMAR).argv


# --- an oracle: what vLLM's parser makes of a command line ---


def merge(into: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        into = into.setdefault(part, {})
    into[path[-1]] = value


def meaning(argv: tuple[str, ...]) -> dict[str, Any]:
    plain: list[str] = []
    dotted: dict[str, Any] = {}
    tokens = list(argv[2:])
    while tokens:
        token = tokens.pop(0)
        head, equals, value = token.partition("=")
        if head.startswith("-cc"):
            head = "--compilation-config" + head[3:]
        if head.startswith("--"):
            name, dot, path = head[2:].partition(".")
            head = "--" + name.replace("_", "-")
            if dot:
                text = value if equals else tokens.pop(0)
                try:
                    parsed = json.loads(text)
                except ValueError:
                    parsed = text
                merge(dotted, path.split("."), parsed)
                continue
        plain.append(head + equals + value)
    if dotted:
        plain += ["--compilation-config", json.dumps(dotted)]
    return vars(_parser().parse_args(plain))


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    parser.add_argument("--attention-backend")
    parser.add_argument("--port", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--compilation-config", type=json.loads)
    return parser


def spelled(name: str, values: list[str]) -> st.SearchStrategy[list[str]]:
    """One option in any of its spellings."""
    names = st.sampled_from([name, "--" + name[2:].replace("-", "_")])
    separate = names.map(lambda n: [n, *values])
    if len(values) != 1:
        return separate
    return st.one_of(separate, names.map(lambda n: [f"{n}={values[0]}"]))


def json_option() -> st.SearchStrategy[list[str]]:
    objects = st.fixed_dictionaries(
        {},
        optional={
            "cudagraph_mode": st.sampled_from(["FULL", "PIECEWISE"]),
            "mode": st.integers(0, 3),
            "pass_config": st.just({"fuse": True}),
        },
    )
    names = st.sampled_from(["--compilation-config", "--compilation_config", "-cc"])
    plain = st.tuples(names, objects).map(lambda t: [t[0], json.dumps(t[1])])
    keys = st.sampled_from(["cudagraph_mode FULL", "mode 2", "pass_config.fuse true", "pass_config.sp false"])
    dotted = st.tuples(names, keys, st.sampled_from(" =")).map(lambda t: f"{t[0]}.{t[1].replace(' ', t[2])}".split(" "))
    return st.one_of(plain, dotted)


OPTIONS = st.one_of(
    st.sampled_from([["--enforce-eager"], ["--no-enforce-eager"], ["--enforce_eager"], ["--no-async-scheduling"]]),
    st.sampled_from(["FLASH_ATTN", "TRITON_ATTN"]).flatmap(lambda v: spelled("--attention-backend", [v])),
    st.integers(1, 9).flatmap(lambda v: spelled("--port", [str(v)])),
    st.sampled_from([["a"], ["a", "b"]]).flatmap(lambda v: spelled("--served-model-name", v)),
    st.integers(-2, 2).flatmap(lambda v: spelled("--seed", [str(v)])),
    json_option(),
)
COMMANDS = st.lists(OPTIONS, max_size=6).map(lambda parts: ("vllm", "serve", "m", *(t for p in parts for t in p)))
EDITS = st.sampled_from(
    [
        Switch("--enforce-eager", True),
        Switch("--enforce-eager", False),
        Switch("--async-scheduling", False),
        Value("--attention-backend", ("TRITON_ATTN",)),
        Value("--port", ("7",)),
        Value("--seed", ("-1",)),
        Value("--served-model-name", ("a", "b")),
        Key("--compilation-config", ("cudagraph_mode",), "PIECEWISE"),
        Key("--compilation-config", ("mode",), "0"),
        Key("--compilation-config", ("pass_config", "fuse"), "false"),
    ]
)


def wanted(before: dict[str, Any], change: Edit) -> dict[str, Any]:
    match change:
        case Switch(name, on):
            return {**before, name[2:].replace("-", "_"): on}
        case Value(name, values):
            value: Any = list(values) if name == "--served-model-name" else values[0]
            return {**before, name[2:].replace("-", "_"): int(value) if name in ("--port", "--seed") else value}
        case Key(_, path, value):
            config = json.loads(json.dumps(before["compilation_config"] or {}))
            merge(config, list(path), json.loads(value) if value != "PIECEWISE" else value)
            return {**before, "compilation_config": config}
        case _:
            raise AssertionError(change)


@SWEEP
@given(COMMANDS, EDITS)
def test_an_edit_changes_what_it_names_and_nothing_else(argv: tuple[str, ...], change: Edit) -> None:
    after = edit(LaunchSpec(argv), [change], GRAMMAR)
    assert meaning(after.argv) == wanted(meaning(argv), change)


@SWEEP
@given(COMMANDS, st.lists(EDITS, max_size=3))
def test_editing_twice_is_editing_once(argv: tuple[str, ...], changes: list[Edit]) -> None:
    for change in changes:
        once = edit(LaunchSpec(argv), [change], GRAMMAR)
        assert edit(once, [change], GRAMMAR) == once


@SWEEP
@given(COMMANDS, st.lists(EDITS, max_size=4))
def test_the_delta_applied_to_the_base_gives_the_edited_command(argv: tuple[str, ...], changes: list[Edit]) -> None:
    base = LaunchSpec(argv)
    after = edit(base, changes, GRAMMAR)
    delta = delta_from(base, after)
    assert applied(base, delta) == after
    assert 0 not in delta.drop
    assert delta.append == after.argv[len(after.argv) - len(delta.append) :]


@SWEEP
@given(COMMANDS, st.lists(st.text("ab-", max_size=3), max_size=8))
def test_a_delta_reaches_any_command_of_the_same_program(argv: tuple[str, ...], other: list[str]) -> None:
    base, after = LaunchSpec(argv), LaunchSpec((argv[0], *other))
    assert applied(base, delta_from(base, after)) == after


@SWEEP
@given(COMMANDS, EDITS)
def test_an_edited_option_is_there_once(argv: tuple[str, ...], change: Edit) -> None:
    after = edit(LaunchSpec(argv), [change], GRAMMAR).argv
    if isinstance(change, Switch | Value):
        names = [o.name.replace("--no-", "--") for o in occurrences(after, GRAMMAR)]
        assert names.count(change.name) == 1  # type: ignore[union-attr]


# --- examples, as a person would write them ---


def test_a_switch_that_is_there_already_stays_where_it_is() -> None:
    argv = "vllm serve m --enforce-eager --port 1"
    assert " ".join(edited(argv, Switch("--enforce-eager", True))) == argv


def test_a_contrary_switch_is_replaced() -> None:
    after = edited("vllm serve m --no-enforce_eager --port 1", Switch("--enforce-eager", True))
    assert after == ("vllm", "serve", "m", "--port", "1", "--enforce-eager")


def test_a_word_after_a_switch_is_not_its_value() -> None:
    after = edited("vllm serve --no-enforce-eager m", Switch("--enforce-eager", True))
    assert after == ("vllm", "serve", "m", "--enforce-eager")


def test_a_word_after_a_value_is_not_part_of_it() -> None:
    assert edited("vllm serve --port 1 m", Value("--port", ("2",))) == ("vllm", "serve", "m", "--port=2")


def test_a_negative_number_is_a_value_and_not_an_option() -> None:
    assert edited("vllm serve m --seed -1", Value("--seed", ("3",))) == ("vllm", "serve", "m", "--seed=3")


def test_a_dotted_edit_of_a_json_option_edits_the_json() -> None:
    argv = ["vllm", "serve", "m", "-cc", '{"cudagraph_mode":"FULL","mode":3}']
    after = edited(argv, Key("--compilation-config", ("cudagraph_mode",), "PIECEWISE"))
    assert after == ("vllm", "serve", "m", '--compilation-config={"cudagraph_mode":"PIECEWISE","mode":3}')


def test_a_dotted_edit_replaces_the_same_key_and_leaves_the_others() -> None:
    argv = "vllm serve m --compilation_config.mode 3 -cc.cudagraph_mode=FULL"
    after = edited(argv, Key("--compilation-config", ("cudagraph_mode",), "PIECEWISE"))
    assert " ".join(after) == "vllm serve m --compilation_config.mode 3 --compilation-config.cudagraph_mode=PIECEWISE"


def test_json_that_is_no_object_is_replaced_by_the_key() -> None:
    after = edited("vllm serve m --compilation-config 3", Key("--compilation-config", ("mode",), "0"))
    assert after == ("vllm", "serve", "m", '--compilation-config={"mode":0}')


@pytest.mark.parametrize(
    "argv, left",
    [
        ("vllm --a --x v --b", "vllm --a --b"),
        ("vllm --x=v --b", "vllm --b"),
        ("vllm --x v w", "vllm w"),
        ("vllm --x", "vllm"),
        ("vllm --a", "vllm --a"),
    ],
)
def test_a_removed_option_takes_its_value_along(argv: str, left: str) -> None:
    assert edited(argv, Remove("--x", valued=True)) == tuple(left.split())


def test_a_removed_switch_leaves_the_word_after_it() -> None:
    assert edited("vllm --no-x m", Remove("--x", valued=False)) == ("vllm", "m")


def test_the_program_itself_is_never_touched() -> None:
    base = LaunchSpec(("--port", "--port", "1"))
    after = edit(base, [Remove("--port", valued=True)])
    assert after.argv == ("--port",)
    assert delta_from(base, after).drop == (1, 2)
    with pytest.raises(ValueError, match="program"):
        delta_from(base, LaunchSpec(("other",)))


def test_variables_and_fresh_caches_go_into_the_delta() -> None:
    base = LaunchSpec(("vllm",), env={"KEEP": "1", "OLD": "1"})
    after = edit(base, [SetEnv("A", "1"), SetEnv("KEEP", "1"), UnsetEnv("OLD"), Fresh("triton")])
    delta = delta_from(base, after)
    assert delta == Delta(env={"A": "1"}, unset=("OLD",), fresh=("triton",))
    assert applied(base, delta) == after
    assert edit(after, [SetEnv("OLD", "2")]).unset == frozenset()


def test_the_message_of_a_delta_has_the_launchers_form() -> None:
    delta = Delta((1,), ("--x",), {"A": "1"}, ("B",), ("triton",))
    assert delta.message() == {"drop": [1], "append": ["--x"], "env": {"A": "1"}, "unset": ["B"], "fresh": ["triton"]}


def test_a_command_of_too_many_arguments_is_not_edited() -> None:
    base = LaunchSpec(("vllm", *["x"] * (MAX_ARGS - 1)))
    assert edit(base, [Switch("--y", True)]).argv[-1] == "--y"
    with pytest.raises(ValueError, match=str(MAX_ARGS)):
        edit(LaunchSpec((*base.argv, "x")), [Switch("--y", True)])


# --- reading ---


def test_the_last_spelling_of_a_value_wins() -> None:
    argv = ["vllm", "serve", "m", "--port", "1", "--por_t", "2", "--port=3", "--served_model_name", "a", "b"]
    assert last_value(argv, GRAMMAR, ["--port"]) == "3"
    assert last_value(argv, GRAMMAR, ["--served-model-name"]) == "a"
    assert last_value(argv, GRAMMAR, ["--uds"]) is None


def test_an_option_without_its_value_reads_as_absent() -> None:
    assert last_value(["vllm", "--port"], GRAMMAR, ["--port"]) is None


@pytest.mark.parametrize("text, state", [("--x", True), ("--x --no-x", False), ("--no_x", False), ("", None)])
def test_a_switch_reads_as_its_last_spelling(text: str, state: bool | None) -> None:
    assert switched(["vllm", *text.split()], GRAMMAR, "--x") is state


# --- edits as text ---


@pytest.mark.parametrize(
    "text, change",
    [
        ("--enforce-eager", Switch("--enforce-eager", True)),
        ("--no-async_scheduling", Switch("--async-scheduling", False)),
        ("--attention-backend TRITON_ATTN", Value("--attention-backend", ("TRITON_ATTN",))),
        ("--x=a b", None),
        ("--x a 'b c'", Value("--x", ("a", "b c"))),
        ("-cc.cudagraph_mode PIECEWISE", Key("--compilation-config", ("cudagraph_mode",), "PIECEWISE")),
        ("--x.y a b", None),
        ("--x.y", None),
        ("word", None),
        ("--x --y", None),
        ("", None),
    ],
)
def test_an_edit_is_read_from_text_or_refused(text: str, change: Edit | None) -> None:
    if change is None:
        with pytest.raises(ValueError, match="expected"):
            parse_edit(text, GRAMMAR)
    else:
        assert parse_edit(text, GRAMMAR) == change


# --- versions ---


@pytest.mark.parametrize(
    "version, allowed",
    [("0.12.9", False), ("0.13", True), ("0.13.0rc1", True), ("0.16.4+cpu", True), ("0.17.0", False), (None, False)],
)
def test_a_gate_opens_at_since_and_closes_at_gone(version: str | None, allowed: bool) -> None:
    assert Gate("0.13", "0.17").allows(version) is allowed


def test_without_a_gate_every_version_will_do() -> None:
    assert Gate().allows(None)
    assert Gate().allows("nonsense")
    assert not Gate(since="0.1").allows("nonsense")


def test_versions_compare_by_number_and_not_by_text() -> None:
    assert version_key("v0.9.2.dev3+g12") == (0, 9, 2)
    assert Gate(since="0.9").allows("0.10.2")
    assert is_version("0.13.1") and not is_version(">=0.13") and not is_version("")


def test_a_negated_flag_is_known_where_the_flag_is() -> None:
    grammar = Grammar(gates={"--async-scheduling": Gate("0.10")})
    assert grammar.knows("--no-async_scheduling", "0.11")
    assert not grammar.knows("--no-async-scheduling", "0.9.2")
    assert grammar.knows("--anything", None)
