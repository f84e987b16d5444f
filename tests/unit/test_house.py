"""No part of the middle knows an operator: names of operators live in pytorch/ and jaxpr/ alone."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shardwise"
FOLDERS = ("rules", "plan", "spmd", "overlap", "chunk", "memory")
ORDINARY = {
    "t",
    "to",
    "set",
    "all",
    "any",
    "max",
    "min",
    "sum",
    "abs",
    "range",
    "zip",
    "pad",
    "fill",
    "copy",
    "add",
    "round",
    "prod",
}
"""Operators whose names are words of Python or of the dialects comm.* and shard.*."""


def _operators() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {n.split("::")[1].split(".")[0] for n in names if n.startswith("aten::")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_operator_is_named(folder):
    operators = _operators() - ORDINARY
    found = []
    for path in sorted((SOURCE / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            # As a name of the graph, or as a string of its own that is the name of an operator.
            if re.search(r"\b(aten|torch\.ops|prims)\.", code):
                found.append(f"{path.name}:{number}: {line.strip()}")
            for text in re.findall(r"[\"']([a-z_0-9]+)[\"']", code):
                if text in operators and "_" in text:
                    found.append(f"{path.name}:{number}: {text!r} is an operator")
    assert not found, "\n".join(found)


def test_functions_and_files_are_short():
    long = [p for p in sorted(SOURCE.rglob("*.py")) if len(p.read_text().splitlines()) > 460]
    assert not long, [str(p.relative_to(SOURCE)) for p in long]


@pytest.mark.parametrize("path", sorted((SOURCE.parents[1] / "benchmarks").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_every_benchmark_still_imports(path):
    importlib.import_module(f"benchmarks.{path.stem}")
