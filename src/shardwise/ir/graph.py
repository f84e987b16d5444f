"""The one data structure that travels: an immutable, framework-free program.

    graph   :=  inputs, nodes (in execution order), outputs
    input   :=  value, kind (parameter | buffer | constant | input | seed | tangent | saved | zero), path
    node    :=  results (values, or None where the operator returns nothing) = op(args, kwargs)
                + phase (forward | backward), recompute tag, the user's line, region of a decomposition, loop
    output  :=  name of a value or None, kind (output | mutation | gradient | update), path
    tie     :=  (value, value): results of two nodes; what the first gives has the layout that the second needs
    value   :=  name, shape, dtype, stride (None: contiguous), alias (the value whose storage it shares, or None)
    arg     :=  Ref(value) | Literal(kind, text) | None | bool | int | float | complex | str | tuple of args

`Literal` holds a constant of the framework that only the framework can read (a dtype, a device, a memory format).
Names are identifiers and unique. A pass is a function Graph -> Graph; `verify.verify` states the invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

FORWARD, BACKWARD = "forward", "backward"
INPUT_KINDS = ("parameter", "buffer", "constant", "input", "seed", "tangent", "saved", "zero")
OUTPUT_KINDS = ("output", "mutation", "gradient", "update", "saved")
TIED_KINDS = ("gradient", "update")
"""Outputs that have the layout of the parameter with the same path: its gradient, or its next value."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """Use of a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant that only the framework can read, e.g. Literal("dtype", "float32")."""

    kind: str
    text: str


Arg = Ref | Literal | None | bool | int | float | complex | str | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program: global shape in the captured graph, local shape after lowering."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None
    alias: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, were it contiguous."""
        return self.numel * ITEM_BYTES.get(self.dtype, 8)


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that enters the program. `path` is its name for the user, e.g. a parameter's."""

    value: Value
    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that leaves the program; `name` is None where there is none (an unused parameter's gradient)."""

    name: str | None
    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operator."""

    results: tuple[Value | None, ...]
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    phase: str = FORWARD
    recompute: str | None = None
    source: str = ""
    region: str | None = None
    """Nodes with the same region are the decomposition of one operator of the captured graph."""
    loop: str = ""
    """The loops that it lies in, outermost first, each with how often it runs: `a*12/b*4`."""

    @property
    def times(self) -> int:
        """How often it runs in one step."""
        return prod(int(part.rpartition("*")[2]) for part in self.loop.split("/") if part)

    @property
    def name(self) -> str:
        """Name of the first result that exists; unique in a graph."""
        return next((v.name for v in self.results if v is not None), f"{self.op}:{id(self)}")

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the values it reads, in order of appearance, repeats kept."""
        found: list[str] = []
        visit_refs((self.args, tuple(v for _, v in self.kwargs)), found.append)
        return tuple(found)


@dataclass(frozen=True)
class Graph:
    """A program. See the grammar at the top of the file."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    name: str = "graph"
    made_by: str = field(default="", compare=False)
    ties: tuple[tuple[str, str], ...] = ()
    """(result of one node, result of a later one): what a loop carries lies as what its next round needs."""

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every value by name, inputs first."""
        table = {i.value.name: i.value for i in self.inputs}
        for node in self.nodes:
            table.update((v.name, v) for v in node.results if v is not None)
        return table

    @cached_property
    def producer(self) -> dict[str, int]:
        """Value name -> index of the node that makes it; inputs are absent."""
        return {v.name: k for k, node in enumerate(self.nodes) for v in node.results if v is not None}

    @cached_property
    def times(self) -> dict[str, int]:
        """Value name -> how often it is made in one step; inputs are there once."""
        table = {i.value.name: 1 for i in self.inputs}
        for node in self.nodes:
            table.update((v.name, node.times) for v in node.results if v is not None)
        return table

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """Value name -> indices of the nodes that read it, ascending, without repeats."""
        table: dict[str, list[int]] = {name: [] for name in self.values}
        for k, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.operands):
                table[name].append(k)
        return {name: tuple(ks) for name, ks in table.items()}

    def inputs_of(self, *kinds: str) -> tuple[Input, ...]:
        """The inputs of these kinds, in order."""
        return tuple(i for i in self.inputs if i.kind in kinds)

    def outputs_of(self, *kinds: str) -> tuple[Output, ...]:
        """The outputs of these kinds, in order."""
        return tuple(o for o in self.outputs if o.kind in kinds)

    def with_nodes(self, nodes: tuple[Node, ...], made_by: str) -> Graph:
        """The same graph with other nodes, marked with the pass that made it."""
        return replace(self, nodes=nodes, made_by=made_by)

    def __str__(self) -> str:
        from .text import format_graph

        return format_graph(self)


def visit_refs(arg: object, see: Callable[[str], None]) -> None:
    """Calls `see` with the name of every Ref in a nested argument."""
    if isinstance(arg, Ref):
        see(arg.name)
    elif isinstance(arg, tuple):
        for item in arg:
            visit_refs(item, see)


def map_arg(arg: Arg, change: Callable[[Arg], Arg]) -> Arg:
    """A copy of a nested argument with `change` applied to every leaf."""
    return tuple(map_arg(item, change) for item in arg) if isinstance(arg, tuple) else change(arg)


Path = tuple[int | str, ...]


def leaves(args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> Iterator[tuple[Path, Arg]]:
    """(path, leaf) of every leaf: a path starts with a position or a keyword and goes on through tuples."""

    def walk(path: Path, arg: Arg) -> Iterator[tuple[Path, Arg]]:
        if isinstance(arg, tuple):
            for k, item in enumerate(arg):
                yield from walk((*path, k), item)
        else:
            yield path, arg

    for k, arg in enumerate(args):
        yield from walk((k,), arg)
    for key, arg in kwargs:
        yield from walk((key,), arg)


def replace_leaves(
    args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], new: dict[Path, Arg]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments with the leaves at the paths of `new` replaced."""

    def walk(path: Path, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(walk((*path, k), item) for k, item in enumerate(arg))
        return new.get(path, arg)

    return tuple(walk((k,), a) for k, a in enumerate(args)), tuple((key, walk((key,), a)) for key, a in kwargs)
