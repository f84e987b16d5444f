"""Bad input: what, where, what to try."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("jax", reason="JAX is an optional extra: pip install 'shardwise[jax]'")

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

import shardwise.jax
from shardwise.errors import CaptureError, InputError

from .devices import on_devices
from .runs import refused


def test_what_is_refused():
    found = on_devices(refused)
    expected = {
        "no function": "InputError: step: expected a function",
        "mesh too large": "(4, 4) has 16 devices, there are 8",
        "mesh of nothing": "expected a jax.sharding.Mesh or a shape such as (2, 4)",
        "cluster of another size": "describes 64 devices but there are 8",
        "wrong example": "step rejects the example: TypeError",
        "unknown path": "the step has no 'params.0.x'; try params.0.",
        "another structure": "another structure than the example",
        "another size": "batch.0 is float64[8, 32], in the example it was float64[64, 32]",
        "limit": "MemoryLimitError: no plan on mesh (8,) fits into",
    }
    assert {k: v for k, v in expected.items() if v not in found.get(k, "")} == {}, found


def test_a_primitive_that_nobody_can_run():
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    with pytest.raises(CaptureError, match=r"'mystery' has no lowering.*test_errors\.py.*take it out"):
        shardwise.jax.plan(lambda x: mystery.bind(x) + 1, jnp.ones((8, 8)), mesh=(8,))


def test_effects():
    def step(x):
        jax.debug.print("{}", x)
        return x + 1

    with pytest.raises(CaptureError, match=r"effects.*take jax\.debug\.print"):
        shardwise.jax.plan(step, jnp.ones(8), mesh=(8,))


def test_no_arrays_and_no_traceable_step():
    with pytest.raises(InputError, match="no array among the arguments"):
        shardwise.jax.plan(lambda: 1, mesh=(8,))
    with pytest.raises(CaptureError, match="cannot be traced"):
        shardwise.jax.plan(lambda x: x if x.sum() > 0 else -x, jnp.ones(8), mesh=(8,))


def test_without_jax_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "try:\n    import shardwise.jax\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'shardwise[jax]'" in done.stdout
