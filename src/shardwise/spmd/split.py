"""One device's program -> its forward and its backward, with what is saved in between."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import BACKWARD, FORWARD, Graph, Input, Output
from ..ir.passes import fix_aliases

_BACKWARD_ONLY = ("tangent", "zero")


@dataclass(frozen=True)
class Phases:
    """Forward returns its outputs, mutations and what backward needs; backward takes that and the tangents."""

    forward: Graph
    backward: Graph | None
    saved: tuple[str, ...]
    """Names of the values that forward computes for backward."""
    saved_inputs: tuple[str, ...]
    """Names of the inputs that backward reads."""


def split(graph: Graph) -> Phases:
    """Cuts a lowered graph between its phases."""
    first = [n for n in graph.nodes if n.phase == FORWARD]
    second = [n for n in graph.nodes if n.phase == BACKWARD]
    made = {v.name for n in first for v in n.results if v is not None}
    inputs = {i.value.name: i for i in graph.inputs}
    gradients = graph.outputs_of("gradient")
    read = [name for n in second for name in n.operands] + [o.name for o in gradients if o.name is not None]
    saved = tuple(dict.fromkeys(n for n in read if n in made))
    saved_inputs = tuple(dict.fromkeys(n for n in read if n in inputs and inputs[n].kind not in _BACKWARD_ONLY))
    outputs = graph.outputs_of("output", "mutation")
    forward = Graph(
        tuple(i for i in graph.inputs if i.kind not in _BACKWARD_ONLY),
        tuple(first),
        (*outputs, *(Output(name, "saved", name) for name in saved)),
        f"{graph.name}_forward",
        "split",
    )
    if not gradients:
        return Phases(forward, None, (), ())
    table = graph.values
    backward = fix_aliases(
        Graph(
            (
                *(Input(table[name], "saved", name) for name in saved),
                *(inputs[name] for name in saved_inputs),
                *graph.inputs_of(*_BACKWARD_ONLY),
            ),
            tuple(second),
            gradients,
            f"{graph.name}_backward",
            "split",
        )
    )
    return Phases(forward, backward, saved, saved_inputs)
