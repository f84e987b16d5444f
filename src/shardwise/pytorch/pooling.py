"""Max pooling that splits in space, as torch.library operators of the namespace `shardwise`.

torch's own returns positions in the whole plane, which its backward reads: a piece of the plane would count from its
own corner. Here the largest element is told by its offset inside the window, and backward finds it again.

Two or three space dims, the last of x (torch captures one as two); `kernel`, `stride`, `padding` and `dilation` have a
number for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor
from torch.library import Library

_library = Library("shardwise", "FRAGMENT")
_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_library.define(f"max_pool(Tensor x, {_WINDOW}) -> Tensor")
_library.define(f"max_pool_offset(Tensor x, {_WINDOW}) -> Tensor")
_library.define(f"max_pool_backward(Tensor grad, Tensor x, {_WINDOW}) -> Tensor")


def _forward(x: Tensor, kernel: list[int], *window: object) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    op = aten.max_pool2d_with_indices.default if len(kernel) == 2 else aten.max_pool3d_with_indices.default
    return op(x, kernel, *window)


def starts(x: Tensor, out: Tensor, stride: list[int], padding: list[int]) -> Iterator[tuple[int, Tensor]]:
    """For every space dim: its size in x, and where the windows begin, shaped to be added to `out`."""
    dims = len(stride)
    for d in range(dims):
        n = out.shape[out.dim() - dims + d]
        first = torch.arange(n, device=x.device) * stride[d] - padding[d]
        yield x.shape[x.dim() - dims + d], first.view([n] + [1] * (dims - 1 - d))


def _max_pool(x: Tensor, *window: list[int]) -> Tensor:
    return _forward(x, *window)[0]


def _max_pool_offset(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> Tensor:
    index = _forward(x, kernel, stride, padding, dilation, ceil_mode)[1]
    offset = torch.zeros_like(index)
    sizes = list(x.shape[x.dim() - len(kernel) :])
    for d, (size, first) in enumerate(starts(x, index, stride, padding)):
        position = index // prod(sizes[d + 1 :]) % size
        offset = offset * kernel[d] + (position - first) // dilation[d]
    return offset


def _max_pool_backward(grad: Tensor, x: Tensor, kernel: list[int], *window: object) -> Tensor:
    aten = torch.ops.aten
    flat = len(kernel) == 2
    op = aten.max_pool2d_with_indices_backward.default if flat else aten.max_pool3d_with_indices_backward.default
    return op(grad, x, kernel, *window, _forward(x, kernel, *window)[1])


for _name, _function in (
    ("max_pool", _max_pool), ("max_pool_offset", _max_pool_offset), ("max_pool_backward", _max_pool_backward),
):  # fmt: skip
    _library.impl(_name, _function, "CompositeExplicitAutograd")
