"""PRNG keys as the raw data they stand for.

What the random primitives do to a key is a function of its data, and their bits a function of the data and of the
position of the element. Inlined, they are ordinary arithmetic over counters: every device draws the bits of its own
positions, and N devices draw what one draws. Any other operator on keys only moves them, so it moves every word of
their data alike.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import compat
from .compat import ClosedJaxpr


def on_raw_data(eqn: Any) -> ClosedJaxpr | None:
    """The equation as a jaxpr over raw key data; None where it has nothing to do with keys."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if not any(map(compat.is_key, avals)):
        return None
    name = eqn.primitive.name
    structs = [_raw(v.aval) for v in eqn.invars]
    if name in ("random_wrap", "random_unwrap"):
        return compat.closed_call(lambda data: data, *structs)
    key = next(a for a in avals if compat.is_key(a))
    functions = compat.key_functions(key.dtype)
    if name == "random_seed":
        return compat.closed_call(_over(eqn.invars[0].aval.ndim, functions.seed), *structs)
    if name == "random_bits":
        width, shape = eqn.params["bit_width"], eqn.params["shape"]
        return compat.closed_call(_over(key.ndim, lambda k: functions.random_bits(k, width, shape)), *structs)
    if name == "random_split":
        return compat.closed_call(_over(key.ndim, lambda k: functions.split(k, eqn.params["shape"])), *structs)
    if name == "random_fold_in":
        return compat.closed_call(lambda k, message: _fold_in(functions, k, message, eqn.outvars[0].aval), *structs)
    return compat.closed_call(_word_by_word(eqn), *structs)


def _raw(aval: Any) -> jax.ShapeDtypeStruct:
    if not compat.is_key(aval):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct((*aval.shape, *compat.key_functions(aval.dtype).key_shape), jnp.uint32)


def _over(dims: int, function: Any) -> Any:
    """The function over leading dims."""
    for _ in range(dims):
        function = jax.vmap(function)
    return function


def _fold_in(functions: Any, data: Any, message: Any, out: Any) -> Any:
    words = functions.key_shape
    data = jnp.broadcast_to(data, (*out.shape, *words)).reshape(-1, *words)
    message = jnp.broadcast_to(message, out.shape).reshape(-1)
    return jax.vmap(functions.fold_in)(data, message).reshape(*out.shape, *words)


def _word_by_word(eqn: Any) -> Any:
    """An operator that moves keys, applied to every word of their data."""
    is_key = [compat.is_key(v.aval) for v in eqn.invars]

    def moved(*operands: Any) -> Any:
        def one(*words: Any) -> Any:
            return eqn.primitive.bind(*words, **eqn.params)

        return jax.vmap(one, in_axes=tuple(-1 if k else None for k in is_key), out_axes=-1)(*operands)

    return moved
