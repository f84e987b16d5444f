"""A valid plan drawn at random that replicates nothing it need not: for tests of everything behind the planner.

A plan that replicates everything equals one process and proves nothing, and the best plan uses few of the ways in
which an operator can be split. This one cuts every tensor that can be cut, in ways that change from node to node, so
that almost every operand is resharded.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ..ir.placement import Layout, R
from .evaluate import Assignment, evaluate, layout_of, needed_layouts
from .planner import Outcome
from .problem import Problem, Vertex

EVEN = 1.25
"""Floating-point work is split about as evenly as it can be: within this factor of the smallest share."""
KEPT = 0.5
"""Part of the forward copies that are kept for backward, where backward could use them."""


def random_planner(seed: int) -> Callable[[Problem], Outcome]:
    """What stands in for `planner.optimise`."""
    return lambda problem: random_outcome(problem, seed)


def random_outcome(problem: Problem, seed: int) -> Outcome:
    """A random assignment: Replicate is taken only where nothing else is valid. Equal seeds give equal plans."""
    rng = random.Random(seed)
    choice = choose_each(
        problem, lambda vertex: rng.choice(_least_replicated(vertex, problem.flops.get(vertex.name, 0.0) > 0))
    )
    copies = []
    for name in problem.made_by:
        own = layout_of(problem, choice, name)
        both = needed_layouts(problem, choice, name, 0) & needed_layouts(problem, choice, name, 1)
        copies += [(name, layout) for layout in sorted(both - {own}, key=str) if rng.random() < KEPT]
    assignment = Assignment(choice, frozenset(copies))
    evaluation = evaluate(problem, assignment)
    assert evaluation.seconds < float("inf"), "a random plan needs a resharding that does not exist"
    return Outcome(assignment, evaluation, 0.0, "random", len(choice), 0)


def choose_each(problem: Problem, pick: Callable[[Vertex], int]) -> tuple[int, ...]:
    """The strategy that `pick` takes for every vertex; a gradient has the layout of its parameter."""
    tied = {gradient: parameter for parameter, gradient in problem.ties}
    chosen: list[int] = []
    for k, vertex in enumerate(problem.vertices):
        if k in tied:
            stored = problem.vertices[tied[k]].give_layouts[chosen[tied[k]]][0]
            chosen.append(next(s for s, needs in enumerate(vertex.need_layouts) if needs[0] == stored))
        else:
            chosen.append(pick(vertex))
    return tuple(chosen)


def _least_replicated(vertex: Vertex, works: bool) -> list[int]:
    """The strategies with the fewest idle axes; where there is floating-point work, an axis must share it."""
    idle = [_idle_axes(vertex, s, works) for s in range(len(vertex.seconds))]
    best = [s for s, count in enumerate(idle) if count == min(idle)]
    if works and vertex.shares:
        least = min(vertex.shares[s] for s in best)
        best = [s for s in best if vertex.shares[s] <= EVEN * least]
    return best


def _idle_axes(vertex: Vertex, s: int, works: bool) -> int:
    """Axes on which every device does the same (or, where it `works`, does all of the work)."""
    if vertex.choices[s]:
        return sum(kind == "replicate" or (works and kind == "linear") for kind, *_ in vertex.choices[s])
    layouts: tuple[Layout | None, ...] = (*vertex.give_layouts[s], *vertex.need_layouts[s])
    return sum(placement == R for layout in layouts if layout is not None for placement in layout)
