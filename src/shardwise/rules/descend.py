"""Replaces operators that do not split along some dim by decompositions that do.

A batch norm does not split along its rows, a log-softmax not along the vocabulary: the fused operator would have its
operand gathered. Its decomposition sums over the pieces instead. A node is replaced where

- the fused operator has no factor for a dim of an operand (or of a result), while a cut of that dim flows through the
  whole decomposition: no value is gathered, and what is reduced is much smaller than the operand;
- nothing is lost by it: the decomposition has no contraction (the kernels of attention exist to avoid its
  intermediates), or nothing in between at all;
- it is worth it: the dim has the colour of a dim of the batch, without which data parallelism would gather; or opening
  all nodes that block its colour makes the graph grow by less than `GROWTH_SHARE`. So the vocabulary of a
  cross-entropy is opened (4 nodes in a model), while the width of a transformer stays closed: it would
  open every layer norm (2 per layer, 25 more nodes each), for a plan that reduces in each instead of gathering.

All nodes of a decomposition carry the name of the node that they replace as their region, so that a later pass can
put the fused operator back where the plan does not need the decomposition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..ir.graph import Graph, Node, Ref, Value, map_arg
from ..ir.runner import Call, OperatorError, call_of
from .book import RuleBook
from .flow import Colours, Dim, follow
from .proxy import format_call
from .rule import DimRef, Rule

GROWTH_SHARE = 0.25
GROWTH_FLOOR = 64
"""Colours of parameters alone are opened while that adds at most this share of the nodes, or this many."""
REDUCED_SHARE = 0.5
"""What a decomposition reduces may have at most this share of the operand's elements."""
MAX_DEPTH = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Opening:
    """A node with a decomposition that splits along more dims."""

    node: int
    inner: Graph
    dims: tuple[tuple[Dim, ...], ...]
    """For every dim that is opened, what is cut together with it: (value, dim) of operands and results."""


def descend(
    graph: Graph, book: RuleBook, progress: Progress = lambda done, total: None
) -> tuple[Graph, tuple[Rule, ...], dict[str, Node]]:
    """(graph with decompositions, its rules, region -> the node that the region replaces)."""
    return _Descent(book, progress).run(graph, 0)


@dataclass
class _Descent:
    book: RuleBook
    progress: Progress
    decomposed: dict[str, Graph | None] = field(default_factory=dict)
    descended: dict[str, Graph] = field(default_factory=dict)

    def run(self, graph: Graph, depth: int) -> tuple[Graph, tuple[Rule, ...], dict[str, Node]]:
        rules = self.book.of_graph(graph, self.progress)
        openings = self._openings(graph, rules, depth) if depth < MAX_DEPTH else []
        chosen = _worthwhile(graph, rules, openings)
        if not chosen:
            return graph, rules, {}
        opened = _splice(graph, {o.node: o.inner for o in chosen})
        regions = {graph.nodes[o.node].name: graph.nodes[o.node] for o in chosen}
        return opened, self.book.of_graph(opened, self.progress), regions

    def _openings(self, graph: Graph, rules: tuple[Rule, ...], depth: int) -> list[Opening]:
        used = _used(graph)
        found: list[tuple[int, Graph, str]] = []
        for k, (node, rule) in enumerate(zip(graph.nodes, rules)):
            if rule.moves_data or not _closed_dims(graph, node, rule):
                continue
            call = call_of(node, graph.values)[0]
            inner = self._decomposition(call)
            if inner is not None and all(
                o.name is not None for o, v in zip(inner.outputs, node.results) if v is not None and v.name in used
            ):
                found.append((k, inner, format_call(call)))
        self.book.find([call_of(n, g.values)[0] for _, g, _ in found for n in g.nodes], self.progress)
        openings = []
        for k, inner, key in found:
            if key not in self.descended:
                self.descended[key] = self.run(inner, depth + 1)[0]
            inner = _needed(self.descended[key], graph.nodes[k], used)
            opening = _opening(graph, k, rules[k], inner, self.book.of_graph(inner))
            if opening is not None:
                openings.append(opening)
        return openings

    def _decomposition(self, call: Call) -> Graph | None:
        key = format_call(call)
        if key not in self.decomposed:
            try:
                self.decomposed[key] = self.book.runner.decompose(call)
            except OperatorError:
                self.decomposed[key] = None
        return self.decomposed[key]


def _used(graph: Graph) -> set[str]:
    """Values that something reads."""
    return {name for node in graph.nodes for name in node.operands} | {o.name for o in graph.outputs if o.name}


def _closed_dims(graph: Graph, node: Node, rule: Rule) -> list[tuple[str, int, int]]:
    """("operand" | "result", position, dim) that no factor touches, or only one for equal pieces."""
    names = call_of(node, graph.values)[1]
    touched: set[tuple[str, int, int]] = set()
    for factor in rule.factors:
        if not factor.even:
            for side, roles in (("operand", factor.operands), ("result", factor.results)):
                touched |= {(side, k, role.dim) for k, role in enumerate(roles) if isinstance(role, DimRef)}
    sides = [("operand", [graph.values[n] for n in names]), ("result", list(node.results))]
    return [
        (side, k, d)
        for side, values in sides
        for k, value in enumerate(values)
        if value is not None
        for d, size in enumerate(value.shape)
        if size > 1 and (side, k, d) not in touched
    ]


def _needed(inner: Graph, node: Node, used: set[str]) -> Graph:
    """The decomposition without what only unused results need."""
    outputs = tuple(
        o if v is not None and v.name in used else replace(o, name=None) for o, v in zip(inner.outputs, node.results)
    )
    needed = {o.name for o in outputs if o.name is not None}
    kept = []
    for n in reversed(inner.nodes):
        if any(v is not None and v.name in needed for v in n.results):
            kept.append(n)
            needed.update(n.operands)
    return replace(inner, nodes=tuple(reversed(kept)), outputs=outputs)


def _opening(graph: Graph, k: int, rule: Rule, inner: Graph, rules: tuple[Rule, ...]) -> Opening | None:
    """The dims of a node that its decomposition opens; None where there are none or a contraction is in it."""
    apart = _only_apart(inner)
    if not apart and any(_contracts(r) for r in rules):
        return None
    node = graph.nodes[k]
    names = call_of(node, graph.values)[1]
    outer = {o.name: v.name for o, v in zip(inner.outputs, node.results) if o.name is not None and v is not None}
    opened: list[tuple[Dim, ...]] = []
    for side, position, dim in _closed_dims(graph, node, rule):
        if side == "operand":
            start, value = inner.inputs[position].value.name, graph.values[names[position]]
            flow = follow(inner, rules, start, DimRef(dim))
            small = apart or len(inner.nodes) == 1 or flow is None or flow.reduced <= REDUCED_SHARE * value.numel
            if flow is None or not small:
                continue
            reached = [(outer[name], place.dim) for name, place in flow.places.items() if name in outer]
            opened.append(((value.name, dim), *reached))
        elif (name := inner.outputs[position].name) is not None and _made_by_index(inner, rules, name, dim):
            opened.append(((outer[name], dim),))
    return Opening(k, inner, tuple(opened)) if opened else None


def _only_apart(inner: Graph) -> bool:
    """Whether every node reads nothing but the operands: results made one by one, without anything in between."""
    operands = {i.value.name for i in inner.inputs}
    return all(operands.issuperset(n.operands) for n in inner.nodes)


def _contracts(rule: Rule) -> bool:
    """Whether some factor is summed over that two operands share, in each of which the operator is linear alone."""
    alone = {group[0] for group in rule.linear if len(group) == 1}
    return any(
        "sum" in f.results and sum(isinstance(role, DimRef) for k, role in enumerate(f.operands) if k in alone) > 1
        for f in rule.factors
    )


def _made_by_index(inner: Graph, rules: tuple[Rule, ...], name: str, dim: int) -> bool:
    """Whether the node that makes this result has a factor for its dim that an integer operand points into."""
    k = inner.producer.get(name)
    if k is None:
        return False
    position = [v is not None and v.name == name for v in inner.nodes[k].results].index(True)
    return any(f.index is not None and f.results[position] == DimRef(dim) for f in rules[k].factors)


def _worthwhile(graph: Graph, rules: tuple[Rule, ...], openings: list[Opening]) -> list[Opening]:
    """The openings whose dims have the colour of the batch, or a colour that few nodes block."""
    colours = Colours()
    for node, rule in zip(graph.nodes, rules):
        colours.add_node(graph, node, rule)
    for opening in openings:
        for tied in opening.dims:
            colours.tie(tied)
    batch = {
        colours.of((i.value.name, d)) for i in graph.inputs_of("input", "tangent") for d in range(len(i.value.shape))
    }
    growth: Counter[Dim] = Counter()
    for opening in openings:
        for colour in {colours.of(tied[0]) for tied in opening.dims}:
            growth[colour] += len(opening.inner.nodes) - 1
    limit = max(GROWTH_FLOOR, GROWTH_SHARE * len(graph.nodes))
    wanted = batch | {colour for colour, nodes in growth.items() if nodes <= limit}
    return [o for o in openings if any(colours.of(tied[0]) in wanted for tied in o.dims)]


def _splice(graph: Graph, inner: dict[int, Graph]) -> Graph:
    """The graph with nodes replaced by graphs; results keep their names."""
    taken = set(graph.values)
    nodes: list[Node] = []
    owner = {name: value.alias or name for name, value in graph.values.items()}
    for k, node in enumerate(graph.nodes):
        if k in inner:
            nodes += _rename_into(graph, node, inner[k], owner, taken)
        else:
            nodes.append(node)
    return graph.with_nodes(tuple(nodes), "descend")


def _rename_into(graph: Graph, node: Node, inner: Graph, owner: dict[str, str], taken: set[str]) -> list[Node]:
    """The nodes of a decomposition in the place of `node`."""
    names = dict(zip((i.value.name for i in inner.inputs), call_of(node, graph.values)[1]))
    for output, value in zip(inner.outputs, node.results):
        if output.name is not None and value is not None:
            names[output.name] = value.name
    for name in inner.values:
        if name not in names:
            fresh = f"{node.name}__{name}"
            while fresh in taken:
                fresh += "_"
            taken.add(fresh)
            names[name] = fresh

    def renamed(value: Value | None) -> Value | None:
        if value is None:
            return None
        alias = None if value.alias is None else owner.get(names[value.alias], names[value.alias])
        return replace(value, name=names[value.name], alias=alias)

    def argument(arg):
        return map_arg(arg, lambda leaf: Ref(names[leaf.name]) if isinstance(leaf, Ref) else leaf)

    return [
        replace(
            n,
            results=tuple(map(renamed, n.results)),
            args=tuple(map(argument, n.args)),
            kwargs=tuple((key, argument(a)) for key, a in n.kwargs),
            phase=node.phase,
            recompute=node.recompute,
            source=node.source,
            region=node.name,
        )
        for n in inner.nodes
    ]
