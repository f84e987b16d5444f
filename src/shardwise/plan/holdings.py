"""The bytes that variables of the program hold, and when: the same sums as in `evaluate.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..ir.placement import Layout
from .fold import Folded
from .network import Network
from .problem import Intervals, Problem, intervals


@dataclass(frozen=True, slots=True)
class Holding:
    """Columns of the program, their bytes, and the first and last time at which they are held."""

    columns: np.ndarray
    nbytes: np.ndarray
    first: int
    last: int

    @staticmethod
    def of(columns: np.ndarray, nbytes: np.ndarray, when: tuple[int, int]) -> Holding:
        """With a pair of times."""
        return Holding(columns, nbytes, *when)


@dataclass(frozen=True)
class Life:
    """When parts of a hub are held, and how many bytes they take."""

    when: Intervals
    own_bytes: np.ndarray
    copy_bytes: np.ndarray
    same: np.ndarray
    """Own layout -> the column of that very layout, or -1."""


def lives_of(problem: Problem, network: Network, folded: Folded) -> list[Life]:
    """The life of every hub of a network with one group per vertex."""
    found = []
    for item in folded.hubs:
        hub = network.hubs[item.name]
        number = {layout: q for q, layout in enumerate(hub.targets)}
        found.append(
            Life(
                intervals(problem, hub.name),
                np.array([problem.own_bytes(hub.name, layout) for layout in hub.sources], float),
                np.array([problem.local_bytes(hub.name, layout) for layout in hub.targets], float),
                np.array([number.get(layout, -1) for layout in hub.sources]),
            )
        )
    return found


def strategy_holdings(
    problem: Problem, network: Network, folded: Folded
) -> Iterator[tuple[int, np.ndarray, np.ndarray, tuple[int, int]]]:
    """(group, strategies, bytes of the value in its own layout, when) of every value that some vertex makes."""
    sizes: dict[tuple[str, Layout], int] = {}
    second = {gradient: (parameter, its) for parameter, (gradient, _, its) in network.tied.items()}
    for name, maker in problem.made_by.items():
        vertex = problem.vertices[maker]
        place = vertex.gives.index(name)
        strategies = range(len(vertex.seconds))
        if maker in second:
            maker, strategies = second[maker][0], second[maker][1].tolist()
        elif maker in network.tied:
            strategies = network.tied[maker][1].tolist()
        nbytes = []
        for strategy in strategies:
            layout = vertex.give_layouts[strategy][place]
            assert layout is not None
            if (name, layout) not in sizes:
                sizes[name, layout] = problem.own_bytes(name, layout)
            nbytes.append(sizes[name, layout])
        when = intervals(problem, name).own
        if when[1] >= 0:
            yield folded.group[maker], np.arange(len(nbytes)), np.array(nbytes, float), (max(when[0], 0), when[1])
