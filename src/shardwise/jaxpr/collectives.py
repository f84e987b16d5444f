"""The moves between layouts on the pieces of one device, inside of jax.shard_map.

A cut (dim, outer, unit) is read on the local piece: the dim is (outer, n, unit) there, and n is what moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..ir.placement import Layout, Partial, R, Shard, local_cuts, local_factor
from ..plan.reshard import Move


@dataclass(frozen=True)
class Mesh:
    """Sizes and names of the axes."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


def cut_at(shape: tuple[int, ...], layout: Layout, axis: int, mesh: tuple[int, ...]) -> tuple[int, int, int]:
    """(dim, outer, unit) of the cut on an axis, as it reads on the piece that the other axes leave."""
    shard = layout[axis]
    assert isinstance(shard, Shard)
    others = (*layout[:axis], R, *layout[axis + 1 :])
    cuts = local_cuts(shape, others, mesh, (0,) * len(mesh)).get(shard.dim, ())
    return shard.dim, *local_factor(cuts, shape[shard.dim], shard.outer, shard.unit)


def opened(x: Any, dim: int, outer: int, unit: int) -> Any:
    """The dim as three, (outer, n, unit)."""
    n = x.shape[dim] // (outer * unit)
    return x.reshape(*x.shape[:dim], outer, n, unit, *x.shape[dim + 1 :])


def closed(x: Any, dim: int) -> Any:
    """The inverse of `opened`."""
    size = x.shape[dim] * x.shape[dim + 1] * x.shape[dim + 2]
    return x.reshape(*x.shape[:dim], size, *x.shape[dim + 3 :])


def moved(x: Any, move: Move, shape: tuple[int, ...], mesh: Mesh) -> Any:
    """One step of a resharding of a value of this global shape."""
    axis, name = move.axis, mesh.names[move.axis]
    source, target = move.source[axis], move.target[axis]
    if move.kind == "all_gather":
        dim, outer, unit = cut_at(shape, move.source, axis, mesh.shape)
        gathered = lax.all_gather(_plain(opened(x, dim, outer, unit)), name, axis=dim + 1, tiled=True)
        return closed(gathered, dim).astype(x.dtype)
    if move.kind == "all_reduce":
        assert isinstance(source, Partial)
        return reduced(x, source.op, name)
    if move.kind == "zero":
        return jnp.where(lax.axis_index(name) == 0, x, jnp.zeros_like(x))
    if move.kind == "all_to_all":
        come_from = cut_at(shape, move.source, axis, mesh.shape)
        return _exchanged(x, come_from, cut_at(shape, move.target, axis, mesh.shape), name)
    assert isinstance(target, Shard), move
    dim, outer, unit = cut_at(shape, move.target, axis, mesh.shape)
    split = opened(x, dim, outer, unit)
    if move.kind == "reduce_scatter" and isinstance(source, Partial) and source.op == "sum" and x.dtype != bool:
        return closed(lax.psum_scatter(split, name, scatter_dimension=dim + 1, tiled=True), dim)
    if move.kind == "reduce_scatter":
        assert isinstance(source, Partial)
        split = opened(reduced(x, source.op, name), dim, outer, unit)
    return closed(piece(split, dim + 1, name, mesh.shape[axis]), dim)


def piece(x: Any, dim: int, name: str, parts: int) -> Any:
    """This device's part of a dim that every device holds whole."""
    length = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, lax.axis_index(name) * length, length, dim)


def reduced(x: Any, op: str, name: str) -> Any:
    """The reduction of the pieces of an axis, on all of its devices."""
    plain = _plain(x)
    if op == "prod":
        return jnp.prod(lax.all_gather(plain, name), axis=0).astype(x.dtype)
    return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[op](plain, name).astype(x.dtype)


def _plain(x: Any) -> Any:
    """Truth values travel as bytes."""
    return x.astype(jnp.uint8) if x.dtype == bool else x


def _exchanged(x: Any, source: tuple[int, int, int], target: tuple[int, int, int], name: str) -> Any:
    """All pieces of the source's factor come, for this device's piece of the target's."""
    (here, outer, unit), (there, other, inner) = source, target
    if here != there:
        first, second = sorted(((here, outer, unit), (there, other, inner)))
        split = opened(opened(x, second[0], *second[1:]), first[0], *first[1:])
        places = {first[0]: first[0] + 1, second[0]: second[0] + 3}
        out = lax.all_to_all(_plain(split), name, places[there], places[here], tiled=True).astype(x.dtype)
        return closed(closed(out, second[0] + 2), first[0])
    return _within_a_dim(x, here, (outer, unit), (other, inner), name)


def _within_a_dim(x: Any, dim: int, source: tuple[int, int], target: tuple[int, int], name: str) -> Any:
    """Both cuts lie in one dim, read as (a, outer factor, b, inner factor, c)."""
    parts = jax.lax.axis_size(name)
    size = x.shape[dim] * parts
    cuts = {"source": (source[0], size // (source[0] * source[1]), source[1])}
    cuts["target"] = (target[0], size // (target[0] * target[1]), target[1])
    wide, narrow = ("source", "target") if source[1] > target[1] else ("target", "source")
    (a, n, unit), (_, m, c) = cuts[wide], cuts[narrow]
    b = unit // (m * c)
    local = {wide: n, narrow: m, "source": cuts["source"][1] // parts}
    shape = (a, local[wide], b, local[narrow], c)
    split = x.reshape(*x.shape[:dim], *shape, *x.shape[dim + 1 :])
    places = {wide: dim + 1, narrow: dim + 3}
    out = lax.all_to_all(_plain(split), name, places["target"], places["source"], tiled=True).astype(x.dtype)
    return out.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
