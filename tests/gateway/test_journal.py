from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from defib.gateway.journal import Journal


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_each_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "7-99", 1 << 20)
    journal.begin("a-1", "POST", "/v1/completions", 12, 3)
    journal.begin("a-2", "GET", "/v1/models", 0, 3)
    journal.end("a-1", "answered")
    assert lines(tmp_path / "journal") == [
        "J 7-99",
        "B a-1 POST /v1/completions 12 3",
        "B a-2 GET /v1/models 0 3",
        "E a-1 answered",
    ]
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    journal.close()


def test_a_path_cannot_forge_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "7-99", 1 << 20)
    journal.begin("a-1", "GET", "/x\nE a-0 answered\r \u2028" + "y" * 500, 0, 1)
    found = lines(tmp_path / "journal")
    assert len(found) == 2
    assert found[1].startswith("B a-1 GET /x?E?a-0?answered???y")
    assert len(found[1]) < 250
    journal.close()


def test_a_full_file_is_replaced_by_one_with_the_open_exchanges(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "7-99", 400)
    journal.begin("open", "GET", "/a", 0, 1)
    for number in range(100):
        journal.begin(f"n-{number}", "GET", "/b", 0, 1)
        journal.end(f"n-{number}", "answered")
        assert (tmp_path / "journal").stat().st_size <= 400
    found = lines(tmp_path / "journal")
    assert found[0] == "J 7-99"
    assert "B open GET /a 0 1" in found
    assert os.listdir(tmp_path) == ["journal"]
    journal.close()


def test_more_open_exchanges_than_the_file_has_room_for_are_all_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "7-99", 100)
    for number in range(50):
        journal.begin(f"n-{number}", "GET", "/b", 0, 1)
    assert len([line for line in lines(tmp_path / "journal") if line.startswith("B")]) == 50
    journal.close()


def test_an_unwritable_folder_costs_the_journal_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "missing" / "journal", "7-99", 1000)
    journal.begin("a-1", "GET", "/a", 0, 1)
    journal.end("a-1", "answered")
    assert journal.unwritten == 2
    journal.close()


def test_a_full_disk_is_counted_and_a_half_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, "7-99", 1 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        journal.begin("a-1", "GET", "/a", 0, 1)  # ten bytes fit
        journal.begin("a-2", "GET", "/a", 0, 1)  # none
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert journal.unwritten == 2
    journal.begin("a-3", "GET", "/a", 0, 1)
    assert lines(path) == ["J 7-99", "B a-1 GET ", "B a-3 GET /a 0 1"]
    journal.close()
