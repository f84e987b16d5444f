"""The planning problem as a mixed-integer program.

Variables
- x[vertex, strategy], binary: the strategy that is chosen                                           (`_choices`)
- flow[value, consumer, own, layout] in [0, 1]: the consumer reads it in that layout                 (`_flow`)
- move[value, phase, own, layout] in [0, 1]: it is brought there, once for all consumers of a phase  (`_flows`)
- kept[value, layout]: backward uses the copy that forward made                                      (`_keep`)
- saved[value, own], tail[value, own]: the own layout outlives forward's last, or first, consumer    (`_flows`,
  `_memory_variables`)

Objective: seconds (here in microseconds) of x and move.

Constraints
- one strategy per vertex                                          sum_s x = 1                        (`_choices`)
- a gradient has the layout of its parameter                       x = x                              (`_ties`)
- flows start where the value is and end where it is read          sum flow = x on both sides         (`_flow`)
- a flow needs a move, or in backward a kept copy                  flow <= move + kept                (`_flows`)
- only what was moved in forward can be kept                       kept <= sum move                   (`_keep`)
- memory at a time                                                 bytes <= limit                     (`add_memory_row`)

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
    reached: dict[tuple[str, int], set[Layout]] = field(default_factory=dict)
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
        sources = {
            layouts[0]: c for layouts, c in zip(form.problem.vertices[parameter].give_layouts, form.x[parameter])
        }
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
            _flows(form, name, phase, own, users)
    if problem.settings.memory_limit_bytes is not None:
        _memory_variables(form, name, own)


def _readers(form: Formulation, vertex: int, position: int) -> dict[Layout, list[int]]:
    """Layout -> the x of the strategies that read the value in it."""
    found: dict[Layout, list[int]] = {}
    for layouts, column in zip(form.problem.vertices[vertex].need_layouts, form.x[vertex]):
        found.setdefault(layouts[position], []).append(column)
    return found


def _flows(
    form: Formulation, name: str, phase: int, own: dict[Layout, list[int]], users: list[tuple[int, int]]
) -> None:
    """The value flows from its own layout to what each consumer reads; moves are shared between consumers."""
    problem, program = form.problem, form.program
    readers = [_readers(form, *user) for user in users]
    targets = list(dict.fromkeys(layout for by_layout in readers for layout in by_layout))
    single = len(users) == 1
    keepable = phase == 1 and any((name, 0) in form.reached and q in form.reached[(name, 0)] for q in targets)
    moves: dict[tuple[Layout, Layout], int] = {}
    for source in own:
        for target in targets:
            seconds = problem.transport_s(name, source, target)
            if seconds < INFINITY and not (
                source == target and not single and problem.settings.memory_limit_bytes is None
            ):
                moves[source, target] = program.variable(seconds * MICRO)
                form.move[(name, phase, source, target)] = moves[source, target]
    form.reached[(name, phase)] = set(targets)
    if keepable:
        _keep(form, name, targets)
    for by_layout in readers:
        flow = _flow(form, name, own, by_layout, None if single and not keepable else moves, moves)
        for (source, target), column in flow.items():
            if column == moves.get((source, target)):
                continue
            terms = [(column, 1.0)]
            if (source, target) in moves:
                terms.append((moves[source, target], -1.0))
            elif source == target:
                continue
            if (kept := form.kept.get((name, target))) is not None and phase == 1:
                terms.append((kept, -1.0))
            program.row(terms, -INFINITY, 0.0)
    if phase == 1 and problem.settings.memory_limit_bytes is not None and _made_forward(problem, name):
        for source in own:
            saved = form.saved[(name, source)] = program.variable()
            for (start, _), move in moves.items():
                if start == source:
                    program.row([(saved, 1.0), (move, -1.0)], 0.0, INFINITY)


def _flow(
    form: Formulation,
    name: str,
    own: dict[Layout, list[int]],
    by_layout: dict[Layout, list[int]],
    separate: dict | None,
    moves: dict[tuple[Layout, Layout], int],
) -> dict[tuple[Layout, Layout], int]:
    """The transport polytope between a value's own layouts and those of one consumer."""
    program = form.program
    flow: dict[tuple[Layout, Layout], int] = {}
    for source in own:
        for target in by_layout:
            if form.problem.transport_s(name, source, target) < INFINITY or (name, target) in form.kept:
                flow[source, target] = moves[source, target] if separate is None else program.variable()
    for source, columns in own.items():
        program.row([*((flow[s, t], 1.0) for s, t in flow if s == source), *((x, -1.0) for x in columns)], 0.0, 0.0)
    for target, columns in by_layout.items():
        program.row([*((flow[s, t], 1.0) for s, t in flow if t == target), *((x, -1.0) for x in columns)], 0.0, 0.0)
    return flow


def _keep(form: Formulation, name: str, targets: list[Layout]) -> None:
    """kept <= the moves that made the copy in forward."""
    for target in targets:
        makers = [c for (v, p, s, t), c in form.move.items() if (v, p, t) == (name, 0, target) and s != t]
        if makers:
            column = form.program.variable()
            form.kept[(name, target)] = column
            form.program.row([(column, 1.0), *((c, -1.0) for c in makers)], -INFINITY, 0.0)


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
