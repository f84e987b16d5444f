"""Column generation: solves the program of a formulation, with all pairs (own, column), by adding those that pay.

At the optimum the duals price every layout: `give` where the value is made, `take` where it is read. A pair pays when
what its consumers would give for it, sum max(0, give + take), is more than it costs (with the bytes that it holds, at
the prices of the memory rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .formulate import Formulation, Pair
from .network import FORBIDDEN

TOLERANCE = 1e-6
"""Microseconds of reduced cost that do not count."""
MAX_ROUNDS = 200


@dataclass(frozen=True)
class Relaxed:
    """A solved relaxation. `bound` holds for all pairs, in microseconds (or the unit of the peak)."""

    status: str
    x: np.ndarray
    duals: np.ndarray
    bound: float


def relax(form: Formulation) -> Relaxed:
    """The optimum of the linear program over all pairs."""
    for _ in range(MAX_ROUNDS):
        optimum = form.program.solve()
        if optimum.status != "optimal":
            return Relaxed(optimum.status, optimum.x, optimum.duals, -np.inf)
        new = paying(form, optimum.duals, TOLERANCE)
        if not new:
            return Relaxed("optimal", optimum.x, optimum.duals, optimum.objective)
        form.add(new)
    return Relaxed("unknown", optimum.x, optimum.duals, -np.inf)


def settle(form: Formulation) -> Relaxed | None:
    """The relaxation with all needs met; None where the solver failed or there is none."""
    for _ in range(6):
        relaxed = relax(form)
        if relaxed.status != "optimal":
            return None
        if form.unmet(relaxed.x) < 1e-7:
            return relaxed
        form.raise_price()
    return None


def paying(form: Formulation, duals: np.ndarray, least: float, every: bool = False) -> list[Pair]:
    """Pairs that are not in the program and whose worth exceeds their cost by more than `least`: of every own layout
    and of every column the best one, or all."""
    rent, prices = _rent(form, duals), form.prices(duals)
    found: list[Pair] = []
    for h in range(len(form.folded.hubs)):
        gain = _gain(form, h, prices, rent)
        gain[form.have[h]] = -np.inf
        if not gain.size or gain.max() <= least:
            continue
        if every:
            found += [(h, int(o), int(q)) for o, q in np.argwhere(gain > least)]
            continue
        pairs = {(int(o), int(gain[o].argmax())) for o in np.flatnonzero(gain.max(1) > least)}
        pairs |= {(int(gain[:, q].argmax()), int(q)) for q in np.flatnonzero(gain.max(0) > least)}
        found += [(h, o, q) for o, q in sorted(pairs)]
    return found


def _rent(form: Formulation, duals: np.ndarray) -> np.ndarray:
    """Price of a byte held from time i to j: rent[j + 1] - rent[i]."""
    at = np.zeros(len(form.problem.graph.nodes) + 3)
    for time, row in form.memory.items():
        if row < len(duals):  # rows that are newer than the duals have no price
            at[time + 1] += max(0.0, duals[row]) / form.unit_bytes
    return np.cumsum(at)


def _gain(form: Formulation, h: int, prices: tuple[dict, dict], rent: np.ndarray) -> np.ndarray:
    """What a pair is worth beyond its cost; negative reduced cost."""
    hub = form.folded.hubs[h]
    worth = [np.zeros(hub.micros.shape), np.zeros(hub.micros.shape)]
    for t, slot in enumerate(hub.slots):
        take = np.full(hub.micros.shape[1], -FORBIDDEN)
        for part in slot.parts:
            at = part.edge.at
            take[at] = np.maximum(take[at], prices[1][part.target])
        pays = prices[0][h, t][:, None] + take[None, :]
        if not (hub.single and not form.limited):
            pays = slot.multiple * np.maximum(pays, 0.0)
        worth[slot.phase if form.limited else 0] += pays
    if not form.limited:
        return worth[0] - hub.micros * form.weight
    return _limited_gain(form, h, worth, rent)


def _limited_gain(form: Formulation, h: int, worth: list[np.ndarray], rent: np.ndarray) -> np.ndarray:
    """The same where forward and backward have their own moves, and copies are kept for a price."""
    hub, life = form.folded.hubs[h], form.lives[h]

    def price(when: tuple[int, int]) -> float:
        return float(rent[when[1] + 1] - rent[max(when[0], 0)]) if when[0] <= when[1] else 0.0

    def read(phase: int) -> np.ndarray:
        used = np.zeros(hub.micros.shape[1], bool)
        for slot in hub.slots:
            if slot.phase == phase:
                for part in slot.parts:
                    used[part.edge.at] = True
        return used

    owns = np.arange(len(life.same))
    own = np.zeros(hub.micros.shape, bool)
    own[owns[life.same >= 0], life.same[life.same >= 0]] = True
    copy = life.copy_bytes[None, :]
    cost = hub.micros * form.weight
    forward = cost + np.where(own, 0.0, copy * price(life.when.forward))
    backward = cost + np.where(
        own, life.own_bytes[:, None] * price(life.when.own_backward), copy * price(life.when.backward)
    )
    keep = copy * (price(life.when.kept) + price(life.when.backward))
    both = (read(0) & read(1))[None, :] & ~own
    extra = np.where(both, np.maximum(0.0, worth[1] - keep), 0.0)
    gain = np.maximum(worth[0] + extra - forward, worth[1] - backward)
    gain[hub.micros >= FORBIDDEN] = -np.inf
    return gain
