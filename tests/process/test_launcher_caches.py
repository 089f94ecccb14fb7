"""Moving caches aside: by rename, inside their root, ours, on the same filesystem, within limits; else left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.process.conftest import Client, Start, until

pytestmark = pytest.mark.process


def dead(launcher: Start, caches: dict[str, Any], **limits: float) -> Client:
    """A client of a launcher whose worker has ended."""
    run = launcher(argv=[sys.executable, "-I", "-S", "-c", "pass"], caches=caches, limits={"term_s": 1, **limits})
    client = run.client()
    until(lambda: client.call("tree", generation=1)["tree"] == [])
    return client


def fill(folder: Path, names: str = "abc") -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name * 10)


def clear(client: Client, incident: str = "i-1", **arguments: Any) -> dict[str, Any]:
    return client.call("clear", **{"generation": 1, "cache": "triton", "incident": incident, **arguments})


def test_every_match_of_a_cache_is_moved_to_a_sibling(launcher: Start, short_path: Path) -> None:
    root, deep = short_path / ".triton", short_path / "vllm"
    fill(root / "cache")
    fill(deep / "x/rank_0/model/triton_cache")
    fill(deep / "x/rank_1/model/triton_cache")
    fill(deep / "x/rank_1/model/inductor")
    places = [{"root": str(root), "glob": "cache"}, {"root": str(deep), "glob": "*/*/*/triton_cache"}]
    reply = clear(dead(launcher, {"triton": places}))
    moved = {item["from"]: item for item in reply["moved"]}
    assert set(moved) == {str(root / "cache"), *(str(deep / f"x/rank_{n}/model/triton_cache") for n in (0, 1))}
    assert reply["skipped"] == []
    first = moved[str(root / "cache")]
    assert first["to"] == str(root / ".defib-quarantine/i-1-0") and (first["entries"], first["bytes"]) == (3, 30)
    assert (Path(first["to"]) / "a").read_text() == "a" * 10 and not (root / "cache").exists()
    assert (deep / "x/rank_1/model/inductor/a").exists(), "what wasn't named stays"
    assert len(list((deep / ".defib-quarantine").iterdir())) == 2


def test_nothing_there_is_said(launcher: Start, short_path: Path) -> None:
    reply = clear(dead(launcher, {"triton": [{"root": str(short_path / "no"), "glob": "cache"}]}))
    assert reply["ok"] and reply["moved"] == [] and "nothing is there" in reply["skipped"][0]["why"]


def test_a_symbolic_link_is_not_followed_out_of_the_root(launcher: Start, short_path: Path) -> None:
    fill(short_path / "precious/cache")
    root = short_path / "root"
    root.mkdir()
    (root / "cache").symlink_to(short_path / "precious/cache")
    (root / "way").symlink_to(short_path / "precious")
    places = [{"root": str(root), "glob": "cache"}, {"root": str(root), "glob": "way/cache"}]
    reply = clear(dead(launcher, {"triton": places}))
    assert reply["moved"] == [] and all("symbolic link" in item["why"] for item in reply["skipped"])
    assert (short_path / "precious/cache/a").exists() and (root / "cache").is_symlink()


def test_a_root_that_is_a_link_is_where_the_user_put_the_cache(launcher: Start, short_path: Path) -> None:
    fill(short_path / "data/cache")
    (short_path / ".triton").symlink_to(short_path / "data")
    reply = clear(dead(launcher, {"triton": [{"root": str(short_path / ".triton"), "glob": "cache"}]}))
    assert [item["from"] for item in reply["moved"]] == [str(short_path / "data/cache")]


@pytest.mark.parametrize("pattern", ["../cache", "/etc", "", "a/../../x"])
def test_a_pattern_that_leaves_its_root_is_refused(launcher: Start, short_path: Path, pattern: str) -> None:
    fill(short_path / "cache")
    (short_path / "root").mkdir()
    reply = clear(dead(launcher, {"triton": [{"root": str(short_path / "root"), "glob": pattern}]}))
    assert reply["moved"] == [] and "leaves its root" in reply["skipped"][0]["why"]
    assert (short_path / "cache/a").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_stays(launcher: Start, short_path: Path) -> None:
    fill(short_path / "root/cache")
    os.chown(short_path / "root/cache", 65534, 65534)
    reply = clear(dead(launcher, {"triton": [{"root": str(short_path / "root"), "glob": "cache"}]}))
    assert "belongs to uid 65534" in reply["skipped"][0]["why"] and (short_path / "root/cache").exists()


def test_a_mount_point_is_emptied_entry_by_entry(launcher: Start, short_path: Path) -> None:
    cache = short_path / "root/cache"
    cache.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(cache)], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        for name in "abc":
            (cache / name).write_text(name)
        reply = clear(dead(launcher, {"triton": [{"root": str(short_path / "root"), "glob": "cache"}]}))
        target = cache / ".defib-quarantine/i-1-0"
        assert reply["moved"][0]["to"] == str(target)
        assert sorted(os.listdir(cache)) == [".defib-quarantine"] and sorted(os.listdir(target)) == list("abc")
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=True)


def test_a_read_only_filesystem_is_said(launcher: Start, short_path: Path) -> None:
    root = short_path / "root"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(root)], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        fill(root / "cache")
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        reply = clear(dead(launcher, {"triton": [{"root": str(root), "glob": "cache"}]}))
        assert reply["moved"] == [] and "Read-only" in reply["skipped"][0]["why"]
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_the_quarantine_keeps_to_its_limits_and_always_keeps_the_newest(launcher: Start, short_path: Path) -> None:
    root = short_path / "root"
    caches = {"triton": [{"root": str(root), "glob": "cache"}]}
    client = dead(launcher, caches, quarantine_count=2, quarantine_bytes=10_000)
    held = root / ".defib-quarantine"
    for number in range(4):
        fill(root / "cache")
        assert clear(client, f"i-{number}")["moved"]
    assert sorted(os.listdir(held)) == ["i-2-0", "i-3-0"]
    fill(root / "cache", "x")
    (root / "cache/x").write_bytes(b"x" * 20_000)
    clear(client, "big")
    assert os.listdir(held) == ["big-0"]
    fill(root / "cache")
    clear(client, "small")
    assert os.listdir(held) == ["small-0"], "the big one went over the bytes"


def test_quarantine_of_the_same_incident_gets_another_number(launcher: Start, short_path: Path) -> None:
    root = short_path / "root"
    client = dead(launcher, {"triton": [{"root": str(root), "glob": "cache"}]})
    for number in (0, 1):
        fill(root / "cache")
        assert clear(client)["moved"][0]["to"].endswith(f"i-1-{number}")


@pytest.mark.parametrize("incident", ["../x", "", "a/b", ".hidden", "x" * 101, 7])
def test_an_incident_that_is_no_plain_name_is_refused(launcher: Start, short_path: Path, incident: Any) -> None:
    client = dead(launcher, {"triton": [{"root": str(short_path), "glob": "cache"}]})
    assert clear(client, incident)["error"] == "bad_request"


def test_a_cache_that_is_not_configured_or_in_use_is_refused(launcher: Start, short_path: Path) -> None:
    fill(short_path / "cache")
    client = launcher(caches={"triton": [{"root": str(short_path), "glob": "cache"}]}).client()
    assert clear(client, cache="home")["error"] == "refused"
    assert clear(client)["error"] == "refused" and (short_path / "cache").exists(), "the worker lives"
    assert clear(client, generation=2)["error"] == "stale_generation"
