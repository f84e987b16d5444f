"""The `comm.*` and `shard.*` operators of a lowered program, on torch.distributed.

A collective returns a `Pending`: its work has started and its result is there after `wait()`. Pieces of unequal size
are padded to the largest one on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from .operators import dtype_of

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}

Place = tuple[int, int, int, tuple[int, ...]]
"""(dim, outer, unit, lens): the dim is read as (outer, sum(lens), unit) and cut by lens."""


@dataclass
class Pending:
    """A collective on its way."""

    work: Any
    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """The result. Raises RuntimeError where a rank is gone or the group timed out."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


def _on_wire(x: torch.Tensor) -> torch.Tensor:
    """Bools travel as bytes; complex numbers as pairs are left to the backend."""
    return x.to(torch.uint8) if x.dtype == torch.bool else x


def _split(x: torch.Tensor, place: Place, length: int) -> torch.Tensor:
    """x read as (before, outer, length, unit * after)."""
    dim, outer, unit, _ = place
    return x.reshape(prod(x.shape[:dim]), outer, length, unit * prod(x.shape[dim + 1 :]))


def _pad(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """x with dim grown to `length` by zeros."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = [*x.shape[:dim], missing, *x.shape[dim + 1 :]]
    return torch.cat([x, x.new_zeros(shape)], dim)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, place: Place) -> Pending:
    """The whole from everybody's piece."""
    dim, outer, unit, lens = place
    rank, longest = dist.get_rank(group), max(lens)
    dtype = x.dtype
    shape = list(x.shape)
    shape[dim] = outer * sum(lens) * unit
    parts = _split(_on_wire(x), place, lens[rank])
    before, rows = parts.shape[0] * outer, parts.shape[3]
    flat = _pad(parts.reshape(before, lens[rank], rows), 1, longest).contiguous()
    out = flat.new_empty((len(lens), *flat.shape))
    work = (
        dist.all_gather_single(out.reshape(-1), flat.reshape(-1), group=group, async_op=True) if out.numel() else None
    )

    def finish() -> torch.Tensor:
        if before == 1 and all(n == longest for n in lens):
            whole = out
        elif all(n == longest for n in lens):
            whole = out.transpose(0, 1)
        else:
            whole = torch.cat([out[k, :, :n] for k, n in enumerate(lens)], 1)
        return whole.reshape(shape).to(dtype)

    return Pending(work, finish)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup, op: str, in_place: bool = False) -> Pending:
    """Everybody's summand combined, on everybody."""
    wire = _on_wire(x)
    if wire is x and not in_place:
        wire = x.clone()
    order = sorted(range(wire.ndim), key=wire.stride, reverse=True)
    flat = wire.permute(order)
    if not flat.is_contiguous():
        wire = wire.contiguous()
        flat = wire
    dtype = x.dtype
    work = dist.all_reduce(flat, REDUCE_OPS[op], group=group, async_op=True) if wire.numel() else None
    return Pending(work, lambda: wire.to(dtype))


def all_reduce_many(
    buffer: torch.Tensor, shapes: list[tuple[int, ...]], group: dist.ProcessGroup, op: str
) -> list[Pending]:
    """Several all-reduces through the buffer in which their operands lie; every result is a view of it."""
    dtype, wire = buffer.dtype, _on_wire(buffer)
    work = dist.all_reduce(wire, REDUCE_OPS[op], group=group, async_op=True) if wire.numel() else None
    parts = wire.split([prod(shape) for shape in shapes])
    return [
        Pending(work, lambda part=part, shape=shape: part.view(shape).to(dtype)) for part, shape in zip(parts, shapes)
    ]


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, op: str, place: Place) -> Pending:
    """Everybody's summand combined, one piece each."""
    dim, outer, unit, lens = place
    rank, longest = dist.get_rank(group), max(lens)
    dtype = x.dtype
    shape = list(x.shape)
    shape[dim] = outer * lens[rank] * unit
    parts = _split(_on_wire(x), place, sum(lens))
    before, rows = parts.shape[0] * outer, parts.shape[3]
    pieces = parts.reshape(before, sum(lens), rows).split(list(lens), 1)
    if before == 1 and all(n == longest for n in lens):
        flat = parts.contiguous()
    else:
        flat = torch.stack([_pad(piece, 1, longest) for piece in pieces])
    out = flat.new_empty((before, longest, rows))
    work = None
    if out.numel():
        work = dist.reduce_scatter_single(out.reshape(-1), flat.reshape(-1), REDUCE_OPS[op], group=group, async_op=True)
    return Pending(work, lambda: out[:, : lens[rank]].reshape(shape).to(dtype))


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup, source: Place, target: Place) -> Pending:
    """From pieces along one dim to pieces along another, or along another factor of the same dim."""
    if source[0] == target[0]:
        return _recut(x, group, source, target)
    rank = dist.get_rank(group)
    dtype = x.dtype
    sends = _split(_on_wire(x), target, sum(target[3])).split(list(target[3]), 2)
    flat = torch.cat([s.reshape(-1) for s in sends])
    shape = list(x.shape)
    shape[target[0]] = target[1] * target[3][rank] * target[2]
    per_row = prod(shape) // max(1, source[3][rank]) if source[3][rank] else _row_elements(x, source, target, rank)
    counts = [per_row * n for n in source[3]]
    out = flat.new_empty(sum(counts))
    work = dist.all_to_all_single(out, flat, counts, [s.numel() for s in sends], group=group, async_op=True)

    def finish() -> torch.Tensor:
        parts = []
        for piece, n in zip(out.split(counts), source[3]):
            local = list(shape)
            local[source[0]] = source[1] * n * source[2]
            parts.append(_split(piece.reshape(local), source, n))
        shape[source[0]] = source[1] * sum(source[3]) * source[2]
        return torch.cat(parts, 2).reshape(shape).to(dtype)

    return Pending(work, finish)


@lru_cache(maxsize=1024)
def _recut_indices(
    source: Place, target: Place, rank: int
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], torch.Tensor]:
    """(what to send to every rank, as positions in the local piece; how many rows come from every rank; the order in
    which they make up the new piece)."""
    size = source[1] * sum(source[3]) * source[2]
    index = torch.arange(size)

    def owner(place: Place) -> torch.Tensor:
        bounds = torch.tensor(place[3]).cumsum(0)
        return torch.searchsorted(bounds, index // place[2] % sum(place[3]), right=True)

    before, after = owner(source), owner(target)
    position = torch.cumsum(before == rank, 0) - 1
    sends = tuple(position[(before == rank) & (after == k)] for k in range(len(source[3])))
    mine = index[after == rank]
    comes = torch.cat([mine[before[mine] == k] for k in range(len(source[3]))])
    counts = tuple(int((before[mine] == k).sum()) for k in range(len(source[3])))
    return sends, counts, torch.argsort(comes)


def _recut(x: torch.Tensor, group: dist.ProcessGroup, source: Place, target: Place) -> Pending:
    """Pieces of the same dim, dealt out along another factor."""
    dim, dtype = source[0], x.dtype
    sends, counts, order = _recut_indices(source, target, dist.get_rank(group))
    rows = _on_wire(x).movedim(dim, 0)
    parts = [rows.index_select(0, s.to(x.device)) for s in sends]
    shape = [sum(counts), *rows.shape[1:]]
    per_row = prod(rows.shape[1:])
    out = rows.new_empty(shape)
    work = dist.all_to_all_single(
        out.reshape(-1),
        torch.cat(parts).reshape(-1),
        [n * per_row for n in counts],
        [p.numel() for p in parts],
        group=group,
        async_op=True,
    )
    return Pending(work, lambda: out.index_select(0, order.to(x.device)).movedim(0, dim).contiguous().to(dtype))


def _row_elements(x: torch.Tensor, source: Place, target: Place, rank: int) -> int:
    """Elements of one step of the source's factor in the piece that this rank will hold, where it sends nothing."""
    shape = list(x.shape)
    shape[source[0]] = source[1] * source[2]
    shape[target[0]] = target[1] * target[3][rank] * target[2]
    return prod(shape)


def exchange(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    dim: int,
    owned: tuple[tuple[int, int], ...],
    needed: tuple[tuple[int, int], ...],
) -> Pending:
    """From pieces to windows of a dim: rank k has [start, stop) = owned[k] and gets needed[k], wherever it lies."""
    rank = dist.get_rank(group)
    (first, _), (low, high) = owned[rank], needed[rank]
    shape = list(x.shape)
    shape[dim] = high - low
    wire, dtype = _on_wire(x), x.dtype
    out = wire.new_empty(shape)
    sends, places = [], []
    for k in range(len(owned)):
        start, stop = max(first, needed[k][0]), min(owned[rank][1], needed[k][1])
        part = wire.narrow(dim, start - first, stop - start) if stop > start else wire.narrow(dim, 0, 0)
        if k == rank and stop > start:
            out.narrow(dim, start - low, stop - start).copy_(part)
        sends.append(part.reshape(-1) if k != rank else wire.new_empty(0))
        start, stop = max(low, owned[k][0]), min(high, owned[k][1])
        places.append((start - low, stop - start) if stop > start and k != rank else (0, 0))
    row = prod(shape[:dim]) * prod(shape[dim + 1 :])
    counts = [length * row for _, length in places]
    received = wire.new_empty(sum(counts))
    work = dist.all_to_all_single(
        received, torch.cat(sends), counts, [s.numel() for s in sends], group=group, async_op=True
    )

    def finish() -> torch.Tensor:
        for part, (start, length) in zip(received.split(counts), places):
            if length:
                target = out.narrow(dim, start, length)
                target.copy_(part.view(target.shape))
        return out.to(dtype)

    return Pending(work, finish)


def zeros_around(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """x with so many rows of zeros on both sides."""
    out = x.new_zeros([*x.shape[:dim], before + x.shape[dim] + after, *x.shape[dim + 1 :]])
    out.narrow(dim, before, x.shape[dim]).copy_(x)
    return out


def slice_piece(x: torch.Tensor, dim: int, outer: int, unit: int, start: int, stop: int) -> torch.Tensor:
    """The piece [start, stop) of the factor at (outer, n, unit), laid out contiguously.

    Some kernels read what an operator before them has made without a look at its strides (layer norm's backward its
    mean), and a view would keep the whole alive.
    """
    if outer == 1:
        return x.narrow(dim, start * unit, (stop - start) * unit).contiguous()
    n = x.shape[dim] // (outer * unit)
    split = x.reshape(*x.shape[:dim], outer, n, unit, *x.shape[dim + 1 :])
    piece = split.narrow(dim + 1, start, stop - start)
    return piece.reshape(*x.shape[:dim], outer * (stop - start) * unit, *x.shape[dim + 1 :]).contiguous()


def zero_unless(x: torch.Tensor, keep: bool) -> torch.Tensor:
    """x on one device, zeros on the others: summands of x."""
    return x if keep else torch.zeros_like(x)


def _inside(x: torch.Tensor, start: int, length: int, size: int, wraps: bool) -> tuple[torch.Tensor, torch.Tensor]:
    entries = torch.where(x < 0, x + size, x) if wraps else x
    return entries, (entries >= start) & (entries < start + length)


def local_index(x: torch.Tensor, start: int, length: int, size: int, wraps: bool, fill: int) -> torch.Tensor:
    """Indices into the whole -> indices into the piece [start, start + length); `fill` for all others."""
    entries, inside = _inside(x, start, length, size, wraps)
    return torch.where(inside, entries - start, fill)


def mask(
    x: torch.Tensor,
    index: torch.Tensor,
    start: int,
    length: int,
    size: int,
    wraps: bool,
    dims: tuple[int, ...],
) -> torch.Tensor:
    """x with zeros where the index points outside of the piece; dim d of the index lies along dim dims[d] of x."""
    inside = _inside(index, start, length, size, wraps)[1]
    kept = sorted((d for d in range(index.ndim) if dims[d] >= 0), key=lambda d: dims[d])
    dropped = [d for d in range(index.ndim) if dims[d] < 0]
    shape = [1] * x.ndim
    for d in kept:
        shape[dims[d]] = index.shape[d]
    return torch.where(
        inside.permute(*kept, *dropped).reshape(shape), x, torch.zeros((), dtype=x.dtype, device=x.device)
    )


def pad(x: torch.Tensor, dim: int) -> torch.Tensor:
    """One more row of zeros."""
    return _pad(x, dim, x.shape[dim] + 1)


def drop_last(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Without the last row."""
    return x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


def fill(shape: tuple[int, ...], dtype: torch.dtype, op: str, device: torch.device) -> torch.Tensor:
    """The neutral element of a reduction."""
    value: float | int | bool = 0
    if op == "prod":
        value = 1
    elif op in ("max", "min"):
        low = op == "max"
        if dtype == torch.bool:
            value = not low
        elif dtype.is_floating_point:
            value = float("-inf") if low else float("inf")
        else:
            info = torch.iinfo(dtype)
            value = info.min if low else info.max
    return torch.full(shape, value, dtype=dtype, device=device)


__all__ = ["Pending", "all_gather", "all_reduce", "all_to_all", "dtype_of", "fill", "reduce_scatter"]
