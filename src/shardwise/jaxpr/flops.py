"""Floating-point operations of every node, by the compiler's own analysis of the primitive; nothing is compiled."""

from __future__ import annotations

from functools import lru_cache

import jax

from ..ir.graph import Graph
from ..ir.runner import Call, call_of
from .params import dtype_of
from .runner import bind


def count_flops(graph: Graph) -> dict[str, float]:
    """Node name -> floating-point operations of the whole, unsplit operator, each time it runs."""
    found = {}
    for node in graph.nodes:
        if node.op.startswith("jax."):
            flops = _flops(call_of(node, graph.values)[0])
            if flops:
                found[node.name] = flops
    return found


@lru_cache(maxsize=1 << 12)
def _flops(call: Call) -> float:
    structs = [jax.ShapeDtypeStruct(m.shape, dtype_of(m.dtype)) for m in call.operands]
    cost = jax.jit(lambda *xs: bind(call, xs)).lower(*structs).cost_analysis()
    return max(0.0, float((cost or {}).get("flops", 0.0)))
