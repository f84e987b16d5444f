"""Compares discovered rules with those of a peer, combination by combination, and lets execution decide who is right.

A **combination** says how every operand and every result lies on a mesh of one axis: `(S0, R) -> (S0)`. One factor of
a rule is one combination, one linear group another (sums in, sums out). A peer (a library with rules of its own) says
what it allows, and may be asked to run a call itself.

Each combination is executed (`enact.py`, `judge.py`): operands are cut into 2 and 3 pieces, the operator runs on every
piece, and the results are combined as the combination says. What comes of it:

- same: both allow it, and it holds;
- more: only we allow it, and it holds;
- miss: only the peer allows it, and it holds, or at least the peer's own run of it gives the right result;
- unconfirmed: the peer lists it, and neither holds, but the peer raises an error instead of a wrong result;
- conflict: the peer's own run gives a wrong result, or what we allow does not hold.

Combinations that replicate every operand, that cut a dim of one element, or that hold summands of integers are left
out on both sides, and so are Partials of other kinds than the sum coming in that the peer does not list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..ir.placement import REDUCE_OPS, Partial, Placement, R, Shard
from ..ir.runner import Call, TensorMeta
from .rule import DimRef, Factor, Rule, format_rule

KINDS = ("view", "elementwise", "contraction", "reduction", "index", "other", "replicated")
VERDICTS = ("same", "more", "miss", "unconfirmed", "conflict")


@dataclass(frozen=True, slots=True)
class Combination:
    """Placements of all operands and of all results; None for a result that is not there."""

    operands: tuple[Placement, ...]
    results: tuple[Placement | None, ...]

    def __str__(self) -> str:
        left = ", ".join(map(str, self.operands))
        return f"({left}) -> ({', '.join('-' if r is None else str(r) for r in self.results)})"

    @property
    def sums_only(self) -> bool:
        """Whether nothing comes in as a Partial of another kind than the sum."""
        return all(not isinstance(p, Partial) or p.op == "sum" for p in self.operands)


@dataclass(frozen=True)
class Ran:
    """What the peer's own run of a call gave: the whole results with the placements that it put on them, or why not."""

    results: tuple[np.ndarray | None, ...] = ()
    placements: tuple[Placement | None, ...] = ()
    error: str = ""


class Peer(Protocol):
    """A library with rules of its own. Its calls run in a child process, since they may crash."""

    name: str

    def allows(self, call: Call) -> dict[Combination, str]:
        """The combinations that it lists; the text says by what help ("" where the bare operator is run on pieces)."""
        ...

    def is_quick(self, call: Call) -> bool:
        """Whether a run of the call takes so little that placements of which nothing is said can be tried as well."""
        ...

    def runs(self, call: Call, operands: list[np.ndarray], placements: tuple[Placement, ...]) -> Ran:
        """Runs the call on two devices whose operands lie so, whatever it moves on the way."""
        ...


@dataclass(frozen=True)
class Finding:
    """One combination and what execution says of it."""

    combination: Combination
    verdict: str
    reason: str = ""
    example: str = ""
    """Of a conflict: a minimal failing example."""


@dataclass(frozen=True)
class Audited:
    """All combinations of one call."""

    call: Call
    rule: str
    kind: str
    """One of KINDS."""
    findings: tuple[Finding, ...]
    note: str = ""
    """Why it could not be audited."""

    def count(self, verdict: str) -> int:
        """How many combinations have this verdict."""
        return sum(f.verdict == verdict for f in self.findings)


@dataclass
class Report:
    """The audit of some operators."""

    peer: str
    calls: list[Audited] = field(default_factory=list)

    def operators(self) -> dict[str, list[Audited]]:
        """Calls by operator, in order of names."""
        found: dict[str, list[Audited]] = {}
        for audited in sorted(self.calls, key=lambda a: a.call.op):
            found.setdefault(audited.call.op, []).append(audited)
        return found

    @property
    def recall(self) -> float | None:
        """Of the combinations that the peer allows and execution confirms, the share that we allow too: those whose
        operands lie whole, cut, or in summands. None where there are none."""
        return self._recall(lambda f: f.combination.sums_only)

    @property
    def recall_of_all(self) -> float | None:
        """The same with Partials of every kind coming in."""
        return self._recall(lambda f: True)

    def _recall(self, counted: Callable[[Finding], bool]) -> float | None:
        counts = Counter(f.verdict for a in self.calls for f in a.findings if counted(f))
        confirmed = counts["same"] + counts["miss"]
        return counts["same"] / confirmed if confirmed else None


def category(audited: Iterable[Audited]) -> str:
    """same | ours more | theirs more | conflict | not audited: the worst that some call of an operator has."""
    found = [f for a in audited for f in a.findings]
    for verdict, text in (("conflict", "conflict"), ("miss", "theirs more"), ("more", "ours more")):
        if any(f.verdict == verdict for f in found):
            return text
    return "same" if any(f.verdict == "same" for f in found) else "neither splits"


def our_combinations(call: Call, rule: Rule, results: Sequence[TensorMeta | None]) -> dict[Combination, Factor | None]:
    """What a rule allows, each with its factor; None for what passes through."""
    found: dict[Combination, Factor | None] = {}
    for factor in rule.factors:
        operands = tuple(_placement(role) for role in factor.operands)
        placed = tuple(None if m is None else _placement(role) for m, role in zip(results, factor.results))
        if _cuts_evenly(call, factor) and any(p != R for p in operands):
            found.setdefault(Combination(operands, placed), factor)
    kinds = (*REDUCE_OPS, "avg") if rule.moves_data else ("sum", "avg")  # a mean is a sum of scaled pieces
    for group in rule.linear:
        for kind in kinds:
            operands = tuple(Partial(kind) if k in group else R for k in range(len(call.operands)))
            found.setdefault(Combination(operands, tuple(None if m is None else Partial(kind) for m in results)), None)
    return {plain(c, results): f for c, f in found.items() if countable(call, c)}


def plain(combination: Combination, results: Sequence[TensorMeta | None]) -> Combination:
    """The same with one word for each way in which truth values combine: a sum of them is their maximum, a product
    their minimum."""
    words = {Partial("sum"): Partial("max"), Partial("prod"): Partial("min")}
    placed = tuple(
        words.get(p, p) if m is not None and m.dtype == "bool" and isinstance(p, Partial) else p
        for p, m in zip(combination.results, results)
    )
    return Combination(combination.operands, placed if len(placed) == len(combination.results) else combination.results)


def _placement(role: object) -> Placement:
    """A cut of the outermost of the factors of a dim is a plain cut of the dim."""
    if isinstance(role, DimRef):
        return Shard(role.dim) if role.outer == 1 else Shard(role.dim, role.outer, role.unit)
    return Partial(role) if isinstance(role, str) else R


def _cuts_evenly(call: Call, factor: Factor) -> bool:
    """Whether two plain pieces of the dims hold whole elements of the factor."""
    for meta, role in zip(call.operands, factor.operands):
        if isinstance(role, DimRef) and (role.unit > 1 or role.outer > 1):
            if meta.shape[role.dim] // (role.outer * role.unit) % 2:
                return False
    return True


def countable(call: Call, combination: Combination) -> bool:
    """Whether it is compared: some operand does not lie whole, no dim of one element is cut, no summand is an
    integer."""
    if all(p == R for p in combination.operands):
        return False
    for meta, placement in zip(call.operands, combination.operands):
        if isinstance(placement, Shard) and (placement.dim >= len(meta.shape) or meta.shape[placement.dim] < 2):
            return False
        if isinstance(placement, Partial) and not meta.dtype.startswith(("float", "complex", "bfloat")):
            return False
    return True


def kind_of(rule: Rule, results: Sequence[TensorMeta | None]) -> str:
    """What kind of operator a rule describes; of several the first that fits."""
    if rule.moves_data:
        return "view"
    if not rule.factors:
        return "replicated"
    if any(f.index is not None for f in rule.factors):
        return "index"
    reduced = [f for f in rule.factors if any(isinstance(role, str) for role in f.results)]
    if any(sum(isinstance(role, DimRef) for role in f.operands) > 1 for f in reduced) and rule.linear:
        return "contraction"
    if reduced:
        return "reduction"
    cut = {f.results for f in rule.factors}
    shapes = {m.shape for m in results if m is not None}
    dims = [(d, size) for shape in shapes for d, size in enumerate(shape)]
    whole = len(shapes) == 1 and all((DimRef(d),) * len(results) in cut for d, size in dims if size > 1)
    return "elementwise" if whole else "other"


def text_of(rule: Rule, call: Call, results: Sequence[TensorMeta | None]) -> str:
    """A rule in factor notation, with all ranks."""
    if not rule.factors and not rule.linear:
        return "replicated only"
    ranks = tuple(len(m.shape) for m in call.operands), tuple(0 if m is None else len(m.shape) for m in results)
    if not rule.factors:
        return "linear{" + "|".join(",".join(map(str, g)) for g in rule.linear) + "}"
    return format_rule(rule, ranks)
