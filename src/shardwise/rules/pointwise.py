"""Joins pointwise nodes that read each other into one node, as a compiler joins them into one loop over the elements.

By its rule a node is pointwise where every dim of its results is a factor that cuts the same dim of all operands that
have it; a scalar has none, and a dim of size 1 is read again and again. The rule of the joined node follows exactly:
it has these same factors, and it is linear in a group of operands where linearity passes through all of its nodes.
What lies inside is never stored, costs no launch of its own, and needs no decision of the planner.

A joined node is `fused.pointwise(operands..., body=Literal("graph", text))`; the shapes inside of the body are left
out, so that equal bodies are equal whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations

from ..ir.graph import Arg, Graph, Input, Literal, Node, Output, Ref, Value, map_arg
from ..ir.text import format_graph
from .rule import DimRef, Factor, OperandRole, Rule

FUSED = "fused.pointwise"
MAX_NODES = 64
"""Nodes of one joined node."""


@dataclass
class _Group:
    """Nodes that become one."""

    nodes: list[int]
    shape: tuple[int, ...] | None
    """None: its one node is not pointwise."""
    reads: set[int] = field(default_factory=set)
    """Groups that it reads."""


def fuse_pointwise(
    graph: Graph,
    rules: tuple[Rule, ...],
    may: Callable[[Node], bool],
    early: frozenset[str] = frozenset(),
    blocks: tuple[tuple[int, int], ...] = (),
) -> tuple[Graph, tuple[Rule, ...], dict[int, list[int]]]:
    """(graph with joined nodes, their rules, number of a node -> the nodes that it was made of).

    `may` says which nodes may be joined at all. A node that makes one of the values `early` stands as soon as what it
    reads is there; all others stand where the last of their nodes stood. `blocks` are ranges of nodes, loops, that
    nothing may be put into.
    """
    groups, home = _grouped(graph, rules, may)
    order = _ordered(graph, groups, early, blocks)
    nodes: list[Node] = []
    new_rules: list[Rule] = []
    made_of: dict[int, list[int]] = {}
    outside = _read_outside(graph, home)
    for g in order:
        members = groups[g].nodes
        made_of[len(nodes)] = members
        if len(members) == 1:
            nodes.append(graph.nodes[members[0]])
            new_rules.append(rules[members[0]])
        else:
            node, rule = _joined(graph, rules, members, outside)
            nodes.append(node)
            new_rules.append(rule)
    return replace(graph, nodes=tuple(nodes), made_by="fuse_pointwise"), tuple(new_rules), made_of


def pointwise_shape(graph: Graph, node: Node, rule: Rule) -> tuple[int, ...] | None:
    """The shape over which a node is pointwise; None where it is not."""
    results = [v for v in node.results if v is not None]
    if not results or len({v.shape for v in results}) > 1 or len(results) < len(node.results):
        return None
    shape = results[0].shape
    operands = [graph.values[n].shape for n in node.operands]
    if not all(_spread(s, shape) for s in operands) or not operands:
        return None
    for dim, size in enumerate(shape):
        if size > 1 and _factor(dim, operands, len(results)) not in [replace(f, empty=True) for f in rule.factors]:
            return None
    return shape


def _spread(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is read once, or again and again, over the elements of another."""
    return not shape or (len(shape) == len(over) and all(s in (1, o) for s, o in zip(shape, over)))


def _factor(dim: int, operands: list[tuple[int, ...]], results: int) -> Factor:
    roles: tuple[OperandRole, ...] = tuple(DimRef(dim) if s and s[dim] > 1 else None for s in operands)
    return Factor(roles, (DimRef(dim),) * results, empty=True)


def _grouped(
    graph: Graph, rules: tuple[Rule, ...], may: Callable[[Node], bool]
) -> tuple[dict[int, _Group], dict[int, int]]:
    """Groups by number, and the group of every node."""
    groups: dict[int, _Group] = {}
    home: dict[int, int] = {}
    for k, (node, rule) in enumerate(zip(graph.nodes, rules)):
        shape = pointwise_shape(graph, node, rule) if may(node) else None
        makers = dict.fromkeys(graph.producer[n] for n in node.operands if n in graph.producer)
        read = {home[m] for m in makers}
        groups[k] = _Group([k], shape, read)
        home[k] = k
        if shape is None:
            continue
        for other in sorted(read, reverse=True):
            if _may_join(graph, groups, home, home[k], other):
                _join(groups, home, home[k], other)
    return groups, home


def _may_join(graph: Graph, groups: dict[int, _Group], home: dict[int, int], here: int, other: int) -> bool:
    """Whether a group and one that it reads can become one: alike, no way leads from one to the other outside, and
    nobody who reads the older would have to wait."""
    group, into = groups[here], groups[other]
    first, last = graph.nodes[group.nodes[0]], graph.nodes[into.nodes[0]]
    if group.shape != into.shape or (first.phase, first.loop) != (last.phase, last.loop):
        return False
    if len(group.nodes) + len(into.nodes) > MAX_NODES:
        return False
    for k in into.nodes:
        for value in graph.nodes[k].results:
            readers = graph.consumers[value.name] if value is not None else ()
            if any(r < group.nodes[-1] and home[r] not in (here, other) for r in readers):
                return False
    seen: set[int] = set()
    stack = [g for g in group.reads if g != other]
    oldest = into.nodes[0]
    while stack:
        g = stack.pop()
        if g == other:
            return False
        if g not in seen and groups[g].nodes[-1] > oldest:
            seen.add(g)
            stack += groups[g].reads
    return True


def _join(groups: dict[int, _Group], home: dict[int, int], here: int, other: int) -> None:
    """Makes one group of two, under the number of the second."""
    gone, kept = groups.pop(here), groups[other]
    kept.nodes = sorted([*kept.nodes, *gone.nodes])
    kept.reads = (kept.reads | gone.reads) - {here, other}
    for k in gone.nodes:
        home[k] = other
    for group in groups.values():
        if here in group.reads:
            group.reads = (group.reads - {here}) | {other}


def _ordered(
    graph: Graph, groups: dict[int, _Group], early: frozenset[str], blocks: tuple[tuple[int, int], ...]
) -> list[int]:
    """Groups in an order in which each stands behind what it reads."""
    place: dict[int, int] = {}

    def put(g: int) -> int:
        """Where a group wants to stand, what it reads before it."""
        stack = [g]
        while stack:
            top = stack[-1]
            missing = [r for r in groups[top].reads if r not in place]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top in place:
                continue
            group = groups[top]
            made = {v.name for k in group.nodes for v in graph.nodes[k].results if v is not None}
            ready = max((place[r] for r in group.reads), default=-1)
            if made & early and not graph.nodes[group.nodes[0]].loop:
                place[top] = max((end - 1 for begin, end in blocks if begin <= ready < end), default=ready)
            else:
                place[top] = max(ready, group.nodes[-1])
        return place[g]

    for g in groups:
        put(g)
    depth: dict[int, int] = {}
    for g in sorted(groups, key=lambda g: (place[g], groups[g].nodes[-1])):
        depth[g] = max((depth.get(r, 0) + 1 for r in groups[g].reads if place[r] == place[g]), default=0)
    return sorted(groups, key=lambda g: (place[g], depth[g], groups[g].nodes[-1]))


def _read_outside(graph: Graph, home: dict[int, int]) -> frozenset[str]:
    """Values that nodes of other groups read, or that leave the program."""
    found = {o.name for o in graph.outputs if o.name is not None}
    for k, node in enumerate(graph.nodes):
        found.update(n for n in node.operands if n in graph.producer and home[graph.producer[n]] != home[k])
    return frozenset(found)


def _joined(graph: Graph, rules: tuple[Rule, ...], members: list[int], outside: frozenset[str]) -> tuple[Node, Rule]:
    """One node for several, and its rule."""
    made = {v.name for k in members for v in graph.nodes[k].results if v is not None}
    operands = list(dict.fromkeys(n for k in members for n in graph.nodes[k].operands if n not in made))
    results = [v for k in members for v in graph.nodes[k].results if v is not None and v.name in outside]
    if not results:  # nothing reads it; it stays as it is, for the sake of its last node
        results = [v for v in graph.nodes[members[-1]].results if v is not None]
    names = {n: f"x{j}" for j, n in enumerate(operands)}
    numbers: list[Arg] = []
    body = []
    for k in members:
        node = graph.nodes[k]
        fresh = []
        for value in node.results:
            assert value is not None
            names[value.name] = f"v{len(names)}"
            fresh.append(Value(names[value.name], (), value.dtype))

        def change(leaf: Arg) -> Arg:
            if isinstance(leaf, Literal) and leaf.kind.startswith(("float", "bfloat")):
                numbers.append(leaf)
                return Ref(f"n{len(numbers) - 1}")
            return Ref(names[leaf.name]) if isinstance(leaf, Ref) else leaf

        body.append(Node(tuple(fresh), node.op, tuple(map_arg(a, change) for a in node.args), node.kwargs))
    inputs = [Input(Value(names[n], (), graph.values[n].dtype), "input", names[n]) for n in operands]
    inputs += [Input(Value(f"n{j}", (), str(_kind(a))), "input", f"n{j}") for j, a in enumerate(numbers)]
    outputs = tuple(Output(names[v.name], "output", str(j)) for j, v in enumerate(results))
    inner = Graph(tuple(inputs), tuple(body), outputs, "body")
    last = graph.nodes[members[-1]]
    args = (*map(Ref, operands), *numbers)
    kwargs = (("body", Literal("graph", format_graph(inner))),)
    shape = results[0].shape
    shapes = [graph.values[n].shape for n in operands]
    own = tuple(replace(v, alias=None) for v in results)
    node = Node(own, FUSED, args, kwargs, last.phase, source=last.source, loop=last.loop)
    factors = tuple(_factor(d, shapes, len(results)) for d, size in enumerate(shape) if size > 1)
    linear = _linear(graph, rules, members, operands, [v.name for v in results])
    return node, Rule(factors, linear, found_on="composed")


def _kind(arg: Arg) -> str:
    assert isinstance(arg, Literal)
    return arg.kind


def _linear(
    graph: Graph, rules: tuple[Rule, ...], members: list[int], operands: list[str], results: list[str]
) -> tuple[tuple[int, ...], ...]:
    """Groups of operands in which all results are jointly additive: single ones, pairs, and all."""
    floats = [j for j, n in enumerate(operands) if graph.values[n].dtype.startswith(("float", "bfloat", "complex"))]
    tried: list[tuple[int, ...]] = [(j,) for j in floats]
    tried += list(combinations(floats, 2)) if len(floats) <= 6 else []
    if len(floats) > 2:
        tried.append(tuple(floats))
    found = []
    for group in tried:
        linear = {operands[j] for j in group}
        good = True
        for k in members:
            node = graph.nodes[k]
            here = tuple(j for j, n in enumerate(node.operands) if n in linear)
            if here and here not in rules[k].linear:
                good = False
                break
            if here:
                linear.update(v.name for v in node.results if v is not None)
        if good and all(r in linear for r in results):
            found.append(group)
    return tuple(found)
