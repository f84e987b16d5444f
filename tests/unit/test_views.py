"""Views by their strides alone: what steps past the operand's end is no product of runs, and ends the search."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shardwise.ir.runner import ViewOf
from shardwise.rules.rule import DimRef
from shardwise.rules.views import view_atoms


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
