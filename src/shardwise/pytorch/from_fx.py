"""torch.fx graph modules -> ir.Graph."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..ir.graph import BACKWARD, FORWARD, Arg, Graph, Input, Node, Output, Ref, Value, map_arg
from ..ir.passes import fix_aliases
from .compat import (
    TOKENS,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    OpOverload,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    storage_key,
)
from .effects import without_checks
from .mutable import functionalise
from .observe import REGION, SOURCE
from .operators import dtype_name, op_name, to_arg
from .random import draws
from .runner import flatten_results

_PREFIX = "module."
_IDENTITIES = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default"}
"""Operators that return their operand unchanged, once there is no autograd and nothing is mutated in place."""


class Builder:
    """Collects the values and nodes of a graph while an fx graph is read."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.same: dict[str, str] = {}
        self.parts: dict[str, list[str | None]] = {}
        self.storages: dict[int, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.lines: dict[int | None, str] = {}
        """Sequence number of an operator of forward -> the user's line."""

    def value(self, name: str, tensor: torch.Tensor) -> Value:
        """The value of a traced tensor; notes whose storage it shares."""
        if tensor.layout != torch.strided:
            raise NotImplementedError(
                f"it makes a tensor of layout {tensor.layout}, and planned programs are dense; an embedding makes one "
                "where sparse=True"
            )
        shape = tuple(int(s) for s in tensor.shape)
        stride = None
        if not tensor.is_contiguous():
            stride = tuple(int(s) for s in tensor.stride())
        key = storage_key(tensor)
        owner = self.storages.setdefault(key, name)
        return Value(name, shape, dtype_name(tensor.dtype), stride, None if owner == name else owner)

    def arg(self, value: Any) -> Arg:
        """An argument of an fx node in its framework-free form."""
        if isinstance(value, fx.Node):
            return Ref(self.same.get(value.name, value.name))
        if isinstance(value, list | tuple):
            return tuple(self.arg(item) for item in value)
        if isinstance(value, torch.SymInt):
            return int(value)
        return to_arg(value)

    def call(self, node: fx.Node, names: list[str | None], tensors: list[torch.Tensor | None]) -> None:
        """Adds a call of an operator."""
        _check(node)
        op = op_name(node.target)  # type: ignore[arg-type]
        if op in _IDENTITIES:
            ref = self.arg(node.args[0])
            assert isinstance(ref, Ref)
            self.same[node.name] = ref.name
            return
        results = tuple(None if t is None or n is None else self.value(n, t) for n, t in zip(names, tensors))
        kwargs = tuple((k, self.arg(v)) for k, v in node.kwargs.items())
        args = tuple(self.arg(a) for a in node.args)
        region = node.meta.get(REGION)
        # A node of backward has the sequence number of the forward operator that it belongs to.
        source = node.meta.get(SOURCE) or self.lines.get(node.meta.get("seq_nr"), "")
        self.lines.setdefault(node.meta.get("seq_nr"), source)
        self.nodes.append(Node(results, op, args, kwargs, recompute=region, source=source))


def _check(node: fx.Node) -> None:
    """Raises CaptureError for what a graph cannot hold, with the user's line."""
    place = f"(at {node.meta.get(SOURCE) or 'an unknown line'})"
    if not isinstance(node.target, OpOverload):
        raise CaptureError(
            f"{node.target} {place} is no operator that runs one after the other with the rest, but holds functions of "
            "its own, which a plan cannot spread. Write the model without it"
        )
    if draws(node.target, node.args, node.kwargs):
        raise CaptureError(
            f"{node.target} {place} draws random numbers in a way that Shardwise cannot repeat on every rank: the "
            "ranks would train on different numbers. Draw with an operator that it knows (torch.rand, torch.bernoulli, "
            "torch.multinomial, dropout, ...; docs/random.md), or outside the model, and pass the numbers in"
        )


def _read_nodes(builder: Builder, module: fx.GraphModule) -> fx.Node:
    """Reads everything but inputs and outputs; returns the output node."""
    output = None
    getitems: dict[str, dict[int, str]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem:
            getitems.setdefault(node.args[0].name, {}).setdefault(node.args[1], node.name)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            output = node
        elif node.op == "get_attr":
            tensor = _attribute(module, str(node.target))
            if not isinstance(tensor, torch.Tensor):
                continue  # a function that an operator of higher order takes: refused where that is called
            builder.inputs.append(Input(builder.value(node.name, tensor), "constant", str(node.target)))
            builder.constants[node.name] = tensor
        elif node.target is operator.getitem:
            name = builder.parts[node.args[0].name][node.args[1]]
            if name is not None:
                builder.same[node.name] = name
        elif node.op == "call_function":
            tensors = flatten_results(node.meta.get("val"))
            several = isinstance(node.meta.get("val"), list | tuple)
            names: list[str | None] = [node.name]
            if several:
                taken = getitems.get(node.name, {})
                names = [taken.get(k, f"{node.name}_r{k}") for k in range(len(tensors))]
                builder.parts[node.name] = names
            builder.call(node, names, tensors)
        else:
            raise TypeError(f"unexpected {node.op} {node.target} in a traced graph")
    assert output is not None
    return output


def _attribute(module: fx.GraphModule, path: str) -> torch.Tensor:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def simple_graph(module: fx.GraphModule, name: str) -> Graph:
    """A traced function of tensors (a decomposition): its inputs and outputs in order."""
    builder = Builder()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            builder.inputs.append(Input(builder.value(node.name, node.meta["val"]), "input", node.name))
    output = _read_nodes(builder, module)
    outputs = tuple(
        Output(None if item is None else _name(builder, item), "output", str(k))
        for k, item in enumerate(_output_items(output))
    )
    return Graph(tuple(builder.inputs), tuple(builder.nodes), outputs, name, "capture")


def _output_items(output: fx.Node) -> list[fx.Node | None]:
    found = output.args[0]
    return list(found) if isinstance(found, list | tuple) else [found]  # type: ignore[list-item]


def _name(builder: Builder, node: fx.Node) -> str:
    return builder.same.get(node.name, node.name)


def graph_from_fx(module: fx.GraphModule, name: str) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The joint graph of a captured module, and its constants by value name.

    Parameters under several names are merged into the first one and their gradients summed.
    """
    functionalise(module)
    without_checks(module)
    builder = Builder()
    for node in module.graph.nodes:
        if node.op == "placeholder" and not isinstance(node.meta["desc"], TOKENS):
            kind, path = _input_kind(node.meta["desc"])
            builder.inputs.append(Input(builder.value(node.name, node.meta["val"]), kind, path))
    output = _read_nodes(builder, module)
    outputs = []
    for item, desc in zip(_output_items(output), output.meta["desc"]):
        found = _output_kind(desc)
        if found is not None:
            outputs.append(Output(None if item is None else _name(builder, item), *found))
    graph = Graph(tuple(builder.inputs), tuple(builder.nodes), tuple(outputs), name, "capture")
    return mark_phases(_drop_unused(_merge_ties(graph))), builder.constants


def _input_kind(desc: Any) -> tuple[str, str]:
    if isinstance(desc, ParamAOTInput):
        return "parameter", desc.target.removeprefix(_PREFIX)
    if isinstance(desc, BufferAOTInput):
        return "buffer", desc.target.removeprefix(_PREFIX)
    if isinstance(desc, TangentAOTInput):
        return "tangent", _output_path(desc.output)
    if isinstance(desc, PlainAOTInput):
        return ("seed", "seed") if desc.idx == 0 else ("input", str(desc.idx - 1))
    raise TypeError(f"unexpected input of a captured graph: {desc}")


def _output_path(desc: Any) -> str:
    if isinstance(desc, PlainAOTOutput):
        return str(desc.idx)
    if isinstance(desc, InputMutationAOTOutput):
        return _input_kind(desc.mutated_input)[1]
    raise TypeError(f"unexpected output of a captured graph: {desc}")


def _output_kind(desc: Any) -> tuple[str, str] | None:
    if desc is None or isinstance(desc, TOKENS):
        return None
    if isinstance(desc, PlainAOTOutput):
        return "output", str(desc.idx)
    if isinstance(desc, InputMutationAOTOutput):
        kind, path = _input_kind(desc.mutated_input)
        if kind == "parameter":
            raise CaptureError(
                f"forward writes into the parameter {path} (as the max_norm of an embedding does), which only an "
                "optimizer may do here. Change it between steps, under torch.no_grad()"
            )
        return "mutation", path if kind != "input" else f"input {path}"
    if isinstance(desc, GradAOTOutput):
        kind, path = _input_kind(desc.grad_of)
        return "gradient", path if kind != "input" else f"input {path}"
    raise TypeError(f"unexpected output of a captured graph: {desc}")


def _merge_ties(graph: Graph) -> Graph:
    """One input per storage: a parameter under several names keeps the first, and its gradients are summed."""
    first: dict[str, Input] = {}
    names: dict[str, str] = {}
    paths: dict[str, str] = {}
    for item in graph.inputs_of("parameter", "buffer"):
        if item.value.alias is not None and item.value.alias in first:
            names[item.value.name] = item.value.alias
            paths[item.path] = first[item.value.alias].path
        first.setdefault(item.value.name, item)
    if not names:
        return graph
    inputs = tuple(i for i in graph.inputs if i.value.name not in names)
    nodes = [
        replace(
            n, args=tuple(rename(a, names) for a in n.args), kwargs=tuple((k, rename(a, names)) for k, a in n.kwargs)
        )
        for n in graph.nodes
    ]
    outputs: dict[tuple[str, str], Output] = {}
    for item in graph.outputs:
        path = paths.get(item.path, item.path)
        key = (item.kind, path)
        known = outputs.get(key)
        if item.kind == "gradient" and known is not None and known.name and item.name:
            value = replace(graph.values[item.name], name=f"{item.name}_tied", alias=None, stride=None)
            nodes.append(Node((value,), "aten.add.Tensor", (Ref(known.name), Ref(item.name)), phase=BACKWARD))
            outputs[key] = Output(value.name, item.kind, path)
        elif known is None or known.name is None:
            outputs[key] = Output(item.name, item.kind, path)
    return replace(graph, inputs=inputs, nodes=tuple(nodes), outputs=tuple(outputs.values()), made_by="merge_ties")


def _drop_unused(graph: Graph) -> Graph:
    """Without the nodes that no output needs."""
    needed = {o.name for o in graph.outputs if o.name is not None}
    kept = []
    for node in reversed(graph.nodes):
        if any(v is not None and v.name in needed for v in node.results):
            kept.append(node)
            needed.update(node.operands)
    return graph.with_nodes(tuple(reversed(kept)), "drop_unused")


def mark_phases(graph: Graph) -> Graph:
    """Forward: what the outputs and mutations need. Everything else is backward, and stands behind it."""
    needed = {o.name for o in graph.outputs_of("output", "mutation")}
    forward: set[int] = set()
    for k in range(len(graph.nodes) - 1, -1, -1):
        if any(v is not None and v.name in needed for v in graph.nodes[k].results):
            forward.add(k)
            needed.update(graph.nodes[k].operands)
    first = [replace(n, phase=FORWARD) for k, n in enumerate(graph.nodes) if k in forward]
    second = [replace(n, phase=BACKWARD) for k, n in enumerate(graph.nodes) if k not in forward]
    return fix_aliases(graph.with_nodes((*first, *second), "mark_phases"))


def rename(arg: Arg, names: dict[str, str]) -> Arg:
    """The argument with values renamed."""
    return map_arg(arg, lambda leaf: Ref(names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf)
