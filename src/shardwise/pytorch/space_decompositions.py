"""Identities of convolution and pooling, for the table of `decompositions.py`: with them they split along space."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from . import pooling
from .decompositions import identity

# Convolution.


@identity("convolution_backward.default")
def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, output_mask: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The bias by itself: its gradient counts every position once, where the others read those of the neighbours."""
    if not output_mask[2] or not any(output_mask[:2]):
        raise NotImplementedError("splits as it is")
    others = torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, stride, padding, dilation, transposed, output_padding, groups, [*output_mask[:2], False]
    )
    return [*others[:2], grad.sum([d for d in range(grad.dim()) if d != 1])]


# Max pooling.


def _window(dims: int, *settings: Sequence[int] | int) -> list[list[int]]:
    """Kernel, stride, padding and dilation with a number for every dim; no stride is that of the kernel."""
    lists = [[s] if isinstance(s, int) else list(s) for s in settings]
    lists[1] = lists[1] or lists[0]
    return [s * dims if len(s) == 1 else s for s in lists]


def _max_pool(
    dims: int, x: Tensor, kernel: list[int], stride: Sequence[int] | int = (), padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1, ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The position in the plane follows from the offset in the window."""
    window = _window(dims, kernel, stride, padding, dilation)
    values = torch.ops.shardwise.max_pool.default(x, *window, ceil_mode)
    offset = torch.ops.shardwise.max_pool_offset.default(x, *window, ceil_mode)
    index: Tensor | None = None
    for d, (size, first) in enumerate(pooling.starts(x, values, window[1], window[2])):
        inside = offset // prod(window[0][d + 1 :]) % window[0][d]
        position = inside * window[3][d] + first
        index = position if index is None else index * size + position
    assert index is not None
    return values, index


def _max_pool_backward(
    dims: int, grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int],
    ceil_mode: bool, indices: Tensor,
) -> Tensor:  # fmt: skip
    window = _window(dims, kernel, stride, padding, dilation)
    return torch.ops.shardwise.max_pool_backward.default(grad, x, *window, ceil_mode)


for _dims in (2, 3):
    identity(f"max_pool{_dims}d_with_indices.default")(partial(_max_pool, _dims))
    identity(f"max_pool{_dims}d_with_indices_backward.default")(partial(_max_pool_backward, _dims))
