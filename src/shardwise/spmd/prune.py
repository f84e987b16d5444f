"""The backward of a program some of whose outputs receive no gradient.

Autograd would fill the missing gradients with zeros of the outputs' sizes and multiply them through. Here they are
followed through the graph instead: where no gradient comes to a node, none leaves it, as in eager PyTorch, which does
not call it; and where its rule says that it is linear in operands that are all zero, its results are zero. Such nodes
are dropped, gradients that are zero do not exist (as in eager PyTorch), and a zero that something else reads (a sum of
two gradients) becomes an input of kind "zero", which takes no memory.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import BACKWARD, Graph, Input, Node
from ..ir.passes import rename_operands
from ..ir.placement import Layout
from ..plan.plan import NodePlan, Plan
from ..rules.rule import Rule


def prune(
    graph: Graph, rules: tuple[Rule, ...], plan: Plan, absent: frozenset[str]
) -> tuple[Graph, tuple[Rule, ...], Plan]:
    """Graph, rules and plan without the tangents of the outputs at the paths `absent`. Forward stays as it is."""
    zeros = {i.value.name for i in graph.inputs_of("tangent") if i.path in absent}
    flows = {i.value.name for i in graph.inputs_of("tangent")}
    alive: list[tuple[Node, Rule, NodePlan]] = []
    for node, rule, chosen in zip(graph.nodes, rules, plan.nodes):
        gradients = flows.intersection(node.operands)
        if gradients:
            flows.update(v.name for v in node.results if v is not None)
        if (gradients and gradients <= zeros) or _is_zero(node, rule, zeros):
            zeros.update(v.name for v in node.results if v is not None)
        else:
            alive.append((node, rule, chosen))
    outputs = tuple(replace(o, name=None) if o.kind == "gradient" and o.name in zeros else o for o in graph.outputs)
    alive = _needed(alive, {o.name for o in outputs if o.name is not None})
    inputs = [(i, x) for i, x in zip(graph.inputs, plan.inputs) if i.value.name not in zeros]
    made: dict[tuple[str, Layout], str] = {}
    nodes = []
    for node, _, chosen in alive:
        new = {}
        for name, layout in zip(node.operands, chosen.operands):
            if name in zeros:
                fresh = made.setdefault((name, layout), f"{name}_zero{len(made)}")
                assert new.setdefault(name, fresh) == fresh, f"{node.op} reads one zero in two layouts"
        nodes.append(rename_operands(node, new) if new else node)
    for (name, layout), fresh in made.items():
        value = replace(graph.values[name], name=fresh, alias=None, stride=None)
        inputs.append((Input(value, "zero", fresh), ("zero", fresh, layout)))
    pruned = replace(graph, inputs=tuple(i for i, _ in inputs), nodes=tuple(nodes), outputs=outputs, made_by="prune")
    layouts = tuple((k, p, None if o.name is None else x) for o, (k, p, x) in zip(outputs, plan.outputs))
    decided = replace(plan, inputs=tuple(x for _, x in inputs), nodes=tuple(c for *_, c in alive), outputs=layouts)
    return pruned, tuple(r for _, r, _ in alive), decided


def _is_zero(node: Node, rule: Rule, zeros: set[str]) -> bool:
    """Whether all results are zero because operands in which the node is jointly linear are."""
    if node.phase != BACKWARD:
        return False
    here = {k for k, name in enumerate(node.operands) if name in zeros}
    return any(group and here.issuperset(group) for group in rule.linear)


def _needed(alive: list[tuple[Node, Rule, NodePlan]], names: set[str]) -> list[tuple[Node, Rule, NodePlan]]:
    """All of forward, and of backward what the outputs need."""
    kept = []
    for item in reversed(alive):
        node = item[0]
        if node.phase != BACKWARD or any(v is not None and v.name in names for v in node.results):
            kept.append(item)
            names.update(node.operands)
    return kept[::-1]
