"""Discovery survives operators that abort, hang, or were written by somebody else."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor
from torch.library import Library

from shardwise.ir.graph import Ref
from shardwise.ir.runner import Call, TensorMeta
from shardwise.rules.rule import Rule, format_rule
from shardwise.rules.sandbox import discover_all
from tests.graphs import RUNNER

A, B = Ref("0"), Ref("1")
TIMEOUT_S = 3.0
"""Long enough for an honest attempt on a busy machine."""

_library = Library("sandbox_test", "FRAGMENT")


def _register(name: str, function, schema: str = "(Tensor x) -> Tensor") -> str:
    """An operator that keeps its operand's shape."""
    _library.define(name + schema)
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"sandbox_test::{name}", lambda x, *rest: torch.empty_like(x), lib=_library)
    return f"sandbox_test.{name}.default"


def _aborts(x: Tensor) -> Tensor:
    if x.shape[1] == 1:
        os.abort()
    return x * 2


def _hangs(x: Tensor) -> Tensor:
    while x.shape[1] == 1:
        time.sleep(0.01)
    return x * 2


def _always_aborts(x: Tensor) -> Tensor:
    os.abort()


def _aborts_when_empty(x: Tensor) -> Tensor:
    if x.numel() == 0:
        os.abort()
    return x * 2


def _centred(x: Tensor, y: Tensor) -> Tensor:
    """What nobody wrote a rule for: rows of x are scaled, the mean of y is taken off."""
    return (x - y.mean()) * x.sum(1, keepdim=True)


ABORTS = _register("aborts", _aborts)
HANGS = _register("hangs", _hangs)
ALWAYS = _register("always_aborts", _always_aborts)
EMPTY = _register("aborts_when_empty", _aborts_when_empty)
TOY = _register("centred", _centred, "(Tensor x, Tensor y) -> Tensor")


def _call(op: str, *shapes: tuple[int, ...]) -> Call:
    operands = tuple(TensorMeta(s, "float64") for s in shapes or ((5, 7),))
    return Call(op, operands, tuple(Ref(str(k)) for k in range(len(operands))))


def _text(rule: Rule) -> str:
    return format_rule(rule, ((2,), (2,)))


GOOD = _call("aten.neg.default")


@pytest.mark.parametrize("isolated", [False, True])
def test_a_crash_costs_that_candidate_alone(isolated: bool) -> None:
    first, bad, last = discover_all([GOOD, _call(ABORTS), GOOD], RUNNER, timeout_s=TIMEOUT_S, isolated=isolated)
    assert _text(first) == _text(last) == "([i,j]) -> ([i,j]) linear{0}"
    assert first == last
    assert _text(bad) == "([i,_]) -> ([i,_]) linear{0}"
    assert bad.factors[0].empty


def test_a_hang_costs_that_candidate_alone() -> None:
    start = time.monotonic()
    first, bad, last = discover_all([GOOD, _call(HANGS), GOOD], RUNNER, timeout_s=TIMEOUT_S)
    assert first == last and _text(first) == "([i,j]) -> ([i,j]) linear{0}"
    assert _text(bad) == "([i,_]) -> ([i,_]) linear{0}"
    assert time.monotonic() - start < 15 * TIMEOUT_S


def test_an_operator_that_always_dies_is_replicated() -> None:
    first, bad, last = discover_all([GOOD, _call(ALWAYS), GOOD], RUNNER, timeout_s=TIMEOUT_S)
    assert first == last and not bad.factors and not bad.linear


def test_an_empty_piece_that_kills_is_marked() -> None:
    (rule,) = discover_all([_call(EMPTY)], RUNNER, timeout_s=TIMEOUT_S)
    assert _text(rule) == "([i,j]) -> ([i,j]) linear{0}"
    assert [f.empty for f in rule.factors] == [False, False]


def test_a_custom_operator_gets_its_rule() -> None:
    (rule,) = discover_all([_call(TOY, (5, 7), (6, 9))], RUNNER)
    assert format_rule(rule, ((2, 2), (2,))) == "([i,_],[j,k]) -> ([i,_]) reduce{j:avg} even{j} reduce{k:avg} even{k}"


def test_progress_counts_every_call() -> None:
    seen: list[tuple[int, int]] = []
    discover_all([GOOD, _call(ABORTS), GOOD], RUNNER, lambda done, total: seen.append((done, total)), TIMEOUT_S)
    assert seen == [(1, 3), (2, 3), (3, 3)]
