"""The program of one device: a captured graph under a plan, run on local pieces inside of jax.shard_map.

Every node runs its primitive on the pieces that the plan gives it, with the integers that follow a factor made local.
Values are brought to other layouts where they are first needed: those from outside of a loop before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..ir.graph import BACKWARD, FORWARD, ITEM_BYTES, TIED_KINDS, Arg, Node, Path, leaves
from ..ir.passes import leaving
from ..ir.placement import Layout
from ..ir.runner import TensorMeta, call_of
from ..plan.plan import Plan
from ..plan.reshard import Resharding
from ..rules.rule import DimRef, Factor, Rule
from .capture import Program
from .collectives import Mesh, moved
from .from_jaxpr import Block
from .params import dtype_name
from .runner import bind

Copies = dict[tuple[str, str, Layout], Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one axis's factor means: `n` elements of which this device has `length` from `start` on."""

    factor: Factor
    n: int
    length: int
    start: Any


@dataclass
class LocalRun:
    """One run of the program, in the middle of tracing it."""

    program: Program
    rules: tuple[Rule, ...]
    plan: Plan
    resharding: Resharding
    names: tuple[str, ...]
    scopes: list[Copies] = field(default_factory=lambda: [{}])
    own: dict[str, Layout] = field(default_factory=dict)
    active: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = self.program.graph
        self.mesh = Mesh(self.plan.mesh, self.names)
        self.kept = frozenset(self.plan.kept)
        self.late = self.resharding.leaving()
        self.leaving = leaving(self.graph)

    def __call__(self, *arrays: Any) -> list[Any]:
        """The outputs' pieces from the inputs'."""
        for item, (_, _, layout), array in zip(self.graph.inputs, self.plan.inputs, arrays, strict=True):
            self.define(item.value.name, layout, array)
        self.run(0, len(self.graph.nodes))
        found = []
        for output, (_, _, layout) in zip(self.graph.outputs, self.plan.outputs):
            assert output.name is not None and layout is not None
            found.append(self.acquire(output.name, layout, BACKWARD if output.kind in TIED_KINDS else FORWARD))
        return found

    def define(self, name: str, layout: Layout, array: Any) -> None:
        """A value as it is made."""
        self.own[name] = layout
        self.scopes[-1][name, "", layout] = array

    def lookup(self, name: str, phase: str, layout: Layout) -> Any | None:
        """A copy that there is, of this scope or of one around it."""
        return next((s[name, phase, layout] for s in reversed(self.scopes) if (name, phase, layout) in s), None)

    def acquire(self, name: str, layout: Layout, phase: str) -> Any:
        """The local piece of a value in this layout; brought there at first need."""
        own = self.own[name]
        here = self.lookup(name, "", own)
        if own == layout:
            return here
        found = self.lookup(name, phase, layout)
        if found is None and phase == BACKWARD and (name, layout) in self.kept:
            found = self.lookup(name, FORWARD, layout)
        if found is not None:
            return found
        value = self.graph.values[name]
        if phase == BACKWARD and self.lookup(name, FORWARD, layout) is not None:
            here = lax.optimization_barrier(here)  # or the compiler would keep forward's copy instead
        resharding = self.late if name in self.leaving else self.resharding
        for move in resharding.path(value.shape, ITEM_BYTES.get(value.dtype, 8), own, layout):
            known = self.lookup(name, phase, move.target)
            here = moved(here, move, value.shape, self.mesh) if known is None else known
            self.scopes[-1][name, phase, move.target] = here
        return here

    def run(self, start: int, stop: int) -> None:
        """The nodes of a range."""
        k = start
        while k < stop:
            block = self.block_at(k, stop)
            if block is not None:
                self.hoist(block)
                self.active.append(block)
                {"scan": self.scan, "while": self.loop, "cond": self.conditional}[block.kind](block)
                self.active.pop()
                k = block.end
            else:
                self.node(k)
                k += 1

    def block_at(self, k: int, stop: int) -> Block | None:
        """The outermost block that begins at a node, inside of those that run."""
        found = [b for b in self.program.blocks if b.start == k and b.end <= stop and b not in self.active]
        return max(found, key=lambda b: b.end, default=None)

    def hoist(self, block: Block) -> None:
        """Brings what a block reads from outside to where it is needed, once, before the block."""
        made = self.graph.producer
        for k in range(block.start, block.end):
            node = self.graph.nodes[k]
            for name, layout in zip(node.operands, self.plan.nodes[k].operands):
                if made.get(name, -1) < block.start:
                    self.acquire(name, layout, node.phase)

    def border(self, block: Block, op: str) -> list[int]:
        """The nodes of this kind on the border of a block."""
        inside = op in ("loop.carry", "loop.slice")
        first = block.start if inside else block.parts[-1][1]
        last = block.parts[-1][1] if inside else block.end
        nodes = self.graph.nodes
        return [k for k in range(first, last) if nodes[k].op == op and (not inside or nodes[k].loop == block.path[0])]

    def operand(self, k: int, position: int = 0) -> Any:
        """An operand of a node, in the layout that the plan gives it."""
        node = self.graph.nodes[k]
        return self.acquire(node.operands[position], self.plan.nodes[k].operands[position], node.phase)

    def give(self, k: int, arrays: Sequence[Any]) -> None:
        """Defines the results of a node."""
        for value, layout, array in zip(self.graph.nodes[k].results, self.plan.nodes[k].results, arrays):
            if value is not None and layout is not None:
                self.define(value.name, layout, array)

    def inside(self, begin: list[int], arrays: Sequence[Any], ranges: tuple[int, int], ends: list[int]) -> list[Any]:
        """A part of a block in a scope of its own: what it begins with, its nodes, and what the nodes `ends` read."""
        self.scopes.append({})
        for k, array in zip(begin, arrays):
            self.give(k, [array])
        self.run(*ranges)
        found = [self.operand(k) for k in ends]
        self.scopes.pop()
        return found

    def scan(self, block: Block) -> None:
        carries, slices = self.border(block, "loop.carry"), self.border(block, "loop.slice")
        nexts, stacks = self.border(block, "loop.next"), self.border(block, "loop.stack")

        def body(state: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            found = self.inside([*carries, *slices], [*state, *parts], block.parts[0], [*nexts, *stacks])
            return found[: len(nexts)], found[len(nexts) :]

        init, xs = [self.operand(k) for k in carries], [self.operand(k) for k in slices]
        last, stacked = lax.scan(body, init, xs, length=block.length, reverse=block.reverse)
        for k, array in zip([*nexts, *stacks], [*last, *stacked]):
            self.give(k, [array])

    def loop(self, block: Block) -> None:
        carries, nexts = self.border(block, "loop.carry"), self.border(block, "loop.next")
        test = self.graph.producer[block.predicate]

        def goes_on(state: list[Any]) -> Any:
            return self.inside(carries, state, block.parts[0], [test])[0]

        def body(state: list[Any]) -> list[Any]:
            return self.inside(carries, state, block.parts[1], nexts)

        last = lax.while_loop(goes_on, body, [self.operand(k) for k in carries])
        for k, array in zip(nexts, last):
            self.give(k, [array])

    def conditional(self, block: Block) -> None:
        merges = self.border(block, "branch.merge")

        def branch(part: int) -> Any:
            def run() -> list[Any]:
                self.scopes.append({})
                self.run(*block.parts[part])
                found = [self.operand(k, 1 + part) for k in merges]
                self.scopes.pop()
                return found

            return run

        which = self.operand(merges[0]) if merges else jnp.asarray(False)
        for k, array in zip(merges, lax.cond(which, branch(1), branch(0))):
            self.give(k, [array])

    def node(self, k: int) -> None:
        """One primitive on its pieces."""
        node, chosen = self.graph.nodes[k], self.plan.nodes[k]
        if node.op in ("loop.carry", "loop.slice") and self.active:
            return
        local = [self.operand(k, position) for position in range(len(node.operands))]
        if node.op == "loop.test":
            self.give(k, local)
            return
        pieces = self.pieces(node, self.rules[k], chosen.choice)
        shifted = [p for p in pieces if p.factor.index is not None]
        inside = [_shift(local, p) for p in shifted]
        call = call_of(node, self.graph.values)[0]
        table = dict(leaves(call.args, call.kwargs))
        new: dict[Path, Arg] = {}
        for p in pieces:
            extra = int(p.factor.index is not None and p.factor.index.mode == "pad")
            for path in p.factor.ints:
                value = new.get(path, table[path])
                assert isinstance(value, int)
                new[path] = value // p.n * (p.length + extra)
        metas = tuple(TensorMeta(x.shape, dtype_name(x.dtype)) for x in local)
        results = bind(call.with_leaves(new).with_operands(metas), local)
        for p, mask in zip(shifted, inside):
            results = [_cleaned(r, number, p, mask) for number, r in enumerate(results)]
        self.give(k, results)

    def pieces(self, node: Node, rule: Rule, choice: tuple[tuple[str, int, int, int], ...]) -> list[_Piece]:
        """The pieces of all axes that split a node along a factor, nested cuts of the same factor resolved."""
        found: list[_Piece] = []
        held: dict[tuple[int, int, int], tuple[int, Any]] = {}
        for axis, (kind, index, outer, unit) in enumerate(choice):
            if kind != "factor":
                continue
            factor = rule.factors[index]
            n, start = held.get((index, outer, unit), (self.length(node, factor, outer, unit), 0))
            length = n // self.mesh.shape[axis]
            start = start + lax.axis_index(self.mesh.names[axis]) * length
            held[index, outer, unit] = length, start
            found.append(_Piece(factor, n, length, start))
        return found

    def length(self, node: Node, factor: Factor, outer: int, unit: int) -> int:
        """Elements along a factor, inside of which the cut lies at (outer, unit)."""
        operands = [self.graph.values[n] for n in node.operands]
        for value, ref in [*zip(operands, factor.operands), *zip(node.results, factor.results)]:
            if value is not None and isinstance(ref, DimRef):
                return value.shape[ref.dim] // (ref.outer * outer * ref.unit * unit)
        raise AssertionError(f"{node.op}: a factor without dims")


def _shift(local: list[Any], piece: _Piece) -> Any:
    """Shifts the index operand by the offset of the piece, in place in the list; which entries point into it."""
    shift = piece.factor.index
    assert shift is not None
    entries = local[shift.operand]
    start = jnp.asarray(piece.start).astype(entries.dtype)
    if shift.wraps:
        entries = jnp.where(entries < 0, entries + piece.n, entries)
    inside = (entries >= start) & (entries < start + piece.length)
    fill = piece.length if shift.mode == "pad" else 0
    local[shift.operand] = jnp.where(inside, entries - start, jnp.asarray(fill, entries.dtype))
    if shift.mode == "pad":
        for k, ref in enumerate(piece.factor.operands):
            if isinstance(ref, DimRef):
                widths = [(0, int(d == ref.dim)) for d in range(local[k].ndim)]
                local[k] = jnp.pad(local[k], widths)
    return inside


def _cleaned(result: Any, number: int, piece: _Piece, inside: Any) -> Any:
    """A result without what entries outside of the piece put there."""
    shift, role = piece.factor.index, piece.factor.results[number]
    assert shift is not None
    if shift.mode == "pad":
        return lax.slice_in_dim(result, 0, piece.length, axis=role.dim) if isinstance(role, DimRef) else result
    dims = shift.result_dims[number]
    kept = sorted((d for d in range(inside.ndim) if dims[d] >= 0), key=lambda d: dims[d])
    shape = [1] * result.ndim
    for d in kept:
        shape[dims[d]] = inside.shape[d]
    order = (*kept, *(d for d in range(inside.ndim) if dims[d] < 0))
    mask = inside.transpose(order).reshape(shape)
    return jnp.where(mask, result, jnp.zeros_like(result))
