"""Signature files to signatures: every mistake is named by file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from defib.policy.reading import PolicyError, policies_folder
from defib.policy.signatures import load_signatures

BOOM = "patterns = ['^boom$']"
NEAR = "[[signature.near_miss]]\n"
PATTERN = "signature[0].where[0].patterns[0]"

GOOD = """
[[signature]]
id = "odd_boom"
title = "A boom"
meaning = "Something went boom."
class = "hang"
role = "cause"
root_layer = "kernel"
restart_helps = "only_with_change"
sources = ["seen once"]
[[signature.where]]
place = "raw_stderr"
patterns = ['^boom$']
[[signature.example]]
stream = "stderr"
text = "boom"
[[signature.near_miss]]
text = "boom"
"""

CUDA = """[[signature.cuda]]
text = "an odd error was met"
code = 799
runtime = "cudaErrorOdd"
driver = "CUDA_ERROR_ODD"
"""


def write(folder: Path, text: str, name: str = "own.toml") -> Path:
    (folder / name).write_text(text)
    return folder


def test_the_shipped_signatures_load_and_are_tried_on_their_examples() -> None:
    signatures = load_signatures(policies_folder() / "signatures")
    assert len(signatures) >= 30
    assert len({signature.id for signature in signatures}) == len(signatures)
    assert {signature.fault for signature in signatures} >= {"poisoned_context", "oom_gpu", "config_error", "hang"}


def test_a_file_becomes_a_signature(tmp_path: Path) -> None:
    (signature,) = load_signatures(write(tmp_path, GOOD))
    assert (signature.id, signature.fault, signature.restart_helps) == ("odd_boom", "hang", "only_with_change")
    assert signature.where[0].patterns == ("^boom$",) and signature.examples[0].stream == "stderr"


def test_a_cuda_error_stands_for_all_its_spellings(tmp_path: Path) -> None:
    (signature,) = load_signatures(write(tmp_path, GOOD.replace("[[signature.where]]", CUDA + "[[signature.where]]")))
    assert len(signature.where) > 5
    assert any("CUDA_ERROR_ODD" in pattern for where in signature.where for pattern in where.patterns)


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ('id = "odd_boom"', 'id = "Odd boom"', "signature[0].id", "lower-case"),
        ('id = "odd_boom"', "", "signature[0].id", "missing"),
        ('class = "hang"', 'class = "sad"', "signature[0].class", "expected one of"),
        ('role = "cause"', "role = 3", "signature[0].role", "expected a text"),
        ('role = "cause"', 'role = "cause"\nroll = 1', "signature[0].roll", "unknown key"),
        ('sources = ["seen once"]', "sources = []", "signature[0].sources", "at least one source"),
        ('place = "raw_stderr"', 'place = "none"', "signature[0].where[0].place", "expected one of"),
        ('place = "raw_stderr"', 'place = "record"', "signature[0].where[0].files", "source files"),
        (BOOM, "patterns = ['boom']", PATTERN, "must start with ^"),
        (BOOM, "patterns = ['^(boom']", PATTERN, "RE2"),
        (BOOM, "patterns = ['^b.{0,99}m']", PATTERN, "gap"),
        (BOOM, "patterns = ['^bang$']", "signature[0].example[0]", "its own example"),
        (NEAR, f'{NEAR}stream = "stderr"\n', "signature[0].near_miss[0]", "matches its near miss"),
        ('[[signature.example]]\nstream', '[[signature.example]]\ncolour', "signature[0].example[0].colour", "unknown"),
        ("[[signature]]", "[signature]", "signature", "expected an array of tables"),
        ("[[signature]]", "extra = 1\n[[signature]]", "extra", "unknown key"),
        ('title = "A boom"', "title = ", "", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_file_and_key(tmp_path: Path, old: str, new: str, key: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(PolicyError) as caught:
        load_signatures(write(tmp_path, GOOD.replace(old, new, 1)))
    assert caught.value.file == str(tmp_path / "own.toml")
    assert caught.value.key == key and said in caught.value.expected


def test_a_double_id_names_both_files(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "a.toml")
    with pytest.raises(PolicyError) as caught:
        load_signatures(write(tmp_path, GOOD, "b.toml"))
    assert caught.value.file.endswith("b.toml") and "a.toml" in caught.value.expected


def test_a_folder_without_signatures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="holds no signature file"):
        load_signatures(tmp_path)
    with pytest.raises(PolicyError, match="found 0"):
        load_signatures(write(tmp_path, "# nothing yet\n"))


def test_the_example_in_the_docs_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    text = page.split("```toml\n", 1)[1].split("```", 1)[0]
    assert [signature.id for signature in load_signatures(write(tmp_path, text))] == ["my_boom"]
