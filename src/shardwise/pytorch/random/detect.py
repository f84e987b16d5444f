"""Which torch operators draw random numbers: what a capture must not contain any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.pytorch.compat import OpOverload, arguments_of


def is_random(op: object) -> bool:
    """Whether an operator may draw from torch's generators.

    By torch's tag for it, or by a Generator among the arguments: some (random, binomial, ...) lack the tag.
    """
    if not isinstance(op, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in op.tags or any(
        "Generator" in str(argument.type) for argument in arguments_of(op)
    )


def draws(op: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether this call draws: attention without dropout, or dropout outside training, carries the tag but does not."""
    if not is_random(op):
        return False
    assert isinstance(op, OpOverload)
    given = {argument.name: value for argument, value in zip(arguments_of(op), args)} | dict(kwargs or {})
    names = {argument.name: argument for argument in arguments_of(op)}

    def value(name: str) -> Any:
        return given.get(name, names[name].default_value)

    without_dropout = any(name in names and value(name) == 0 for name in ("dropout_p", "dropout"))
    not_training = any(name in names and value(name) is False for name in ("train", "training"))
    return not (without_dropout or not_training)
