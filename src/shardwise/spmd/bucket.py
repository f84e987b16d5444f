"""Gradients start on their way as soon as they are made, small ones share a buffer, and nothing waits for a gradient
before backward has ended.

The latency of an all-reduce is paid once per buffer instead of once per parameter. A view between an all-reduce and
the output would make the program wait for it in the middle of backward, so such views move to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..cost.collectives import BUFFER_BYTES, SHARED_BYTES
from ..ir.graph import BACKWARD, ITEM_BYTES, Arg, Graph, Node, Value
from ..ir.passes import leaving, leaving_views


def late_views(graph: Graph) -> Graph:
    """Views that only lead to outputs move behind everything else of backward."""
    late = leaving_views(graph)
    first = [n for k, n in enumerate(graph.nodes) if k not in late]
    return graph.with_nodes((*first, *(graph.nodes[k] for k in sorted(late))), "late_views")


@dataclass
class _Bucket:
    members: list[Node] = field(default_factory=list)
    nbytes: int = 0


def bucket_gradients(graph: Graph) -> Graph:
    """All-reduces whose results only leave the program stand behind the makers of their operands, where the last of a
    shared buffer is made."""
    last = leaving(graph)
    found = [k for k, node in enumerate(graph.nodes) if _reduces(node) and _result(node).name in last]
    ready = {k: max(graph.producer.get(n, -1) for n in graph.nodes[k].operands) for k in found}
    start = next((k for k, n in enumerate(graph.nodes) if n.phase == BACKWARD), 0) - 1
    behind: dict[int, list[Node]] = {}
    for place, node in _buckets([(max(ready[k], start), graph.nodes[k]) for k in sorted(found, key=ready.__getitem__)]):
        behind.setdefault(place, []).append(node)
    nodes = list(behind.get(-1, []))
    for k, node in enumerate(graph.nodes):
        nodes += [] if k in ready else [node]
        nodes += behind.get(k, [])
    return graph.with_nodes(tuple(nodes), "bucket_gradients")


def _reduces(node: Node) -> bool:
    return node.op == "comm.all_reduce" and node.phase == BACKWARD


def _result(node: Node) -> Value:
    assert node.results[0] is not None
    return node.results[0]


def _buckets(reductions: list[tuple[int, Node]]) -> Iterator[tuple[int, Node]]:
    """(index of the node to stand behind, all-reduce) for (index of the maker, all-reduce), the small ones merged."""
    filling: dict[tuple[Arg, Arg, str], _Bucket] = {}
    ready = -1
    for ready, node in reductions:
        value = _result(node)
        nbytes = value.numel * ITEM_BYTES.get(value.dtype, 8)
        if nbytes > SHARED_BYTES:
            yield ready, node
            continue
        key = (node.args[1], node.args[2], value.dtype)
        bucket = filling.setdefault(key, _Bucket())
        bucket.members.append(node)
        bucket.nbytes += nbytes
        if bucket.nbytes >= BUFFER_BYTES:
            yield ready, _merged(filling.pop(key).members)
    for bucket in filling.values():
        yield ready, _merged(bucket.members)


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
