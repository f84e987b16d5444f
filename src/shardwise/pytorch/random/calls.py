"""Calls whose randomness a decomposition table cannot reach, rewritten where the model makes them.

- Fused attention with dropout draws inside one operator whose backward draws the same numbers again: such a call
  takes the math form instead, whose dropout is an operator of its own.
- torch's decomposition of stacked recurrent layers forgets the dropout between them (torch 2.13,
  `_decomp/decompositions.py`, `_rnn_helper`: the condition `num_layers < i - 1` never holds): such a call is made
  layer by layer, with the dropout in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_ATTENTION_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class RandomCalls(TorchFunctionMode):
    """Active during the forward of a capture."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _attention_drops(func, args, kwargs):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if func in _RECURRENT and len(args) == 9 and not kwargs:
            return _recurrent(func, args)
        return func(*args, **kwargs)


def _attention_drops(func: Callable, args: tuple, kwargs: dict) -> bool:
    if func is F.scaled_dot_product_attention:
        return (kwargs["dropout_p"] if "dropout_p" in kwargs else args[4] if len(args) > 4 else 0.0) > 0.0
    if func is F.multi_head_attention_forward:
        bound = _ATTENTION_SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments["training"] and bound.arguments["dropout_p"] > 0.0
    return False


def _recurrent(func: Callable, args: tuple) -> Any:
    """`func` layer by layer if it drops between layers. args, as torch.nn.RNNBase gives them:

    input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional    (packed sequences)
    """
    packed = isinstance(args[1], Tensor) and isinstance(args[3], (list, tuple))
    first = 2 if packed else 1
    hidden, params, has_biases, layers, dropout, train, bidirectional, *rest = args[first:]
    if not (train and dropout > 0.0 and layers > 1):
        return func(*args)
    directions = 2 if bidirectional else 1
    per_layer = len(params) // layers
    states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    output, finals = args[0], []
    for layer in range(layers):
        if layer:
            output = F.dropout(output, dropout)
        rows = slice(layer * directions, (layer + 1) * directions)
        mine = [state[rows] for state in states]
        weights = params[layer * per_layer : (layer + 1) * per_layer]
        before = (args[1],) if packed else ()
        output, *final = func(
            output,
            *before,
            mine[0] if isinstance(hidden, Tensor) else mine,
            weights,
            has_biases,
            1,
            0.0,
            train,
            bidirectional,
            *rest,
        )
        finals.append(final)
    return (output, *(torch.cat(parts) for parts in zip(*finals)))
