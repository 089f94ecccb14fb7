"""The ring: the last lines, bounded both ways."""

from __future__ import annotations

from defib.sensors.ring import Kept, Ring


def line(n: int, text: str = "x", generation: int = 1) -> Kept:
    return Kept(float(n), generation, "stdout", n, text)


def test_lines_come_back_in_order_by_generation_and_from_a_time_on() -> None:
    ring = Ring()
    for n in range(6):
        ring.add(line(n, generation=1 + n // 3))
    assert [kept.number for kept in ring.of(1)] == [0, 1, 2]
    assert [kept.number for kept in ring.of(2, since=4.0)] == [4, 5]
    assert ring.of(3) == []


def test_the_oldest_lines_go_when_there_are_too_many() -> None:
    ring = Ring(max_lines=3)
    for n in range(4):
        ring.add(line(n))
    assert [kept.number for kept in ring.of(1)] == [1, 2, 3] and ring.forgotten == 1


def test_the_oldest_lines_go_when_they_are_too_long_together() -> None:
    ring = Ring(max_bytes=1000)
    for n in range(5):
        ring.add(line(n, "y" * 236))  # 300 with what a line costs besides
    assert [kept.number for kept in ring.of(1)] == [2, 3, 4] and ring.forgotten == 2
    ring.add(line(9, "z" * 5000))
    assert ring.of(1) == [], "one line beyond the limit is not kept at the price of the limit"
    ring.add(line(10))
    assert [kept.number for kept in ring.of(1)] == [10]


def test_answers_to_health_polls_are_counted_not_kept() -> None:
    ring = Ring()
    ring.add(line(1, 'INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK'))
    ring.add(line(2, 'INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable'))
    assert [kept.number for kept in ring.of(1)] == [2] and ring.polls_dropped == 1
