"""The gateway's side of the seam: verbs to rulings, with every argument checked once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from defib.gateway.relay import Relay
from defib.runtime.seam import Message, SeamRefused

MAX_LEASE_S = 600.0
MAX_TEXT_CHARS = 500


class Control:
    """Answers the supervisor's commands."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def snapshot(self) -> Message:
        """See docs/seam.md."""
        relay, keeper = self._relay, self._relay.keeper
        return {
            "gate": keeper.gate.value,
            "generation": keeper.generation,
            "address": keeper.address or None,
            "in_flight": relay.in_flight,
            "parked": sum(e.state == "parked" for e in relay.exchanges.values()),
            "held": len(relay.holding),
            "parking": keeper.parking,
            "draining": relay.draining,
            "tokens": relay.teller.tokens,
            "token_at": relay.teller.token_at,
            "counts": asdict(relay.teller.counts),
            "journal_unwritten": relay.journal.unwritten,
        }

    def handle(self, verb: str, message: Message) -> Message:
        """One command. Raises SeamRefused."""
        relay = self._relay
        if verb == "open":
            address, ramp = _text(message, "address"), _number(message, "ramp_per_s", 0.0)
            try:
                return {"replaying": relay.open(_generation(message), address, ramp)}
            except ValueError as error:
                raise SeamRefused("bad_request", str(error)) from None
        if verb == "pause":
            relay.pause(_generation(message), min(MAX_LEASE_S, _number(message, "lease_s")))
        elif verb == "hold":
            ready = None if message.get("ready_in_s") is None else _number(message, "ready_in_s")
            incident = _text(message, "incident", "")
            relay.hold(_generation(message), min(MAX_LEASE_S, _number(message, "lease_s")), ready, incident)
        elif verb == "refuse":
            relay.refuse(_text(message, "reason"), _number(message, "retry_after_s"))
        elif verb == "counts":
            return {"counts": asdict(relay.teller.counts), "journal_unwritten": relay.journal.unwritten}
        elif verb == "exchanges":
            return {"exchanges": relay.shapes(), "total": len(relay.exchanges)}
        else:
            raise SeamRefused("unknown_verb", f"the gateway does not know {verb[:50]!r}")
        return {}


def _generation(message: Message) -> int:
    value = message.get("generation")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SeamRefused("bad_request", "`generation` is a count")
    return value


def _number(message: Message, name: str, default: float | None = None) -> float:
    value: Any = message.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise SeamRefused("bad_request", f"`{name}` is a number of at least 0")
    return float(value)


def _text(message: Message, name: str, default: str | None = None) -> str:
    value = message.get(name, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, str):
        raise SeamRefused("bad_request", f"`{name}` is a text")
    return value[:MAX_TEXT_CHARS]
