"""`defib run`: from a command line to the instance's configuration, then exec of the launcher.

Everything that can be found wrong is found here, before anything is started: this module runs nothing and changes
nothing but its two folders. The configuration goes into an anonymous file, since a command line can hold a key.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import json
import os
import re
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from defib.cli.addresses import check_free
from defib.cli.command import find_executable
from defib.cli.exits import Exit, Stop
from defib.cli.folders import (
    Folders,
    check_name,
    default_folders,
    lock_holder,
    make_private,
    short_enough,
)
from defib.cli.plan import Plan, default_name, make_plan, summary
from defib.core.ladder import Ladder
from defib.policy.engines import CacheRule, EngineProfile, load_engines

LIMITS = ("drain_s", "term_s", "output_cap_bytes")
"""Settings that go to the launcher."""
NEVER_S = 1e8


def run(options: argparse.Namespace, command: Sequence[str]) -> NoReturn:
    """Becomes the launcher. Raises Stop."""
    config, said = prepare(options, command, dict(os.environ))
    for line in said:
        print(f"defib: {line}", file=sys.stderr, flush=True)
    become_launcher(config)


def prepare(
    options: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration (docs/seam.md), and lines for the person who started it. Makes the folders. Raises Stop."""
    policies, profiles, ladders = load_policies(options.policies)
    executable = find_executable(command, env)
    plan = make_plan(options, tuple(command), executable, profiles, env)
    ladder = ladders[plan.profile.name] if plan.editable else ladders[plan.profile.name].unedited()
    settings, limits = read_settings(options.set or (), ladder, plan)
    name = check_name(options.name) if options.name else default_name(plan)
    chosen = choose_folders(options, name, env)
    if plan.listen is not None:
        check_free(plan.listen)
    folders = make_folders(chosen)
    config = {
        "version": 1,
        "instance": name,
        "engine": plan.profile.name,
        "engine_version": plan.version,
        "editable": plan.editable,
        "state": str(folders.state),
        "runtime": str(folders.runtime),
        "policies": str(policies),
        "observe": bool(options.observe),
        "settings": settings,
        "limits": limits,
        **worker_part(plan, ladder, env),
        **process_part(),
    }
    lines = (*plan.said, *summary(plan, name, folders, bool(options.observe)))
    return config, lines


def load_policies(given: str | None) -> tuple[Path, tuple[EngineProfile, ...], dict[str, Ladder]]:
    """Every policy file, read and checked now rather than in the middle of an incident. Raises Stop (78)."""
    from defib.policy.ladders import load_ladder
    from defib.policy.reading import PolicyError, policies_folder
    from defib.policy.signatures import load_signatures

    try:
        policies = Path(given).absolute() if given else policies_folder()
        profiles = load_engines(policies)
        ladders = {profile.name: load_ladder(policies, profile.name) for profile in profiles}
        load_signatures(policies / "signatures")
    except PolicyError as error:
        raise Stop(Exit.CONFIG, f"policy {error}") from error
    return policies, profiles, ladders


# --- names, folders, settings ---


def choose_folders(options: argparse.Namespace, name: str, env: Mapping[str, str]) -> Folders:
    """Where they will be; refuses an instance that runs already. Raises Stop (75)."""
    uid = os.geteuid()
    usual = default_folders(name, env, uid)
    state = Path(options.state_dir).absolute() if options.state_dir else usual.state
    runtime = short_enough(Path(options.runtime_dir).absolute(), uid) if options.runtime_dir else usual.runtime
    holder = lock_holder(state)
    if holder:
        raise Stop(
            Exit.BUSY,
            f"the instance {name} runs already: {holder} holds {state}; `defib status` shows it, "
            "--name starts another one",
        )
    return Folders(state, runtime)


def make_folders(chosen: Folders) -> Folders:
    """Makes both. Raises Stop (73)."""
    return Folders(
        make_private(chosen.state, "state", "--state-dir"), make_private(chosen.runtime, "runtime", "--runtime-dir")
    )


def read_settings(given: Sequence[str], ladder: Ladder, plan: Plan) -> tuple[dict[str, str | float], dict[str, float]]:
    """`--set NAME=VALUE` to (settings of supervisor and gateway, limits of the launcher). Raises Stop (78)."""
    from defib.app.settings import ConfigError, rules_with

    settings: dict[str, str | float] = {}
    limits: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Stop(Exit.USAGE, f"--set {text!r}: expected NAME=VALUE")
        if name in LIMITS:
            limits[name] = _limit(name, value)
        else:
            settings[name] = float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else value
    if plan.upstream["kind"] == "none" or not plan.profile.ready.path:
        # Nothing can say for certain that this worker is ready: its start must not run into a limit.
        settings.setdefault("start_limit_s", NEVER_S)
    try:
        rules_with(ladder.rules(plan.version, (), observe=False), settings)
    except ConfigError as error:
        raise Stop(Exit.CONFIG, str(error)) from error
    return settings, limits


def _limit(name: str, value: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", value):
        raise Stop(Exit.CONFIG, f"setting {name}: expected a number that is not negative, found {value!r}")
    return float(value)


# --- the configuration ---


def worker_part(plan: Plan, ladder: Ladder, env: Mapping[str, str]) -> dict[str, Any]:
    """The keys of the configuration that say what runs and how it may be changed."""
    additions = ladder.additions(plan.argv, plan.version)
    return {
        "argv": list(plan.argv),
        "executable": plan.executable,
        "cwd": os.getcwd(),
        "env_set": dict(plan.profile.env_set),
        "env_unset": [],
        "listen": {"host": plan.listen.host, "port": plan.listen.port} if plan.listen else None,
        "upstream": dict(plan.upstream),
        "allow_args": list(additions.args),
        "allow_env": {name: list(values) for name, values in additions.env.items()},
        "fresh_env": dict(plan.profile.fresh_env),
        "caches": resolve_caches(plan.profile.caches, env),
        "canary": {
            "model": plan.serving.model,
            "api_key_env": plan.serving.api_key_env,
            "api_key": plan.serving.api_key,
        },
    }


def resolve_caches(rules: Sequence[CacheRule], env: Mapping[str, str]) -> dict[str, list[dict[str, str]]]:
    """Cache names to places (a root and a pattern below it), with the worker's environment filled in."""
    known = {"HOME": os.path.expanduser("~"), **env}
    places: dict[str, list[dict[str, str]]] = {}
    for rule in rules:
        root = next((filled for root in rule.roots if (filled := _filled(root, known))), None)
        for pattern in rule.globs if root else ():
            folder = os.path.normpath(os.path.join(os.getcwd(), str(root)))
            # The launcher moves what a pattern finds below a root: a root that is itself the cache is an entry of its
            # parent.
            place = (folder, pattern) if pattern else (os.path.dirname(folder), glob.escape(os.path.basename(folder)))
            places.setdefault(rule.name, []).append({"root": place[0], "glob": place[1]})
    return places


def _filled(text: str, env: Mapping[str, str]) -> str | None:
    """The text with its `${NAME}`s filled in; None if one is unset or empty."""
    names = re.findall(r"\$\{(\w+)\}", text)
    if not all(env.get(name) for name in names):
        return None
    return re.sub(r"\$\{(\w+)\}", lambda match: env[match[1]], text)


def process_part() -> dict[str, list[str]]:
    """How the launcher starts the other two processes, apart from whatever Python settings the worker is given."""
    python = [sys.executable, *isolation()]
    return {
        "gateway": [*python, "-m", "defib.app.gateway"],
        "supervisor": [*python, "-m", "defib.app.supervisor"],
    }


def isolation() -> list[str]:
    """Python's options: none of PYTHON*, the user's packages and the working folder, unless we come from there."""
    import defib

    home = str(Path(defib.__file__).resolve().parent.parent)
    paths = [os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    user = site.getusersitepackages()
    return ["-P"] if home in paths or home == os.path.realpath(user) else ["-I"]


def become_launcher(config: Mapping[str, Any]) -> NoReturn:
    """Writes the configuration to a sealed anonymous file and execs the launcher. Raises Stop (70)."""
    import defib

    launcher = Path(defib.__file__).resolve().parent / "drivers" / "launcher.py"
    descriptor = os.memfd_create("defib-config", os.MFD_ALLOW_SEALING)
    os.set_inheritable(descriptor, True)
    data = json.dumps(config).encode()
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    try:
        os.execv(sys.executable, [sys.executable, "-I", str(launcher), "--config-fd", str(descriptor)])
    except OSError as error:
        raise Stop(Exit.INTERNAL, f"the launcher could not be started: {error.strerror}") from error
