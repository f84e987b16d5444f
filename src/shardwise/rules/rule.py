"""What is known of how one operator splits.

A rule is a set of **factors**. A factor is a group of dims, at most one of each operand, that are cut together; it
says for every result whether the pieces are concatenated along a dim, combined by a reduction, or equal to the whole
on every device. Printed as an einsum with factors:

    mm: ([i,k],[k,j]) -> ([i,j]) reduce{k:sum} linear{0|1}

- `DimRef(dim, outer, unit)`: the factor lies in the dim at (outer, n, unit); plain operators have outer = unit = 1.
- `ints`: paths of integers in the arguments that shrink with the factor (a size), all others stay global (a count).
- `empty`: a piece without elements may be executed; otherwise lowering emits the neutral element for it.
- `even`: valid for pieces of equal size only.
- `index`: the factor is the range that an integer operand points into; that operand is shifted by the piece's offset.
  mode "mask": out-of-range entries read anything and their part of the results is set to zero; mode "pad": the cut
  operands and results carry one more row into which out-of-range entries point, and which is dropped afterwards.
- `halo`: the pieces overlap: the operator runs on a window of every cut dim, and what is wrong at the window's inner
  edges is cropped off or meets zeros (`window.py`). `2i` is a dim with 2 elements where others have one.
- `linear`: groups of operands in which the operator is jointly additive: Partial(sum) in, Partial(sum) out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..ir.graph import Path


@dataclass(frozen=True, slots=True)
class DimRef:
    """A factor's place in a tensor: dim read as (outer, n, unit), the factor being n."""

    dim: int
    outer: int = 1
    unit: int = 1


@dataclass(frozen=True, slots=True)
class IndexShift:
    """The factor is the range of an integer operand. `result_dims[d]`: the result dim that dim d of the operand
    appears as, for every result (mode "mask" only)."""

    operand: int
    mode: str
    wraps: bool
    result_dims: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Halo:
    """Pieces that overlap. Every dim of the factor is counted in blocks: `operands[k]` and `results[k]` are the
    elements that a block has there, 0 where the factor does not lie. `left`, `right`: blocks at an inner edge of a
    window in which results are wrong (and in which operands extended by zeros must be zero). `zeros`: the operands
    that are extended by zeros beyond their own piece; all others are extended by the elements of their neighbours."""

    left: int
    right: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    zeros: tuple[int, ...] = ()


ResultRole = DimRef | str | None
"""DimRef: concatenated there; a reduction's name: combined; None: the whole on every device, or no result."""
OperandRole = DimRef | str | None
"""DimRef: cut there; "sum": a summand on every device (a bias beside a split contraction); None: the whole."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One way to split an operator. See the top of the file."""

    operands: tuple[OperandRole, ...]
    results: tuple[ResultRole, ...]
    ints: tuple[Path, ...] = ()
    empty: bool = False
    even: bool = False
    index: IndexShift | None = None
    halo: Halo | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """All ways in which an operator splits; without factors it can only be replicated."""

    factors: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    moves_data: bool = False
    """Every element of the results is an element of an operand: any kind of Partial passes through."""
    found_on: str = ""

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return {
            "factors": [_factor_to_dict(f) for f in self.factors],
            "linear": [list(g) for g in self.linear],
            "moves_data": self.moves_data,
            "found_on": self.found_on,
        }

    @staticmethod
    def from_dict(data: dict) -> Rule:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError on damaged data."""
        return Rule(
            tuple(_factor_from_dict(f) for f in data["factors"]),
            tuple(tuple(int(k) for k in g) for g in data["linear"]),
            bool(data["moves_data"]),
            str(data["found_on"]),
        )

    def __str__(self) -> str:
        return format_rule(self)


def _role_to_data(role: ResultRole) -> object:
    return [role.dim, role.outer, role.unit] if isinstance(role, DimRef) else role


def _role_from_data(data: object) -> ResultRole:
    if isinstance(data, list):
        dim, outer, unit = data
        return DimRef(int(dim), int(outer), int(unit))
    if data is None or isinstance(data, str):
        return data
    raise TypeError(f"not a role: {data!r}")


def _factor_to_dict(factor: Factor) -> dict:
    data: dict = {
        "operands": [_role_to_data(r) for r in factor.operands],
        "results": [_role_to_data(r) for r in factor.results],
    }
    if factor.ints:
        data["ints"] = [list(p) for p in factor.ints]
    if factor.empty:
        data["empty"] = True
    if factor.even:
        data["even"] = True
    if factor.index is not None:
        shift = factor.index
        data["index"] = [shift.operand, shift.mode, shift.wraps, [list(d) for d in shift.result_dims]]
    if factor.halo is not None:
        halo = factor.halo
        data["halo"] = [halo.left, halo.right, list(halo.operands), list(halo.results), list(halo.zeros)]
    return data


def _factor_from_dict(data: dict) -> Factor:
    operands = tuple(_role_from_data(r) for r in data["operands"])
    shift = None
    if "index" in data:
        operand, mode, wraps, dims = data["index"]
        shift = IndexShift(int(operand), str(mode), bool(wraps), tuple(tuple(int(k) for k in d) for d in dims))
    halo = None
    if "halo" in data:
        left, right, *lists = data["halo"]
        ratios, of_results, zeros = (tuple(int(k) for k in numbers) for numbers in lists)
        halo = Halo(int(left), int(right), ratios, of_results, zeros)
    return Factor(
        operands,
        tuple(_role_from_data(r) for r in data["results"]),
        tuple(tuple(p) for p in data.get("ints", [])),
        bool(data.get("empty", False)),
        bool(data.get("even", False)),
        shift,
        halo,
    )


_LETTERS = "ijklmnopqrstuvwxyzabcdefgh"


def format_rule(rule: Rule, ranks: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> str:
    """Factor notation; `ranks` gives the ranks of operands and results where they are known.

    A dim without a factor prints as `_`; a factor inside a dim prints as `3.i.64` (outer, factor, unit).
    """
    operand_count = len(rule.factors[0].operands) if rule.factors else 0
    result_count = len(rule.factors[0].results) if rule.factors else 0
    operand_ranks = list(ranks[0]) if ranks else [0] * operand_count
    result_ranks = list(ranks[1]) if ranks else [0] * result_count
    tables = ({}, {})
    notes = []
    for k, factor in enumerate(rule.factors):
        letter = _LETTERS[k % len(_LETTERS)] + ("" if k < len(_LETTERS) else str(k // len(_LETTERS)))
        for side, (refs, sizes) in enumerate(((factor.operands, operand_ranks), (factor.results, result_ranks))):
            for t, ref in enumerate(refs):
                if isinstance(ref, DimRef):
                    sizes[t] = max(sizes[t], ref.dim + 1)
                    ratio = 1 if factor.halo is None else (factor.halo.operands, factor.halo.results)[side][t]
                    name = f"{ratio}{letter}" if ratio > 1 else letter
                    tables[side].setdefault((t, ref.dim), []).append((-ref.unit, ref.outer, name))
        once = [str(o) for o, ref in enumerate(factor.operands) if isinstance(ref, str)]
        if once:
            notes.append(f"once{{{letter}:{','.join(once)}}}")
        reduces = sorted({r for r in factor.results if isinstance(r, str)})
        if reduces:
            notes.append(f"reduce{{{letter}:{'/'.join(reduces)}}}")
        if factor.index is not None:
            notes.append(f"index{{{letter}:{factor.index.operand},{factor.index.mode}}}")
        if factor.ints:
            notes.append(f"local{{{letter}:{','.join('.'.join(map(str, p)) for p in factor.ints)}}}")
        if factor.even:
            notes.append(f"even{{{letter}}}")
        if factor.halo is not None:
            notes.append(f"halo{{{letter}:{factor.halo.left},{factor.halo.right}}}")
            notes += [f"zeros{{{letter}:{','.join(map(str, factor.halo.zeros))}}}"] if factor.halo.zeros else []

    def tensor(side: int, t: int, rank: int) -> str:
        dims = []
        for d in range(rank):
            found = sorted(tables[side].get((t, d), []))
            names = [
                (f"{outer}." if outer > 1 else "") + letter + (f".{-unit}" if unit < -1 else "")
                for unit, outer, letter in found
            ]
            dims.append("|".join(names) if names else "_")
        return "[" + ",".join(dims) + "]"

    left = ",".join(tensor(0, t, rank) for t, rank in enumerate(operand_ranks))
    right = ",".join(tensor(1, t, rank) for t, rank in enumerate(result_ranks))
    if rule.linear:
        notes.append("linear{" + "|".join(",".join(map(str, g)) for g in rule.linear) + "}")
    return " ".join([f"({left}) -> ({right})", *notes])


def rule_json(rule: Rule) -> str:
    """Canonical JSON of a rule, for comparing and hashing."""
    return json.dumps(rule.to_dict(), sort_keys=True, separators=(",", ":"))
