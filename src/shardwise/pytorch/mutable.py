"""Custom operators that write into their arguments, as operators that write nowhere.

A trace brings such a call as torch's `auto_functionalized_v2(op, ...)`, which is no operator and names its operands by
their bases and by how each is a view of its base. Here every call becomes that of a twin in the namespace
`shardwise_functional`, which copies what the operator writes into, calls it, and returns the copies behind the
operator's own results; views are taken before and written back behind it. So the rest of the road sees nothing but
values, and the twin's rule is discovered like any other.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.library import Library

from ..errors import CaptureError
from .compat import (
    AliasView,
    AsStridedView,
    NoView,
    OpOverload,
    SliceView,
    arguments_of,
    auto_functionalized_v2,
    fake_mode_of,
    read_views,
    results_of,
    schema_of,
    written_arguments,
)
from .observe import REGION, SOURCE

_NAMESPACE = "shardwise_functional"
_library = Library(_NAMESPACE, "FRAGMENT")
_twins: dict[OpOverload, OpOverload] = {}
aten = torch.ops.aten


def functionalise(module: fx.GraphModule) -> None:
    """Rewrites the calls of a traced graph in place. Raises CaptureError for one that has no functional form here."""
    for node in list(module.graph.find_nodes(op="call_function", target=auto_functionalized_v2)):
        _rewrite(module.graph, node)


def twin_of(op: OpOverload) -> OpOverload:
    """The operator that returns what `op` writes; defined on the first request."""
    if op not in _twins:
        _twins[op] = _define(op)
    return _twins[op]


def _define(op: OpOverload) -> OpOverload:
    schema = schema_of(op)
    written, _ = written_arguments(op)
    name = "__".join((op.namespace, *str(op).split(".")[1:]))
    arguments, results = re.sub(r"\(\w+!?[^)]*\)", "", schema[schema.index("(") + 1 :]).rsplit(") -> ", 1)
    own = [r for r in results.strip("()").split(", ") if r]
    _library.define(f"{name}({arguments}) -> ({', '.join([*own, *('Tensor' for _ in written)])})")
    names = [a.name for a in arguments_of(op)]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        copies = {n: given[n].clone() for n in written}
        out = op(**(given | copies))
        found = (*(() if out is None else out if isinstance(out, tuple) else (out,)), *copies.values())
        return found[0] if len(found) == 1 else found

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", run, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    op: Any = node.args[0]
    refuse = _refusal(op, node)
    kwargs = dict(node.kwargs)
    bases: list[Any] = list(kwargs.pop("_all_bases", ()))  # type: ignore[arg-type]
    names, types = written_arguments(op)
    if any("List" in str(t) for t in types):
        raise refuse("it writes into a list of tensors")
    try:
        views = read_views(names, types, kwargs, bases)
    except KeyError:
        raise refuse("it returns what it writes") from None
    if any(view is None for view in views.values()):
        raise refuse("what it writes into may be None")
    if len({view.base_index for view in views.values()}) < len(views):
        raise refuse("it is given two views of one tensor to write into")

    with graph.inserting_before(node):
        emit = _emitter(graph, node)
        parts = {name: _taken(emit, bases[view.base_index], view) for name, view in views.items()}
        call = emit(twin_of(op), *(({**kwargs, **parts})[a.name] for a in arguments_of(op)))
        count = results_of(op) + len(names)
        found = [call] if count == 1 else [emit(operator.getitem, call, k) for k in range(count)]
        own, written = found[: count - len(names)], dict(zip(names, found[count - len(names) :]))
        after = list(bases)
        for name, view in views.items():
            after[view.base_index] = _written_back(emit, bases[view.base_index], view, written[name])
    # The call's own results come first: one None where there is none.
    results = [*(own or [None]), *after]
    for user in list(node.users):
        assert user.target is operator.getitem, "the results of a call are read one by one"
        new = results[user.args[1]]  # type: ignore[index]
        if new is not None:
            user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(node)


def _refusal(op: Any, node: fx.Node) -> Callable[[str], CaptureError]:
    def refuse(reason: str) -> CaptureError:
        return CaptureError(
            f"{op} cannot be captured (at {node.meta.get(SOURCE) or 'an unknown line'}): {reason}. Give it a form "
            "that returns new tensors (mutates_args=()), and copy those where they belong"
        )

    if not isinstance(op, OpOverload):
        raise refuse("it is no operator of its own")
    return refuse


def _emitter(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    """Adds a call with the value that it has on fake tensors, and the line and region of `like`."""
    kept = {key: like.meta[key] for key in (SOURCE, REGION, "seq_nr") if key in like.meta}

    def emit(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with fake_mode_of(values), torch.no_grad():
            made.meta.update(kept, val=target(*values))
        return made

    return emit


def _taken(emit: Callable[..., fx.Node], base: fx.Node, view: Any) -> fx.Node:
    """The operand that is a view of a base."""
    if isinstance(view, NoView | AliasView):
        return base
    if isinstance(view, SliceView):
        return emit(aten.slice.Tensor, base, view.dim, view.start, view.end)
    assert isinstance(view, AsStridedView)
    return emit(aten.as_strided.default, base, list(view.size), list(view.stride), view.storage_offset)


def _written_back(emit: Callable[..., fx.Node], base: fx.Node, view: Any, new: fx.Node) -> fx.Node:
    """The base with the view's new values."""
    if isinstance(view, NoView | AliasView):
        return new
    if isinstance(view, SliceView):
        return emit(aten.slice_scatter.default, base, new, view.dim, view.start, view.end)
    assert isinstance(view, AsStridedView)
    size, stride = list(view.size), list(view.stride)
    return emit(aten.as_strided_scatter.default, base, new, size, stride, view.storage_offset)
