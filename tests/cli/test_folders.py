"""Folders of an instance: where, how private, and who holds them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from defib.cli.exits import Exit, Stop
from defib.cli.folders import (
    LOCK,
    MAX_RUNTIME_PATH_BYTES,
    check_name,
    default_folders,
    lock_holder,
    make_private,
    name_from,
    short_enough,
)


def test_root_has_the_systems_folders() -> None:
    found = default_folders("n", {"HOME": "/root", "XDG_STATE_HOME": "/x", "XDG_RUNTIME_DIR": "/y"}, 0)
    assert (str(found.state), str(found.runtime)) == ("/var/lib/defib/n", "/run/defib/n")


def test_others_have_xdg_folders() -> None:
    found = default_folders("n", {"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/7"}, 7)
    assert (str(found.state), str(found.runtime)) == ("/home/u/.local/state/defib/n", "/run/user/7/defib/n")
    assert str(default_folders("n", {"XDG_STATE_HOME": "/s"}, 7).state) == "/s/defib/n"


def test_without_a_runtime_folder_of_the_user_a_private_temporary_one_serves() -> None:
    assert default_folders("n", {}, 7).runtime == Path("/tmp/defib-7/n")


@pytest.mark.parametrize(
    "given, folder",
    [("/var/lib/defib/n", "/var/lib/defib/n"), ("/var/lib/shared", "/var/lib/shared/n"), ("/a:/b", "/a/n")],
)
def test_the_service_managers_folders_are_honoured(given: str, folder: str) -> None:
    found = default_folders("n", {"STATE_DIRECTORY": given, "RUNTIME_DIRECTORY": given}, 0)
    assert (str(found.state), str(found.runtime)) == (folder, folder)


def test_a_runtime_path_that_is_too_long_for_a_socket_gets_a_short_folder() -> None:
    longest = Path("/" + "r" * (MAX_RUNTIME_PATH_BYTES - 1))
    assert short_enough(longest, 7) == longest
    short = short_enough(Path(f"{longest}r"), 7)
    assert short.parent.name == "defib-7"
    assert short == short_enough(Path(f"{longest}r"), 7) != short_enough(Path(f"{longest}s"), 7)
    # The longest name that is ever bound in there still fits into the kernel's 107 bytes.
    assert len(f"{longest}/.supervisor.sock.4194304") <= 107


def test_a_folder_is_made_private_with_its_parents(tmp_path: Path) -> None:
    made = make_private(tmp_path / "a" / "b", "state", "--state-dir")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    assert make_private(made, "state", "--state-dir").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_ends_with_73_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Stop, match=r"the state folder .* cannot be written: .*give another with --state-dir") as caught:
        make_private(tmp_path / "file" / "state", "state", "--state-dir")
    assert caught.value.code is Exit.STATE
    with pytest.raises(Stop, match="cannot be written"):
        make_private(Path("/proc/defib"), "state", "--state-dir")


def test_a_link_or_a_strangers_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(Stop, match="isn't a folder of ours") as caught:
        make_private(tmp_path / "link", "runtime", "--runtime-dir")
    assert caught.value.code is Exit.STATE
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 65534, 65534)
        with pytest.raises(Stop, match="isn't a folder of ours"):
            make_private(tmp_path / "real", "runtime", "--runtime-dir")


def test_an_open_folder_under_the_temporary_one_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / f"defib-{os.geteuid()}"
    shared.mkdir(mode=0o755)
    with pytest.raises(Stop, match="not a private folder of ours"):
        make_private(shared / "n", "runtime", "--runtime-dir")
    shared.chmod(0o700)
    assert make_private(shared / "n", "runtime", "--runtime-dir").is_dir()


def test_the_holder_of_the_lock_is_named_and_the_lock_is_not_kept(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    with (tmp_path / LOCK).open("w") as file:
        file.write("123\n")
        file.flush()
        assert lock_holder(tmp_path) is None
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert lock_holder(tmp_path) == "pid 123"
        file.truncate(0)
        assert lock_holder(tmp_path) == "a process that left no pid"
    assert lock_holder(tmp_path) is None


@pytest.mark.parametrize("name", ["a", "0.0.0.0-8000", "A_b-c.d", "x" * 64])
def test_a_name_has_letters_digits_dots_and_dashes(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "a b", "x" * 65, "é"])
def test_a_name_that_could_be_a_path_or_a_flag_is_refused(name: str) -> None:
    with pytest.raises(Stop, match="--name") as caught:
        check_name(name)
    assert caught.value.code is Exit.USAGE


@pytest.mark.parametrize("text, name", [("[::]-8000", "8000"), ("/run/v.sock", "run_v.sock"), ("../..", "worker")])
def test_a_name_is_made_of_anything(text: str, name: str) -> None:
    assert name_from(text) == name
    assert check_name(name_from(text)) == name
