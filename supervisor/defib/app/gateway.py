"""The gateway's process: `python -m defib.app.gateway --config-fd N --listen-fd M`.

Reads the instance's configuration and the engine's replay rules, puts a gateway together, and stops it in order on
SIGTERM (a second one: at once). It loads nothing that the traffic doesn't need: no HTTP client, no psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from defib.gateway.rules import Limits, ReplayRule, Rules, rules_of
from defib.gateway.server import Gateway, Place
from defib.policy.engines import load_engine
from defib.policy.reading import PolicyError
from defib.runtime.clock import boottime

MAX_CONFIG_BYTES = 4 << 20
ORPHAN_CHECK_S = 1.0
EXIT_CANNOT_SERVE = 1
EXIT_BAD_CONFIG = 2
DEFAULT_DRAIN_S = 20.0
_LIMIT_SETTINGS = {f"gateway_{field.name}": field.name for field in fields(Limits)}


class ConfigError(Exception):
    """The configuration can't be used; the message names the key."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the gateway needs of the instance's configuration."""

    place: Place
    rules: Rules
    limits: Limits
    drain_s: float


def read_config(descriptor: int) -> Config:
    """From the inherited descriptor (docs/seam.md). Raises ConfigError or PolicyError."""
    raw = os.pread(descriptor, MAX_CONFIG_BYTES, 0)
    try:
        value: Any = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"the configuration is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("the configuration is not a JSON object")
    state, runtime = Path(_text(value, "state")), Path(_text(value, "runtime"))
    place = Place(_text(value, "instance"), runtime / "gateway.sock", state / "journal")
    settings = value.get("settings") or {}
    own_ids = str(settings.get("gateway_own_request_ids", True)).lower()
    if own_ids not in ("true", "false"):
        raise ConfigError("setting gateway_own_request_ids: expected true or false")
    profile = load_engine(Path(_text(value, "policies")), _text(value, "engine"))
    replay = tuple(ReplayRule(rule.method, rule.path, tuple(rule.forbid_if)) for rule in profile.replay)
    drain_s = (value.get("limits") or {}).get("drain_s", DEFAULT_DRAIN_S)
    return Config(place, rules_of(replay, profile.probe_paths, own_ids == "true"), _limits(settings), float(drain_s))


def _limits(settings: dict[str, Any]) -> Limits:
    """The limits with the operator's `gateway_*` settings. Raises ConfigError."""
    defaults, changed = Limits(), {}
    for name, said in settings.items():
        if not name.startswith("gateway_") or name == "gateway_own_request_ids":
            continue
        limit = _LIMIT_SETTINGS.get(name)
        if limit is None:
            raise ConfigError(f"setting {name}: unknown; known are {', '.join(sorted(_LIMIT_SETTINGS))}")
        try:
            changed[limit] = type(getattr(defaults, limit))(said)
        except (TypeError, ValueError):
            raise ConfigError(f"setting {name}: expected a number, found {said!r:.50}") from None
        if changed[limit] < 0:
            raise ConfigError(f"setting {name}: expected at least 0")
    return replace(defaults, **changed)


def _text(value: dict[str, Any], key: str) -> str:
    said = value.get(key)
    if not isinstance(said, str) or not said:
        raise ConfigError(f"{key}: expected a text")
    return said


async def serve(config: Config, sock: socket.socket) -> None:
    """Serves until SIGTERM, then drains; a second SIGTERM, or the launcher's death, ends that."""
    loop = asyncio.get_running_loop()
    term, at_once = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, lambda: at_once.set() if term.is_set() else term.set())
    gateway = Gateway(config.place, config.rules, config.limits, boottime)
    await gateway.start(sock)
    gc.collect()
    gc.freeze()
    watch = loop.create_task(_until_orphaned(term))
    await term.wait()
    drain = loop.create_task(gateway.drain(config.drain_s))
    hurry = loop.create_task(at_once.wait())
    await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
    await gateway.stop()
    for task in (watch, drain, hurry):
        task.cancel()
    await asyncio.gather(watch, drain, hurry, return_exceptions=True)


async def _until_orphaned(term: asyncio.Event) -> None:
    """Without its launcher a gateway has no worker and must not keep the address."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(ORPHAN_CHECK_S)
    term.set()


def _run(main: Coroutine[Any, Any, None]) -> None:
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    try:
        import uvloop
    except ImportError:
        pass
    else:
        run = uvloop.run
    run(main)


def _raise_descriptor_limit() -> None:
    """Two descriptors an exchange: the soft limit of 1,024 that shells give would end at 500 streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main(argv: list[str] | None = None) -> int:
    """The process. Exit codes: 0 after an orderly stop, 1 it can't serve, 2 the configuration can't be used."""
    parser = argparse.ArgumentParser(prog="defib-gateway", description="The HTTP data path of one defib instance.")
    parser.add_argument("--config-fd", type=int, required=True, help="descriptor of the instance's configuration")
    parser.add_argument("--listen-fd", type=int, required=True, help="descriptor of the listening socket")
    options = parser.parse_args(argv)
    # The terminal's Ctrl-C reaches the whole group; the launcher turns it into an orderly stop for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_descriptor_limit()
    try:
        config = read_config(options.config_fd)
        sock = socket.socket(fileno=options.listen_fd)
    except (ConfigError, PolicyError, OSError) as error:
        print(f"defib gateway: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    try:
        _run(serve(config, sock))
    except OSError as error:
        print(f"defib gateway: cannot serve from {config.place.seam}: {error}", file=sys.stderr)
        return EXIT_CANNOT_SERVE
    return 0


if __name__ == "__main__":
    sys.exit(main())
