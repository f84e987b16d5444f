"""Finds factors whose pieces overlap: the operator is run on windows of its operands (`window.py`).

A stand-in (`blocks.py`) is run on windows of every place and width. The results of the pieces must be the whole after
what lies near inner edges was cropped, or sum up to it where some operands are extended by zeros instead of their
neighbours' elements. The smallest margins that hold on all adversarial inputs are kept.

An operator without such windows fails the first of these executions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np

from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta
from .blocks import Ratios, Search, Variant, by_blocks, growth_of, metas_of
from .combine import close
from .draws import Trial, UnsteadyError, trial, trials, uniform
from .ranges import Attempt, fresh_trials
from .rule import DimRef, Factor, Halo, Rule
from .window import Overlap, Window, needed_spans, overlap_of, owned_spans

SINGLE = 0
"""Pieces of one element each."""
FEW = (3, 6)
"""Blocks of the other dims that may have windows, while one of them is tried."""


def discover_windows(search: Search, runner: OpRunner, attempt: Attempt) -> Rule:
    """The factors with a halo of a call, as a rule that holds nothing else."""
    found: list[Factor] = []
    for number, variant in enumerate(search.variants):
        for d, ratios in variant.dims:
            places = {(k, d) for k, r in enumerate(ratios) if r}
            taken = {(k, role.dim) for f in found for k, role in enumerate(f.operands) if isinstance(role, DimRef)}
            if places & taken:
                continue
            subjects = [_Subject(c, runner) for c in dict.fromkeys((_narrowed(variant, d, runner), variant.call))]
            factor = attempt(f"windows {number} {d} {ratios}", partial(_find, subjects, d, ratios))
            if factor is not None:
                found.append(factor)
    return Rule(tuple(found), found_on=runner.framework)


def _narrowed(variant: Variant, d: int, runner: OpRunner) -> Call:
    """The stand-in with as few blocks in all dims but one as the operator accepts."""
    call = variant.call
    for other, ratios in variant.dims:
        have = min(call.operands[k].shape[other] // r for k, r in enumerate(ratios) if r)
        for few in FEW if other != d else ():
            smaller = by_blocks(call, other, ratios, few - have)
            metas = None if smaller is None else metas_of(smaller, runner)
            if smaller is not None and metas is not None and all(m is None or min(m.shape, default=1) for m in metas):
                call = smaller
                break
    return call


class _Subject:
    """A stand-in with its trials, which are made when they are first asked for."""

    def __init__(self, call: Call, runner: OpRunner):
        self.call, self.runner = call, runner
        self._first: list[Trial] | None = None
        self._all: list[Trial] | None = None

    def first(self) -> list[Trial]:
        """One trial, or none where the operator refuses it or does not repeat itself."""
        if self._first is None:
            try:
                one = trial(self.call, "signed", uniform(self.call, 0), self.runner)
            except UnsteadyError:
                one = None
            self._first = [] if one is None else [one]
        return self._first

    def all(self) -> list[Trial]:
        """A trial of every kind, and fresh ones."""
        if self._all is None:
            spec = uniform(self.call, 0)
            self._all = [*trials(self.call, spec, self.runner), *fresh_trials(self.call, spec, self.runner)]
        return self._all


def _find(subjects: list[_Subject], d: int, ratios: Ratios) -> Factor | None:
    """The factor of these dims with the fewest operands that read their neighbours, and the least margins.

    It is found on the first stand-in and has to hold on the others: an operator that looks at the position in two dims
    (a triangle) may do so beyond a narrow one.
    """
    subject, *others = subjects
    growth = growth_of(subject.call, d, ratios, subject.runner)
    if growth is None or not subject.first():
        return None
    blocks = min(subject.call.operands[k].shape[d] // r for k, r in enumerate(ratios) if r)
    most = (blocks - 3) // 2
    cut = [k for k, r in enumerate(ratios) if r]
    for count in range(1, len(cut) + 1):
        for exchanged in combinations(cut, count):
            zeros = tuple(k for k in cut if k not in exchanged)
            if not zeros and any(g is None and r is not None for g, r in zip(growth, subject.first()[0].results)):
                continue
            present = [r is not None for r in subject.first()[0].results]
            results = tuple(DimRef(g[0]) if g else "sum" if there else None for g, there in zip(growth, present))
            halo = Halo(most, most, ratios, tuple(g[1] if g else 0 for g in growth), zeros)
            widest = Factor(tuple(DimRef(d) if r else None for r in ratios), results, halo=halo)
            if not _holds(subject, widest, subject.first(), (3,)) or not subject.all():
                continue
            # A few inputs tell the margins of almost all operators; all of them have the last word.
            for made in ([*subject.first(), *subject.all()[-1:]], subject.all()):
                least = _least(subject, widest, halo, made)
                if least is not None and _holds(subject, least, subject.all(), (SINGLE, 3, 2)):
                    wide = all(o.first() and _holds(o, least, o.first(), (2, 3)) for o in others)
                    return least if wide else None
    return None


def _least(subject: _Subject, widest: Factor, halo: Halo, made: list[Trial]) -> Factor | None:
    """The factor with the smallest margins that hold wherever a window begins and ends; None where none do."""
    for left in range(halo.left + 1):
        if _holds(subject, replace(widest, halo=replace(halo, left=left)), made, (SINGLE,)):
            break
    else:
        return None
    for right in range(halo.right + 1):
        least = replace(widest, halo=replace(halo, left=left, right=right))
        if _holds(subject, least, made, (SINGLE,)):
            return least
    return None


def _holds(subject: _Subject, factor: Factor, made: list[Trial], counts: tuple[int, ...]) -> bool:
    """Whether the windows of so many devices (`SINGLE`: as many as there are elements) give the whole in all trials."""
    overlap = overlap_of(
        factor,
        [m.shape for m in subject.call.operands],
        [None if r is None else r.shape for r in made[0].results],
    )
    return overlap is not None and all(
        _gives_whole(subject, factor, overlap, one, parts or max(size for size, _ in overlap.drivers))
        for parts in counts
        for one in made
    )


def _gives_whole(subject: _Subject, factor: Factor, overlap: Overlap, one: Trial, parts: int) -> bool:
    halo = overlap.halo
    total: list[np.ndarray | None] = [None] * len(one.results)
    for rank, window in enumerate(overlap.windows(parts)):
        if window is None:
            continue
        made = _run_window(subject, factor, halo, one, window, rank, parts)
        if made is None:
            return False
        for r, (whole, part, role) in enumerate(zip(one.results, made, factor.results)):
            if whole is None or part is None:
                if (whole is None) != (part is None):
                    return False
            elif isinstance(role, DimRef):
                size, ratio = whole.shape[role.dim], halo.results[r]
                start, stop = owned_spans(size, parts)[rank]
                low, high = window.span(size, ratio)
                if part.shape[role.dim] != high - low:
                    return False
                if not close(_span(whole, role.dim, start, stop), _span(part, role.dim, start - low, stop - low)):
                    return False
            else:
                before = total[r]
                total[r] = part if before is None else before + part
    return all(
        whole is None or role != "sum" or (summed is not None and close(whole, summed))
        for whole, summed, role in zip(one.results, total, factor.results)
    )


def _run_window(
    subject: _Subject, factor: Factor, halo: Halo, one: Trial, window: Window, rank: int, parts: int
) -> list[np.ndarray | None] | None:
    """What the operator makes of a window; None where it refuses."""
    operands = list(one.operands)
    for k, role in enumerate(factor.operands):
        if not isinstance(role, DimRef):
            continue
        size = operands[k].shape[role.dim]
        low, high = needed_spans(size, halo.operands[k], (window,))[0]
        piece = _span(operands[k], role.dim, low, high)
        if k in halo.zeros:
            start, stop = owned_spans(size, parts)[rank]
            inside = np.zeros(high - low, bool)
            inside[max(0, start - low) : max(0, stop - low)] = True
            shape = [high - low if d == role.dim else 1 for d in range(piece.ndim)]
            piece = np.where(inside.reshape(shape), piece, np.zeros((), piece.dtype))
        operands[k] = piece
    metas = tuple(TensorMeta(a.shape, m.dtype) for a, m in zip(operands, subject.call.operands))
    try:
        return subject.runner.run(subject.call.with_operands(metas), operands)
    except OperatorError:
        return None


def _span(array: np.ndarray, dim: int, start: int, stop: int) -> np.ndarray:
    return array[(slice(None),) * dim + (slice(start, stop),)]
