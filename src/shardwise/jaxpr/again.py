"""What the compiler computes again instead of keeping, and what it never stores: so that memory is planned as it is.

XLA puts a cheap pointwise operator into the loop of everything that reads it, each time anew. So backward keeps what an
activation was made from, and not every step of the way; and what only a reduction reads is never stored.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import BACKWARD, FORWARD, Graph, Node, Value
from ..ir.passes import is_view, rename_operands
from ..rules.pointwise import FUSED, pointwise_shape
from ..rules.rule import Rule

EXPENSIVE = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "div", "erf",
        "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma", "lgamma", "log", "log1p", "logistic", "pow", "rem",
        "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "threefry2x32",
    }
)  # fmt: skip
"""Primitives that XLA computes once (`HloInstruction::IsExpensive`)."""


def computed_again(graph: Graph, rules: tuple[Rule, ...]) -> tuple[Graph, tuple[Rule, ...], dict[int, list[int]]]:
    """Backward with its own copies of the cheap pointwise nodes of forward, where only pointwise nodes and reductions
    read them there: (graph, rules, number of a node -> that which it had; copies had none)."""
    light = [_reads_elements(graph, n, r) for n, r in zip(graph.nodes, rules)]
    cheap = [
        light[k] and n.op.removeprefix("jax.") not in EXPENSIVE and pointwise_shape(graph, n, r) is not None
        for k, (n, r) in enumerate(zip(graph.nodes, rules))
    ]
    kept = {o.name for o in graph.outputs}
    for k, node in enumerate(graph.nodes):
        if node.phase == BACKWARD and not light[k]:
            kept.update(node.operands)

    def is_made_again(name: str) -> bool:
        k = graph.producer.get(name)
        if k is None or name in kept:
            return False
        node = graph.nodes[k]
        return node.phase == FORWARD and (cheap[k] or is_view(node))

    copies: dict[tuple[str, str], str] = {}
    had: dict[int, list[int]] = {}
    nodes: list[Node] = []
    found: list[Rule] = []

    def copied(name: str, loop: str) -> str:
        """The name under which backward reads a value."""
        if not is_made_again(name):
            return name
        k = graph.producer[name]
        node = graph.nodes[k]
        if node.loop != loop or not node.op.startswith("jax."):
            return name
        if (name, loop) not in copies:
            new = {n: copied(n, loop) for n in node.operands}
            results: list[Value | None] = []
            for v in node.results:
                if v is not None:
                    copies[v.name, loop] = f"{v.name}_b"
                    results.append(replace(v, name=f"{v.name}_b", alias=v.alias and new.get(v.alias, v.alias)))
            nodes.append(replace(rename_operands(node, new), results=tuple(results), phase=BACKWARD))
            found.append(rules[k])
        return copies[name, loop]

    for k, node in enumerate(graph.nodes):
        if node.phase == BACKWARD and light[k]:
            node = rename_operands(node, {n: copied(n, node.loop) for n in node.operands})
        had[len(nodes)] = [k]
        nodes.append(node)
        found.append(rules[k])
    return replace(graph, nodes=tuple(nodes), made_by="computed_again"), tuple(found), had


def _reads_elements(graph: Graph, node: Node, rule: Rule) -> bool:
    """Whether a node reads its operands element by element: pointwise, or a reduction of one tensor."""
    if not node.op.startswith("jax.") or is_view(node):
        return False
    return pointwise_shape(graph, node, rule) is not None or is_reduction(graph, node, rule)


def is_reduction(graph: Graph, node: Node, rule: Rule) -> bool:
    """Whether a node sums, or otherwise combines, the elements of its one tensor."""
    tensors = [n for n in node.operands if graph.values[n].shape]
    combined = any(isinstance(role, str) for factor in rule.factors for role in factor.results)
    return len(tensors) == 1 and len(node.operands) == 1 and combined


def never_stored(graph: Graph, rules: tuple[Rule, ...]) -> Graph:
    """What only reductions read of a joined node lives in the storage of the largest tensor that it is made from."""
    outs = {o.name for o in graph.outputs}
    nodes = []
    for node in graph.nodes:
        operands = sorted((graph.values[n].nbytes, n) for n in node.operands)
        results = []
        for value in node.results:
            readers = [] if value is None else [graph.nodes[k] for k in graph.consumers[value.name]]
            numbers = [] if value is None else graph.consumers[value.name]
            reduced = readers and all(is_reduction(graph, graph.nodes[k], rules[k]) for k in numbers)
            if value is not None and reduced and value.name not in outs and operands and _is_made(node):
                value = replace(value, alias=operands[-1][1])
            results.append(value)
        nodes.append(replace(node, results=tuple(results)))
    return replace(graph, nodes=tuple(nodes))


def _is_made(node: Node) -> bool:
    return node.op == FUSED
