"""Operators with integer operands that point into several things, have to be in order, or count positions in a plane:
their rules, and that verification finds what is wrong with tempting ones."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.ir.graph import Ref
from shardwise.ir.runner import Call, TensorMeta
from shardwise.rules.book import RuleBook
from shardwise.rules.proxy import proxy_of
from shardwise.rules.rule import DimRef, Factor, IndexShift, Rule, format_rule
from shardwise.rules.sandbox import spec_of
from shardwise.rules.verify import verify_rule
from tests.graphs import RUNNER

A, B, C, D, E = (Ref(str(k)) for k in range(5))


def f(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float64")


def i(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "int64")


BAG = Call("aten._embedding_bag.default", (f(7, 5), i(12), i(3)), (A, B, C))
UNPOOL = Call("aten.max_unpool2d.default", (f(3, 2, 3, 3), i(3, 2, 3, 3)), (A, B, (6, 6)))
SAMPLE_WEIGHTS = Call(
    "aten._embedding_bag_per_sample_weights_backward.default",
    (f(2, 5), f(5, 5), i(7), i(2), i(7)),
    (A, B, C, D, E, 0, 4),
)

EXPECTED: list[tuple[Call, str]] = [
    # Bags begin where the offsets say: indices cannot be cut while the offsets stay.
    (BAG, "([_,i],[_],[_]) -> ([_,i],[_],[_],[_])"),
    (
        Call(BAG.op, (*BAG.operands, f(12)), (A, B, C, False, 0, False, D)),
        "([_,i],[_],[_],[_]) -> ([_,i],[_],[_],[_])",
    ),
    (Call(BAG.op, BAG.operands, (A, B, C, False, 1)), "([_,i],[_],[_]) -> ([_,i],[_],[_],[_])"),
    (Call(BAG.op, BAG.operands, (A, B, C, False, 2)), "([_,i],[_],[_]) -> ([_,i],[_],[_],[_,i])"),
    # Positions in a plane: no dim of it is their range.
    (UNPOOL, "([i,j,_,_],[i,j,_,_]) -> ([i,j,_,_]) linear{0}"),
    (
        Call(
            "aten.max_unpool3d.default",
            (f(3, 2, 3, 3, 3), i(3, 2, 3, 3, 3)),
            (A, B, (6, 6, 6), (2, 2, 2), (0, 0, 0)),
        ),
        "([i,j,_,_,_],[i,j,_,_,_]) -> ([i,j,_,_,_]) linear{0}",
    ),
    (Call("aten.take.default", (f(16, 32), i(8)), (A, B)), "([_,_],[i]) -> ([i]) linear{0}"),
    # Every index points into a dim of its own.
    (
        Call("aten.index.Tensor", (f(16, 32), i(8), i(8)), (A, (B, C))),
        "([j,k],[i],[i]) -> ([i]) reduce{j:sum} index{j:1,mask} reduce{k:sum} index{k:2,mask} linear{0}",
    ),
]


@pytest.fixture(scope="module")
def book() -> RuleBook:
    """Rules found now, whatever the cache and the shipped book say."""
    return RuleBook(RUNNER, use_disk=False, use_shipped=False)


def _rule(call: Call, book: RuleBook) -> Rule:
    return book.find([call])[0]


def _text(call: Call, rule: Rule) -> str:
    results = RUNNER.meta(call)
    ranks = tuple(len(m.shape) for m in call.operands), tuple(0 if m is None else len(m.shape) for m in results)
    return format_rule(rule, ranks)


@pytest.mark.parametrize("call, want", EXPECTED, ids=lambda x: getattr(x, "op", ""))
def test_rules(call: Call, want: str, book: RuleBook) -> None:
    rule = _rule(call, book)
    assert _text(call, rule) == want
    for seed in range(5):
        assert not verify_rule(call, rule, RUNNER, seed)


@pytest.mark.parametrize(
    "call",
    [
        SAMPLE_WEIGHTS,
        Call(
            "aten._embedding_bag_dense_backward.default",
            (f(3, 5), i(12), i(12), i(3), i(3)),
            (A, B, C, D, E, 7, False, 0, None),
        ),
    ],
    ids=lambda call: call.op,
)
def test_the_backward_of_a_bag_holds_on_every_seed(call: Call, book: RuleBook) -> None:
    rule = _rule(call, book)
    assert any(x.results[0] == DimRef(0) or x.results[0] == "sum" for x in rule.factors)
    for seed in range(10):
        assert not verify_rule(call, rule, RUNNER, seed)


def test_verification_finds_indices_cut_beside_whole_offsets() -> None:
    wrong = Factor((None, DimRef(0), None), ("sum", DimRef(0), None, None))
    for seed in range(5):
        assert verify_rule(BAG, Rule((wrong,)), RUNNER, seed)


def test_verification_finds_positions_shifted_like_columns() -> None:
    shift = IndexShift(1, "pad", False)
    wrong = Factor((None, None), (DimRef(3),), ((2, 1),), index=shift)
    for seed in range(5):
        assert verify_rule(UNPOOL, Rule((wrong,)), RUNNER, seed)


def test_ranges_and_order_of_integers() -> None:
    bag, unpool = spec_of(BAG, RUNNER), spec_of(UNPOOL, RUNNER)
    assert bag is not None and unpool is not None
    assert (bag[1].range, bag[1].ascending) == (7, False)
    assert (bag[2].range, bag[2].ascending) == (13, True)
    assert unpool[1].range == 36


def test_what_lies_around_an_operand_differs_from_run_to_run() -> None:
    """An operator that reads past an operand does not repeat itself; one that reads its operands alone does."""
    operands = [np.arange(6.0).reshape(2, 3)]
    call = Call("aten.as_strided.default", (f(2, 3),), (A, (2, 3), (3, 1)))
    first, again = (RUNNER.run(call, operands)[0] for _ in range(2))
    assert first is not None and again is not None and np.array_equal(first, again)
    proxy = proxy_of(SAMPLE_WEIGHTS, RUNNER)
    assert proxy is not None
    spec = spec_of(proxy, RUNNER)
    assert spec is not None and spec[4].range <= 2, "the bag of an index is a row of the gradient"
