"""A plan and a graph -> the program of one device.

Shapes become local, integers that follow a factor become local, reshardings become `comm.*` nodes, and the dialect
`shard.*` does what discovery proved necessary (shifted index operands, padding, neutral elements for empty pieces):

    comm.all_gather(x, axis, dim, outer, unit, lens)           lens: elements of the factor on every rank of the axis
    comm.all_reduce(x, axis, op[, nbytes])                     nbytes: of the largest piece, where it only leaves
    comm.reduce_scatter(x, axis, op, dim, outer, unit, lens)
    comm.all_to_all(x, axis, [dim, outer, unit, lens], [dim, outer, unit, lens])      from, to
    comm.exchange(x, axis, dim, owned, needed)                 [start, stop) of every rank of the axis, before and after
    shard.slice(x, dim, outer, unit, start, stop)              the local piece of a whole
    shard.zero_unless(x, keep)                                 one summand of a whole
    shard.local_index(x, start, length, size, wraps, fill)     index operand, shifted; outside entries become `fill`
    shard.mask(x, index, start, length, size, wraps, dims)     zero where the index points outside
    shard.pad(x, dim), shard.drop_last(x, dim)                 one more row, one row less
    shard.zeros_around(x, dim, before, after)                  so many rows of zeros on both sides
    shard.fill(shape, dtype, op)                               the neutral element of a reduction

The same resharding is never done twice within a phase; backward uses a forward copy where the plan keeps it. A gradient
is resharded as soon as it is made, unless that takes more memory.

Every device must start the same collectives in the same order, although some compute nothing where the others compute
something: what is sent when may depend on the graph and the plan alone, never on the program of one device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.graph import (
    BACKWARD,
    FORWARD,
    ITEM_BYTES,
    Arg,
    Graph,
    Input,
    Literal,
    Node,
    Output,
    Path,
    Ref,
    Value,
    leaves,
    replace_leaves,
)
from ..ir.passes import leaving
from ..ir.placement import Layout, Partial, R, Shard, chunk, local_cuts, local_factor
from ..plan.options import Choice
from ..plan.plan import NodePlan, Plan
from ..plan.reshard import Move, Resharding
from ..rules.rule import DimRef, Factor, Rule
from . import halo
from .bucket import only_leave
from .state import Lowering

NEUTRAL_OPS = ("sum", "max", "min", "prod")


def lower(graph: Graph, rules: tuple[Rule, ...], plan: Plan, resharding: Resharding, coords: tuple[int, ...]) -> Graph:
    """The program of the device at `coords`, forward and backward in one graph."""
    late = resharding.leaving(), leaving(graph), only_leave(graph, rules, plan)
    state = Lowering(graph, rules, plan, resharding, coords, *late, kept=frozenset(plan.kept))
    inputs = []
    for item, (_, _, layout) in zip(graph.inputs, plan.inputs):
        value = state.local_value(item.value.name, layout, item.value.name)
        state.own[value.name] = layout
        state.local[value.name] = value
        inputs.append(Input(value, item.kind, item.path))
    pending = [(o, x) for o, (_, _, x) in zip(graph.outputs, plan.outputs)]
    outputs: dict[int, Output] = {}
    gradients: dict[str, list[int]] = {}
    for k, (output, layout) in enumerate(pending):
        if output.kind == "gradient" and output.name is not None and layout is not None:
            gradients.setdefault(output.name, []).append(k)
    phase = FORWARD
    for node, rule, chosen in zip(graph.nodes, rules, plan.nodes):
        if phase == FORWARD and node.phase == BACKWARD:
            _outputs(state, pending, outputs, FORWARD)
            phase = BACKWARD
        _node(state, node, rule, chosen)
        for value in node.results if phase == BACKWARD else ():
            for k in gradients.get(value.name, ()) if value is not None else ():
                _early(state, k, *pending[k], outputs)
    _outputs(state, pending, outputs, FORWARD)
    _outputs(state, pending, outputs, BACKWARD)
    ordered = tuple(outputs[k] for k in range(len(pending)))
    return Graph(tuple(inputs), tuple(state.nodes), ordered, graph.name, "lower")


def _outputs(state: Lowering, pending: list[tuple[Output, Layout | None]], done: dict[int, Output], phase: str) -> None:
    for k, (output, layout) in enumerate(pending):
        backward = output.kind == "gradient"
        if k in done or backward != (phase == BACKWARD):
            continue
        if output.name is None or layout is None:
            done[k] = output
        else:
            done[k] = replace(output, name=_acquire(state, output.name, layout, phase))


def _early(state: Lowering, k: int, output: Output, layout: Layout | None, done: dict[int, Output]) -> None:
    """Output k as soon as its value is made, where that keeps no more memory than the value itself."""
    assert output.name is not None and layout is not None
    if state.largest(output.name, layout) <= state.largest(output.name, state.own[output.name]):
        done[k] = replace(output, name=_acquire(state, output.name, layout, BACKWARD))


def _acquire(state: Lowering, name: str, layout: Layout, phase: str) -> str:
    """The name of the local value that holds `name` in this layout; reshards at first need."""
    if state.own[name] == layout:
        return name
    found = state.copies.get((name, phase, layout))
    if found is None and phase == BACKWARD and (name, layout) in state.kept:
        found = state.copies.get((name, FORWARD, layout))
    if found is not None:
        return found
    value = state.graph.values[name]
    item = ITEM_BYTES.get(value.dtype, 8)
    here = name
    resharding = state.late if name in state.leaving else state.resharding
    for move in resharding.path(value.shape, item, state.own[name], layout):
        known = state.copies.get((name, phase, move.target))
        here = known if known is not None else _move(state, name, here, move, phase)
        state.copies[(name, phase, move.target)] = here
    return here


def _place(state: Lowering, shape: tuple[int, ...], layout: Layout, axis: int) -> tuple[int, int, int, tuple[int, ...]]:
    """(dim, outer, unit, lens) of the cut on `axis`, as it reads on the piece that the other axes leave."""
    shard = layout[axis]
    assert isinstance(shard, Shard)
    others = (*layout[:axis], R, *layout[axis + 1 :])
    cuts = local_cuts(shape, others, state.mesh, state.coords).get(shard.dim, ())
    outer, unit = local_factor(cuts, shape[shard.dim], shard.outer, shard.unit)
    n = shape[shard.dim] // (shard.outer * shard.unit)
    for cut in cuts:
        if (cut.outer, cut.unit) == (shard.outer, shard.unit):
            n = cut.stop - cut.start
    parts = state.mesh[axis]
    lens = tuple(stop - start for start, stop in (chunk(n, parts, k) for k in range(parts)))
    return shard.dim, outer, unit, lens


def _move(state: Lowering, name: str, here: str, move: Move, phase: str) -> str:
    """Appends one step of a resharding."""
    shape = state.graph.values[name].shape
    value = state.local_value(name, move.target, state.new_name(name))
    if move.kind in ("slice", "zero"):
        value = replace(value, alias=state.owner(here))  # it may be a view, or the operand itself
    x, axis = Ref(here), move.axis
    source, target = move.source[axis], move.target[axis]
    args: tuple[Arg, ...]
    if move.kind == "all_gather":
        args = (x, axis, *_place(state, shape, move.source, axis))
    elif move.kind == "all_reduce":
        assert isinstance(source, Partial)
        leaves_bytes = (state.largest(name, move.target),) if phase == BACKWARD and name in state.only_leave else ()
        args = (x, axis, source.op, *leaves_bytes)
    elif move.kind == "reduce_scatter":
        assert isinstance(source, Partial)
        args = (x, axis, source.op, *_place(state, shape, move.target, axis))
    elif move.kind == "all_to_all":
        args = (x, axis, _place(state, shape, move.source, axis), _place(state, shape, move.target, axis))
    elif move.kind == "slice":
        dim, outer, unit, lens = _place(state, shape, move.target, axis)
        start = sum(lens[: state.coords[axis]])
        args = (x, dim, outer, unit, start, start + lens[state.coords[axis]])
        return state.add("shard.slice", args, value, phase)
    else:
        assert move.kind == "zero" and isinstance(target, Partial)
        return state.add("shard.zero_unless", (x, state.coords[axis] == 0), value, phase)
    return state.add(f"comm.{move.kind}", args, value, phase)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one axis's factor means on this device."""

    factor: Factor
    n: int
    start: int
    stop: int
    mesh_axis: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def _pieces(state: Lowering, node: Node, rule: Rule, choice: tuple[Choice, ...]) -> list[_Piece]:
    """The pieces of all axes that split the node along a factor, nested cuts of the same factor resolved."""
    found: list[_Piece] = []
    ranges: dict[tuple[int, int, int], tuple[int, int]] = {}
    for axis, (kind, index, outer, unit) in enumerate(choice):
        if kind != "factor" or rule.factors[index].halo is not None:
            continue
        factor = rule.factors[index]
        key = (index, outer, unit)
        total = _length(state, node, factor, outer, unit)
        low, high = ranges.get(key, (0, total))
        start, stop = chunk(high - low, state.mesh[axis], state.coords[axis])
        ranges[key] = (low + start, low + stop)
        found.append(_Piece(factor, high - low, low + start, low + stop, axis))
    return found


def _length(state: Lowering, node: Node, factor: Factor, outer: int, unit: int) -> int:
    values = [*zip((state.graph.values[n] for n in node.operands), factor.operands), *zip(node.results, factor.results)]
    for value, ref in values:
        if value is not None and isinstance(ref, DimRef):
            return value.shape[ref.dim] // (ref.outer * outer * ref.unit * unit)
    raise AssertionError(f"{node.op}: a factor without dims")


def _node(state: Lowering, node: Node, rule: Rule, chosen: NodePlan) -> None:
    """Appends the local form of one node."""
    names = list(node.operands)
    local = [_acquire(state, n, layout, node.phase) for n, layout in zip(names, chosen.operands)]
    results = tuple(
        None if v is None or layout is None else state.local_value(v.name, layout, v.name)
        for v, layout in zip(node.results, chosen.results)
    )
    for value, layout in zip(node.results, chosen.results):
        if value is not None and layout is not None:
            state.own[value.name] = layout
    pieces = _pieces(state, node, rule, chosen.choice)
    if any(p.length == 0 and not p.factor.empty for p in pieces):
        _fill_results(state, node, results, pieces)
        return
    cuts = halo.overlaps(state, node, rule, chosen.choice)
    local = halo.extend(state, node, local, cuts)
    if any(cut.window is None for cut in cuts):
        _fill_results(state, node, results, pieces)
        return
    shifted = [p for p in pieces if p.factor.index is not None]
    local = _shift_operands(state, node, local, shifted)
    new: dict[Path, Arg] = {}
    refs = iter(local)
    for path, leaf in leaves(node.args, node.kwargs):
        if isinstance(leaf, Ref):
            new[path] = Ref(next(refs))
    table = dict(leaves(node.args, node.kwargs))
    for piece in pieces:
        extra = int(piece.factor.index is not None and piece.factor.index.mode == "pad")
        for path in piece.factor.ints:
            value = new.get(path, table[path])
            assert isinstance(value, int)
            # Of an empty piece, cut again, the integer is 0 already.
            new[path] = value // piece.n * (piece.length + extra) if piece.n else value
    args, kwargs = replace_leaves(node.args, node.kwargs, new)
    results = _aliases(state, node, results, local)
    if cuts:
        halo.crop(state, node, args, kwargs, results, cuts)
        return
    if not shifted:
        state.nodes.append(Node(results, node.op, args, kwargs, node.phase, node.recompute, node.source))
        state.local.update((v.name, v) for v in results if v is not None)
        return
    _unshift_results(state, node, args, kwargs, results, shifted, names)


def _aliases(
    state: Lowering, node: Node, results: tuple[Value | None, ...], local: list[str]
) -> tuple[Value | None, ...]:
    """A view stays a view of whatever local value its operand is."""
    views = [v is not None and v.alias is not None for v in node.results]
    if not any(views) or not local:
        return results
    owner = state.owner(local[0])
    return tuple(replace(v, alias=owner) if v is not None and view else v for v, view in zip(results, views))


def _fill_results(state: Lowering, node: Node, results: tuple[Value | None, ...], pieces: list[_Piece]) -> None:
    """Neutral elements instead of running an operator on nothing."""
    for r, value in enumerate(results):
        if value is None:
            continue
        op = "sum"
        for piece in pieces:
            role = piece.factor.results[r]
            if isinstance(role, str) and piece.length == 0:
                op = role
        args: tuple[Arg, ...] = (value.shape, Literal("dtype", value.dtype), op)
        state.add("shard.fill", args, value, node.phase, node.source)


def _index_args(state: Lowering, node: Node, piece: _Piece) -> tuple[Arg, ...]:
    """(start, length, size, wraps) of an indexed factor."""
    shift = piece.factor.index
    assert shift is not None
    return piece.start, piece.length, piece.n, shift.wraps


def _shift_operands(state: Lowering, node: Node, local: list[str], shifted: list[_Piece]) -> list[str]:
    """Index operands shifted by the piece's offset; in mode "pad" the cut operands get one more row."""
    local = list(local)
    for piece in shifted:
        shift = piece.factor.index
        assert shift is not None
        index = state.local[local[shift.operand]]
        fill = piece.length if shift.mode == "pad" else 0
        value = replace(index, name=state.new_name(index.name), alias=None, stride=None)
        args = (Ref(index.name), *_index_args(state, node, piece), fill)
        local[shift.operand] = state.add("shard.local_index", args, value, node.phase, node.source)
        if shift.mode != "pad":
            continue
        for k, ref in enumerate(piece.factor.operands):
            if isinstance(ref, DimRef):
                old = state.local[local[k]]
                local[k] = state.add(
                    "shard.pad", (Ref(old.name), ref.dim), _grown(state, old, ref.dim, 1), node.phase, node.source
                )
    return local


def _grown(state: Lowering, value: Value, dim: int, by: int) -> Value:
    shape = (*value.shape[:dim], value.shape[dim] + by, *value.shape[dim + 1 :])
    return Value(state.new_name(value.name), shape, value.dtype)


def _unshift_results(
    state: Lowering,
    node: Node,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    results: tuple[Value | None, ...],
    shifted: list[_Piece],
    names: list[str],
) -> None:
    """Runs the node under temporary names, then masks its results or drops their extra row."""
    steps: list[list[tuple[str, tuple[Arg, ...], int, int]]] = [[] for _ in results]
    raw: list[Value | None] = []
    for r, value in enumerate(results):
        if value is None:
            raw.append(None)
            continue
        shape = list(value.shape)
        for piece in shifted:
            shift = piece.factor.index
            assert shift is not None
            role = piece.factor.results[r]
            if shift.mode == "pad" and isinstance(role, DimRef):
                shape[role.dim] += 1
                steps[r].append(("shard.drop_last", (role.dim,), role.dim, -1))
            elif shift.mode == "mask":
                index = Ref(_original_index(state, node, names, shift.operand))
                dims = shift.result_dims[r]
                steps[r].append(("shard.mask", (index, *_index_args(state, node, piece), dims), 0, 0))
        name = state.new_name(value.name) if steps[r] else value.name
        raw.append(Value(name, tuple(shape), value.dtype))
    state.nodes.append(Node(tuple(raw), node.op, args, kwargs, node.phase, node.recompute, node.source))
    for value, last, todo in zip(raw, results, steps):
        if value is None or last is None:
            continue
        state.local[value.name] = value
        here = value
        for k, (op, more, dim, by) in enumerate(todo):
            after = replace(here, name=state.new_name(last.name), alias=None)
            if by:  # without the last row it may be a view
                after = replace(_grown(state, here, dim, by), alias=state.owner(here.name))
            if k == len(todo) - 1:
                after = replace(after, name=last.name)
            state.add(op, (Ref(here.name), *more), after, node.phase, node.source)
            here = after


def _original_index(state: Lowering, node: Node, names: list[str], operand: int) -> str:
    """The unshifted local index operand: what `_acquire` gave for it."""
    chosen = next(p for p in state.plan.nodes if p.name == node.name)
    return _acquire(state, names[operand], chosen.operands[operand], node.phase)
