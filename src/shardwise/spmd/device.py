"""The program of one device, all passes of lowering applied, and what it must have in common with all others."""

from __future__ import annotations

from ..ir.graph import Arg, Graph
from ..plan.plan import Plan
from ..plan.reshard import Resharding
from ..rules.rule import Rule
from .bucket import bucket_gradients, late_views
from .lower import lower

Started = tuple[str, Arg, str, tuple[str, ...]]
"""(operator, mesh axis, phase, dtypes of the results) of a collective."""


def device_program(
    graph: Graph, rules: tuple[Rule, ...], plan: Plan, resharding: Resharding, coords: tuple[int, ...]
) -> Graph:
    """Forward and backward of the device at `coords`, with gradients in shared buffers."""
    return bucket_gradients(late_views(lower(graph, rules, plan, resharding, coords)))


def collectives(graph: Graph) -> tuple[Started, ...]:
    """The collectives of one device's program. Where those of two devices differ, both would wait for ever, or combine
    what does not belong together."""
    return tuple(
        (n.op, n.args[1], n.phase, tuple(v.dtype for v in n.results if v is not None))
        for n in graph.nodes
        if n.op.startswith("comm.")
    )
