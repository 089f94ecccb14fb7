"""The instance's configuration as the supervisor reads it: JSON from the launcher's anonymous file to values.

Every error names the key. Nothing here touches the disk: the file is a memfd (docs/seam.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from defib.core.state import Rules

MAX_CONFIG_BYTES = 4 << 20


class ConfigError(Exception):
    """The configuration can't be used; says which key and why."""


@dataclass(frozen=True, slots=True)
class CanaryConfig:
    """What the canary needs to know of the served model. `api_key` never reaches a disk or a log."""

    model: str | None = None
    api_key: str | None = None
    api_key_env: str | None = None

    def key(self, environ: Mapping[str, str]) -> str | None:
        """The worker's own key: from its command line, else from its environment."""
        if self.api_key:
            return self.api_key
        return environ.get(self.api_key_env) if self.api_key_env else None


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One instance."""

    instance: str
    engine: str
    engine_version: str | None
    state: Path
    runtime: Path
    policies: Path
    observe: bool
    argv: tuple[str, ...]
    env_set: Mapping[str, str] = field(default_factory=dict)
    caches: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    gateway: bool = True
    editable: bool = True
    """False: the command is run as it is (a shell's, a container's), so no rung that edits it can be taken."""
    addressed: bool = True
    """False: nobody can be asked anything (no port that we know): exits and output are all there is."""
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_config(descriptor: int) -> InstanceConfig:
    """From the inherited descriptor. Raises ConfigError."""
    data = os.pread(descriptor, MAX_CONFIG_BYTES + 1, 0)
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"the configuration is larger than {MAX_CONFIG_BYTES} bytes")
    return parse_config(data)


def parse_config(data: bytes) -> InstanceConfig:
    """From JSON. Raises ConfigError."""
    try:
        values = json.loads(data)
        canary = values.get("canary") or {}
        return InstanceConfig(
            instance=str(values["instance"]),
            engine=str(values["engine"]),
            engine_version=values.get("engine_version"),
            state=Path(values["state"]),
            runtime=Path(values["runtime"]),
            policies=Path(values["policies"]),
            observe=bool(values.get("observe", False)),
            argv=tuple(values["argv"]),
            env_set=dict(values.get("env_set") or {}),
            caches=tuple(values.get("caches") or {}),
            fresh=tuple(values.get("fresh_env") or {}),
            gateway=values.get("listen") is not None,
            editable=bool(values.get("editable", True)),
            addressed=(values.get("upstream") or {}).get("kind") != "none",
            canary=CanaryConfig(canary.get("model"), canary.get("api_key"), canary.get("api_key_env")),
            settings=dict(values.get("settings") or {}),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the configuration is not usable: {type(error).__name__} {error}") from error


_SECONDS = tuple(f.name for f in fields(Rules) if f.name.endswith("_s"))
SETTINGS = (*_SECONDS, "on_spent", "budget_window_s", "budget_overall")
"""The names that `--set NAME=VALUE` knows."""


def rules_with(rules: Rules, settings: Mapping[str, Any]) -> Rules:
    """The rules with an operator's settings. Raises ConfigError for a name or value that is not understood."""
    for name, value in settings.items():
        if name in _SECONDS:
            seconds: dict[str, Any] = {name: _number(name, value)}
            rules = replace(rules, **seconds)
        elif name == "on_spent":
            if value not in ("stay", "exit"):
                raise ConfigError(f"setting on_spent: expected stay or exit, found {value!r}")
            rules = replace(rules, on_spent=value)
        elif name == "budget_window_s":
            rules = replace(rules, budget=replace(rules.budget, window_s=_number(name, value)))
        elif name == "budget_overall":
            rules = replace(rules, budget=replace(rules.budget, overall=int(_number(name, value))))
        elif not name.startswith("gateway_"):
            raise ConfigError(f"setting {name}: unknown; known are {', '.join(SETTINGS)} and gateway_*")
    return rules


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"setting {name}: expected a number, found {value!r}") from None
    if not 0 <= number < 1e9:
        raise ConfigError(f"setting {name}: expected a number from 0 to 1e9, found {value!r}")
    return number
