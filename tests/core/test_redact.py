"""Secrets don't reach a disk or a log, and ordinary lines stay as they are."""

from __future__ import annotations

import time

import pytest

from defib.core.redact import GONE, redact_argv, redact_text, redact_value, secret_name


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["vllm", "serve", "--api-key", "sk-1", "--port", "1"], ["vllm", "serve", "--api-key", GONE, "--port", "1"]),
        (["--api-key", "one", "two", "--x"], ["--api-key", GONE, GONE, "--x"]),
        (["--api-key=sk-1"], [f"--api-key={GONE}"]),
        (["--hf-token", "abc"], ["--hf-token", GONE]),
        (["--token", "abc", "--port=1"], ["--token", GONE, "--port=1"]),
        (
            ["--tokenizer", "a/b", "--max-num-batched-tokens", "8", "--long-prefill-token-threshold", "4"],
            ["--tokenizer", "a/b", "--max-num-batched-tokens", "8", "--long-prefill-token-threshold", "4"],
        ),
        (["bash", "-lc", "vllm serve m --api-key abc d --port 1"],
         ["bash", "-lc", f"vllm serve m --api-key {GONE} --port 1"]),
        (["bash", "-lc", "VLLM_API_KEY=abcdef vllm serve m"], ["bash", "-lc", f"VLLM_API_KEY={GONE} vllm serve m"]),
        (["--kv-config", '{"password": "p, q", "port": 1}'], ["--kv-config", f'{{"password": "{GONE}", "port": 1}}']),
        (["--endpoint", "https://me:hunter2@host/x"], ["--endpoint", f"https://{GONE}@host/x"]),
    ],
)  # fmt: skip
def test_flags_that_carry_secrets_lose_their_values(argv: list[str], shown: list[str]) -> None:
    assert redact_argv(argv) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer topsecretvalue1",
        "authorization: Basic topsecretvalue1==",
        "{'Authorization': 'Token topsecretvalue1'}",
        "api_key='topsecretvalue1'",
        "non-default args: {'api_key': ['topsecretvalue1', 'another'], 'port': 1}",
        "non-default args: {'api_key': ['another', 'topsecretvalue1'], 'port': 1}",
        '{"api_key": "topsecretvalue1"}',
        r"{\"api_key\": \"topsecretvalue1\"}",
        'password="with spaces, topsecretvalue1"',
        "client_secret: topsecretvalue1",
        "postgres://user:topsecretvalue1@db/x",
        "vllm serve m --api-key topsecretvalue1 --port 1",
        "sk-topsecretvalue1",
        "hf_topsecretvalue1",
        "github_pat_topsecretvalue1",
        "eyJhbGciOiJIUzI1NiJ9.topsecretvalue1.sig",
    ],
)
def test_what_looks_like_a_key_is_taken_out_of_a_line(text: str) -> None:
    assert GONE in redact_text(text)
    assert "topsecretvalue1" not in redact_text(text) and "another" not in redact_text(text)


def test_a_known_secret_is_taken_out_wherever_it_stands() -> None:
    assert redact_text("x=hunter22;", ["hunter22"]) == f"x={GONE};"
    assert redact_text("an a", ["a"]) == "an a", "too short to be told from a word"


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=1) ERROR 11-30 23:21:50 [core.py:1] CUDA error: an illegal memory access was encountered",
        "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 1 reqs",
        "tokenizer_mode='auto', max_num_batched_tokens=2048, token_ids=[1, 2, 3]",
        "prompt_token_ids: [1, 2], max_tokens=16, stop_token_ids=[]",
        "http://127.0.0.1:8000/v1/completions",
        '  File "/usr/lib/python3/authorization.py", line 3, in token',
    ],
)
def test_an_ordinary_line_stays_as_it_is(line: str) -> None:
    assert redact_text(line) == line


def test_values_are_redacted_by_their_name_and_by_their_text() -> None:
    value = {"api_key": "x\"y", "tokens": 5, "token_ids": [1], "keep": "plain", "n": {"HF_TOKEN": ["a"], "auth": None},
             "text": 'password="p"', "list": ("sk-abcdefghijklmnop", 7)}  # fmt: skip
    assert redact_value(value) == {
        "api_key": GONE, "tokens": 5, "token_ids": [1], "keep": "plain", "n": {"HF_TOKEN": GONE, "auth": None},
        "text": f'password="{GONE}"', "list": [GONE, 7],
    }  # fmt: skip
    assert redact_value(["a hunter22 b"], ["hunter22"]) == [f"a {GONE} b"]


def test_names_of_secrets() -> None:
    for name in ("HF_TOKEN", "VLLM_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "OPENAI_KEY",
                 "VLLM_API_TOKENS", "NPM_AUTH", "GITHUB_PAT", "SESSION_COOKIE"):  # fmt: skip
        assert secret_name(name), name
    for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PATH", "HOME", "VLLM_TOKENIZER", "KEYBOARD", "AUTHOR"):
        assert not secret_name(name), name


@pytest.mark.parametrize(
    "piece", ["-", "--a", "api_key", "api_key=", "a://", "secret ", "eyJ", "--token ", "authorization:"]
)
def test_a_line_made_to_be_slow_is_not(piece: str) -> None:
    """64 KiB of what a pattern begins with: quadratic behaviour would take minutes."""
    began = time.process_time()
    redact_text(piece * (65536 // len(piece)))
    assert time.process_time() - began < 2.0
