"""The page that a maintainer reads."""

from __future__ import annotations

from defib.effects.report import EXCERPT_LINES, Report, render


def test_the_report_tells_cause_witnesses_and_timeline() -> None:
    report = Report(
        incident="0001-g1",
        outcome="recovered",
        verdict={"fault": "poisoned_context", "cause": "ima", "initiator": "Worker", "group_t": "log:ima"},
        timeline=[{"at": 10.0, "event": "verdict", "fault": "x|y"}, {"at": 12.5, "event": "proven", "generation": 2}],
        command=["vllm", "serve", "m"],
        versions={"engine": "vllm 0.32.0"},
        excerpt=[f"line {n}" for n in range(EXCERPT_LINES + 5)],
        shapes=[{"id": "a", "path": "/v1/completions"}],
    )
    page = render(report)
    for part in ("poisoned_context (recovered)", "`ima`, first seen in Worker", "| 2.500 | proven |", "x/y", "| a |"):
        assert part in page
    assert f"line {EXCERPT_LINES}" not in page


def test_an_empty_incident_still_makes_a_page() -> None:
    assert "unknown" in render(Report("i", "o", {}, (), (), {}, ()))
