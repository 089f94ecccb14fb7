"""Faults, flags and tokens as values."""

import pytest

from defib.demo.faults import KINDS, Fault, in_prompt, read, wait_in_prompt_s
from defib.demo.options import parse
from defib.demo.tokens import Generator, decode, encode


def test_a_fault_is_read_from_a_word_or_an_object() -> None:
    assert read("hang") == Fault(kind="hang", at="step")
    assert read('{"fault": "worker_kill", "times": 2}') == Fault(kind="worker_kill", at="now", times=2)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", '{"fault": "hang", "at": "never"}', '{"fault": "hang", "x": 1}']
)
def test_a_wrong_fault_says_what_is_wrong(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def test_every_kind_can_be_asked_for_in_a_prompt() -> None:
    for kind in KINDS:
        found = in_prompt(f"please <|fault:{kind}@7|> now")
        assert found is not None
        assert (found.kind, found.after_tokens) == (kind, 7)
    assert in_prompt("a fault: hang") is None
    assert wait_in_prompt_s("<|wait:250|>") == 0.25


def test_tokens_are_a_function_of_the_ids_before_them() -> None:
    prompt = encode("hello there")
    whole = Generator(prompt)
    ids = [whole.next() for _ in range(20)]
    rest = Generator(prompt + ids[:10])
    assert [rest.next() for _ in range(10)] == ids[10:]
    assert encode(decode(ids)) == ids


def test_text_survives_the_tokenizer() -> None:
    for text in ("héllo wörld", "  two  blanks\n", "the cat and the dog", "\U0001f600"):
        assert decode(encode(text)) == text


def test_underscores_dots_and_short_forms_are_understood() -> None:
    options = parse(["m", "--max_num_seqs=3", "-O3", "-cc.mode", "0", "--api-key", "k"], {})
    assert (options.model, options.max_num_seqs, options.api_keys) == ("m", 3, ("k",))
    assert "api_key" not in options.given


def test_an_unknown_flag_is_refused_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["m", "--port", "1", "--nope"], {})
    assert left.value.code == 2
    assert "vllm: error: unrecognized arguments: --nope" in capsys.readouterr().err
