"""Placements: text, chunk convention, mixed-radix cuts, local shapes against a brute-force map of indices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.ir.placement import (
    Partial,
    R,
    Shard,
    chunk,
    dim_cuts,
    format_layout,
    is_valid,
    local_cuts,
    local_factor,
    local_shape,
    parse_layout,
    parse_placement,
)

placements = st.one_of(
    st.just(R),
    st.builds(Shard, st.integers(0, 3), st.integers(1, 64), st.integers(1, 64)),
    st.builds(Partial, st.sampled_from(["sum", "max", "min", "prod"])),
)


@given(st.lists(placements, min_size=1, max_size=3).map(tuple))
def test_layouts_parse_back(layout):
    assert parse_layout(format_layout(layout)) == layout


@pytest.mark.parametrize("text", ["", "S", "S-1", "Pmean", "S0(1)", "r"])
def test_what_is_no_placement_is_refused(text):
    with pytest.raises(ValueError, match="not a placement"):
        parse_placement(text)


@pytest.mark.parametrize("text", ["", "[S0", "S0]", "[[S0]]", "[S0,]", "[S0,,R]", "[,]", "[S0(1,2]", "S0, R", "[S0]R"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ValueError, match=r"not a (layout|placement)"):
        parse_layout(text)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(length, parts):
    expected = [len(c) for c in torch.arange(length).chunk(parts)] if length else []
    lengths = [stop - start for start, stop in (chunk(length, parts, k) for k in range(parts))]
    assert [n for n in lengths if n] == [n for n in expected if n]
    assert sum(lengths) == length


def owned(size, cuts):
    """Indices of a dim that the device holds, by brute force over the digits of every index."""
    index = np.arange(size)
    keep = np.ones(size, bool)
    ranges = {}
    for shard, parts, coordinate in cuts:
        n = size // (shard.outer * shard.unit)
        key = (shard.outer, shard.unit)
        low, high = ranges.get(key, (0, n))
        start, stop = chunk(high - low, parts, coordinate)
        ranges[key] = (low + start, low + stop)
    for (outer, unit), (low, high) in ranges.items():
        digit = index // unit % (size // (outer * unit))
        keep &= (digit >= low) & (digit < high)
    return index[keep]


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3),
)
def test_local_sizes_agree_with_brute_force(radix, picks):
    """A dim made of three digits, cut along any of them on several axes."""
    size = int(np.prod(radix))
    cuts, mesh, coords = [], [], []
    for digit, parts, coordinate in picks:
        outer, unit = int(np.prod(radix[:digit])), int(np.prod(radix[digit + 1 :]))
        cuts.append(Shard(0, outer, unit))
        mesh.append(parts)
        coords.append(coordinate % parts)
    layout = tuple(cuts)
    assert is_valid((size,), layout, tuple(mesh))
    expected = len(owned(size, list(zip(cuts, mesh, coords))))
    assert local_shape((size,), layout, tuple(mesh), tuple(coords)) == (expected,)


def test_overlapping_factors_are_invalid():
    assert dim_cuts(12, ((Shard(0, 2, 1), 2, 0), (Shard(0, 1, 4), 2, 0))) is None
    assert not is_valid((12,), (Shard(0, 2, 1), Shard(0, 1, 4)), (2, 2))
    assert not is_valid((12,), (Shard(0, 5, 1),), (2,))
    assert not is_valid((12,), (Shard(1),), (2,))
    assert not is_valid((12,), (Partial("sum"), Partial("max")), (2, 2))


def test_a_factor_reads_differently_on_a_piece():
    """[3, 4, 5] flattened, 4 cut in two: the 3 outside is unchanged, the 5 inside keeps its stride."""
    cuts = local_cuts((60,), (Shard(0, 3, 5),), (2,), (0,))[0]
    assert local_factor(cuts, 60, 1, 20) == (1, 10)
    assert local_factor(cuts, 60, 12, 1) == (6, 1)
