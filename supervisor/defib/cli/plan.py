"""The plan of an instance: which engine runs, where clients come to, where the worker serves.

Decided from the command line and the engine's profile alone; it makes no folder and starts nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from defib.cli.addresses import Listen, parse_listen, parse_upstream
from defib.cli.command import Recognised, engine_version, recognise, why_not_editable
from defib.cli.exits import Exit, Stop
from defib.cli.folders import Folders, name_from
from defib.cli.serving import Serving, read_serving
from defib.core.launch_spec import LaunchSpec, Value, edit
from defib.policy.engines import GENERIC, EngineProfile

PORT, UDS = "@DEFIB_PORT@", "@DEFIB_UDS@"


@dataclass(frozen=True, slots=True)
class Plan:
    """An instance before its folders: what runs, what listens, and what a person should know of it."""

    profile: EngineProfile
    version: str | None
    argv: tuple[str, ...]
    executable: str
    listen: Listen | None
    upstream: Mapping[str, str]
    serving: Serving
    editable: bool
    said: tuple[str, ...]


def make_plan(
    options: argparse.Namespace,
    argv: tuple[str, ...],
    executable: str,
    profiles: Sequence[EngineProfile],
    env: Mapping[str, str],
) -> Plan:
    """Chooses the engine and the addresses. Raises Stop."""
    seen = recognise(argv, profiles)
    obstacle = None if seen else why_not_editable(argv)
    profile, said = _profile(options, argv, seen, profiles, obstacle)
    serving = read_serving(profile, argv, seen.start, env) if seen else Serving()
    version = engine_version(argv, seen, executable) if seen else None
    listen, upstream, argv = _addresses(options, argv, profile, seen, serving, obstacle)
    said += _why_no_gateway(options, listen, seen, serving)
    return Plan(
        profile, version, argv, executable, listen, upstream, serving, seen is not None and obstacle is None, said
    )


def _profile(
    options: argparse.Namespace,
    argv: tuple[str, ...],
    seen: Recognised | None,
    profiles: Sequence[EngineProfile],
    obstacle: str | None,
) -> tuple[EngineProfile, tuple[str, ...]]:
    by_name = {profile.name: profile for profile in profiles}
    if options.engine:
        if options.engine not in by_name:
            raise Stop(Exit.USAGE, f"--engine {options.engine}: unknown; known are {', '.join(by_name)}")
        return by_name[options.engine], ()
    if seen:
        return seen.profile, ()
    what = "can't see which engine this is" if obstacle else f"{argv[0]} is no engine that I know"
    known = ", ".join(name for name in by_name if name != GENERIC)
    return by_name[GENERIC], (
        f"{what}: generic profile, which watches its exit and its port only (no canary, no replay); "
        f"--engine chooses one of {known}",
    )


def _addresses(
    options: argparse.Namespace,
    argv: tuple[str, ...],
    profile: EngineProfile,
    seen: Recognised | None,
    serving: Serving,
    obstacle: str | None,
) -> tuple[Listen | None, Mapping[str, str], tuple[str, ...]]:
    """(where clients come to, where the worker is, the worker's argv). Raises Stop."""
    private = any(PORT in token or UDS in token for token in argv)
    if options.upstream and (options.no_gateway or not options.listen):
        raise Stop(Exit.USAGE, "--upstream B needs --listen A: clients come to A, and B is where the worker serves")
    if options.no_gateway and options.listen:
        raise Stop(Exit.USAGE, "--listen and --no-gateway exclude each other")
    if options.upstream:
        listen, upstream = parse_listen(options.listen, "--listen"), parse_upstream(options.upstream)
        if str(listen).rsplit(":", 1)[1] == upstream.rsplit(":", 1)[1]:
            raise Stop(Exit.USAGE, "--listen and --upstream name the same port: the worker needs another one")
        return listen, {"kind": "address", "address": upstream}, argv
    if options.no_gateway:
        return None, _own_address(serving), argv
    if private and options.listen:
        return parse_listen(options.listen, "--listen"), {"kind": "uds" if UDS in " ".join(argv) else "port"}, argv
    return _by_profile(options, argv, profile, seen, serving, obstacle)


def _own_address(serving: Serving) -> Mapping[str, str]:
    address = serving.address
    return {"kind": "address", "address": address} if address else {"kind": "none"}


def _by_profile(
    options: argparse.Namespace,
    argv: tuple[str, ...],
    profile: EngineProfile,
    seen: Recognised | None,
    serving: Serving,
    obstacle: str | None,
) -> tuple[Listen | None, Mapping[str, str], tuple[str, ...]]:
    if obstacle:
        raise Stop(
            Exit.USAGE,
            f"{obstacle}; or give --listen A --upstream B (clients come to A, the server serves on B), or --no-gateway",
        )
    if seen is None or "port" not in profile.edit:
        if options.listen:
            raise Stop(Exit.USAGE, f"--listen needs --upstream B, or {PORT} where the command takes its port")
        return None, {"kind": "none"}, argv
    if serving.headless:
        return None, {"kind": "none"}, argv
    if serving.tls or serving.uds:
        what = "ends TLS itself" if serving.tls else f"listens on the unix socket {serving.uds}"
        raise Stop(
            Exit.CONFIG,
            f"the command {what}, which the gateway can't stand in for: take that out of the command, or give "
            "--no-gateway (the worker is watched and restarted, but nothing is replayed)",
        )
    listen = parse_listen(options.listen, "--listen") if options.listen else _listen(serving)
    return listen, {"kind": "port"}, rewritten(argv, profile)


def _listen(serving: Serving) -> Listen:
    if serving.port is None:
        raise Stop(Exit.CONFIG, "the command names no port; give --listen A")
    return Listen(serving.host or "0.0.0.0", serving.port)


def rewritten(argv: tuple[str, ...], profile: EngineProfile) -> tuple[str, ...]:
    """The worker's command with a private loopback port, chosen by the launcher for each launch."""
    edits = [Value(profile.edit["port"], (PORT,))]
    if "host" in profile.edit:
        edits.insert(0, Value(profile.edit["host"], ("127.0.0.1",)))
    return edit(LaunchSpec(argv), edits, profile.grammar).argv


def _why_no_gateway(
    options: argparse.Namespace, listen: Listen | None, seen: Recognised | None, serving: Serving
) -> tuple[str, ...]:
    if listen is not None or options.no_gateway:
        return ()
    if serving.headless:
        return ("no gateway: a headless node serves no HTTP",)
    return ("no gateway: clients reach the worker themselves, nothing is held or replayed",) if seen is None else ()


def default_name(plan: Plan) -> str:
    """From the listen address, else the worker's own, else its program."""
    if plan.listen is not None:
        return name_from(f"{plan.listen.host}-{plan.listen.port}")
    address = plan.upstream.get("address")
    if address:
        return name_from(address.removeprefix("unix:").replace(":", "-"))
    return name_from(os.path.basename(plan.argv[0]))


def summary(plan: Plan, name: str, folders: Folders, observe: bool) -> tuple[str, ...]:
    """What a person should know at the start."""
    engine = plan.profile.title + (f" {plan.version}" if plan.version else "")
    where = f"clients on {plan.listen}" if plan.listen else "no gateway"
    mode = "; observing only, nothing will be touched" if observe else ""
    return (f"instance {name}: {engine}; {where}; state in {folders.state}{mode}",)
