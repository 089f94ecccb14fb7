"""The command line itself: version, help, exit codes, and how fast it is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from defib import __version__
from defib.cli.exits import MEANINGS, Exit
from defib.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"defib {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["status", "--nonsense"], ["run", "--nam", "x", "--", "true"]])
def test_a_command_line_of_ours_that_is_wrong_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == Exit.USAGE
    assert "usage: defib" in capsys.readouterr().err


def test_every_exit_code_has_a_meaning_and_stands_in_the_manual() -> None:
    manual = (ROOT / "docs" / "operating.md").read_text()
    assert set(MEANINGS) == set(Exit)
    for code, meaning in MEANINGS.items():
        assert re.search(rf"^\| {int(code)} \| {re.escape(meaning)} \|$", manual, re.MULTILINE), code


def test_every_option_of_run_stands_in_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    manual = (ROOT / "docs" / "operating.md").read_text()
    for option in set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}:
        assert f"`{option}" in manual, option


def test_the_version_costs_no_heavy_import() -> None:
    code = "import sys; import defib.cli.main; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert "defib.cli.main" in loaded
    assert not {"asyncio", "httpx", "re2", "psutil", "tomllib", "defib.cli.run"} & set(loaded)
