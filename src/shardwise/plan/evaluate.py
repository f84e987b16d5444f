"""What a choice of strategies costs, and how much memory it takes: the definition that every solver is held to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ..ir.placement import Layout
from .problem import Problem, intervals

INFINITY = float("inf")


@dataclass(frozen=True)
class Assignment:
    """A strategy index per vertex, and the forward copies that are kept for backward."""

    chosen: tuple[int, ...]
    kept: frozenset[tuple[str, Layout]] = frozenset()


@dataclass(frozen=True)
class Evaluation:
    """Seconds of compute and of communication, and the bytes alive over time (at every node, and after the last)."""

    compute_s: float
    communication_s: float
    memory_bytes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The objective."""
        return self.compute_s + self.communication_s

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes alive on one device."""
        return max(self.memory_bytes)


def layout_of(problem: Problem, chosen: tuple[int, ...], name: str) -> Layout:
    """The layout in which a value is made."""
    vertex = problem.vertices[problem.made_by[name]]
    layout = vertex.give_layouts[chosen[problem.made_by[name]]][vertex.gives.index(name)]
    assert layout is not None
    return layout


def needed_layouts(problem: Problem, chosen: tuple[int, ...], name: str, phase: int) -> frozenset[Layout]:
    """The layouts in which a value is read in a phase."""
    return frozenset(
        problem.vertices[v].need_layouts[chosen[v]][position]
        for v, position in problem.used_by[name]
        if problem.vertices[v].phase == phase
    )


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """The cost of an assignment; infinite seconds where ties or reshardings are impossible."""
    chosen = assignment.chosen
    compute = sum(v.seconds[s] for v, s in zip(problem.vertices, chosen))
    communication = 0.0
    for parameter, gradient in problem.ties:
        stored = problem.vertices[parameter].give_layouts[chosen[parameter]][0]
        if problem.vertices[gradient].need_layouts[chosen[gradient]][0] != stored:
            communication = INFINITY
    memory = [0] * (len(problem.graph.nodes) + 2)
    for name in problem.made_by:
        own = layout_of(problem, chosen, name)
        forward = needed_layouts(problem, chosen, name, 0)
        backward = needed_layouts(problem, chosen, name, 1)
        kept = {q for q in forward & backward if (name, q) in assignment.kept and q != own}
        for target in forward:
            communication += problem.transport_s(name, own, target)
        for target in backward - kept:
            communication += problem.transport_s(name, own, target)
        for nbytes, (first, last) in _holdings(problem, name, own, forward, backward, kept):
            if first <= last:
                memory[max(first, 0)] += nbytes
                memory[last + 1] -= nbytes
    return Evaluation(compute, communication, tuple(accumulate(memory[:-1])))


def _holdings(
    problem: Problem,
    name: str,
    own: Layout,
    forward: frozenset[Layout],
    backward: frozenset[Layout],
    kept: set[Layout],
) -> list[tuple[int, tuple[int, int]]]:
    """(bytes, interval) of everything that is held of one value."""
    lives = intervals(problem, name)
    own_bytes = problem.own_bytes(name, own)
    found = [(own_bytes, lives.own)]
    saved = bool(backward - kept)
    if own in forward or saved:
        found.append((own_bytes, lives.tail))
    if saved:
        found.append((own_bytes, lives.saved))
    if own in backward:
        found.append((own_bytes, lives.own_backward))
    for needed, interval in ((forward, lives.forward), (backward, lives.backward)):
        found += [(problem.local_bytes(name, q), interval) for q in needed if q != own]
    found += [(problem.local_bytes(name, q), lives.kept) for q in kept]
    return found
