"""The folder of an incident: whole or not there, honest about what is missing, bounded, without secrets."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from defib.core.redact import GONE
from defib.effects import evidence as module
from defib.effects.evidence import CONTEXT_LINES, MAX_AGE_S, MAX_INCIDENTS, MAX_LOG_BYTES, Evidence, Incident, context
from defib.runtime.clock import wall

ID = "0001-g1"


@dataclass(frozen=True)
class Line:
    at: float
    stream: str
    text: str


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after a look at whether it tells the truth."""
    told: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    for item in told["items"]:
        if item["missing"]:
            continue
        data = (folder / item["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (item["bytes"], item["sha256"]), item["name"]
    names = {item["name"] for item in told["items"] if not item["missing"]}
    assert names == {p.name for p in folder.iterdir()} - {"manifest.json"}
    return told


def written(root: Path, **files: bytes | None) -> tuple[Evidence, Incident]:
    store = Evidence(root)
    incident = store.open(ID, 1, 12.5)
    assert store.write(incident, {f"{n}.txt": ("the test", content, "") for n, content in files.items()})
    return store, incident


def test_a_folder_has_everything_and_a_manifest_and_is_private(tmp_path: Path) -> None:
    root = tmp_path / "incidents"
    _, incident = written(root, log=b"lines", tree=b"[]")
    assert incident.folder.name.endswith(f"Z-{ID}") and [p.name for p in root.iterdir()] == [incident.folder.name]
    told = manifest(incident.folder)
    assert (told["incident"], told["generation"], told["opened_at"]) == (ID, 1, 12.5)
    assert all(item["source"] == "the test" and item["time"].endswith("Z") for item in told["items"])
    modes = {oct(p.stat().st_mode & 0o777) for p in incident.folder.iterdir()}
    assert modes == {"0o600"} and oct(incident.folder.stat().st_mode & 0o777) == "0o700"
    assert oct(root.stat().st_mode & 0o777) == "0o700"


def test_what_is_missing_is_named_with_the_reason(tmp_path: Path) -> None:
    store = Evidence(tmp_path)
    incident = store.open(ID, 1, 0.0)
    assert store.write(incident, {"requests.json": ("gateway", None, "no gateway in this instance")})
    (item,) = manifest(incident.folder)["items"]
    assert item["missing"] == "no gateway in this instance" and item["bytes"] == 0


def test_a_folder_grows_also_under_another_supervisor(tmp_path: Path) -> None:
    written(tmp_path, log=b"first", both=b"old")
    other = Evidence(tmp_path)
    incident = other.open(ID, 9, 99.0)
    assert (incident.generation, incident.opened_at) == (1, 12.5), "it was opened once"
    assert other.write(incident, {"report.md": ("defib", b"# report", ""), "both.txt": ("later", b"new", "")})
    assert {i["name"] for i in manifest(incident.folder)["items"]} == {"log.txt", "both.txt", "report.md"}
    assert (incident.folder / "both.txt").read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_supervisor_had_written_is_kept(tmp_path: Path) -> None:
    half = tmp_path / f".20260101T000000Z-{ID}"
    half.mkdir()
    (half / "log.txt").write_bytes(b"the last words")
    (half / ".tree.json.new").write_bytes(b"half a fi")
    store = Evidence(tmp_path)
    incident = store.open(ID, 1, 0.0)
    assert incident.folder.name == f"20260101T000000Z-{ID}" and incident.folder.is_dir()
    (half.with_name(half.name[1:]) / ".tree.json.new").unlink()
    assert store.write(incident, {"report.md": ("defib", b"x", "")})
    items = {i["name"]: i for i in manifest(incident.folder)["items"]}
    assert items["log.txt"]["source"] == "a supervisor that was killed meanwhile" and "report.md" in items


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"items": [{"x": 1}], "opened_at": 1, "generation": 1}'])
def test_a_damaged_manifest_costs_no_file(tmp_path: Path, damage: bytes) -> None:
    _, incident = written(tmp_path, log=b"lines")
    (incident.folder / "manifest.json").write_bytes(damage)
    store = Evidence(tmp_path)
    again = store.open(ID, 1, 0.0)
    assert store.write(again, {"report.md": ("defib", b"x", "")})
    assert {i["name"] for i in manifest(again.folder)["items"]} == {"log.txt", "report.md"}


def test_a_root_that_is_a_file_is_told_and_nothing_is_raised(tmp_path: Path) -> None:
    root = tmp_path / "incidents"
    root.write_text("a file where the folder should be")
    store = Evidence(root)
    assert store.write(store.open(ID, 1, 0.0), {"log.txt": ("x", b"x", "")}) is False
    assert store.failures == 1 and str(root) in store.last_error
    assert store.tidy() == []


def test_a_disk_that_fills_up_costs_what_does_not_fit_and_says_so(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    store, incident = written(tmp_path, log=b"lines")
    (incident.folder / ".big.txt.new").symlink_to("/dev/full")
    files: dict[str, tuple[str, bytes | None, str]] = {"big.txt": ("x", b"y" * 99, ""), "small.txt": ("x", b"z", "")}
    assert store.write(incident, files) is False
    items = {i["name"]: i for i in manifest(incident.folder)["items"]}
    assert "No space left" in items["big.txt"]["missing"] and items["small.txt"]["bytes"] == 1
    assert "No space left" in store.last_error


def test_an_excerpt_is_redacted_and_its_end_is_kept(tmp_path: Path) -> None:
    store = Evidence(tmp_path, ["hunter22"])
    text = store.lines([Line(1.0, "stderr", "key hunter22"), Line(2.5, "stdout", "password='p w'")]).decode()
    assert text == f"1.000 stderr key {GONE}\n2.500 stdout password='{GONE}'\n"
    long = store.lines([Line(float(n), "stdout", "x" * 1000) for n in range(9000)])
    assert len(long) == MAX_LOG_BYTES and long.startswith(b"x") and b"8999.000 stdout" in long[-1100:]


def test_json_stays_json_whatever_is_taken_out(tmp_path: Path) -> None:
    store = Evidence(tmp_path, ['a "quoted" key\\'])
    value = {"api_key": None, "token": True, "x": 'a "quoted" key\\', "argv": ["--api-key=abcd"], "path": tmp_path}
    told = json.loads(store.json(value))
    assert told == {"api_key": None, "token": True, "x": GONE, "argv": [f"--api-key={GONE}"], "path": str(tmp_path)}


def test_the_context_reaches_from_before_the_first_cause_to_the_end() -> None:
    lines = [Line(float(n), "stdout", "cause" if n in (900, 950) else str(n)) for n in range(1000)]
    kept = context(lines, lambda line: line.text == "cause")
    assert CONTEXT_LINES >= 100 and kept[0].at == 900 - CONTEXT_LINES and kept[-1].at == 999
    assert context(lines[890:], lambda line: line.text == "cause") == lines[890:]
    assert context(lines, lambda line: False) == lines[-2 * CONTEXT_LINES :]
    assert context([], lambda line: True) == []


def folders(root: Path, count: int, size: int = 1) -> None:
    for n in range(count):
        folder = root / f"2026010{n // 10}T{n % 10:06d}Z-{n:04d}-g1"
        folder.mkdir()
        (folder / "log.txt").write_bytes(b"x" * size)


def test_too_many_incidents_cost_the_oldest(tmp_path: Path) -> None:
    folders(tmp_path, MAX_INCIDENTS + 2)
    assert sorted(Evidence(tmp_path).tidy()) == ["20260100T000000Z-0000-g1", "20260100T000001Z-0001-g1"]
    assert len(list(tmp_path.iterdir())) == MAX_INCIDENTS
    assert Evidence(tmp_path).tidy() == []


def test_too_many_bytes_and_too_many_days_cost_the_oldest_but_never_the_newest(tmp_path: Path) -> None:
    folders(tmp_path, 3)
    sparse = tmp_path / "20260100T000001Z-0001-g1" / "core"
    with sparse.open("wb") as file:
        file.truncate(module.MAX_TOTAL_BYTES)
    assert sorted(Evidence(tmp_path).tidy()) == ["20260100T000000Z-0000-g1", "20260100T000001Z-0001-g1"]
    (newest,) = tmp_path.iterdir()
    os.utime(newest, (1.0, 1.0))
    assert Evidence(tmp_path).tidy() == []
    folders(tmp_path / "..", 0)
    (tmp_path / "20270101T000000Z-0009-g1").mkdir()
    assert Evidence(tmp_path).tidy() == [newest.name], f"older than {MAX_AGE_S} s"


def test_a_folder_in_the_making_is_left_alone_and_one_given_up_is_not(tmp_path: Path) -> None:
    folders(tmp_path, MAX_INCIDENTS)
    making, given_up = tmp_path / ".20270101T000000Z-0099-g1", tmp_path / ".20250101T000000Z-0098-g1"
    making.mkdir()
    given_up.mkdir()
    os.utime(given_up, (wall() - 7200, wall() - 7200))
    assert Evidence(tmp_path).tidy() == [given_up.name] and making.is_dir()
