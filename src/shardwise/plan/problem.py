"""The planning problem as plain tables: vertices with strategies, values with layouts, costs in seconds.

Every node is a vertex; so is every input (it chooses the layout in which the tensor arrives or is stored) and every
output (it needs one of the layouts it accepts). A gradient is tied to the layout of its parameter, and so is what a
round of a loop hands on to what the next one begins with. What lies in a loop costs as often as the loop runs.

Memory is modelled by static intervals (`intervals`), so that it is linear in the choices:
- a value's own layout lives from its producer to its first consumer; on to the last consumer of forward if one of
  them needs that very layout or if it is saved for backward; from there to backward's first consumer if it is saved;
  and on to the last if one of those needs it;
- a copy in another layout lives from the first to the last consumer of its phase;
- what backward needs of a forward value comes from its own layout, saved, or is a forward copy, kept in between.
Values that share storage with another (views) cost nothing in their own layout, and extend the other's life. Inputs
live all the time, parameters with their optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from ..cluster.model import Cluster
from ..cost.compute import roofline_s
from ..errors import ConstraintError
from ..ir.graph import BACKWARD, FORWARD, ITEM_BYTES, TIED_KINDS, Graph, Node, Value
from ..ir.liveness import storage_of
from ..ir.passes import leaving
from ..ir.placement import Layout, R, Shard, format_layout, is_even, is_valid, max_local_elements
from ..ir.runner import call_of
from ..rules.rule import Rule
from .cuts import DimCuts, find_cuts
from .exchange import exchanges_s
from .options import Choice, axis_options, strategies
from .reshard import Resharding

SMALL_OUTPUT_BYTES = 1 << 16
"""Outputs up to this are returned whole; larger ones keep the layout that the plan gives them until they are used."""


@dataclass(frozen=True)
class Settings:
    """What the planner is asked for beside the graph."""

    mesh: tuple[int, ...]
    memory_limit_bytes: int | None = None
    optimizer_multiple: float = 2.0
    """Bytes of optimizer state per byte of parameter: 2 for Adam's two moments."""
    sharded_inputs: tuple[str, ...] = ()
    """Paths of inputs that arrive cut in rows over all axes (each rank brings its own)."""
    fixed: tuple[tuple[str, Layout], ...] = ()
    """(path, layout) wishes: the name of a parameter, "input K" or "output K"; a gradient follows its parameter. An
    input is given whole and cut on every rank by itself."""
    forbidden: tuple[tuple[str, Layout], ...] = ()
    even: bool = False
    """Only pieces of equal size."""
    arrive_placed: bool = False
    """Inputs arrive, and outputs leave, in any layout in which a parameter may be stored."""
    reused: tuple[str, ...] = ()
    """Paths of parameters whose next value is written where the old one lies."""


@dataclass(frozen=True)
class Vertex:
    """Something that chooses: a node, an input or an output."""

    name: str
    phase: int
    time: int
    needs: tuple[str, ...]
    gives: tuple[str | None, ...]
    need_layouts: tuple[tuple[Layout, ...], ...]
    """Per strategy, the layouts of `needs`."""
    give_layouts: tuple[tuple[Layout | None, ...], ...]
    seconds: tuple[float, ...]
    choices: tuple[tuple[Choice, ...], ...]
    shares: tuple[float, ...] = ()
    """Per strategy, the part of the work that the busiest device does."""


@dataclass
class Problem:
    """All tables. `span[(value, phase)]` is (first consumer, last time that it or a view of it is read there)."""

    graph: Graph
    settings: Settings
    resharding: Resharding
    vertices: list[Vertex]
    made_by: dict[str, int]
    """Value -> vertex that gives it."""
    used_by: dict[str, list[tuple[int, int]]]
    """Value -> (vertex, position among its needs)."""
    ties: list[tuple[int, int]]
    """(parameter's vertex, gradient's vertex)."""
    span: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    persistent: frozenset[str] = frozenset()
    """Values that live all the time in their own layout: inputs."""
    parameters: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    """Views: no bytes in their own layout."""
    flops: dict[str, float] = field(default_factory=dict)
    """Node -> floating-point operations of the whole."""
    leaving: frozenset[str] = frozenset()
    """Values of backward that only outputs read."""

    def __post_init__(self) -> None:
        self._late = self.resharding.leaving()

    def resharding_of(self, name: str) -> Resharding:
        """Costs and paths of a value."""
        return self._late if name in self.leaving else self.resharding

    def value(self, name: str) -> Value:
        """The value of this name."""
        return self.graph.values[name]

    def local_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of the largest piece of a value."""
        value = self.value(name)
        return max_local_elements(value.shape, layout, self.settings.mesh) * ITEM_BYTES.get(value.dtype, 8)

    def own_bytes(self, name: str, layout: Layout) -> int:
        """Bytes that a value takes where and how it is made: none for views, optimizer state included."""
        if name in self.free:
            return 0
        multiple = 1.0 + (self.settings.optimizer_multiple if name in self.parameters else 0.0)
        return int(self.local_bytes(name, layout) * multiple)

    def transport_s(self, name: str, source: Layout, target: Layout) -> float:
        """Seconds to bring a value from one layout to another, as often as it is made."""
        value, item = self.value(name), ITEM_BYTES.get(self.value(name).dtype, 8)
        return self.resharding_of(name).seconds(value.shape, item, source, target) * self.graph.times[name]


def build_problem(
    graph: Graph,
    rules: tuple[Rule, ...],
    cluster: Cluster,
    settings: Settings,
    flops: dict[str, float] | None = None,
) -> Problem:
    """The tables of a graph. `flops` gives floating-point operations per node name (0 where absent)."""
    resharding = Resharding(settings.mesh, cluster.axes(settings.mesh))
    cuts = find_cuts(graph, rules)
    builder = _Builder(graph, rules, cluster, settings, flops or {}, cuts)
    vertices = builder.inputs() + builder.nodes() + builder.outputs()
    made_by = {name: k for k, v in enumerate(vertices) for name in v.gives if name is not None}
    used_by: dict[str, list[tuple[int, int]]] = {name: [] for name in graph.values}
    for k, vertex in enumerate(vertices):
        for position, name in enumerate(vertex.needs):
            used_by[name].append((k, position))
    inputs = {i.path: made_by[i.value.name] for i in graph.inputs_of("parameter")}
    ties = [
        (inputs[o.path], k)
        for k, o in enumerate(builder.present_outputs, len(vertices) - len(builder.present_outputs))
        if o.kind in TIED_KINDS and o.path in inputs
    ]
    ties += [(made_by[first], made_by[second]) for first, second in graph.ties]
    problem = Problem(graph, settings, resharding, vertices, made_by, used_by, ties)
    problem.persistent = frozenset(i.value.name for i in graph.inputs)
    problem.parameters = frozenset(i.value.name for i in graph.inputs_of("parameter"))
    owner = storage_of(graph)
    problem.free = frozenset(n for n in graph.values if owner[n] != n)
    problem.free |= {o.name for o in graph.outputs_of("update") if o.path in settings.reused and o.name is not None}
    problem.span = _spans(problem, owner)
    problem.flops = flops or {}
    problem.leaving = leaving(graph)
    return problem


EMPTY = (0, -1)


@dataclass(frozen=True, slots=True)
class Intervals:
    """(first, last) times at which parts of a value are held; empty ones have last < first."""

    own: tuple[int, int]
    tail: tuple[int, int]
    saved: tuple[int, int]
    own_backward: tuple[int, int]
    forward: tuple[int, int]
    backward: tuple[int, int]
    kept: tuple[int, int]


def intervals(problem: Problem, name: str) -> Intervals:
    """When what is held of a value. See the top of the file."""
    start = problem.vertices[problem.made_by[name]].time
    forward, backward = problem.span.get((name, 0)), problem.span.get((name, 1))
    both = forward is not None and backward is not None
    kept = (forward[1] + 1, backward[0] - 1) if forward and backward else EMPTY
    if name in problem.persistent:
        everywhere = (0, len(problem.graph.nodes))
        return Intervals(everywhere, EMPTY, EMPTY, EMPTY, forward or EMPTY, backward or EMPTY, kept)
    first = forward or backward or (start, start)
    return Intervals(
        own=(start, first[0]),
        tail=(forward[0] + 1, forward[1]) if forward else EMPTY,
        saved=(forward[1] + 1, backward[0]) if both and forward and backward else EMPTY,
        own_backward=(backward[0] + 1, backward[1]) if backward else EMPTY,
        forward=forward or EMPTY,
        backward=backward or EMPTY,
        kept=kept,
    )


def _spans(problem: Problem, owner: dict[str, str]) -> dict[tuple[str, int], tuple[int, int]]:
    """(value, phase) -> first and last time it is read in that phase, the reads of views of it included."""
    span: dict[tuple[str, int], tuple[int, int]] = {}
    for name in reversed(list(problem.graph.values)):
        for vertex_index, _ in problem.used_by[name]:
            vertex = problem.vertices[vertex_index]
            last = vertex.time
            for given in vertex.gives:
                if given is not None and owner[given] == owner[name]:
                    last = max(last, span.get((given, vertex.phase), (0, 0))[1])
            first, end = span.get((name, vertex.phase), (vertex.time, vertex.time))
            span[(name, vertex.phase)] = (min(first, vertex.time), max(end, last))
    return span


class _Builder:
    """Makes the vertices of a graph."""

    def __init__(
        self,
        graph: Graph,
        rules: tuple[Rule, ...],
        cluster: Cluster,
        settings: Settings,
        flops: dict[str, float],
        cuts: DimCuts,
    ):
        self.graph, self.rules, self.cluster, self.settings = graph, rules, cluster, settings
        self.flops, self.cuts = flops, cuts
        self.mesh = settings.mesh
        self.fixed = dict(settings.fixed)
        self.forbidden: dict[str, set[Layout]] = {}
        for path, layout in settings.forbidden:
            self.forbidden.setdefault(path, set()).add(layout)
        self.wished = {*self.fixed, *self.forbidden}
        self.present_outputs = [o for o in graph.outputs if o.name is not None]
        self.owner = storage_of(graph)

    def _wishes(self, path: str, layouts: list[Layout]) -> tuple[Layout, ...]:
        wanted = self.fixed.get(path)
        if wanted is not None and wanted not in layouts:
            offered = ", ".join(map(format_layout, layouts[:12]))
            raise ConstraintError(
                f"{path} cannot be placed as {format_layout(wanted)} on mesh {self.mesh}; possible are {offered}"
            )
        banned = self.forbidden.get(path, set())
        left = [x for x in layouts if x not in banned and (wanted is None or x == wanted)]
        if not left:
            raise ConstraintError(f"all placements of {path} on mesh {self.mesh} are forbidden; allow one of them")
        return tuple(left)

    def inputs(self) -> list[Vertex]:
        """One vertex per input."""
        found = []
        for item in self.graph.inputs:
            value = item.value
            path = f"input {item.path}" if item.kind == "input" else item.path
            layouts = self._wishes(path, self._input_layouts(item.kind, item.path, value))
            found.append(_source(value.name, layouts))
        return found

    def _input_layouts(self, kind: str, path: str, value: Value) -> list[Layout]:
        whole: Layout = (R,) * len(self.mesh)
        if kind == "parameter":
            return self.stored_layouts(value)
        if kind == "input" and path in self.settings.sharded_inputs:
            return [(Shard(0),) * len(self.mesh)]
        if kind == "input" and (self.settings.arrive_placed or f"input {path}" in self.wished):
            return self.stored_layouts(value)
        return [whole]

    def stored_layouts(self, value: Value) -> list[Layout]:
        """How a parameter may be stored: whole, or cut in chunks along a dim, as DTensor does."""
        options: list = [R, *(Shard(d) for d, size in enumerate(value.shape) if size > 1)]
        layouts = product(options, repeat=len(self.mesh))
        return [x for x in layouts if is_valid(value.shape, x, self.mesh) and self._fits(value.shape, x)]

    def _fits(self, shape: tuple[int, ...], layout: Layout | None) -> bool:
        """Whether the pieces are as equal as they have to be."""
        return not self.settings.even or layout is None or is_even(shape, layout, self.mesh)

    def nodes(self) -> list[Vertex]:
        """One vertex per node; equal nodes share their tables."""
        found = []
        known: dict[tuple, tuple] = {}
        for k, (node, rule) in enumerate(zip(self.graph.nodes, self.rules)):
            key = (id(rule), self.flops.get(node.name, 0.0), *map(self._kind, node.operands), len(node.operands))
            key += (node.times,)
            key += tuple(None if v is None else self._kind(v.name) for v in node.results)
            if key not in known:
                known[key] = self._tables(k, node, rule)
            gives = tuple(None if v is None else v.name for v in node.results)
            found.append(Vertex(node.name, int(node.phase == BACKWARD), k, node.operands, gives, *known[key]))
        return found

    def _kind(self, name: str) -> tuple:
        """All of a value that the strategies of its nodes depend on."""
        value = self.graph.values[name]
        cuts = tuple(frozenset(self.cuts.get((name, dim), ())) for dim in range(len(value.shape)))
        return value.shape, value.dtype, self.owner[name] == name, cuts

    def _tables(self, k: int, node: Node, rule: Rule) -> tuple:
        """The fields of a vertex that depend on its strategies."""
        options = axis_options(node, self.graph, rule, self.cuts)
        chosen = strategies(node, self.graph, options, self.mesh, rule)
        operands = [self.graph.values[n] for n in call_of(node, self.graph.values)[1]]
        links = self.cluster.axes(self.mesh)
        if self.settings.even:
            shapes = [v.shape for v in operands]
            shapes += [() if v is None else v.shape for v in node.results]
            chosen = tuple(s for s in chosen if all(map(self._fits, shapes, (*s.operands, *s.results))))
        return (
            tuple(s.operands for s in chosen),
            tuple(s.results for s in chosen),
            tuple(
                self.seconds(k, s.share, s.operands, s.results)
                + node.times * exchanges_s(operands, s, self.mesh, links)
                for s in chosen
            ),
            tuple(s.choice for s in chosen),
            tuple(s.share for s in chosen),
        )

    def seconds(self, k: int, share: float, operands: tuple[Layout, ...], results: tuple[Layout | None, ...]) -> float:
        """Roofline time of a node under a strategy; views are free."""
        node = self.graph.nodes[k]
        made = [v for v in node.results if v is not None]
        if made and all(self.owner[v.name] != v.name for v in made):
            return 0.0
        moved = 0
        names = call_of(node, self.graph.values)[1]
        pairs = [*zip((self.graph.values[n] for n in names), operands), *zip(node.results, results)]
        for value, layout in pairs:
            if value is not None and layout is not None:
                elements = max_local_elements(value.shape, layout, self.mesh)
                moved += elements * ITEM_BYTES.get(value.dtype, 8)
        dtype = next((v.dtype for v in made if v.dtype.startswith(("float", "bfloat"))), "float32")
        once_s = roofline_s(self.flops.get(node.name, 0.0) * share, moved, dtype, self.cluster.device)
        return once_s * node.times

    def outputs(self) -> list[Vertex]:
        """One vertex per output that exists."""
        forward_end = sum(n.phase == FORWARD for n in self.graph.nodes)
        found = []
        for item in self.present_outputs:
            assert item.name is not None
            value = self.graph.values[item.name]
            layouts = self._output_layouts(item.kind, item.path, value)
            backward = item.kind in TIED_KINDS
            time = len(self.graph.nodes) if backward else forward_end
            nothing, free = _nothing(len(layouts))
            name = f"output {item.path}"
            found.append(Vertex(name, int(backward), time, (item.name,), (), _single(layouts), nothing, free, nothing))
        return found

    def _output_layouts(self, kind: str, path: str, value: Value) -> tuple[Layout, ...]:
        whole: Layout = (R,) * len(self.mesh)
        if kind in TIED_KINDS:
            source = next((i for i in self.graph.inputs if i.path == path and i.kind == "parameter"), None)
            if source is None:
                in_rows = path.removeprefix("input ") in self.settings.sharded_inputs
                return ((Shard(0),) * len(self.mesh) if in_rows else whole,)
            return self._wishes(path, self.stored_layouts(source.value))
        if kind != "mutation" and (self.settings.arrive_placed or f"output {path}" in self.wished):
            return self._wishes(f"output {path}", self.stored_layouts(value))
        if kind == "mutation" or value.nbytes <= SMALL_OUTPUT_BYTES:
            return (whole,)
        return tuple(sorted(self._made_layouts(value.name) | {whole}, key=format_layout))

    def _made_layouts(self, name: str) -> set[Layout]:
        """Layouts without Partial that the cuts of a value allow, all axes alike or whole."""
        value = self.graph.values[name]
        options: list = [R]
        for dim in range(len(value.shape)):
            options += [Shard(dim, *cut) for cut in sorted(self.cuts.get((name, dim), ()))]
        return {x for x in product(options, repeat=len(self.mesh)) if is_valid(value.shape, x, self.mesh)}


def _source(name: str, layouts: tuple[Layout, ...]) -> Vertex:
    nothing, free = _nothing(len(layouts))
    return Vertex(name, 0, -1, (), (name,), nothing, _single(layouts), free, nothing)


@lru_cache(maxsize=1 << 12)
def _single(layouts: tuple[Layout, ...]) -> tuple[tuple[Layout], ...]:
    """A table with one column: the same object for equal layouts."""
    return tuple((x,) for x in layouts)


@lru_cache(maxsize=1 << 12)
def _nothing(count: int) -> tuple[tuple[tuple[()], ...], tuple[float, ...]]:
    """An empty table and no costs."""
    return ((),) * count, (0.0,) * count
