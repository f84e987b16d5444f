"""What the passes of lowering share: the program of one device as far as it is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ..ir.graph import ITEM_BYTES, Arg, Graph, Node, Value
from ..ir.placement import Layout, local_shape
from ..plan.plan import Plan
from ..plan.reshard import Resharding
from ..rules.rule import Rule


@dataclass
class Lowering:
    """The program of one device while it is written."""

    graph: Graph
    rules: tuple[Rule, ...]
    plan: Plan
    resharding: Resharding
    coords: tuple[int, ...]
    late: Resharding
    leaving: frozenset[str]
    only_leave: frozenset[str]
    nodes: list[Node] = field(default_factory=list)
    own: dict[str, Layout] = field(default_factory=dict)
    copies: dict[tuple[str, str, Layout], str] = field(default_factory=dict)
    local: dict[str, Value] = field(default_factory=dict)
    kept: frozenset[tuple[str, Layout]] = frozenset()
    fresh: int = 0

    @property
    def mesh(self) -> tuple[int, ...]:
        """The shape of the mesh."""
        return self.plan.mesh

    def local_value(self, name: str, layout: Layout, new_name: str) -> Value:
        """A new value of the shape that the piece of `name` has in this layout."""
        value = self.graph.values[name]
        return Value(new_name, local_shape(value.shape, layout, self.mesh, self.coords), value.dtype)

    def largest(self, name: str, layout: Layout) -> int:
        """Bytes of the largest piece of a value in this layout: that of the first device."""
        value = self.graph.values[name]
        first = (0,) * len(self.mesh)
        return prod(local_shape(value.shape, layout, self.mesh, first)) * ITEM_BYTES.get(value.dtype, 8)

    def add(self, op: str, args: tuple[Arg, ...], value: Value, phase: str, source: str = "") -> str:
        """Appends a node with one result; returns its name."""
        self.nodes.append(Node((value,), op, args, (), phase, source=source))
        self.local[value.name] = value
        return value.name

    def owner(self, name: str) -> str:
        """The local value that owns the storage of another."""
        return self.local[name].alias or name

    def new_name(self, base: str) -> str:
        """A name that no value has."""
        self.fresh += 1
        return f"{base}_s{self.fresh}"
