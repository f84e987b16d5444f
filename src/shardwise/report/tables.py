"""Decisions as tables and curves for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table

from ..ir.graph import Graph
from ..ir.placement import format_layout
from ..plan.describe import human_bytes, human_seconds
from ..plan.plan import Plan
from ..rules.rule import Rule, format_rule


def _family(path: str) -> str:
    """`layers.3.mlp.up.weight` -> `layers.*.mlp.up.weight`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def placement_rows(plan: Plan) -> list[tuple[str, str, str, int]]:
    """(kind, path, layout, how many) of parameters and inputs; layers of one family and layout share a row."""
    counts = Counter(
        (kind, _family(path) if kind == "parameter" else path, format_layout(layout))
        for kind, path, layout in plan.inputs
        if kind in ("parameter", "buffer", "input")
    )
    return [(*key, count) for key, count in counts.items()]


def plan_tables(plan: Plan) -> list[Table]:
    """What a plan decides, what moves, and what it costs."""
    layouts = Table("kind", "name", "layout", "count", title=f"placements on mesh {plan.mesh}", title_justify="left")
    for kind, path, layout, count in placement_rows(plan):
        layouts.add_row(kind, path, layout, str(count))
    moves = Table("phase", "collective", "count", "bytes", "predicted", title="communication", title_justify="left")
    for phase, kind, count, nbytes, seconds in collective_rows(plan):
        moves.add_row(phase, kind, str(count), human_bytes(nbytes), human_seconds(seconds))
    costs = Table("predicted for one step", "", title=f"plan for {plan.cluster}", title_justify="left")
    costs.add_row("time", human_seconds(plan.seconds))
    costs.add_row("of it compute", human_seconds(plan.compute_s))
    costs.add_row("of it communication", human_seconds(plan.communication_s))
    costs.add_row("peak memory per device", human_bytes(plan.peak_bytes))
    costs.add_row("parameters per device", human_bytes(plan.parameter_bytes))
    costs.add_row("floating-point work per device", f"{plan.flops_share:.1%}")
    costs.add_row("certificate", f"{plan.status}, at most {plan.gap:.2%} above the best plan")
    return [layouts, moves, costs]


def collective_rows(plan: Plan) -> list[tuple[str, str, int, int, float]]:
    """(phase, path of collectives, count, bytes of the pieces after them, predicted seconds)."""
    rows: dict[tuple[str, str], list[float]] = {}
    for transfer in plan.transfers:
        kinds = [k for k in transfer.kinds if k not in ("slice", "zero")]
        if kinds:
            row = rows.setdefault((transfer.phase, " + ".join(kinds)), [0, 0, 0.0])
            row[0] += 1
            row[1] += transfer.nbytes
            row[2] += transfer.seconds
    return [(phase, kinds, int(n), int(b), s) for (phase, kinds), (n, b, s) in sorted(rows.items())]


def rule_rows(graph: Graph, rules: Sequence[Rule]) -> list[tuple[str, str, str, int]]:
    """(operator, rule in factor notation, where it came from, nodes); most frequent operators first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for node, rule in zip(graph.nodes, rules, strict=True):
        operands = tuple(len(graph.values[name].shape) for name in node.operands)
        results = tuple(0 if v is None else len(v.shape) for v in node.results)
        text = format_rule(rule, (operands, results)) if rule.factors else "replicated only"
        counts[(node.op, text, rule.found_on)] += 1
    per_operator: Counter[str] = Counter()
    for (op, _, _), count in counts.items():
        per_operator[op] += count
    order = sorted(counts, key=lambda key: (-per_operator[key[0]], key[0], -counts[key], key[1]))
    return [(*key, counts[key]) for key in order]


def rule_table(rows: Sequence[tuple[str, str, str, int]]) -> Table:
    """The rules of a graph."""
    table = Table("operator", "nodes", "rule", "from", title="rules", title_justify="left")
    for op, text, source, count in rows:
        table.add_row(op, str(count), text, source)
    return table


def curves(series: Mapping[str, Sequence[float]], width: int = 64, height: int = 14) -> str:
    """Curves over steps as text: each by a mark of its own, `=` where several coincide."""
    marks = "ox+*"
    low = min(min(values) for values in series.values())
    high = max(max(values) for values in series.values())
    span = (high - low) or 1.0
    grid = [[" "] * width for _ in range(height)]
    for mark, values in zip(marks, series.values(), strict=False):
        for column in range(width):
            value = values[round(column * (len(values) - 1) / (width - 1))]
            row = height - 1 - round((value - low) / span * (height - 1))
            grid[row][column] = mark if grid[row][column] == " " else "="
    lines = [f"{high - span * k / (height - 1):7.2f} |{''.join(row)}" for k, row in enumerate(grid)]
    last = max(len(values) for values in series.values()) - 1
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(marks, series, strict=False))
    lines.append(" " * 8 + "+" + "-" * width)
    lines.append(f"{'step':>7}  0{last:>{width - 1}}")
    lines.append(f"         {legend}" + (", = both" if len(series) > 1 else ""))
    return "\n".join(lines)
