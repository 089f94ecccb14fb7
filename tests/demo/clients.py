"""Clients that run beside a test and record what they received."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Client:
    """One request in a thread. Look at the fields after `join()`."""

    url: str
    path: str
    body: dict[str, object]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""
    broken: str = ""
    first: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Client":
        """Send it."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def join(self) -> "Client":
        """Wait for the end of the answer."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the answer does not end"
        return self

    def _run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
                with client.stream("POST", self.path, json=self.body) as response:
                    self.status, self.headers = response.status_code, dict(response.headers)
                    for chunk in response.iter_raw():
                        self.raw += chunk
                        self.first.set()
        except httpx.TransportError as error:
            self.broken = repr(error)

    @property
    def events(self) -> list[str]:
        """The data of each event of a stream."""
        return [event.removeprefix("data: ") for event in self.raw.decode().split("\n\n") if event]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The events that are JSON."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def text(self) -> str:
        """The generated text, of a stream or of a plain answer."""
        values = self.objects if self.body.get("stream") else [json.loads(self.raw)]
        out = ""
        for value in values:
            for choice in value.get("choices", []):
                out += choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        return out
