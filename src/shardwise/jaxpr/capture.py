"""Captures a function of arrays as one graph, from abstract values alone.

The function is traced by `jax.make_jaxpr`, so nothing is computed and no device is needed; arrays may be given as
`jax.ShapeDtypeStruct`. Leaves that are no arrays (an activation function in a module) are part of the program.

An argument whose structure comes back as an output, or as a part of one, is state: parameters, the optimizer's moments.
Its leaves are the graph's parameters, and every new value is tied to the layout of the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..errors import CaptureError, InputError
from ..ir.graph import Graph, Input, Output, Ref
from . import compat
from .from_jaxpr import Block, Builder, Where
from .views import mark_views

CALLED_AS = "call it as you would call the step itself: plan(step, params, opt_state, batch)"


@dataclass(frozen=True)
class Program:
    """A captured step: the graph, and how it meets arguments and outputs."""

    graph: Graph
    blocks: tuple[Block, ...]
    constants: dict[str, Any]
    in_tree: Any
    arrays: tuple[int, ...]
    """Positions of the arrays among the flattened arguments."""
    others: tuple[Any, ...]
    """The flattened arguments, None where there is an array."""
    out_tree: Any
    out_others: tuple[Any, ...]
    """The flattened outputs, `ARRAY` where the graph computes one."""
    structs: tuple[jax.ShapeDtypeStruct, ...]
    """Shape and dtype of every array argument as the user gives it; keys are keys."""
    out_dtypes: tuple[Any, ...]
    names: tuple[str, ...] = ()
    """Path of every array argument."""
    state: frozenset[str] = field(default_factory=frozenset)
    """Paths of arguments that come back as outputs."""
    donated: tuple[int, ...] = ()
    """Numbers of the array arguments whose memory the step may use: those that the user's own jit donates."""


class _Array:
    def __repr__(self) -> str:
        return "ARRAY"


ARRAY = _Array()


def is_array(leaf: Any, argument: bool = False) -> bool:
    """Whether a leaf is an array of the program. A Python number is where it is an argument of its own; inside of a
    structure it is a setting (the rate of a dropout), and another value of it makes another program."""
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(leaf, arrays) or (argument and isinstance(leaf, bool | int | float | complex))


def struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array; a Python number gives way to the dtypes of arrays, as under jax.jit."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    if isinstance(leaf, jax.Array) and compat.is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    weak = isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, weak_type=weak)


def check_step(step: Any) -> None:
    """Raises InputError for anything that is no function."""
    if not callable(step):
        raise InputError(
            f"step: expected a function (params, opt_state, batch) -> (params, opt_state, loss), "
            f"got {type(step).__name__}"
        )


def capture(step: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Captures one call. Raises InputError where the step rejects its arguments, CaptureError where it cannot run."""
    check_step(step)
    placed, in_tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in placed]
    arrays = tuple(k for k, (path, leaf) in enumerate(placed) if is_array(leaf, len(path) == 1))
    if not arrays:
        raise InputError(f"example: there is no array among the arguments; {CALLED_AS}")
    others = tuple(None if k in set(arrays) else leaf for k, leaf in enumerate(leaves))
    structs = tuple(struct_of(leaves[k]) for k in arrays)
    names = tuple(_path(step, placed[k][0]) for k in arrays)
    seen: dict[str, Any] = {}

    def flat(*values: Any) -> list[Any]:
        full = list(others)
        for k, value in zip(arrays, values):
            full[k] = value
        out, seen["tree"] = jax.tree_util.tree_flatten(step(*jax.tree_util.tree_unflatten(in_tree, full)))
        seen["others"] = tuple(ARRAY if is_array(leaf) else leaf for leaf in out)
        return [leaf for leaf in out if is_array(leaf)]

    try:
        closed = jax.make_jaxpr(flat)(*structs)
    except Exception as error:
        raise _refused(step, error) from error
    if closed.effects:
        raise CaptureError(
            f"{_name(step)} has effects ({', '.join(map(str, closed.effects))}), which a sharded step cannot keep in "
            "order; take jax.debug.print and callbacks out of it"
        )
    shape = _Shape(in_tree, arrays, others, structs, names, seen["tree"], seen["others"])
    return _program(step, closed, shape)


@dataclass(frozen=True)
class _Shape:
    """What flattening found."""

    in_tree: Any
    arrays: tuple[int, ...]
    others: tuple[Any, ...]
    structs: tuple[Any, ...]
    names: tuple[str, ...]
    out_tree: Any
    out_others: tuple[Any, ...]


def _program(step: Any, closed: Any, shape: _Shape) -> Program:
    out_avals = [v.aval for v in closed.jaxpr.outvars]
    partners = _partners(shape, out_avals)
    jaxpr = compat.without_dead_code(closed.jaxpr)
    state = frozenset(shape.names[k] for k in partners.values())
    builder = Builder()
    args = []
    for name, var in zip(shape.names, jaxpr.invars):
        value = builder.value("arg", var.aval)
        builder.inputs.append(Input(value, "parameter" if name in state else "input", name))
        args.append(Ref(value.name))
    found = builder.read(jaxpr, [builder.constant(c) for c in closed.consts], args, Where())
    outputs = []
    for k, (arg, var) in enumerate(zip(found, jaxpr.outvars)):
        name = builder.named(arg, var.aval, Where())
        outputs.append(
            Output(name, "update", shape.names[partners[k]]) if k in partners else Output(name, "output", str(k))
        )
    inputs = tuple(builder.inputs)
    graph = Graph(inputs, tuple(builder.nodes), tuple(outputs), _name(step), "capture", tuple(builder.ties))
    return Program(
        mark_views(graph),
        tuple(builder.blocks),
        builder.constants,
        shape.in_tree,
        shape.arrays,
        shape.others,
        shape.out_tree,
        shape.out_others,
        shape.structs,
        tuple(a.dtype for a in out_avals),
        shape.names,
        state,
        compat.donated(closed.jaxpr),
    )


def _partners(shape: _Shape, out_avals: list[Any]) -> dict[int, int]:
    """Position of an output -> that of the argument whose next value it is.

    An argument is state where an output, or an element of one, has its structure, shapes and dtypes.
    """
    numbers = iter(range(len(out_avals)))
    marked = [next(numbers) if leaf is ARRAY else None for leaf in shape.out_others]
    out = jax.tree_util.tree_unflatten(shape.out_tree, marked)
    order = {k: n for n, k in enumerate(shape.arrays)}
    given = [order.get(k) for k in range(len(shape.others))]
    args = list(jax.tree_util.tree_unflatten(shape.in_tree, given))
    found: dict[int, int] = {}
    for part in _parts(out):
        leaves, tree = jax.tree_util.tree_flatten(part)
        if not leaves or any(leaf in found for leaf in leaves):
            continue
        for arg in args:
            old, old_tree = jax.tree_util.tree_flatten(arg)
            if old_tree != tree or any(o in found.values() for o in old):
                continue
            if all(_alike(shape.structs[o], out_avals[n]) for o, n in zip(old, leaves)):
                found.update(zip(leaves, old))
                break
    return found


def _parts(out: Any) -> list[Any]:
    """The output, and its elements where it has some."""
    if isinstance(out, dict):
        return [out, *out.values()]
    return [out, *out] if isinstance(out, tuple | list) else [out]


def _alike(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _path(step: Any, path: tuple[Any, ...]) -> str:
    """`params.layers.0.w`: the name of the argument, and where in it the leaf stands."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    rest_name = next((f"{p.name}." for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    first = path[0].idx
    rest = jax.tree_util.keystr(path[1:], simple=True, separator=".")
    head = names[first] if first < len(names) else f"{rest_name}{first - len(names) if rest_name else first}"
    return f"{head}.{rest}" if rest else head


def _name(step: Any) -> str:
    text = getattr(step, "__name__", type(step).__name__)
    return "".join(c if c.isalnum() else "_" for c in text)


def _refused(step: Any, error: Exception) -> Exception:
    """What the user reads where the step raised while it was traced."""
    first = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first}"
    if isinstance(error, CaptureError | InputError):
        return error
    if isinstance(error, jax.errors.JAXTypeError | NotImplementedError):
        return CaptureError(f"{_name(step)} cannot be traced: {text}. It has to work under jax.jit")
    return InputError(f"{_name(step)} rejects the example: {text.rstrip('.')}. Give the arguments that it takes")
