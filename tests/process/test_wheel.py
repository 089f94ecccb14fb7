"""The wheel, installed beside supervisord (which owns the import name `supervisor`) in a fresh environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from defib import __version__

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command away from the checkout, without Python's variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment; its pip is used, since the one that runs the tests need not have any."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder


@pytest.fixture(scope="module")
def wheel(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(fresh / "bin/python", *PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("defib-*.whl"))


@pytest.fixture(scope="module")
def environment(fresh: Path, wheel: Path) -> Path:
    run(fresh / "bin/python", *PIP, "install", wheel, "supervisor", "setuptools<81", cwd=fresh)
    return fresh


def test_the_wheel_holds_the_policies_and_nothing_named_supervisor(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("engines", "ladders", "signatures"):
        shipped = {Path(name).name for name in names if name.startswith(f"defib/_policies/{folder}/")}
        assert shipped == {path.name for path in (ROOT / "policies" / folder).glob("*.toml")} != set()
    assert not [name for name in names if name.startswith("supervisor")]
    assert "defib/drivers/launcher.py" in names


def test_both_commands_work_side_by_side(environment: Path, tmp_path: Path) -> None:
    assert run(environment / "bin/defib", "--version", cwd=tmp_path).stdout == f"defib {__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\S*\n", run(environment / "bin/supervisord", "--version", cwd=tmp_path).stdout)
    code = "import supervisor, defib; print(supervisor.__file__, defib.__file__)"
    for found in run(environment / "bin/python", "-c", code, cwd=tmp_path).stdout.split():
        assert found.startswith(str(environment))


def test_the_installed_command_finds_its_policies(environment: Path, tmp_path: Path) -> None:
    code = "from defib.policy.reading import policies_folder; print(policies_folder())"
    found = Path(run(environment / "bin/python", "-c", code, cwd=tmp_path).stdout.strip())
    assert found.name == "_policies"
    assert found.is_relative_to(environment)
    # A run that gets past its policies and ends at the next check: all of them were read.
    (tmp_path / "in-the-way").write_text("")
    options = ("--state-dir", tmp_path / "in-the-way", "--no-gateway")
    done = run(environment / "bin/defib", "run", *options, "--", "vllm-is-not-here", cwd=tmp_path, check=False)
    assert done.returncode == 127
    done = run(environment / "bin/defib", "run", *options, "--", "sleep", "1", cwd=tmp_path, check=False)
    assert done.returncode == 73
    assert "in-the-way" in done.stderr


def test_gateway_and_supervisor_can_be_imported_without_the_checkout(environment: Path, tmp_path: Path) -> None:
    code = "import defib.app.gateway, defib.app.supervisor"
    run(environment / "bin/python", "-I", "-c", code, cwd=tmp_path)
