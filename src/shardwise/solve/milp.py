"""Linear programs that grow, and their integer versions, through HiGHS. The only file that imports highspy.

Rows and columns are added between solves, each of which goes on from the last basis. All variables are >= 0. Limits
are nodes, never seconds, so that the same problem gives the same answer on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

# The solver itself: highspy.Highs registers callbacks, and that prints a banner before it can be silenced.
from highspy._core import _Highs

INFINITY = float("inf")


@dataclass(frozen=True)
class Solution:
    """What the solver found. `status` is optimal | feasible | infeasible | unknown; `bound` is a lower bound."""

    status: str
    x: np.ndarray
    objective: float
    bound: float
    seconds: float
    nodes: int


@dataclass(frozen=True)
class Optimum:
    """A solved linear program. status: optimal | infeasible | unknown."""

    status: str
    objective: float
    x: np.ndarray
    duals: np.ndarray


class GrowingProgram:
    """minimize cost @ x subject to low <= A x (or low = A x), x >= 0."""

    def __init__(self) -> None:
        self.solver = _single_threaded()
        self.solver.setOptionValue("presolve", "off")  # a basis to go on from is worth more
        self.columns = 0
        self.rows = 0

    def add_rows(
        self, low: np.ndarray, entries: list[tuple[int, int, float]] | None = None, exact: bool = False
    ) -> int:
        """Rows with these lower bounds (or right-hand sides, if exact) and (row counted from 0, column, value)
        entries; returns the first's index."""
        first, n = self.rows, len(low)
        rows, columns, values = (np.array(x) for x in zip(*sorted(entries))) if entries else (np.zeros(0),) * 3
        starts = np.searchsorted(rows, np.arange(n)).astype(np.int32)
        self.solver.addRows(
            n,
            low,
            low if exact else np.full(n, INFINITY),
            len(rows),
            starts,
            columns.astype(np.int32),
            values.astype(float),
        )
        self.rows += n
        return first

    def add_columns(self, cost: np.ndarray, column: np.ndarray, row: np.ndarray, value: np.ndarray) -> int:
        """Columns with these costs; entry k of `column` (counted from 0), `row`, `value` is an entry of the matrix."""
        first, n = self.columns, len(cost)
        order = np.argsort(column, kind="stable")
        starts = np.searchsorted(column[order], np.arange(n))
        self.solver.addCols(
            n,
            np.asarray(cost, float),
            np.zeros(n),
            np.full(n, INFINITY),
            len(column),
            starts.astype(np.int32),
            row[order].astype(np.int32),
            value[order].astype(float),
        )
        self.columns += n
        return first

    def set_cost(self, columns: np.ndarray, cost: np.ndarray) -> None:
        """Other costs for some columns."""
        self.solver.changeColsCost(len(columns), columns.astype(np.int32), cost.astype(float))

    def solve(self) -> Optimum:
        """Minimizes by the dual simplex method."""
        self.solver.run()
        status = self.solver.getModelStatus()
        name = {
            highspy.HighsModelStatus.kOptimal: "optimal",
            highspy.HighsModelStatus.kInfeasible: "infeasible",
        }.get(status, "unknown")
        solution = self.solver.getSolution()
        return Optimum(
            name,
            self.solver.getInfo().objective_function_value,
            np.array(solution.col_value),
            np.array(solution.row_dual),
        )

    def reduced_costs(self) -> np.ndarray:
        """Of every column, at the last optimum."""
        return np.array(self.solver.getSolution().col_dual)

    def solve_integer(
        self, integer: np.ndarray, max_nodes: int, gap: float, allowed: np.ndarray | None = None
    ) -> Solution:
        """The same program with some columns integer, and those zero that are not allowed."""
        whole = _single_threaded(max_nodes, gap)
        whole.passModel(self.solver.getLp())
        kinds = np.full(len(integer), int(highspy.HighsVarType.kInteger), np.uint8)
        whole.changeColsIntegrality(len(integer), integer.astype(np.int32), kinds)
        if allowed is not None:
            zero = np.flatnonzero(~allowed)
            none = np.zeros(len(zero))
            whole.changeColsBounds(len(zero), zero.astype(np.int32), none, none)
        whole.run()
        return _read(whole, self.columns)


def _single_threaded(max_nodes: int = 20_000, gap: float = 0.0) -> _Highs:
    """A silent solver that does the same on every run."""
    solver = _Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("mip_max_nodes", max_nodes)
    solver.setOptionValue("mip_rel_gap", gap)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    return solver


def _read(solver: _Highs, columns: int) -> Solution:
    """What a solver that has run knows."""
    status = solver.getModelStatus()
    info = solver.getInfo()
    x = np.array(solver.getSolution().col_value)
    found = info.primal_solution_status == 2 and len(x) == columns
    name = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
    }.get(status, "feasible" if found else "unknown")
    objective = info.objective_function_value if found else INFINITY
    return Solution(name, x, objective, info.mip_dual_bound, solver.getRunTime(), max(0, int(info.mip_node_count)))
