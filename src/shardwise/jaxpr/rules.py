"""The rules of a captured graph.

A number that stands in an equation (the 0.1 of a scale, the rate of a dropout) is an operand like any other where rules
are sought: so one rule serves all numbers, and what would hold for this one alone is not believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.graph import Graph, Literal, Ref
from ..ir.runner import Call, TensorMeta, call_of
from ..rules.book import RuleBook
from ..rules.rule import Rule
from .elsewhere import discover_elsewhere
from .params import dtype_of
from .runner import JaxRunner

Progress = Callable[[int, int], None]


def jax_book(use_disk: bool = True, use_shipped: bool = True) -> RuleBook:
    """The book of this version of jax."""
    return RuleBook(JaxRunner(), use_disk, use_shipped, discover=discover_elsewhere)


def rules_of_graph(graph: Graph, book: RuleBook, progress: Progress = lambda done, total: None) -> tuple[Rule, ...]:
    """The rule of every node, in order."""
    lifted = [_lifted(call_of(node, graph.values)[0]) for node in graph.nodes]
    found = book.find((call for call, _ in lifted), progress)
    return tuple(_lowered(rule, places) if places else rule for rule, (_, places) in zip(found, lifted))


def _lifted(call: Call) -> tuple[Call, tuple[int, ...]]:
    """The call with its numbers as operands behind the others, and where these stand among the operands."""
    args, operands = list(call.args), list(call.operands)
    if not operands:
        return call, ()
    places = []
    for k, arg in enumerate(args):
        if isinstance(arg, Literal) and arg.kind.startswith(("float", "bfloat")) and dtype_of(arg.kind).kind != "O":
            args[k] = Ref(str(len(operands)))
            places.append(len(operands))
            operands.append(TensorMeta((), arg.kind))
    return Call(call.op, tuple(operands), tuple(args), call.kwargs), tuple(places)


def _lowered(rule: Rule, places: tuple[int, ...]) -> Rule:
    """The rule without the operands that are numbers: what asks for something of them cannot be had."""
    first = places[0]
    factors = [
        replace(f, operands=f.operands[:first]) for f in rule.factors if all(f.operands[p] is None for p in places)
    ]
    linear = tuple(g for g in rule.linear if not set(g) & set(places))
    return replace(rule, factors=tuple(factors), linear=linear)
