"""The planning problem as a mixed-integer program.

Variables
- x[vertex, strategy], binary: the strategy that is chosen                                          (`_choices`)
- need[value, phase, layout] in [0, 1]: some consumer of that phase reads the value in that layout  (`_needs`)
- move[value, phase, own, layout] in [0, 1]: it is brought there from its own layout                (`_moves`)
- kept[value, layout]: backward uses the copy that forward made                                     (`_moves`)
- saved[value, own], tail[value, own]: the own layout outlives forward's first, or last, consumer   (`_memory_terms`)

Objective: seconds (here in microseconds) of x and move.

Constraints
- one strategy per vertex                                                     sum_s x = 1           (`_choices`)
- a gradient has the layout of its parameter                                  x = x                 (`_ties`)
- a need is the sum of the strategies that have it (single consumer) or at least each consumer's    (`_needs`)
- a need is met by a move or a kept copy                                      sum_p move + kept = need (`_moves`)
- moves start where the value is                                              move <= own           (`_moves`)
- only what forward made can be kept                                          kept <= need          (`_moves`)
- memory at a time                                                            bytes <= limit        (`add_memory_row`)

Memory rows are added for the times at which a solution exceeds the limit, until none does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..ir.placement import Layout
from ..solve.milp import Program
from .evaluate import Assignment
from .problem import Problem, intervals

MICRO = 1e6
INFINITY = float("inf")


@dataclass
class Formulation:
    """The program and where things stand in it."""

    problem: Problem
    program: Program = field(default_factory=Program)
    x: list[list[int]] = field(default_factory=list)
    need: dict[tuple[str, int, Layout], int] = field(default_factory=dict)
    move: dict[tuple[str, int, Layout, Layout], int] = field(default_factory=dict)
    kept: dict[tuple[str, Layout], int] = field(default_factory=dict)
    saved: dict[tuple[str, Layout], int] = field(default_factory=dict)
    tail: dict[tuple[str, Layout], int] = field(default_factory=dict)
    own: dict[str, dict[Layout, list[int]]] = field(default_factory=dict)
    """Value -> own layout -> the x that give it."""

    def assignment(self, x: np.ndarray) -> Assignment:
        """The choice that a solution stands for."""
        chosen = tuple(int(np.argmax(x[columns])) for columns in self.x)
        return Assignment(chosen, frozenset(key for key, column in self.kept.items() if x[column] > 0.5))


def formulate(problem: Problem) -> Formulation:
    """The program without memory rows."""
    form = Formulation(problem)
    _choices(form)
    _ties(form)
    for name in problem.made_by:
        _value(form, name)
    return form


def _choices(form: Formulation) -> None:
    for vertex in form.problem.vertices:
        columns = [form.program.variable(seconds * MICRO, integer=True) for seconds in vertex.seconds]
        form.program.row([(c, 1.0) for c in columns], 1.0, 1.0)
        form.x.append(columns)


def _ties(form: Formulation) -> None:
    for parameter, gradient in form.problem.ties:
        sources = {layouts[0]: c for layouts, c in zip(form.problem.vertices[parameter].give_layouts, form.x[parameter])}
        for layouts, column in zip(form.problem.vertices[gradient].need_layouts, form.x[gradient]):
            source = sources.pop(layouts[0], None)
            terms = [(column, 1.0)] + ([] if source is None else [(source, -1.0)])
            form.program.row(terms, 0.0, 0.0)
        for source in sources.values():
            form.program.row([(source, 1.0)], 0.0, 0.0)


def _value(form: Formulation, name: str) -> None:
    problem = form.problem
    maker = problem.made_by[name]
    place = problem.vertices[maker].gives.index(name)
    own: dict[Layout, list[int]] = {}
    for layouts, column in zip(problem.vertices[maker].give_layouts, form.x[maker]):
        layout = layouts[place]
        assert layout is not None
        own.setdefault(layout, []).append(column)
    form.own[name] = own
    for phase in (0, 1):
        users = [(v, k) for v, k in problem.used_by[name] if problem.vertices[v].phase == phase]
        if users:
            needs = _needs(form, name, phase, users)
            _moves(form, name, phase, own, needs, len(users) == 1)
    if problem.settings.memory_limit_bytes is not None:
        _memory_variables(form, name, own)


def _needs(form: Formulation, name: str, phase: int, users: list[tuple[int, int]]) -> dict[Layout, int]:
    """need[value, phase, layout] and the rows that define it."""
    program = form.program
    needs: dict[Layout, int] = {}
    for vertex, position in users:
        by_layout: dict[Layout, list[int]] = {}
        for layouts, column in zip(form.problem.vertices[vertex].need_layouts, form.x[vertex]):
            by_layout.setdefault(layouts[position], []).append(column)
        for layout, columns in by_layout.items():
            if layout not in needs:
                needs[layout] = program.variable()
                form.need[(name, phase, layout)] = needs[layout]
            high = 0.0 if len(users) == 1 else INFINITY
            program.row([(needs[layout], 1.0), *((c, -1.0) for c in columns)], 0.0, high)
    return needs


def _moves(
    form: Formulation, name: str, phase: int, own: dict[Layout, list[int]], needs: dict[Layout, int], single: bool
) -> None:
    problem, program = form.problem, form.program
    moves: dict[Layout, list[tuple[Layout, int]]] = {source: [] for source in own}
    for target, need in needs.items():
        terms = [(need, -1.0)]
        for source in own:
            seconds = problem.transport_s(name, source, target)
            if seconds < INFINITY:
                column = program.variable(seconds * MICRO)
                moves[source].append((target, column))
                form.move[(name, phase, source, target)] = column
                terms.append((column, 1.0))
        forward = form.need.get((name, 0, target)) if phase == 1 else None
        if forward is not None:
            column = program.variable()
            form.kept[(name, target)] = column
            terms.append((column, 1.0))
            program.row([(column, 1.0), (forward, -1.0)], -INFINITY, 0.0)
        program.row(terms, 0.0, 0.0)
    for source, columns in own.items():
        if single and phase == 0:
            program.row([*((c, 1.0) for _, c in moves[source]), *((x, -1.0) for x in columns)], 0.0, 0.0)
            continue
        for _, move in moves[source]:
            program.row([(move, 1.0), *((x, -1.0) for x in columns)], -INFINITY, 0.0)
        if phase == 1 and problem.settings.memory_limit_bytes is not None and _made_forward(problem, name):
            saved = program.variable()
            form.saved[(name, source)] = saved
            for _, move in moves[source]:
                program.row([(saved, 1.0), (move, -1.0)], 0.0, INFINITY)


def _made_forward(problem: Problem, name: str) -> bool:
    return problem.vertices[problem.made_by[name]].phase == 0 and name not in problem.persistent


def _memory_variables(form: Formulation, name: str, own: dict[Layout, list[int]]) -> None:
    """tail >= move to the own layout in forward, and >= saved."""
    for source in own:
        causes = [form.move.get((name, 0, source, source)), form.saved.get((name, source))]
        if name in form.problem.persistent or causes == [None, None]:
            continue
        tail = form.program.variable()
        form.tail[(name, source)] = tail
        for cause in causes:
            if cause is not None:
                form.program.row([(tail, 1.0), (cause, -1.0)], 0.0, INFINITY)


def memory_terms(form: Formulation, time: int) -> list[tuple[int, float]]:
    """The bytes alive at a time, as a linear function of the variables. The same sum as in `evaluate.py`."""
    terms: dict[int, float] = {}
    problem = form.problem
    lives = {name: intervals(problem, name) for name in form.own}

    def add(column: int, nbytes: float, interval: tuple[int, int]) -> None:
        if nbytes and interval[0] <= time <= interval[1]:
            terms[column] = terms.get(column, 0.0) + nbytes

    for name, own in form.own.items():
        for layout, columns in own.items():
            for column in columns:
                add(column, problem.own_bytes(name, layout), lives[name].own)
    for (name, layout), column in form.tail.items():
        add(column, problem.own_bytes(name, layout), lives[name].tail)
    for (name, layout), column in form.saved.items():
        add(column, problem.own_bytes(name, layout), lives[name].saved)
    for (name, phase, source, target), column in form.move.items():
        if source != target:
            interval = lives[name].backward if phase else lives[name].forward
            add(column, problem.local_bytes(name, target), interval)
        elif phase:
            add(column, problem.own_bytes(name, target), lives[name].own_backward)
    for (name, layout), column in form.kept.items():
        add(column, problem.local_bytes(name, layout), lives[name].kept)
        add(column, problem.local_bytes(name, layout), lives[name].backward)
    return list(terms.items())


def add_memory_row(form: Formulation, time: int) -> None:
    """Bytes alive at a time stay within the limit."""
    limit = form.problem.settings.memory_limit_bytes
    assert limit is not None
    scale = 1.0 / max(limit, 1)
    form.program.row([(c, b * scale) for c, b in memory_terms(form, time)], -INFINITY, 1.0)
