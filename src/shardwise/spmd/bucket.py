"""Small gradients share a buffer, and nothing waits for a gradient before backward has ended.

The latency of an all-reduce is paid once per buffer instead of once per parameter. A view between an all-reduce and
the output would make the program wait for it in the middle of backward, so such views move to the end.

Every device must come to the same buffers in the same order. What one device sees of its own program is no guide: where
it computes nothing, nothing reads what it receives. So graph and plan tell which results only leave (`only_leave`), and
the lowering marks their all-reduces with the bytes of the largest piece on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..cost.collectives import BUFFER_BYTES, SHARED_BYTES
from ..ir.graph import Arg, Graph, Node
from ..ir.passes import leaving, leaving_views
from ..plan.plan import Plan
from ..rules.rule import Rule


def only_leave(graph: Graph, rules: tuple[Rule, ...], plan: Plan) -> frozenset[str]:
    """The values of backward whose copies on other devices nothing waits for: views read them, and outputs what the
    views make, in the layout in which they make it."""
    own = {v.name: x for n, p in zip(graph.nodes, plan.nodes) for v, x in zip(n.results, p.results) if v is not None}
    wanted = {name: {x} for name, x in own.items()}
    for output, (_, _, layout) in zip(graph.outputs, plan.outputs):
        if output.name in own and layout is not None:
            wanted[output.name].add(layout)
    for node, chosen in zip(graph.nodes, plan.nodes):
        for name, layout in zip(node.operands, chosen.operands):
            if name in own:
                wanted[name].add(layout)
    found = set(leaving(graph))
    for node, rule, chosen in reversed(list(zip(graph.nodes, rules, plan.nodes))):
        overlap = any(kind == "factor" and rule.factors[i].halo is not None for kind, i, *_ in chosen.choice)
        if overlap or any(v is not None and (v.name not in found or len(wanted[v.name]) > 1) for v in node.results):
            found.difference_update(node.operands)
    return frozenset(found)


def late_views(graph: Graph) -> Graph:
    """Views that only lead to outputs move behind everything else of backward."""
    late = leaving_views(graph)
    first = [n for k, n in enumerate(graph.nodes) if k not in late]
    return graph.with_nodes((*first, *(graph.nodes[k] for k in sorted(late))), "late_views")


@dataclass
class _Buffer:
    members: list[Node] = field(default_factory=list)
    nbytes: int = 0


def bucket_gradients(graph: Graph) -> Graph:
    """Small all-reduces whose results only leave the program become one, where the last of a buffer stands."""
    sent_on = _sent_on(graph)
    filling: dict[tuple[Arg, Arg, str], _Buffer] = {}
    place: dict[str, _Buffer] = {}
    for node in graph.nodes:
        if node.op != "comm.all_reduce" or len(node.args) < 4:
            continue
        value, nbytes = node.results[0], node.args[3]
        assert value is not None and isinstance(nbytes, int)
        if nbytes > SHARED_BYTES or value.name in sent_on:
            continue
        key = (node.args[1], node.args[2], value.dtype)
        buffer = place[value.name] = filling.setdefault(key, _Buffer())
        buffer.members.append(node)
        buffer.nbytes += nbytes
        if buffer.nbytes >= BUFFER_BYTES:
            del filling[key]
    nodes = []
    for node in graph.nodes:
        first = node.results[0] if node.results else None
        buffer = None if first is None else place.get(first.name)
        if buffer is None:
            nodes.append(node)
        elif node is buffer.members[-1]:
            nodes.append(_merged(buffer.members))
    return graph.with_nodes(tuple(nodes), "bucket_gradients")


def _sent_on(graph: Graph) -> set[str]:
    """The values that a further step of a resharding sends on: at once, or cut first."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        cut = node.op in ("shard.slice", "shard.zero_unless")
        if node.op.startswith("comm.") or (cut and any(v is not None and v.name in found for v in node.results)):
            found.update(node.operands)
    return found


def _merged(members: list[Node]) -> Node:
    """One node for several all-reduces."""
    if len(members) == 1:
        return members[0]
    return replace(
        members[-1],
        op="comm.all_reduce_many",
        results=tuple(m.results[0] for m in members),
        args=(tuple(m.args[0] for m in members), members[0].args[1], members[0].args[2]),
    )
