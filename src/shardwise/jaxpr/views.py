"""Which results only read their operand: found by running the operator on numbers that say where they stood.

jax has no views, but a primitive whose result holds nothing but elements of its one operand, in steps, is one: the
compiler makes it by renaming, or while the result is read. Every element of the operand gets a number of its own, in no
order, and the numbers of the result say where each element came from. Sizes that pass through unchanged are made small
first, so that nothing large is computed.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib import resources
from math import prod
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..ir import disk
from ..ir.graph import Arg, Graph, Node, Path, leaves
from ..ir.passes import fix_aliases
from ..ir.runner import Call, OperatorError, TensorMeta, ViewOf, call_of
from ..rules.proxy import format_call

if TYPE_CHECKING:
    from .runner import JaxRunner

MAX_PROBE = 1 << 22
"""Elements of the largest operand that is run."""
SMALL = (2, 3, 5)
"""Sizes that stand in for larger ones."""


def mark_views(graph: Graph) -> Graph:
    """The graph with the storage that results of views share with their operands."""
    from .runner import JaxRunner

    runner = JaxRunner()
    calls = [call_of(node, graph.values)[0] for node in graph.nodes]
    _probe_together(calls, runner)
    nodes: list[Node] = []
    for node, call in zip(graph.nodes, calls):
        views = None if node.op in _OWN_STORAGE else runner.views(call)
        if views is None:
            nodes.append(node)
        else:
            owner = node.operands[0]
            nodes.append(replace(node, results=tuple(v and replace(v, alias=owner) for v in node.results)))
    return fix_aliases(replace(graph, nodes=tuple(nodes)))


_OWN_STORAGE = ("loop.stack", "loop.test", "loop.slice")
"""Read their operand, and have storage of their own."""
_IDENTITIES = ("loop.carry", "loop.next", "loop.test")


def view_of(call: Call, runner: JaxRunner) -> tuple[ViewOf, ...] | None:
    """How every result reads the one operand; None where one does not, or where there are several."""
    if len(call.operands) != 1:
        return None
    (x,) = call.operands
    strides = _strides(x.shape)
    if call.op in _IDENTITIES:
        return (ViewOf(0, x.shape, strides, 0),)
    if call.op == "loop.slice":
        runner.meta(call)
        return (ViewOf(0, x.shape[1:], strides[1:], 0),)
    results = runner.meta(call)
    if call.op == "loop.stack":
        return (ViewOf(0, results[0].shape, (0, *strides), 0),)  # type: ignore[union-attr]
    small = _candidate(call, runner)
    for tried in (small, call):  # where a piece begins in the middle, small sizes do not say where in the large ones
        if small is None or prod(tried.operands[0].shape) > MAX_PROBE:  # type: ignore[union-attr]
            return None
        found = _probe(tried, runner)  # type: ignore[arg-type]
        if found is None:
            return None
        shape = tried.operands[0].shape  # type: ignore[union-attr]
        views = [_enlarged(view, shape, x.shape, r.shape) for view, r in zip(found, results) if r]
        if None not in views:
            return tuple(v for v in views if v is not None)
    return None


def _candidate(call: Call, runner: JaxRunner) -> Call | None:
    """The small call whose results are to be looked at; None where they cannot be views."""
    if len(call.operands) != 1 or call.op.startswith("loop.") or 0 in call.operands[0].shape:
        return None
    if any(r is None or r.dtype != call.operands[0].dtype for r in runner.meta(call)):
        return None
    return _shrunk(call, runner)


def _probe_together(calls: list[Call], runner: JaxRunner) -> None:
    """Looks at all small calls that nobody has looked at, with one program for all: each alone would be compiled
    alone. What is found is kept on disk."""
    small = [c for call in dict.fromkeys(calls) if (c := _candidate(call, runner)) is not None]
    new = [c for c in dict.fromkeys(small) if c not in _probed]
    if new and not _read:
        _read.append(True)
        with contextlib.suppress(FileNotFoundError, ValueError):  # what ships with the package
            text = resources.files("shardwise.rules").joinpath("shipped", _path().name).read_text(encoding="utf-8")
            _known.update(_parse(text))
        _known.update(disk.read(_path(), _WHAT, _parse) or {})
    _probed.update((c, _known[key]) for c in new if (key := format_call(c)) in _known)
    new = [c for c in new if c not in _probed and _planes(c, SEEDS[0]) is not None]
    if not new:
        return
    rounds = max(len(_planes(c, SEEDS[0]) or ()) for c in new)
    runs: dict[Call, list[list[list[np.ndarray | None]]]] = {c: [] for c in new}
    for seed in SEEDS:
        planes = {c: _planes(c, seed) or [] for c in new}
        inputs = [[[planes[c][min(k, len(planes[c]) - 1)]] for c in new] for k in range(rounds)]
        try:
            results = runner.run_many(new, inputs)
        except OperatorError:
            return  # each will be run alone
        for j, c in enumerate(new):
            runs[c].append([results[k][j] for k in range(len(planes[c]))])
    for c in new:
        _probed[c] = _known[format_call(c)] = _views(c, list(runs[c]))
    disk.write(_path(), _WHAT, printed_views())


def printed_views() -> str:
    """All that is known, as the text of a file."""
    return disk.encode("views", _plain(_known), FORMAT)


SEEDS = (5, 6)
"""Two orders of numbers, which have to agree."""
FORMAT = 1
_WHAT = "the cache of views"
_probed: dict[Call, tuple[ViewOf, ...] | None] = {}
_known: dict[str, tuple[ViewOf, ...] | None] = {}
"""By the printed small call."""
_read: list[bool] = []


def _path() -> File:
    return disk.cache_dir() / f"views-jax-{jax.__version__}-v{FORMAT}.json"


def _plain(known: dict[str, tuple[ViewOf, ...] | None]) -> dict[str, Any]:
    return {k: v and [[w.shape, w.stride, w.offset] for w in v] for k, v in sorted(known.items())}


def _parse(text: str) -> dict[str, tuple[ViewOf, ...] | None]:
    """Raises ValueError where the file is damaged."""
    found: dict[str, tuple[ViewOf, ...] | None] = {}
    try:
        for key, views in disk.decode("views", text, FORMAT).items():
            found[key] = views and tuple(ViewOf(0, tuple(s), tuple(d), int(o)) for s, d, o in views)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return found


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def _shrunk(call: Call, runner: JaxRunner) -> Call | None:
    """The call with sizes that pass through made small; None where it is still too large to run."""
    table = dict(leaves((), call.kwargs))
    paths = [p for p in runner.size_leaves(call) if isinstance(table[p], int)]
    (x,) = call.operands
    for size in sorted(set(x.shape), reverse=True):
        if size <= max(SMALL):
            continue
        (x,) = call.operands
        table = dict(leaves((), call.kwargs))
        for small in SMALL:
            shape = tuple(small if s == size else s for s in x.shape)
            sized = {p: _as_int(table[p]) for p in paths}
            new: dict[Path, Arg] = {p: _follow(v, size, small, x.shape, shape) for p, v in sized.items()}
            candidate = call.with_leaves(new).with_operands((TensorMeta(shape, x.dtype),))
            if _accepts(candidate, runner, call):
                call = candidate
                break
    return call if prod(call.operands[0].shape) <= MAX_PROBE else None


def _as_int(leaf: Arg) -> int:
    assert isinstance(leaf, int)
    return leaf


def _follow(value: int, size: int, small: int, old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """An integer that equals the size, or the product of a run of dims that holds it."""
    if value == size:
        return small
    for start in range(len(old)):
        for stop in range(start + 2, len(old) + 1):
            if prod(old[start:stop]) == value and size in old[start:stop]:
                return prod(new[start:stop])
    return value


def _accepts(candidate: Call, runner: JaxRunner, call: Call) -> bool:
    """Whether the operator takes the smaller call: ranks stay, and results as large as the operand stay so. The rules
    of shapes of some primitives check less than they say."""
    try:
        new, old = runner.meta(candidate), runner.meta(call)
    except OperatorError:
        return False
    small, large = prod(candidate.operands[0].shape), prod(call.operands[0].shape)
    return all(
        a is not None
        and b is not None
        and len(a.shape) == len(b.shape)
        and (prod(b.shape) != large or prod(a.shape) == small)
        for a, b in zip(new, old)
    )


def _probe(call: Call, runner: JaxRunner) -> tuple[ViewOf, ...] | None:
    """The views of a small call."""
    if call not in _probed:
        runs: list[list[list[np.ndarray | None]] | None] = []
        for seed in SEEDS:
            try:
                planes = _planes(call, seed)
                runs.append(None if planes is None else [runner.run(call, [p]) for p in planes])
            except OperatorError:
                runs.append(None)
        _probed[call] = _views(call, runs)
    return _probed[call]


def _views(call: Call, runs: list[list[list[np.ndarray | None]] | None]) -> tuple[ViewOf, ...] | None:
    """What the runs in all orders of numbers agree on."""
    found = [None if r is None else _sources(call, seed, r) for seed, r in zip(SEEDS, runs)]
    if found[0] is None or found[1] is None or not all(np.array_equal(a, b) for a, b in zip(*found)):
        return None
    views = [_affine(where) for where in found[0]]
    return None if None in views else tuple(v for v in views if v is not None)


def _planes(call: Call, seed: int) -> list[np.ndarray] | None:
    """Numbers that tell the elements of the operand apart, all together; None where the dtype has too few."""
    (x,) = call.operands
    count, dtype = prod(x.shape), np.dtype(x.dtype)
    order = np.random.default_rng(seed).permutation(count)
    sign = (-1) ** seed
    if dtype.kind == "b":  # two values tell nothing apart, but the bits of the numbers do
        planes = [(order >> bit & 1).astype(bool) for bit in range(max(1, int(count).bit_length()))]
        planes.append(np.full(count, bool(seed % 2)))
    elif dtype.kind in "fc":  # signed, and no whole numbers
        planes = [(order * 2 - count + 0.1 * seed).astype(dtype) * sign]
    elif dtype.kind in "iu" and 2 * count + 7 <= np.iinfo(dtype).max:
        planes = [(order * 2 + 3 if dtype.kind == "u" else (order * 2 + 3 - count) * sign).astype(dtype)]
    else:
        return None
    return [plane.reshape(x.shape) for plane in planes]


def _sources(call: Call, seed: int, runs: list[list[np.ndarray | None]]) -> list[np.ndarray] | None:
    """For every result, which element of the operand each of its elements is; None where it is none."""
    planes = [p.reshape(-1) for p in _planes(call, seed) or ()]
    found = []
    for results in zip(*runs):
        keys = _matched(planes, list(results), np.dtype(call.operands[0].dtype))
        if keys is None:
            return None
        found.append(keys)
    return found


def _matched(planes: list[np.ndarray], results: list[np.ndarray | None], dtype: np.dtype) -> np.ndarray | None:
    """Index of every element of the results among those of the operand."""
    if any(r is None or r.dtype != dtype for r in results):
        return None
    arrays = [r for r in results if r is not None]
    if dtype.kind == "b":
        if not np.array_equal(arrays[-1], np.full(arrays[-1].shape, planes[-1][0])):
            return None
        numbers = sum(p.astype(np.int64) << k for k, p in enumerate(planes[:-1]))
        got = sum((a.astype(np.int64) << k for k, a in enumerate(arrays[:-1])), np.zeros((), np.int64))
    else:
        numbers, got = planes[0], arrays[0]
    back = np.argsort(numbers, kind="stable")
    ordered = np.asarray(numbers)[back]
    where = np.searchsorted(ordered, got)
    if np.any(where >= ordered.size) or not np.array_equal(ordered[where], got):
        return None
    return back[where]


def _affine(where: np.ndarray) -> ViewOf | None:
    """Strides and offset of positions that are affine in the index; None where they are not."""
    if where.size == 0:
        return None
    offset = int(where.reshape(-1)[0])
    strides = []
    for d, size in enumerate(where.shape):
        step = 0
        if size > 1:
            step = int(where[tuple(int(k == d) for k in range(where.ndim))]) - offset
        strides.append(step)
    want = np.full(where.shape, offset)
    for d, step in enumerate(strides):
        along = np.arange(where.shape[d]) * step
        want = want + along.reshape([-1 if k == d else 1 for k in range(where.ndim)])
    if not np.array_equal(want, where) or any(s < 0 for s in strides):
        return None
    return ViewOf(0, where.shape, tuple(strides), offset)


def _enlarged(view: ViewOf, small: tuple[int, ...], full: tuple[int, ...], result: tuple[int, ...]) -> ViewOf | None:
    """The view of the operand's own sizes, from that of the small ones."""
    before, after = _strides(small), _strides(full)
    strides = []
    for size, step in zip(view.shape, view.stride):
        if size == 1 or step == 0:
            strides.append(0 if step == 0 else step)
            continue
        dim = next((d for d, s in enumerate(before) if small[d] > 1 and s <= step), None)
        if dim is None or step % before[dim]:
            return None
        strides.append(step // before[dim] * after[dim])
    offset, left = 0, view.offset
    for d, s in enumerate(before):
        start, left = divmod(left, s)
        if start and small[d] != full[d]:
            return None
        offset += start * after[d]
    contiguous = _strides(result)
    strides = [c if n == 1 else s for n, s, c in zip(result, strides, contiguous)]
    return ViewOf(0, result, tuple(strides), offset)
