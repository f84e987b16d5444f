"""Windows: what every device computes where the pieces of a factor overlap.

All dims of such a factor are read in blocks of as many elements as their ratio says. A **window** is the whole without
`skip` blocks on the left and `drop` blocks on the right: of a dim of `size` elements it is
[ratio * skip, size - ratio * drop). Whole blocks are left away, so that the sizes of operands and results of the
window fit each other as those of the whole do, whatever the operator adds at its edges. Where nothing is left away
the edge is the true one; at an inner edge the results of `left` (`right`) blocks are wrong and lie outside of what is
wanted.

What is wanted of a device is its own chunk of every **driver**: of a result that is concatenated, and of an operand
that is extended by zeros. Its window is the smallest that gives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..ir.placement import chunk
from .rule import DimRef, Factor, Halo

Span = tuple[int, int]
"""[start, stop) in elements of a dim."""


@dataclass(frozen=True, slots=True)
class Window:
    """The whole without `skip` blocks on the left and `drop` on the right."""

    skip: int
    drop: int

    def span(self, size: int, ratio: int) -> Span:
        """The elements that it has of a dim."""
        return ratio * self.skip, size - ratio * self.drop


@dataclass(frozen=True, slots=True)
class Overlap:
    """A halo and (size, ratio) of every driver: enough to know the windows of all devices."""

    halo: Halo
    drivers: tuple[tuple[int, int], ...]

    @property
    def blocks(self) -> int:
        """Blocks of the whole, the last of which may be larger or smaller."""
        return max(-(-size // ratio) for size, ratio in self.drivers)

    def windows(self, parts: int) -> tuple[Window | None, ...]:
        """The window of every device of an axis; None where nothing is wanted of it."""
        return _windows(self, parts)

    def share(self, parts: int) -> float:
        """Part of the whole that the largest window is."""
        left = [self.blocks - w.skip - w.drop for w in self.windows(parts) if w is not None]
        return min(1.0, max(left) / self.blocks)


@lru_cache(maxsize=1 << 14)
def _windows(overlap: Overlap, parts: int) -> tuple[Window | None, ...]:
    halo = overlap.halo
    found: list[Window | None] = []
    for k in range(parts):
        wanted = [(size, ratio, *chunk(size, parts, k)) for size, ratio in overlap.drivers]
        wanted = [w for w in wanted if w[3] > w[2]]
        if not wanted:
            found.append(None)
            continue
        skip = min(start // ratio for _, ratio, start, _ in wanted) - halo.left
        drop = min((size - stop) // ratio for size, ratio, _, stop in wanted) - halo.right
        found.append(Window(max(0, skip), max(0, drop)))
    return tuple(found)


def overlap_of(
    factor: Factor, operands: list[tuple[int, ...]], results: list[tuple[int, ...] | None]
) -> Overlap | None:
    """The overlap of a factor with a halo on operands and results of these shapes; None where it has no driver."""
    halo = factor.halo
    assert halo is not None
    drivers = []
    for k, (shape, role) in enumerate(zip(results, factor.results)):
        if shape is not None and isinstance(role, DimRef):
            drivers.append((shape[role.dim], halo.results[k]))
    for k in halo.zeros:
        role = factor.operands[k]
        assert isinstance(role, DimRef)
        drivers.append((operands[k][role.dim], halo.operands[k]))
    return Overlap(halo, tuple(drivers)) if drivers else None


def owned_spans(size: int, parts: int) -> tuple[Span, ...]:
    """What every device of an axis has of a dim that is cut in chunks."""
    return tuple(chunk(size, parts, k) for k in range(parts))


def needed_spans(size: int, ratio: int, windows: tuple[Window | None, ...]) -> tuple[Span, ...]:
    """What every device of an axis reads of a dim; (0, 0) where it computes nothing."""
    return tuple((0, 0) if w is None else w.span(size, ratio) for w in windows)
