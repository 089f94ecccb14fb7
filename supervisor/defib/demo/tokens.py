"""The fake model: a tokenizer and a next token that depends on all the ids before it, on nothing else.

So the same prompt gives the same answer in every generation, in every batch, and a continuation of
`prompt ids + delivered ids` gives exactly the tokens that would have followed.
"""

import hashlib
import re

_WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "on",
    "with",
    "as",
    "by",
    "from",
    "this",
    "are",
    "be",
    "at",
    "or",
    "it",
    "not",
    "its",
    "can",
    "has",
    "more",
    "one",
    "when",
    "which",
    "time",
    "all",
    "into",
    "will",
    "each",
    "two",
    "first",
    "only",
    "after",
    "other",
    "than",
    "then",
    "where",
    "heart",
    "beat",
    "signal",
    "memory",
    "kernel",
    "stream",
    "pulse",
    "steady",
    "light",
    "water",
    "stone",
    "river",
    "small",
    "large",
    "open",
    "closed",
    "warm",
    "cold",
    "quick",
    "slow",
    "north",
    "south",
    "green",
    "blue",
    "white",
    "dark",
    "early",
    "late",
    "morning",
    "evening",
    "road",
    "house",
    "tree",
    "field",
    "garden",
    "window",
    "table",
    "paper",
    "letter",
    "answer",
    "question",
    "number",
    "story",
    "music",
    "voice",
    "hand",
    "eye",
    "word",
    "name",
    "way",
    "part",
]
_FIRST_WORD = 256
VOCABULARY = _FIRST_WORD + len(_WORDS)
_IDS = {" " + word: _FIRST_WORD + index for index, word in enumerate(_WORDS)}
_PIECE = re.compile(r" [a-z]+|.", re.DOTALL)


def encode(text: str) -> list[int]:
    """Ids of a text: a known word with its blank is one id, anything else is its UTF-8 bytes."""
    ids: list[int] = []
    for piece in _PIECE.findall(text):
        known = _IDS.get(piece)
        ids.extend([known] if known is not None else piece.encode("utf-8", "surrogatepass"))
    return ids


def decode(ids: list[int]) -> str:
    """The text of ids; bytes that aren't UTF-8 and unknown ids become the replacement character."""
    out = bytearray()
    for token in ids:
        out += token_bytes(token)
    return out.decode("utf-8", "replace")


def token_bytes(token: int) -> bytes:
    """The bytes of one id."""
    if 0 <= token < _FIRST_WORD:
        return bytes([token])
    if token < VOCABULARY:
        return (" " + _WORDS[token - _FIRST_WORD]).encode()
    return "\ufffd".encode()


class Generator:
    """Gives one token after the other for one prompt."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self._state = hashlib.blake2b(digest_size=8)
        for token in prompt_ids:
            self._feed(token)

    def next(self) -> int:
        """The next id; it is part of what the one after it depends on. Always a word, so always text."""
        digest = self._state.copy().digest()
        token = _FIRST_WORD + int.from_bytes(digest, "big") % len(_WORDS)
        self._feed(token)
        return token

    def _feed(self, token: int) -> None:
        self._state.update((token % 2**32).to_bytes(4, "big"))
