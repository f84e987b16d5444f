"""Puts fused operators back where a plan does not need their decomposition.

A region (see `rules/descend.py`) whose inside communicates nothing, and whose operands and results lie as one option
per axis of the fused operator has them, computes what the fused operator computes on every device: its rule says so.
The fused operator is faster and needs no intermediate memory.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from ..ir.graph import Graph, Node, Value
from ..ir.placement import Layout, Placement, R, Shard
from ..ir.runner import call_of
from ..plan.cuts import relative
from ..plan.options import Choice, Option, factor_option, replicate_option
from ..plan.plan import NodePlan, Plan
from ..rules.flow import is_plain
from ..rules.rule import DimRef, Rule


def fuse_regions(
    graph: Graph, rules: tuple[Rule, ...], plan: Plan, regions: dict[str, Node], fused_rules: dict[str, Rule]
) -> tuple[Graph, tuple[Rule, ...], Plan]:
    """The graph, rules and plan with every region that can be replaced by its operator."""
    own: dict[str, Layout] = {i.value.name: x for i, (_, _, x) in zip(graph.inputs, plan.inputs)}
    for node, chosen in zip(graph.nodes, plan.nodes):
        own.update((v.name, x) for v, x in zip(node.results, chosen.results) if v is not None and x is not None)
    nodes: list[Node] = []
    kept_rules: list[Rule] = []
    plans: list[NodePlan] = []
    triples = zip(graph.nodes, rules, plan.nodes)
    for region, group in groupby(triples, key=lambda t: t[0].region):
        members = list(group)
        fused = None if region is None else _fused(graph, members, regions[region], fused_rules[region], own, plan)
        if fused is None:
            for node, rule, chosen in members:
                nodes.append(node)
                kept_rules.append(rule)
                plans.append(chosen)
        else:
            assert region is not None
            nodes.append(regions[region])
            kept_rules.append(fused_rules[region])
            plans.append(fused)
    return _without_unread(
        graph.with_nodes(tuple(nodes), "fuse_regions"), kept_rules, replace(plan, nodes=tuple(plans))
    )


def _without_unread(graph: Graph, rules: list[Rule], plan: Plan) -> tuple[Graph, tuple[Rule, ...], Plan]:
    """Without what is left of decompositions and read by nobody: a result that only a fused operator would read."""
    read = {o.name for o in graph.outputs}
    kept: list[tuple[Node, Rule, NodePlan]] = []
    for node, rule, chosen in reversed(list(zip(graph.nodes, rules, plan.nodes))):
        if node.region is None or any(v is not None and v.name in read for v in node.results):
            kept.append((node, rule, chosen))
            read.update(node.operands)
    nodes, left, plans = zip(*reversed(kept)) if kept else ((), (), ())
    return graph.with_nodes(tuple(nodes), "fuse_regions"), tuple(left), replace(plan, nodes=tuple(plans))


def _fused(
    graph: Graph,
    members: list[tuple[Node, Rule, NodePlan]],
    node: Node,
    rule: Rule,
    own: dict[str, Layout],
    plan: Plan,
) -> NodePlan | None:
    """What the fused operator does in the place of its decomposition; None where it does not fit."""
    made = {v.name for n, _, _ in members for v in n.results if v is not None}
    wanted: dict[str, Layout] = {}
    for member, _, chosen in members:
        for name, layout in zip(member.operands, chosen.operands):
            expected = own[name] if name in made else wanted.setdefault(name, layout)
            if layout != expected:
                return None
    names = call_of(node, graph.values)[1]
    operands = [wanted.get(n) for n in names]
    results = [own.get(v.name) if v is not None and v.name in made else None for v in node.results]
    values = [graph.values[n] for n in names]
    options = []
    for axis in range(len(plan.mesh)):
        here = [None if x is None else x[axis] for x in operands]
        there = [None if x is None else x[axis] for x in results]
        option = _matching(values, node, rule, here, there)
        if option is None:
            return None
        options.append(option)
    choice: tuple[Choice, ...] = tuple(o.choice for o in options)
    operand_layouts = tuple(zip(*(o.operands for o in options))) if names else ()
    result_layouts = tuple(
        None if v is None else tuple(o.results[r] or R for o in options) for r, v in enumerate(node.results)
    )
    return NodePlan(node.name, operand_layouts, result_layouts, choice)


def _matching(
    values: list[Value], node: Node, rule: Rule, operands: list[Placement | None], results: list[Placement | None]
) -> Option | None:
    """The option of the fused operator that has these placements; None as a placement fits any."""
    candidates = [replicate_option(len(values), node.results)]
    for k, factor in enumerate(rule.factors):
        if not is_plain(factor):
            continue
        insides = set()
        places = [*zip(values, operands, factor.operands), *zip(node.results, results, factor.results)]
        for value, placement, ref in places:
            if value is not None and isinstance(placement, Shard) and isinstance(ref, DimRef):
                if placement.dim == ref.dim:
                    insides.add(relative(ref, (placement.outer, placement.unit), value.shape[ref.dim]))
        for inside in sorted(i for i in insides if i is not None):
            option = factor_option(k, factor, inside, values, node.results)
            if option is not None:
                candidates.append(option)
    for option in candidates:
        pairs = [*zip(operands, option.operands), *zip(results, option.results)]
        if all(asked is None or asked == offered for asked, offered in pairs):
            return option
    return None
