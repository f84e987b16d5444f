"""Operators as graphs of simpler ones, for where they do not split as a whole: the one table that names operators.

Every entry is an exact identity in terms of sums, maxima, gathers and elementwise operators, written as the operator's
own signature. Counts (the N*H*W of a mean) are Python numbers, so they stay global when a dim is cut; what differs by
rank (ignored labels) is a mask per element, and its count a sum. A function that does not know a case raises
NotImplementedError. `decompose.decompose` traces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

NONE, MEAN, SUM = 0, 1, 2
"""torch's reductions of a loss."""

TABLE: dict[str, Callable[..., Any]] = {}
"""Operator -> function of the same signature that returns the same results."""


def identity(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function into the table under operator names without their namespace."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update((f"aten.{name}", function) for name in names)
        return function

    return register


def _wide(x: Tensor) -> Tensor:
    """Half precision is summed in float32, as the kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return prod(x.shape[d] for d in dims)


# Means and variances.


@identity("mean.default")
def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, None, False, dtype=dtype)


@identity("mean.dim")
def _mean_dim(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x = _wide(x if dtype is None else x.to(dtype))
    dims = _dims(x, dim)
    return x.sum(dims, keepdim) / _count(x, dims) if dims else x


@identity("var_mean.correction")
def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    x = _wide(x)
    dims = _dims(x, dim)
    n = _count(x, dims)
    mean = x.sum(dims, True) / n
    centred = x - mean
    squares = (centred * centred).sum(dims, keepdim)
    return squares / max(n - (1 if correction is None else correction), 0), mean if keepdim else mean.squeeze(dims)


@identity("var.correction")
def _var(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _var_mean(x, dim, **options)[0]


@identity("std.correction")
def _std(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _var(x, dim, **options).sqrt()


@identity("std_mean.correction")
def _std_mean(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, **options)
    return var.sqrt(), mean


# Batch normalisation. C: channels, dim 1; n: elements per channel.


def _per_channel(vector_c: Tensor, x: Tensor) -> Tensor:
    return vector_c.view([1, -1] + [1] * (x.dim() - 2))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, lay: Callable[[Tensor], Tensor]) -> Tensor:
    x = x if weight is None else x * lay(weight)
    return x if bias is None else x + lay(bias)


def _batch_statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x - mean, mean, variance, 1 / standard deviation), the last three per channel."""
    dims = [d for d in range(x.dim()) if d != 1]
    n = _count(x, dims)
    mean = x.sum(dims) / n
    centred = x - _per_channel(mean, x)
    var = (centred * centred).sum(dims) / n
    return centred, mean, var, (var + eps).rsqrt()


@identity("_native_batch_norm_legit_functional.default")
def _batch_norm_functional(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not training:
        results = _batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps)
        return *results, running_mean, running_var
    x = _wide(x)
    n = x.numel() // x.shape[1]
    centred, mean, var, invstd = _batch_statistics(x, eps)
    out = _affine(centred * _per_channel(invstd, x), weight, bias, lambda v: _per_channel(v, x))
    new_mean = running_mean * (1 - momentum) + mean * momentum
    new_var = running_var * (1 - momentum) + var * (momentum * n / (n - 1) if n > 1 else momentum)
    return out, mean, invstd, new_mean, new_var


@identity("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = _wide(x)
    centred, mean, _, invstd = _batch_statistics(x, eps)
    out = _affine(centred * _per_channel(invstd, x), weight, bias, lambda v: _per_channel(v, x))
    return out, mean, invstd


@identity("_native_batch_norm_legit_no_training.default")
def _batch_norm_inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    invstd = (running_var + eps).rsqrt()
    normed = (_wide(x) - _per_channel(running_mean, x)) * _per_channel(invstd, x)
    out = _affine(normed, weight, bias, lambda v: _per_channel(v, x))
    return out, running_mean.new_empty((0,)), running_mean.new_empty((0,))


@identity("native_batch_norm_backward.default")
def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    grad, x = _wide(grad), _wide(x)
    dims = [d for d in range(x.dim()) if d != 1]
    n = _count(x, dims)
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, invstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean, (running_var + eps).rsqrt()
    centred = x - _per_channel(mean, x)
    total = grad.sum(dims)
    dot = (grad * centred).sum(dims)
    grad_x = None
    if output_mask[0]:
        inner = grad
        if train:
            slope = dot * invstd * invstd / n
            inner = grad - _per_channel(total / n, x) - centred * _per_channel(slope, x)
        grad_x = inner * _per_channel(invstd if weight is None else invstd * weight, x)
    return [grad_x, dot * invstd if output_mask[1] else None, total if output_mask[2] else None]


# Layer and group normalisation.


def _normalise(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised, mean, 1 / standard deviation), the last two with dims of size 1."""
    n = _count(x, dims)
    mean = x.sum(dims, True) / n
    centred = x - mean
    rstd = ((centred * centred).sum(dims, True) / n + eps).rsqrt()
    return centred * rstd, mean, rstd


def _normalise_backward(grad: Tensor, normed: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    n = _count(normed, dims)
    slope = (grad * normed).sum(dims, True) / n
    return (grad - grad.sum(dims, True) / n - normed * slope) * rstd


@identity("native_layer_norm.default")
def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normed, mean, rstd = _normalise(_wide(x), list(range(x.dim() - len(shape), x.dim())), eps)
    return _affine(normed, weight, bias, lambda v: v), mean, rstd


@identity("native_layer_norm_backward.default")
def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, output_mask: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    grad, x = _wide(grad), _wide(x)
    outer, dims = list(range(x.dim() - len(shape))), list(range(x.dim() - len(shape), x.dim()))
    normed = (x - mean) * rstd
    weighted = grad if weight is None else grad * weight
    grad_x = _normalise_backward(weighted, normed, rstd, dims) if output_mask[0] else None
    grad_weight = grad * normed if output_mask[1] and weight is not None else None
    grad_bias = grad if output_mask[2] and bias is not None else None
    if outer:
        grad_weight = None if grad_weight is None else grad_weight.sum(outer)
        grad_bias = None if grad_bias is None else grad_bias.sum(outer)
    return [grad_x, grad_weight, grad_bias]


def _grouped(x: Tensor, groups: int) -> tuple[Tensor, list[int]]:
    """[N, C, ...] as [N, groups, C / groups, ...], and the dims that are normalised."""
    x = x.view([x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]])
    return x, list(range(2, x.dim()))


@identity("native_group_norm.default")
def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grouped, dims = _grouped(_wide(x), groups)
    normed, mean, rstd = _normalise(grouped, dims, eps)
    out = _affine(normed.view(x.shape), weight, bias, lambda v: _per_channel(v, x))
    return out, mean.squeeze(dims), rstd.squeeze(dims)


@identity("native_group_norm_backward.default")
def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int, c: int, hw: int,
    groups: int, output_mask: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    grad, x = _wide(grad), _wide(x)
    grouped, dims = _grouped(x, groups)
    lay = [*mean.shape] + [1] * len(dims)
    normed = (grouped - mean.view(lay)) * rstd.view(lay)
    outer = [d for d in range(x.dim()) if d != 1]
    grad_x = None
    if output_mask[0]:
        weighted = grad if weight is None else grad * _per_channel(weight, x)
        grad_x = _normalise_backward(_grouped(weighted, groups)[0], normed, rstd.view(lay), dims).view(x.shape)
    grad_weight = (grad * normed.view(x.shape)).sum(outer) if output_mask[1] else None
    return [grad_x, grad_weight, grad.sum(outer) if output_mask[2] else None]


# Softmax and its relatives.


@identity("_softmax.default")
def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = _wide(x)
    powers = (x - x.amax(dim, True)).exp()
    return powers / powers.sum(dim, True)


@identity("_softmax_backward_data.default")
def _softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    weighted = _wide(grad) * _wide(output)
    return weighted - _wide(output) * weighted.sum(dim, True)


@identity("_log_softmax.default")
def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = _wide(x)
    shifted = x - x.amax(dim, True)
    return shifted - shifted.exp().sum(dim, True).log()


@identity("_log_softmax_backward_data.default")
def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad = _wide(grad)
    return grad - _wide(output).exp() * grad.sum(dim, True)


@identity("logsumexp.default")
def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    largest = x.amax(dim, True)
    largest = largest.masked_fill(largest.abs() == float("inf"), 0)
    total = (x - largest).exp().sum(dim, True).log() + largest
    return total if keepdim else total.squeeze(_dims(x, dim))


# Negative log likelihood. Classes lie in dim 1 of [N, C, ...], in dim 0 of [C].


def _label_weights(
    target: Tensor, weight: Tensor | None, ignored: Tensor, safe: Tensor, dtype: torch.dtype
) -> Tensor:
    """The weight of every label, zero where it is ignored."""
    if weight is None:
        return ignored.logical_not().to(dtype)
    return weight.gather(0, safe.reshape(-1)).view(target.shape).masked_fill(ignored, 0)


@identity("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    classes = 0 if x.dim() == 1 else 1
    x, wide_weight = _wide(x), None if weight is None else _wide(weight)
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    weights = _label_weights(target, wide_weight, ignored, safe, x.dtype)
    picked = x.gather(classes, safe.unsqueeze(classes)).squeeze(classes)
    losses = -(picked.masked_fill(ignored, 0) * weights)
    if reduction == NONE and x.dim() > 1:
        return losses, x.new_zeros(())
    total = weights.sum()
    return (losses.sum() / total if reduction == MEAN else losses.sum()), total


@identity("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor
) -> Tensor:
    classes = 0 if x.dim() == 1 else 1
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    weights = _label_weights(target, weight, ignored, safe, x.dtype)
    rows = -(weights * (grad / total if reduction == MEAN else grad)).masked_fill(ignored, 0)
    return torch.zeros_like(x).scatter(classes, safe.unsqueeze(classes), rows.unsqueeze(classes))


# Embeddings.


@identity("embedding.default")
def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Tensor:
    """The padding index plays no role in forward; as an argument it would have to lie inside every piece."""
    if padding_idx < 0:
        raise NotImplementedError("splits as it is")
    return torch.ops.aten.embedding.default(weight, indices, -1, by_frequency, sparse)


@identity("embedding_dense_backward.default")
def _embedding_backward(grad: Tensor, indices: Tensor, rows: int, padding_idx: int, by_frequency: bool) -> Tensor:
    if padding_idx < 0 or by_frequency:
        raise NotImplementedError("splits as it is, or counts over all indices")
    kept = grad.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
    return torch.ops.aten.embedding_dense_backward.default(kept, indices, rows, -1, False)
