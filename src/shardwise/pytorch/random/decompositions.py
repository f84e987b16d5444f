"""torch's random operators, in terms of those of `operators.py`: a decomposition table for a capture.

Each function takes the RandomState, then the operator's positional arguments in schema order, then its keyword-only
arguments without the generator. Missing, on purpose: poisson, binomial, _standard_gamma, _sample_dirichlet (they
reject and redraw) and fused attention with dropout; `detect.draws` finds what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CaptureError
from shardwise.pytorch.compat import OpOverload, arguments_of
from shardwise.pytorch.random import operators
from shardwise.pytorch.random.generator import UNIFORM_BITS
from shardwise.pytorch.random.state import RandomState

aten = torch.ops.aten
_TABLE: dict[OpOverload, Callable] = {}


def _replaces(*ops: OpOverload) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        _TABLE.update(dict.fromkeys(ops, function))
        return function

    return register


def random_decompositions(state: RandomState) -> dict[OpOverload, Callable]:
    """The table for AOTAutograd or make_fx: random operators draw by seed, stream and position instead."""
    return {op: partial(_decompose, state, op, function) for op, function in _TABLE.items()}


def _decompose(state: RandomState, op: OpOverload, function: Callable, *args: Any, **kwargs: Any) -> Any:
    schema = arguments_of(op)
    given = {argument.name: value for argument, value in zip(schema, args)} | kwargs
    if given.pop("generator", None) is not None:
        raise CaptureError(
            f"{op} is given a generator of its own. A parallelized program draws by seed and position, whatever the "
            "generator: leave out `generator=`, or draw outside the model and pass the numbers in."
        )
    rest = [argument for argument in schema if argument.name != "generator"]
    positional = [given.get(argument.name, argument.default_value) for argument in rest if not argument.kwarg_only]
    return function(state, *positional, **{a.name: given[a.name] for a in rest if a.kwarg_only and a.name in given})


# ---- the draws


def _float_type(dtype: torch.dtype) -> torch.dtype:
    if dtype not in UNIFORM_BITS:
        names = ", ".join(str(name) for name in UNIFORM_BITS)
        raise CaptureError(f"a random operator draws {dtype} numbers; Shardwise draws {names}")
    return dtype


def _draw(state: RandomState, op: OpOverload, shape: Sequence[int], device: torch.device | None, *args: Any) -> Tensor:
    pos = state.positions(tuple(shape), device or torch.device("cpu"))
    return op(state.seed, state.next_stream(), pos, *args)


def _uniform(state: RandomState, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _draw(state, operators.random_uniform, like.shape, like.device, _float_type(dtype or like.dtype))


def _normal(state: RandomState, like: Tensor) -> Tensor:
    return _draw(state, operators.random_normal, like.shape, like.device, _float_type(like.dtype))


def _exponential(state: RandomState, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _draw(state, operators.random_exponential, like.shape, like.device, _float_type(dtype or like.dtype))


def _mask(state: RandomState, like: Tensor, p: float) -> Tensor:
    return _draw(state, operators.random_bernoulli, like.shape, like.device, p)


# ---- creation


@_replaces(aten.rand.default, aten.rand.generator)
def _rand(state, size, *, dtype=None, device=None, **_):
    return _draw(state, operators.random_uniform, size, device, _float_type(dtype or torch.get_default_dtype()))


@_replaces(aten.randn.default, aten.randn.generator)
def _randn(state, size, *, dtype=None, device=None, **_):
    return _draw(state, operators.random_normal, size, device, _float_type(dtype or torch.get_default_dtype()))


@_replaces(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(state, like, *, dtype=None, device=None, **_):
    return _rand(state, like.shape, dtype=dtype or like.dtype, device=device or like.device)


@_replaces(aten.randn_like.default, aten.randn_like.generator)
def _randn_like(state, like, *, dtype=None, device=None, **_):
    return _randn(state, like.shape, dtype=dtype or like.dtype, device=device or like.device)


@_replaces(aten.randint.low, aten.randint.low_generator)
def _randint_low(state, low, high, size, *, dtype=None, device=None, **_):
    return _draw(state, operators.random_integer, size, device, low, high).to(dtype or torch.int64)


@_replaces(aten.randint.default, aten.randint.generator)
def _randint(state, high, size, **options):
    return _randint_low(state, 0, high, size, **options)


@_replaces(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def _randint_like_low(state, like, low, high, *, dtype=None, device=None, **_):
    return _randint_low(state, low, high, like.shape, dtype=dtype or like.dtype, device=device or like.device)


@_replaces(aten.randint_like.default, aten.randint_like.generator)
def _randint_like(state, like, high, **options):
    return _randint_like_low(state, like, 0, high, **options)


@_replaces(aten.randperm.default, aten.randperm.generator)
def _randperm(state, n, *, dtype=None, device=None, **_):
    """The order of n random words. That two are equal, which would favour one order, has probability n^2 / 2^65."""
    return torch.argsort(_draw(state, operators.random_bits, (n,), device), stable=True).to(dtype or torch.int64)


@_replaces(aten.normal.float_float)
def _normal_sized(state, mean, std, size, **options):
    return _randn(state, size, **options) * std + mean


# ---- filling, as it arrives after functionalisation


@_replaces(aten.uniform.default)
def _uniform_fill(state, like, low, high):
    drawn = _uniform(state, like)
    return drawn if (low, high) == (0.0, 1.0) else drawn * (high - low) + low


@_replaces(aten.normal_functional.default)
def _normal_fill(state, like, mean, std):
    drawn = _normal(state, like)
    return drawn if (mean, std) == (0.0, 1.0) else drawn * std + mean


@_replaces(aten.exponential.default)
def _exponential_fill(state, like, rate):
    drawn = _exponential(state, like)
    return drawn if rate == 1.0 else drawn / rate


@_replaces(aten.geometric.default)
def _geometric_fill(state, like, p):
    rate = -math.log1p(-p) if p < 1.0 else math.inf
    return (_exponential(state, like, torch.float64) / rate).ceil().clamp_min(1.0).to(like.dtype)


@_replaces(aten.cauchy.default)
def _cauchy_fill(state, like, median, sigma):
    _float_type(like.dtype)
    return (torch.tan((_uniform(state, like, torch.float64) - 0.5) * math.pi) * sigma + median).to(like.dtype)


@_replaces(aten.log_normal.default)
def _log_normal_fill(state, like, mean, std):
    return torch.exp(_normal(state, like) * std + mean)


@_replaces(aten.random.to)
def _random_to(state, like, high):
    return _randint_like_low(state, like, 0, high)


@_replaces(getattr(aten.random, "from"))
def _random_from(state, like, low, high):
    return _randint_like_low(state, like, low, _largest(like.dtype) + 1 if high is None else high)


@_replaces(aten.random.default)
def _random_fill(state, like):
    if like.dtype == torch.int64:  # the bound 2^63 is not an int64
        return _draw(state, operators.random_bits, like.shape, like.device) & (2**63 - 1)
    return _randint_like_low(state, like, 0, _largest(like.dtype) + 1)


def _largest(dtype: torch.dtype) -> int:
    """The largest number random_() may draw: for floating types, as far as they hold every integer."""
    if dtype == torch.bool:
        return 1
    if dtype in UNIFORM_BITS:
        return 2 ** UNIFORM_BITS[dtype]
    return min(torch.iinfo(dtype).max, 2**63 - 2)


# ---- with parameters per element


@_replaces(aten.normal.Tensor_float, aten.normal.Tensor_Tensor)
def _normal_around(state, mean, std):
    like = mean + std if isinstance(std, Tensor) else mean
    return _normal(state, like) * std + mean


@_replaces(aten.normal.float_Tensor)
def _normal_spread(state, mean, std):
    return _normal(state, std) * std + mean


@_replaces(aten.bernoulli.default)
def _bernoulli(state, probability):
    return _bernoulli_per_element(state, probability, probability)


@_replaces(aten.bernoulli.Tensor)
def _bernoulli_per_element(state, like, probability):
    return (_uniform(state, like, torch.float64) < probability.double()).to(like.dtype)


@_replaces(aten.bernoulli.p)
def _bernoulli_p(state, like, p):
    return _mask(state, like, p).to(like.dtype)


@_replaces(aten.multinomial.default)
def _multinomial(state, weights, count, replacement):
    if not replacement:  # exponential race: of competing clocks of rate w_i, i rings first with probability w_i / sum
        race = weights / _exponential(state, weights)
        return race.argmax(-1, keepdim=True) if count == 1 else race.topk(count, -1).indices
    ends = weights.double().cumsum(-1)
    total = ends[..., -1:]
    point = _uniform(state, total.expand(*total.shape[:-1], count), torch.float64) * total
    return torch.searchsorted(ends, point, right=True).clamp_max(weights.shape[-1] - 1)


# ---- dropout and its like


@_replaces(aten.native_dropout.default)
def _native_dropout(state, x, p, train):
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _mask(state, x, 1.0 - p)
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


@_replaces(aten._fused_dropout.default)
def _fused_dropout(state, x, keep):
    mask = _mask(state, x, keep)
    return x * mask * (1.0 / keep), mask.to(torch.uint8)


@_replaces(aten.rrelu_with_noise_functional.default)
def _rrelu(state, x, noise, lower, upper, training):
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slope = torch.where(x > 0, torch.ones_like(x), _uniform(state, x) * (upper - lower) + lower)
    return x * slope, slope


# ---- in place, where a trace is not functionalised


def _in_place(function: Callable) -> Callable:
    def fill(state, target, *args):
        return target.copy_(function(state, target, *args))

    return fill


for _op, _functional in {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default,
    aten.geometric_.default: aten.geometric.default,
    aten.cauchy_.default: aten.cauchy.default,
    aten.log_normal_.default: aten.log_normal.default,
    aten.random_.default: aten.random.default,
    aten.random_.to: aten.random.to,
    getattr(aten.random_, "from"): getattr(aten.random, "from"),
}.items():
    _TABLE[_op] = _in_place(_TABLE[_functional])
