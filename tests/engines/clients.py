"""Clients of the engine tests: each runs in a thread and records exactly what it received."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

ANSWER_LIMIT_S = 400.0
"""Longer than a recovery: a client that defib holds must not give up by itself."""


@dataclass
class Client:
    """One POST. Look at the fields after `join()`."""

    url: str
    path: str
    body: dict[str, Any]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytearray = field(default_factory=bytearray)
    broken: str = ""
    answering: threading.Event = field(default_factory=threading.Event)
    delivering: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Client":
        """Send it."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def join(self, limit_s: float = ANSWER_LIMIT_S) -> "Client":
        """Wait for the end of the answer."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), f"the answer does not end: {bytes(self.raw[-500:])!r}"
        return self

    def _run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=ANSWER_LIMIT_S, trust_env=False) as client:
                with client.stream("POST", self.path, json=self.body) as response:
                    self.status, self.headers = response.status_code, dict(response.headers)
                    self.answering.set()
                    for chunk in response.iter_raw():
                        self.raw += chunk
                        if b"data: " in self.raw or not self.body.get("stream"):
                            self.delivering.set()
        except httpx.TransportError as error:
            self.broken = repr(error)

    @property
    def events(self) -> list[str]:
        """The data of each event of a stream; comments (`: ...`) are left out, as a client does."""
        blocks = bytes(self.raw).decode("utf-8").split("\n\n")
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The events, or the plain answer, as JSON."""
        if self.body.get("stream"):
            return [json.loads(event) for event in self.events if event != "[DONE]"]
        return [json.loads(bytes(self.raw))]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """All choices of the answer, in order."""
        return [choice for value in self.objects for choice in value.get("choices", [])]

    @property
    def text(self) -> str:
        """The generated text."""
        parts = []
        for choice in self.choices:
            message = choice.get("delta") or choice.get("message") or {}
            parts.append(choice.get("text") or message.get("content") or "")
        return "".join(parts)

    @property
    def finish_reason(self) -> str | None:
        """The last one that was given."""
        reasons = [choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")]
        return reasons[-1] if reasons else None
