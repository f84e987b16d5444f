"""What a module's code reads beside its arguments and its own attributes: attributes of its classes, global variables,
and variables of the functions in which its code was defined.

A trace bakes their values in. They are found by the names in the code of `forward` and of what it calls by name, in
the user's own functions and classes; values reached in other ways (files, the environment, attributes of modules) are
not seen.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_MOST_FUNCTIONS = 200
_VALUES = frozenset(("argparse", "collections", "datetime", "decimal", "enum", "fractions", "pathlib", "types", "uuid"))
"""Modules of the standard library whose objects are values."""


def _is_users(module: str) -> bool:
    root = module.partition(".")[0]
    return root not in ("torch", "builtins", "shardwise") and root not in sys.stdlib_module_names


def is_machinery(kind: type) -> bool:
    """Whether it is a class of the standard library whose objects are no values: loggers, locks, files, threads. They
    lead far, and change while nothing that a model computes does."""
    root = kind.__module__.partition(".")[0]
    return root in sys.stdlib_module_names and root not in _VALUES and root != "builtins"


def class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    """(name, value) of what the user's classes among the bases hold, without functions and other descriptors."""
    for base in kind.__mro__:
        if _is_users(base.__module__):
            for name, value in list(vars(base).items()):
                if not (name.startswith("__") or name == "_abc_impl" or hasattr(value, "__get__")):
                    yield f"{base.__qualname__}.{name}", value


def outer_values(kind: type) -> Iterator[tuple[str, Any]]:
    """(name, value) of the global and enclosing variables that `forward` reads, or what it calls by name."""
    names, cells = _outer_names(kind)
    for scope, name in names:
        if name in scope:
            yield name, scope[name]
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet assigned
            continue


@lru_cache(maxsize=1024)
def _outer_names(kind: type) -> tuple[tuple[tuple[dict[str, Any], str], ...], tuple[tuple[str, CellType], ...]]:
    """(scope, name) of global variables, (name, cell) of enclosing ones."""
    names: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    cells: dict[int, tuple[str, CellType]] = {}
    todo, seen = [inspect.getattr_static(kind, "forward", None)], set()
    while todo and len(seen) < _MOST_FUNCTIONS:
        function = inspect.unwrap(todo.pop()) if todo[-1] is not None else todo.pop()
        if not isinstance(function, FunctionType) or function in seen or not _is_users(function.__module__ or ""):
            continue
        seen.add(function)
        scope = function.__globals__
        variables, attributes = _code_names(function.__code__)
        methods = (inspect.getattr_static(kind, name, None) for name in sorted(attributes))
        todo += [method for method in methods if isinstance(method, FunctionType)]
        for name in sorted(variables):
            if name not in scope or hasattr(builtins, name):
                continue
            value = scope[name]
            if isinstance(value, FunctionType):
                todo.append(value)
            elif not (isinstance(value, type | ModuleType) or callable(value) or is_machinery(type(value))):
                names[id(scope), name] = scope, name
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name != "__class__":
                cells[id(cell)] = name, cell
    return tuple(names.values()), tuple(cells.values())


def _code_names(code: CodeType) -> tuple[set[str], set[str]]:
    """(global variables, attributes) that a function and the functions inside it read, by name."""
    variables: set[str] = set()
    attributes: set[str] = set()
    for step in dis.get_instructions(code):
        if "GLOBAL" in step.opname or step.opname == "LOAD_NAME":
            variables.add(str(step.argval))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            attributes.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _code_names(constant)
            variables |= inner[0]
            attributes |= inner[1]
    return variables, attributes
