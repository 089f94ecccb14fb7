"""The root process of an instance: owns the worker, its output, its exit and the listening socket.

`python launcher.py --config-fd N`, where N is an anonymous file with the instance's configuration (docs/seam.md).
One file and the standard library only, for Python 3.8 or later: it also runs in the worker's own container, and
whoever may crash owns nothing that others need, so there is as little here as possible.

What it must not do: decide anything about the worker's health, take a command line from outside, touch a process,
a file or a segment of shared memory that it cannot prove to be this instance's, block on anybody's pipe, or import
anything of this package.

The parts, in order: limits, the kernel (ctypes), /proc, output files, the tree, launching, caches and sweeping,
the two other processes, the seam, the stop, the launcher itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import re
import resource
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any, Callable, Deque, Dict, Iterable, List, NamedTuple, NoReturn, Optional, Set, Tuple

Message = Dict[str, Any]
Identity = Tuple[int, int]
"""A process: (pid, field 22 of /proc/PID/stat). A pid alone is never a process."""

# ---------------------------------------------------------------------------------------------------- limits

PROTOCOL = 1
CONFIG_VERSION = 1
EXIT_BUSY, EXIT_CONFIG, EXIT_CANNOT_WRITE, EXIT_STUCK = 75, 78, 73, 70
"""Exit codes of our own: somebody holds what we need; bad configuration; no state; a process survived SIGKILL."""

MAX_CONFIG_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20
MAX_BACKLOG_BYTES = 4 << 20
MAX_CLIENTS = 32
MAX_SOCKET_PATH_BYTES = 107
LISTEN_BACKLOG = 2048

TRACKED_PROCESSES = 4096
"""Processes kept in the tree; more of them are still found and killed, but not listed (a fork bomb)."""
SCAN_EARLY_S, SCAN_EARLY_FOR_S, SCAN_S, SCAN_MAX_S = 0.25, 60.0, 1.0, 5.0
SCAN_SHARE, SCAN_SHARE_EARLY = 1000, 200
"""Scans may cost one part in this many of a core: on a host with very many processes they come less often."""
REFRESH_S, RESCAN_S = 10.0, 30.0
DEEP_GAP_S = 0.25
LOOK_AGAIN_S = 10.0
"""For so long a process that was looked into (environment, open files) is not looked into again."""
GUARD_S, GUARDS_LOST = 0.5, 4
"""A read of /proc that takes longer is given up, since its process may sit in a driver; so many may be."""
FACT_BYTES = 64 << 10
MAPS_BYTES = 8 << 20
DESCRIPTORS_LOOKED_AT = 65536
DESCRIPTORS_SPARED = 256
"""Descriptors kept free for everything but the watching of processes."""
SNAPSHOT_CMDLINE_CHARS = 512

OUTPUT_GAP_S = 0.005
OUTPUT_POLL_S = 0.05
OUTPUT_CAP_BYTES = 256 << 20
PUNCH_STEP_BYTES = 256 << 10
PAGE_BYTES = 4096
RESERVE_BYTES = 1 << 20
"""Blocks kept ahead of each output file's end: on a full disk the worker's prints still succeed for a while."""
FULL_DISK_KEPT_BYTES = 128 << 10
OLD_OUTPUTS = 2
ECHO_CHUNK_BYTES = 64 << 10
ECHO_LAG_BYTES = 16 << 20
ECHO_LINES = 256
ECHO_FLUSH_S = 1.0

BACKOFF_FIRST_S, BACKOFF_LAST_S, STEADY_S = 0.05, 5.0, 10.0
JOURNAL_BYTES = 64 << 20
RECORD_BYTES = 16 << 20
DRAIN_S, TERM_S, TRACKER_S, KILL_S, SUPERVISOR_S = 20.0, 8.0, 1.5, 10.0, 2.0
ROOT_GONE_S = 2.0
"""At a stop: how long the rest of the tree may outlive its root before SIGKILL."""
STOP_POLL_S = 0.02
KILL_PASSES = 50

QUARANTINE_COUNT, QUARANTINE_BYTES, QUARANTINE_AGE_S = 8, 8 << 30, 14 * 86400.0
CLEAR_ENTRIES = 1000
QUARANTINE = ".defib-quarantine"
PAST_GENERATIONS = 16
PYTHON_PACKAGES_LOOKED_AT = 200

SIGNALS = (15, 9, 3, 6)
INCIDENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")
PRIVATE_FOLDER = re.compile(r"\A/[^\0]*/defib-[0-9a-f]{8}-g\d+\Z")
MARK, ASIDE = "DEFIB_MARK", "DEFIB_ASIDE"


class Refusal(Exception):
    """A command that is not done: `error` is one of the names in docs/seam.md."""

    def __init__(self, error: str, message: str) -> None:
        self.error, self.message = error, message
        super().__init__(message)


def now() -> float:
    """CLOCK_BOOTTIME in seconds: goes on during a suspend, is not set by anybody."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def fail(code: int, text: str) -> NoReturn:
    """Before the loop runs: one message for a person, and out."""
    sys.stderr.write("defib launcher: " + text + "\n")
    sys.stderr.flush()
    sys.exit(code)


# ------------------------------------------------------------------------------------------------ the kernel

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KEEP_SIZE, PUNCH_HOLE = 1, 2
SYS_PIDFD_SEND_SIGNAL, SYS_PIDFD_OPEN = 424, 434
IN_MODIFY, IN_NONBLOCK_CLOEXEC = 2, os.O_NONBLOCK | os.O_CLOEXEC
PIDFD_GET_INFO, PIDFD_INFO_EXIT, PIDFD_INFO_FORM = 0xC040FF0B, 8, "QQ11Ii"


def pidfd_open(pid: int) -> int:
    """A descriptor for a process (Linux 5.3), or -1 where the kernel or a filter of system calls has none."""
    return int(_syscall(ctypes.c_long(SYS_PIDFD_OPEN), ctypes.c_long(pid), ctypes.c_long(0)))


def pidfd_signal(pidfd: int, number: int) -> int:
    """0, or the errno."""
    arguments = [ctypes.c_long(n) for n in (SYS_PIDFD_SEND_SIGNAL, pidfd, number, 0, 0)]
    return 0 if _syscall(*arguments) == 0 else ctypes.get_errno()


def pidfd_exit_status(pidfd: int) -> Optional[int]:
    """The wait status of a process that its own parent has reaped (Linux 6.15), else None."""
    block = bytearray(struct.pack(PIDFD_INFO_FORM, PIDFD_INFO_EXIT, *([0] * 13)))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, block)
    except OSError:
        return None
    values = struct.unpack(PIDFD_INFO_FORM, block)
    return int(values[-1]) if values[0] & PIDFD_INFO_EXIT else None


def give_memory_back() -> None:
    """What compiling this file took (6 MB) goes back to the system, where the C library can do that."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def allocate(descriptor: int, mode: int, begin: int, size: int) -> int:
    """fallocate(2): 0, or the errno."""
    return 0 if _fallocate(descriptor, mode, begin, size) == 0 else ctypes.get_errno()


# ----------------------------------------------------------------------------------------------------- /proc


class Stat(NamedTuple):
    """What we use of /proc/PID/stat."""

    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    threads: int
    start: int
    exit_status: int

    @property
    def dead(self) -> bool:
        """A zombie leader whose threads still run is alive."""
        return self.state in "ZXx" and self.threads <= 1


def slurp(path: str, limit: int = FACT_BYTES) -> Optional[bytes]:
    """The beginning of a small file, or None if it can't be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts: List[bytes] = []
        left = limit
        while left > 0:
            part = os.read(descriptor, min(left, 65536))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_stat(pid: int) -> Optional[Stat]:
    """None: there is no such process (any more)."""
    data = slurp("/proc/%d/stat" % pid, 4096)
    if not data:
        return None
    begin, end = data.index(b"("), data.rindex(b")")
    fields = data[end + 2 :].split()
    return Stat(
        pid=pid,
        comm=data[begin + 1 : end].decode("utf-8", "replace"),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start=int(fields[19]),
        exit_status=int(fields[49]) if len(fields) > 49 else 0,
    )


def pids() -> List[int]:
    """Every process that this /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def newest_pid() -> Optional[str]:
    """The pid given out last in our namespace: unchanged means that no process was born. None: unknown."""
    fields = (slurp("/proc/loadavg", 256) or b"").split()
    return fields[4].decode() if len(fields) == 5 else None


def boot_id() -> str:
    """The kernel's name of this boot."""
    return (slurp("/proc/sys/kernel/random/boot_id") or b"unknown").decode().strip()


def read_cmdline(pid: int) -> str:
    """The command line as a person reads it; titles set later are padded with zeros, which go."""
    data = slurp("/proc/%d/cmdline" % pid) or b""
    return data.rstrip(b"\0 ").replace(b"\0", b" ").decode("utf-8", "replace")


def read_environ(pid: int) -> Dict[bytes, bytes]:
    """The environment that a process was started with, as far as it has not overwritten it."""
    data = slurp("/proc/%d/environ" % pid, 1 << 20) or b""
    return {name: value for name, _, value in (item.partition(b"=") for item in data.split(b"\0")) if name}


def written_files(pid: int, below: Tuple[str, ...]) -> Iterable[str]:
    """Paths below some folders that a process holds open for writing. Readers don't count: a person's `tail -f` is
    not the worker."""
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names[:DESCRIPTORS_LOOKED_AT]:
        try:
            path = os.readlink(folder + "/" + name)
        except OSError:
            continue
        if path.startswith(below):
            flags = re.search(rb"flags:\s*(\d+)", slurp("/proc/%d/fdinfo/%s" % (pid, name), 4096) or b"")
            if flags and int(flags.group(1), 8) & os.O_ACCMODE != os.O_RDONLY:
                yield path


def shared_memory(pid: int) -> Set[Tuple[str, int]]:
    """(name, inode) of the files in /dev/shm that a process has mapped or holds open."""
    found: Set[Tuple[str, int]] = set()
    for line in (slurp("/proc/%d/maps" % pid, MAPS_BYTES) or b"").split(b"\n"):
        if b"/dev/shm/" in line:
            fields = line.split(None, 5)
            name = fields[5].decode("utf-8", "replace") if len(fields) == 6 else ""
            if name.startswith("/dev/shm/") and not name.endswith(" (deleted)"):
                found.add((name[len("/dev/shm/") :], int(fields[4])))
    for path in written_files(pid, ("/dev/shm/",)):
        if not path.endswith(" (deleted)"):
            try:
                found.add((path[len("/dev/shm/") :], os.stat(path).st_ino))
            except OSError:
                pass
    return found


def shm_listing() -> Set[Tuple[str, int]]:
    """(name, inode) of everything that lies in /dev/shm."""
    try:
        with os.scandir("/dev/shm") as entries:
            return {(entry.name, entry.inode()) for entry in entries}
    except OSError:
        return set()


def send_signal(pid: int, start: int, number: int, pidfd: int = -1) -> str:
    """Signals a process and no other: "sent", "gone", or why not."""
    own = pidfd if pidfd >= 0 else pidfd_open(pid)
    try:
        found = read_stat(pid)
        if found is None or found.start != start:
            return "gone"
        if own >= 0:
            failed = pidfd_signal(own, number)
        else:  # a kernel before 5.3: the identity was checked microseconds ago, which is all there is
            failed = 0
            try:
                os.kill(pid, number)
            except OSError as error:
                failed = error.errno or errno.EINVAL
    finally:
        if own >= 0 and pidfd < 0:
            os.close(own)
    if failed == errno.ESRCH:
        return "gone"
    return "sent" if failed == 0 else os.strerror(failed)


class Guard:
    """Does reads of /proc that need a process's memory lock, in a thread: when a process is stuck in a driver they
    may never return, and then only the thread is lost. A pid that did this once is not asked again."""

    def __init__(self) -> None:
        self.stuck: Set[int] = set()
        self._asked: "SimpleQueue[Tuple[Callable[[int], Any], int]]" = SimpleQueue()
        self._told: "SimpleQueue[Any]" = SimpleQueue()
        self._running = False

    def call(self, pid: int, read: Callable[[int], Any], otherwise: Any) -> Any:
        """What `read(pid)` returns, or `otherwise` after GUARD_S."""
        if pid in self.stuck or len(self.stuck) >= GUARDS_LOST:
            return otherwise
        if not self._running:
            self._asked, self._told = SimpleQueue(), SimpleQueue()
            start_thread("proc", self._serve, self._asked, self._told)
            self._running = True
        self._asked.put((read, pid))
        try:
            found = self._told.get(timeout=GUARD_S)
        except Empty:
            self.stuck.add(pid)
            self._running = False
            return otherwise
        return otherwise if isinstance(found, Exception) else found

    @staticmethod
    def _serve(asked: "SimpleQueue[Tuple[Callable[[int], Any], int]]", told: "SimpleQueue[Any]") -> None:
        while True:
            read, pid = asked.get()
            try:
                told.put(read(pid))
            except Exception as error:  # an oddity of /proc must not leave the caller waiting for the deadline
                told.put(error)


def start_thread(name: str, run: Callable[..., None], *arguments: Any) -> None:
    """A thread that dies with the process."""
    threading.Thread(target=run, args=arguments, name=name, daemon=True).start()


# ---------------------------------------------------------------------------------------------- output files


class OutputFile:
    """One stream of one generation: an O_APPEND file, whose consumed beginning is punched out.

    Offsets only grow: a reader keeps its own for as long as the generation lives. `begin` is the first byte that
    is still there. `echoed` is written by the echo's thread alone, all else by the main thread.
    """

    def __init__(self, path: str, generation: int) -> None:
        self.path, self.generation = path, generation
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC
        self.fd = os.open(path, flags, 0o600)
        self.size = self.begin = self.consumed = self.echoed = self.lost_bytes = 0
        self.reserved = 0
        self.left_by_echo = False
        self.can_punch = True
        self._reserve()

    def look(self) -> bool:
        """Takes the size; True if it changed."""
        size = os.fstat(self.fd).st_size
        changed, self.size = size != self.size, size
        return changed

    def trim(self, echoed: int, cap: int) -> None:
        """Gives back the blocks that both readers have left behind; more, counted, if over `cap` are waiting."""
        target = min(self.consumed, max(echoed, self.size - ECHO_LAG_BYTES), self.size)
        if self.size - max(target, self.begin) > cap:
            target = self.size - cap * 7 // 8
        if not self.can_punch:
            self._truncate(target, cap)
        elif target - self.begin >= PUNCH_STEP_BYTES:
            self._punch(target // PAGE_BYTES * PAGE_BYTES)
        self._reserve()

    def _punch(self, target: int) -> None:
        before, self.begin = self.begin, target  # the echo looks at `begin` after each read: it must move first
        failed = allocate(self.fd, PUNCH_HOLE | KEEP_SIZE, before, target - before)
        if failed == 0:
            self.lost_bytes += max(0, target - max(before, self.consumed))
        else:
            self.begin, self.can_punch = before, failed not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)

    def _truncate(self, target: int, cap: int) -> None:
        """Without holes: to nothing and back to the old length, so that offsets still only grow."""
        if self.size - self.begin <= (cap // 4 if target == self.size else cap):
            return
        self.begin, before = self.size, self.begin
        os.ftruncate(self.fd, 0)
        between = os.fstat(self.fd).st_size  # written between the two calls: lost, but seen
        os.ftruncate(self.fd, self.size)
        self.lost_bytes += max(0, self.size - max(before, self.consumed)) + between

    def _reserve(self) -> None:
        if not self.can_punch or self.reserved - self.size >= RESERVE_BYTES // 2:
            return
        failed = allocate(self.fd, KEEP_SIZE, self.size, RESERVE_BYTES)
        got = RESERVE_BYTES if failed == 0 else 0
        if failed in (errno.ENOSPC, errno.EDQUOT):
            got = self._reserve_on_full_disk()
        self.reserved = self.size + got

    def _reserve_on_full_disk(self) -> int:
        """Old output makes room for new: a worker whose print fails may die of it."""
        target = (self.size - FULL_DISK_KEPT_BYTES) // PAGE_BYTES * PAGE_BYTES
        if target > self.begin:
            self._punch(target)
        for part in (RESERVE_BYTES, RESERVE_BYTES // 2, RESERVE_BYTES // 4):
            if allocate(self.fd, KEEP_SIZE, self.size, part) == 0:
                return part
        return 0

    def snapshot(self) -> Message:
        """For the seam. `consumed` is where a new reader begins."""
        consumed = max(self.consumed, self.begin)
        return {"path": self.path, "size": self.size, "consumed": consumed, "lost_bytes": self.lost_bytes}

    def remove(self) -> None:
        """The name goes at once; the descriptor when the echo has let go of it."""
        try:
            os.unlink(self.path)
        except OSError:
            pass


class Echo:
    """Copies one stream of the worker to our own, in a thread of its own: a stuck terminal stops it and nobody else.

    It also prints our own lines, so that the main loop never writes to a pipe.
    """

    def __init__(self, sink: int) -> None:
        self.sink = sink
        self.ended = False
        self.skipped_bytes = 0
        self.report: Callable[[str], None] = self.say
        self._files: Deque[OutputFile] = deque()
        self._lines: Deque[bytes] = deque(maxlen=ECHO_LINES)
        self._wake = threading.Event()
        self._at_line_start = True

    def say(self, line: str) -> None:
        """A line of our own, between the worker's."""
        self._lines.append(line.encode("utf-8", "backslashreplace") + b"\n")
        self._wake.set()

    def follow(self, file: OutputFile) -> None:
        """Goes on with this file when the one before is finished."""
        if self.ended:
            file.left_by_echo = True
        self._files.append(file)
        self._wake.set()

    def wake(self) -> None:
        """There may be more."""
        self._wake.set()

    def position(self, file: OutputFile) -> int:
        """How far this file has been copied; all of it, if nobody listens any more."""
        return file.size if self.ended or file.left_by_echo else file.echoed

    @property
    def idle(self) -> bool:
        """Nothing is left to copy."""
        files = list(self._files)
        return self.ended or not (self._lines or any(f.echoed < f.size for f in files))

    def run(self) -> None:
        """The thread."""
        while not self.ended:
            self._wake.wait()
            self._wake.clear()
            try:
                while self._step():
                    pass
            except OSError:  # EPIPE, EIO: nobody listens
                self.ended = True
        for file in list(self._files):
            file.left_by_echo = True

    def _step(self) -> bool:
        if self._lines:
            line = self._lines.popleft()
            self._write(line if self._at_line_start else b"\n" + line)
            return True
        if not self._files:
            return False
        file = self._files[0]
        self._skip(file)
        data = os.pread(file.fd, ECHO_CHUNK_BYTES, file.echoed)
        if file.begin > file.echoed:
            return True  # punched away beneath us: what we read may be a hole
        if data:
            self._write(data)
            file.echoed += len(data)
        elif len(self._files) > 1:
            self._files.popleft()
            file.left_by_echo = True
        else:
            return False
        return True

    def _skip(self, file: OutputFile) -> None:
        skipped = file.begin - file.echoed
        if skipped > 0:
            file.echoed += skipped
            self.skipped_bytes += skipped
            self.report("defib launcher: echo skipped bytes=%d generation=%d" % (skipped, file.generation))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.sink, view) :]
            except BlockingIOError:
                selector = selectors.PollSelector()
                selector.register(self.sink, selectors.EVENT_WRITE)
                selector.select()
        self._at_line_start = data.endswith(b"\n")


class Outputs:
    """The output files of the current generation and, until they are read, of the last few."""

    def __init__(self, folder: str, cap_bytes: int, echo: Dict[str, Echo]) -> None:
        self.folder, self.cap, self.echo = folder, cap_bytes, echo
        self.current: Dict[str, OutputFile] = {}
        self._old: List[Tuple[str, OutputFile]] = []
        self._closing: List[OutputFile] = []
        self.inotify = int(_libc.inotify_init1(IN_NONBLOCK_CLOEXEC))
        self._watches: List[int] = []

    def clean(self) -> None:
        """At our start: the last output of an earlier run is kept once, the rest goes."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        names = sorted(os.listdir(self.folder), key=lambda n: os.lstat(os.path.join(self.folder, n)).st_mtime)
        for name in names:
            path = os.path.join(self.folder, name)
            if re.match(r"g\d+\.(stdout|stderr)\Z", name):
                os.replace(path, os.path.join(self.folder, "previous." + name.rsplit(".", 1)[1]))

    def begin(self, generation: int) -> Dict[str, OutputFile]:
        """New files for a launch; nothing changes if one can't be made. Raises OSError."""
        made: Dict[str, OutputFile] = {}
        try:
            for name in ("stdout", "stderr"):
                made[name] = OutputFile(os.path.join(self.folder, "g%d.%s" % (generation, name)), generation)
        except OSError:
            self.drop(made)
            raise
        return made

    def drop(self, made: Dict[str, OutputFile]) -> None:
        """The launch failed: its files go."""
        for file in made.values():
            file.remove()
            os.close(file.fd)

    def follow(self, made: Dict[str, OutputFile]) -> None:
        """These are the files now; the ones before go as soon as both readers have finished them."""
        self._old += list(self.current.items())
        self.current = made
        for watch in self._watches:
            _libc.inotify_rm_watch(self.inotify, watch)
        self._watches = []
        for name, file in made.items():
            self.echo[name].follow(file)
            if self.inotify >= 0:
                watch = _libc.inotify_add_watch(self.inotify, os.fsencode(file.path), IN_MODIFY)
                self._watches += [watch] if watch >= 0 else []
        self.tidy()

    @property
    def watched(self) -> bool:
        """The kernel tells us of writes; else the files are looked at every OUTPUT_POLL_S."""
        return len(self._watches) == 2

    def drain_notices(self) -> None:
        """Reads the kernel's notices away."""
        try:
            while len(os.read(self.inotify, 65536)) > 60000:
                pass
        except OSError:
            pass

    def look(self) -> bool:
        """Takes both sizes, wakes the echo, gives back blocks; True if something was written."""
        changed = False
        for name, file in self.current.items():
            if file.look():
                changed = True
                self.echo[name].wake()
            file.trim(self.echo[name].position(file), self.cap)
        return changed

    def consumed(self, generation: int, offsets: Dict[str, int]) -> None:
        """The supervisor has read this far."""
        files = list(self.current.items()) + self._old
        for name, file in files:
            if file.generation == generation and name in offsets:
                file.consumed = max(file.consumed, min(offsets[name], file.size))
                file.trim(self.echo[name].position(file), self.cap)
        self.tidy()

    def tidy(self) -> None:
        """Removes old files that both have read, or that are too old to wait for."""
        while len(self._old) > 2 * OLD_OUTPUTS:
            self._retire(*self._old.pop(0))
        for name, file in list(self._old):
            if max(file.consumed, file.begin) >= file.size and self.echo[name].position(file) >= file.size:
                self._old.remove((name, file))
                self._retire(name, file)
        for file in [f for f in self._closing if f.left_by_echo]:
            self._closing.remove(file)
            os.close(file.fd)

    def _retire(self, _name: str, file: OutputFile) -> None:
        file.remove()
        self._closing.append(file)

    def sizes(self) -> Dict[str, int]:
        """For the `output` event."""
        return {name: file.size for name, file in self.current.items()}

    def snapshot(self) -> Message:
        """For the seam."""
        return {name: file.snapshot() for name, file in self.current.items()}


# -------------------------------------------------------------------------------------------------- the tree


class Process:
    """One process of the worker. `gone` once its exit was seen; `proofs` say why it is ours."""

    __slots__ = (
        "cmdline",
        "generation",
        "gone",
        "killed",
        "name",
        "ordered",
        "pid",
        "pidfd",
        "ppid",
        "proofs",
        "root",
        "session",
        "start",
        "state",
    )

    def __init__(self, found: Stat, generation: int, proofs: Set[str], root: bool = False) -> None:
        self.pid, self.start, self.ppid, self.session = found.pid, found.start, found.ppid, found.session
        self.generation, self.proofs, self.root = generation, proofs, root
        self.name, self.state, self.cmdline = found.comm, found.state, ""
        self.pidfd = -1
        self.ordered = self.killed = self.gone = False

    @property
    def identity(self) -> Identity:
        return self.pid, self.start

    @property
    def tracker(self) -> bool:
        """Python's resource tracker removes shared memory once the others are gone: it must be ended last."""
        return not self.root and "multiprocessing.resource_tracker import main;main(" in self.cmdline

    def message(self, cmdline_chars: int = SNAPSHOT_CMDLINE_CHARS) -> Message:
        """For the seam."""
        return {
            "pid": self.pid,
            "start": self.start,
            "ppid": self.ppid,
            "session": self.session,
            "generation": self.generation,
            "root": self.root,
            "name": self.name,
            "cmdline": self.cmdline[:cmdline_chars],
            "state": self.state,
            "proofs": sorted(self.proofs),
        }


class Owned:
    """What proves a process to be the worker's besides its place in the tree."""

    def __init__(self, mark: str, output: str) -> None:
        self.mark = mark.encode()
        """`instance:boot:launcher pid-start:`, without the generation."""
        self.output = os.path.realpath(output) + "/"
        self.folders: Dict[int, str] = {}
        """Generation to its private TMPDIR."""
        self.records: Set[Identity] = set()

    def look(self, pid: int, start: int, guard: Guard) -> Tuple[Set[str], Optional[int]]:
        """The proofs that one process carries, and its generation if one of them tells."""
        proofs: Set[str] = set()
        generation: Optional[int] = None
        environ = guard.call(pid, read_environ, {})
        value = environ.get(MARK.encode(), b"")
        if value.startswith(self.mark) and value[len(self.mark) :].isdigit():
            proofs.add("mark")
            generation = int(value[len(self.mark) :])
        for path in written_files(pid, (self.output, *(folder + "/" for folder in self.folders.values()))):
            if path.startswith(self.output):
                proofs.add("output")
            for number, folder in self.folders.items():
                if path.startswith(folder + "/"):
                    proofs.add("tmpdir")
                    generation = number
        if (pid, start) in self.records:
            proofs.add("recorded")
        return proofs, generation


class Tree:
    """Every process of the worker, found by scanning /proc.

    A scan lists /proc and looks only at pids that were not there before; since we are the subreaper, the parent of
    a new process is either known, new as well, or us. (The kernel's `children` files are a list per *thread*: an
    engine with a thousand threads makes them fifty times dearer than this.) A deep scan looks at everything, and
    into every process for the proofs that need no ancestry.
    """

    def __init__(self, owned: Owned, guard: Guard, limit: int = TRACKED_PROCESSES) -> None:
        self.owned, self.guard, self.limit = owned, guard, limit
        self.me = os.getpid()
        self.generation = 0
        self.root: Optional[Process] = None
        self.alive: Dict[int, Process] = {}
        self.beyond: Dict[int, int] = {}
        """Pid to start of what is ours but beyond the limit, as of the last scan."""
        self.changes = 0
        self.watch: Callable[[Process], None] = lambda process: None
        self.aside_pids: Set[int] = set()
        """The gateway and the supervisor: what is below them isn't the worker's."""
        self.aside_sessions: Set[int] = set()
        self._aside: Dict[int, int] = {}
        self._seen: Set[int] = set()
        self._looked: Dict[Identity, float] = {}

    def set_root(self, found: Stat, generation: int) -> Process:
        """A launch happened."""
        self.generation = generation
        self.root = Process(found, generation, {"descendant", "session"}, root=True)
        self._keep(self.root)
        return self.root

    def forget_seen(self) -> None:
        """The next scan looks at every process again: a pid may have changed hands between two scans."""
        self._seen = set()

    def keep_aside(self, found: Stat) -> None:
        """This process and its descendants are not the worker's."""
        self._aside[found.pid] = found.start

    def scan(self, deep: bool = False) -> List[Process]:
        """The processes that were not known before."""
        listed = pids()
        present = set(listed)
        unseen = listed if deep else [pid for pid in listed if pid not in self._seen]
        stats = {pid: found for pid, found in ((pid, read_stat(pid)) for pid in unseen) if found}
        self._aside = {
            pid: start
            for pid, start in self._aside.items()
            if pid in present and (pid not in stats or stats[pid].start == start)
        }
        # A parent that vanished while we looked: its children are somebody else's now, so they are looked at again.
        vanished = set(unseen) - set(stats)
        orphans = {f.pid for f in stats.values() if f.ppid and (f.ppid in vanished or f.ppid not in present)}
        self._seen = present - orphans - vanished
        self.beyond = {}
        children: Dict[int, List[Stat]] = {}
        for found in stats.values():
            children.setdefault(found.ppid, []).append(found)
        self._set_aside(children)
        new = self._descend(children)
        new += self._of_sessions(stats)
        if deep:
            new += self._look_into(stats, children)
        return new

    def _set_aside(self, children: Dict[int, List[Stat]]) -> None:
        waiting = list(self.aside_pids | set(self._aside))
        while waiting:
            for found in children.get(waiting.pop(), ()):
                if self._aside.get(found.pid) != found.start:
                    self._aside[found.pid] = found.start
                    waiting.append(found.pid)

    def _descend(self, children: Dict[int, List[Stat]]) -> List[Process]:
        new: List[Process] = []
        waiting = [self.me, *self.alive]
        done: Set[int] = set()
        while waiting:
            parent = waiting.pop()
            if parent in done:
                continue
            done.add(parent)
            for found in children.get(parent, ()):
                known = self.find(found.pid, found.start)
                adopted = parent == self.me and not (known is not None and known.root)
                if self._ours_by_place(found, parent):
                    new += self._adopt(found, self.generation, {"reparented" if adopted else "descendant"})
                    waiting.append(found.pid)
        return new

    def _ours_by_place(self, found: Stat, parent: int) -> bool:
        if found.dead or found.pid in self.aside_pids or self._aside.get(found.pid) == found.start:
            return False
        if parent != self.me or self.find(found.pid, found.start) is not None:
            return True
        if found.session in self.aside_sessions or self._carries_aside(found):
            self.keep_aside(found)
            return False
        # As PID 1 we are given everybody's orphans, also those of a person's shell in our container.
        return self.me != 1 or found.session in self.sessions()

    def _carries_aside(self, found: Stat) -> bool:
        return ASIDE.encode() in self.guard.call(found.pid, read_environ, {})

    def sessions(self) -> Set[int]:
        """Sessions that are the worker's. A session's number can't be used again while a member lives."""
        return {process.session for process in self.alive.values()} - {0}  # 0: its leader is in another container

    def _of_sessions(self, stats: Dict[int, Stat]) -> List[Process]:
        own = self.sessions()
        new: List[Process] = []
        for found in stats.values():
            if found.session in own and found.pid not in self._aside and found.pid != self.me and not found.dead:
                new += self._adopt(found, self.generation, {"session"})
        return new

    def _look_into(self, stats: Dict[int, Stat], children: Dict[int, List[Stat]]) -> List[Process]:
        at = now()
        self._looked = {k: t for k, t in self._looked.items() if at - t < LOOK_AGAIN_S}
        new: List[Process] = []
        for found in stats.values():
            identity = (found.pid, found.start)
            skip = identity in self._looked or found.pid in self._aside or found.pid in self.beyond
            if skip or found.dead or found.pid == self.me:
                continue
            self._looked[identity] = at
            proofs, generation = self.owned.look(found.pid, found.start, self.guard)
            if proofs:
                new += self._adopt(found, generation or self.generation, proofs)
        return new + (self._descend(children) if new else [])

    def _adopt(self, found: Stat, generation: int, proofs: Set[str]) -> List[Process]:
        known = self.alive.get(found.pid)
        if known is not None and known.start == found.start:
            known.ppid, known.session = found.ppid, found.session
            known.proofs |= proofs
            return []
        if known is not None or len(self.alive) >= self.limit:  # the end of `known` is yet to be noticed
            if known is None:
                self.beyond[found.pid] = found.start
            self._seen.discard(found.pid)
            return []
        process = Process(found, generation, proofs)
        self._keep(process)
        return [process]

    def _keep(self, process: Process) -> None:
        process.cmdline = self.guard.call(process.pid, read_cmdline, "")
        self.alive[process.pid] = process
        self.changes += 1
        self.watch(process)

    def refresh(self, thorough: bool = True) -> List[Process]:
        """Takes states, parents and names again (vLLM renames its processes later); returns those that ended.

        Not `thorough`: a command line is only read again where the short name changed.
        """
        ended: List[Process] = []
        for process in list(self.alive.values()):
            found = read_stat(process.pid)
            if found is None or found.start != process.start or found.dead:
                ended.append(process)
                continue
            again = thorough or found.comm != process.name
            process.name, process.state = found.comm, found.state
            process.ppid, process.session = found.ppid, found.session
            if again and found.state != "D" and not process.ordered:
                text = self.guard.call(process.pid, read_cmdline, process.cmdline)
                process.cmdline = text or process.cmdline
        return ended

    def ended(self, process: Process) -> None:
        """It is gone: its pid may be given to somebody else from now on."""
        process.gone = True
        self.changes += 1
        if self.alive.get(process.pid) is process:
            del self.alive[process.pid]
        self._seen.discard(process.pid)

    def find(self, pid: int, start: int) -> Optional[Process]:
        """A living process of the tree."""
        process = self.alive.get(pid)
        return process if process is not None and process.start == start else None

    def identities(self) -> List[List[int]]:
        """(pid, start, session, generation) of each, for the record on disk."""
        return [[p.pid, p.start, p.session, p.generation] for p in self.alive.values()]


def kill_pass(tree: Tree, spare_trackers: bool) -> bool:
    """SIGKILL to everything, again until a scan finds nobody new; True if (but for trackers) nobody is left."""
    for _ in range(KILL_PASSES):
        for process in list(tree.alive.values()):
            if not process.killed and not (spare_trackers and process.tracker):
                process.ordered = process.killed = True
                send_signal(process.pid, process.start, signal.SIGKILL, process.pidfd)
        for pid, start in tree.beyond.items():
            send_signal(pid, start, signal.SIGKILL)
        if not tree.scan() and not tree.beyond:
            break
    left = [process for process in tree.alive.values() if not (spare_trackers and process.tracker)]
    return not left and not tree.beyond


# ------------------------------------------------------------------------------------------------- launching


class Config:
    """The instance's configuration, checked once. Raises ValueError naming the key."""

    def __init__(self, data: bytes) -> None:
        try:
            values = json.loads(data.decode())
        except ValueError as error:
            raise ValueError("not JSON: %s" % error) from None
        if not isinstance(values, dict):
            raise ValueError("expected an object")
        self.values: Message = values
        if values.get("version") != CONFIG_VERSION:
            raise ValueError("version: expected %d, found %r" % (CONFIG_VERSION, values.get("version")))
        self.instance: str = self._take("instance", str)
        self.state: str = os.path.abspath(self._take("state", str))
        self.runtime: str = os.path.abspath(self._take("runtime", str))
        self.argv: List[str] = self._texts("argv")
        if not self.argv:
            raise ValueError("argv: is empty, there is no command to run")
        self.executable: Optional[str] = self._take("executable", str, None)
        self.cwd: Optional[str] = self._take("cwd", str, None)
        self.env_set: Dict[str, str] = self._take("env_set", dict, {})
        if not all(isinstance(value, str) for value in self.env_set.values()):
            raise ValueError("env_set: expected strings as values")
        self.env_unset = set(self._texts("env_unset"))
        self.listen: Optional[Message] = self._take("listen", dict, None)
        port = self.listen.get("port") if self.listen is not None else 0
        if type(port) is not int or not 0 <= port <= 65535:
            raise ValueError("listen.port: expected 0 to 65535, found %r" % (port,))
        self.upstream: Message = self._take("upstream", dict, {})
        self.allow_args = set(self._texts("allow_args"))
        self.allow_env: Dict[str, List[str]] = self._take("allow_env", dict, {})
        self.fresh_env: Dict[str, str] = self._take("fresh_env", dict, {})
        self.caches: Dict[str, List[Dict[str, str]]] = self._take("caches", dict, {})
        for name, places in self.caches.items():
            if not isinstance(places, list) or not all(isinstance(place, dict) for place in places):
                raise ValueError("caches.%s: expected a list of {root, glob}" % name)
        self.gateway = self._texts("gateway")
        self.supervisor = self._texts("supervisor")
        self._limits: Message = self._take("limits", dict, {})
        self.drain_s = self.limit("drain_s", DRAIN_S)
        self.term_s = self.limit("term_s", TERM_S)
        self.output_cap_bytes = int(self.limit("output_cap_bytes", OUTPUT_CAP_BYTES))
        self.tracked_processes = int(self.limit("tracked_processes", TRACKED_PROCESSES))

    def _take(self, key: str, kind: type, *otherwise: Any) -> Any:
        value = self.values.get(key)
        if value is None and otherwise:
            return otherwise[0]
        if not isinstance(value, kind):
            raise ValueError("%s: expected %s, found %r" % (key, kind.__name__, value))
        return value

    def _texts(self, key: str) -> List[str]:
        values: List[Any] = self._take(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise ValueError("%s: expected a list of strings" % key)
        return values

    def limit(self, key: str, otherwise: float) -> float:
        """A number from `limits`."""
        value = self._limits.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ValueError("limits.%s: expected a number that is not negative, found %r" % (key, value))
        return float(value)


class Delta:
    """An edit of the command that we were given. Raises Refusal if it goes beyond what the configuration allows."""

    def __init__(self, values: Message, config: Config) -> None:
        self.drop = [n for n in self._list(values, "drop", int) if self._check_index(n, config)]
        self.append: List[str] = self._list(values, "append", str)
        self.unset: List[str] = self._list(values, "unset", str)
        self.fresh: List[str] = self._list(values, "fresh", str)
        env = values.get("env") or {}
        if not isinstance(env, dict):
            raise Refusal("bad_request", "delta.env: expected an object")
        self.env: Dict[str, str] = env
        self._check("append", self.append, config.allow_args)
        self._check("unset", self.unset, config.allow_env)
        self._check("fresh", self.fresh, config.fresh_env)
        for name, value in env.items():
            if value not in config.allow_env.get(name, []):
                raise Refusal("refused", "delta.env: %s=%s is not allowed here" % (name, value))

    @staticmethod
    def _list(values: Message, key: str, kind: type) -> List[Any]:
        found = values.get(key) or []
        if not isinstance(found, list) or any(type(item) is not kind for item in found):
            raise Refusal("bad_request", "delta.%s: expected a list of %s" % (key, kind.__name__))
        return found

    @staticmethod
    def _check_index(index: int, config: Config) -> bool:
        if not 1 <= index < len(config.argv):
            raise Refusal("refused", "delta.drop: %d is not an argument of the command" % index)
        return True

    @staticmethod
    def _check(key: str, found: List[str], allowed: Iterable[str]) -> None:
        for item in found:
            if item not in allowed:
                raise Refusal("refused", "delta.%s: %s is not allowed here" % (key, item))

    def message(self) -> Message:
        """For the seam."""
        values = {"drop": self.drop, "append": self.append, "env": self.env, "unset": self.unset}
        return dict(values, fresh=self.fresh)


class Leavings:
    """What a generation may leave behind: its private folder and socket, its shared memory, its fresh caches."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.tmpdir, self.uds = "", ""
        self.tmp_lock = -1
        self.fresh: List[str] = []
        self.shm: Set[Tuple[str, int]] = set()
        self.shm_before = shm_listing()

    def saw_shared_memory(self, found: Set[Tuple[str, int]]) -> bool:
        """Segments that a process of this generation uses and that were not there before the launch."""
        more = found - self.shm_before - self.shm
        self.shm |= more
        return bool(more)

    def message(self) -> Message:
        """For the record on disk."""
        return {"tmpdir": self.tmpdir, "uds": self.uds, "shm": sorted(self.shm), "fresh": self.fresh}


class Prepared:
    """A launch, ready to be executed."""

    def __init__(self, argv: List[str], env: Dict[str, str], address: Optional[str], leavings: Leavings) -> None:
        self.argv, self.env, self.address, self.leavings = argv, env, address, leavings


def prepare(config: Config, generation: int, delta: Delta, mark: str) -> Prepared:
    """Makes the folders and chooses the address of a launch. Raises OSError."""
    leavings = Leavings(generation)
    leavings.tmpdir = private_folder(generation)
    leavings.tmp_lock = os.open(leavings.tmpdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(leavings.tmp_lock, fcntl.LOCK_SH)  # systemd-tmpfiles spares what is locked from its ageing
    argv = [a for i, a in enumerate(config.argv) if i not in delta.drop] + delta.append
    env = worker_environment(config, leavings.tmpdir)
    address: Optional[str] = config.upstream.get("address")
    places = {}
    if any("@DEFIB_PORT@" in text for text in [*argv, *env.values()]):
        places["@DEFIB_PORT@"] = str(free_port())
        address = "127.0.0.1:" + places["@DEFIB_PORT@"]
    if any("@DEFIB_UDS@" in text for text in [*argv, *env.values()]):
        leavings.uds = places["@DEFIB_UDS@"] = fresh_socket_path(config.runtime, leavings.tmpdir, generation)
        address = "unix:" + leavings.uds
    for place, value in places.items():
        argv = [text.replace(place, value) for text in argv]
        env = {name: text.replace(place, value) for name, text in env.items()}
    for name in delta.fresh:
        folder = os.path.join(config.state, "fresh", "g%d-%s-%s" % (generation, name, os.urandom(4).hex()))
        os.makedirs(folder, mode=0o700)
        leavings.fresh.append(folder)
        env[config.fresh_env[name]] = folder
    env.update(delta.env)
    for name in delta.unset:
        env.pop(name, None)
    env[MARK] = mark
    return Prepared(argv, env, address, leavings)


def private_folder(generation: int) -> str:
    """A TMPDIR with a short path: engines put sockets in there, whose paths may have 107 bytes."""
    bases = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"]
    base = next((b for b in bases if b.startswith("/") and len(b) <= 32 and os.access(b, os.W_OK)), "/tmp")
    path = os.path.join(os.path.realpath(base), "defib-%s-g%d" % (os.urandom(4).hex(), generation))
    os.mkdir(path, 0o700)
    return path


def fresh_socket_path(runtime: str, tmpdir: str, generation: int) -> str:
    """Where the worker may make its socket; nothing is there."""
    path = os.path.join(runtime, "w%d.sock" % generation)
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        path = os.path.join(tmpdir, "w.sock")
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    return path


def free_port() -> int:
    """A free loopback port, below the range from which the kernel serves outgoing connections: the worker binds it
    half a minute later, and until then nobody may be given it."""
    fields = (slurp("/proc/sys/net/ipv4/ip_local_port_range") or b"32768 60999").split()
    lowest = 20000 if int(fields[0]) > 22000 else 1024
    for _ in range(64):
        port = lowest + int.from_bytes(os.urandom(4), "big") % max(1, int(fields[0]) - lowest)
        if port_is_free("127.0.0.1", port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Can a server bind it now, as servers do (SO_REUSEADDR)?"""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def worker_environment(config: Config, tmpdir: str) -> Dict[str, str]:
    """Our own, less what is ours or our service manager's, plus what the configuration sets."""
    dropped = ("DEFIB_", "WATCHDOG_", "LISTEN_")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(dropped) and name != "NOTIFY_SOCKET" and name not in config.env_unset
    }
    env["TMPDIR"] = tmpdir
    if "PYTHONPYCACHEPREFIX" not in env and needs_bytecode_folder(config.executable or config.argv[0], env):
        folder = os.path.join(config.state, "pycache")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        env["PYTHONPYCACHEPREFIX"] = folder
        env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.update(config.env_set)
    return env


def needs_bytecode_folder(executable: str, env: Dict[str, str]) -> bool:
    """No bytecode lies beside the packages of the worker's Python, and it may write none (vLLM: 55 s to ready
    instead of 24 s). Where bytecode is there, another folder would only make it compile everything again."""
    python = worker_python(executable, env)
    folders = package_folders(python) if python else []
    packages = [p for folder in folders for p in glob.glob(os.path.join(glob.escape(folder), "*", "__init__.py"))]
    packages = sorted(packages)[:PYTHON_PACKAGES_LOOKED_AT]
    if not packages:
        return False
    compiled = [p for p in packages if glob.glob(os.path.join(glob.escape(os.path.dirname(p)), "__pycache__", "*.pyc"))]
    if 2 * len(compiled) >= len(packages):
        return False
    writable = all(os.access(folder, os.W_OK) for folder in folders)
    return bool(env.get("PYTHONDONTWRITEBYTECODE")) or not writable


def worker_python(executable: str, env: Dict[str, str]) -> Optional[str]:
    """The interpreter that the command will run in: itself, its `#!` line's, or else `python3` on the PATH."""
    path = which(executable, env)
    if path and os.path.basename(path).startswith("python"):
        return path
    first = (slurp(path, 512) or b"").split(b"\n", 1)[0].decode("utf-8", "replace") if path else ""
    words = first[2:].split() if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if words and os.path.basename(words[0]).startswith("python"):
        return which(words[0], env)
    return which("python3", env)


def which(name: str, env: Dict[str, str]) -> Optional[str]:
    """The file that a command's name means."""
    if "/" in name:
        return name if os.access(name, os.X_OK) else None
    for folder in env.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder or ".", name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def package_folders(python: str) -> List[str]:
    """Where the packages of an interpreter lie: beside it (an environment), or beside what it links to."""
    for path in (python, os.path.realpath(python)):
        prefix = glob.escape(os.path.dirname(os.path.dirname(path)))
        for pattern in (
            "lib*/python3*/site-packages",
            "local/lib/python3*/dist-packages",
            "lib/python3*/dist-packages",
        ):
            folders = [f for f in glob.glob(os.path.join(prefix, pattern)) if os.listdir(f)]
            if folders:
                return folders
    return []


class Starter:
    """Starts our direct children. Each has its own session (a terminal's ^C is for us to handle), nothing of ours
    open but what is named, and dies with us."""

    def __init__(self) -> None:
        self.files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = self.files_limit
        wanted = TRACKED_PROCESSES + 1024
        if soft != resource.RLIM_INFINITY and soft < wanted:
            more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, more), hard))

    def start(self, argv: List[str], env: Dict[str, str], **options: Any) -> Stat:
        """`options` are those of Popen. Raises OSError if it can't be executed."""
        parent, files_limit = os.getpid(), self.files_limit

        def prepare_child() -> None:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # we died between fork and prctl
                os._exit(1)
            resource.setrlimit(resource.RLIMIT_NOFILE, files_limit)

        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; ours hold no lock that the child needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                child = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare_child, **options
                )
            except (subprocess.SubprocessError, ValueError) as error:  # a zero byte in an argument, for instance
                raise OSError(errno.EINVAL, str(error), argv[0]) from None
        child.returncode = 0  # we reap it ourselves, with everybody else
        found = read_stat(child.pid)
        if found is None:
            raise OSError(errno.ESRCH, "vanished at once", argv[0])
        return found


# --------------------------------------------------------------------------------------- caches and sweeping


def clear_cache(places: List[Dict[str, str]], incident: str, config: Config) -> Message:
    """Moves every folder that a cache's places name aside, by rename; what can't be moved safely stays."""
    moved: List[Message] = []
    skipped: List[Message] = []
    touched: Set[str] = set()
    for place in places:
        root = os.path.realpath(str(place.get("root", "")))
        pattern = str(place.get("glob", ""))
        if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
            skipped.append({"path": root, "why": "the pattern %r leaves its root" % pattern})
            continue
        found = glob.glob(os.path.join(glob.escape(root), pattern))
        if not found:
            skipped.append({"path": os.path.join(root, pattern), "why": "nothing is there"})
        for path in sorted(found)[:CLEAR_ENTRIES]:
            why = unsafe_to_move(root, path)
            if not why:
                why = move_aside(root, path, incident, moved, touched)
            if why:
                skipped.append({"path": path, "why": why})
    for folder in touched:
        prune_quarantine(folder, config)
    return {"moved": moved, "skipped": skipped}


def unsafe_to_move(root: str, path: str) -> str:
    """Why a path must stay where it is, or nothing."""
    inside = os.path.relpath(path, root).split("/")
    if ".." in inside or inside == ["."] or QUARANTINE in inside:
        return "outside of %s" % root
    walked = root
    for part in inside:
        walked = os.path.join(walked, part)
        if os.path.islink(walked):
            return "%s is a symbolic link" % walked
    for owned in (root, path):
        uid = os.lstat(owned).st_uid
        if uid != os.geteuid():
            return "%s belongs to uid %d" % (owned, uid)
    return ""


def move_aside(root: str, path: str, incident: str, moved: List[Message], touched: Set[str]) -> str:
    """Renames into `.defib-quarantine` on the same filesystem; a mount point is emptied entry by entry."""
    try:
        parent = os.path.dirname(path)
        device = os.lstat(path).st_dev
        entries, size = measure(path)
        if device != os.lstat(parent).st_dev:
            target = new_quarantine(path, incident)
            os.mkdir(target, 0o700)
            for name in os.listdir(path):
                if name != QUARANTINE:
                    os.rename(os.path.join(path, name), os.path.join(target, name))
        else:
            target = new_quarantine(root if os.lstat(root).st_dev == device else parent, incident)
            os.rename(path, target)
            os.utime(target)  # its age counts from now
    except OSError as error:
        return "%s: %s" % (error.filename or path, error.strerror)
    touched.add(os.path.dirname(target))
    moved.append({"from": path, "to": target, "bytes": size, "entries": entries})
    return ""


def new_quarantine(folder: str, incident: str) -> str:
    """A name that nobody has, in a folder that is there."""
    base = os.path.join(folder, QUARANTINE)
    if os.path.islink(base):
        raise OSError(errno.ELOOP, "is a symbolic link", base)
    os.makedirs(base, mode=0o700, exist_ok=True)
    number = 0
    while os.path.lexists(os.path.join(base, "%s-%d" % (incident, number))):
        number += 1
    return os.path.join(base, "%s-%d" % (incident, number))


def measure(path: str) -> Tuple[int, int]:
    """(entries, bytes) below a path."""
    if not os.path.isdir(path) or os.path.islink(path):
        return 1, os.lstat(path).st_size
    entries = size = 0
    for folder, _, names in os.walk(path):
        entries += len(names)
        for name in names:
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                pass
    return entries, size


def prune_quarantine(folder: str, config: Config) -> None:
    """Keeps the newest, and of the others as many, as large and as old as the limits say."""
    count = int(config.limit("quarantine_count", QUARANTINE_COUNT))
    left_bytes = config.limit("quarantine_bytes", QUARANTINE_BYTES)
    oldest = time.time() - config.limit("quarantine_age_s", QUARANTINE_AGE_S)
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    paths.sort(key=lambda path: os.lstat(path).st_mtime, reverse=True)
    for index, path in enumerate(paths):
        left_bytes -= measure(path)[1]
        if index and (index >= count or left_bytes < 0 or os.lstat(path).st_mtime < oldest):
            remove_tree(path)


def remove_tree(path: str) -> bool:
    """Removes a file or a folder, never what a link points to; True if nothing is left."""
    if os.path.isdir(path) and not os.path.islink(path):
        for folder, folders, names in os.walk(path, topdown=False):
            for name in names + [f for f in folders if os.path.islink(os.path.join(folder, f))]:
                attempt(os.unlink, os.path.join(folder, name))
            attempt(os.rmdir, folder)
    else:
        attempt(os.unlink, path)
    return not os.path.lexists(path)


def attempt(act: Callable[[str], None], path: str) -> None:
    """For removals: what stays is seen afterwards."""
    try:
        act(path)
    except OSError:
        pass


def leftover_segments(shm: Iterable[Tuple[str, int]], guard: Guard) -> List[str]:
    """Those of a dead generation's segments that are the same file still, ours, and used by nobody."""
    recorded, found = set(shm), []
    candidates = [item for item in shm_listing() if item in recorded]
    if not candidates:
        return []
    used: Set[Tuple[str, int]] = set()
    for pid in pids():  # who doesn't answer may use them all
        used |= guard.call(pid, shared_memory, set(candidates))
    for name, inode in candidates:
        path = os.path.join("/dev/shm", name)
        try:
            if (name, inode) not in used and os.lstat(path).st_uid == os.geteuid():
                found.append(path)
        except OSError:
            continue
    return found


def sweepable(leavings: Message, guard: Guard) -> List[str]:
    """The paths to remove once a generation is dead."""
    shm = [(str(name), int(inode)) for name, inode in leavings.get("shm", ())]
    paths = leftover_segments(shm, guard)
    paths += [p for p in (leavings.get("uds"), leavings.get("tmpdir")) if p and os.path.lexists(p)]
    return paths


class Jobs:
    """A thread for what may take long (moving and removing files), one job after the other."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asked: "SimpleQueue[Tuple[Callable[[], Any], Callable[[Any], None]]]" = SimpleQueue()
        self._done: Deque[Tuple[Callable[[Any], None], Any]] = deque()
        self._running = False

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """`then` gets the result, or the OSError, in the main thread."""
        if not self._running:
            start_thread("jobs", self._run)
            self._running = True
        self._asked.put((work, then))

    def _run(self) -> None:
        while True:
            work, then = self._asked.get()
            try:
                result: Any = work()
            except Exception as error:  # a job must not end the thread; its asker gets the error
                result = error
            self._done.append((then, result))
            self._wake()

    def deliver(self) -> None:
        """In the main thread, when woken."""
        while self._done:
            then, result = self._done.popleft()
            then(result)


# --------------------------------------------------------------------------------- what an earlier run left


class Earlier:
    """The record on disk of an earlier run of this instance, and the processes that it left."""

    def __init__(self, path: str, config: Config, guard: Guard) -> None:
        self.config, self.guard = config, guard
        self.boot, self.namespace = boot_id(), pid_namespace("self")
        self.record: Message = {}
        self.leavings: List[Message] = []
        self._identities: Set[Identity] = set()
        try:
            self._read(slurp(path, RECORD_BYTES) or b"{}")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            say_directly("the record of an earlier run is unusable path=%s error=%r" % (path, error))
        self._folders = [os.path.join(os.path.realpath(config.state), "output") + "/"]
        self._folders += [str(item["tmpdir"]) + "/" for item in self.leavings if item.get("tmpdir")]
        self._strangers: Set[Identity] = set()

    def _read(self, data: bytes) -> None:
        record = json.loads(data.decode())
        self.leavings = [check_leavings(item, self.config) for item in record.get("leavings", ())]
        if record.get("boot") == self.boot and record.get("pidns") == self.namespace:
            self._identities = {(int(p[0]), int(p[1])) for p in record.get("processes", ())}
            pid, start = record.get("launcher", (0, 0))
            self.record = {"launcher": (int(pid), int(start))}

    def owner_alive(self) -> Optional[int]:
        """The pid of the launcher that wrote the record, if it lives: then nothing here is ours to touch."""
        pid, start = self.record.get("launcher", (0, 0))
        found = read_stat(pid) if pid else None
        return found.pid if found is not None and found.start == start and not found.dead else None

    def processes(self) -> List[Process]:
        """Those that are proven to be of this instance, and whose owner is dead; with all that descends from them."""
        stats = [found for found in (read_stat(pid) for pid in pids()) if found and not found.dead]
        ours: Dict[int, Process] = {}
        for found in stats:
            identity = (found.pid, found.start)
            if identity in self._strangers or found.pid == os.getpid():
                continue
            proofs = self._proofs(found)
            if proofs:
                ours[found.pid] = Process(found, 0, proofs)
                ours[found.pid].cmdline = self.guard.call(found.pid, read_cmdline, "")
            else:
                self._strangers.add(identity)
        # A session whose member is proven can't have been taken over: its number is in use since.
        sessions = {p.session for p in ours.values() if p.proofs & {"mark", "recorded"}} - {0}
        for found in sorted(stats, key=lambda f: f.start):
            related = found.ppid in ours or found.session in sessions
            if related and found.pid not in ours and found.pid != os.getpid():
                ours[found.pid] = Process(found, 0, {"descendant"})
                ours[found.pid].cmdline = self.guard.call(found.pid, read_cmdline, "")
        return list(ours.values())

    def _proofs(self, found: Stat) -> Set[str]:
        proofs = {"recorded"} if (found.pid, found.start) in self._identities else set()
        if pid_namespace(str(found.pid)) != self.namespace:
            return proofs  # in a container of its own: its owner may live there, where we can't see it
        environ = self.guard.call(found.pid, read_environ, {})
        parts = environ.get(MARK.encode(), b"").decode("utf-8", "replace").rsplit(":", 3)
        if len(parts) == 4 and parts[:2] == [self.config.instance, self.boot] and self._dead(parts[2]):
            proofs.add("mark")
        if any(True for _ in written_files(found.pid, tuple(self._folders))):
            proofs.add("output")
        return proofs

    @staticmethod
    def _dead(owner: str) -> bool:
        pid, _, start = owner.partition("-")
        if not (pid.isdigit() and start.isdigit()):
            return False
        found = read_stat(int(pid))
        return found is None or found.start != int(start) or found.dead

    def end(self, say: Callable[[str], None]) -> List[Process]:
        """Kills them, the resource trackers last, and sweeps; returns those that survive SIGKILL for KILL_S."""
        deadline, trackers_at = now() + KILL_S, None
        told: Set[Identity] = set()
        left = self.processes()
        while left and now() < deadline:
            others = [p for p in left if not p.tracker]
            if not others:
                trackers_at = trackers_at or now() + TRACKER_S
            for process in others or (left if trackers_at and now() >= trackers_at else []):
                if process.identity not in told:
                    told.add(process.identity)
                    facts = (process.pid, process.name, ",".join(sorted(process.proofs)))
                    say("leftover of an earlier run killed pid=%d name=%s proofs=%s" % facts)
                send_signal(process.pid, process.start, signal.SIGKILL)
            time.sleep(STOP_POLL_S)
            left = self.processes()
        if not left:
            self._sweep(say)
        return left

    def _sweep(self, say: Callable[[str], None]) -> None:
        for leavings in self.leavings:
            for path in [*sweepable(leavings, self.guard), *leavings["fresh"]]:
                if os.path.lexists(path):
                    say("leftover of an earlier run removed path=%s ok=%s" % (path, remove_tree(path)))


def check_leavings(item: Message, config: Config) -> Message:
    """One generation's part of the record, less what we can't have made. Raises ValueError and its kin."""
    tmpdir, uds = str(item.get("tmpdir", "")), str(item.get("uds", ""))
    fresh = os.path.join(config.state, "fresh")
    return {
        "tmpdir": tmpdir if PRIVATE_FOLDER.search(tmpdir) else "",
        "uds": uds if os.path.dirname(uds) in (config.runtime, tmpdir) and uds.endswith(".sock") else "",
        "shm": [(str(name), int(inode)) for name, inode in item.get("shm", ()) if "/" not in str(name)],
        "fresh": [str(path) for path in item.get("fresh", ()) if os.path.dirname(str(path)) == fresh],
    }


def pid_namespace(pid: str) -> str:
    """Its name, or nothing if we may not know."""
    try:
        return os.readlink("/proc/%s/ns/pid" % pid)
    except OSError:
        return ""


def write_whole(path: str, data: bytes) -> None:
    """Replaces a file in one step. Not synced: after a loss of power nothing in it means anything any more."""
    temporary = path + ".new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


# ------------------------------------------------------------------------------------- gateway and supervisor


class Companion:
    """The gateway or the supervisor: started again whenever it ends, after a pause that doubles."""

    def __init__(self, name: str, command: List[str]) -> None:
        self.name, self.command = name, command
        self.pid = self.start = 0
        self.restarts = 0
        self.started_at = 0.0
        self.backoff_s = BACKOFF_FIRST_S

    @property
    def wanted(self) -> bool:
        return bool(self.command)

    def started(self, found: Stat) -> None:
        """It runs."""
        self.pid, self.start, self.started_at = found.pid, found.start, now()

    def ended(self) -> float:
        """It ended, or could not be started: seconds until the next try."""
        if self.pid and now() - self.started_at >= STEADY_S:
            self.backoff_s = BACKOFF_FIRST_S
        pause, self.backoff_s = self.backoff_s, min(BACKOFF_LAST_S, self.backoff_s * 2)
        self.pid = self.start = 0
        self.restarts += 1
        return pause

    def signal(self, number: int) -> None:
        """If it lives."""
        if self.pid:
            send_signal(self.pid, self.start, number)


def unfinished_exchanges(path: str, pid: int, start: int) -> int:
    """How many exchanges the run of a gateway began and did not end, from its journal.

    A line is `J <pid>-<start>` (a run of the gateway begins), `B <id>` or `E <id> <outcome>`; a torn one is ignored.
    """
    begun: Set[bytes] = set()
    ours = False
    header = b"%d-%d" % (pid, start)
    try:
        with open(path, "rb") as journal:
            journal.seek(max(0, os.fstat(journal.fileno()).st_size - JOURNAL_BYTES))
            for line in journal:
                fields = line.split()
                if not line.endswith(b"\n") or len(fields) < 2:
                    continue
                if fields[0] == b"J":
                    ours, begun = fields[1] == header, set()
                elif ours and fields[0] == b"B":
                    begun.add(fields[1])
                elif ours and fields[0] == b"E":
                    begun.discard(fields[1])
    except OSError:
        return 0
    return len(begun) if ours else 0


def listen_on(host: str, port: int) -> socket.socket:
    """The socket that clients connect to, ours for the instance's lifetime. Exits if it can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        fail(EXIT_CONFIG, "cannot listen on %s port %d: %s" % (host, port, error))
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        where = "%s port %d" % (host, port)
        if error.errno == errno.EADDRINUSE:
            fail(EXIT_BUSY, "%s is in use by %s; stop that, or choose another port" % (where, port_holder(port)))
        fail(EXIT_CONFIG, "cannot listen on %s: %s" % (where, error.strerror))
    return listener


def port_holder(port: int) -> str:
    """Who listens on a port, as far as /proc shows it to us."""
    inodes: Set[str] = set()
    for name in ("tcp", "tcp6"):
        for line in (slurp("/proc/net/" + name, MAPS_BYTES) or b"").decode().split("\n")[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add("socket:[%s]" % fields[9])
    for pid in pids():
        try:
            for name in os.listdir("/proc/%d/fd" % pid):
                if os.readlink("/proc/%d/fd/%s" % (pid, name)) in inodes:
                    return "pid %d (%s)" % (pid, read_cmdline(pid)[:200])
        except OSError:
            continue
    return "a process that we may not see"


# -------------------------------------------------------------------------------------------------- the seam


def encode(message: Message) -> bytes:
    """One line. A tree too long for a line loses its command lines, then its tail."""
    data = json.dumps(message, separators=(",", ":")).encode()
    tree = message.get("tree")
    if len(data) < MAX_LINE_BYTES or not isinstance(tree, list):
        return data + b"\n"
    if any(process.get("cmdline") for process in tree):
        return encode(dict(message, tree=[dict(process, cmdline="") for process in tree]))
    return encode(dict(message, tree=tree[: len(tree) // 2], tree_truncated=True))


class Client:
    """One connection: what came and is no whole line yet, what is to go and did not fit."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.came = bytearray()
        self.to_go = bytearray()
        self.greeted = False
        self.closing = False


class Seam:
    """The server on `launcher.sock`. `handle(client, command)` is called for commands of a greeted client."""

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        self.path, self.selector = path, selector
        self.clients: Set[Client] = set()
        self.epoch = 0
        self.greet: Callable[[], List[Message]] = list
        self.handle: Callable[[Client, Message], None] = lambda client, command: None
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            fail(EXIT_CONFIG, "the path of the socket is longer than %d bytes: %s" % (MAX_SOCKET_PATH_BYTES, path))
        attempt(os.unlink, path)  # the instance's lock is held: nobody listens there
        before = os.umask(0o177)
        try:
            self.listener.bind(path)
        except OSError as error:
            fail(EXIT_CANNOT_WRITE, "cannot make the socket %s: %s" % (path, error.strerror))
        finally:
            os.umask(before)
        self.listener.listen(16)
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", credentials)[1]
        if uid not in (0, os.geteuid()) or len(self.clients) >= MAX_CLIENTS:
            connection.close()
            return
        connection.setblocking(False)
        client = Client(connection)
        self.clients.add(client)
        self.selector.register(connection, selectors.EVENT_READ, lambda mask: self._ready(client, mask))
        for message in self.greet():
            self.send(client, message)

    def send(self, client: Client, message: Message) -> None:
        """Queues a line; cuts off a reader that is too slow."""
        self._put(client, encode(message))

    def broadcast(self, message: Message) -> None:
        """An event, to everyone."""
        if self.clients:
            data = encode(message)
            for client in list(self.clients):
                self._put(client, data)

    def _put(self, client: Client, data: bytes) -> None:
        if client not in self.clients or client.closing:
            return
        client.to_go += data
        if len(client.to_go) > MAX_BACKLOG_BYTES:
            self.close(client)
        elif len(client.to_go) == len(data):
            self._flush(client)

    def _flush(self, client: Client) -> None:
        try:
            while client.to_go:
                del client.to_go[: client.connection.send(client.to_go)]
        except BlockingIOError:
            pass
        except OSError:
            self.close(client)
            return
        if client.closing and not client.to_go:
            self.close(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_go else 0)
        key = self.selector.get_key(client.connection)
        if key.events != events:
            self.selector.modify(client.connection, events, key.data)

    def close(self, client: Client) -> None:
        """At once."""
        if client in self.clients:
            self.clients.discard(client)
            self.selector.unregister(client.connection)
            client.connection.close()

    def _ready(self, client: Client, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(client)
        if mask & selectors.EVENT_READ and client in self.clients:
            self._read(client)

    def _read(self, client: Client) -> None:
        try:
            data = client.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(client)
            return
        client.came += data
        while client in self.clients and not client.closing:
            end = client.came.find(b"\n")
            if max(end, len(client.came) if end < 0 else 0) >= MAX_LINE_BYTES:
                self.close(client)
            if end < 0 or client not in self.clients:
                return
            line = bytes(client.came[:end])
            del client.came[: end + 1]
            self._line(client, line)

    def _line(self, client: Client, line: bytes) -> None:
        try:
            message = json.loads(line.decode())
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.close(client)
        elif message.get("type") == "hello":
            self._hello(client, message)
        elif message.get("type") == "command":
            self._command(client, message)

    def _hello(self, client: Client, message: Message) -> None:
        epoch = message.get("epoch", 0)
        why = ""
        if message.get("protocol") != PROTOCOL:
            why = "protocol %d is spoken here" % PROTOCOL
        elif type(epoch) is not int or epoch < self.epoch:
            why = "stale_epoch: %r is over, %d is current" % (epoch, self.epoch)
        if why:
            self.send(client, {"type": "refused", "reason": why})
            client.closing = True
            self._flush(client)
            return
        self.epoch = epoch
        client.greeted = True

    def _command(self, client: Client, message: Message) -> None:
        try:
            if not client.greeted:
                raise Refusal("refused", "say hello first")
            epoch = message.get("epoch")
            if type(epoch) is not int or epoch < self.epoch:
                raise Refusal("stale_epoch", "epoch %r is over, %d is current" % (epoch, self.epoch))
            self.epoch = epoch
            self.handle(client, message)
        except Refusal as refusal:
            self.refuse(client, message, refusal)

    def reply(self, client: Client, command: Message, fields: Message) -> None:
        """It is done."""
        self.send(client, dict({"type": "reply", "id": command.get("id"), "ok": True}, **fields))

    def refuse(self, client: Client, command: Message, refusal: Refusal) -> None:
        """It is not."""
        fields = {"type": "reply", "id": command.get("id"), "ok": False}
        self.send(client, dict(fields, error=refusal.error, message=refusal.message))


def integer(command: Message, key: str) -> int:
    """An argument. Raises Refusal."""
    value = command.get(key)
    if type(value) is not int:
        raise Refusal("bad_request", "%s: expected an integer, found %r" % (key, value))
    return value


def identities(command: Message, key: str) -> List[Identity]:
    """A list of [pid, start]. Raises Refusal."""
    values = command.get(key)
    if not isinstance(values, list):
        raise Refusal("bad_request", "%s: expected a list of [pid, start]" % key)
    for value in values:
        if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
            raise Refusal("bad_request", "%s: expected [pid, start], found %r" % (key, value))
    return [(value[0], value[1]) for value in values]


FACTS: Dict[str, Callable[[int], Any]] = {
    "status": lambda pid: read_text(pid, "status"),
    "wchan": lambda pid: read_text(pid, "wchan"),
    "stack": lambda pid: read_text(pid, "stack"),
    "io": lambda pid: read_text(pid, "io"),
    "cmdline": read_cmdline,
    "environ_names": lambda pid: sorted(name.decode("utf-8", "replace") for name in read_environ(pid)),
    "shm": lambda pid: sorted(name for name, _ in shared_memory(pid)),
}


def read_text(pid: int, name: str) -> Optional[str]:
    """A small file of /proc/PID, or None."""
    data = slurp("/proc/%d/%s" % (pid, name))
    return None if data is None else data.decode("utf-8", "replace")


# -------------------------------------------------------------------------------------------------- the stop


class Stop:
    """Ends the instance in order: gateway drained, worker asked, worker killed, swept, supervisor, out.

    `tick` is called every STOP_POLL_S; each step returns the next one, or itself while it waits for its deadline.
    """

    def __init__(self, launcher: "Launcher", code: int, reason: str) -> None:
        self.launcher, self.code, self.reason = launcher, code, reason
        self.step: Callable[[], Any] = self._drain
        self.deadline = now() + launcher.config.drain_s
        self.trackers_at: Optional[float] = None
        self.root_gone_at: Optional[float] = None
        launcher.gateway.signal(signal.SIGTERM)

    def tick(self) -> None:
        """One look."""
        self.step = self.step()

    @property
    def late(self) -> bool:
        return now() >= self.deadline

    def _drain(self) -> Callable[[], Any]:
        if self.launcher.gateway.pid and not self.late:
            return self._drain
        self.launcher.gateway.signal(signal.SIGKILL)
        root = self.launcher.tree.root
        if root is not None and not root.gone:
            root.ordered = True
            send_signal(root.pid, root.start, signal.SIGTERM, root.pidfd)
        self.deadline = now() + self.launcher.config.term_s
        return self._term

    def _term(self) -> Callable[[], Any]:
        self.launcher.scan(deep=False)
        root = self.launcher.tree.root
        if root is None or root.gone:
            self.root_gone_at = self.root_gone_at or now()
            self.deadline = min(self.deadline, self.root_gone_at + ROOT_GONE_S)
        if (self.launcher.tree.alive or self.launcher.tree.beyond) and not self.late:
            return self._term
        self.deadline = now() + KILL_S
        return self._kill

    def _kill(self) -> Callable[[], Any]:
        tree = self.launcher.tree
        self.launcher.scan(deep=False)
        if kill_pass(tree, spare_trackers=not self._trackers_too()):
            if not tree.alive and not self.launcher.scan(deep=True) and not tree.alive:
                return self._sweep
            self.trackers_at = self.trackers_at or now() + TRACKER_S
        if self.late:
            self.launcher.report_stuck()
            self.code = EXIT_STUCK
            return self._sweep
        return self._kill

    def _trackers_too(self) -> bool:
        return self.trackers_at is not None and now() >= self.trackers_at

    def _sweep(self) -> Callable[[], Any]:
        if self.code != EXIT_STUCK:
            self.launcher.sweep_all()
        self.launcher.look_at_output()
        self.launcher.supervisor.signal(signal.SIGTERM)
        self.deadline = now() + SUPERVISOR_S
        return self._supervisor

    def _supervisor(self) -> Callable[[], Any]:
        if self.late or not self.launcher.supervisor.pid:
            self.launcher.supervisor.signal(signal.SIGKILL)
            self.launcher.leave(self.code)
        return self._supervisor


# ---------------------------------------------------------------------------------------------- the launcher


class Launcher:
    """The loop: signals, the seam, process descriptors, output notices and timers. The only writer of its state."""

    def __init__(
        self, config: Config, config_fd: int, echo: Dict[str, Echo], listener: Optional[socket.socket]
    ) -> None:
        self.config, self.config_fd, self.echo, self.listener = config, config_fd, echo, listener
        self.boot = boot_id()
        me = read_stat(os.getpid())
        self.identity: Identity = (os.getpid(), me.start if me else 0)
        self.mark = "%s:%s:%d-%d:" % (config.instance, self.boot, *self.identity)
        self.record_path = os.path.join(config.state, "worker.json")
        self.selector = selectors.DefaultSelector()
        self.timers: Dict[str, Tuple[float, Callable[[], None]]] = {}
        self.guard = Guard()
        self.outputs = Outputs(os.path.join(config.state, "output"), config.output_cap_bytes, echo)
        self.owned = Owned(self.mark, self.outputs.folder)
        self.tree = Tree(self.owned, self.guard, config.tracked_processes)
        self.tree.watch = self._watch
        self.starter = Starter()
        self.gateway = Companion("gateway", config.gateway if listener is not None else [])
        self.supervisor = Companion("supervisor", config.supervisor)
        self.lost_exchanges = 0
        self.generation = 0
        self.exit: Optional[Message] = None
        self.address: Optional[str] = None
        self.launched_at: Optional[float] = None
        self.delta = Delta({}, config)
        self.leavings: Dict[int, Leavings] = {}
        self.stop: Optional[Stop] = None
        self.bugs = 0
        self._newest_pid: Optional[str] = None
        self._deep_at = self._refreshed_at = self._rescanned_at = self._scanned_at = 0.0
        self._shm_changed_at = 0
        self._recorded_changes, self._record_is_old = -1, True
        self._record_failed = False
        self._muted = True
        self._given_epoch = 0
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        self.jobs = Jobs(self._wake)
        self.seam = Seam(os.path.join(config.runtime, "launcher.sock"), self.selector)
        self.seam.greet, self.seam.handle = self._greet, self._handle
        self.verbs: Dict[str, Callable[[Client, Message], Optional[Message]]] = {
            "launch": self._verb_launch,
            "tree": self._verb_tree,
            "signal": self._verb_signal,
            "facts": self._verb_facts,
            "consumed": self._verb_consumed,
            "clear": self._verb_clear,
            "sweep": self._verb_sweep,
            "ports": self._verb_ports,
            "finish": self._verb_finish,
        }

    # ---- the loop

    def run(self) -> NoReturn:
        """Until `leave`."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # nohup means it
                signal.signal(number, lambda _number, _frame: None)
        self.selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        give_memory_back()
        self._shield_strangers()
        self.outputs.clean()
        self._first_launch()
        self._start_gateway()
        self._start_supervisor()
        self.after("scan", 0.0, self._scan_tick)
        if self.outputs.inotify < 0:
            self.after("poll", OUTPUT_POLL_S, self._poll_output)
        while True:
            try:
                self._turn()
            except Exception as error:  # the one catch-all: a bug here must not take the worker down
                self.bugs += 1
                where = error.__traceback__
                while where is not None and where.tb_next is not None:
                    where = where.tb_next
                line = where.tb_lineno if where is not None else 0
                self.say("bug error=%r line=%d count=%d" % (error, line, self.bugs))
                time.sleep(min(1.0, 0.001 * self.bugs))

    def _turn(self) -> None:
        at = now()
        due = min((timer[0] for timer in self.timers.values()), default=at + 60.0)
        for key, mask in self.selector.select(max(0.0, due - at)):
            key.data(mask)
        at = now()
        for name in [name for name, timer in self.timers.items() if timer[0] <= at]:
            timer = self.timers.pop(name, None)
            if timer is not None:
                timer[1]()

    def after(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        """Once; a timer of that name that runs already is replaced."""
        self.timers[name] = (now() + seconds, act)

    def say(self, text: str) -> None:
        """A line for a person, on our stderr."""
        self.echo["stderr"].say("defib launcher: " + text)

    def event(self, what: str, **fields: Any) -> None:
        """To every client of the seam."""
        self.seam.broadcast(dict({"type": "event", "event": what}, **fields))

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except OSError:
            pass  # full: it is awake

    def _woken(self, _mask: int) -> None:
        numbers = set(os.read(self._wake_read, 65536))
        if signal.SIGCHLD in numbers:
            self._reap()
        self.jobs.deliver()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number in numbers:
                self._asked_to_stop(number)

    # ---- launching

    def _shield_strangers(self) -> None:
        """Children that we were given before we began (a shell that execs us) are not the worker's."""
        for pid in pids():
            found = read_stat(pid)
            if found is not None and found.ppid == self.identity[0]:
                self.tree.keep_aside(found)

    def _first_launch(self) -> None:
        try:
            self._launch(1, self.delta)
        except OSError as error:
            self.generation, self.launched_at = 1, now()
            code = 126 if error.errno in (errno.EACCES, errno.ENOEXEC, errno.EPERM) else 127
            text = "cannot start the command: %s: %s" % (error.filename or self.config.argv[0], error.strerror)
            self.exit = {"code": code, "signal": None, "message": text}
            self.say("%s code=%d" % (text, code))

    def _launch(self, generation: int, delta: Delta) -> None:
        """Raises OSError, and then nothing was launched."""
        prepared = prepare(self.config, generation, delta, self.mark + str(generation))
        leavings = prepared.leavings
        try:
            files = self.outputs.begin(generation)
            try:
                found = self.starter.start(
                    prepared.argv,
                    prepared.env,
                    executable=self.config.executable,
                    cwd=self.config.cwd,
                    stdout=files["stdout"].fd,
                    stderr=files["stderr"].fd,
                )
            except OSError:
                self.outputs.drop(files)
                raise
        except OSError:
            os.close(leavings.tmp_lock)
            for path in [leavings.tmpdir, *leavings.fresh]:
                remove_tree(path)
            raise
        self.generation, self.launched_at, self.exit, self.delta = generation, now(), None, delta
        self.address = prepared.address
        self.owned.folders[generation] = leavings.tmpdir
        self._keep_leavings(leavings)
        self.outputs.follow(files)
        root = self.tree.set_root(found, generation)
        self._listen_to_output()
        self._save_record()
        self.after("scan", 0.0, self._scan_tick)
        self.say("worker started generation=%d pid=%d address=%s" % (generation, root.pid, self.address))

    def _keep_leavings(self, leavings: Leavings) -> None:
        old_fresh = [path for item in self.leavings.values() for path in item.fresh]
        if old_fresh:
            self.jobs.submit(lambda: [remove_tree(path) for path in old_fresh], lambda result: None)
        for item in self.leavings.values():
            item.fresh = []
        self.leavings[leavings.generation] = leavings
        while len(self.leavings) > PAST_GENERATIONS:
            oldest = self.leavings.pop(min(self.leavings))
            self.owned.folders.pop(oldest.generation, None)

    @property
    def state(self) -> str:
        """As docs/seam.md names it."""
        if self.stop is not None:
            return "stopping"
        if self.generation == 0:
            return "none"
        root = self.tree.root
        return "running" if root is not None and root.generation == self.generation and not root.gone else "exited"

    # ---- gateway and supervisor

    def _companion_environment(self) -> Dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name != MARK}
        env[ASIDE] = "1"
        return env

    def _start_companion(self, companion: Companion, arguments: List[str], descriptors: Tuple[int, ...]) -> bool:
        argv = [*companion.command, "--config-fd", str(self.config_fd), *arguments]
        try:
            found = self.starter.start(argv, self._companion_environment(), pass_fds=descriptors)
        except OSError as error:
            self.say("%s cannot be started error=%r" % (companion.name, str(error)))
            return False
        companion.started(found)
        self.tree.aside_pids.add(found.pid)
        self.tree.aside_sessions.add(found.pid)
        return True

    def _start_gateway(self) -> None:
        if not self.gateway.wanted or self.listener is None or self.stop is not None:
            return
        descriptor = self.listener.fileno()
        if self._start_companion(self.gateway, ["--listen-fd", str(descriptor)], (self.config_fd, descriptor)):
            self._gateway_event("started")
        else:
            self.after("gateway", self.gateway.ended(), self._start_gateway)

    def _start_supervisor(self) -> None:
        if not self.supervisor.wanted or self.stop is not None:
            return
        self._given_epoch = max(self._given_epoch, self.seam.epoch) + 1
        if self._start_companion(self.supervisor, ["--epoch", str(self._given_epoch)], (self.config_fd,)):
            self.seam.epoch = self._given_epoch
        else:
            self.after("supervisor", self.supervisor.ended(), self._start_supervisor)

    def _companion_ended(self, companion: Companion, status: int) -> None:
        pid, start = companion.pid, companion.start
        self.tree.aside_pids.discard(pid)
        lost = 0
        if companion is self.gateway:
            lost = unfinished_exchanges(os.path.join(self.config.state, "journal"), pid, start)
            self.lost_exchanges += lost
        pause = companion.ended()
        if companion is self.gateway:
            self._gateway_event("exited", pid)
        if self.stop is None:
            again = self._start_gateway if companion is self.gateway else self._start_supervisor
            self.after(companion.name, pause, again)
        if self.stop is None or lost:
            facts = "%s ended pid=%d status=%s" % (companion.name, pid, status_words(status))
            self.say(facts + (" lost_exchanges=%d" % lost if lost else "") + " again_in=%.2f" % pause)

    def _gateway_event(self, state: str, pid: int = 0) -> None:
        fields = {"restarts": self.gateway.restarts, "lost_exchanges": self.lost_exchanges}
        self.event("gateway", pid=pid or self.gateway.pid, state=state, **fields)

    # ---- exits

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._reaped(pid, status)

    def _reaped(self, pid: int, status: int) -> None:
        for companion in (self.gateway, self.supervisor):
            if companion.pid == pid:
                self._companion_ended(companion, status)
                return
        process = self.tree.alive.get(pid)
        if process is not None:
            self._process_ended(process, status)

    def _watch(self, process: Process) -> None:
        if len(self.tree.alive) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS_SPARED:
            return  # its end is noticed by the scans
        process.pidfd = pidfd_open(process.pid)
        if process.pidfd < 0:
            return
        found = read_stat(process.pid)
        if found is None or found.start != process.start:  # its pid went to somebody else just now
            os.close(process.pidfd)
            process.pidfd = -1
            return
        self.selector.register(process.pidfd, selectors.EVENT_READ, lambda mask: self._exited(process))

    def _exited(self, process: Process) -> None:
        """A process ended that we have not reaped: reap it, or learn its status while that can be had."""
        if process.gone:
            return
        status: Optional[int] = None
        found = read_stat(process.pid)
        if found is not None and found.start == process.start:
            process.name = found.comm  # its last
        try:
            pid, reaped = os.waitpid(process.pid, os.WNOHANG)
            status = reaped if pid == process.pid else None
        except ChildProcessError:
            if found is not None and found.start == process.start and found.dead:
                status = found.exit_status
            elif process.pidfd >= 0:
                status = pidfd_exit_status(process.pidfd)
        self._process_ended(process, status)

    def _process_ended(self, process: Process, status: Optional[int]) -> None:
        if process.gone:
            return
        if process.pidfd >= 0:
            self.selector.unregister(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = -1
        self.tree.ended(process)
        self.look_at_output()
        code, number = exit_of(status)
        if process.root:
            self.exit = {"code": code, "signal": number}
            facts = (process.generation, process.pid, status_words(status))
            self.say("worker's root ended generation=%d pid=%d %s" % facts)
            self.after("scan", 0.0, self._deep_scan_tick)
        self.event(
            "exited",
            generation=process.generation,
            pid=process.pid,
            start=process.start,
            root=process.root,
            name=process.name,
            cmdline=process.cmdline[:SNAPSHOT_CMDLINE_CHARS],
            code=code,
            signal=number,
            ordered=process.ordered,
        )

    # ---- scanning

    def scan(self, deep: bool) -> List[Process]:
        """Takes in new processes and unseen exits."""
        new = self.tree.scan(deep)
        if new:
            self.event("spawned", generation=self.generation, tree=[process.message() for process in new])
        if deep or not new:
            self._refresh()
        return new

    def _fresh_scan(self) -> None:
        """With every proof; who asks again within DEEP_GAP_S gets a plain one, unless that finds nobody."""
        if now() - self._deep_at < DEEP_GAP_S:
            self.scan(deep=False)
            self._refresh()
            if self.tree.alive or self.tree.beyond:
                return
        self.scan(deep=True)
        self._deep_at = now()

    def _refresh(self, thorough: bool = True) -> None:
        self._refreshed_at = now()
        for process in self.tree.refresh(thorough):
            self._exited(process)

    def _deep_scan_tick(self) -> None:
        self.scan(deep=True)
        self._scan_tick()

    def _scan_tick(self) -> None:
        """Regularly. Cheap when nothing was born since the last time: one small read."""
        began = time.perf_counter()
        at = self._scanned_at = now()
        early = self.launched_at is not None and at - self.launched_at < SCAN_EARLY_FOR_S
        newest = newest_pid()
        born = early or newest is None or newest != self._newest_pid
        self._newest_pid = newest
        if born or at - self._rescanned_at >= RESCAN_S:
            if at - self._rescanned_at >= RESCAN_S:
                self._rescanned_at = at
                self.tree.forget_seen()
            new = self.tree.scan()
            if new:
                self.event("spawned", generation=self.generation, tree=[process.message() for process in new])
        if early or at - self._refreshed_at >= REFRESH_S or any(p.pidfd < 0 for p in self.tree.alive.values()):
            self._refresh(thorough=early)
            self.look_at_output()
            self.outputs.tidy()
        self._look_at_shared_memory()
        self._save_record()
        pause = SCAN_EARLY_S if early else SCAN_S
        pause = min(SCAN_MAX_S, max(pause, (time.perf_counter() - began) * (SCAN_SHARE_EARLY if early else SCAN_SHARE)))
        self.after("scan", pause, self._scan_tick)

    def _look_at_shared_memory(self) -> None:
        """Who uses which segment, whenever /dev/shm changed: once a process is dead, nobody can tell any more."""
        changed_at = os.stat("/dev/shm").st_mtime_ns if os.path.isdir("/dev/shm") else 0
        if changed_at == self._shm_changed_at:
            return
        self._shm_changed_at = changed_at
        self._record_is_old = True
        for process in list(self.tree.alive.values()):
            leavings = self.leavings.get(process.generation)
            if leavings is not None and not process.ordered:
                used = self.guard.call(process.pid, shared_memory, set())
                leavings.saw_shared_memory(used)

    def _save_record(self) -> None:
        """What the next run needs in order to find what this one left, should we be killed."""
        if not self._record_is_old and self._recorded_changes == self.tree.changes:
            return
        self._record_is_old, self._recorded_changes = False, self.tree.changes
        record = {
            "version": 1,
            "instance": self.config.instance,
            "boot": self.boot,
            "pidns": pid_namespace("self"),
            "launcher": self.identity,
            "generation": self.generation,
            "processes": self.tree.identities(),
            "leavings": [leavings.message() for leavings in self.leavings.values()],
        }
        try:
            write_whole(self.record_path, json.dumps(record).encode())
            self._record_failed = False
        except OSError as error:
            self._record_is_old = True  # tried again at the next scan
            if not self._record_failed:
                self.say("cannot write path=%s error=%r" % (self.record_path, error.strerror))
            self._record_failed = True

    # ---- output

    def _listen_to_output(self) -> None:
        if self.outputs.watched and self._muted:
            self.selector.register(self.outputs.inotify, selectors.EVENT_READ, self._output_notice)
            self._muted = False
        elif not self.outputs.watched:
            self.after("poll", OUTPUT_POLL_S, self._poll_output)

    def _output_notice(self, _mask: int) -> None:
        """At once, then not for OUTPUT_GAP_S: at most 200 a second."""
        self.outputs.drain_notices()
        self.look_at_output()
        self.selector.unregister(self.outputs.inotify)
        self._muted = True
        self.after("unmute", OUTPUT_GAP_S, self._listen_to_output)
        if now() - self._scanned_at >= SCAN_EARLY_S:
            self.after("scan", 0.0, self._scan_tick)

    def _poll_output(self) -> None:
        self.look_at_output()
        self.after("poll", OUTPUT_POLL_S, self._poll_output)

    def look_at_output(self) -> None:
        """Takes the sizes and tells of them if they changed."""
        if self.outputs.look():
            self.event("output", generation=self.generation, **self.outputs.sizes())

    # ---- the seam

    def snapshot(self) -> Message:
        """Everything, for a new client."""
        root = self.tree.root
        return {
            "type": "snapshot",
            "instance": self.config.instance,
            "boot": self.boot,
            "epoch": self.seam.epoch,
            "generation": self.generation,
            "state": self.state,
            "root": list(root.identity) if root is not None and root.generation == self.generation else None,
            "exit": self.exit,
            "address": self.address,
            "launched_at": self.launched_at,
            "delta": self.delta.message(),
            "planned_stop": self.stop is not None,
            "output": self.outputs.snapshot(),
            "tree": self._tree_message(),
            "untracked": len(self.tree.beyond),
            "gateway": {
                "pid": self.gateway.pid,
                "restarts": self.gateway.restarts,
                "lost_exchanges": self.lost_exchanges,
            },
        }

    def _tree_message(self) -> List[Message]:
        return [process.message() for process in self.tree.alive.values()]

    def _greet(self) -> List[Message]:
        hello = {"type": "hello", "who": "launcher", "protocol": PROTOCOL}
        return [dict(hello, instance=self.config.instance, pid=self.identity[0]), self.snapshot()]

    def _handle(self, client: Client, command: Message) -> None:
        verb = self.verbs.get(str(command.get("verb")))
        if verb is None:
            raise Refusal("unknown_verb", "%r is not a verb of the launcher" % command.get("verb"))
        fields = verb(client, command)
        if fields is not None:
            self.seam.reply(client, command, fields)

    def _current(self, command: Message) -> int:
        generation = integer(command, "generation")
        if generation != self.generation:
            text = "generation %d is not current, %d is" % (generation, self.generation)
            raise Refusal("stale_generation", text)
        return generation

    def _past_or_current(self, command: Message) -> int:
        generation = integer(command, "generation")
        if not 0 <= generation <= self.generation:
            raise Refusal("stale_generation", "generation %d was never launched" % generation)
        return generation

    def _verb_launch(self, _client: Client, command: Message) -> Message:
        generation = integer(command, "generation")
        if generation != self.generation + 1:
            text = "generation %d is current, the next is %d" % (self.generation, self.generation + 1)
            raise Refusal("stale_generation", text)
        if self.stop is not None:
            raise Refusal("refused", "the instance is stopping")
        values = command.get("delta") or {}
        if not isinstance(values, dict):
            raise Refusal("bad_request", "delta: expected an object")
        delta = Delta(values, self.config)
        self.scan(deep=True)
        if self.tree.alive or self.tree.beyond:
            names = ", ".join("%s[%d]" % (p.name, p.pid) for p in list(self.tree.alive.values())[:10])
            raise Refusal("refused", "processes of an earlier generation are alive: %s" % names)
        try:
            self._launch(generation, delta)
        except OSError as error:
            raise Refusal("failed", "cannot launch: %s" % error) from None
        snapshot = self.snapshot()
        return {key: snapshot[key] for key in ("root", "address", "launched_at", "output")}

    def _verb_tree(self, _client: Client, command: Message) -> Message:
        self._current(command)
        self._fresh_scan()
        return {"tree": self._tree_message(), "untracked": len(self.tree.beyond)}

    def _verb_signal(self, _client: Client, command: Message) -> Message:
        generation = self._past_or_current(command)
        number = integer(command, "signal")
        if number not in SIGNALS:
            raise Refusal("bad_request", "signal: expected one of %s" % (SIGNALS,))
        sent: List[Identity] = []
        gone: List[Identity] = []
        refused: List[Message] = []
        for target in identities(command, "targets")[:TRACKED_PROCESSES]:
            outcome = self._signal(target, generation, number)
            if outcome in ("sent", "gone"):
                (sent if outcome == "sent" else gone).append(target)
            else:
                refused.append({"target": target, "why": outcome})
        return {"sent": sent, "gone": gone, "refused": refused}

    def _signal(self, target: Identity, generation: int, number: int) -> str:
        process = self.tree.find(*target)
        if process is None:
            found = read_stat(target[0])
            lives = found is not None and found.start == target[1] and not found.dead
            return "it is not a process of the worker" if lives else "gone"
        if process.generation != generation:
            return "it is of generation %d" % process.generation
        outcome = send_signal(process.pid, process.start, number, process.pidfd)
        process.ordered = process.ordered or outcome == "sent"
        return outcome

    def _verb_facts(self, _client: Client, command: Message) -> Message:
        self._past_or_current(command)
        process = self.tree.find(integer(command, "pid"), integer(command, "start"))
        names = command.get("names")
        if process is None:
            raise Refusal("refused", "it is not a living process of the worker")
        if not isinstance(names, list) or any(name not in FACTS for name in names):
            raise Refusal("bad_request", "names: expected some of %s" % ", ".join(sorted(FACTS)))
        pid = process.pid
        return {"facts": {name: self.guard.call(pid, FACTS[name], None) for name in names}}

    def _verb_consumed(self, _client: Client, command: Message) -> Message:
        generation = self._past_or_current(command)
        self.outputs.consumed(generation, {name: integer(command, name) for name in ("stdout", "stderr")})
        return {}

    def _verb_clear(self, client: Client, command: Message) -> None:
        self._current(command)
        incident, places = command.get("incident"), self.config.caches.get(str(command.get("cache")))
        if places is None:
            raise Refusal("refused", "%r is not a cache of this instance" % command.get("cache"))
        if not isinstance(incident, str) or not INCIDENT.match(incident):
            raise Refusal("bad_request", "incident: expected a plain name, found %r" % incident)
        if self.tree.alive:
            raise Refusal("refused", "the worker lives and may be using it")
        config = self.config
        self._later(client, command, lambda: clear_cache(places or [], str(incident), config))

    def _later(self, client: Client, command: Message, work: Callable[[], Message]) -> None:
        def then(result: Any) -> None:
            if isinstance(result, Exception):
                self.seam.refuse(client, command, Refusal("failed", repr(result)))
            else:
                self.seam.reply(client, command, result)

        self.jobs.submit(work, then)

    def _verb_sweep(self, client: Client, command: Message) -> None:
        generation = self._past_or_current(command)
        if any(process.generation == generation for process in self.tree.alive.values()):
            raise Refusal("refused", "generation %d is not dead" % generation)
        leavings = self.leavings.get(generation)
        paths = self._sweepable(leavings) if leavings is not None else []
        self._later(client, command, lambda: {"removed": [path for path in paths if remove_tree(path)]})

    def _sweepable(self, leavings: Leavings) -> List[str]:
        if leavings.tmp_lock >= 0:
            os.close(leavings.tmp_lock)
            leavings.tmp_lock = -1
        return sweepable(leavings.message(), self.guard)

    def _verb_ports(self, _client: Client, _command: Message) -> Message:
        return {"address_free": self._address_free()}

    def _address_free(self) -> bool:
        address = self.address or ""
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(address[len("unix:") :])
                except OSError:
                    return True
            return False
        host, _, port = address.rpartition(":")
        return port_is_free(host.strip("[]"), int(port)) if host and port.isdigit() else True

    def _verb_finish(self, client: Client, command: Message) -> None:
        code, reason = integer(command, "code"), str(command.get("reason", ""))[:200]
        if not 0 <= code <= 255:
            raise Refusal("bad_request", "code: expected 0 to 255")
        self.seam.reply(client, command, {})
        self._begin_stop(code, "finish: " + reason)

    # ---- the end

    def _asked_to_stop(self, number: int) -> None:
        if self.stop is None:
            self._begin_stop(0, signal.Signals(number).name)
            return
        self.say("second signal: everything is killed at once")
        self._kill_at_once()
        self.leave(128 + number)

    def _begin_stop(self, code: int, reason: str) -> None:
        if self.stop is not None:
            return
        deadline = now() + self.config.drain_s + self.config.term_s
        self.stop = Stop(self, code, reason)
        facts = (reason, code, self.config.drain_s, self.config.term_s)
        self.say("stopping reason=%r code=%d drain_s=%g term_s=%g" % facts)
        self.event("stopping", deadline=deadline)
        self._stop_tick()

    def _stop_tick(self) -> None:
        self.after("stop", STOP_POLL_S, self._stop_tick)  # first: a bug in a step must not end the stop
        if self.stop is not None:
            self.stop.tick()

    def _kill_at_once(self) -> None:
        for companion in (self.gateway, self.supervisor):
            companion.signal(signal.SIGKILL)
        deadline = now() + KILL_S
        self.scan(deep=True)
        while not kill_pass(self.tree, spare_trackers=False):
            if now() >= deadline:
                self.report_stuck()
                self.leave(EXIT_STUCK)
            time.sleep(STOP_POLL_S)
            self._reap()
            self._refresh()
        self.sweep_all()

    def report_stuck(self) -> None:
        """Names what SIGKILL could not end: only the driver or a reboot can."""
        for process in self.tree.alive.values():
            wchan = read_text(process.pid, "wchan") or "?"
            facts = (process.pid, process.start, process.name, process.state, wchan)
            self.say("alive after SIGKILL pid=%d start=%d name=%s state=%s wchan=%s" % facts)

    def sweep_all(self) -> None:
        """What the dead generations left."""
        for leavings in self.leavings.values():
            for path in [*self._sweepable(leavings), *leavings.fresh]:
                remove_tree(path)

    def leave(self, code: int) -> NoReturn:
        """Gives the echo a moment, then out. Threads that hang in a pipe or a driver don't keep us."""
        self.look_at_output()
        deadline = now() + ECHO_FLUSH_S
        self.say("ended code=%d" % code)
        while now() < deadline and not all(echo.idle for echo in self.echo.values()):
            time.sleep(0.005)
        for name in ("gateway.sock", "supervisor.sock"):  # a companion that had to be killed left its own
            attempt(os.unlink, os.path.join(self.config.runtime, name))
        attempt(os.unlink, self.seam.path)
        if code != EXIT_STUCK:
            attempt(os.unlink, self.record_path)
        os._exit(code)


def exit_of(status: Optional[int]) -> Tuple[Optional[int], Optional[int]]:
    """(code, signal) of a wait status."""
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def status_words(status: Optional[int]) -> str:
    """For our log."""
    code, number = exit_of(status)
    return "code=%d" % code if code is not None else "signal=%s" % number


# ------------------------------------------------------------------------------------------------- the start


def read_config(arguments: List[str]) -> Tuple[Config, int]:
    """From the descriptor that the arguments name. Exits if there is none, or it holds no configuration."""
    if len(arguments) != 2 or arguments[0] != "--config-fd" or not arguments[1].isdigit():
        fail(EXIT_CONFIG, "usage: launcher.py --config-fd N (it is started by `defib run`)")
    descriptor = int(arguments[1])
    try:
        config = Config(os.pread(descriptor, MAX_CONFIG_BYTES, 0))
    except (OSError, ValueError) as error:
        fail(EXIT_CONFIG, "the configuration in descriptor %d cannot be used: %s" % (descriptor, error))
    os.set_inheritable(descriptor, False)
    return config, descriptor


def private(path: str, what: str) -> None:
    """Makes a folder that is ours alone. Exits if that can't be."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            fail(EXIT_CANNOT_WRITE, "the %s folder %s is not a folder of uid %d" % (what, path, os.geteuid()))
        os.chmod(path, 0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    except OSError as error:
        text = "the %s folder %s cannot be written: %s; make it writable or choose another"
        fail(EXIT_CANNOT_WRITE, text % (what, path, error.strerror))


def take_lock(config: Config) -> int:
    """The instance's lock, held until we end. Exits if somebody else has it."""
    path = os.path.join(config.state, "lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fail(EXIT_CANNOT_WRITE, "cannot open %s: %s" % (path, error.strerror))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        text = "instance %s runs already: pid %s holds %s; stop that one, or give this one another name"
        fail(EXIT_BUSY, text % (config.instance, holder, path))
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        fail(EXIT_CANNOT_WRITE, "cannot write %s: %s" % (path, error.strerror))
    return descriptor


def say_directly(text: str) -> None:
    """Before the echo runs."""
    sys.stderr.write("defib launcher: " + text + "\n")


def end_earlier_run(config: Config) -> None:
    """Under the lock: whatever an earlier run of this instance left goes. Exits if it can't be ended."""
    earlier = Earlier(os.path.join(config.state, "worker.json"), config, Guard())
    owner = earlier.owner_alive()
    if owner is not None:
        fail(EXIT_BUSY, "instance %s runs already: its launcher is pid %d" % (config.instance, owner))
    left = earlier.end(say_directly)
    if left:
        names = ", ".join("%s[%d] state %s" % (p.name, p.pid, p.state) for p in left)
        fail(EXIT_STUCK, "processes of an earlier run survive SIGKILL: %s; nothing is launched beside them" % names)


def fill_standard_descriptors() -> None:
    """Nothing that we open may become descriptor 0, 1 or 2."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)


def main(arguments: List[str]) -> NoReturn:
    """The root process."""
    fill_standard_descriptors()
    config, config_fd = read_config(arguments)
    private(config.state, "state")
    private(config.runtime, "runtime")
    take_lock(config)
    end_earlier_run(config)
    listener = None
    if config.listen is not None:
        listener = listen_on(str(config.listen.get("host", "")), config.listen["port"])
    if _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        fail(EXIT_CONFIG, "this kernel has no subreaper (Linux 3.4)")
    threading.stack_size(256 << 10)
    echo = {"stdout": Echo(1), "stderr": Echo(2)}
    echo["stdout"].report = echo["stderr"].say
    launcher = Launcher(config, config_fd, echo, listener)
    for name, copier in echo.items():
        start_thread("echo-" + name, copier.run)
    launcher.run()


def isolated(arguments: List[str]) -> None:
    """Executes this file again as a module of an isolated interpreter (no site, no PYTHON* variables).

    A script's syntax tree stays in memory for as long as it runs (6 MB here); a module's doesn't.
    """
    folder, name = os.path.split(os.path.abspath(__file__))
    code = "import sys; sys.path.append(%r); import %s; %s.main(sys.argv[1:])"
    module = name[: -len(".py")]
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code % (folder, module, module), *arguments])


if __name__ == "__main__":
    if sys.executable and __file__.endswith("launcher.py"):
        isolated(sys.argv[1:])
    main(sys.argv[1:])
