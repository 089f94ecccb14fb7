"""The event log: two readers, a bounded file, and a disk that refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

from defib.observe import event_log
from defib.observe.event_log import EventLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_json_in_the_file_and_words_on_a_terminal(tmp_path: Path) -> None:
    out = Terminal()
    log = EventLog(tmp_path / "events.jsonl", "i", out)
    log.write("verdict", {"fault": "poisoned_context", "why": "two words"})
    log.write("phase", {"phase": "capturing"})
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["verdict", "phase"] and lines[0]["instance"] == "i"
    assert 'verdict fault=poisoned_context why="two words"' in out.getvalue() and "capturing" not in out.getvalue()
    assert oct(log.path.stat().st_mode & 0o777) == "0o600"


def test_where_nobody_looks_the_step_is_json_too(tmp_path: Path) -> None:
    out = io.StringIO()
    EventLog(tmp_path / "events.jsonl", "i", out).write("down", {"cause": "ima"})
    assert json.loads(out.getvalue())["event"] == "down"


def test_the_file_is_bounded_and_a_refusing_disk_is_counted(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "i", io.StringIO())
    log.path.write_bytes(b"x" * (event_log.MAX_FILE_BYTES + 1))
    log.write("a", {})
    assert log.path.stat().st_size < 1000 and (tmp_path / "events.jsonl.1").exists()
    gone = EventLog(tmp_path / "gone" / "events.jsonl", "i", io.StringIO())
    gone.write("verdict", {"text": "x" * 10_000})
    assert gone.failures == 1 and len(str(gone.timeline[0]["text"])) == event_log.MAX_VALUE_CHARS


def test_the_timeline_of_an_incident_is_found_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e", "i", io.StringIO())
    log.write("a", {})
    at = log.timeline[0]["at"]
    assert isinstance(at, float)
    assert [line["event"] for line in log.since(at)] == ["a"] and log.since(at + 1) == []
