"""Ladders: the shipped ones against the shipped profiles, and what a wrong file gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from defib.core.launch_spec import Fresh, Remove, SetEnv, Switch, UnsetEnv, Value
from defib.policy.engines import load_engines
from defib.policy.ladders import load_ladder
from defib.policy.reading import PolicyError, policies_folder

POLICIES = policies_folder()
ENGINE = (
    'name = "e"\ntitle = "E"\ndialect = "plain"\n[ready]\npath = ""\nlimit_s = 5\n'
    "[fresh_env]\ntriton = 'T'\n[[cache]]\nname = 'triton'\nroots = ['/x']\nglobs = ['y']\n"
)
FIRST = "engine = 'e'\n[[rung]]\nname = 'same'\ntitle = 't'\ncost = 'c'\n"
SECOND = "[[rung]]\nname = 'second'\ntitle = 't'\ncost = 'c'\n"


def written(tmp_path: Path, text: str) -> Path:
    for folder, content in (("engines", ENGINE), ("ladders", text)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "e.toml").write_text(content)
    return tmp_path


def test_every_engine_has_a_ladder() -> None:
    for profile in load_engines(POLICIES):
        assert load_ladder(POLICIES, profile.name).remedies


def test_vllm_is_launched_the_same_again_and_then_eager() -> None:
    ladder = load_ladder(POLICIES, "vllm")
    assert [remedy.name for remedy in ladder.remedies] == ["same-again", "eager"]
    assert ladder.remedies[0].edits == ()
    assert ladder.remedies[1].edits == (Switch("--enforce-eager", True),)
    assert ladder.clear == ("triton",)
    # Both rungs are for every version, an unknown one too.
    assert len(ladder.usable(None)) == 2


def test_every_kind_of_edit_can_be_written(tmp_path: Path) -> None:
    text = FIRST + SECOND + "flags = ['--a', '--b 1']\nremove = ['--c', '--d *']\nunset = ['V']\nfresh = ['triton']\n"
    remedy = load_ladder(written(tmp_path, text + "[rung.env]\nW = '1'\n"), "e").remedies[1]
    assert remedy.edits == (
        *(Switch("--a", True), Value("--b", ("1",)), Remove("--c", False), Remove("--d", True)),
        *(SetEnv("W", "1"), UnsetEnv("V"), Fresh("triton")),
    )


@pytest.mark.parametrize(
    "text, key, expected",
    [
        ("", "engine", "missing"),
        ("engine = 'f'\n", "engine", "the name of the file"),
        ("engine = 'e'\n", "rung", "1 to 16 rungs"),
        (FIRST.replace("[[rung]]", "clear = ['x']\n[[rung]]"), "clear", "has no cache 'x'"),
        (FIRST + SECOND.replace("second", "same"), "rung", "two rungs have one name"),
        (FIRST + "flags = ['--x']\n", "rung", "one rung without edits"),
        (FIRST + "since = '1'\n", "rung", "one rung without edits"),
        (FIRST + SECOND + "flags = ['x']\n", "rung[1].flags", "expected a flag"),
        (FIRST + SECOND + "flags = ['--x --y']\n", "rung[1].flags", "one flag and its value"),
        (FIRST + SECOND + "remove = ['x']\n", "rung[1].remove", "expected a flag"),
        (FIRST + SECOND + "fresh = ['x']\n", "rung[1].fresh", "no fresh_env.x"),
        (FIRST + SECOND + "launches = 0\n", "rung[1].launches", "1 to 10"),
        (FIRST + SECOND + "since = 'x'\n", "rung[1].since", "a version like"),
        (FIRST + SECOND + "flag = ['--x']\n", "rung[1].flag", "unknown key"),
        (FIRST + SECOND + "[rung.env]\nW = 1\n", "rung[1].env.W", "expected a text"),
        (FIRST + "".join(SECOND.replace("second", f"r{n}") for n in range(16)), "rung", "found 17"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, text: str, key: str, expected: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_ladder(written(tmp_path, text), "e")
    assert str(caught.value).startswith(f"{tmp_path}/ladders/e.toml: {key}: ")
    assert expected in str(caught.value)


def test_sixteen_rungs_are_not_too_many(tmp_path: Path) -> None:
    text = FIRST + "".join(SECOND.replace("second", f"r{n}") for n in range(15))
    assert len(load_ladder(written(tmp_path, text), "e").remedies) == 16
