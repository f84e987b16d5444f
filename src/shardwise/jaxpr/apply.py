"""The step that runs sharded: jax.jit over arrays with the plan's shardings.

Arguments and outputs are constrained to the plan's layouts (`NamedSharding`, `with_sharding_constraint`). Between them
stands the program of one device under `jax.shard_map`, with the plan's own collectives: the compiler's partitioner
would choose others, and cannot keep summands apart (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import InputError
from ..ir.passes import leaving
from ..ir.placement import Layout, Shard
from ..plan.plan import Plan
from ..plan.reshard import Resharding
from . import compat
from .capture import ARRAY, Program, is_array, struct_of
from .local import LocalRun
from .planning import Planned


def partition_spec(layout: Layout, names: tuple[str, ...]) -> PartitionSpec:
    """A layout for jax: for every dim the axes that cut it."""
    dims: dict[int, list[str]] = {}
    for placement, name in zip(layout, names):
        if isinstance(placement, Shard):
            assert placement.outer == placement.unit == 1, "arrays of the user are cut in chunks"
            dims.setdefault(placement.dim, []).append(name)
    entries = [tuple(dims[d]) if d in dims else None for d in range(max(dims, default=-1) + 1)]
    return PartitionSpec(*(e[0] if e is not None and len(e) == 1 else e for e in entries))


class ShardedStep:
    """A step that runs on all devices of a mesh; called like the step that it was made of."""

    def __init__(self, planned: Planned, mesh: jax.sharding.Mesh, resharding: Resharding, step: Callable[..., Any]):
        self.program, self.mesh, self.step = planned.program, mesh, step
        self.planned = planned
        self._resharding, self._late, self._leaving = resharding, resharding.leaving(), leaving(planned.program.graph)
        names = tuple(mesh.axis_names)
        plan, graph = planned.plan, planned.program.graph
        given = [x for i, (_, _, x) in zip(graph.inputs, plan.inputs) if i.kind != "constant"]
        self.in_shardings = tuple(NamedSharding(mesh, partition_spec(x, names)) for x in given)
        outs = [x for _, _, x in plan.outputs if x is not None]
        self.out_shardings = tuple(NamedSharding(mesh, partition_spec(x, names)) for x in outs)
        self._constants = tuple(planned.program.constants[i.value.name] for i in graph.inputs_of("constant"))
        local = partial(_local_run, planned, resharding, names)
        specs = [partition_spec(x, names) for _, _, x in plan.inputs]
        sharded = jax.shard_map(
            local, mesh=mesh, in_specs=tuple(specs), out_specs=[s.spec for s in self.out_shardings], check_vma=False
        )
        self._order = _input_order(planned.program)
        self._jitted = jax.jit(
            partial(self._whole, sharded),
            in_shardings=self.in_shardings,
            out_shardings=list(self.out_shardings),
            donate_argnums=planned.program.donated,
        )

    @property
    def plan(self) -> Plan:
        """What was decided, what it costs, how far from the bound it can be."""
        return self.planned.plan

    def _whole(self, sharded: Callable[..., list[Any]], *arrays: Any) -> list[Any]:
        raw = [jax.random.key_data(a) if compat.is_key(a) else a for a in arrays]
        raw = [jax.lax.with_sharding_constraint(a, s) for a, s in zip(raw, self.in_shardings)]
        found = sharded(*(raw[k] if kind == "given" else self._constants[k] for kind, k in self._order))
        found = [jax.lax.with_sharding_constraint(a, s) for a, s in zip(found, self.out_shardings)]
        dtypes = self.program.out_dtypes
        return [
            jax.random.wrap_key_data(a, impl=compat.key_implementation(d)) if compat.is_key_type(d) else a
            for a, d in zip(found, dtypes)
        ]

    def __call__(self, *args: Any) -> Any:
        found = iter(self._jitted(*self.placed(*args)))
        leaves = [next(found) if leaf is ARRAY else leaf for leaf in self.program.out_others]
        return jax.tree_util.tree_unflatten(self.program.out_tree, leaves)

    def placed(self, *args: Any) -> list[Any]:
        """The arrays among the arguments, on the devices where the plan wants them. Raises InputError."""
        arrays = check_call(self.program, args)
        return [jax.device_put(a, s) for a, s in zip(arrays, self.in_shardings)]

    def resharding(self, name: str) -> Resharding:
        """By which moves a value goes from one layout to another."""
        return self._late if name in self._leaving else self._resharding

    def compiled_bytes(self) -> int:
        """Memory of one device, as the compiler says."""
        return compiled_bytes(self.compile())

    def compile(self) -> Any:
        """The compiled step, without running it: `jax.stages.Compiled`."""
        return self._jitted.lower(*self.program.structs).compile()


def compiled_bytes(compiled: Any) -> int:
    """Memory of one device: arguments, outputs that are not written over them, and scratch memory."""
    found = compiled.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return held + found.temp_size_in_bytes


def _local_run(planned: Planned, resharding: Resharding, names: tuple[str, ...], *arrays: Any) -> list[Any]:
    return LocalRun(planned.program, planned.rules, planned.plan, resharding, names)(*arrays)


def _input_order(program: Program) -> list[tuple[str, int]]:
    """Where every input of the graph comes from: a given array or a constant, and its number there."""
    counts = {"given": 0, "constant": 0}
    order = []
    for item in program.graph.inputs:
        kind = "constant" if item.kind == "constant" else "given"
        order.append((kind, counts[kind]))
        counts[kind] += 1
    return order


def check_call(program: Program, args: tuple[Any, ...]) -> list[Any]:
    """The arrays of a call. Raises InputError where it differs from the example."""
    placed, tree = jax.tree_util.tree_flatten_with_path(args)
    if tree != program.in_tree:
        raise InputError(
            f"the arguments have another structure than the example: got {_short(tree)}, "
            f"expected {_short(program.in_tree)}. Parallelize again with arguments like these"
        )
    leaves = [leaf for _, leaf in placed]
    arrays = set(program.arrays)
    for k, leaf in enumerate(leaves):
        if k not in arrays and (is_array(leaf) or leaf != program.others[k]):
            where = jax.tree_util.keystr(placed[k][0])
            raise InputError(
                f"argument {where} is {leaf!r}, in the example it was {program.others[k]!r}; what is no array is part "
                "of the program. Parallelize again, or give it as an array"
            )
    for k, want, name in zip(program.arrays, program.structs, program.names):
        have = struct_of(leaves[k]) if is_array(leaves[k], True) else None
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            got = type(leaves[k]).__name__ if have is None else f"{have.dtype}{list(have.shape)}"
            raise InputError(
                f"{name} is {got}, in the example it was {want.dtype}{list(want.shape)}. Parallelize again with an "
                "example of these sizes: a plan is made for the sizes of its example"
            )
    return [leaves[k] for k in program.arrays]


def _short(tree: Any) -> str:
    text = str(tree)
    return text if len(text) < 300 else text[:300] + "..."
