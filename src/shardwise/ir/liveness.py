"""When values die, and how many bytes are alive at each node. Values that share storage live and die together."""

from __future__ import annotations

from .graph import Graph


def storage_of(graph: Graph) -> dict[str, str]:
    """Value name -> name of the value that owns its storage."""
    owner: dict[str, str] = {}
    for name in graph.values:
        base = name
        while (alias := graph.values[base].alias) is not None:  # an input may stand before the owner of its storage
            base = alias
        owner[name] = base
    return owner


def last_use(graph: Graph) -> dict[str, int]:
    """Value name -> index of the last node that reads it; len(nodes) for outputs; its producer where nobody does."""
    last = {name: graph.producer.get(name, -1) for name in graph.values}
    for k, node in enumerate(graph.nodes):
        for name in node.operands:
            last[name] = k
    for output in graph.outputs:
        if output.name is not None:
            last[output.name] = len(graph.nodes)
    return last


def storage_intervals(graph: Graph) -> dict[str, tuple[int, int]]:
    """Owner of a storage -> (index of the node that makes it, index of the last node that needs it).

    Inputs start at -1.
    """
    owner, last = storage_of(graph), last_use(graph)
    spans: dict[str, tuple[int, int]] = {}
    for name in graph.values:
        base = owner[name]
        start, stop = spans.get(base, (graph.producer.get(base, -1), -1))
        spans[base] = (start, max(stop, last[name]))
    return spans


def live_bytes(graph: Graph, nbytes: dict[str, int] | None = None) -> list[int]:
    """Bytes alive while each node runs (its results and operands included).

    `nbytes` replaces the size of a storage, by the name of its owner; outputs and inputs count while needed.
    """
    n = len(graph.nodes)
    delta = [0] * (n + 2)
    for base, (start, stop) in storage_intervals(graph).items():
        size = graph.values[base].nbytes if nbytes is None else nbytes.get(base, 0)
        delta[max(start, 0)] += size
        delta[min(stop, n) + 1] -= size
    alive, total = [], 0
    for k in range(n):
        total += delta[k]
        alive.append(total)
    return alive
