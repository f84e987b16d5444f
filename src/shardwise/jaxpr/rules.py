"""The rules of a captured graph.

A number that stands in an equation (the 0.1 of a scale, the rate of a dropout) is an operand like any other where rules
are sought: so one rule serves all numbers, and what would hold for this one alone is not believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.graph import Arg, Graph, Literal, Ref
from ..ir.runner import Call, TensorMeta, call_of
from ..rules.book import RuleBook
from ..rules.rule import Rule
from .elsewhere import discover_elsewhere
from .runner import JaxRunner

Progress = Callable[[int, int], None]


def jax_book(use_disk: bool = True, use_shipped: bool = True) -> RuleBook:
    """The book of this version of jax."""
    return RuleBook(JaxRunner(), use_disk, use_shipped, discover=discover_elsewhere, windows=False)


def rules_of_graph(graph: Graph, book: RuleBook, progress: Progress = lambda done, total: None) -> tuple[Rule, ...]:
    """The rule of every node, in order."""
    lifted = [_lifted(call_of(node, graph.values)[0]) for node in graph.nodes]
    found = book.find((call for call, _ in lifted), progress)
    return tuple(_lowered(rule, places) if places else rule for rule, (_, places) in zip(found, lifted))


def _lifted(call: Call) -> tuple[Call, tuple[int, ...]]:
    """The call with its numbers as operands, in order of appearance, and where these stand among the operands."""
    if not call.operands:
        return call, ()
    args: list[Arg] = []
    operands: list[TensorMeta] = []
    places = []
    for arg in call.args:
        if isinstance(arg, Ref):
            operands.append(call.operands[int(arg.name)])
        elif isinstance(arg, Literal) and arg.kind.startswith(("float", "bfloat")):
            places.append(len(operands))
            operands.append(TensorMeta((), arg.kind))
        else:
            args.append(arg)
            continue
        args.append(Ref(str(len(operands) - 1)))
    return Call(call.op, tuple(operands), tuple(args), call.kwargs), tuple(places)


def _lowered(rule: Rule, places: tuple[int, ...]) -> Rule:
    """The rule without the operands that are numbers: what asks for something of them cannot be had."""
    count = max((len(f.operands) for f in rule.factors), default=0)
    left = [k for k in range(count) if k not in places]
    factors = [
        replace(f, operands=tuple(f.operands[k] for k in left))
        for f in rule.factors
        if all(f.operands[p] is None for p in places) and f.index is None
    ]

    def number(k: int) -> int:
        return k - sum(p < k for p in places)

    linear = tuple(tuple(map(number, g)) for g in rule.linear if not set(g) & set(places))
    return replace(rule, factors=tuple(factors), linear=linear)
