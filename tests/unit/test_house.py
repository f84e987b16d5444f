"""No part of the middle knows an operator: names of operators live in pytorch/ and jaxpr/ alone. Files stay short."""

from __future__ import annotations

import ast
import builtins
import importlib
import itertools
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardwise"
FOLDERS = ("rules", "plan", "spmd", "overlap", "chunk", "memory")

WORDS = {
    # Reductions by which pieces combine: the discovery tries each on every operator (rules/combine.py).
    "sum", "max", "min", "prod",
    # Operators of the dialect shard.*: what one device does with its own piece (spmd/lower.py, plan/reshard.py).
    "slice", "pad",
    # Kinds of inputs, outputs and choices of a graph or plan.
    "gradient", "zero", "view", "linear", "split", "random", "_backward",
    # Kinds of trial inputs (rules/draws.py), and names of dtypes by their beginnings.
    "positive", "complex",
    # Fields of a rule in JSON, and wildcards of a group of dims.
    "index", "empty", "any",
}  # fmt: skip
"""Strings that are names of operators and mean something else here."""

NAMES = {
    "alias", "dim", "numel", "stride",  # fields of ir.Value and its places
    "linear", "mode", "zero", "chunk", "expand", "round_", "t",  # variables and methods of the planner and the rules
}  # fmt: skip
"""Names in the source that are names of operators and of nothing in Python or numpy."""

KNOWN = {
    name
    for owner in (builtins, itertools, math, np, np.ndarray, np.random.Generator, list, dict, set, str, bytes)
    for name in dir(owner)
}
"""Functions and methods of Python and numpy, whose names torch has taken over."""


@lru_cache(maxsize=1)
def operators() -> frozenset[str]:
    """The names of all operators that torch has registered, of every namespace of its own."""
    names = torch._C._dispatch_get_all_op_names()
    found = {n.split("::")[1].split(".")[0] for n in names if n.split("::")[0] in ("aten", "prims", "quantized")}
    assert len(found) > 1000 and {"addmm", "native_layer_norm", "_softmax", "convolution_backward"} <= found
    return frozenset(found)


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """All text in the source but docstrings."""
    notes = {
        id(line.value)
        for node in ast.walk(tree)
        for line in (getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else None) or ()
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that is named."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            yield line, node.arg
        elif isinstance(node, ast.alias):
            yield line, node.asname or node.name.rsplit(".", 1)[-1]


def named_operators(text: str) -> list[str]:
    """Where a source names an operator."""
    tree = ast.parse(text)
    found = []
    for node in strings(tree):
        value = node.value
        if re.search(r"\b(aten|prims|torch|quantized|shardwise\.random\w*)\.", value):
            found.append(f"{node.lineno}: {value!r} is of a framework")
        if value in operators() - WORDS:
            found.append(f"{node.lineno}: {value!r} is an operator")
        # Inside a longer text only what no English text holds: a word with an underscore.
        inside = {w for w in re.findall(r"\w+", value) if "_" in w.strip("_") and w in operators()}
        found += [f"{node.lineno}: {word!r} in a text is an operator" for word in inside if word != value]
    for line, name in names(tree):
        if name in operators() - NAMES - KNOWN or name == "torch":
            found.append(f"{line}: {name} is an operator")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_operator_is_named(folder):
    paths = sorted((SOURCE / folder).rglob("*.py"))
    assert paths or folder in ("overlap", "chunk", "memory")  # which are yet to come
    found = [f"{p.relative_to(SOURCE)}:{text}" for p in paths for text in named_operators(p.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        'if node.op == "aten.addmm.default": pass',
        'if node.op.startswith("aten."): pass',
        'if "layer_norm" in node.op: pass',
        'if node.op.split(".")[1] == "addmm": pass',
        'KINDS = ("softmax", "relu")',
        'TABLE = {"mm": 0}',
        'raise ValueError("not for scaled_dot_product_attention")',
        "def embedding(x): pass",
        "x = convolution(y)",
        "import torch",
    ],
)
def test_the_check_finds(text):
    assert named_operators(text)


def test_the_words_that_are_allowed_are_in_use():
    trees = [ast.parse(p.read_text()) for f in FOLDERS for p in (SOURCE / f).rglob("*.py")]
    used = {node.value for tree in trees for node in strings(tree)}
    assert used >= WORDS and WORDS <= operators(), (WORDS - used, WORDS - operators())
    assert operators() - KNOWN >= NAMES, (NAMES - operators(), NAMES & KNOWN)


LONG = {
    "tests/unit/test_random.py": 600,  # the statistics of every distribution, side by side
    "tests/unit/test_rules.py": 450,  # a table: a call and its expected rule, one a line
    "tests/unit/test_cluster.py": 450,  # a table: a malformed file and its expected message
}
"""Files of more than 400 lines, with their own limit and the reason."""


def test_files_are_short():
    found = {}
    for folder in ("src", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            lines, name = len(path.read_text().splitlines()), str(path.relative_to(ROOT))
            if lines > LONG.get(name, 400):
                found[name] = lines
    assert not found, f"split them, or give the reason in LONG: {found}"
    stale = [name for name in LONG if len((ROOT / name).read_text().splitlines()) <= 400]
    assert not stale, f"no longer long: {stale}"


def test_functions_are_short():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 60:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {lines} lines")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_every_benchmark_still_imports(path):
    importlib.import_module(f"benchmarks.{path.stem}")
