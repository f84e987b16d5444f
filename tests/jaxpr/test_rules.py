"""Rules of primitives, discovered here and now: neither the cache nor the shipped book is read."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="JAX is an optional extra: pip install 'shardwise[jax]'")

import jax
import jax.numpy as jnp

from shardwise.ir.graph import Graph
from shardwise.ir.runner import call_of
from shardwise.jaxpr.capture import capture
from shardwise.jaxpr.rules import _lifted, jax_book, rules_of_graph
from shardwise.rules.rule import format_rule

pytestmark = pytest.mark.full  # minutes: rules are found by running, plans are for 8 devices

S = jax.ShapeDtypeStruct


def f(*shape: int) -> S:
    return S(shape, "float32")


EXPECTED = {
    "matmul": (
        lambda a, b: a @ b, (f(8, 32), f(32, 16)), "dot_general",
        "([i,j],[j,k]) -> ([i,k]) reduce{j:sum} linear{0|1}",
    ),
    "batched": (
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (f(8, 16, 32), f(8, 32, 7)), "dot_general",
        "([i,j,k],[i,k,l]) -> ([i,j,l]) reduce{k:sum} linear{0|1}",
    ),
    "sum": (lambda a: a.sum(1), (f(8, 32),), "reduce_sum", "([i,j]) -> ([i]) reduce{j:sum} linear{0}"),
    "max": (lambda a: a.max(1), (f(8, 32),), "reduce_max", "([i,j]) -> ([i]) reduce{j:max}"),
    "any": (lambda a: a.any(1), (S((8, 32), "bool"),), "reduce_or", "([i,j]) -> ([i]) reduce{j:max}"),
    "argmax": (lambda a: jnp.argmax(a, 1), (f(8, 32),), "argmax", "([i,_]) -> ([i])"),
    "cumsum": (lambda a: jnp.cumsum(a, 1), (f(8, 32),), "cumsum", "([i,_]) -> ([i,_]) linear{0}"),
    "broadcast": (
        lambda a: jax.lax.broadcast_in_dim(a, (8, 32), (1,)), (f(32),), "broadcast_in_dim",
        "([i]) -> ([j,i]) local{i:shape.1} local{j:shape.0} linear{0}",
    ),
    "conv": (
        lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"), (f(8, 16, 20, 20), f(32, 16, 3, 3)),
        "conv_general_dilated", "([i,j,_,_],[k,j,_,_]) -> ([i,k,_,_]) reduce{j:sum} linear{0|1}",
    ),
    "iota": (lambda: jax.lax.broadcasted_iota("int32", (8, 32), 1), (), "iota", "() -> ([i,_]) local{i:shape.0}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    graphs: dict[str, Graph] = {}
    for name, (function, example, _, _) in EXPECTED.items():
        closed = jax.make_jaxpr(function)(*example)
        graphs[name] = capture(function, example).graph if example else _without_inputs(closed)
    book = jax_book(use_disk=False, use_shipped=False)
    book.find(_lifted(call_of(n, g.values)[0])[0] for g in graphs.values() for n in g.nodes)
    table = {}
    for name, graph in graphs.items():
        rules = rules_of_graph(graph, book)
        for node, rule in zip(graph.nodes, rules):
            if node.op == f"jax.{EXPECTED[name][2]}":
                call = call_of(node, graph.values)[0]
                ranks = tuple(len(m.shape) for m in call.operands), tuple(len(v.shape) for v in node.results if v)
                table[name] = format_rule(rule, ranks)
    return table


def _without_inputs(closed) -> Graph:
    from shardwise.jaxpr.from_jaxpr import graph_of

    return graph_of(closed)


@pytest.mark.parametrize("name", EXPECTED)
def test_rule(found, name):
    assert found[name] == EXPECTED[name][3]
