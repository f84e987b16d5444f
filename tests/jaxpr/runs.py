"""What the tests run on eight devices: the step of a model, sharded and on one device, compared."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import shardwise.jax
from shardwise.cluster import Cluster
from shardwise.jaxpr.capture import is_array

from .models import MODELS, adamw, largest_difference, sgd

OPTIMIZERS = {"adamw": adamw, "sgd": sgd}
STEPS = 2


def compare(
    model: str,
    mesh: list[int],
    optimizer: str = "sgd",
    links: float = 1000.0,
    constraints: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
    donate: bool = False,
) -> dict[str, Any]:
    """Two steps on the mesh against two on one device: the largest relative difference, and the plan's figures."""
    step, args = MODELS[model](OPTIMIZERS[optimizer](), **(options or {}))
    cluster = Cluster.load("a100x8").scaled(links)
    given = jax.jit(step, donate_argnums=(0, 1)) if donate else step
    parallel = shardwise.jax.parallelize(given, *args, mesh=tuple(mesh), cluster=cluster, constraints=constraints)
    single = _on_one(step, args)
    one = many = args
    for _ in range(STEPS):
        one = (*single(*one)[:2], *args[2:])
        many = (*parallel(*_copied(many))[:2], *args[2:])
    arrays = [leaf for leaf in jax.tree.leaves(many[:2]) if isinstance(leaf, jax.Array)]
    wanted = [s for s, o in zip(parallel.out_shardings, parallel.program.graph.outputs) if o.kind == "update"]
    return {
        "difference": largest_difference(one, jax.device_get(many)),
        "share": parallel.plan.flops_share,
        "transfers": sum(k not in ("slice", "zero") for t in parallel.plan.transfers for k in t.kinds),
        "shardings": all(a.sharding.is_equivalent_to(s, a.ndim) for a, s in zip(arrays, wanted, strict=True)),
        "layouts": {path: str(layout) for path, layout in parallel.plan.layouts.items()},
    }


def _copied(args: Any) -> Any:
    """Fresh arrays: those that are donated are gone."""
    return jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) else a, args)


def _on_one(step: Any, args: tuple[Any, ...]) -> Any:
    """The step on one device under jax.jit; leaves that are no arrays are part of it."""
    leaves, tree = jax.tree.flatten(args)
    where = [k for k, leaf in enumerate(leaves) if is_array(leaf)]

    @jax.jit
    def flat(*arrays: Any) -> Any:
        full = list(leaves)
        for k, a in zip(where, arrays):
            full[k] = a
        out, shape = jax.tree.flatten(step(*jax.tree.unflatten(tree, full)))
        found["tree"], found["rest"] = shape, [None if is_array(leaf) else leaf for leaf in out]
        return [leaf for leaf in out if is_array(leaf)]

    found: dict[str, Any] = {}

    def run(*given: Any) -> Any:
        arrays = iter(flat(*(jax.tree.leaves(given)[k] for k in where)))
        return jax.tree.unflatten(found["tree"], [next(arrays) if r is None else r for r in found["rest"]])

    return run


def uneven() -> dict[str, Any]:
    """Sizes that eight devices do not divide: what can be cut is cut, the rest is whole."""
    step, args = MODELS["mlp"](sgd(), rows=30, width=18)
    cluster = Cluster.load("a100x8").scaled(1000.0)
    parallel = shardwise.jax.parallelize(step, *args, mesh=(2, 4), cluster=cluster)
    many = parallel(*args)
    one = jax.jit(step)(*args)
    return {"difference": largest_difference(one, jax.device_get(many)), "share": parallel.plan.flops_share}


def loops() -> dict[str, float]:
    """A while loop, nested branches and a scan with outputs, which are no step of a training."""
    import jax.numpy as jnp

    def function(x: Any, w: Any, which: Any) -> Any:
        def body(state: Any) -> Any:
            count, y = state
            return count + 1, jnp.tanh(y @ w)

        _, y = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, x))
        y = jax.lax.switch(which, [lambda a: a @ w, jnp.sin, lambda a: a * a.sum(0)], y)

        def scanned(total: Any, row: Any) -> Any:
            def inner(c: Any, _: Any) -> Any:
                return c * 0.5 + total, None

            part, _ = jax.lax.scan(inner, row, None, length=2)
            return total + part, part.sum()

        total, sums = jax.lax.scan(scanned, jnp.zeros(w.shape[0]), y, reverse=True)
        return total, sums, jnp.sort(y, axis=0)

    rng = np.random.default_rng(0)
    found = {}
    for which in range(3):
        args = (rng.standard_normal((16, 8)), rng.standard_normal((8, 8)), np.int32(which))
        cluster = Cluster.load("a100x8").scaled(1000.0)
        for mesh in ((8,), (2, 4)):
            parallel = shardwise.jax.parallelize(function, *args, mesh=mesh, cluster=cluster)
            found[f"{which} {mesh}"] = largest_difference(jax.jit(function)(*args), jax.device_get(parallel(*args)))
    return found


def refused() -> dict[str, str]:
    """What parallelize and the step say against bad input."""
    step, args = MODELS["mlp"](sgd())
    found = {}

    def say(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    parallelize = shardwise.jax.parallelize
    say("no function", lambda: parallelize(3, *args))
    say("mesh too large", lambda: parallelize(step, *args, mesh=(4, 4)))
    say("mesh of nothing", lambda: parallelize(step, *args, mesh="8"))
    say("cluster of another size", lambda: parallelize(step, *args, cluster="h100x64"))
    say("wrong example", lambda: parallelize(step, args[0], args[1], args[2][:, :3], args[3]))
    say("unknown path", lambda: parallelize(step, *args, constraints={"params.0.x": "S0"}))
    parallel = parallelize(step, *args, mesh=(8,), cluster="a100x8")
    say("another structure", lambda: parallel(args[0][:2], *args[1:]))
    say("another size", lambda: parallel(*args[:2], args[2][:8], args[3][:8]))
    say("limit", lambda: parallelize(step, *args, mesh=(8,), cluster="a100x8", memory_limit=1000))
    return found
