"""Floating-point operations of every node; nothing is compiled."""

from __future__ import annotations

from functools import lru_cache

import jax

from ..ir.graph import Graph
from ..ir.runner import Call, call_of
from ..rules.pointwise import pointwise_shape
from ..rules.rule import Rule
from .params import dtype_of
from .runner import bind


def count_flops(graph: Graph, rules: tuple[Rule, ...]) -> dict[str, float]:
    """Node name -> floating-point operations of the whole, unsplit operator, each time it runs.

    One for every element where the rule says that the node is pointwise; else what the compiler's own analysis of the
    primitive says.
    """
    found = {}
    for node, rule in zip(graph.nodes, rules):
        made = [v for v in node.results if v is not None]
        if not made or not made[0].dtype.startswith(("float", "bfloat", "complex")):
            continue
        if pointwise_shape(graph, node, rule) is not None:
            found[node.name] = float(made[0].numel)
        elif node.op.startswith("jax.") and any(v.alias is None for v in made):
            flops = _flops(call_of(node, graph.values)[0])
            if flops:
                found[node.name] = flops
    return found


@lru_cache(maxsize=1 << 12)
def _flops(call: Call) -> float:
    structs = [jax.ShapeDtypeStruct(m.shape, dtype_of(m.dtype)) for m in call.operands]
    cost = jax.jit(lambda *xs: bind(call, xs)).lower(*structs).cost_analysis()
    return max(0.0, float((cost or {}).get("flops", 0.0)))
