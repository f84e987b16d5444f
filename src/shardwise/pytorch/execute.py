"""A lowered graph -> a Python function: one line per node, every value deleted after its last use.

Collectives start where they stand and are waited for before their first reader. An all-reduce whose operand dies
with it works in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..ir.graph import Arg, Graph, Literal, Node, Ref, Value, map_arg
from ..ir.liveness import last_use, storage_of
from ..ir.passes import is_view
from . import collectives
from .buffers import Slot, plan_buffers, writing
from .compat import returns_list
from .operators import dtype_of, find_op, from_literal
from .runner import flatten_results

_VIEWS = {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"}


_TORCHS = ("aten", "prims", "shardwise")
_BY_STORAGE = "aten.as_strided"
"""Beginning of the operators that read an operand by its storage, whatever its strides."""
_dense_only: dict[str, bool] = {}
"""View operator -> whether it takes no other strides than contiguous ones."""


class Dense(Ref):
    """A value that an operator reads as a contiguous tensor."""


@dataclass
class Compiled:
    """A program that can be called with the list of its inputs (which it empties); returns the list of outputs."""

    source: str
    call: Callable[[list[torch.Tensor]], list[torch.Tensor | None]]


def compile_graph(graph: Graph, groups: tuple[dist.ProcessGroup | None, ...], device: torch.device) -> Compiled:
    """Writes and compiles the function of one device. `groups` has the process group of every mesh axis."""
    writer = _Writer(graph, groups, device)
    source = writer.write()
    scope: dict[str, Any] = dict(writer.scope)
    exec(compile(source, f"<shardwise {graph.name}>", "exec"), scope)
    return Compiled(source, scope["run"])


class _Writer:
    def __init__(self, graph: Graph, groups: tuple[dist.ProcessGroup | None, ...], device: torch.device):
        self.graph, self.groups, self.device = graph, groups, device
        self.scope: dict[str, Any] = {"flatten_results": flatten_results}
        self.pending: set[str] = set()
        self.lines: list[str] = []
        self.last = last_use(graph)
        self.owner = storage_of(graph)
        self.values = graph.values
        self.buffers = plan_buffers(graph)
        self.given = {i.value.name for i in graph.inputs}
        self.storage_end: dict[str, int] = {}
        """Owner of a storage -> the last node that reads any value in it."""
        for name, k in self.last.items():
            base = self.owner[name]
            self.storage_end[base] = max(self.storage_end.get(base, -1), k)

    def constant(self, value: Any) -> str:
        """A name in the function's scope for a Python object."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def write(self) -> str:
        """The source of the function."""
        self.lines.append("def run(inputs):")
        names = [i.value.name for i in self.graph.inputs]
        device = self.constant(self.device)
        if names:
            self.lines.append(f"    ({', '.join(names)},) = inputs")
        self.lines.append("    inputs.clear()")
        dying: dict[int, list[str]] = {}
        for name, k in self.last.items():
            dying.setdefault(k, []).append(name)
        unread = [n for n in names if self.last[n] == -1]
        if unread:
            self.lines.append(f"    del {', '.join(unread)}")
        for k, node in enumerate(self.graph.nodes):
            for name in dict.fromkeys(node.operands):
                self.wait(name)
            for buffer in self.buffers.begins.get(k, []):
                size = f"{buffer.numel}, dtype={self.constant(dtype_of(buffer.dtype))}"
                self.lines.append(f"    {buffer.name} = {self.constant(torch.empty)}({size}, device={device})")
            self.lines.append("    " + self.node(node, k))
            self.lines += [f"    {line}" for line in self.copies(node)]
            gone = [n for n in dying.get(k, []) if n not in unread]
            for name in gone:
                self.wait(name)
            if gone:
                self.lines.append(f"    del {', '.join(gone)}")
        for output in self.graph.outputs:
            if output.name is not None:
                self.wait(output.name)
        self.lines.append(f"    return [{', '.join(o.name or 'None' for o in self.graph.outputs)}]")
        return "\n".join(self.lines) + "\n"

    def wait(self, name: str) -> None:
        """Waits for a collective before its result is read."""
        if name in self.pending:
            self.pending.discard(name)
            self.lines.append(f"    {name} = {name}.wait()")

    def arg(self, arg: Arg) -> str:
        """An argument as source."""
        if isinstance(arg, Dense):
            return f"{arg.name}.contiguous()"
        if isinstance(arg, Ref):
            return arg.name
        if isinstance(arg, Literal):
            return self.constant(from_literal(arg, self.device))
        if isinstance(arg, tuple):
            return "[" + ", ".join(self.arg(a) for a in arg) + "]"
        if isinstance(arg, float | complex):
            return self.constant(arg)
        return repr(arg)

    def node(self, node: Node, k: int) -> str:
        """The line of one node."""
        if node.op.startswith("comm."):
            return self.collective(node, k)
        if node.op.startswith("shard."):
            return self.local(node)
        if node.op in _VIEWS and node.results[0] is not None:
            # Strides can differ from those of the trace, so that a view is refused; and -1 is ambiguous on no elements.
            shape = self.constant(node.results[0].shape)
            return f"{node.results[0].name} = {self.arg(node.args[0])}.reshape({shape})"
        op = self.constant(find_op(node.op))
        if self.wants_dense(node):
            node = replace(node, args=tuple(map_arg(a, _dense) for a in node.args))
        args = [self.arg(a) for a in node.args] + [f"{key}={self.arg(a)}" for key, a in node.kwargs]
        if (slot := self.slot_of(node)) is not None and (variant := writing(node)) is not None:
            assert node.results[0] is not None
            return f"{node.results[0].name} = {self.constant(variant)}({', '.join(args)}, out={self.place(slot)})"
        call = f"{op}({', '.join(args)})"
        if len(node.results) == 1 and node.results[0] is not None and not returns_list(find_op(node.op)):
            # A conjugate that is not yet taken would not survive a collective, nor a view of the bytes.
            lazy = is_view(node) and any(self.values[n].dtype.startswith("complex") for n in node.operands)
            return f"{node.results[0].name} = {call}{'.resolve_conj().resolve_neg()' if lazy else ''}"
        names = ["_" if v is None else v.name for v in node.results]
        return f"({', '.join(names)},) = flatten_results({call})"

    def wants_dense(self, node: Node) -> bool:
        """Whether operands must lie contiguously: moved pieces may not, where the trace had them so.

        A view of the bytes (as complex numbers, as another dtype) is refused otherwise, and an operator of the user's
        own may take it for granted.
        """
        if node.op.split(".")[0] not in _TORCHS or node.op.startswith(_BY_STORAGE):
            return True
        first = next(iter(node.operands), None)
        if first is None or not is_view(node):
            return False
        value = self.values[first]
        if node.op not in _dense_only and len(value.shape) > 1 and min(value.shape) > 1:
            _dense_only[node.op] = _refuses_strides(node, value)
        return _dense_only.get(node.op, False)

    def slot_of(self, node: Node) -> Slot | None:
        """Where the node makes its only result, if in a buffer."""
        first = node.results[0] if len(node.results) == 1 else None
        return None if first is None else self.buffers.made_in.get(first.name)

    def place(self, slot: Slot) -> str:
        """The part of a buffer for one value."""
        return f"{slot.buffer}[{slot.start}:{slot.stop}].view({self.constant(slot.shape)})"

    def copies(self, node: Node) -> list[str]:
        """Brings results into their buffers where the operator cannot write there itself."""
        slots = self.buffers.made_in
        names = [v.name for v in node.results if v is not None and v.name in slots]
        if len(node.results) == 1 and names and writing(node) is not None:
            return []
        return [f"{name} = {self.place(slots[name])}.copy_({name})" for name in names]

    def collective(self, node: Node, k: int) -> str:
        """Starts a collective on the process group of its axis."""
        assert node.results[0] is not None
        x, axis, *rest = node.args
        assert isinstance(axis, int)
        group = self.constant(self.groups[axis])
        if node.op == "comm.all_reduce_many":
            names = [v.name for v in node.results if v is not None]
            self.pending.update(names)
            buffer = self.buffers.sent[k]
            for ref, slot in zip(node.operands, buffer.slots):
                if ref not in self.buffers.made_in:
                    self.lines.append(f"    {self.place(slot)}.copy_({ref})")
            function = self.constant(collectives.all_reduce_many)
            shapes = self.constant([slot.shape for slot in buffer.slots])
            return f"({', '.join(names)},) = {function}({buffer.name}, {shapes}, {group}, {rest[0]!r})"
        assert isinstance(x, Ref)
        name = node.results[0].name
        kind = node.op.removeprefix("comm.")
        function = self.constant(getattr(collectives, kind))
        args = [x.name, group]
        if kind == "all_reduce":
            base = self.owner[x.name]
            free = self.storage_end[base] == k and base not in self.given
            args += [repr(rest[0]), repr(free)]
        elif kind == "all_gather":
            args.append(self.constant(tuple(rest)))
        elif kind == "reduce_scatter":
            args += [repr(rest[0]), self.constant(tuple(rest[1:]))]
        else:
            args += [self.constant(a) for a in rest]
        self.pending.add(name)
        return f"{name} = {function}({', '.join(args)})"

    def local(self, node: Node) -> str:
        """An operator of the dialect `shard.*`."""
        assert node.results[0] is not None
        kind = node.op.removeprefix("shard.")
        function = self.constant(getattr(collectives, {"slice": "slice_piece"}.get(kind, kind)))
        args = [self.arg(a) for a in node.args]
        if kind == "fill":
            args.append(self.constant(self.device))
        return f"{node.results[0].name} = {function}({', '.join(args)})"


def _dense(leaf: Arg) -> Arg:
    return Dense(leaf.name) if isinstance(leaf, Ref) else leaf


def _refuses_strides(node: Node, value: Value) -> bool:
    """Whether a view operator refuses an operand whose dims lie in the reverse order."""
    operand = torch.empty(value.shape[::-1], dtype=dtype_of(value.dtype), device="meta").permute(
        *range(len(value.shape) - 1, -1, -1)
    )

    def real(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return operand
        if isinstance(arg, Literal):
            return from_literal(arg, operand.device)
        return [real(a) for a in arg] if isinstance(arg, tuple) else arg

    try:
        find_op(node.op)(*map(real, node.args), **{k: real(a) for k, a in node.kwargs})
    except RuntimeError:
        return True
    return False
