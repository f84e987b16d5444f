"""Jaxprs as graphs: text, loops, keys, state, views, and pointwise nodes joined."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="JAX is an optional extra: pip install 'shardwise[jax]'")

import jax
import jax.numpy as jnp
import optax

import shardwise.jax
from shardwise.ir.graph import BACKWARD, FORWARD, Literal, Node, Ref, Value
from shardwise.ir.runner import call_of
from shardwise.ir.text import format_graph, parse_graph
from shardwise.ir.verify import verify
from shardwise.jaxpr.capture import capture
from shardwise.jaxpr.elsewhere import read_call, write_call
from shardwise.jaxpr.rules import _lifted, _lowered
from shardwise.rules.pointwise import fuse_pointwise
from shardwise.rules.rule import DimRef, Factor, Rule

S = jax.ShapeDtypeStruct


def linear_step(params, state, x):
    """A step of one layer."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def linear_example():
    params = {"w": S((16, 8), "float32")}
    return params, jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, params), S((32, 16), "float32")


def test_a_step_prints_and_parses():
    program = capture(linear_step, linear_example())
    graph = verify(program.graph)
    assert parse_graph(format_graph(graph)) == graph
    kinds = {i.path: i.kind for i in graph.inputs}
    assert kinds == {"params.w": "parameter", "state.0.trace.w": "parameter", "x": "input"}
    assert [(o.kind, o.path) for o in graph.outputs][:2] == [("update", "params.w"), ("update", "state.0.trace.w")]
    phases = [n.phase for n in graph.nodes]
    assert phases == sorted(phases, key=[FORWARD, BACKWARD].index) and BACKWARD in phases


def test_views_share_storage_and_others_do_not():
    graph = capture(
        lambda x: (x.T.reshape(8, 4, 4), jnp.abs(x), x[2:5], jnp.maximum(x, 0)), (S((16, 8), "float32"),)
    ).graph
    aliases = {n.op: n.results[0].alias for n in graph.nodes}
    assert aliases["jax.transpose"] and aliases["jax.reshape"] and aliases["jax.slice"]
    assert not aliases["jax.abs"] and not aliases["jax.max"]


def test_a_scan_is_read_once_and_counts_as_often_as_it_runs():
    def function(x, w):
        return jax.lax.scan(lambda c, wi: (jnp.tanh(c @ wi), c.sum()), x, w)

    program = capture(function, (S((8, 4), "float32"), S((12, 4, 4), "float32")))
    graph = verify(program.graph)
    (block,) = program.blocks
    assert (block.kind, block.length) == ("scan", 12)
    inside = [n for n in graph.nodes if n.times == 12]
    assert {"loop.carry", "loop.slice", "jax.dot_general", "jax.tanh"} <= {n.op for n in inside}
    ((first, second),) = graph.ties
    assert graph.nodes[graph.producer[first]].op == "loop.carry"
    assert graph.nodes[graph.producer[second]].op == "loop.next"
    assert parse_graph(format_graph(graph)) == graph


def test_keys_are_raw_data():
    def function(key, x):
        keys = jax.random.split(key, 3)
        return jax.random.bernoulli(jax.random.fold_in(keys[1], 5), 0.5, x.shape), keys

    graph = verify(capture(function, (jax.random.key(0), S((4, 6), "float32"))).graph)
    assert graph.inputs[0].value.shape == (2,) and graph.inputs[0].value.dtype == "uint32"
    assert "jax.threefry2x32" in {n.op for n in graph.nodes}
    assert not any("random" in n.op for n in graph.nodes)


def test_a_call_survives_the_way_to_another_process():
    graph = capture(lambda x, i: x.at[i].add(1.0), (S((6, 4), "float32"), S((3,), "int32"))).graph
    for node in graph.nodes:
        call = call_of(node, graph.values)[0]
        assert read_call(write_call(call)) == call


def test_numbers_are_operands_where_rules_are_sought():
    x = Value("x", (8, 4), "float32")
    node = Node((Value("y", (8, 4), "float32"),), "jax.mul", (Literal("float32", "0.1"), Ref("x")))
    call, places = _lifted(call_of(node, {"x": x})[0])
    assert places == (0,) and [m.shape for m in call.operands] == [(), (8, 4)]
    rule = Rule((Factor((None, DimRef(0)), (DimRef(0),)), Factor(("sum", DimRef(1)), (DimRef(1),))), ((1,), (0, 1)))
    assert _lowered(rule, places) == Rule((Factor((DimRef(0),), (DimRef(0),)),), ((0,),))


def test_pointwise_nodes_are_joined():
    graph = capture(lambda x, b: jnp.tanh(x * 2.0 + b).sum(), (S((8, 4), "float32"), S((8, 1), "float32"))).graph
    both = tuple(Factor((DimRef(d),) * 2, (DimRef(d),), empty=True) for d in (0, 1))
    one = tuple(Factor((DimRef(d),), (DimRef(d),), empty=True) for d in (0, 1))
    bias = (
        Factor((DimRef(0), DimRef(0)), (DimRef(0),), empty=True),
        Factor((DimRef(1), None), (DimRef(1),), empty=True),
    )
    known = {"jax.mul": Rule(one, ((0,),)), "jax.tanh": Rule(one), "jax.add": Rule(bias, ((0, 1),))}
    rules = tuple(known.get(n.op, Rule()) for n in graph.nodes)
    fused, new_rules, _ = fuse_pointwise(graph, rules, lambda n: n.op in known)
    (joined,) = [(n, r) for n, r in zip(fused.nodes, new_rules) if n.op == "fused.pointwise"]
    assert joined[1].factors == bias and joined[1].linear == ()
    assert verify(fused) and both
    assert parse_graph(format_graph(fused)) == fused


def test_a_plan_needs_no_devices():
    plan = shardwise.jax.plan(linear_step, *linear_example(), mesh=(8,), cluster="a100x8", memory_limit="1GiB")
    assert plan.mesh == (8,) and "parameter params.w" in plan.explain("params.w")
    assert (
        plan.layouts["params.w"]
        == dict(zip((p for _, p, _ in plan.outputs), (x for *_, x in plan.outputs)))["params.w"]
    )
    chosen = shardwise.jax.plan(
        linear_step, *linear_example(), cluster="a100x8", constraints={"params.w": "[S0, S1]", "x": "![R, R]"}
    )
    assert len(chosen.mesh) == 2 and str(chosen.layouts["params.w"][1]) == "S1"
