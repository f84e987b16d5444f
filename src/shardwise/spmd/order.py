"""What all devices must do alike: the collectives of their programs, in order."""

from __future__ import annotations

from ..ir.graph import Arg, Graph

Started = tuple[str, Arg, str, tuple[str, ...]]
"""(operator, mesh axis, phase, dtypes of the results) of a collective."""


def collectives(graph: Graph) -> tuple[Started, ...]:
    """The collectives of one device's program. Where those of two devices differ, both would wait for ever, or combine
    what does not belong together."""
    return tuple(
        (n.op, n.args[1], n.phase, tuple(v.dtype for v in n.results if v is not None))
        for n in graph.nodes
        if n.op.startswith("comm.")
    )
