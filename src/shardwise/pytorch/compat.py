"""The private torch names that Shardwise uses, each with the reason why no public one serves."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload  # the type of an operator in a captured graph; it has no public name
from torch._subclasses.functional_tensor import FunctionalTensor, mb_unwrap_functional_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["OpOverload", "arguments_of", "current_tracer", "unwrap_functional"]


def arguments_of(op: OpOverload) -> list[Any]:
    """The declared arguments (name, type, default_value, kwarg_only), which only the private schema has."""
    return op._schema.arguments


def unwrap_functional(tensor: Tensor) -> Tensor:
    """The tensor below functionalisation.

    What a traced forward sees is a FunctionalTensor; a decomposition runs one level below and may only combine what
    lies inside it. torch passes a decomposition its operands unwrapped, but the seed is not among them.
    """
    return mb_unwrap_functional_tensor(tensor) if isinstance(tensor, FunctionalTensor) else tensor


def current_tracer() -> object | None:
    """The tracer that records operators at this moment, or None: a traced value may be reused within one only."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer
