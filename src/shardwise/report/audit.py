"""The audit of rules as JSON, as a table for a terminal, and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from ..rules.audit import KINDS, VERDICTS, Audited, Finding, Report, category
from ..rules.proxy import format_call

HEADINGS = {
    "same": "same",
    "more": "ours more",
    "miss": "theirs more",
    "unconfirmed": "unconfirmed",
    "conflict": "conflict",
}
CATEGORIES = ("same", "ours more", "theirs more", "conflict", "neither splits")


def audit_data(report: Report) -> dict[str, Any]:
    """The audit as plain data."""
    return {
        "peer": report.peer,
        "recall": report.recall,
        "recall_of_all": report.recall_of_all,
        "operators": [
            {"operator": op, "category": category(calls), "calls": [_call_data(a) for a in calls]}
            for op, calls in report.operators().items()
        ],
    }


def _call_data(audited: Audited) -> dict[str, Any]:
    findings = [
        {"combination": str(f.combination), "verdict": f.verdict, "reason": f.reason, "example": f.example}
        for f in audited.findings
    ]
    call = format_call(audited.call)
    return {"call": call, "rule": audited.rule, "kind": audited.kind, "note": audited.note, "findings": findings}


def audit_table(report: Report) -> Table:
    """One row for every operator: its category, and how many combinations have which verdict."""
    table = Table("operator", "category", *HEADINGS.values(), title=f"against {report.peer}", title_justify="left")
    for op, calls in report.operators().items():
        table.add_row(op, category(calls), *(str(sum(a.count(v) for a in calls)) for v in VERDICTS))
    return table


def audit_lines(report: Report) -> Iterator[str]:
    """What stands below the table: every conflict with its example, every miss, and the shares."""
    for audited, finding in _with(report, "conflict"):
        yield f"conflict  {audited.call.op} {finding.combination}: {finding.reason}"
        yield from (f"    {line}" for line in finding.example.splitlines())
    for audited, finding in _with(report, "miss"):
        yield f"miss      {format_call(audited.call)} {finding.combination}: {finding.reason or NO_FACTOR}"
    for audited in report.calls:
        if audited.note:
            yield f"note      {format_call(audited.call)}: {audited.note}"
    yield shares(report)


NO_FACTOR = "no factor of ours"


def shares(report: Report) -> str:
    """How much of what the peer rightly allows our rules allow."""
    if report.recall is None:
        return f"{report.peer} allows nothing here that execution confirms"
    parts = [f"of what {report.peer} allows and execution confirms, ours allow {report.recall:.2%}"]
    if report.recall_of_all is not None and report.recall_of_all != report.recall:
        parts.append(f"{report.recall_of_all:.2%} where maxima and minima over devices come in")
    return "; ".join(parts)


def _with(report: Report, verdict: str) -> Iterator[tuple[Audited, Finding]]:
    for calls in report.operators().values():
        for audited in calls:
            yield from ((audited, f) for f in audited.findings if f.verdict == verdict)


def audit_page(report: Report, command: str) -> str:
    """The page of the documentation."""
    operators = report.operators()
    counts = Counter(category(calls) for calls in operators.values())
    lines = [
        "# Rules against DTensor",
        "`rules/audit.py`, `rules/judge.py`, `pytorch/dtensor.py`",
        "",
        f"Written by `{command}`. {len(operators)} operators of PyTorch's own database, {len(report.calls)} calls, on "
        "a mesh of one axis. A combination is a placement of every operand with one of every result: `R` whole, `S0` "
        "cut along dim 0, `Psum` a summand on every device. Every combination is executed, in 2 and in 3 pieces, on "
        "inputs of several kinds; where it does not hold, DTensor itself runs the call on two simulated devices.",
        "",
        f"**{shares(report)[0].upper()}{shares(report)[1:]}.**",
        "",
        "An operator counts as the worst of its calls: conflict, theirs more, ours more, same.",
        "",
        *_grid(("operators", *CATEGORIES), [("all", *(counts[c] for c in CATEGORIES))]),
        "",
        "Combinations by kind of operator (of the rule that was discovered):",
        "",
        *_grid(("kind", *HEADINGS.values()), [*_by_kind(report.calls)]),
        "",
        "Unconfirmed: DTensor lists the combination, the bare operator on pieces does not give the whole, and a "
        "DTensor raises an error.",
        "",
        "## Conflicts",
        "",
        *_conflicts(report),
        "## Misses",
        "",
        *_reasons(_with(report, "miss"), NO_FACTOR),
        "## Unconfirmed",
        "",
        *_reasons(_with(report, "unconfirmed"), ""),
        "## Not compared",
        "",
        *_notes(report.calls),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _grid(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def _by_kind(calls: Sequence[Audited]) -> Iterator[tuple[object, ...]]:
    for kind in KINDS:
        here = [a for a in calls if a.kind == kind]
        if here:
            yield kind, *(sum(a.count(v) for a in here) for v in VERDICTS)
    yield "all", *(sum(a.count(v) for a in calls) for v in VERDICTS)


def _conflicts(report: Report) -> Iterator[str]:
    """Every conflict; the example of the first of an operator's that have the same reason."""
    seen: set[tuple[str, str]] = set()
    for audited, finding in _with(report, "conflict"):
        yield f"**{audited.call.op}** {finding.combination}: {finding.reason}"
        yield ""
        key = audited.call.op, str(finding.combination)
        if finding.example and key not in seen:
            yield from ("```", *finding.example.splitlines(), "```", "")
        seen.add(key)


def _reasons(found: Iterable[tuple[Audited, Finding]], default: str) -> Iterator[str]:
    """A list: reason, and the combinations of every operator that it stands for."""
    table: dict[str, dict[str, list[str]]] = {}
    for audited, finding in found:
        places = table.setdefault(finding.reason or default, {}).setdefault(audited.call.op, [])
        if str(finding.combination) not in places:
            places.append(str(finding.combination))
    for reason, operators in sorted(table.items(), key=lambda item: -len(item[1])):
        yield f"{reason}:"
        yield from (f"- {op}: {', '.join(f'`{c}`' for c in places)}" for op, places in operators.items())
        yield ""


def _notes(calls: Sequence[Audited]) -> Iterator[str]:
    table: dict[str, list[str]] = {}
    for audited in calls:
        if audited.note:
            places = table.setdefault(audited.note, [])
            if audited.call.op not in places:
                places.append(audited.call.op)
    for note, operators in sorted(table.items(), key=lambda item: -len(item[1])):
        yield f"- {note}: {', '.join(operators)}"
