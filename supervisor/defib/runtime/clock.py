"""The one door to time: CLOCK_BOOTTIME for deadlines, wall time for people, the boot id for what is persisted."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path


def boottime() -> float:
    """Seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall() -> float:
    """Seconds since the epoch. For people and for what outlives a boot; never for deadlines."""
    return time.time()


def stamp(at: float | None = None) -> str:
    """UTC time as ISO 8601 with milliseconds; `at` in epoch seconds, default now."""
    moment = datetime.fromtimestamp(wall() if at is None else at, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def boot_id() -> str:
    """This boot's id, or `unknown` where the kernel doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
