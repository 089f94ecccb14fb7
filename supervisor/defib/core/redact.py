"""Takes secrets out of what is written down. Pure; used on the way in, before anything reaches a disk or a log."""

from __future__ import annotations

import re
from collections.abc import Iterable

GONE = "[redacted]"

_SECRET_FLAG = re.compile(r"^--?[\w.-]*(api[-_]?key|token|secret|password|passwd|credential|auth)[\w.-]*$", re.I)
_SECRET_NAME = re.compile(r"(api_?key|token|secret|passw|credential|auth|private|cookie|session_?key)", re.I)
_NOT_SECRET = re.compile(r"(tokenizer|token_ids|tokens|max[-_].*token|tokenize)", re.I)
_IN_TEXT = (
    re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(
        r"(?i)((?:api[-_]?key|hf[-_]?token|access[-_]?token|secret|password|authorization)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;)\]}]{4,}"
    ),
    re.compile(r"\b()(?:sk|hf|ghp|xox[bp])[-_][A-Za-z0-9_-]{12,}"),
)


def redact_argv(argv: Iterable[str]) -> list[str]:
    """A command line without the values of flags that carry secrets, in both spellings."""
    shown: list[str] = []
    hide = False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        secret = bool(_SECRET_FLAG.match(flag)) and not _NOT_SECRET.search(flag)
        if hide and not argument.startswith("--"):
            shown.append(GONE)
            continue  # `--api-key` takes several values
        hide = secret and not equals
        shown.append(f"{flag}={GONE}" if secret and equals else redact_text(argument))
    return shown


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """A line without what looks like a key, and without these known secrets."""
    for secret in secrets:
        if len(secret) >= 4:
            text = text.replace(secret, GONE)
    for pattern in _IN_TEXT:
        text = pattern.sub(rf"\g<1>{GONE}", text)
    return text


def secret_name(name: str) -> bool:
    """Does an environment variable of this name look like a secret?"""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)
