"""What the devices of an axis tell their neighbours before they run an operator whose pieces overlap."""

from __future__ import annotations

from ..cluster.links import AxisLink
from ..cost.collectives import exchange_s
from ..ir.graph import ITEM_BYTES, Value
from ..ir.placement import Shard, max_local_elements
from ..rules.window import Span, needed_spans, owned_spans
from .options import Strategy


def received(owned: tuple[Span, ...], needed: tuple[Span, ...]) -> tuple[int, int]:
    """(messages, rows) that the busiest device gets from others."""
    found = [(0, 0)]
    for k, (start, stop) in enumerate(needed):
        rows = [max(0, min(stop, b) - max(start, a)) for j, (a, b) in enumerate(owned) if j != k]
        found.append((sum(n > 0 for n in rows), sum(rows)))
    return max(messages for messages, _ in found), max(rows for _, rows in found)


def exchanges_s(operands: list[Value], chosen: Strategy, mesh: tuple[int, ...], links: tuple[AxisLink, ...]) -> float:
    """Seconds of all exchanges before a node under a strategy."""
    total = 0.0
    for axis, overlap in enumerate(chosen.halos):
        if overlap is None:
            continue
        windows = overlap.windows(mesh[axis])
        for k, (value, layout) in enumerate(zip(operands, chosen.operands)):
            ratio, placement = overlap.halo.operands[k], layout[axis]
            if ratio == 0 or k in overlap.halo.zeros or not isinstance(placement, Shard):
                continue
            size = value.shape[placement.dim]
            messages, rows = received(owned_spans(size, mesh[axis]), needed_spans(size, ratio, windows))
            rest = (*mesh[:axis], *mesh[axis + 1 :])
            whole = max_local_elements(value.shape, (*layout[:axis], *layout[axis + 1 :]), rest)
            nbytes = whole // max(1, size) * rows * ITEM_BYTES.get(value.dtype, 8)
            total += exchange_s(messages, nbytes, links[axis])
    return total
