"""The one way we ask the worker over HTTP: httpx that knows no proxy, to a loopback port or a private socket."""

from __future__ import annotations

import httpx

MAX_KEPT_CONNECTIONS = 2


def client_for(address: str) -> httpx.AsyncClient:
    """A client for `127.0.0.1:PORT` or `unix:/path`. It ignores proxy variables: a probe is never sent elsewhere."""
    limits = httpx.Limits(max_keepalive_connections=MAX_KEPT_CONNECTIONS, max_connections=8)
    socket = address.removeprefix("unix:") if address.startswith("unix:") else None
    transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, trust_env=False)
    return httpx.AsyncClient(transport=transport, trust_env=False)


def address_url(address: str) -> str:
    """The URL that goes with `client_for` of the same address."""
    return "http://localhost" if address.startswith("unix:") else f"http://{address}"
