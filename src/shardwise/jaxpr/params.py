"""Between the parameters of an equation and the arguments of a graph, both ways, in a form that prints and parses.

dtypes          Literal("dtype", "float32")
enum members    Literal("enum", "jax._src.lax.slicing:GatherScatterMode.CLIP")
named tuples    [Literal("tuple", "jax._src.lax.slicing:GatherDimensionNumbers"), field, ...]
jaxprs          Literal("jaxpr", the printed graph)
primitives      Literal("primitive", "ge")
scalar operands Literal("float32", "2.0"): its dtype and its value
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ir.graph import Arg, Graph, Literal, Value
from ..ir.text import format_graph, parse_graph
from .compat import ClosedJaxpr, Jaxpr, Primitive, primitive_of

_MODULES = ("jax.", "jaxlib.")
"""Classes are looked up in these packages alone."""


class Unprintable(TypeError):
    """A parameter that has no printed form."""


def dtype_name(dtype: Any) -> str:
    """np.float32 -> `float32`."""
    return np.dtype(dtype).name


def dtype_of(name: str) -> np.dtype:
    """The inverse; knows bfloat16 and other types of jax."""
    return jnp.dtype(name)


def to_arg(value: Any, graph_of: Callable[[ClosedJaxpr], Graph]) -> Arg:
    """A parameter in its printable form. Raises Unprintable."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):
        return Literal("enum", f"{_place(type(value))}.{value.name}")
    if isinstance(value, int | float | complex):
        return value
    if isinstance(value, np.generic):
        return to_arg(value.item(), graph_of)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return Literal("dtype", dtype_name(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (Literal("tuple", _place(type(value))), *(to_arg(item, graph_of) for item in value))
    if isinstance(value, tuple | list):
        return tuple(to_arg(item, graph_of) for item in value)
    if isinstance(value, Primitive):
        return Literal("primitive", value.name)
    if isinstance(value, Jaxpr):
        value = ClosedJaxpr(value, ())
    if isinstance(value, ClosedJaxpr):
        return Literal("jaxpr", format_graph(graph_of(value)))
    raise Unprintable(f"a parameter of type {type(value).__name__} has no printed form")


def _place(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def from_arg(arg: Arg, jaxpr_of: Callable[[Graph], ClosedJaxpr]) -> Any:
    """The inverse of `to_arg`."""
    if isinstance(arg, tuple):
        if arg and isinstance(arg[0], Literal) and arg[0].kind == "tuple":
            return _find(arg[0].text)(*(from_arg(item, jaxpr_of) for item in arg[1:]))
        return tuple(from_arg(item, jaxpr_of) for item in arg)
    if isinstance(arg, Literal):
        if arg.kind == "dtype":
            return dtype_of(arg.text)
        if arg.kind == "enum":
            kind, _, member = arg.text.rpartition(".")
            return _find(kind)[member]
        if arg.kind == "primitive":
            return primitive_of(arg.text)
        assert arg.kind == "jaxpr", arg
        return jaxpr_of(parse_graph(arg.text))
    return arg


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    assert module.startswith(_MODULES), f"{place} is no class of jax"
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def scalar_arg(value: Any, dtype: Any) -> Literal:
    """A scalar operand that stands in the equation itself."""
    return Literal(dtype_name(dtype), repr(np.asarray(value).item()))


def scalar_of(literal: Literal) -> np.ndarray:
    """The inverse."""
    dtype = dtype_of(literal.kind)
    text = literal.text
    value = complex(text) if dtype.kind == "c" else text == "True" if dtype.kind == "b" else _number(text)
    return np.asarray(value).astype(dtype)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def shape_struct(value: Value) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a value for jax."""
    return jax.ShapeDtypeStruct(value.shape, dtype_of(value.dtype))
