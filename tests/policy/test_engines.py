"""Engine profiles: the shipped ones, and what a wrong file gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from defib.policy.engines import EngineProfile, load_engine, load_engines
from defib.policy.reading import PolicyError, policies_folder

POLICIES = policies_folder()
VLLM = load_engine(POLICIES, "vllm")


def written(tmp_path: Path, text: str, name: str = "e") -> Path:
    (tmp_path / "engines").mkdir(exist_ok=True)
    (tmp_path / "engines" / f"{name}.toml").write_text(text)
    return tmp_path


SMALLEST = 'name = "e"\ntitle = "E"\ndialect = "plain"\n[ready]\npath = ""\nlimit_s = 5\n'


def test_every_shipped_profile_loads_and_generic_is_among_them() -> None:
    assert [profile.name for profile in load_engines(POLICIES)] == ["generic", "vllm"]


def test_the_generic_profile_promises_nothing() -> None:
    generic = load_engine(POLICIES, "generic")
    assert generic.canary is None
    assert generic.replay == ()
    assert generic.caches == ()
    assert generic.reads == {}
    assert generic.kind_of("python -m server", "python") == "other"


@pytest.mark.parametrize(
    "cmdline, name, role",
    [
        ("VLLM::EngineCore", "VLLM::EngineCor", "engine"),
        ("VLLM::EngineCore_DP0   ", "VLLM::EngineCor", "engine"),
        ("VLLM::Worker_PP0_TP1", "VLLM::Worker_PP", "engine"),
        ("", "VLLM::EngineCor", "engine"),
        ("MINE::Worker", "MINE::Worker", "engine"),
        ("VLLM::APIServer_0", "VLLM::APIServer", "front"),
        (
            "python3 -B -c from multiprocessing.resource_tracker import main;main(32) --multiprocessing-fork",
            "python3",
            "tracker",
        ),
        ("VLLM::DPCoordinator", "VLLM::DPCoordin", "other"),
        ("vllm serve my::Worker", "vllm", "other"),
        ("nvidia-smi", "nvidia-smi", "other"),
    ],
)
def test_processes_of_vllm_are_known_by_their_titles(cmdline: str, name: str, role: str) -> None:
    assert VLLM.kind_of(cmdline, name) == role


def test_what_may_be_replayed_is_a_list_and_stored_responses_are_not_on_it() -> None:
    allowed = {(rule.method, rule.path) for rule in VLLM.replay}
    assert ("POST", "/v1/chat/completions") in allowed
    assert ("POST", "/v1/completions") in allowed
    for path in ("/v1/responses", "/v1/load_lora_adapter", "/sleep", "/v1/files", "/v1/batches"):
        assert all(rule.path != path for rule in VLLM.replay)
    completions = next(rule for rule in VLLM.replay if rule.path == "/v1/completions")
    assert "kv_transfer_params" in completions.forbid_if


def test_probe_paths_are_not_replayed() -> None:
    assert {"/health", "/ping", "/metrics"} <= VLLM.probe_paths
    assert not VLLM.probe_paths & {rule.path for rule in VLLM.replay}


def test_the_canary_names_the_model_only_when_it_is_known() -> None:
    assert VLLM.canary is not None
    assert VLLM.canary.body_for("m")["model"] == "m"
    assert "model" not in VLLM.canary.body_for(None)
    assert VLLM.canary.body_for(None)["temperature"] == 0


def test_the_mark_of_our_processes_stays_readable() -> None:
    assert VLLM.env_set["SPT_NOENV"] == "1"


@pytest.mark.parametrize(
    "flag, version, known",
    [
        ("--attention-backend", "0.12.0", False),
        ("--attention-backend", "0.13.0", True),
        ("-ac.backend", "0.12.0", False),
        ("--no-async-scheduling", "0.9.2", False),
        ("--no-async-scheduling", "0.10.2", True),
        ("--disable-log-requests", "0.16.0", True),
        ("--disable-log-requests", "0.17.1", False),
        ("--enforce-eager", "0.6.6", True),
    ],
)
def test_flags_are_gated_by_version(flag: str, version: str, known: bool) -> None:
    assert VLLM.grammar.knows(flag, version) is known


# --- wrong files ---


def test_a_name_a_title_a_dialect_and_a_start_are_enough(tmp_path: Path) -> None:
    profile = load_engine(written(tmp_path, SMALLEST), "e")
    assert isinstance(profile, EngineProfile)
    assert profile.ready.limit_s == 5.0
    assert profile.canary is None


@pytest.mark.parametrize(
    "addition, key, expected",
    [
        ("[[recognise]]\nwords = ['x']\n", "recognise[0].program", "either program or module"),
        ("[[recognise]]\nprogram = 'x'\nmodule = 'y'\n", "recognise[0].program", "either program or module"),
        ("[[recognise]]\nprogramm = 'x'\n", "recognise[0].program", "either"),
        ("[reads.host]\nflags = ['host']\n", "reads.host.flags", "begin with -"),
        ("[reads.hots]\nflags = ['--host']\n", "reads.hots", "unknown key"),
        ("[edit]\nuds = '--uds'\n", "edit.uds", "unknown key"),
        ("[aliases]\ncc = '--x'\n", "aliases.cc", "begins with -"),
        ("[flags]\n'--x' = { since = 'new' }\n", "flags.--x.since", "a version like"),
        ("[flags]\n'--x' = { from = '1' }\n", "flags.--x.from", "unknown key"),
        ("[canary]\ntask = 't'\n", "canary.path", "missing"),
        ("[canary]\ntask = 't'\npath = 'x'\n", "canary.path", "begins with /"),
        ("[[process]]\nrole = 'boss'\ntitle = 'x'\n", "process[0].role", "one of engine"),
        ("[[process]]\nrole = 'front'\ntitle = '('\n", "process[0].title", "not a regular expression"),
        ("[[replay]]\nmethod = 'PUT'\npath = '/x'\n", "replay[0].method", "one of GET"),
        ("[[replay]]\nmethod = 'GET'\npath = '/x?y'\n", "replay[0].path", "has no query"),
        ("[[replay]]\nmethod = 'GET'\npath = '/x'\nforbid = ['a']\n", "replay[0].forbid", "unknown key"),
        ("[probes]\npaths = ['health']\n", "probes.paths", "begin with /"),
        ("[[cache]]\nname = 'c'\nroots = ['/']\nglobs = ['../x']\n", "cache[0].globs", "below the root"),
        ("[[cache]]\nname = 'c'\nroots = ['/']\nglobs = ['/x']\n", "cache[0].globs", "below the root"),
        ("[env_set]\nA = 1\n", "env_set.A", "expected a text"),
        ("[exit_before_ready]\none = 'x'\n", "exit_before_ready.one", 'CODE = "meaning"'),
        ("[nonsense]\n", "nonsense", "unknown key"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, addition: str, key: str, expected: str) -> None:
    policies = written(tmp_path, SMALLEST + addition)
    with pytest.raises(PolicyError) as caught:
        load_engine(policies, "e")
    assert str(caught.value).startswith(f"{tmp_path}/engines/e.toml: {key}: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "old, new, key",
    [
        ('path = ""', 'path = "health"', "ready.path"),
        ("limit_s = 5", "limit_s = 0", "ready.limit_s"),
        ("limit_s = 5", "", "ready.limit_s"),
        ('title = "E"', "", "title"),
        ('name = "e"', 'name = "f"', "name"),
    ],
)
def test_a_wrong_or_missing_necessity_is_named(tmp_path: Path, old: str, new: str, key: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_engine(written(tmp_path, SMALLEST.replace(old, new)), "e")
    assert caught.value.key == key


@pytest.mark.parametrize("name", ["../vllm", "", "a b"])
def test_a_name_that_is_no_name_never_becomes_a_path(name: str) -> None:
    with pytest.raises(PolicyError, match="an engine's name"):
        load_engine(POLICIES, name)


def test_a_folder_without_the_generic_profile_is_no_folder_of_policies(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"generic\.toml is missing"):
        load_engines(written(tmp_path, SMALLEST))
