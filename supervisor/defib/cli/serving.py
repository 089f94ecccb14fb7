"""Where a command will serve: address, TLS, model and key, read by the address table of the engine's profile.

It follows the engine's own precedence (command line, `--config` file, environment, default) and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from defib.cli.exits import Exit, Stop
from defib.cli.flat_yaml import NOT_PLAIN, Value, read_flat
from defib.core.launch_spec import last_value, switched
from defib.policy.engines import EngineProfile, Read

MAX_CONFIG_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Serving:
    """What an engine's command says of its HTTP side. `api_key` is a secret: it goes to the memfd and nowhere else."""

    host: str | None = None
    port: int | None = None
    uds: str | None = None
    tls: bool = False
    headless: bool = False
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_env: str | None = None

    @property
    def address(self) -> str | None:
        """Where a client on this machine reaches it in plain HTTP; None if it can't."""
        if self.headless or self.tls:
            return None
        if self.uds:
            return f"unix:{self.uds}"
        if self.port is None:
            return None
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host or "", self.host or "")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Source:
    profile: EngineProfile
    argv: Sequence[str]
    start: int
    env: Mapping[str, str]
    config: Mapping[str, Value]
    config_name: str

    def value(self, key: str) -> str | None:
        """One row of the address table."""
        read = self.profile.reads.get(key, Read())
        found = self._positional(read) or last_value(self.argv, self.profile.grammar, read.flags, self.start)
        if found is None:
            found = self._configured(read)
        if found is None:
            found = next((self.env[name] for name in read.env if self.env.get(name)), read.default)
        return found

    def is_on(self, key: str) -> bool:
        """One row that is a switch."""
        read = self.profile.reads.get(key, Read())
        if read.switch is None:
            return False
        said = switched(self.argv, self.profile.grammar, read.switch, self.start)
        configured = str(self.config.get(read.switch.lstrip("-"))).lower() == "true"
        return configured if said is None else said

    def _positional(self, read: Read) -> str | None:
        after = read.positional_after
        if after is None or self.start >= len(self.argv) or self.argv[self.start - 1] != after:
            return None
        word = self.argv[self.start]
        return None if word.startswith("-") else word

    def _configured(self, read: Read) -> str | None:
        for flag in read.flags:
            value = self.config.get(flag.lstrip("-"))
            if value is NOT_PLAIN:
                raise Stop(
                    Exit.CONFIG,
                    f"{self.config_name}: {flag.lstrip('-')}: a value of this form can't be read here; "
                    f"give {flag} on the command line, where it wins",
                )
            if isinstance(value, tuple):
                value = value[0] if value else None
            if isinstance(value, str):
                return value
        return None


def read_serving(profile: EngineProfile, argv: Sequence[str], start: int, env: Mapping[str, str]) -> Serving:
    """`argv[start:]` are the engine's arguments. Raises Stop (78): a file or port that the engine couldn't use."""
    source = _source(profile, argv, start, env)
    return Serving(
        host=source.value("host"),
        port=_port(source),
        uds=source.value("uds"),
        tls=source.value("tls") is not None,
        headless=source.is_on("headless"),
        model=source.value("served_model") or source.value("model"),
        api_key=_flagged(source, "api_key"),
        api_key_env=next(iter(profile.reads.get("api_key", Read()).env), None),
    )


def _flagged(source: _Source, key: str) -> str | None:
    """A secret that stands in the command or its file; what stands in the environment is read there, when needed."""
    without_env = _Source(source.profile, source.argv, source.start, {}, source.config, source.config_name)
    return without_env.value(key)


def _source(profile: EngineProfile, argv: Sequence[str], start: int, env: Mapping[str, str]) -> _Source:
    first = _Source(profile, argv, start, env, {}, "")
    name = first.value("config_file")
    if name is None:
        return first
    path = Path(os.path.expanduser(name))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as error:
        raise Stop(Exit.CONFIG, f"the engine's config file {name} cannot be read: {error.strerror}") from error
    if len(data) > MAX_CONFIG_FILE_BYTES:
        raise Stop(Exit.CONFIG, f"the engine's config file {name} is larger than {MAX_CONFIG_FILE_BYTES} bytes")
    return _Source(profile, argv, start, env, read_flat(data.decode("utf-8", "replace")), name)


def _port(source: _Source) -> int | None:
    text = source.value("port")
    if text is None:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise Stop(Exit.CONFIG, f"the command's port {text!r} is not a number from 1 to 65535")
    return int(text)
