"""The configuration from the launcher's file, and an operator's settings."""

from __future__ import annotations

import json

import pytest

from defib.app.settings import CanaryConfig, ConfigError, parse_config, rules_with
from defib.core.state import Rules

LEAST = {
    "instance": "i", "engine": "vllm", "state": "/s", "runtime": "/r", "policies": "/p", "argv": ["vllm", "serve"],
}  # fmt: skip


def test_the_least_configuration_has_sensible_defaults() -> None:
    config = parse_config(json.dumps(LEAST).encode())
    assert (config.observe, config.gateway, config.editable, config.addressed) == (False, False, True, True)
    none = parse_config(json.dumps({**LEAST, "listen": {}, "editable": False, "upstream": {"kind": "none"}}).encode())
    assert (none.gateway, none.editable, none.addressed) == (True, False, False)


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", json.dumps({**LEAST, "argv": None}).encode()])
def test_an_unusable_configuration_is_said(data: bytes) -> None:
    with pytest.raises(ConfigError, match="not usable"):
        parse_config(data)


def test_settings_change_the_rules_and_wrong_ones_are_named() -> None:
    rules = rules_with(Rules(), {"probation_s": "0.5", "on_spent": "exit", "budget_overall": 9, "gateway_x": 1})
    assert (rules.probation_s, rules.on_spent, rules.budget.overall) == (0.5, "exit", 9)
    for name, value in (("probation_s", "soon"), ("on_spent", "cry"), ("no_such", 1), ("start_limit_s", -1)):
        with pytest.raises(ConfigError, match=name):
            rules_with(Rules(), {name: value})


def test_the_workers_key_comes_from_its_command_first() -> None:
    assert CanaryConfig("m", "k", "E").key({"E": "e"}) == "k"
    assert CanaryConfig("m", None, "E").key({"E": "e"}) == "e"
    assert CanaryConfig("m").key({"E": "e"}) is None
