"""Where an instance keeps its state and its sockets, and who holds it already.

Folders are 0700 and ours, or the command ends with a message. Nothing in them is read or removed here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from defib.cli.exits import Exit, Stop

MAX_RUNTIME_PATH_BYTES = 82
"""A socket's path has 107 bytes; the longest name that we put below it is `.supervisor.sock.4194304`."""
LOCK = "lock"
"""The launcher holds a lock on this file of the state folder for as long as the instance runs."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Folders:
    state: Path
    runtime: Path


def check_name(name: str) -> str:
    """An instance's name, as given. Raises Stop (2)."""
    if not _NAME.fullmatch(name):
        raise Stop(
            Exit.USAGE,
            f"--name {name!r}: expected at most 64 letters, digits, dots, - and _, beginning with a letter or digit",
        )
    return name


def name_from(text: str) -> str:
    """An instance's name made of an address or a program: what a name can't hold becomes `_`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("._-")[:64]
    return name or "worker"


def runtime_bases(env: Mapping[str, str], uid: int) -> tuple[Path, ...]:
    """Where the runtime folders of this user's instances are, most usual first."""
    usual = Path("/run/defib") if uid == 0 else None
    own = env.get("XDG_RUNTIME_DIR")
    if usual is None and own and os.path.isabs(own):
        usual = Path(own) / "defib"
    return (*([usual] if usual else []), _short_base(uid))


def _short_base(uid: int) -> Path:
    """Not below $TMPDIR, which can be long itself."""
    return Path("/tmp") / f"defib-{uid}"


def default_folders(name: str, env: Mapping[str, str], uid: int) -> Folders:
    """From the service manager's variables, else the usual place of this user."""
    given_state, given_runtime = _first(env.get("STATE_DIRECTORY")), _first(env.get("RUNTIME_DIRECTORY"))
    if uid == 0:
        state_base = Path("/var/lib/defib")
    else:
        home = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local/state")
        state_base = Path(home) / "defib"
    state = _own(given_state, name) if given_state else state_base / name
    runtime = _own(given_runtime, name) if given_runtime else runtime_bases(env, uid)[0] / name
    return Folders(state, short_enough(runtime, uid))


def short_enough(runtime: Path, uid: int) -> Path:
    """The folder itself, or a short one in its place where its sockets' paths would be too long for the kernel."""
    if len(os.fsencode(runtime)) <= MAX_RUNTIME_PATH_BYTES:
        return runtime
    return _short_base(uid) / hashlib.sha256(os.fsencode(runtime)).hexdigest()[:16]


def _first(folders: str | None) -> Path | None:
    """systemd separates several folders by colons."""
    first = (folders or "").split(":")[0]
    return Path(first) if os.path.isabs(first) else None


def _own(folder: Path, name: str) -> Path:
    """A service's folder may be shared by several instances; one that is named after the instance is its own."""
    return folder if folder.name == name else folder / name


def make_private(folder: Path, what: str, option: str) -> Path:
    """Makes the folder (0700) and proves that it can be written. Raises Stop (73)."""
    try:
        _make_parents(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise Stop(Exit.STATE, f"the {what} folder {folder} isn't a folder of ours; give another with {option}")
        if facts.st_mode & 0o077:
            folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Stop(
            Exit.STATE,
            f"the {what} folder {folder} cannot be written: {error.strerror}; make it writable for uid "
            f"{os.geteuid()}, or give another with {option}",
        ) from error
    return folder.resolve()


def _make_parents(folder: Path) -> None:
    if folder.name != f"defib-{os.geteuid()}":
        folder.mkdir(parents=True, exist_ok=True)
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    # It stands in a folder that everybody may write: a stranger could have been there first.
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise Stop(Exit.STATE, f"{folder} is not a private folder of ours; remove it, or give --runtime-dir")


def lock_holder(state: Path) -> str | None:
    """The launcher that runs this instance already, for a message; None if none does. The lock is not kept."""
    try:
        descriptor = os.open(state / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        return f"pid {said}" if said.isdigit() else "a process that left no pid"
    finally:
        os.close(descriptor)
    return None
