"""A tiny interpreter of graphs over the runner, for tests that compare two graphs."""

from __future__ import annotations

import numpy as np

from shardwise.ir.graph import Graph
from shardwise.ir.runner import call_of
from shardwise.pytorch.runner import TorchRunner

RUNNER = TorchRunner()


def run_graph(graph: Graph, inputs: list[np.ndarray]) -> list[np.ndarray | None]:
    """The outputs of a graph, one operator after the other."""
    values = dict(zip((i.value.name for i in graph.inputs), inputs))
    for node in graph.nodes:
        call, names = call_of(node, graph.values)
        results = RUNNER.run(call, [values[n] for n in names])
        values.update((v.name, r) for v, r in zip(node.results, results) if v is not None and r is not None)
    return [None if o.name is None else values[o.name] for o in graph.outputs]


def inputs_for(graph: Graph, seed: int, int_range: int) -> list[np.ndarray]:
    """Random inputs: floats in (0.3, 2) for buffers, normal ones else; integers in [0, int_range)."""
    rng = np.random.default_rng(seed)
    found = []
    for item in graph.inputs:
        shape, dtype = item.value.shape, item.value.dtype
        if dtype.startswith("int"):
            found.append(np.asarray(rng.integers(0, int_range, shape), dtype))
        elif dtype == "bool":
            found.append(np.asarray(rng.random(shape) < 0.5))
        else:
            values = rng.uniform(0.3, 2.0, shape) if item.kind == "buffer" else rng.standard_normal(shape)
            found.append(np.asarray(values, dtype))
    return found
