"""The state store on good and bad days."""

from __future__ import annotations

from pathlib import Path

import pytest

from defib.runtime.store import MAX_STATE_BYTES, Store, write_atomically


def test_what_was_saved_is_loaded_and_private(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.json")
    assert store.load() == ({}, None)
    assert store.save({"a": 1}) is None
    assert store.load() == ({"a": 1}, None)
    assert oct(store.path.stat().st_mode & 0o777) == "0o600"


DEEP, LONG = b"[" * 200_000, b'{"a": 1}' + b" " * MAX_STATE_BYTES


@pytest.mark.parametrize(
    "content", [b"{half", b"[]", b"\xff\xfe", b"", DEEP, LONG], ids=lambda content: repr(content[:9])
)
def test_unusable_content_reads_as_nothing_and_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    value, problem = Store(path).load()
    assert value == {} and problem is not None and str(path) in problem


def test_a_folder_that_is_gone_is_told_and_counted(tmp_path: Path) -> None:
    store = Store(tmp_path / "gone" / "state.json")
    problem = store.save({"a": 1})
    assert problem is not None and "No such file" in problem and store.failures == 1


def test_a_failed_write_leaves_the_old_content_and_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")
    (tmp_path / ".f.new").mkdir()
    with pytest.raises(OSError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_full_disk_keeps_the_old_state_and_says_so(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "state.json"
    store = Store(path)
    assert store.save({"a": 1}) is None
    (tmp_path / ".state.json.new").symlink_to("/dev/full")
    problem = store.save({"a": 2})
    assert problem is not None and "No space left" in problem
    assert store.load() == ({"a": 1}, None)
    assert not (tmp_path / ".state.json.new").is_symlink(), "no half file stays"
