"""The clients of `defib demo`: each sends one completion in a thread and keeps what it got, as a real one would.

They know nothing of defib: what they call complete is what any client of the API would call so.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

TIMEOUT_S = 90.0
MAX_EVENTS = 10_000


class Client:
    """Sends at once. `text` is what was generated; `problem` says why an answer isn't complete."""

    def __init__(self, port: int, model: str, name: str, prompt: str, tokens: int, stream: bool) -> None:
        self.name, self.stream = name, stream
        self.text, self.problem, self.finish = "", "", ""
        self.sent_at = 0.0
        self.seconds = 0.0
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the answer has ended, one way or the other."""
        return not self._thread.is_alive()

    @property
    def complete(self) -> bool:
        """Whether the answer has a finish reason and no error in it."""
        return self.done and bool(self.finish) and not self.problem

    def wait(self, limit_s: float) -> Client:
        """Itself, when it is done or the limit has passed."""
        self._thread.join(limit_s)
        return self

    def _run(self) -> None:
        self.sent_at = time.monotonic()
        try:
            with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
                if self.stream:
                    self._streamed(client)
                else:
                    self._plain(client)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            self.problem = f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - self.sent_at
        if not self.finish and not self.problem:
            self.problem = "the answer ended without a finish reason"

    def _plain(self, client: httpx.Client) -> None:
        answer = client.post(self._url, json=self._body)
        if answer.status_code != 200:
            self.problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
            return
        self._take(answer.json())

    def _streamed(self, client: httpx.Client) -> None:
        with client.stream("POST", self._url, json=self._body) as answer:
            if answer.status_code != 200:
                self.problem = f"HTTP {answer.status_code}"
                return
            for number, line in enumerate(answer.iter_lines()):
                if line == "data: [DONE]" or number > MAX_EVENTS:
                    return
                if line.startswith("data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.problem = f"an error object: {event['error']}"[:300]
        for choice in event.get("choices", ()):
            self.text += choice.get("text") or ""
            self.finish = choice.get("finish_reason") or self.finish
