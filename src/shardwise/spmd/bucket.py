"""Small gradients share a buffer, and nothing waits for a gradient before backward has ended.

The latency of an all-reduce is paid once per buffer instead of once per parameter. A view between an all-reduce and
the output would make the program wait for it in the middle of backward, so such views move to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..cost.collectives import BUFFER_BYTES, SHARED_BYTES
from ..ir.graph import BACKWARD, ITEM_BYTES, Arg, Graph, Node, Ref
from ..ir.passes import leaving, leaving_views


def late_views(graph: Graph) -> Graph:
    """Views that only lead to outputs move behind everything else of backward."""
    late = leaving_views(graph)
    first = [n for k, n in enumerate(graph.nodes) if k not in late]
    return graph.with_nodes((*first, *(graph.nodes[k] for k in sorted(late))), "late_views")


@dataclass
class _Bucket:
    members: list[int] = field(default_factory=list)
    nbytes: int = 0


def bucket_gradients(graph: Graph) -> Graph:
    """Puts small all-reduces whose results only leave the program into shared buffers."""
    last = leaving(graph)
    open_buckets: dict[tuple[Arg, Arg, str], _Bucket] = {}
    closed: dict[int, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        value = node.results[0] if node.results else None
        if node.op != "comm.all_reduce" or node.phase != BACKWARD or value is None or value.name not in last:
            continue
        nbytes = value.numel * ITEM_BYTES.get(value.dtype, 8)
        if nbytes > SHARED_BYTES:
            continue
        key = (node.args[1], node.args[2], value.dtype)
        bucket = open_buckets.setdefault(key, _Bucket())
        bucket.members.append(k)
        bucket.nbytes += nbytes
        if bucket.nbytes >= BUFFER_BYTES:
            closed[k] = open_buckets.pop(key).members
    for bucket in open_buckets.values():
        closed[bucket.members[-1]] = bucket.members
    together = {k for members in closed.values() if len(members) > 1 for k in members}
    nodes: list[Node] = []
    for k, node in enumerate(graph.nodes):
        if k not in together:
            nodes.append(node)
        elif k in closed:
            nodes.append(_merged([graph.nodes[m] for m in closed[k]]))
    return graph.with_nodes(tuple(nodes), "bucket_gradients")


def _merged(members: list[Node]) -> Node:
    """One node for several all-reduces."""
    refs = tuple(m.args[0] for m in members)
    assert all(isinstance(r, Ref) for r in refs)
    return replace(
        members[-1],
        op="comm.all_reduce_many",
        results=tuple(m.results[0] for m in members),
        args=(refs, members[0].args[1], members[0].args[2]),
    )
