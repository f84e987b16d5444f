"""Mixed-integer linear programs through HiGHS. The only file that imports highspy.

Limits are nodes, never seconds, so that the same problem gives the same answer on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import highspy
import numpy as np

INFINITY = float("inf")


@dataclass
class Program:
    """minimize cost @ x subject to row_low <= A x <= row_high, low <= x <= high, some x integer. Built row by row."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, low: float = 0.0, high: float = 1.0, integer: bool = False) -> int:
        """Adds a variable; returns its index."""
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        """Adds low <= sum(coefficient * x[index]) <= high. An index may appear only once."""
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
        self.starts.append(len(self.columns))
        self.row_low.append(low)
        self.row_high.append(high)


@dataclass(frozen=True)
class Solution:
    """What the solver found. `status` is optimal | feasible | infeasible | unknown; `bound` is a lower bound."""

    status: str
    x: np.ndarray
    objective: float
    bound: float
    seconds: float
    nodes: int


def solve(program: Program, max_nodes: int = 20_000, gap: float = 0.0, start: np.ndarray | None = None) -> Solution:
    """Solves to optimality, or to `max_nodes` nodes of the search tree. `start` is a feasible point to begin with."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", bool(__import__("os").environ.get("HL")))
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("mip_max_nodes", max_nodes)
    solver.setOptionValue("mip_rel_gap", gap)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    solver.passModel(_model(program))
    if start is not None:
        warm = highspy.HighsSolution()
        warm.col_value = list(start)
        solver.setSolution(warm)
    solver.run()
    status = solver.getModelStatus()
    info = solver.getInfo()
    x = np.array(solver.getSolution().col_value)
    found = info.primal_solution_status == 2 and len(x) == len(program.cost)
    name = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
    }.get(status, "feasible" if found else "unknown")
    mip = any(program.integer)
    bound = info.mip_dual_bound if mip else info.objective_function_value
    objective = info.objective_function_value if found else INFINITY
    return Solution(name, x, objective, bound, solver.getRunTime(), max(0, int(info.mip_node_count)))


def _model(program: Program) -> highspy.HighsLp:
    lp = highspy.HighsLp()
    lp.num_col_ = len(program.cost)
    lp.num_row_ = len(program.row_low)
    lp.col_cost_ = np.array(program.cost, dtype=np.double)
    lp.col_lower_ = np.array(program.low, dtype=np.double)
    lp.col_upper_ = np.array(program.high, dtype=np.double)
    lp.row_lower_ = np.array(program.row_low, dtype=np.double)
    lp.row_upper_ = np.array(program.row_high, dtype=np.double)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(program.starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(program.columns, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(program.values, dtype=np.double)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[flag] for flag in program.integer]
    return lp
