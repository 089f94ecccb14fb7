"""Addresses as people write them, and who holds a port."""

from __future__ import annotations

import os
import socket

import pytest

from defib.cli.addresses import Listen, check_free, parse_listen, parse_upstream
from defib.cli.exits import Exit, Stop


@pytest.mark.parametrize(
    "text, listen",
    [
        ("8000", Listen("0.0.0.0", 8000)),
        (":8000", Listen("0.0.0.0", 8000)),
        ("127.0.0.1:1", Listen("127.0.0.1", 1)),
        ("host.example:65535", Listen("host.example", 65535)),
        ("[::1]:8000", Listen("::1", 8000)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, listen: Listen) -> None:
    assert parse_listen(text, "--listen") == listen


@pytest.mark.parametrize("text", ["", "host", "host:", "::1:80", "h:0", "h:65536", "http://h:80", "h:80/x", "unix:/x"])
def test_what_is_no_address_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(Stop, match=r"--listen .*expected HOST:PORT") as caught:
        parse_listen(text, "--listen")
    assert caught.value.code is Exit.USAGE


@pytest.mark.parametrize(
    "text, address",
    [
        ("9000", "127.0.0.1:9000"),
        ("http://127.0.0.1:9000/", "127.0.0.1:9000"),
        ("[::]:9000", "[::1]:9000"),
        ("unix:/run/v.sock", "unix:/run/v.sock"),
    ],
)
def test_an_upstream_is_an_address_or_a_socket(text: str, address: str) -> None:
    assert parse_upstream(text) == address


def test_a_port_in_use_says_who_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Stop, match=f"127.0.0.1:{port} is in use by pid {os.getpid()} ") as caught:
            check_free(Listen("127.0.0.1", port))
        assert caught.value.code is Exit.BUSY
    check_free(Listen("127.0.0.1", port))


def test_an_address_of_another_machine_is_a_configuration_error() -> None:
    with pytest.raises(Stop, match=r"cannot listen on 192\.0\.2\.1:8000") as caught:
        check_free(Listen("192.0.2.1", 8000))
    assert caught.value.code is Exit.CONFIG
