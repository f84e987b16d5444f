"""`OpRunner` for jax: runs single primitives for the discovery of rules.

The integers of a primitive's parameters (the shape of a broadcast, the limits of a slice, the new sizes of a reshape)
are offered as sizes all alike; the discovery tells which follow a piece. The dialects `loop.*` and `branch.*` say how
a value passes the border of a loop (`from_jaxpr.py`), and are run like any operator.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from ..ir.graph import Arg, Graph, Literal, Path, Ref, leaves
from ..ir.runner import Call, OperatorError, TensorMeta, ViewOf, call_of
from ..ir.text import parse_graph
from ..rules.pointwise import FUSED
from . import compat
from .compat import ClosedJaxpr
from .params import dtype_name, dtype_of, from_arg, scalar_of, shape_struct
from .views import view_of

FRAMEWORK = "jax " + jax.__version__


class JaxRunner:
    """Runs primitives on the host's processor; shapes come from abstract evaluation."""

    framework = FRAMEWORK.replace(" ", "-")

    def prepare_child(self) -> None:
        """Nothing to do: the process that forks children never starts a backend."""

    def meta(self, call: Call) -> tuple[TensorMeta | None, ...]:
        return _meta(call)

    def run(self, call: Call, operands: list[np.ndarray]) -> list[np.ndarray | None]:
        if dialect := _DIALECT.get(call.op):
            return [dialect(call, operands)]
        try:
            with jax.enable_x64(True):
                return [np.asarray(r) for r in _compiled(call)(*operands)]
        except Exception as error:
            raise OperatorError(f"{call.op}: {type(error).__name__}: {error}") from error

    def run_many(self, calls: list[Call], rounds: list[list[list[np.ndarray]]]) -> list[list[list[np.ndarray | None]]]:
        """The results of several calls in every round, compiled as one program."""

        def all_of(arrays: list[list[Any]]) -> list[list[Any]]:
            return [bind(call, xs) for call, xs in zip(calls, arrays)]

        try:
            with jax.enable_x64(True):
                run = jax.jit(all_of)
                return [[[np.asarray(r) for r in results] for results in run(inputs)] for inputs in rounds]
        except Exception as error:
            raise OperatorError(f"{type(error).__name__}: {error}") from error

    def size_leaves(self, call: Call) -> tuple[Path, ...]:
        if call.op in _DIALECT:
            return ()
        return tuple(
            path for path, leaf in leaves((), call.kwargs) if isinstance(leaf, int) and not isinstance(leaf, bool)
        )

    def views(self, call: Call) -> tuple[ViewOf, ...] | None:
        return view_of(call, self)

    def may_draw(self, call: Call) -> bool:
        return True

    def decompose(self, call: Call) -> Graph | None:
        """Composite functions are inlined when they are captured; a primitive has no parts."""
        return None


def bind(call: Call, operands: Iterable[Any]) -> list[Any]:
    """The results of a primitive on arrays of jax."""
    operands = list(operands)
    if call.op == FUSED:
        return _body(call, operands)
    values = [operands[int(a.name)] if isinstance(a, Ref) else scalar_of(_literal(a)) for a in call.args]
    params = parameters(call)
    primitive = compat.primitive_of(call.op.removeprefix("jax."))
    found = primitive.bind(*values, **params)
    return list(found) if primitive.multiple_results else [found]


def _body(call: Call, operands: list[Any]) -> list[Any]:
    """The results of a joined node: its primitives one after the other."""
    body = _parsed(dict(call.kwargs)["body"])
    given = [operands[int(a.name)] if isinstance(a, Ref) else scalar_of(_literal(a)) for a in call.args]
    return _run_graph(body, given)


def _run_graph(graph: Graph, given: list[Any]) -> list[Any]:
    """The outputs of a graph of primitives."""
    values = dict(zip((i.value.name for i in graph.inputs), given))
    for node in graph.nodes:
        here, names = call_of(node, graph.values)
        results = bind(here, [values[n] for n in names])
        values.update((v.name, r) for v, r in zip(node.results, results) if v is not None)
    return [values[o.name] for o in graph.outputs if o.name is not None]


@lru_cache(maxsize=1 << 12)
def _parsed(body: Arg) -> Graph:
    return parse_graph(_literal(body).text)


def _literal(arg: Arg) -> Literal:
    assert isinstance(arg, Literal), arg
    return arg


def parameters(call: Call) -> dict[str, Any]:
    """The parameters of a call for jax."""
    return {k: from_arg(v, jaxpr_of) for k, v in call.kwargs}


def jaxpr_of(graph: Graph) -> ClosedJaxpr:
    """A graph as a jaxpr: the inverse of `from_jaxpr.graph_of`."""

    return compat.closed_call(
        lambda *args: _run_graph(graph, list(args)), *(shape_struct(i.value) for i in graph.inputs)
    )


@lru_cache(maxsize=1 << 14)
def _meta(call: Call) -> tuple[TensorMeta | None, ...]:
    if dialect := _DIALECT_META.get(call.op):
        return (dialect(call),)
    structs = [jax.ShapeDtypeStruct(m.shape, dtype_of(m.dtype)) for m in call.operands]
    try:
        with jax.enable_x64(True):
            found = jax.eval_shape(lambda *xs: bind(call, xs), *structs)
    except Exception as error:
        raise OperatorError(f"{call.op}: {type(error).__name__}: {error}") from error
    return tuple(TensorMeta(tuple(r.shape), dtype_name(r.dtype)) for r in found)


@lru_cache(maxsize=64)
def _compiled(call: Call) -> Any:
    return jax.jit(lambda *xs: bind(call, xs))


def _stacked(call: Call) -> int:
    length = dict(call.kwargs)["length"]
    assert isinstance(length, int)
    return length


def _merge(call: Call, operands: list[np.ndarray]) -> np.ndarray:
    which, no, yes = operands
    if no.shape != yes.shape or no.dtype != yes.dtype:
        raise OperatorError("branches give different shapes")
    return (yes if which else no).copy()


def _merged(call: Call) -> TensorMeta:
    which, no, yes = call.operands
    if no != yes or which.shape:
        raise OperatorError("branches give different shapes")
    return no


def _sliced(call: Call) -> TensorMeta:
    (x,) = call.operands
    if not x.shape:
        raise OperatorError("nothing to take a slice of")
    return TensorMeta(x.shape[1:], x.dtype)


_DIALECT: dict[str, Any] = {
    "loop.carry": lambda call, xs: xs[0].copy(),
    "loop.next": lambda call, xs: xs[0].copy(),
    "loop.test": lambda call, xs: xs[0].copy(),
    "loop.slice": lambda call, xs: xs[0][0].copy(),
    "loop.stack": lambda call, xs: np.stack([xs[0]] * _stacked(call)),
    "branch.merge": _merge,
}
_DIALECT_META: dict[str, Any] = {
    "loop.carry": lambda call: call.operands[0],
    "loop.next": lambda call: call.operands[0],
    "loop.test": lambda call: call.operands[0],
    "loop.slice": _sliced,
    "loop.stack": lambda call: TensorMeta((_stacked(call), *call.operands[0].shape), call.operands[0].dtype),
    "branch.merge": _merged,
}
