"""Secrets don't reach a disk or a log."""

from __future__ import annotations

import pytest

from defib.core.redact import GONE, redact_argv, redact_text, secret_name


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["vllm", "serve", "--api-key", "sk-1", "--port", "1"], ["vllm", "serve", "--api-key", GONE, "--port", "1"]),
        (["--api-key", "one", "two", "--x"], ["--api-key", GONE, GONE, "--x"]),
        (["--api-key=sk-1"], [f"--api-key={GONE}"]),
        (["--hf-token", "abc"], ["--hf-token", GONE]),
        (
            ["--tokenizer", "a/b", "--max-num-batched-tokens", "8"],
            ["--tokenizer", "a/b", "--max-num-batched-tokens", "8"],
        ),
    ],
)
def test_flags_that_carry_secrets_lose_their_values(argv: list[str], shown: list[str]) -> None:
    assert redact_argv(argv) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdefgh12345678",
        "api_key='topsecretvalue'",
        "sk-abcdefghijklmnop",
        "hf_ABCDEFGHIJKLMNOP",
    ],
)
def test_what_looks_like_a_key_is_taken_out_of_a_line(text: str) -> None:
    assert GONE in redact_text(text)
    assert not any(part in redact_text(text) for part in ("abcdefgh12345678", "topsecretvalue", "abcdefghijklmnop"))


def test_a_known_secret_is_taken_out_wherever_it_stands() -> None:
    assert redact_text("x=hunter22;", ["hunter22"]) == f"x={GONE};"
    assert redact_text("an a", ["a"]) == "an a"


def test_an_ordinary_line_stays_as_it_is() -> None:
    line = "(EngineCore pid=1) ERROR 11-30 23:21:50 [core.py:1] CUDA error: an illegal memory access was encountered"
    assert redact_text(line) == line


def test_names_of_secrets() -> None:
    assert secret_name("HF_TOKEN") and secret_name("VLLM_API_KEY") and not secret_name("TOKENIZERS_PARALLELISM")
