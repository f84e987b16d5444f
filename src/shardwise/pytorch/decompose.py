"""Traces the decomposition of a call: ours where `decompositions.TABLE` has one, else torch's own, or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ir.graph import Arg, Graph, Literal, Ref
from ..ir.runner import Call, OperatorError, call_of
from . import space_decompositions  # noqa: F401  enters its identities into the table
from .compat import FakeTensorMode, is_mutable, make_fx, registered_decomposition
from .decompositions import TABLE
from .from_fx import simple_graph
from .operators import dtype_name, dtype_of, find_op, from_literal


def decompose(call: Call) -> Graph | None:
    """The call as a graph of simpler operators: inputs are its operands in order, outputs its results.

    No output is an input or another output; those that were not asked for (an output mask) are absent. None where
    nothing is known. Raises OperatorError where tracing fails.
    """
    function = TABLE.get(call.op) or _torch_decomposition(call.op)
    if function is None:
        return None
    mode = FakeTensorMode()
    device = torch.device("cpu")
    try:
        with mode:
            tensors = [torch.empty(m.shape, dtype=dtype_of(m.dtype), device=device) for m in call.operands]
            expected = _apply(find_op(call.op), call, tensors, device)
        dtypes = [None if t is None else t.dtype for t in expected]

        def traced(*inputs: Tensor) -> list[Tensor | None]:
            return _finish(_apply(function, call, list(inputs), device), list(inputs), dtypes)

        with mode, torch.no_grad():
            module = make_fx(traced)(*tensors)
        graph = simple_graph(module, "decomposition")
    except NotImplementedError:
        return None
    except Exception as error:
        raise OperatorError(f"decomposition of {call.op}: {type(error).__name__}: {error}") from error
    return graph if _is_simpler(graph, call, expected) else None


def _apply(
    function: Callable[..., Any], call: Call, tensors: list[Tensor], device: torch.device
) -> list[Tensor | None]:
    def convert(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return tensors[int(arg.name)]
        if isinstance(arg, Literal):
            return from_literal(arg, device)
        return [convert(item) for item in arg] if isinstance(arg, tuple) else arg

    out = function(*(convert(a) for a in call.args), **{k: convert(a) for k, a in call.kwargs})
    return list(out) if isinstance(out, tuple | list) else [out]


def _finish(
    results: list[Tensor | None], inputs: list[Tensor], dtypes: list[torch.dtype | None]
) -> list[Tensor | None]:
    """The results in the operator's dtypes, none of them an input or another result."""
    seen = {id(t) for t in inputs}
    finished: list[Tensor | None] = []
    for result, dtype in zip(results, dtypes):
        if result is not None and dtype is not None:
            result = result.to(dtype)
            result = result.clone() if id(result) in seen else result
            seen.add(id(result))
        finished.append(result if dtype is not None else None)
    return finished


def _is_simpler(graph: Graph, call: Call, expected: list[Tensor | None]) -> bool:
    """Whether the operator itself is gone, only operators of ATen and our own are left, and the results have the right
    types."""
    for output, tensor in zip(graph.outputs, expected):
        if output.name is not None and tensor is not None:
            value = graph.values[output.name]
            if value.shape != tuple(tensor.shape) or value.dtype != dtype_name(tensor.dtype):
                return False
    if any(i.kind == "constant" for i in graph.inputs):
        return False
    return all(n.op.startswith(("aten.", "shardwise.")) and call_of(n, graph.values)[0] != call for n in graph.nodes)


@lru_cache(maxsize=4096)
def _torch_decomposition(name: str) -> Callable[..., Any] | None:
    """torch's own decomposition of a functional, deterministic operator."""
    op = find_op(name)
    if torch.Tag.nondeterministic_seeded in op.tags or is_mutable(op):
        return None
    return registered_decomposition(op)
