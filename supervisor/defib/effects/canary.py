"""The canary: a short, deterministic request to the worker itself, past the gateway, that proves it computes.

Only an answer of the engine's own making is a fact about it: a request that could not be sent, or was turned away
for its key or its form, is blind.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from defib.core.events import CanaryOutcome
from defib.runtime.http import address_url, client_for

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CanaryRequest:
    """What to send: a path, a JSON body and headers (the worker's own key, if it has one)."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """`digest` stands for the text that was generated; empty unless it was answered."""

    outcome: CanaryOutcome
    sent_at: float
    detail: str = ""
    digest: str = ""


async def send_canary(
    address: str, request: CanaryRequest, timeout_s: float, clock: Callable[[], float], reference: str = ""
) -> CanaryResult:
    """One request, at most `timeout_s` seconds. `reference`: the digest of the first answer of this instance."""
    sent_at = clock()
    try:
        async with client_for(address) as client:
            answer = await client.post(
                address_url(address) + request.path,
                json=dict(request.body),
                headers=dict(request.headers),
                timeout=httpx.Timeout(timeout_s, connect=min(5.0, timeout_s)),
            )
    except httpx.ConnectError as error:
        outcome = CanaryOutcome.REFUSED if _nobody_listens(error) else CanaryOutcome.BLIND
        return CanaryResult(outcome, sent_at, f"could not be sent: {error}")
    except (httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
        return CanaryResult(CanaryOutcome.BLIND, sent_at, f"could not be sent: {type(error).__name__}")
    except httpx.TimeoutException:
        return CanaryResult(CanaryOutcome.TIMEOUT, sent_at, f"no answer in {timeout_s:g} s")
    except httpx.HTTPError as error:
        return CanaryResult(CanaryOutcome.ERROR, sent_at, f"cut off: {type(error).__name__}")
    return _judge(answer, sent_at, reference)


def _nobody_listens(error: BaseException | None) -> bool:
    """Was the connection refused, rather than not attempted? The reason is somewhere in the chain of causes."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, OSError) and error.errno in (errno.ECONNREFUSED, errno.ENOENT):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _judge(answer: httpx.Response, sent_at: float, reference: str) -> CanaryResult:
    if answer.status_code >= 500:
        return CanaryResult(CanaryOutcome.ERROR, sent_at, f"HTTP {answer.status_code}")
    if answer.status_code != 200:
        return CanaryResult(CanaryOutcome.BLIND, sent_at, f"HTTP {answer.status_code}: not for the engine to answer")
    text = _generated(answer.content[:MAX_ANSWER_BYTES])
    if text is None:
        return CanaryResult(CanaryOutcome.ERROR, sent_at, "HTTP 200 without a generated text")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    same = not reference or digest == reference
    return CanaryResult(CanaryOutcome.ANSWERED if same else CanaryOutcome.DIFFERS, sent_at, "", digest)


def _generated(body: bytes) -> str | None:
    """The first choice's text, for completions and chat alike; None where there is none."""
    try:
        choice = json.loads(body)["choices"][0]
    except (ValueError, LookupError, TypeError):
        return None
    if not isinstance(choice, dict) or not choice.get("finish_reason"):
        return None
    message = choice.get("message") or {}
    text = choice.get("text") if "text" in choice else message.get("content")
    return text if isinstance(text, str) else ""
