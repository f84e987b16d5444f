"""What a search for a plan has found so far, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import PlanError
from .certificate import Certificate
from .evaluate import Assignment, Evaluation, evaluate
from .problem import Problem

GAP = 1e-6
"""Relative distance to the bound that counts as none: the solver's own tolerance."""


@dataclass(frozen=True)
class Outcome:
    """The best assignment found, with a lower bound on the seconds of any assignment."""

    assignment: Assignment
    evaluation: Evaluation
    bound_s: float
    status: str
    """optimal: the bound is met. feasible: see the gap. fallback: the solver failed, this is the best simple plan."""
    variables: int
    nodes: int
    certificate: Callable[[], Certificate] | None = field(default=None, compare=False, repr=False)
    """Makes a proof of the best bound that needs no search; it may be a little lower than `bound_s`."""

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return max(0.0, 1.0 - self.bound_s / self.evaluation.seconds) if self.evaluation.seconds > 0 else 0.0


@dataclass
class Search:
    """What is known so far."""

    problem: Problem
    max_nodes: int
    best: tuple[Assignment, Evaluation] | None = None
    fastest: Evaluation | None = None
    """Of all that were offered, whether they fit or not."""
    smallest_bytes: int | None = None
    """The least peak of all that were offered."""
    bound_s: float = 0.0
    variables: int = 0
    nodes: int = 0
    certificate: Callable[[], Certificate] | None = None

    def offer(self, assignment: Assignment) -> Evaluation:
        """Keeps an assignment if it is the best that fits."""
        evaluation = evaluate(self.problem, assignment)
        if self.fastest is None or evaluation.seconds < self.fastest.seconds:
            self.fastest = evaluation
        if evaluation.seconds < float("inf"):
            self.smallest_bytes = min(evaluation.peak_bytes, self.smallest_bytes or evaluation.peak_bytes)
        limit = self.problem.settings.memory_limit_bytes
        fits = evaluation.seconds < float("inf") and (limit is None or evaluation.peak_bytes <= limit)
        if fits and (self.best is None or evaluation.seconds < self.best[1].seconds):
            self.best = assignment, evaluation
        return evaluation

    @property
    def gap(self) -> float:
        """Relative distance between the best assignment and the bound."""
        if self.best is None:
            return float("inf")
        return max(0.0, 1.0 - self.bound_s / self.best[1].seconds) if self.best[1].seconds > 0 else 0.0

    def outcome(self, failed: bool = False) -> Outcome:
        """The result."""
        if self.best is None:
            raise PlanError(f"the solver found no plan on mesh {self.problem.settings.mesh}")
        assignment, evaluation = self.best
        status = "fallback" if failed else "optimal" if self.gap <= GAP else "feasible"
        bound = min(self.bound_s, evaluation.seconds)
        return Outcome(assignment, evaluation, bound, status, self.variables, self.nodes, self.certificate)
