"""Protocols through which the framework-free middle asks a framework to run an operator.

`rules/` discovers how operators split by calling an `OpRunner`; `pytorch/` and `jaxpr/` implement it. Data crosses
the border as numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .graph import Arg, Graph, Node, Path, Ref, Value, leaves, replace_leaves


class OperatorError(Exception):
    """The operator refused its arguments."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of a tensor that need not exist."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator, cut loose from its graph: operand k is written Ref("k") in the arguments."""

    op: str
    operands: tuple[TensorMeta, ...]
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()

    def with_leaves(self, new: dict[Path, Arg]) -> Call:
        """The same call with some leaves of its arguments replaced."""
        args, kwargs = replace_leaves(self.args, self.kwargs, new)
        return Call(self.op, self.operands, args, kwargs)

    def with_operands(self, operands: tuple[TensorMeta, ...]) -> Call:
        """The same call on other operands."""
        return Call(self.op, operands, self.args, self.kwargs)


def call_of(node: Node, values: dict[str, Value]) -> tuple[Call, tuple[str, ...]]:
    """The call of a node, and the names of its operands in order (an operand read twice appears twice)."""
    names: list[str] = []
    new: dict[Path, Arg] = {}
    for path, leaf in leaves(node.args, node.kwargs):
        if isinstance(leaf, Ref):
            new[path] = Ref(str(len(names)))
            names.append(leaf.name)
    args, kwargs = replace_leaves(node.args, node.kwargs, new)
    operands = tuple(TensorMeta(values[n].shape, values[n].dtype) for n in names)
    return Call(node.op, operands, args, kwargs), tuple(names)


@dataclass(frozen=True, slots=True)
class ViewOf:
    """A result that shares an operand's storage: its elements by shape, strides and offset, in elements, over the
    operand laid out contiguously."""

    operand: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class OpRunner(Protocol):
    """Runs single operators of one framework. Every method raises OperatorError where the operator refuses."""

    framework: str
    """Name and version, part of the key of every rule."""

    def meta(self, call: Call) -> tuple[TensorMeta | None, ...]:
        """Shapes and dtypes of the results, without computing them. None where nothing is returned."""
        ...

    def run(self, call: Call, operands: list[np.ndarray]) -> list[np.ndarray | None]:
        """Computes the results. May crash the process: callers isolate it."""
        ...

    def size_leaves(self, call: Call) -> tuple[Path, ...]:
        """Paths of the integers in the arguments that are sizes in the operator's schema."""
        ...

    def views(self, call: Call) -> tuple[ViewOf, ...] | None:
        """How every result reads its operand, where all of them share storage with one; else None."""
        ...

    def may_draw(self, call: Call) -> bool:
        """Whether the operator may draw random numbers: True unless the framework knows that it does not."""
        ...

    def decompose(self, call: Call) -> Graph | None:
        """The call as a graph of simpler operators whose inputs are its operands in order, or None.

        Raises OperatorError where the decomposition itself fails.
        """
        ...

    def prepare_child(self) -> None:
        """Called first in a forked child, before anything is run there."""
        ...
