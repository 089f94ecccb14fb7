"""What the gateway goes by: every limit with its name and unit, and what an engine's requests allow.

Values only. Where they come from (the engine's profile, the operator's settings) is `app/gateway.py`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths that generate text: their answers are read for events, and the engine sees our request id."""
NO_PROGRESS_PATHS = frozenset({"/v1/models", "/version", "/tokenize", "/detokenize"})
"""Replayable paths whose answer does not prove that the engine computed."""
METRICS_PATH = "/metrics"
RELAYED_PROBE_PATHS = frozenset({METRICS_PATH, "/load"})
"""Probes that only the worker can answer: relayed, or 503 at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the gateway. Seconds, bytes, counts."""

    # requests
    head_bytes: int = 64 << 10
    head_s: float = 10.0
    """From the first byte of a head to its end."""
    idle_s: float = 75.0
    """How long a kept-alive client connection may say nothing between two requests."""
    body_bytes: int = 8 << 20
    """A larger body is streamed through and can't be replayed."""
    bodies_bytes: int = 256 << 20
    """Bodies in memory, all exchanges together; beyond it a body is streamed through."""
    body_stall_s: float = 60.0
    pipeline_bytes: int = 64 << 10
    clients: int = 4096
    # the worker
    connect_s: float = 5.0
    answer_head_bytes: int = 64 << 10
    pool_idle_s: float = 4.0
    """vLLM's server closes an idle connection after 5 s: ours are dropped before."""
    pool_connections: int = 512
    # parking
    park_s: float = 3.0
    parked_bytes: int = 1 << 20
    """Kept of one parked answer; beyond it we stop reading from the worker."""
    plain_kept_bytes: int = 256 << 10
    """A plain answer up to this length is forwarded when complete: one that is cut can be replayed."""
    event_bytes: int = 1 << 20
    """A stream with a longer event is passed on without looking into it."""
    stream_head_s: float = 15.0
    """How long the head of a stream waits for its first event."""
    # holding
    hold_plain_s: float = 50.0
    hold_stream_s: float = 600.0
    silent_stream_s: float = 15.0
    comment_s: float = 10.0
    held: int = 1024
    held_bytes: int = 256 << 20
    lease_s: float = 30.0
    """How long parking stays on while no supervisor is connected."""
    attempts: int = 3
    """Dispatches of one exchange."""
    deaths: int = 2
    """An exchange that was in flight at so many deaths is not sent again."""
    # ends
    write_stall_s: float = 300.0
    """A client that reads nothing for so long is given up."""
    linger_s: float = 1.0
    drain_s: float = 20.0
    # telling
    symptoms_per_s: int = 50
    progress_s: float = 0.1
    calm_progress_s: float = 0.5
    """While nobody is accused; a supervisor that hears of tokens ten times a second costs three times as much."""
    sweep_s: float = 1.0
    """How often the coarse deadlines are looked at."""
    counts_s: float = 1.0
    shapes: int = 1000
    journal_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """Requests that may be sent again: `forbid_if` names top-level keys of the JSON body that forbid it."""

    method: str
    path: str
    forbid_if: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """What the engine's requests allow. `own_request_ids`: the engine sees our id instead of the client's."""

    replay: Mapping[tuple[str, str], ReplayRule] = field(default_factory=dict)
    probe_paths: frozenset[str] = frozenset({"/health", "/ping"})
    own_request_ids: bool = True

    def replay_rule(self, method: str, path: str) -> ReplayRule | None:
        """The rule for a request, None: it must not be sent twice."""
        return self.replay.get((method, path))


def rules_of(replay: tuple[ReplayRule, ...], probe_paths: frozenset[str], own_request_ids: bool = True) -> Rules:
    """Rules from a list of replay rules."""
    return Rules({(rule.method, rule.path): rule for rule in replay}, probe_paths, own_request_ids)


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """What a JSON body says that matters to us. `readable` False: not a JSON object."""

    readable: bool
    stream: bool = False
    keys: frozenset[str] = frozenset()
    """Top-level keys whose value is neither null nor false."""


def body_facts(body: bytes) -> BodyFacts:
    """Reads a request's body; costs milliseconds for a large one, so only asked when it matters."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return BodyFacts(False)
    if not isinstance(value, dict):
        return BodyFacts(False)
    keys = frozenset(key for key, said in value.items() if said is not None and said is not False)
    return BodyFacts(True, value.get("stream") is True, keys)


def may_replay(rule: ReplayRule | None, body: bytes | None) -> bool:
    """Whether a request that delivered nothing may be sent again. `body` None: it wasn't kept."""
    if rule is None or body is None:
        return False
    if not rule.forbid_if or not body:
        return True
    facts = body_facts(body)
    return facts.readable and not facts.keys.intersection(rule.forbid_if)
