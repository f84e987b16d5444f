"""Training steps as people write them for one device: (step, arguments). They know nothing of Shardwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def adamw() -> optax.GradientTransformation:
    # A gradient that is zero but for rounding (a key's bias under softmax) must not be scaled up to one.
    return optax.adamw(3e-3, eps=1e-6)


def sgd() -> optax.GradientTransformation:
    return optax.sgd(0.05)


def trained(loss: Callable[..., Any], params: Any, batch: tuple, optimizer: optax.GradientTransformation) -> Case:
    """(params, state, *batch) -> (params, state, loss)."""

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *batch)


def mlp(optimizer: optax.GradientTransformation, rows: int = 64, width: int = 32, dtype: Any = jnp.float64) -> Case:
    """Two hidden layers, mean squared error."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (width, 4 * width, 4 * width, width)
    params = [
        {"w": jax.random.normal(k, (a, b), dtype) / a**0.5, "b": jnp.zeros((b,), dtype)}
        for k, a, b in zip(keys, sizes, sizes[1:])
    ]

    def loss(params: Any, x: Any, y: Any) -> Any:
        for layer in params[:-1]:
            x = jax.nn.gelu(x @ layer["w"] + layer["b"])
        return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)

    x = jax.random.normal(keys[3], (rows, width), dtype)
    return trained(loss, params, (x, jnp.sin(x)), optimizer)


def conv(optimizer: optax.GradientTransformation, rows: int = 16, width: int = 16, dtype: Any = jnp.float64) -> Case:
    """Three convolutions, max pooling, a mean over the picture, a softmax over classes."""
    keys = jax.random.split(jax.random.key(1), 6)
    shapes = ((3, 3, 3, width), (3, 3, width, 2 * width), (3, 3, 2 * width, 2 * width))
    params = {
        "kernels": [jax.random.normal(k, s, dtype) / (9 * s[2]) ** 0.5 for k, s in zip(keys, shapes)],
        "scale": jnp.ones((width,), dtype),
        "head": jax.random.normal(keys[3], (2 * width, 8), dtype) * 0.1,
    }

    def layer(x: Any, kernel: Any, stride: int) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params: Any, x: Any, labels: Any) -> Any:
        a, b, c = params["kernels"]
        x = jax.nn.relu(layer(x, a, 1))
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = (x - mean) / jnp.sqrt(var + 1e-5) * params["scale"]
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(layer(x, b, 2))
        x = jax.nn.relu(layer(x, c, 1)).mean((1, 2))
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels).mean()

    x = jax.random.normal(keys[4], (rows, 16, 16, 3), dtype)
    return trained(loss, params, (x, jax.random.randint(keys[5], (rows,), 0, 8)), optimizer)


def gpt(
    optimizer: optax.GradientTransformation,
    rows: int = 8,
    block: int = 16,
    layers: int = 3,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    dropout: float = 0.1,
    remat: bool = False,
    dtype: Any = jnp.float64,
) -> Case:
    """A GPT whose layers are one scan, with dropout."""
    key = jax.random.key(2)
    keys = iter(jax.random.split(key, 12))

    def normal(*shape: int, scale: float = 0.02) -> Any:
        return jax.random.normal(next(keys), shape, dtype) * scale

    params = {
        "tokens": normal(vocabulary, width),
        "positions": normal(block, width),
        "layers": {
            "norm1": jnp.ones((layers, width), dtype),
            "norm2": jnp.ones((layers, width), dtype),
            "qkv": normal(layers, width, 3, heads, width // heads),
            "proj": normal(layers, heads, width // heads, width),
            "up": normal(layers, width, 4 * width),
            "bias": jnp.zeros((layers, 4 * width), dtype),
            "down": normal(layers, 4 * width, width),
        },
        "norm": jnp.ones((width,), dtype),
        "head": normal(width, vocabulary),
    }

    def norm(x: Any, scale: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def drop(x: Any, key: Any) -> Any:
        keep = jax.random.bernoulli(key, 1 - dropout, x.shape)
        return jnp.where(keep, x / (1 - dropout), 0.0) if dropout else x

    def block_of(x: Any, inputs: Any) -> tuple[Any, None]:
        p, key = inputs
        first, second = jax.random.split(key)
        q, k, v = jnp.moveaxis(jnp.einsum("btc,cshd->bthsd", norm(x, p["norm1"]), p["qkv"]), 3, 0)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / (q.shape[-1] ** 0.5)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
        x = x + drop(jnp.einsum("bthd,hdc->btc", mixed, p["proj"]), first)
        hidden = jax.nn.gelu(norm(x, p["norm2"]) @ p["up"] + p["bias"])
        return x + drop(hidden @ p["down"], second), None

    def loss(params: Any, tokens: Any, targets: Any, key: Any) -> Any:
        x = params["tokens"][tokens] + params["positions"]
        body = jax.checkpoint(block_of) if remat else block_of
        x, _ = jax.lax.scan(body, x, (params["layers"], jax.random.split(key, layers)))
        logits = norm(x, params["norm"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    tokens = jax.random.randint(key, (rows, block + 1), 0, vocabulary)
    return trained(loss, params, (tokens[:, :-1], tokens[:, 1:], jax.random.key(7)), optimizer)


def moe(
    optimizer: optax.GradientTransformation,
    rows: int = 64,
    width: int = 16,
    experts: int = 8,
    hidden: int = 32,
    dtype: Any = jnp.float64,
) -> Case:
    """A mixture of experts with places of limited number, as Switch Transformers have it."""
    keys = jax.random.split(jax.random.key(3), 5)
    params = {
        "router": jax.random.normal(keys[0], (width, experts), dtype) * 0.3,
        "up": jax.random.normal(keys[1], (experts, width, hidden), dtype) * 0.2,
        "down": jax.random.normal(keys[2], (experts, hidden, width), dtype) * 0.2,
    }
    places = 2 * rows // experts

    def loss(params: Any, x: Any, y: Any) -> Any:
        chances = jax.nn.softmax(x @ params["router"])
        best = jnp.argmax(chances, -1)
        gate = jnp.take_along_axis(chances, best[:, None], 1)[:, 0]
        chosen = jax.nn.one_hot(best, experts, dtype=dtype)
        place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1)
        spot = jax.nn.one_hot(place.astype(jnp.int32), places, dtype=dtype)
        dispatch = jnp.einsum("ne,np->nep", chosen, spot)
        inside = jnp.einsum("nep,nw->epw", dispatch, x)
        out = jnp.einsum("eph,ehw->epw", jax.nn.relu(jnp.einsum("epw,ewh->eph", inside, params["up"])), params["down"])
        mixed = jnp.einsum("nep,epw->nw", dispatch, out) * gate[:, None]
        balance = (chosen.mean(0) * chances.mean(0)).sum() * experts
        return jnp.mean((x + mixed - y) ** 2) + 0.01 * balance

    x = jax.random.normal(keys[3], (rows, width), dtype)
    return trained(loss, params, (x, jnp.cos(x)), optimizer)


def equinox(optimizer: optax.GradientTransformation, rows: int = 32, dtype: Any = jnp.float64) -> Case:
    """Equinox's own multilayer perceptron and layer norm: modules with functions and numbers among their leaves."""
    import equinox as eqx

    one, two, three = jax.random.split(jax.random.key(4), 3)
    model = (
        eqx.nn.MLP(16, 8, 32, 2, activation=jax.nn.silu, key=one),
        eqx.nn.LayerNorm(8),
        eqx.nn.GRUCell(8, 8, key=two),
    )
    model = jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, model)

    def loss(model: Any, x: Any, y: Any) -> Any:
        mlp, norm, cell = model

        def one_row(row: Any) -> Any:
            state = jnp.zeros(8, dtype)
            for part in (row, row[::-1]):
                state = cell(norm(mlp(part)), state)
            return state

        return jnp.mean((jax.vmap(one_row)(x) - y) ** 2)

    def step(model: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    x = jax.random.normal(three, (rows, 16), dtype)
    return step, (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), x, jnp.tanh(x[:, :8]))


def flax(optimizer: optax.GradientTransformation, rows: int = 16, dtype: Any = jnp.float64) -> Case:
    """Flax's own attention and dense layers."""
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, param_dtype=dtype)(nn.LayerNorm(param_dtype=dtype)(x))
            return nn.Dense(4, param_dtype=dtype)(nn.relu(nn.Dense(64, param_dtype=dtype)(x)))

    x = jax.random.normal(jax.random.key(5), (rows, 12, 16), dtype)
    params = Net().init(jax.random.key(6), x)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((Net().apply(params, x) - y) ** 2)

    return trained(loss, params, (x, jnp.sin(x[..., :4])), optimizer)


MODELS: dict[str, Callable[..., Case]] = {
    "mlp": mlp, "conv": conv, "gpt": gpt, "moe": moe, "equinox": equinox, "flax": flax,
}  # fmt: skip


def largest_difference(a: Any, b: Any) -> float:
    """Relative to the largest element of each array, or to a millionth of the largest of all; keys included."""
    worst = 0.0
    floats = [x for x in jax.tree.leaves(a) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]
    arrays = [np.asarray(x, np.float64) for x in floats]
    least = 1e-6 * max(float(np.abs(x).max(initial=0.0)) for x in arrays)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not isinstance(x, jax.Array | np.ndarray):
            continue
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = max(float(np.abs(x).max(initial=0.0)), least)
        worst = max(worst, float(np.abs(x - y).max(initial=0.0)) / scale)
    return worst
