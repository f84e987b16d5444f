"""The planning problem as a mixed-integer program that grows by columns.

Variables (of groups of equal vertices and hubs: their averages; see `fold.py`)
- x[group, strategy]: the strategy that is chosen, binary                                            (`_strategies`)
- flow[hub, own, column, part] >= 0: a consumer reads it in that layout, times the number of edges    (`_pair`)
- move[hub, phase, own, column] >= 0: it is brought there, once for all consumers of a phase          (`_pair`)
- kept[hub, own, column]: backward uses the copy that forward made, binary                            (`_limited_pair`)
- saved[hub, own], tail[hub, own]: the own layout outlives forward's last, or first, consumer         (`_outlives`)
- missing[target] >= 0: a need that is not met, at a price that no solution pays                      (`_rows`)
- peak: the largest number of bytes at any time, where that is minimized                              (`__init__`)

Objective: microseconds of x and move; or the peak.

Constraints
- one strategy per vertex                            sum_s x = 1                                      (`_rows`)
- flows start where the value is                     count x - sum flow >= 0                          (`_rows`)
- flows end where it is read                         sum flow - count x >= 0                          (`_rows`)
- a flow needs a move, or in backward a kept copy    count move + kept - sum flow >= 0                (`_pair`)
- only what was moved in forward can be kept         move - kept >= 0                                 (`_limited_pair`)
- and only what is read there                        sum flow - kept >= 0                             (`_limited_pair`)
- what backward reads from the own layout is saved   saved - move >= 0, tail - saved >= 0             (`_outlives`)
- memory at a time                                   bytes <= limit or peak                           (`memory_row`)

A parameter and its gradient are one vertex already (`network.py`). A hub with one consumer has flows, and no moves,
which then have their costs. Without a memory limit every copy is kept: a hub has one phase.

Pairs (own, column) enter when their reduced cost is negative, memory rows when a solution exceeds the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..ir.placement import Layout
from ..solve.milp import GrowingProgram
from .evaluate import Assignment, layout_of, needed_layouts
from .fold import Folded, Slot
from .holdings import Holding, Life, lives_of, strategy_holdings
from .network import FORBIDDEN, Network, expand
from .problem import Problem

NEARLY = 0.01
"""Microseconds that do not make a move dearer than another: a few local moves."""
PEAK_PRICE = 1e6
"""Objective of a peak of `unit_bytes`."""
Pair = tuple[int, int, int]
"""(hub, own layout, column)"""


@dataclass
class _Batch:
    """Rows and columns on their way into the program. Columns are numbered from 0, rows as in the program."""

    next_row: int
    rows: int = 0
    cost: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    held: list[tuple[int, float, tuple[int, int]]] = field(default_factory=list)
    """(column, bytes, (first, last time))"""
    kept: list[tuple[int, Pair]] = field(default_factory=list)
    old: list[tuple[int, int, float]] = field(default_factory=list)
    """(new row, column that is in the program already, value)"""

    def column(self, cost: float, *entries: tuple[int, float]) -> int:
        """A column with these (row, value); returns its number."""
        self.cost.append(cost)
        number = len(self.cost) - 1
        self.entries += [(number, row, value) for row, value in entries]
        return number

    def row(self) -> int:
        """One more row (0 <= ...); returns its number."""
        self.rows += 1
        return self.next_row + self.rows - 1

    def hold(self, column: int, nbytes: float, when: tuple[int, int]) -> None:
        """Bytes that a column holds."""
        if nbytes and when[0] <= when[1]:
            self.held.append((column, nbytes, when))


class Formulation:
    """The program of a folded network. `limited`: with all that memory rows need, for one group per vertex only.
    `peak`: the peak of memory is minimized, not the time."""

    def __init__(
        self,
        problem: Problem,
        network: Network,
        folded: Folded,
        limited: bool,
        peak: bool = False,
        start: list[Pair] | None = None,
    ):
        self.problem, self.network, self.folded, self.limited = problem, network, folded, limited
        self.program = GrowingProgram()
        self.weight = 0.0 if peak else 1.0
        whole = sum(value.nbytes for value in problem.graph.values.values())
        self.unit_bytes = float((not peak and problem.settings.memory_limit_bytes) or max(1, whole))
        self.held: list[Holding] = []
        self.memory: dict[int, int] = {}
        """Time -> row."""
        self.kept: dict[int, Pair] = {}
        """Column -> the copy that it keeps."""
        self.outlives: dict[tuple[str, int, int], int] = {}
        """("saved" or "tail", hub, own layout) -> column"""
        self.lives: list[Life] = lives_of(problem, network, folded) if limited else []
        self.have = [np.zeros(hub.micros.shape, bool) for hub in folded.hubs]
        finite = [float(h.micros[h.micros < FORBIDDEN].max(initial=0.0)) for h in folded.hubs]
        self.price = 1.0 + 2.0 * max(finite, default=0.0)
        self._rows()
        self._strategies()
        self.peak: int | None = None
        if peak:
            none = np.zeros(0, int)
            self.peak = self.program.add_columns(np.array([PEAK_PRICE]), none, none, np.zeros(0))
        if limited:
            self._outlives()
        if start is None:
            start = [(h, *pair) for h, hub in enumerate(folded.hubs) for pair in _cheapest(hub.micros)]
        self.add(start)

    def _rows(self) -> None:
        """Rows of groups, of the ends of flows, and the columns that say that a need is not met."""
        program, groups = self.program, len(self.folded.members)
        program.add_rows(np.ones(groups), exact=True)
        self.source: dict[tuple[int, int], int] = {}
        self.target: dict[tuple[int, int], int] = {}
        sizes: dict[tuple[int, int], int] = {}
        for h, hub in enumerate(self.folded.hubs):
            for t, slot in enumerate(hub.slots):
                self.source[h, t] = program.add_rows(np.zeros(hub.micros.shape[0]))
                for part in slot.parts:
                    sizes[part.target] = len(part.edge.at)
        for target, size in sizes.items():
            self.target[target] = program.add_rows(np.zeros(size))
        rows = [np.arange(self.target[t], self.target[t] + size) for t, size in sizes.items()]
        row = np.concatenate([np.zeros(0, int), *rows])
        counts = [len(self.folded.members[t[0]]) for t, size in sizes.items() for _ in range(size)]
        self.missing_counts = np.array(counts, float)
        self.missing = program.add_columns(
            self.price * self.missing_counts, np.arange(len(row)), row, np.ones(len(row))
        )
        self.missing_count = len(row)

    def _strategies(self) -> None:
        """Columns x, with their entries in all rows that are there."""
        folded, first = self.folded, np.cumsum([0, *map(len, self.folded.cost)])
        counts = [len(m) for m in folded.members]
        blocks = [(np.arange(first[-1]), np.repeat(np.arange(len(counts)), np.diff(first)), np.ones(first[-1]))]

        def block(group: int, rows: np.ndarray, value: float) -> None:
            blocks.append((first[group] + np.arange(len(rows)), rows, np.full(len(rows), value)))

        done = set()
        for h, hub in enumerate(folded.hubs):
            for t, slot in enumerate(hub.slots):
                block(hub.group, self.source[h, t] + hub.own, 1.0)
                for part in slot.parts:
                    if part.target not in done:
                        block(part.target[0], self.target[part.target] + part.edge.need, -1.0)
                        done.add(part.target)
        cost = np.concatenate([np.zeros(0), *(c * n for c, n in zip(folded.cost, counts))])
        column, row, value = (np.concatenate(x) for x in zip(*blocks))
        self.x = self.program.add_columns(cost * self.weight, column, row, value) + first
        if self.limited:
            for group, strategy, nbytes, when in strategy_holdings(self.problem, self.network, folded):
                self.held.append(Holding.of(self.x[group] + strategy, nbytes, when))

    def _outlives(self) -> None:
        """Columns that say that the own layout outlives forward's first consumer, or its last."""
        batch = _Batch(self.program.rows)
        numbers = {}
        for h, life in enumerate(self.lives):
            for o, nbytes in enumerate(life.own_bytes):
                for kind, when in (("tail", life.when.tail), ("saved", life.when.saved)):
                    if nbytes and when[0] <= when[1]:
                        numbers[kind, h, o] = batch.column(0.0)
                        batch.hold(numbers[kind, h, o], nbytes, when)
                if ("tail", h, o) in numbers and ("saved", h, o) in numbers:
                    row = batch.row()
                    batch.entries += [(numbers["tail", h, o], row, 1.0), (numbers["saved", h, o], row, -1.0)]
        first = self._flush(batch)
        self.outlives = {key: first + number for key, number in numbers.items()}

    def add(self, pairs: list[Pair]) -> None:
        """The columns and rows of these pairs."""
        batch = _Batch(self.program.rows)
        for h, o, q in pairs:
            self.have[h][o, q] = True
            self._pair(batch, h, o, q)
        self._flush(batch)

    def _flush(self, batch: _Batch) -> int:
        """Puts a batch into the program; returns the first of its columns."""
        self.program.add_rows(np.zeros(batch.rows), batch.old)
        first = self.program.columns
        entries = list(batch.entries)
        for time, row in self.memory.items():
            entries += [(c, row, -b / self.unit_bytes) for c, b, (i, j) in batch.held if i <= time <= j]
        column, row, value = (np.array(x) for x in zip(*entries)) if entries else (np.zeros(0, int),) * 3
        self.program.add_columns(np.array(batch.cost), column, row, value)
        for c, b, (i, j) in batch.held:
            self.held.append(Holding.of(np.array([first + c]), np.array([b]), (i, j)))
        self.kept.update({first + c: pair for c, pair in batch.kept})
        return first

    def _pair(self, batch: _Batch, h: int, o: int, q: int) -> None:
        """Flows from an own layout to a column, and the moves that carry them."""
        hub = self.folded.hubs[h]
        cost = float(hub.micros[o, q]) * self.weight
        using = [(t, slot) for t, slot in enumerate(hub.slots) if any(p.edge.uses(q) for p in slot.parts)]
        if self.limited:
            self._limited_pair(batch, h, o, q, using, cost)
            return
        direct = hub.single
        move = None if direct else batch.column(cost * hub.count)
        for t, slot in using:
            row = None
            if move is not None:
                row = batch.row()
                batch.entries.append((move, row, 1.0))
            self._flow(batch, h, t, slot, o, q, cost if direct else 0.0, row)

    def _flow(
        self, batch: _Batch, h: int, t: int, slot: Slot, o: int, q: int, cost: float, row: int | None
    ) -> list[int]:
        """One flow per part of a slot."""
        made = []
        for part in slot.parts:
            local = part.edge.local(q)
            if local >= 0:
                share = part.count / (self.folded.hubs[h].count * slot.multiple)
                entries = [(self.source[h, t] + o, -share), *([] if row is None else [(row, -share)])]
                met = part.count / len(self.folded.members[part.target[0]])
                made.append(batch.column(cost * part.count, *entries, (self.target[part.target] + local, met)))
        return made

    def _limited_pair(self, batch: _Batch, h: int, o: int, q: int, using: list[tuple[int, Slot]], cost: float) -> None:
        """The same with moves per phase, kept copies, and bytes."""
        life, own = self.lives[h], self.lives[h].same[o] == q
        moves: dict[int, int] = {}
        for phase in sorted({slot.phase for _, slot in using}):
            moves[phase] = batch.column(cost)
            when = life.when.backward if phase else life.when.forward
            if not own:
                batch.hold(moves[phase], life.copy_bytes[q], when)
            elif phase:
                batch.hold(moves[phase], life.own_bytes[o], life.when.own_backward)
            kind = "saved" if phase else "tail" if own else ""
            if (kind, h, o) in self.outlives:
                row = batch.row()
                batch.entries.append((moves[phase], row, -1.0))
                batch.old.append((row - batch.next_row, self.outlives[kind, h, o], 1.0))
        kept = None
        if len(moves) == 2 and not own:
            row = batch.row()
            kept = batch.column(0.0, (row, -1.0))
            batch.entries.append((moves[0], row, 1.0))
            batch.kept.append((kept, (h, o, q)))
            batch.hold(kept, life.copy_bytes[q], life.when.kept)
            batch.hold(kept, life.copy_bytes[q], life.when.backward)
        read = None if kept is None else batch.row()
        for t, slot in using:
            row = batch.row()
            batch.entries.append((moves[slot.phase], row, 1.0))
            if kept is not None and slot.phase:
                batch.entries.append((kept, row, 1.0))
            flows = self._flow(batch, h, t, slot, o, q, 0.0, row)
            if read is not None and not slot.phase:
                batch.entries += [(flow, read, 1.0) for flow in flows]
        if kept is not None and read is not None:
            batch.entries.append((kept, read, -1.0))

    def memory_row(self, time: int) -> None:
        """Bytes alive at a time stay within the limit, or the peak."""
        found: dict[int, float] = {} if self.peak is None else {self.peak: 1.0}
        for holding in self.held:
            if holding.first <= time <= holding.last:
                for c, b in zip(holding.columns.tolist(), holding.nbytes.tolist()):
                    if b:
                        found[c] = found.get(c, 0.0) - b / self.unit_bytes
        low = -1.0 if self.peak is None else 0.0
        row = self.program.add_rows(np.array([low]), [(0, c, b) for c, b in found.items()])
        self.memory[time] = row

    def prices(self, duals: np.ndarray) -> tuple[dict, dict]:
        """What layouts are worth, per edge, in microseconds: `give` by (hub, slot), `take` by (group, position)."""
        give, take = {}, {}
        for h, hub in enumerate(self.folded.hubs):
            owns = hub.micros.shape[0]
            for t, slot in enumerate(hub.slots):
                first = self.source[h, t]
                give[h, t] = -duals[first : first + owns] / (hub.count * slot.multiple)
                for part in slot.parts:
                    row, count = self.target[part.target], len(self.folded.members[part.target[0]])
                    take[part.target] = duals[row : row + len(part.edge.at)] / count
        return give, take

    def levels(self, x: np.ndarray) -> np.ndarray:
        """Bytes alive at every time in a solution."""
        change = np.zeros(len(self.problem.graph.nodes) + 2)
        for holding in self.held:
            nbytes = float(holding.nbytes @ x[holding.columns])
            change[holding.first] += nbytes
            change[holding.last + 1] -= nbytes
        return np.cumsum(change)[:-1]

    def unmet(self, x: np.ndarray) -> float:
        """The sum of the needs that a solution does not meet."""
        return float(x[self.missing : self.missing + self.missing_count].sum())

    def raise_price(self) -> None:
        """Makes needs that are not met ten times dearer."""
        self.price *= 10.0
        columns = np.arange(self.missing, self.missing + self.missing_count)
        self.program.set_cost(columns, self.price * self.missing_counts)

    def integer_columns(self) -> np.ndarray:
        """x and kept."""
        return np.array([*range(self.x[0], self.x[-1]), *self.kept], dtype=int)

    def fractional(self, x: np.ndarray) -> bool:
        """Whether a column that must be integer is not."""
        values = x[self.integer_columns()]
        return bool((np.abs(values - np.round(values)) > 1e-6).any())

    def rounded(self, x: np.ndarray) -> list[int]:
        """The largest strategy of every group."""
        return [int(np.argmax(x[first:last])) for first, last in zip(self.x, self.x[1:])]

    def assignment(self, x: np.ndarray) -> Assignment:
        """The choice that a solution stands for."""
        chosen = {}
        for strategies, best, members in zip(self.folded.strategies, self.rounded(x), self.folded.members):
            chosen.update(dict.fromkeys(members, int(strategies[best])))
        full = expand(self.network, chosen)
        complete = tuple(full[k] for k in range(len(self.problem.vertices)))
        if not self.limited:
            return Assignment(complete, all_kept(self.problem, complete))
        copies = ((self.folded.hubs[h].name, q) for c, (h, _, q) in self.kept.items() if x[c] > 0.5)
        return Assignment(complete, frozenset((name, self.network.hubs[name].targets[q]) for name, q in copies))


def all_kept(problem: Problem, chosen: tuple[int, ...]) -> frozenset[tuple[str, Layout]]:
    """Every copy of forward that backward reads too."""
    found = set()
    for name in problem.made_by:
        own = layout_of(problem, chosen, name)
        both = needed_layouts(problem, chosen, name, 0) & needed_layouts(problem, chosen, name, 1)
        found.update((name, q) for q in both if q != own)
    return frozenset(found)


def _cheapest(micros: np.ndarray) -> list[tuple[int, int]]:
    """Pairs to begin with: the cheapest, or nearly so, of every own layout and of every column, and those with the own
    layout that reaches all columns best, and with the column that is reached best (both are Replicate, mostly)."""
    start = micros <= micros.min(1, keepdims=True) + NEARLY
    start |= micros <= micros.min(0, keepdims=True) + NEARLY
    start[:, micros.sum(0).argmin()] = True
    start[micros.sum(1).argmin(), :] = True
    return [(int(o), int(q)) for o, q in np.argwhere(start & (micros < FORBIDDEN))]
