"""The same graph at other sizes needs no new solve: the strategies of a plan are taken over where they are valid.

Strategies are named by what they do (which factor of the rule, on which axis), and by their place among those of the
same name, since the cuts inside a factor, such as the row length of a flattened batch, change with the sizes.
"""

from __future__ import annotations

from ..ir.graph import Graph
from ..ir.placement import Layout, Shard
from .evaluate import Assignment, evaluate, layout_of, needed_layouts
from .plan import Plan
from .planner import Outcome
from .problem import Problem, Vertex

REUSED = "reused"
"""Status of a plan that was taken over."""


def same_but_for_sizes(a: Graph, b: Graph) -> bool:
    """Whether two graphs have the same inputs, operators and outputs, whatever the sizes."""
    if len(a.nodes) != len(b.nodes) or a.outputs != b.outputs:
        return False
    if [(i.value.name, i.kind, i.path, i.value.dtype) for i in a.inputs] != [
        (i.value.name, i.kind, i.path, i.value.dtype) for i in b.inputs
    ]:
        return False
    return all(
        x.op == y.op and x.phase == y.phase and x.operands == y.operands and x.name == y.name
        for x, y in zip(a.nodes, b.nodes)
    )


def reuse(old: Problem, plan: Plan, new: Problem) -> Outcome | None:
    """The plan of the old problem as an outcome of the new one; None where it is not valid there.

    The bound is zero: nothing was proved.
    """
    if not same_but_for_sizes(old.graph, new.graph) or len(old.vertices) != len(new.vertices):
        return None
    before = _chosen(old, plan)
    chosen = []
    for k, (theirs, ours) in enumerate(zip(old.vertices, new.vertices)):
        found = _counterpart(theirs, before[k], ours)
        if found is None:
            return None
        chosen.append(found)
    kept = {_moved(old, before, new, tuple(chosen), name, layout) for name, layout in plan.kept}
    if None in kept:
        return None
    assignment = Assignment(tuple(chosen), frozenset(k for k in kept if k is not None))
    if not _possible(new, assignment.chosen):
        return None
    evaluation = evaluate(new, assignment)
    limit = new.settings.memory_limit_bytes
    if evaluation.seconds == float("inf") or (limit is not None and evaluation.peak_bytes > limit):
        return None
    return Outcome(assignment, evaluation, 0.0, REUSED, 0, 0)


def _chosen(problem: Problem, plan: Plan) -> list[int]:
    """The strategy of every vertex under a plan of this very problem."""
    graph = problem.graph
    first, count = len(graph.inputs), len(graph.nodes)
    found = [v.give_layouts.index((layout,)) for v, (_, _, layout) in zip(problem.vertices, plan.inputs)]
    found += [v.choices.index(n.choice) for v, n in zip(problem.vertices[first : first + count], plan.nodes)]
    layouts = [x for _, _, x in plan.outputs if x is not None]
    found += [v.need_layouts.index((x,)) for v, x in zip(problem.vertices[first + count :], layouts)]
    return found


def _name(vertex: Vertex, strategy: int) -> tuple:
    """What a strategy does, whatever the sizes."""
    if vertex.choices[strategy]:
        return tuple((kind, index) for kind, index, _, _ in vertex.choices[strategy])
    layout = (vertex.give_layouts[strategy] or vertex.need_layouts[strategy])[0]
    assert layout is not None
    return tuple(("S", p.dim, p.outer == p.unit == 1) if isinstance(p, Shard) else (str(p),) for p in layout)


def _counterpart(old: Vertex, strategy: int, new: Vertex) -> int | None:
    """The strategy of the new vertex that does the same."""
    name = _name(old, strategy)
    theirs = [s for s in range(len(old.choices)) if _name(old, s) == name]
    ours = [s for s in range(len(new.choices)) if _name(new, s) == name]
    if len(ours) == 1:
        return ours[0]
    return ours[theirs.index(strategy)] if len(ours) == len(theirs) else None


def _moved(
    old: Problem, before: list[int], new: Problem, chosen: tuple[int, ...], name: str, layout: Layout
) -> tuple[str, Layout] | None:
    """A kept copy: in the layout in which the new problem's consumer reads it."""
    for v, position in old.used_by[name]:
        if old.vertices[v].need_layouts[before[v]][position] == layout:
            return name, new.vertices[v].need_layouts[chosen[v]][position]
    return None


def _possible(problem: Problem, chosen: tuple[int, ...]) -> bool:
    """Whether every value can be brought to where it is read."""
    for name in problem.made_by:
        own = layout_of(problem, chosen, name)
        for phase in (0, 1):
            for target in needed_layouts(problem, chosen, name, phase):
                if problem.transport_s(name, own, target) == float("inf"):
                    return False
    return True
