"""The invariants of a graph, checked after every pass in tests."""

from __future__ import annotations

from .graph import BACKWARD, FORWARD, INPUT_KINDS, OUTPUT_KINDS, Graph


def verify(graph: Graph) -> Graph:
    """Returns the graph, or raises AssertionError naming the first node that breaks an invariant.

    Every name is defined once and before its use; kinds and phases are known; a forward node reads no value of a
    backward node; an alias names an existing value; outputs exist; both ends of a tie exist.
    """
    known: dict[str, str] = {}
    for item in graph.inputs:
        assert item.kind in INPUT_KINDS, f"input {item.value.name}: unknown kind {item.kind!r}"
        assert item.value.name not in known, f"input {item.value.name} is defined twice"
        known[item.value.name] = BACKWARD if item.kind in ("tangent", "zero") else FORWARD
    for node in graph.nodes:
        where = f"node {node.name} ({node.op})"
        assert node.phase in (FORWARD, BACKWARD), f"{where}: unknown phase {node.phase!r}"
        for name in node.operands:
            assert name in known, f"{where} reads {name}, which is not defined before it"
            assert not (node.phase == FORWARD and known[name] == BACKWARD), f"{where}: forward reads backward's {name}"
        for value in node.results:
            if value is None:
                continue
            assert value.name.isidentifier(), f"{where}: {value.name!r} is not an identifier"
            assert value.name not in known, f"{where}: {value.name} is defined twice"
            assert all(size >= 0 for size in value.shape), f"{where}: negative size in {value.shape}"
            assert value.alias is None or value.alias in known, f"{where}: alias of unknown {value.alias}"
            known[value.name] = node.phase
    for output in graph.outputs:
        assert output.kind in OUTPUT_KINDS, f"output {output.path}: unknown kind {output.kind!r}"
        assert output.name is None or output.name in known, f"output {output.path} names unknown {output.name}"
    for first, second in graph.ties:
        assert first in known and second in known, f"tie of unknown {first} or {second}"
    return graph
