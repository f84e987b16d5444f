"""The random operators, as torch.library operators of the namespace `shardwise`.

Each takes `seed` (0-dim int64 tensor), `stream` (the number of the random operator in the program) and `pos`:
one int64 vector per dim d of the result, of the result's rank, of size n_d in dim d and 1 elsewhere (for a 0-dim
result one 0-dim tensor). The global position of an element is the sum of the broadcast vectors, so the operators are
elementwise: cut `pos[d]` along d, anyhow, and the result is cut along d, on one rank or on many.

They are deterministic functions of their arguments and therefore do not carry torch's tag for random operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import Library

from shardwise.pytorch.random import generator, kernel

_library = Library("shardwise", "FRAGMENT")
_library.define("random_bits(Tensor seed, int stream, Tensor[] pos) -> Tensor")
_library.define("random_uniform(Tensor seed, int stream, Tensor[] pos, ScalarType dtype) -> Tensor")
_library.define("random_bernoulli(Tensor seed, int stream, Tensor[] pos, float p) -> Tensor")
_library.define("random_normal(Tensor seed, int stream, Tensor[] pos, ScalarType dtype) -> Tensor")
_library.define("random_exponential(Tensor seed, int stream, Tensor[] pos, ScalarType dtype) -> Tensor")
_library.define("random_integer(Tensor seed, int stream, Tensor[] pos, int low, int high) -> Tensor")

random_bits = torch.ops.shardwise.random_bits.default
random_uniform = torch.ops.shardwise.random_uniform.default
random_bernoulli = torch.ops.shardwise.random_bernoulli.default
random_normal = torch.ops.shardwise.random_normal.default
random_exponential = torch.ops.shardwise.random_exponential.default
random_integer = torch.ops.shardwise.random_integer.default

OPERATORS = (random_bits, random_uniform, random_bernoulli, random_normal, random_exponential, random_integer)


def _shape(seed: Tensor, pos: Sequence[Tensor]) -> torch.Size:
    if seed.dim() or seed.dtype != torch.int64:
        raise ValueError(f"the seed is a 0-dim int64 tensor, not {seed.dtype} of shape {tuple(seed.shape)}")
    if not pos or any(vector.dtype != torch.int64 for vector in pos):
        raise ValueError("pos is a list of int64 tensors, one per dim of the result (one 0-dim tensor for a scalar)")
    return torch.broadcast_shapes(*(vector.shape for vector in pos))


def _check_float(dtype: torch.dtype) -> None:
    if dtype not in generator.UNIFORM_BITS:
        names = ", ".join(str(name) for name in generator.UNIFORM_BITS)
        raise ValueError(f"random numbers are drawn as {names}, not as {dtype}")


def _check_range(low: int, high: int) -> None:
    if low >= high:
        raise ValueError(f"random integers need low < high, not {low} and {high}")


def _on_cpu(
    kind: int,
    seed: Tensor,
    stream: int,
    pos: Sequence[Tensor],
    dtype: torch.dtype,
    a: int = 0,
    b: int = 0,
) -> Tensor | None:
    """The kernel's result, or None where the kernel does not serve."""
    shape = _shape(seed, pos)
    if not (seed.is_cpu and all(vector.is_cpu for vector in pos) and kernel.available(shape.numel())):
        return None
    return kernel.draw(kind, seed, stream, pos, shape, dtype, a, b)


def _bits(seed: Tensor, stream: int, pos: list[Tensor]) -> Tensor:
    drawn = _on_cpu(kernel.BITS, seed, stream, pos, torch.int64)
    return generator.bits(seed, stream, pos) if drawn is None else drawn


def _uniform(seed: Tensor, stream: int, pos: list[Tensor], dtype: torch.dtype) -> Tensor:
    _check_float(dtype)
    work, count = generator.work_dtype(dtype), generator.UNIFORM_BITS[dtype]
    drawn = _on_cpu(kernel.UNIFORM, seed, stream, pos, work, count)
    return generator.uniform(seed, stream, pos, dtype) if drawn is None else drawn.to(dtype)


def _bernoulli(seed: Tensor, stream: int, pos: list[Tensor], p: float) -> Tensor:
    threshold = generator.bernoulli_threshold(p)
    drawn = None
    if threshold is not None:
        drawn = _on_cpu(kernel.BERNOULLI, seed, stream, pos, torch.bool, threshold)
    return generator.bernoulli(seed, stream, pos, p) if drawn is None else drawn


def _normal(seed: Tensor, stream: int, pos: list[Tensor], dtype: torch.dtype) -> Tensor:
    _check_float(dtype)
    drawn = _on_cpu(kernel.NORMAL, seed, stream, pos, generator.work_dtype(dtype))
    return generator.normal(seed, stream, pos, dtype) if drawn is None else drawn.to(dtype)


def _exponential(seed: Tensor, stream: int, pos: list[Tensor], dtype: torch.dtype) -> Tensor:
    _check_float(dtype)
    drawn = _on_cpu(kernel.EXPONENTIAL, seed, stream, pos, generator.work_dtype(dtype))
    return generator.exponential(seed, stream, pos, dtype) if drawn is None else generator.not_zero(drawn, dtype)


def _integer(seed: Tensor, stream: int, pos: list[Tensor], low: int, high: int) -> Tensor:
    _check_range(low, high)
    drawn = _on_cpu(kernel.INTEGER, seed, stream, pos, torch.int64, low, generator.signed(high - low))
    return generator.integer(seed, stream, pos, low, high) if drawn is None else drawn


for _name, _function in {
    "random_bits": _bits,
    "random_uniform": _uniform,
    "random_bernoulli": _bernoulli,
    "random_normal": _normal,
    "random_exponential": _exponential,
    "random_integer": _integer,
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


def _fake(seed: Tensor, pos: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return pos[0].new_empty(_shape(seed, pos), dtype=dtype)


@torch.library.register_fake("shardwise::random_bits", lib=_library)
def _(seed: Tensor, stream: int, pos: list[Tensor]) -> Tensor:
    return _fake(seed, pos, torch.int64)


@torch.library.register_fake("shardwise::random_bernoulli", lib=_library)
def _(seed: Tensor, stream: int, pos: list[Tensor], p: float) -> Tensor:
    generator.bernoulli_threshold(p)
    return _fake(seed, pos, torch.bool)


@torch.library.register_fake("shardwise::random_integer", lib=_library)
def _(seed: Tensor, stream: int, pos: list[Tensor], low: int, high: int) -> Tensor:
    _check_range(low, high)
    return _fake(seed, pos, torch.int64)


def _fake_float(seed: Tensor, stream: int, pos: list[Tensor], dtype: torch.dtype) -> Tensor:
    _check_float(dtype)
    return _fake(seed, pos, dtype)


for _name in ("random_uniform", "random_normal", "random_exponential"):
    torch.library.register_fake(f"shardwise::{_name}", _fake_float, lib=_library)
