"""The reader of flat YAML: what it reads, and what it says it can't."""

from __future__ import annotations

import pytest

from defib.cli.flat_yaml import MAX_LINES, NOT_PLAIN, Value, read_flat


@pytest.mark.parametrize(
    "text, value",
    [
        ("k: v", "v"),
        ("k: 8000", "8000"),
        ("k:   v  # comment", "v"),
        ("k: v#no comment", "v#no comment"),
        ("k: 'a # b' # c", "a # b"),
        ('k: "a: b"', "a: b"),
        ("'k': v", "v"),
        ("k:", None),
        ("k: ~", None),
        ("k: null", None),
        ("k: # comment", None),
        ("k: ''", ""),
        ("k: [a, 'b' ]", ("a", "b")),
        ("k: []", ()),
        ("k:\n- a\n- b", ("a", "b")),
        ("k: # c\n  - a # d\n\n  # e\n  - b\nl: w", ("a", "b")),
        ("---\nk: v\n", "v"),
        ("l:\n  k: inner\nk: v", "v"),
        ("k: a\nk: b", "b"),
    ],
)
def test_plain_values_are_read(text: str, value: Value) -> None:
    assert read_flat(text)["k"] == value


@pytest.mark.parametrize(
    "text",
    [
        *("k: &a v", "k: *a", "k: !!int 1", "k: {a: 1}", "k: [a, [b]]", "k: [{a: 1}]", "k: |\n  a", "k: >\n  a"),
        *("k:\n  a: 1", "k:\n- a: 1", "k:\n- [a]", "k: a\n  b", 'k: "a\\n"', "k: 'it''s'", "k: [a,\n  b]", "k: a: b"),
        *("k: 'open", "k:\n-\n", "k:\n  - a\n  b: 1"),
    ],
)
def test_other_values_are_known_to_be_unknown(text: str) -> None:
    assert read_flat(text)["k"] is NOT_PLAIN


def test_dashes_stand_for_underscores() -> None:
    assert read_flat("served_model_name: n") == {"served-model-name": "n"}


def test_lines_that_are_no_keys_are_passed_over() -> None:
    assert read_flat("just text\n- item\n? x\nk: v\n") == {"k": "v"}


def test_lines_beyond_the_limit_are_not_read() -> None:
    assert read_flat("a: 1\n" * (MAX_LINES - 1) + "k: v\n").get("k") == "v"
    assert read_flat("a: 1\n" * MAX_LINES + "k: v\n").get("k") is None
