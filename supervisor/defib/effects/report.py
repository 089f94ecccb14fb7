"""Writes `report.md`: what happened, in an order that a maintainer can read, ready to paste into a bug report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EXCERPT_LINES = 60


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the page shows. Times in the timeline are CLOCK_BOOTTIME seconds."""

    incident: str
    outcome: str
    verdict: Mapping[str, Any]
    timeline: Sequence[Mapping[str, Any]]
    command: Sequence[str]
    versions: Mapping[str, Any]
    excerpt: Sequence[str]
    shapes: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def render(report: Report) -> str:
    """Markdown."""
    verdict = report.verdict
    parts = [
        f"# Incident {report.incident}: {verdict.get('fault', 'unknown')} ({report.outcome})",
        "",
        f"- **Cause**: `{verdict.get('cause', 'unknown')}`, first seen in {verdict.get('initiator', 'unknown')}",
        f"- **Witnesses**: group T {verdict.get('group_t', 'none')}; group W {verdict.get('group_w', 'none')}",
        f"- **Generation**: {verdict.get('generation', '?')}",
        f"- **Command**: `{' '.join(report.command)}`",
        "- **Versions**: " + (", ".join(f"{k} {v}" for k, v in report.versions.items()) or "unknown"),
        "",
        "CUDA reports errors late: the traceback shows where the error was noticed, not which kernel made it.",
        "",
        "## Timeline",
        "",
        "| seconds | step | facts |",
        "| ---: | --- | --- |",
        *_timeline(report.timeline),
        "",
        "## The log around the first cause",
        "",
        "```",
        *report.excerpt[:EXCERPT_LINES],
        "```",
    ]
    if report.shapes:
        parts += ["", "## Requests in flight (shapes only)", "", *_shapes(report.shapes)]
    return "\n".join(parts) + "\n"


def _timeline(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    zero = float(steps[0]["at"]) if steps else 0.0
    rows = []
    for step in steps:
        facts = ", ".join(f"{k}={v}" for k, v in step.items() if k not in ("time", "at", "event", "incident"))
        rows.append(f"| {float(step['at']) - zero:.3f} | {step['event']} | {facts.replace('|', '/')} |")
    return rows


def _shapes(shapes: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(shapes[0])
    head = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return head + ["| " + " | ".join(str(shape.get(n, "")) for n in names) + " |" for shape in shapes[:100]]
