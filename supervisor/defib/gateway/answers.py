"""The texts that the gateway itself says: errors in the form of the OpenAI API, the health page, comments.

Every error says what happened and what to do, names defib in its type, and never quotes a request.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

_REASONS = {
    200: "OK",
    400: "Bad Request",
    408: "Request Timeout",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RECOVERING = b": defib: recovering\n\n"
EARLY_STREAM_FIELDS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an exchange gets our own answer. `retry_after_s` None: not to be retried by itself."""

    status: int
    type: str
    message: str
    retry_after_s: float | None = None

    def body(self) -> bytes:
        """The JSON error object."""
        error = {"message": self.message, "type": self.type, "param": None, "code": self.status}
        return json.dumps({"error": error}, ensure_ascii=True).encode()

    def event(self) -> bytes:
        """The same as the last event of a stream. No `[DONE]` follows: nobody shall take it for success."""
        return b"data: " + self.body() + b"\n\n"

    def fields(self) -> bytes:
        """The header lines that go with it. OpenAI's clients obey `x-should-retry`."""
        if self.retry_after_s is None:
            return b"X-Should-Retry: false\r\n"
        return b"Retry-After: %d\r\n" % max(1, math.ceil(round(self.retry_after_s, 3)))


RETRY_S = 5.0


def recovering(retry_after_s: float | None) -> Problem:
    """The hold limit is reached or known to be too short."""
    text = "The inference server is being recovered and is not back yet; please retry later."
    return Problem(503, "defib_recovering", text, retry_after_s if retry_after_s is not None else RETRY_S)


def refusing(reason: str, retry_after_s: float) -> Problem:
    """The gate refuses."""
    return Problem(503, "defib_unavailable", f"The inference server is not available: {reason}", retry_after_s)


def overloaded(what: str) -> Problem:
    """One of our bounds is reached."""
    return Problem(503, "defib_overloaded", f"defib is at its limit of {what}; please retry.", RETRY_S)


def draining() -> Problem:
    """We stop."""
    return Problem(503, "defib_stopping", "The inference server is being stopped.", RETRY_S)


def not_replayed(why: str) -> Problem:
    """Nothing was delivered, and it may not be sent again."""
    text = f"The inference server failed while it worked on this request, and defib did not repeat it: {why}."
    return Problem(503, "defib_not_replayed", text)


def interrupted() -> Problem:
    """A half-delivered stream that cannot go on."""
    text = "The inference server failed in the middle of this answer; what was received is incomplete."
    return Problem(503, "defib_stream_interrupted", text)


def unreachable(what: str) -> Problem:
    """The worker could not be reached, or ended the connection without an answer."""
    return Problem(502, "defib_upstream_failed", f"The inference server gave no answer: {what}.", RETRY_S)


def bad_request(status: int, message: str) -> Problem:
    """A request that we don't serve."""
    return Problem(status, "defib_bad_request", message)


def head(status: int, fields: bytes, length: int | None, close: bool) -> bytes:
    """The head of an answer of ours. `length` None: chunked."""
    framing = b"Transfer-Encoding: chunked\r\n" if length is None else b"Content-Length: %d\r\n" % length
    line = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\n".encode()
    return b"".join((line, fields, framing, b"Connection: close\r\n" if close else b"", b"\r\n"))


def json_page(value: dict[str, Any]) -> bytes:
    """A small JSON page."""
    return json.dumps(value, separators=(",", ":")).encode()
