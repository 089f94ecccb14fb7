from __future__ import annotations

import pytest

from defib.gateway.heads import BadHead, parse_answer, parse_request


def head(*lines: str) -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (head("POST / HTTP/1.1", "Host: x", "Content-Length: 4", "Transfer-Encoding: chunked"), "Transfer-Encoding"),
        (head("POST / HTTP/1.1", "Host: x", "Content-Length: 4", "Content-Length: 4"), "Content-Length"),
        (head("POST / HTTP/1.1", "Host: x", "Content-Length: 4", "Content-Length: 5"), "Content-Length"),
        (head("POST / HTTP/1.1", "Host: x", "Content-Length: +4"), "Content-Length"),
        (head("POST / HTTP/1.1", "Host: x", "Content-Length: 99999999999999999999"), "Content-Length"),
        (head("POST / HTTP/1.1", "Host: x", "Transfer-Encoding: gzip, chunked"), "framed"),
        (head("POST / HTTP/1.1", "Host: x", "Transfer-Encoding: chunked, gzip"), "Transfer-Encoding"),
        (head("POST / HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), None),
        (head("POST / HTTP/1.0", "Host: x", "Transfer-Encoding: chunked"), "framed"),
        (head("GET / HTTP/1.1", "Host: x", "X: a", " folded"), "folded"),
        (head("GET / HTTP/1.1", "Host: x", "X: a", "\tfolded"), "folded"),
        (head("GET / HTTP/1.1", "Host: x", "X: a\nContent-Length: 5"), "CRLF"),
        (head("GET / HTTP/1.1", "Host: x", "X: a\rContent-Length: 5"), "CRLF"),
        (head("GET / HTTP/1.1", "Host: x", "X: a\0b"), "control"),
        (head("GET / HTTP/1.1", "Host : x"), "token"),
        (head("GET / HTTP/1.1", "Host: x", "Host: y"), "host"),
        (head("GET a HTTP/1.1", "Host: x"), None),
        (head("GET /a b HTTP/1.1", "Host: x"), None),
    ],
)
def test_a_head_that_two_readers_could_read_in_two_ways_is_refused(raw: bytes, why: str | None) -> None:
    with pytest.raises(BadHead, match=why) as refused:
        parse_request(raw)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head("CONNECT a:80 HTTP/1.1", "Host: x"), 501),
        (head("GET / HTTP/2.0", "Host: x"), 505),
        (head("GET /"), 505),
        (head("POST / HTTP/1.1", "Host: x", "Expect: 200-maybe"), 417),
    ],
)
def test_a_head_that_we_do_not_serve_gets_its_own_status(raw: bytes, status: int) -> None:
    with pytest.raises(BadHead) as refused:
        parse_request(raw)
    assert refused.value.status == status


def test_the_worker_gets_every_end_to_end_field_and_none_of_the_hop() -> None:
    request = parse_request(
        head(
            "POST /v1/completions?x=%20 HTTP/1.1",
            "Host: api.example:8000",
            "Authorization: Bearer k",
            "Connection: keep-alive, X-Hop",
            "X-Hop: 1",
            "Keep-Alive: timeout=4",
            "TE: trailers",
            "Upgrade: h2c",
            "HTTP2-Settings: AAMA",
            "X-Defib-Replay: never",
            "X-Request-Id: mine",
            "X-Forwarded-For: 10.0.0.1",
            "Content-Length: 3",
        )
    )
    sent = request.to_worker(b"Content-Length: 3\r\n", b"defib-1", "10.0.0.2")
    assert sent == head(
        "POST /v1/completions?x=%20 HTTP/1.1",
        "Host: api.example:8000",
        "Authorization: Bearer k",
        "X-Request-Id: defib-1",
        "X-Forwarded-For: 10.0.0.1, 10.0.0.2",
        "Content-Length: 3",
    )
    assert request.no_replay
    assert request.path == "/v1/completions"
    assert not request.websocket, "h2c may be ignored; only websocket is passed on"


def test_host_and_the_body_length_cannot_be_named_away_by_connection() -> None:
    request = parse_request(head("POST / HTTP/1.1", "Host: x", "Connection: host, content-length", "Content-Length: 2"))
    assert request.length == 2
    assert (b"Host", b"x") in request.fields


def test_the_absolute_form_of_a_target_becomes_a_path() -> None:
    assert parse_request(head("GET http://h:1/a?b HTTP/1.1", "Host: h")).target == b"/a?b"
    assert parse_request(head("GET http://h HTTP/1.1", "Host: h")).target == b"/"


def test_an_http_1_0_client_is_not_kept_alive() -> None:
    assert not parse_request(head("GET / HTTP/1.0", "Connection: keep-alive")).keep_alive
    assert not parse_request(head("GET / HTTP/1.1", "Host: x", "Connection: close")).keep_alive
    assert parse_request(head("GET / HTTP/1.1", "Host: x")).keep_alive


def test_an_answers_head_goes_on_byte_for_byte_unless_it_has_hop_fields() -> None:
    raw = head("HTTP/1.1 200 Fine  Thing", "daTe: now", "Content-Type: text/event-stream", "Transfer-Encoding: chunked")
    answer = parse_answer(raw, "POST")
    assert answer.to_client(b"", False, False) is answer.raw
    assert answer.event_stream
    hop = head("HTTP/1.1 200 OK", "A: b", "Connection: close", "Keep-Alive: timeout=5", "Content-Length: 2")
    answer = parse_answer(hop, "POST")
    assert answer.to_client(b"", False, False) == head("HTTP/1.1 200 OK", "A: b", "Content-Length: 2")
    assert not answer.keep_alive


@pytest.mark.parametrize(
    ("method", "lines", "framing"),
    [
        ("HEAD", ("HTTP/1.1 200 OK", "Content-Length: 9"), "none"),
        ("GET", ("HTTP/1.1 204 No Content",), "none"),
        ("GET", ("HTTP/1.1 304 Not Modified", "Content-Length: 9"), "none"),
        ("GET", ("HTTP/1.1 200 OK", "Content-Length: 0"), "none"),
        ("GET", ("HTTP/1.1 200 OK", "Content-Length: 9"), "length"),
        ("GET", ("HTTP/1.1 200 OK", "Transfer-Encoding: chunked"), "chunked"),
        ("GET", ("HTTP/1.1 200 OK",), "close"),
    ],
)
def test_the_framing_of_an_answer_follows_the_rfc(method: str, lines: tuple[str, ...], framing: str) -> None:
    assert parse_answer(head(*lines), method).framing == framing


@pytest.mark.parametrize(
    "lines",
    [
        ("HTTP/1.1 200 OK", "Content-Length: 9", "Transfer-Encoding: chunked"),
        ("HTTP/1.1 200 OK", "Content-Length: 9", "Content-Length: 8"),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: gzip"),
        ("HTTP/1.1 200 OK", "A: b\nC: d"),
        ("nonsense",),
    ],
)
def test_an_answer_framed_in_two_ways_is_not_passed_on(lines: tuple[str, ...]) -> None:
    with pytest.raises(BadHead):
        parse_answer(head(*lines), "GET")
