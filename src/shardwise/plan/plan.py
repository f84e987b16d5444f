"""The Plan: every decision of the planner as plain data, with its cost and its certificate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..ir.graph import ITEM_BYTES, Graph
from ..ir.placement import Layout, R, format_layout, max_local_elements, parse_layout
from .evaluate import evaluate, layout_of
from .options import Choice
from .planner import Outcome
from .problem import Problem

FORMAT = 1


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one node does: the layouts it needs and gives, and which option of its rule that is on every axis."""

    name: str
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]
    choice: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One resharding that the plan asks for."""

    value: str
    phase: str
    source: Layout
    target: Layout
    kinds: tuple[str, ...]
    seconds: float
    nbytes: int
    """Bytes of the largest local piece after it."""


@dataclass(frozen=True)
class Plan:
    """How a graph runs on a mesh. `seconds` and `peak_bytes` are predictions for one step on one device."""

    mesh: tuple[int, ...]
    inputs: tuple[tuple[str, str, Layout], ...]
    """(kind, path, layout) of every input."""
    outputs: tuple[tuple[str, str, Layout | None], ...]
    """(kind, path, layout) of every output; None where there is no tensor."""
    nodes: tuple[NodePlan, ...]
    kept: tuple[tuple[str, Layout], ...]
    """Forward copies that are saved for backward."""
    transfers: tuple[Transfer, ...]
    compute_s: float
    communication_s: float
    peak_bytes: int
    parameter_bytes: int
    """Of the largest share of the parameters, optimizer state excluded."""
    flops_share: float
    """Part of the floating-point work that the busiest device does; 1 where nothing is split."""
    bound_s: float
    status: str
    cluster: str

    @property
    def seconds(self) -> float:
        """Predicted time of one step (without the optimizer)."""
        return self.compute_s + self.communication_s

    @property
    def gap(self) -> float:
        """How far the plan can be from the best one, relative."""
        return max(0.0, 1.0 - self.bound_s / self.seconds) if self.seconds > 0 else 0.0

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Path of a parameter, buffer or input -> layout."""
        return {path: layout for _, path, layout in self.inputs}

    def to_json(self) -> str:
        """Everything as JSON; `from_json` is the inverse."""
        return json.dumps(
            {
                "format": FORMAT,
                "mesh": self.mesh,
                "inputs": [[k, p, format_layout(x)] for k, p, x in self.inputs],
                "outputs": [[k, p, None if x is None else format_layout(x)] for k, p, x in self.outputs],
                "nodes": [
                    [
                        n.name,
                        [format_layout(x) for x in n.operands],
                        [None if x is None else format_layout(x) for x in n.results],
                        n.choice,
                    ]
                    for n in self.nodes
                ],
                "kept": [[v, format_layout(x)] for v, x in self.kept],
                "transfers": [
                    [t.value, t.phase, format_layout(t.source), format_layout(t.target), t.kinds, t.seconds, t.nbytes]
                    for t in self.transfers
                ],
                "compute_s": self.compute_s,
                "communication_s": self.communication_s,
                "peak_bytes": self.peak_bytes,
                "parameter_bytes": self.parameter_bytes,
                "flops_share": self.flops_share,
                "bound_s": self.bound_s,
                "status": self.status,
                "cluster": self.cluster,
            }
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads `to_json`. Raises ValueError where the text is damaged or of another version."""
        try:
            d = json.loads(text)
            if d["format"] != FORMAT:
                raise ValueError(f"plan of format {d['format']}, expected {FORMAT}")
            axes = len(d["mesh"])

            def layout(text: str | None) -> Layout | None:
                if text is None:
                    return None
                found = parse_layout(text)
                if len(found) != axes:
                    raise ValueError(f"layout {text} on a mesh of {axes} axes")
                return found

            return Plan(
                tuple(int(n) for n in d["mesh"]),
                tuple((k, p, parse_layout(x)) for k, p, x in d["inputs"]),
                tuple((k, p, layout(x)) for k, p, x in d["outputs"]),
                tuple(
                    NodePlan(
                        name,
                        tuple(parse_layout(x) for x in operands),
                        tuple(layout(x) for x in results),
                        tuple((str(c[0]), int(c[1]), int(c[2]), int(c[3])) for c in choice),
                    )
                    for name, operands, results, choice in d["nodes"]
                ),
                tuple((v, parse_layout(x)) for v, x in d["kept"]),
                tuple(
                    Transfer(v, p, parse_layout(s), parse_layout(t), tuple(k), float(sec), int(b))
                    for v, p, s, t, k, sec, b in d["transfers"]
                ),
                float(d["compute_s"]),
                float(d["communication_s"]),
                int(d["peak_bytes"]),
                int(d["parameter_bytes"]),
                float(d["flops_share"]),
                float(d["bound_s"]),
                str(d["status"]),
                str(d["cluster"]),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a plan: {type(error).__name__}: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the decisions: equal plans have equal fingerprints on every rank."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        from .describe import describe

        return describe(self)

    def explain(self, path: str) -> str:
        """Where a parameter or input lies, and what is done with it."""
        from .describe import explain

        return explain(self, path)


def make_plan(problem: Problem, outcome: Outcome, cluster: str, flops: dict[str, float]) -> Plan:
    """The plan that an outcome of the planner stands for."""
    graph, chosen = problem.graph, outcome.assignment.chosen
    evaluation = evaluate(problem, outcome.assignment)
    first_node = len(graph.inputs)
    nodes = tuple(
        NodePlan(v.name, v.need_layouts[s], v.give_layouts[s], v.choices[s])
        for v, s in zip(problem.vertices[first_node:], chosen[first_node:])
        if v.gives
    )
    present = iter(range(len(problem.vertices) - sum(o.name is not None for o in graph.outputs), len(problem.vertices)))
    outputs = []
    for item in graph.outputs:
        k = None if item.name is None else next(present)
        outputs.append((item.kind, item.path, None if k is None else problem.vertices[k].need_layouts[chosen[k]][0]))
    inputs = tuple((i.kind, i.path, layout_of(problem, chosen, i.value.name)) for i in graph.inputs)
    parameter_bytes = sum(
        problem.local_bytes(i.value.name, layout_of(problem, chosen, i.value.name))
        for i in graph.inputs_of("parameter")
    )
    return Plan(
        problem.settings.mesh,
        inputs,
        tuple(outputs),
        nodes,
        tuple(sorted(outcome.assignment.kept, key=lambda k: (k[0], format_layout(k[1])))),
        tuple(_transfers(problem, outcome)),
        evaluation.compute_s,
        evaluation.communication_s,
        evaluation.peak_bytes,
        parameter_bytes,
        flops_share(graph, nodes, problem.settings.mesh, problem, flops),
        outcome.bound_s,
        outcome.status,
        cluster,
    )


def _transfers(problem: Problem, outcome: Outcome) -> Iterator[Transfer]:
    """Every resharding, in order of the values."""
    from .evaluate import needed_layouts

    chosen = outcome.assignment.chosen
    for name in problem.made_by:
        own = layout_of(problem, chosen, name)
        value = problem.value(name)
        item = ITEM_BYTES.get(value.dtype, 8)
        for phase in (0, 1):
            for target in sorted(needed_layouts(problem, chosen, name, phase), key=format_layout):
                if target == own or (phase == 1 and (name, target) in outcome.assignment.kept):
                    continue
                moves = problem.resharding_of(name).path(value.shape, item, own, target)
                yield Transfer(
                    name,
                    ("forward", "backward")[phase],
                    own,
                    target,
                    tuple(m.kind for m in moves),
                    problem.transport_s(name, own, target),
                    problem.local_bytes(name, target),
                )


def flops_share(
    graph: Graph, nodes: tuple[NodePlan, ...], mesh: tuple[int, ...], problem: Problem, flops: dict[str, float]
) -> float:
    """Floating-point work of the busiest device over that of the whole, all nodes together."""
    total = part = 0.0
    for k, plan in enumerate(nodes):
        work = flops.get(graph.nodes[k].name, 0.0)
        total += work
        part += work * problem.vertices[len(graph.inputs) + k].shares[plan_index(problem, k, plan)]
    assert mesh
    return part / total if total else 1.0


def plan_index(problem: Problem, k: int, plan: NodePlan) -> int:
    """Index of a node's strategy among those of its vertex."""
    vertex = problem.vertices[len(problem.graph.inputs) + k]
    return vertex.choices.index(plan.choice)


def whole(mesh: tuple[int, ...]) -> Layout:
    """The layout of a tensor that every device holds."""
    return (R,) * len(mesh)


def local_bytes(graph: Graph, name: str, layout: Layout, mesh: tuple[int, ...]) -> int:
    """Bytes of the largest piece of a value."""
    value = graph.values[name]
    return max_local_elements(value.shape, layout, mesh) * ITEM_BYTES.get(value.dtype, 8)
