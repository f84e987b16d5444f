"""Large outputs: they have the global shape and value, and are put together when first used.

A model that returns (loss, logits) for the loss alone would otherwise gather the logits in every step. The use is a
collective, so every rank must use the output, as every rank must call the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .compat import without_torch_function

_METADATA = frozenset(
    (
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.__len__,
    )
)
"""What can be answered without the values."""


class GlobalOutput(torch.Tensor):
    """Stands for an output that lies in pieces on the ranks. Any use other than of its shape gathers it, once."""

    _piece: torch.Tensor | None
    _gather: Callable[[torch.Tensor], torch.Tensor]
    _whole: torch.Tensor | None

    @staticmethod
    def of(piece: torch.Tensor, shape: tuple[int, ...], gather: Callable[[torch.Tensor], torch.Tensor]) -> GlobalOutput:
        """From this rank's piece, and how it becomes the whole."""
        made = torch.Tensor._make_wrapper_subclass(  # the documented way to make a tensor without storage
            GlobalOutput, torch.Size(shape), dtype=piece.dtype, device=piece.device
        )
        made._piece, made._gather, made._whole = piece, gather, None
        return made

    def values(self) -> torch.Tensor:  # type: ignore[override]
        """The whole, without history. A collective on the first call."""
        if self._whole is None:
            assert self._piece is not None
            self._whole, self._piece = self._gather(self._piece), None
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if func not in _METADATA:
                args, kwargs = pytree.tree_map_only(cls, _Reveal.apply, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Reveal(torch.autograd.Function):
    """The plain tensor in place of the stand-in; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, output: GlobalOutput) -> torch.Tensor:
        return output.values().detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient
