"""All private names of jax, each with the reason.

Everything else in this folder uses public names only, so that a new version of jax is met here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax._src import source_info_util  # the user's line of an equation has no public reader
from jax._src.interpreters import mlir  # says whether a primitive can be compiled at all
from jax._src.interpreters import partial_eval as pe  # dead code elimination that also cleans loops
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.extend.core import Literal as JaxprLiteral

_known: dict[str, Primitive] = {}


@cache
def _public_primitives() -> dict[str, Primitive]:
    """Primitives by name. `jax.extend.core.primitives` lacks a few that its own functions bind."""
    from jax._src.lax import control_flow, convolution, lax, slicing, windowed_reductions
    from jax._src.random import prng, threefry2x32
    from jax.extend.core import primitives

    found: dict[str, Primitive] = {}
    for module in (primitives, lax, slicing, convolution, windowed_reductions, control_flow, prng, threefry2x32):
        found.update((p.name, p) for p in vars(module).values() if isinstance(p, Primitive))
    return found


def remember(primitive: Primitive) -> None:
    """Makes a primitive that a captured program uses known by its name."""
    _known[primitive.name] = primitive


def primitive_of(name: str) -> Primitive:
    """The primitive of this name. Raises KeyError."""
    return _known[name] if name in _known else _public_primitives()[name]


def can_compile(primitive: Primitive) -> bool:
    """Whether any platform has a lowering for it; without one a program that has it cannot run."""
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    return any(primitive in table for table in tables)


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Without what no output needs, carries of loops included. The inputs stay as they are."""
    return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def user_line(eqn: Any) -> str:
    """`file.py:12 (f)` of the user's code."""
    return source_info_util.summarize(eqn.source_info)


def is_transposed(eqn: Any) -> bool:
    """Whether an equation belongs to the backward pass of some differentiation."""
    return "transpose" in str(eqn.source_info.name_stack)


def is_key(aval: Any) -> bool:
    """Whether a value is an array of PRNG keys."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def key_functions(dtype: Any) -> Any:
    """What the generator of a key dtype does on raw key data: seed, split, fold_in, random_bits, key_shape."""
    return dtype._impl


def closed_call(call: Callable[..., Any], *avals: Any) -> ClosedJaxpr:
    """The jaxpr of a function of arrays."""
    return jax.make_jaxpr(call)(*avals)


def is_key_type(dtype: Any) -> bool:
    """Whether a dtype is that of PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def key_implementation(dtype: Any) -> str:
    """The name under which jax knows the generator of a key dtype."""
    return dtype._impl.name


def donated(jaxpr: Jaxpr) -> tuple[int, ...]:
    """Numbers of the inputs that a function under jax.jit donates: it is one equation, which says so."""
    calls = [e for e in jaxpr.eqns if e.primitive.name == "jit" and any(e.params.get("donated_invars", ()))]
    number = {v: k for k, v in enumerate(jaxpr.invars)}
    found = {
        number[v]
        for e in calls
        for v, flag in zip(e.invars, e.params["donated_invars"])
        if flag and not isinstance(v, JaxprLiteral) and v in number
    }
    return tuple(sorted(found))
