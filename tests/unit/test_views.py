"""Views by their strides alone: what steps past the operand's end is no product of runs, and ends the search."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shardwise.ir.graph import Ref
from shardwise.ir.runner import Call, TensorMeta, ViewOf
from shardwise.rules.rule import DimRef, format_rule
from shardwise.rules.verify import verify_rule
from shardwise.rules.views import view_atoms, view_rule
from tests.graphs import RUNNER


def test_a_transposed_view_has_an_atom_per_dim():
    atoms = view_atoms((3, 8), ViewOf(0, (8, 3), (1, 8), 0))
    assert atoms == [(DimRef(1), DimRef(0), 8), (DimRef(0), DimRef(1), 3)]


@pytest.mark.parametrize("view", [((4, 2), (4, 16)), ((2, 2), (8, 16)), ((5,), (8,)), ((3,), (32,))], ids=str)
def test_a_view_that_steps_past_the_end_has_none(view):
    assert view_atoms((2, 8), ViewOf(0, *view, 0)) is None


@pytest.mark.timeout(60)
def test_every_small_view_is_read_in_finite_time_and_what_is_found_lies_in_the_operand():
    operand = torch.arange(24).view(4, 6)
    for size, stride, offset in product(
        product((1, 2, 3, 4), repeat=2), product((0, 1, 2, 3, 6, 12), repeat=2), (0, 6)
    ):
        atoms = view_atoms((4, 6), ViewOf(0, size, stride, offset))
        last = offset + sum((n - 1) * s for n, s in zip(size, stride))
        if last >= operand.numel():
            continue
        view = operand.as_strided(size, stride, offset)
        for source, target, length in atoms or []:
            assert operand.shape[source.dim] % (source.outer * length * source.unit) == 0
            assert view.shape[target.dim] == target.outer * length * target.unit
            # Along the atom in the result, the index along the atom in the operand counts up by one.
            index = (view // (6 if source.dim == 0 else 1) % operand.shape[source.dim]) // source.unit % length
            along = index.movedim(target.dim, 0).reshape(target.outer, length, target.unit, -1)
            assert torch.equal(along - along[:, :1], torch.arange(length).view(1, -1, 1, 1).expand_as(along))


CALLS = [
    ("as_strided.default", (8, 40), ((2, 8), (1, 40), 2)),
    ("as_strided.default", (4, 6), ((2, 2), (1, 3), 0)),
    ("as_strided.default", (4, 6), ((6, 4), (1, 6), 0)),
    ("as_strided.default", (4, 12), ((4, 2, 3), (12, 6, 2), 1)),
    ("unfold.default", (4, 6), (1, 2, 3)),
    ("unfold.default", (4, 9), (1, 3, 2)),
    ("split.Tensor", (4, 12), (4, 1)),
    ("split_with_sizes.default", (4, 12), ((6, 3, 3), 1)),
    ("slice.Tensor", (4, 12), (1, 3, 9)),
    ("slice.Tensor", (4, 12), (1, 1, 12, 3)),
    ("diagonal.default", (4, 6, 6), (0, 1, 2)),
    ("expand.default", (4, 1), ((4, 6),)),
    ("view.default", (8, 6), ((4, 4, 3),)),
    ("permute.default", (4, 2, 3), ((2, 0, 1),)),
]


@pytest.mark.parametrize(("operator", "shape", "args"), CALLS, ids=str)
def test_the_rule_of_a_view_holds_where_it_is_executed(operator, shape, args):
    call = Call(f"aten.{operator}", (TensorMeta(shape, "float64"),), (Ref("0"), *args), ())
    rule = view_rule(call, RUNNER)
    assert rule is not None and rule.moves_data
    assert verify_rule(call, rule, RUNNER) == []


def test_sizes_strides_and_start_of_a_strided_view_become_local():
    call = Call("aten.as_strided.default", (TensorMeta((8, 40), "float64"),), (Ref("0"), (2, 8), (1, 40), 2), ())
    rule = view_rule(call, RUNNER)
    assert format_rule(rule) == "([j,20.i]) -> ([i,j]) local{i:1.0,2.1,3} local{j:1.1} linear{0}"


def test_a_split_of_nothing_has_fewer_parts_and_is_not_executed():
    call = Call("aten.split.Tensor", (TensorMeta((4, 12), "float64"),), (Ref("0"), 4, 1), ())
    rule = view_rule(call, RUNNER)
    assert [f.empty for f in rule.factors if f.ints] == [False]
