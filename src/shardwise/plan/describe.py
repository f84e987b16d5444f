"""Plans in words and tables, for people."""

from __future__ import annotations

from collections import Counter

from ..ir.placement import Layout, Shard, format_layout
from .plan import Plan


def human_bytes(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """`12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us"


def _kind(layout: Layout) -> str:
    return format_layout(layout)


def describe(plan: Plan) -> str:
    """The report: mesh, time, memory, certificate, placements of parameters and inputs, collectives."""
    lines = [
        f"Plan for mesh {plan.mesh} on {plan.cluster}",
        f"  predicted step    {human_seconds(plan.seconds)} "
        f"(compute {human_seconds(plan.compute_s)}, communication {human_seconds(plan.communication_s)})",
        f"  predicted peak    {human_bytes(plan.peak_bytes)} per device "
        f"({human_bytes(plan.parameter_bytes)} of parameters)",
        f"  work per device   {plan.flops_share:.1%} of the whole",
        f"  certificate       {_certificate(plan)}",
    ]
    for kind in ("parameter", "input"):
        counts = Counter(_kind(layout) for k, _, layout in plan.inputs if k == kind)
        if counts:
            text = ", ".join(f"{count} x {layout}" for layout, count in counts.most_common())
            lines.append(f"  {kind + 's':<17} {text}")
    lines.append("  collectives       " + (", ".join(_collectives(plan)) or "none"))
    return "\n".join(lines)


def _certificate(plan: Plan) -> str:
    if plan.status == "reused":
        return "none: taken over from the same graph at other sizes"
    return f"{plan.status}, at most {plan.gap:.2%} above the best plan"


def _collectives(plan: Plan) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for transfer in plan.transfers:
        for kind in transfer.kinds:
            if kind not in ("slice", "zero"):
                counts[(transfer.phase, kind)] += 1
    return [f"{count} {kind} in {phase}" for (phase, kind), count in sorted(counts.items())]


def explain(plan: Plan, path: str) -> str:
    """Where one parameter, buffer or input lies and what moves it. Raises KeyError listing close names."""
    found = [(kind, layout) for kind, p, layout in plan.inputs if p == path]
    if not found:
        from difflib import get_close_matches

        close = get_close_matches(path, [p for _, p, _ in plan.inputs], 3)
        raise KeyError(f"no parameter or input {path!r} in the plan; close: {', '.join(close) or 'none'}")
    kind, layout = found[0]
    lines = [f"{kind} {path}: {format_layout(layout)} on mesh {plan.mesh}"]
    for axis, placement in enumerate(layout):
        where = f"dim {placement.dim} is cut in {plan.mesh[axis]}" if isinstance(placement, Shard) else "whole"
        lines.append(f"  axis {axis}: {where}")
    gradient = [x for k, p, x in plan.outputs if k == "gradient" and p == path]
    if gradient:
        lines.append("  its gradient arrives as " + ("nothing" if gradient[0] is None else format_layout(gradient[0])))
    return "\n".join(lines)
