"""A byte-level GPT in JAX on the standard library's source, trained by a step that knows of one device.

    python examples/jax_gpt.py                  # two virtual CPU devices, 100 steps
    python examples/jax_gpt.py --steps 20 --devices 4

The model has the sizes of `shardwise demo`, its layers are one scan, and it reads the same batches.
"""

# ruff: noqa: E402  (the number of devices is set before jax is imported)
from __future__ import annotations

import argparse
import os
import time

OPTIONS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
OPTIONS.add_argument("--steps", type=int, default=100)
OPTIONS.add_argument("--rows", type=int, default=8)
OPTIONS.add_argument("--layers", type=int, default=6)
OPTIONS.add_argument("--width", type=int, default=384)
OPTIONS.add_argument("--devices", type=int, default=2, help="virtual CPU devices, where there is nothing better")
WANTED = OPTIONS.parse_args()
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={WANTED.devices}")

import jax
import jax.numpy as jnp
import optax

import shardwise.jax
from shardwise.models import batches, stdlib_corpus

BLOCK, HEADS, VOCABULARY = 128, 6, 256


def init(key, layers, width):
    """GPT-2's: normal with 0.02, narrower by the depth where a layer writes to the residual stream."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape, scale=0.02):
        return jax.random.normal(next(keys), shape) * scale

    thin = 0.02 * (2 * layers) ** -0.5
    return {
        "embedding": normal(VOCABULARY, width),
        "positions": normal(BLOCK, width),
        "layers": {
            "norm_attn": jnp.ones((layers, width)),
            "norm_mlp": jnp.ones((layers, width)),
            "qkv": normal(layers, width, 3, HEADS, width // HEADS),
            "proj": normal(layers, HEADS, width // HEADS, width, scale=thin),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width, scale=thin),
        },
        "norm": jnp.ones((width,)),
        "head": normal(width, VOCABULARY),
    }


def norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def layer(x, p):
    q, k, v = jnp.moveaxis(jnp.einsum("btc,cshd->bthsd", norm(x, p["norm_attn"]), p["qkv"]), 3, 0)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthd,hdc->btc", mixed, p["proj"])
    return x + jax.nn.gelu(norm(x, p["norm_mlp"]) @ p["up"]) @ p["down"], None


def loss_of(params, tokens, targets):
    x = params["embedding"][tokens] + params["positions"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = norm(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


OPTIMIZER = optax.adamw(optax.linear_schedule(6e-4 / 20, 6e-4, 19), eps=1e-6, weight_decay=0.01)


def step(params, opt_state, tokens, targets):
    """What a user writes for one device."""
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main() -> None:
    loader = batches(stdlib_corpus(), WANTED.rows, BLOCK, WANTED.steps, 0)
    params = init(jax.random.key(0), WANTED.layers, WANTED.width)
    opt_state = OPTIMIZER.init(params)
    losses = []
    parallel = None
    for number, (tokens, targets) in enumerate(loader):
        batch = jnp.asarray(tokens.numpy(), jnp.int32), jnp.asarray(targets.numpy(), jnp.int32)
        if parallel is None:
            start = time.perf_counter()
            donating = jax.jit(step, donate_argnums=(0, 1))
            parallel = shardwise.jax.parallelize(donating, params, opt_state, *batch)
            print(f"{parallel.plan}\nplanned in {time.perf_counter() - start:.1f} s", flush=True)
        params, opt_state, loss = parallel(params, opt_state, *batch)
        losses.append(float(loss))
        if number % 10 == 0 or number == WANTED.steps - 1:
            print(f"step {number}, loss {losses[-1]:.3f}", flush=True)
    fall = losses[0] - sum(losses[-10:]) / len(losses[-10:])
    print(f"the loss fell by {fall:.2f} nats on {jax.device_count()} devices")


if __name__ == "__main__":
    main()
