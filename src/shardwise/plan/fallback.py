"""Plans without a solver: what is left when it fails."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.placement import Layout, R
from .evaluate import Assignment
from .formulate import all_kept
from .problem import Problem


def simple_plans(problem: Problem) -> Iterator[Assignment]:
    """Everything replicated where that is possible; and vertex by vertex what is cheapest, for every way to store the
    parameters that is the same on all mesh axes but some."""
    for choose in (_whole, _cheap):
        for preferred in ("first", "last"):
            chosen = _walk(problem, choose, preferred)
            if chosen is not None:
                yield Assignment(chosen)
                yield Assignment(chosen, all_kept(problem, chosen))


def _whole(costs: list[float], cut: list[int]) -> int:
    return min(range(len(costs)), key=lambda s: (costs[s] == float("inf"), cut[s], costs[s], s))


def _cheap(costs: list[float], cut: list[int]) -> int:
    return min(range(len(costs)), key=lambda s: (costs[s], cut[s], s))


def _walk(problem: Problem, choose, preferred: str) -> tuple[int, ...] | None:
    """One strategy per vertex, in the order of the program; None where one cannot be reached."""
    own: dict[str, Layout] = {}
    tied = {gradient: parameter for parameter, gradient in problem.ties}
    parameters = set(tied.values())
    chosen: list[int] = []
    for k, vertex in enumerate(problem.vertices):
        if k in parameters and not vertex.needs:
            best = 0 if preferred == "first" else len(vertex.seconds) - 1
        else:
            costs, cut = [], []
            for s, seconds in enumerate(vertex.seconds):
                moves = (problem.transport_s(n, own[n], x) for n, x in zip(vertex.needs, vertex.need_layouts[s]))
                wrong = k in tied and vertex.need_layouts[s][0] != own[problem.vertices[tied[k]].gives[0] or ""]
                costs.append(float("inf") if wrong else seconds + sum(moves))
                cut.append(sum(p != R for x in (*vertex.need_layouts[s], *vertex.give_layouts[s]) for p in x or ()))
            best = choose(costs, cut)
            if costs[best] == float("inf"):
                return None
        chosen.append(best)
        own.update((n, x) for n, x in zip(vertex.gives, vertex.give_layouts[best]) if n is not None and x is not None)
    return tuple(chosen)
