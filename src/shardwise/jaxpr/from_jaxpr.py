"""jaxprs -> ir.Graph.

Calls (jit, remat, custom_jvp, custom_vjp) are inlined. Loops and branches are inlined too, once, with what ties them to
the program around them as nodes of their own:

    loop.carry(init)              what a round of the loop begins with; tied to the loop.next of the same carry
    loop.next(end)                what a round ends with; after the loop its last value
    loop.slice(xs)                one round's part of a stacked input
    loop.stack(y, length=n)       the stacked output
    loop.test(predicate)          whether a while loop goes on
    branch.merge(which, no, yes)  the result of a conditional

`Program.blocks` keeps which nodes make up which loop, so that the program can be run as it was written. Keys of random
numbers are inlined as the raw data they stand for (`keys.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import CaptureError
from ..ir.graph import BACKWARD, FORWARD, Arg, Graph, Input, Node, Output, Ref, Value
from . import compat, keys
from .compat import ClosedJaxpr, Jaxpr, JaxprLiteral
from .params import Unprintable, dtype_name, scalar_arg, to_arg

WHILE_ROUNDS = 1
"""How often a loop runs whose length is not known: its costs are those of one round."""
BARRIER = "jax.optimization_barrier"
_INLINED = {
    "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_lin": "call_jaxpr",
}  # fmt: skip
"""Primitives that call a jaxpr, and the parameter that holds it."""
_PLACES = ("out_sharding", "sharding")
"""Parameters in which a mesh of the user's own would stand: the plan decides."""


@dataclass(eq=False)
class Block:
    """A loop or a conditional: ranges of nodes, and the values on its border."""

    kind: str
    """scan | while | cond"""
    parts: tuple[tuple[int, int], ...] = ()
    """Ranges of nodes: scan: body; while: test, body; cond: no, yes."""
    end: int = 0
    """The first node behind it, `loop.next`, `loop.stack` and `branch.merge` included."""
    start: int = 0
    length: int = 1
    reverse: bool = False
    path: tuple[str, ...] = ()
    """`loop` of the nodes of every part."""
    predicate: str = ""

    def renumbered(self, place: Callable[[int, int], tuple[int, int] | None]) -> Block:
        """The block where its nodes have other numbers: `place` gives the new range of an old one, if it has nodes."""
        start, end = place(self.start, self.end) or (self.start, self.start)
        parts, here = [], start
        for a, b in self.parts:
            parts.append(place(a, b) or (here, here))
            here = parts[-1][1]
        return replace(self, start=start, end=end, parts=tuple(parts))


@dataclass
class Builder:
    """Collects values and nodes while jaxprs are read."""

    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    turned: bool = False
    """Whether backward has begun: what comes behind it, such as the optimizer, belongs to it."""
    counts: dict[str, int] = field(default_factory=dict)
    plain: bool = False
    """Without lines and phases: for jaxprs that are parameters."""

    def fresh(self, base: str) -> str:
        """A name that no value has."""
        base = "".join(c if c.isalnum() else "_" for c in base)
        self.counts[base] = self.counts.get(base, 0) + 1
        return f"{base}_{self.counts[base]}"

    def value(self, base: str, aval: Any) -> Value:
        """A new value of the type of an abstract one; keys as their raw data."""
        if compat.is_key(aval):
            data = compat.key_functions(aval.dtype).key_shape
            return Value(self.fresh(base), (*aval.shape, *data), "uint32")
        return Value(self.fresh(base), tuple(aval.shape), dtype_name(aval.dtype))

    def add(
        self,
        op: str,
        args: tuple[Arg, ...],
        results: Sequence[Value],
        where: Where,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> list[str]:
        """Appends a node; returns the names of its results."""
        node = Node(tuple(results), op, args, kwargs, where.phase, source=where.source, loop=where.loop)
        if self.turned:
            node = replace(node, phase=BACKWARD)
        self.turned |= node.phase == BACKWARD
        self.nodes.append(node)
        return [v.name for v in results]

    def named(self, arg: Arg, aval: Any, where: Where) -> str:
        """The name of an operand; one that stands in the equation itself becomes a value."""
        if isinstance(arg, Ref):
            return arg.name
        return self.add("jax.copy", (arg,), [self.value("literal", aval)], where)[0]

    def read(self, jaxpr: Jaxpr, consts: Sequence[Arg], args: Sequence[Arg], where: Where) -> list[Arg]:
        """Appends the equations of a jaxpr; returns its outputs."""
        env: dict[Any, Arg] = {**dict(zip(jaxpr.constvars, consts)), **dict(zip(jaxpr.invars, args))}

        def look(atom: Any) -> Arg:
            return scalar_arg(atom.val, np.asarray(atom.val).dtype) if isinstance(atom, JaxprLiteral) else env[atom]

        for eqn in jaxpr.eqns:
            here = where
            if not self.plain:
                phase = BACKWARD if where.phase == BACKWARD or compat.is_transposed(eqn) else FORWARD
                here = replace(where, phase=phase, source=compat.user_line(eqn) or where.source)
            results = self.equation(eqn, [look(a) for a in eqn.invars], here)
            env.update(zip(eqn.outvars, results))
        return [look(a) for a in jaxpr.outvars]

    def closed(self, jaxpr: Any, args: Sequence[Arg], where: Where) -> list[Arg]:
        """The same for a jaxpr that may bring its constants."""
        if isinstance(jaxpr, Jaxpr):
            return self.read(jaxpr, [], args, where)
        consts = [self.constant(c) for c in jaxpr.consts]
        return self.read(jaxpr.jaxpr, consts, args, where)

    def constant(self, array: Any) -> Arg:
        """An array that the function closes over."""
        for name, known in self.constants.items():
            if known is array:
                return Ref(name)
        value = Value(self.fresh("constant"), tuple(array.shape), dtype_name(array.dtype))
        self.inputs.append(Input(value, "constant", value.name))
        self.constants[value.name] = array
        return Ref(value.name)

    def equation(self, eqn: Any, args: list[Arg], where: Where) -> list[Arg]:
        """Appends one equation; returns its results."""
        name = eqn.primitive.name
        if name in _INLINED:
            return self.call(eqn, args, where)
        special = {"scan": self.scan, "while": self.loop, "cond": self.conditional}.get(name)
        if special is not None:
            return special(eqn, args, where)
        if inner := keys.on_raw_data(eqn):
            return self.closed(inner, args, where)
        if name == "sharding_constraint":
            return args
        if eqn.effects or not compat.can_compile(eqn.primitive):
            what = f"has effects ({', '.join(map(str, eqn.effects))})" if eqn.effects else "has no lowering"
            raise CaptureError(
                f"primitive {name!r} {what}, so nobody can run it sharded{_at(where)}; "
                "take it out of the step, or write it with jax.numpy and jax.lax"
            )
        compat.remember(eqn.primitive)
        try:
            kwargs = tuple((k, None if k in _PLACES else to_arg(v, graph_of)) for k, v in sorted(eqn.params.items()))
        except Unprintable as error:
            raise CaptureError(f"primitive {name!r} cannot be kept in a graph{_at(where)}: {error}") from error
        results = [self.value(name, v.aval) for v in eqn.outvars]
        return [Ref(n) for n in self.add(f"jax.{name}", tuple(args), results, where, kwargs)]

    def call(self, eqn: Any, args: list[Arg], where: Where) -> list[Arg]:
        """A called jaxpr. What is computed again must not be merged with the first time."""
        inner = eqn.params[_INLINED[eqn.primitive.name]]
        if eqn.params.get("prevent_cse") and where.phase == BACKWARD:
            barred: list[Arg] = []
            for arg, atom in zip(args, eqn.invars):
                if isinstance(arg, Ref):
                    results = [self.value("barrier", atom.aval)]
                    barred.append(Ref(self.add(BARRIER, (arg,), results, where)[0]))
                else:
                    barred.append(arg)
            args = barred
        return self.closed(inner, args, where)

    def scan(self, eqn: Any, args: list[Arg], where: Where) -> list[Arg]:
        """A loop of known length."""
        p = eqn.params
        consts, carries = p["num_consts"], p["num_consts"] + p["num_carry"]
        inside = where.inside(self.fresh("loop"), p["length"])
        block = Block("scan", start=len(self.nodes), length=p["length"], reverse=p["reverse"], path=(inside.loop,))
        names = [self.named(a, v.aval, where) for a, v in zip(args[consts:], eqn.invars[consts:])]
        block.start = len(self.nodes)
        avals = [v.aval for v in p["jaxpr"].jaxpr.invars]
        begin = [
            self.add("loop.carry", (Ref(n),), [self.value("carry", a)], inside)[0]
            for n, a in zip(names[: p["num_carry"]], avals[consts:carries])
        ]
        parts = [
            self.add("loop.slice", (Ref(n),), [self.value("slice", a)], inside)[0]
            for n, a in zip(names[p["num_carry"] :], avals[carries:])
        ]
        found = self.closed(p["jaxpr"], [*args[:consts], *map(Ref, begin), *map(Ref, parts)], inside)
        ends = [self.named(a, v.aval, inside) for a, v in zip(found, p["jaxpr"].jaxpr.outvars)]
        block.parts = ((block.start, len(self.nodes)),)
        results = self.next(begin, ends[: p["num_carry"]], eqn.outvars, where)
        length = (("length", p["length"]),)
        for name, var in zip(ends[p["num_carry"] :], eqn.outvars[p["num_carry"] :]):
            results += self.add("loop.stack", (Ref(name),), [self.value("stack", var.aval)], where, length)
        return self.finish(block, results)

    def next(self, begin: list[str], ends: list[str], outvars: Sequence[Any], where: Where) -> list[str]:
        """What the rounds of a loop hand on."""
        results = []
        for first, last, var in zip(begin, ends, outvars):
            results += self.add("loop.next", (Ref(last),), [self.value("next", var.aval)], where)
            self.ties.append((first, results[-1]))
        return results

    def finish(self, block: Block, results: list[str]) -> list[Arg]:
        """Notes where a block ends."""
        block.end = len(self.nodes)
        self.blocks.append(block)
        return [Ref(name) for name in results]

    def loop(self, eqn: Any, args: list[Arg], where: Where) -> list[Arg]:
        """A loop that ends when it wants to."""
        p = eqn.params
        tested, bodied = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        inside = where.inside(self.fresh("loop"), WHILE_ROUNDS)
        names = [self.named(a, v.aval, where) for a, v in zip(args[bodied:], eqn.invars[bodied:])]
        block = Block("while", start=len(self.nodes), path=(inside.loop,) * 2)
        avals = [v.aval for v in eqn.invars[bodied:]]
        begin = [self.add("loop.carry", (Ref(n),), [self.value("carry", a)], inside)[0] for n, a in zip(names, avals)]
        state = [Ref(n) for n in begin]
        (goes_on,) = self.closed(p["cond_jaxpr"], [*args[:tested], *state], inside)
        aval = p["cond_jaxpr"].jaxpr.outvars[0].aval
        test = Ref(self.named(goes_on, aval, inside))
        block.predicate = self.add("loop.test", (test,), [self.value("test", aval)], inside)[0]
        middle = len(self.nodes)
        found = self.closed(p["body_jaxpr"], [*args[tested:bodied], *state], inside)
        ends = [self.named(a, v.aval, inside) for a, v in zip(found, p["body_jaxpr"].jaxpr.outvars)]
        block.parts = ((block.start, middle), (middle, len(self.nodes)))
        return self.finish(block, self.next(begin, ends, eqn.outvars, where))

    def conditional(self, eqn: Any, args: list[Arg], where: Where) -> list[Arg]:
        """One of several branches: more than two become nested conditionals."""
        branches = list(eqn.params["branches"])
        index, rest = args[0], args[1:]
        if len(branches) == 1:
            return self.closed(branches[0], rest, where)
        return self.either(branches, 0, index, eqn.invars[0].aval, rest, eqn.outvars, where)

    def either(
        self,
        branches: list[Any],
        first: int,
        index: Arg,
        aval: Any,
        args: list[Arg],
        outvars: Sequence[Any],
        where: Where,
    ) -> list[Arg]:
        """Branch `first`, or else one of those behind it."""
        bound = scalar_arg(first, aval.dtype)
        flag = Value(self.fresh("which"), (), "bool")
        which = self.add("jax.gt" if aval.dtype != bool else "jax.ne", (index, bound), [flag], where)[0]
        block = Block("cond", start=len(self.nodes), predicate=which)
        name, ends, ranges, paths = self.fresh("branch"), [], [], []
        for k in range(2):
            inside = where.inside(f"{name}_{'no' if k == 0 else 'yes'}", 1)
            begin = len(self.nodes)
            if k == 0 or first + 2 == len(branches):
                found = self.closed(branches[first + k], args, inside)
            else:
                found = self.either(branches, first + 1, index, aval, args, outvars, inside)
            ends.append([self.named(a, v.aval, inside) for a, v in zip(found, outvars)])
            ranges.append((begin, len(self.nodes)))
            paths.append(inside.loop)
        block.parts, block.path = tuple(ranges), tuple(paths)
        results = []
        for no, yes, var in zip(*ends, outvars):
            results += self.add("branch.merge", (Ref(which), Ref(no), Ref(yes)), [self.value("merge", var.aval)], where)
        return self.finish(block, results)


@dataclass(frozen=True)
class Where:
    """What the nodes that are being read have in common."""

    loop: str = ""
    phase: str = FORWARD
    source: str = ""

    def inside(self, name: str, times: int) -> Where:
        """In one more loop."""
        part = f"{name}*{times}"
        return replace(self, loop=f"{self.loop}/{part}" if self.loop else part)


def _at(where: Where) -> str:
    return f" (at {where.source})" if where.source else ""


def graph_of(closed: ClosedJaxpr) -> Graph:
    """A jaxpr that is a parameter of another: inputs and outputs in order, nothing of the user's lines."""
    builder = Builder(plain=True)
    names = [builder.value("x", v.aval) for v in closed.jaxpr.invars]
    found = builder.closed(closed, [Ref(v.name) for v in names], Where())
    outputs = [builder.named(a, v.aval, Where()) for a, v in zip(found, closed.jaxpr.outvars)]
    if builder.constants or builder.blocks:
        raise Unprintable("a function with constants or loops of its own")
    inputs = tuple(Input(v, "input", str(k)) for k, v in enumerate(names))
    return Graph(
        inputs, tuple(builder.nodes), tuple(Output(n, "output", str(k)) for k, n in enumerate(outputs)), "inner"
    )
