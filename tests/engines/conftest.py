"""Finds the vLLM environment, makes the tiny model, starts beds and cleans up after them."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.bed import Bed

ROOT = Path(__file__).parents[2]
VARIABLE = "DEFIB_TEST_VLLM"


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    """The environment with vLLM and the fault plugin; skips, and says how to get it, where there is none."""
    venv = Path(os.environ.get(VARIABLE) or ROOT / ".vllm")
    if not (venv / "bin" / "vllm").exists():
        pytest.skip(f"no vLLM in {venv}: run .ci/install-vllm, or set {VARIABLE} to an environment that has it")
    if not list(venv.glob("lib/python*/site-packages/defib_faultplug")):
        pytest.skip(f"the fault plugin is not installed in {venv}: run .ci/install-vllm {venv}")
    return venv.absolute()


@pytest.fixture(scope="session")
def model(vllm_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model, made on the spot."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    maker = Path(__file__).with_name("model.py")
    subprocess.run([vllm_venv / "bin" / "python", maker, folder], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def start(vllm_venv: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Bed]]:
    """Starts beds, one at a time: two vLLM at once take four times as long."""
    beds: list[Bed] = []

    def run(*flags: str, direct: bool = False) -> Bed:
        for bed in beds:
            bed.stop()
        beds.append(Bed(vllm_venv, model, tmp_path_factory.mktemp("bed"), *flags, direct=direct))
        return beds[-1]

    yield run
    for bed in beds:
        bed.stop()
