"""The command after `--`: which program it is, and which engine's profile speaks for it.

It only reads argv, PATH and the file system; nothing is run or changed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from defib.cli.exits import Exit, Stop
from defib.policy.engines import EngineProfile, Recognise

WRAPPERS = frozenset(
    (
        *("chrt", "dumb-init", "env", "hatch", "ionice", "ncu", "nice", "nohup", "nsys", "numactl", "pdm", "poetry"),
        *("setarch", "stdbuf", "taskset", "tini", "uv"),
    )
)
"""Programs that run the rest of their command line: the engine is looked for further on."""
CONTAINER_TOOLS = frozenset(
    ("crictl", "ctr", "docker", "docker-compose", "kubectl", "nerdctl", "oc", "podman", "podman-compose")
)
SHELLS = frozenset(("ash", "bash", "dash", "fish", "ksh", "sh", "zsh"))
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?")
_VALUED_PYTHON_OPTIONS = frozenset(("-X", "-W", "--check-hash-based-pycs"))


@dataclass(frozen=True, slots=True)
class Recognised:
    """`argv[start:]` are the engine's own arguments; `program` is the index of the program or interpreter."""

    profile: EngineProfile
    program: int
    start: int


def find_executable(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """The absolute path of the program, as the shell would find it. Raises Stop (126, 127)."""
    name = argv[0]
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is not None:
        return os.path.abspath(found)
    if "/" in name and os.path.exists(name):
        what = "is a folder" if os.path.isdir(name) else "is not executable"
        raise Stop(Exit.NOT_EXECUTABLE, f"{name} {what}; `ls -l {name}` shows its mode")
    hint = "" if "/" in name else f"; PATH is {env.get('PATH', '(not set)')}"
    raise Stop(Exit.NOT_FOUND, f"command not found: {name}{hint}")


def recognise(argv: Sequence[str], profiles: Sequence[EngineProfile]) -> Recognised | None:
    """The engine that this command starts, looked for behind wrappers such as `env` or `numactl` too."""
    last = len(argv) if _base(argv[0]) in WRAPPERS else 1
    for index in range(last):
        for profile in profiles:
            for rule in profile.recognise:
                start = _matches(argv, index, rule)
                if start is not None:
                    return Recognised(profile, index, start)
    return None


def _base(path: str) -> str:
    return os.path.basename(path)


def _matches(argv: Sequence[str], index: int, rule: Recognise) -> int | None:
    """Where the engine's arguments begin, if the command at `index` fits the rule."""
    program, module, after = _program(argv, index)
    if rule.program is not None and program != rule.program:
        return None
    if rule.module is not None and module != rule.module:
        return None
    end = after + len(rule.words)
    return end if tuple(argv[after:end]) == rule.words else None


def _program(argv: Sequence[str], index: int) -> tuple[str | None, str | None, int]:
    """(program, module, index of its first argument): Python's script or `-m` module stands for Python."""
    name = _base(argv[index])
    if not _PYTHON.fullmatch(name):
        return name, None, index + 1
    position = index + 1
    while position < len(argv) and argv[position].startswith("-"):
        option = argv[position]
        if option == "-m" and position + 1 < len(argv):
            return None, argv[position + 1], position + 2
        if option in ("-c", "-"):
            return None, None, position + 1
        position += 2 if option in _VALUED_PYTHON_OPTIONS else 1
    script = _base(argv[position]) if position < len(argv) else None
    return script, None, position + 1


def why_not_editable(argv: Sequence[str]) -> str | None:
    """Why the worker's own command line can't be reached from here: a container tool, or a shell's script."""
    words = [w for w in argv[:3] if not w.startswith("-")]
    names = [_base(w) for w in words[:1]] + [_base(w) for w in words[1:2] if _base(argv[0]) in ("sudo", "doas")]
    for name in names:
        if name in CONTAINER_TOOLS:
            return (
                f"`{name}` starts the server in a container, where its processes are not ours to watch, to end or to "
                "restart. Put defib into the image instead (`defib run -- vllm serve ...` as its entry point)"
            )
        if name in SHELLS:
            return (
                f"`{name}` runs a script, and what the script starts can't be edited from here. Give the server's own "
                "command instead (`defib run -- vllm serve ...`)"
            )
    return None


def engine_version(argv: Sequence[str], seen: Recognised, executable: str) -> str | None:
    """The installed version, from the package metadata beside the program, which is not imported. None: unknown."""
    from importlib.metadata import distributions

    python = _interpreter(argv, seen, executable)
    if python is None:
        return None
    folders = _package_folders(python)
    for name in seen.profile.distributions:
        for found in distributions(name=name, path=folders):
            version: str | None = found.version
            if version:
                return version
    return None


def _interpreter(argv: Sequence[str], seen: Recognised, executable: str) -> str | None:
    """The Python that runs the engine: the program itself, or the one that its script names in its first line."""
    program = executable if seen.program == 0 else shutil.which(argv[seen.program])
    if program is None:
        return None
    if _PYTHON.fullmatch(_base(program)):
        return program
    try:
        with open(program, "rb") as script:
            head = script.read(4096).decode("utf-8", "replace")
    except OSError:
        return None
    if not head.startswith("#!"):
        return None
    words = head[2:].split("\n", 1)[0].split()
    if words and _base(words[0]) == "env":
        words = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
        return shutil.which(words[0]) if words else None
    if words and _PYTHON.fullmatch(_base(words[0])):
        return words[0]
    # pip writes a shell's `exec` where the interpreter's path is too long for a first line.
    long_path = re.search(r"^'''exec' \"?([^\"\n]+?)\"? \"\$0\"", head, re.MULTILINE)
    return long_path[1] if long_path else None


def _package_folders(python: str) -> list[str]:
    """Where that Python's packages are; its links are not followed, since a venv's Python is one."""
    prefix = Path(python).parent.parent
    prefixes = [prefix]
    settings = prefix / "pyvenv.cfg"
    try:
        text = settings.read_text()
    except OSError:
        text = ""
    if re.search(r"^include-system-site-packages\s*=\s*true", text, re.MULTILINE | re.IGNORECASE):
        home = re.search(r"^home\s*=\s*(.+)$", text, re.MULTILINE)
        prefixes += [Path(home[1].strip()).parent] if home else []
    if not text:
        prefixes += [Path("/usr/local"), Path.home() / ".local"]
    found = []
    for place in prefixes:
        for pattern in ("lib*/python3*/site-packages", "lib*/python3*/dist-packages"):
            found += sorted(str(path) for path in place.glob(pattern))
    return found
