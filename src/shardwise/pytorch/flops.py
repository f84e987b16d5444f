"""Floating-point operations of every node, by torch's own counter; operators it does not know count none."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ..ir.graph import Arg, Graph, Ref
from .operators import find_op

_COUNTED_AS = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (
        "aten._scaled_dot_product_flash_attention_backward.default"
    ),
}
"""Operators that torch's counter does not know, by one that it does: the same work on the same operands."""


def count_flops(graph: Graph) -> dict[str, float]:
    """Node name -> floating-point operations of the whole, unsplit operator."""
    found: dict[str, float] = {}
    for node in graph.nodes:
        try:
            formula = flop_registry.get(find_op(_COUNTED_AS.get(node.op, node.op)).overloadpacket)
        except (AttributeError, ValueError):
            continue
        if formula is None:
            continue

        def convert(arg: Arg) -> Any:
            if isinstance(arg, Ref):
                return torch.empty(graph.values[arg.name].shape, device="meta")
            return [convert(a) for a in arg] if isinstance(arg, tuple) else arg

        results = [None if v is None else torch.empty(v.shape, device="meta") for v in node.results]
        out = results[0] if len(results) == 1 else tuple(results)
        args = [convert(a) for a in node.args]
        found[node.name] = float(formula(*args, **{k: convert(a) for k, a in node.kwargs}, out_val=out))
    return found
