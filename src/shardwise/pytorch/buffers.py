"""Which values are made inside the buffer in which they are sent.

An all-reduce of several values takes one buffer. Where an operator makes a value that nothing but the all-reduce reads,
and can write its result into memory that it is given, it writes into the buffer; all others are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..ir.graph import Graph, Node, Ref
from ..ir.liveness import storage_of
from .compat import OpOverload, arguments_of, results_of
from .operators import find_op


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a value in a buffer, in elements."""

    buffer: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer: its name, elements, dtype, and the places of the operands of its all-reduce in order."""

    name: str
    numel: int
    dtype: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Buffers:
    """What the program does with buffers, by the index of the node."""

    sent: dict[int, Buffer]
    """All-reduce -> its buffer."""
    begins: dict[int, list[Buffer]]
    """Node before which these buffers are made."""
    made_in: dict[str, Slot]
    """Value -> the place in which its operator makes it, or into which it is copied at once."""


def plan_buffers(graph: Graph) -> Buffers:
    """The buffers of a graph of one device."""
    owner = storage_of(graph)
    readers: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.operands:
            readers[owner[name]] = readers.get(owner[name], 0) + 1
    left = {owner[o.name] for o in graph.outputs if o.name is not None}
    found = Buffers({}, {}, {})
    for k, node in enumerate(graph.nodes):
        if node.op != "comm.all_reduce_many":
            continue
        name, start, slots = f"buffer{k}", 0, []
        refs = node.args[0]
        assert isinstance(refs, tuple)
        for ref in refs:
            assert isinstance(ref, Ref)
            value = graph.values[ref.name]
            slots.append(Slot(name, start, start + value.numel, value.shape))
            start += value.numel
        buffer = Buffer(name, start, graph.values[node.operands[0]].dtype, tuple(slots))
        first = k
        for ref, slot in zip(refs, slots):
            assert isinstance(ref, Ref)
            maker = graph.producer.get(ref.name)
            alone = readers[owner[ref.name]] == 1 and owner[ref.name] == ref.name and ref.name not in left
            if maker is not None and alone and graph.nodes[maker].op.startswith("aten."):
                found.made_in[ref.name] = slot
                first = min(first, maker)
        found.sent[k] = buffer
        found.begins.setdefault(first, []).append(buffer)
    return found


def writing(node: Node) -> OpOverload | None:
    """The variant of a node's operator that writes its only result into memory that it is given (`out=`)."""
    return _writing(node.op) if len(node.results) == 1 else None


@lru_cache(maxsize=4096)
def _writing(name: str) -> OpOverload | None:
    op = find_op(name)
    if results_of(op) != 1:
        return None
    mine = [(a.name, str(a.type)) for a in arguments_of(op)]
    packet = op.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        theirs = arguments_of(other)
        if [a.name for a in theirs if a.is_out] == ["out"] and mine == [
            (a.name, str(a.type)) for a in theirs if not a.is_out
        ]:
            return other
    return None
