"""The address table of vLLM's profile: a test per row and per step of the precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from defib.cli.command import recognise
from defib.cli.exits import Exit, Stop
from defib.cli.serving import MAX_CONFIG_FILE_BYTES, Serving, read_serving
from defib.policy.engines import load_engines
from defib.policy.reading import policies_folder

PROFILES = load_engines(policies_folder())


def serving(command: str, env: dict[str, str] | None = None) -> Serving:
    argv = command.split()
    seen = recognise(argv, PROFILES)
    assert seen is not None
    return read_serving(seen.profile, argv, seen.start, env or {})


def config(tmp_path: Path, text: str) -> str:
    (tmp_path / "c.yaml").write_text(text)
    return f"vllm serve --config {tmp_path}/c.yaml"


def test_without_a_word_vllm_listens_everywhere_on_8000() -> None:
    found = serving("vllm serve m")
    assert (found.host, found.port, found.uds, found.tls, found.headless) == ("0.0.0.0", 8000, None, False, False)
    assert found.address == "127.0.0.1:8000"


@pytest.mark.parametrize("spelling", ["--port 1234", "--port=1234", "--port 1 --port 1234"])
def test_the_port_row(spelling: str) -> None:
    assert serving(f"vllm serve m {spelling}").port == 1234
    assert serving(f"python -m vllm.entrypoints.openai.api_server {spelling}").port == 1234


@pytest.mark.parametrize("spelling", ["--host 10.0.0.1", "--host=10.0.0.1"])
def test_the_host_row(spelling: str) -> None:
    assert serving(f"vllm serve m {spelling}").host == "10.0.0.1"


def test_the_variables_that_sound_like_an_address_are_vllms_internal_ones() -> None:
    found = serving("vllm serve m", {"VLLM_PORT": "1", "VLLM_HOST_IP": "10.0.0.1", "PORT": "2", "HOST": "x"})
    assert (found.host, found.port) == ("0.0.0.0", 8000)


def test_the_uds_row_wins_over_host_and_port() -> None:
    assert serving("vllm serve m --uds /run/v.sock --port 1").address == "unix:/run/v.sock"


@pytest.mark.parametrize("flag", ["--ssl-certfile c", "--ssl-keyfile=k", "--ssl_certfile c"])
def test_the_tls_row(flag: str) -> None:
    found = serving(f"vllm serve m {flag}")
    assert found.tls
    assert found.address is None


@pytest.mark.parametrize("flags, headless", [("--headless", True), ("", False), ("--headless --no-headless", False)])
def test_the_headless_row(flags: str, headless: bool) -> None:
    assert serving(f"vllm serve m {flags}").headless is headless


@pytest.mark.parametrize(
    "command, model",
    [
        ("vllm serve m", "m"),
        ("vllm serve m --served-model-name n o", "n"),
        ("vllm serve m --served_model_name=n", "n"),
        ("vllm serve --model m", "m"),
        ("vllm serve m --model other", "m"),
        ("vllm serve --port 1", None),
        ("python -m vllm.entrypoints.openai.api_server --model m", "m"),
        ("python -m vllm.entrypoints.openai.api_server --model m --served-model-name n", "n"),
        ("python -m vllm.entrypoints.openai.api_server", None),
    ],
)
def test_the_model_rows(command: str, model: str | None) -> None:
    assert serving(command).model == model


def test_the_key_row_gives_the_flags_key_and_the_variables_name() -> None:
    found = serving("vllm serve m --api-key abc def", {"VLLM_API_KEY": "xyz"})
    assert (found.api_key, found.api_key_env) == ("abc", "VLLM_API_KEY")
    found = serving("vllm serve m", {"VLLM_API_KEY": "xyz"})
    assert (found.api_key, found.api_key_env) == (None, "VLLM_API_KEY")
    assert "abc" not in repr(serving("vllm serve m --api-key abc"))


# --- the config file ---


def test_the_config_file_wins_over_the_default(tmp_path: Path) -> None:
    text = "model: m\nport: 1234 # a comment\nhost: '10.0.0.1'\nserved_model_name: [n, o]\napi-key:\n  - abc\n"
    found = serving(config(tmp_path, text))
    assert (found.host, found.port, found.model, found.api_key) == ("10.0.0.1", 1234, "n", "abc")


def test_the_command_line_wins_over_the_config_file(tmp_path: Path) -> None:
    text = "model: x\nport: 1\nhost: y\nuds: /z\nheadless: true\n"
    command = config(tmp_path, text).replace("serve", "serve m")
    found = serving(f"{command} --port 2 --host h --uds /u --no-headless")
    assert (found.host, found.port, found.uds, found.model, found.headless) == ("h", 2, "/u", "m", False)


def test_switches_and_tls_are_read_from_the_config_file_too(tmp_path: Path) -> None:
    found = serving(config(tmp_path, "headless: true\nssl_keyfile: k\n"))
    assert found.headless and found.tls


def test_the_last_config_file_is_the_one(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("port: 99\n")
    assert serving(f"{config(tmp_path, 'port: 1')} --config={tmp_path}/other.yaml").port == 99


def test_a_value_that_is_not_plain_is_an_error_only_if_it_is_needed(tmp_path: Path) -> None:
    command = config(tmp_path, "port: &p 8001\ncompilation-config:\n  mode: 3\n")
    with pytest.raises(Stop, match=r"c\.yaml: port: .* give --port on the command line") as caught:
        serving(command)
    assert caught.value.code is Exit.CONFIG
    assert serving(f"{command} --port 2").port == 2


@pytest.mark.parametrize("content", [None, "x" * (MAX_CONFIG_FILE_BYTES + 1)])
def test_a_config_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(Stop, match="config file") as caught:
        serving(f"vllm serve m --config {tmp_path}/c.yaml")
    assert caught.value.code is Exit.CONFIG


@pytest.mark.parametrize("port", ["0", "65536", "abc", "-1", ""])
def test_a_port_that_is_none_is_a_configuration_error(port: str) -> None:
    with pytest.raises(Stop, match="not a number from 1 to 65535") as caught:
        serving(f"vllm serve m --port={port}")
    assert caught.value.code is Exit.CONFIG


def test_the_highest_port_is_one() -> None:
    assert serving("vllm serve m --port 65535").port == 65535


@pytest.mark.parametrize("host, address", [("::", "[::1]:8000"), ("fe80::1", "[fe80::1]:8000"), ("h", "h:8000")])
def test_an_address_is_where_a_client_on_this_machine_reaches_it(host: str, address: str) -> None:
    assert serving(f"vllm serve m --host {host}").address == address
