"""`defib run` up to the launcher: the configuration that it writes, and what bad input gets."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from defib.cli.exits import Exit, Stop
from defib.cli.main import main, parser
from defib.cli.run import prepare, resolve_caches
from defib.policy.engines import load_engine
from defib.policy.reading import policies_folder

FAKE = f"{sys.executable} -m defib.demo.fakeworker serve m"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Runner:
    """Prepares instances below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.said: tuple[str, ...] = ()

    def own(self, options: str) -> argparse.Namespace:
        folders = f"--state-dir {self.folder}/state --runtime-dir {self.folder}/run"
        return parser().parse_args(["run", *folders.split(), *options.split()])

    def config(self, command: str, options: str = "", env: Mapping[str, str] | None = None) -> dict[str, Any]:
        given = {**os.environ, **(env or {})}
        config, self.said = prepare(self.own(options), command.split(), given)
        return config

    def stop(self, command: str, options: str = "") -> Stop:
        with pytest.raises(Stop) as caught:
            self.config(command, options)
        return caught.value


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


# --- what is written ---


def test_the_users_command_keeps_everything_but_its_address(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --port={runner.port} --host localhost --max-num-seqs 4")
    assert config["argv"][1:] == [
        *("-m", "defib.demo.fakeworker", "serve", "m", "--max-num-seqs", "4"),
        *("--host=127.0.0.1", "--port=@DEFIB_PORT@"),
    ]
    assert config["executable"] == sys.executable
    assert config["cwd"] == os.getcwd()
    assert config["listen"] == {"host": "localhost", "port": runner.port}
    assert config["upstream"] == {"kind": "port"}
    assert config["instance"] == f"localhost-{runner.port}"
    assert (config["engine"], config["editable"], config["observe"]) == ("vllm", True, False)


def test_the_configuration_is_json_of_the_seams_first_version(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --port {runner.port}")
    assert json.loads(json.dumps(config)) == config
    assert config["version"] == 1
    assert config["gateway"][-2:] == ["-m", "defib.app.gateway"]
    assert config["supervisor"][-2:] == ["-m", "defib.app.supervisor"]
    assert config["gateway"][1] in ("-I", "-P")
    assert Path(config["policies"]) == policies_folder()
    assert config["env_set"] == {"SPT_NOENV": "1"}
    assert config["fresh_env"] == {"triton": "TRITON_CACHE_DIR"}


def test_the_launcher_may_append_what_the_ladder_can_append(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --port {runner.port} --no-enforce-eager")
    assert config["allow_args"] == ["--enforce-eager"]
    assert config["allow_env"] == {}


def test_the_canary_knows_the_models_name_and_the_key(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --port {runner.port} --served-model-name n --api-key secret")
    assert config["canary"] == {"model": "n", "api_key": "secret", "api_key_env": "VLLM_API_KEY"}
    assert "secret" not in " ".join(runner.said)


def test_folders_are_made_private_and_named_in_the_configuration(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --port {runner.port}")
    for key, name in (("state", "state"), ("runtime", "run")):
        folder = Path(config[key])
        assert folder == runner.folder / name
        assert folder.stat().st_mode & 0o777 == 0o700


def test_another_listen_address_leaves_the_command_its_private_port(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --port 8000", f"--listen 127.0.0.1:{runner.port} --name n")
    assert config["listen"] == {"host": "127.0.0.1", "port": runner.port}
    assert config["argv"][-1] == "--port=@DEFIB_PORT@"
    assert config["instance"] == "n"


def test_with_an_upstream_the_command_is_left_alone(runner: Runner) -> None:
    options = f"--listen 127.0.0.1:{runner.port} --upstream 127.0.0.1:9000 --engine vllm"
    config = runner.config("bash -lc true", options)
    assert config["argv"] == ["bash", "-lc", "true"]
    assert config["upstream"] == {"kind": "address", "address": "127.0.0.1:9000"}
    assert (config["engine"], config["editable"], config["allow_args"]) == ("vllm", False, [])


def test_without_a_gateway_the_worker_keeps_its_address(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --port {runner.port}", "--no-gateway")
    assert config["listen"] is None
    assert config["argv"][-2:] == ["--port", str(runner.port)]
    assert config["upstream"] == {"kind": "address", "address": f"127.0.0.1:{runner.port}"}
    assert config["editable"]


def test_an_unknown_engine_gets_the_generic_profile_and_is_told_so(runner: Runner) -> None:
    config = runner.config("sleep 1")
    assert (config["engine"], config["engine_version"], config["listen"]) == ("generic", None, None)
    assert config["argv"] == ["sleep", "1"]
    assert config["allow_args"] == []
    assert any("sleep is no engine that I know: generic profile" in line for line in runner.said)
    assert any("no gateway" in line for line in runner.said)


def test_a_worker_that_cannot_say_that_it_is_ready_never_runs_into_the_start_limit(runner: Runner) -> None:
    assert runner.config("sleep 1")["settings"]["start_limit_s"] >= 1e8
    options = f"--listen {runner.port} --upstream 127.0.0.1:9"
    assert runner.config("sleep 1", options)["settings"]["start_limit_s"] >= 1e8
    assert runner.config("sleep 1", f"{options} --engine vllm")["settings"] == {}
    assert runner.config("sleep 1", "--set start_limit_s=5")["settings"] == {"start_limit_s": 5.0}
    assert runner.config(f"{FAKE} --port {runner.port}")["settings"] == {}


def test_an_unknown_engine_may_take_its_port_from_us(runner: Runner) -> None:
    config = runner.config("sleep @DEFIB_PORT@", f"--listen 127.0.0.1:{runner.port}")
    assert config["listen"] == {"host": "127.0.0.1", "port": runner.port}
    assert config["upstream"] == {"kind": "port"}


def test_a_headless_node_has_no_gateway(runner: Runner) -> None:
    config = runner.config(f"{FAKE} --headless")
    assert (config["listen"], config["upstream"]) == (None, {"kind": "none"})
    assert any("headless" in line for line in runner.said)


def test_observing_and_settings_reach_the_configuration(runner: Runner) -> None:
    options = "--observe --set probation_s=3 --set on_spent=exit --set drain_s=1 --set gateway_held=9"
    config = runner.config(f"{FAKE} --port {runner.port}", options)
    assert config["observe"]
    assert config["settings"] == {"probation_s": 3.0, "on_spent": "exit", "gateway_held": 9.0}
    assert config["limits"] == {"drain_s": 1.0}
    assert any("observing only" in line for line in runner.said)


# --- caches ---


def places(env: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    found = resolve_caches(load_engine(policies_folder(), "vllm").caches, env)
    return {name: [(place["root"], place["glob"]) for place in rows] for name, rows in found.items()}


def test_the_triton_cache_is_two_places_at_their_true_depths() -> None:
    assert places({"HOME": "/h"})["triton"] == [
        ("/h/.triton", "cache"),
        ("/h/.cache/vllm", "torch_compile_cache/*/*/*/triton_cache"),
    ]


@pytest.mark.parametrize(
    "env, name, place",
    [
        ({"TRITON_CACHE_DIR": "/t/dir"}, "triton", ("/t", "dir")),
        ({"TRITON_CACHE_DIR": "/t/[dir]"}, "triton", ("/t", "[[]dir]")),
        ({"TRITON_CACHE_DIR": "/t/dir", "TRITON_HOME": "/x"}, "triton", ("/t", "dir")),
        ({"TRITON_HOME": "/th"}, "triton", ("/th/.triton", "cache")),
        ({"TRITON_HOME": ""}, "triton", ("/h/.triton", "cache")),
        ({"VLLM_CACHE_ROOT": "/v"}, "triton", ("/v", "torch_compile_cache/*/*/*/triton_cache")),
        ({"XDG_CACHE_HOME": "/x"}, "triton", ("/x/vllm", "torch_compile_cache/*/*/*/triton_cache")),
        ({"XDG_CACHE_HOME": "/x", "VLLM_CACHE_ROOT": "/v"}, "torch_compile", ("/v", "torch_compile_cache")),
    ],
)
def test_caches_follow_the_workers_environment(env: dict[str, str], name: str, place: tuple[str, str]) -> None:
    assert place in places({"HOME": "/h", **env})[name]


def test_a_relative_cache_folder_is_below_the_working_folder() -> None:
    assert (f"{os.getcwd()}/a", "b") in places({"HOME": "/h", "TRITON_CACHE_DIR": "a/b"})["triton"]


# --- bad input ---


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["run"], "no command after `--`; for example: defib run -- vllm serve"),
        (["run", "--"], "no command after `--`"),
        (["run", "--observe", "--"], "no command after `--`"),
        (["run", "vllm", "serve", "m", "--port", "1"], "defib run -- vllm serve m --port 1"),
        (["run", "--observe", "vllm", "serve"], "defib run --observe -- vllm serve"),
        (["run", "stray", "--", "true"], "'stray' before `--`"),
    ],
)
def test_no_command_after_the_dashes(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == Exit.USAGE
    assert told in capsys.readouterr().err


def test_a_command_that_is_not_found_ends_with_127(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--", "no-such-server"]) == Exit.NOT_FOUND
    assert "command not found: no-such-server" in capsys.readouterr().err


def test_a_port_in_use_says_who_holds_it_and_makes_no_folder(runner: Runner) -> None:
    with socket.create_server(("127.0.0.1", runner.port)):
        stop = runner.stop(f"{FAKE} --host 127.0.0.1 --port {runner.port}")
    assert stop.code is Exit.BUSY
    assert f"is in use by pid {os.getpid()}" in stop.message
    assert not (runner.folder / "state").exists()


def test_a_second_start_of_an_instance_says_who_holds_the_lock(runner: Runner) -> None:
    runner.config("sleep 1")
    with (runner.folder / "state" / "lock").open("w") as lock:
        lock.write("4242\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stop = runner.stop("sleep 1", "--name twice")
    assert stop.code is Exit.BUSY
    assert "the instance twice runs already: pid 4242 holds" in stop.message


@pytest.mark.parametrize(
    "file, text, told",
    [
        ("engines/vllm.toml", None, "engines/vllm.toml: replay[0].methd: unknown key"),
        ("engines/generic.toml", "x", "engines/generic.toml: (the file): not valid TOML"),
        ("ladders/vllm.toml", "engine = 1", "ladders/vllm.toml: engine: expected a text, found int 1"),
        ("ladders/generic.toml", "", "ladders/generic.toml: engine: missing"),
        ("signatures/bad.toml", "nonsense = 1", "signatures/bad.toml: "),
    ],
)
def test_a_wrong_policy_file_names_file_key_and_expectation(
    runner: Runner, tmp_path: Path, file: str, text: str | None, told: str
) -> None:
    policies = tmp_path / "policies"
    for source in policies_folder().rglob("*.toml"):
        target = policies / source.relative_to(policies_folder())
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text())
    if text is None:
        text = (policies / file).read_text().replace("[[replay]]", '[[replay]]\nmethd = "x"', 1)
    (policies / file).write_text(text)
    stop = runner.stop("sleep 1", f"--policies {policies}")
    assert stop.code is Exit.CONFIG
    assert told in stop.message


def test_a_policies_folder_that_is_none_is_said(runner: Runner, tmp_path: Path) -> None:
    stop = runner.stop("sleep 1", f"--policies {tmp_path}/absent")
    assert stop.code is Exit.CONFIG
    assert "generic.toml is missing" in stop.message


def test_an_unreadable_policy_file_is_said(runner: Runner, tmp_path: Path) -> None:
    for name in ("engines", "ladders", "signatures"):
        (tmp_path / "p" / name).mkdir(parents=True)
    (tmp_path / "p" / "engines" / "generic.toml").mkdir()
    stop = runner.stop("sleep 1", f"--policies {tmp_path}/p")
    assert stop.code is Exit.CONFIG
    assert "generic.toml: (the file): cannot be read (Is a directory)" in stop.message


def test_a_state_folder_that_cannot_be_written_ends_with_73(runner: Runner) -> None:
    (runner.folder / "state").write_text("in the way")
    stop = runner.stop("sleep 1")
    assert stop.code is Exit.STATE
    assert "--state-dir" in stop.message


@pytest.mark.parametrize("command", ["docker run image", "podman run image", "kubectl run x"])
def test_a_container_tool_is_told_what_to_do(runner: Runner, tmp_path: Path, command: str) -> None:
    tool = tmp_path / command.split()[0]
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    stop = runner.stop(f"{tmp_path}/{command}")
    assert stop.code is Exit.USAGE
    assert "in a container" in stop.message
    assert "--listen A --upstream B" in stop.message and "--no-gateway" in stop.message


def test_a_shells_command_is_told_what_to_do(runner: Runner) -> None:
    stop = runner.stop("bash -lc vllm")
    assert stop.code is Exit.USAGE
    assert "runs a script" in stop.message and "--listen A --upstream B" in stop.message
    assert runner.config("bash -lc vllm", "--no-gateway")["listen"] is None


@pytest.mark.parametrize(
    "command, options, code, told",
    [
        ("sleep 1", "--engine nonsense", Exit.USAGE, "known are generic, vllm"),
        ("sleep 1", "--upstream 1", Exit.USAGE, "--upstream B needs --listen A"),
        ("sleep 1", "--listen 1 --no-gateway", Exit.USAGE, "exclude each other"),
        ("sleep 1", "--listen 1 --upstream 1", Exit.USAGE, "the same port"),
        ("sleep 1", "--listen 1", Exit.USAGE, "--listen needs --upstream B"),
        ("sleep 1", "--listen x", Exit.USAGE, "--listen needs --upstream B"),
        (FAKE, "--listen x", Exit.USAGE, "expected HOST:PORT"),
        ("sleep 1", "--name a/b", Exit.USAGE, "--name 'a/b'"),
        ("sleep 1", "--set x", Exit.USAGE, "expected NAME=VALUE"),
        ("sleep 1", "--set nonsense=1", Exit.CONFIG, "setting nonsense: unknown"),
        ("sleep 1", "--set probation_s=long", Exit.CONFIG, "setting probation_s: expected a number"),
        ("sleep 1", "--set drain_s=-1", Exit.CONFIG, "setting drain_s: expected a number"),
        (f"{FAKE} --ssl-certfile c", "", Exit.CONFIG, "ends TLS itself"),
        (f"{FAKE} --uds /run/v.sock", "", Exit.CONFIG, "listens on the unix socket /run/v.sock"),
        (f"{FAKE} --port x", "", Exit.CONFIG, "port 'x' is not a number"),
        (f"{FAKE} --config /nowhere.yaml", "", Exit.CONFIG, "config file /nowhere.yaml cannot be read"),
    ],
)
def test_other_bad_input_says_what_is_wrong(runner: Runner, command: str, options: str, code: Exit, told: str) -> None:
    stop = runner.stop(command, options)
    assert stop.code is code
    assert told in stop.message
    assert not (runner.folder / "state").exists()
