"""Addresses as people write them, and who holds a port. Binds for an instant to see whether a port is free."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass

from defib.cli.exits import Exit, Stop

_ADDRESS = re.compile(r"(?:(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:\[\]/\s]*)):)?(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Listen:
    """A TCP address that clients come to; an empty host means every address of this machine."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str, option: str) -> Listen:
    """`HOST:PORT`, `[V6]:PORT`, `:PORT` or `PORT`. Raises Stop (2)."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise Stop(Exit.USAGE, f"{option} {text!r}: expected HOST:PORT, [IPV6]:PORT or PORT")
    return Listen(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))


def parse_upstream(text: str) -> str:
    """`HOST:PORT` or `unix:PATH`, as the seam writes addresses. Raises Stop (2)."""
    if text.startswith("unix:/"):
        return text
    parsed = parse_listen(text.removeprefix("http://").rstrip("/"), "--upstream")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parsed.host, parsed.host)
    return str(Listen(host, parsed.port))


def check_free(listen: Listen) -> None:
    """Raises Stop: 75 and who holds it, or 78 for an address that this machine or user can't have."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host or None, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Stop(
                Exit.BUSY,
                f"{listen} is in use by {_holder(listen.port)}; stop that, or choose another port",
            ) from error
        raise Stop(Exit.CONFIG, f"cannot listen on {listen}: {error.strerror}") from error


def _holder(port: int) -> str:
    import psutil

    try:
        for found in psutil.net_connections(kind="tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid:
                command = " ".join(psutil.Process(found.pid).cmdline())
                return f"pid {found.pid} ({command[:200].strip()})"
    except psutil.Error:
        pass
    return "a process that we may not see (try `ss -ltnp` as root)"
