"""Rules of views: what their strides say, checked by execution on the whole call and on its pieces."""

from itertools import product

import pytest

from shardwise.ir.graph import Ref
from shardwise.ir.runner import Call, TensorMeta
from shardwise.rules.rule import format_rule
from shardwise.rules.verify import verify_rule
from shardwise.rules.views import view_rule
from tests.graphs import RUNNER

A = Ref("0")

CASES = [
    # Strides that are given count in elements of the piece: they follow the cut where that is what it takes.
    ((16,), "as_strided", ((2, 1, 1, 2), (1, 2, 4, 8), 0), "([j.8|8.i]) -> ([i,_,_,j]) local{i:1.0,2.3} local{j:1.3}"),
    ((4, 6), "as_strided", ((4, 6), (6, 1), 0), "([i,j]) -> ([i,j]) local{i:1.0} local{j:1.1,2.0}"),
    ((4, 6), "as_strided", ((2, 6), (12, 1), 0), "([i.2,j]) -> ([i,j]) local{i:1.0} local{j:1.1,2.0}"),
    ((4, 6), "as_strided", ((3, 6), (6, 1), 6), "([_,i]) -> ([_,i]) local{i:1.1,2.0,3}"),
    ((12,), "as_strided", ((4, 3), (2, 1), 0), "() -> ()"),  # windows that overlap
    ((6,), "split.Tensor", (2,), "([3.i]) -> ([i],[i],[i]) local{i:1}"),
    ((6, 4), "split.Tensor", (2, 1), "([i,2.j]) -> ([i,j],[i,j]) local{j:1}"),
    ((2, 6, 4), "view", ((12, 4),), "([j,i,k]) -> ([j.6|2.i,k]) local{i:1.0} local{j:1.0} local{k:1.1}"),
    ((8, 4), "slice.Tensor", (0, 2, 6), "([4.i,j]) -> ([2.i,j]) local{i:2,3}"),
    ((3, 1, 4), "expand", ((3, 5, 4),), "([i,_,j]) -> ([i,k,j]) local{i:1.0} local{j:1.2} local{k:1.1}"),
    ((6, 6), "diagonal", (), "() -> ()"),
    ((10, 10), "unfold", (1, 2, 2), "([i,j.2]) -> ([i,j])"),
    ((4, 3, 2), "permute", ((2, 0, 1),), "([j,k,i]) -> ([i,j,k])"),
]


def _call(shape: tuple[int, ...], op: str, more: tuple) -> Call:
    name = op if "." in op else f"{op}.default"
    return Call(f"aten.{name}", (TensorMeta(shape, "float64"),), (A, *more))


@pytest.mark.parametrize("shape, op, more, want", CASES, ids=[f"{c[1]}-{k}" for k, c in enumerate(CASES)])
def test_views_hold(shape, op, more, want):
    call = _call(shape, op, more)
    rule = view_rule(call, RUNNER)
    assert rule is not None
    for seed in range(2):
        assert not verify_rule(call, rule, RUNNER, seed)
    assert format_rule(rule).removesuffix(" linear{0}") == want


@pytest.mark.parametrize(
    "size, stride", [((2, 4), (16, 1)), ((3, 4), (8, 1)), ((2, 2), (1, 16)), ((4, 2), (4, 100))], ids=str
)
def test_a_view_that_leaves_its_operand_has_no_factor_there(size, stride):
    """Such a call cannot run, but its strides must be read in bounded time and memory."""
    rule = view_rule(_call((16,), "as_strided", (size, stride, 0)), RUNNER)
    assert rule is None or not any(f.operands[0] for f in rule.factors)


@pytest.mark.timeout(60)
def test_every_small_strided_view_is_read_right():
    """All sizes and strides of two dims that stay within a 4 x 6 operand, overlapping ones included."""
    for size, stride in product(product((1, 2, 4), repeat=2), product((1, 3, 6, 12), repeat=2)):
        if sum((n - 1) * s for n, s in zip(size, stride)) < 24:
            call = _call((4, 6), "as_strided", (size, stride, 0))
            rule = view_rule(call, RUNNER)
            assert rule is not None
            assert verify_rule(call, rule, RUNNER) == [], (size, stride)
