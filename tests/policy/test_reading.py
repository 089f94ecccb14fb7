"""The reader of policy files: each error names file, key and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from defib.policy.reading import MAX_POLICY_BYTES, PolicyError, Table, policies_folder, read_table


def table(text: str, tmp_path: Path) -> Table:
    file = tmp_path / "p.toml"
    file.write_text(text)
    return read_table(file)


def test_values_come_back_as_they_were_written(tmp_path: Path) -> None:
    root = table(
        'a = "x"\nb = true\nc = 1\nd = 1.5\ne = ["p", "q"]\n[t]\nk = "v"\n[[s]]\nn = 1\n[[s]]\nn = 2\n', tmp_path
    )
    assert (root.text("a"), root.flag("b"), root.whole("c"), root.number("c"), root.number("d")) == (
        ("x", True, 1, 1.0, 1.5)
    )
    assert root.texts("e") == ("p", "q")
    assert dict(root.table("t").items()) == {"k": "v"}
    assert [row.whole("n") for row in root.tables("s")] == [1, 2]
    root.done()


def test_absent_keys_have_their_default(tmp_path: Path) -> None:
    root = table("", tmp_path)
    assert root.text("a", "x") == "x"
    assert root.optional_text("b") is None
    assert root.texts("c", ()) == ()
    assert root.table("d").values == {}
    assert root.tables("e") == ()
    root.done()


@pytest.mark.parametrize(
    "text, read, key, expected",
    [
        ("", lambda t: t.text("a"), "a", "missing; expected a text"),
        ("a = 1", lambda t: t.text("a"), "a", "expected a text, found int 1"),
        ("a = true", lambda t: t.whole("a"), "a", "expected a whole number, found bool True"),
        ("a = true", lambda t: t.number("a"), "a", "expected a number, found bool True"),
        ("a = 1.0", lambda t: t.whole("a"), "a", "expected a whole number, found float 1.0"),
        ("a = 1", lambda t: t.flag("a"), "a", "expected true or false, found int 1"),
        ('a = "x"', lambda t: t.texts("a"), "a", "expected a list of texts, found str 'x'"),
        ("a = [1]", lambda t: t.texts("a"), "a", "expected a list of texts, found 1 in it"),
        ("a = 1", lambda t: t.table("a"), "a", "expected a table, found int 1"),
        ("a = [1]", lambda t: t.tables("a"), "a", "expected an array of tables, found 1 in it"),
        ('a = "z"', lambda t: t.choice("a", ("x", "y")), "a", "expected one of x, y; found 'z'"),
        ("[t]\na = 1", lambda t: t.table("t").text("a"), "t.a", "expected a text"),
        ("[[s]]\nn = 1\n[[s]]\n", lambda t: [r.whole("n") for r in t.tables("s")], "s[1].n", "missing"),
    ],
)
def test_a_wrong_value_names_file_key_and_expectation(
    tmp_path: Path, text: str, read: Callable[[Table], Any], key: str, expected: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        read(table(text, tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / 'p.toml'}: {key}: ")
    assert expected in str(caught.value)


def test_a_key_that_nobody_asked_for_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    root = table('title = "x"\ntitel = "y"\n', tmp_path)
    root.text("title")
    with pytest.raises(PolicyError, match="titel: unknown key; known here: title"):
        root.done()


@pytest.mark.parametrize("data", [b"a = ", b"\xff", b'a = "x"\na = "y"\n'])
def test_a_file_that_is_not_toml_says_so(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.toml").write_bytes(data)
    with pytest.raises(PolicyError, match=r"\(the file\): not valid TOML"):
        read_table(tmp_path / "p.toml")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot be read .*No such file"):
        read_table(tmp_path / "absent.toml")
    with pytest.raises(PolicyError, match=r"cannot be read .*directory"):
        read_table(tmp_path)


def test_a_file_at_the_limit_is_read_and_one_above_it_is_not(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_bytes(b"#" * MAX_POLICY_BYTES)
    assert read_table(file).values == {}
    file.write_bytes(b"#" * (MAX_POLICY_BYTES + 1))
    with pytest.raises(PolicyError, match=f"larger than {MAX_POLICY_BYTES} bytes"):
        read_table(file)


def test_the_shipped_policies_are_found() -> None:
    assert (policies_folder() / "engines" / "vllm.toml").is_file()
