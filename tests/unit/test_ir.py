"""The graph: text form, verifier, liveness, passes."""

from dataclasses import replace

import pytest
import torch

from shardwise.ir.graph import Graph, Input, Literal, Node, Output, Ref, Value, leaves, replace_leaves
from shardwise.ir.liveness import last_use, live_bytes, storage_intervals
from shardwise.ir.passes import recompute
from shardwise.ir.text import format_graph, parse_graph
from shardwise.ir.verify import verify
from shardwise.pytorch.capture import capture
from tests.models import CASES


def small_graph() -> Graph:
    """A parameter, a view of it, a product, and a backward that reads the view."""
    w, x = Value("w", (4, 3), "float64"), Value("x", (2, 3), "float64")
    t = Value("t", (3, 4), "float64", (1, 3), "w")
    y, g = Value("y", (2, 4), "float64"), Value("g", (2, 4), "float64")
    dx = Value("dx", (2, 3), "float64")
    return Graph(
        (Input(w, "parameter", "fc.weight"), Input(x, "input", "0"), Input(g, "tangent", "0")),
        (
            Node((t,), "aten.t.default", (Ref("w"),), source="model.py:3"),
            Node((y,), "aten.mm.default", (Ref("x"), Ref("t"))),
            Node((Value("tb", (4, 3), "float64", None, "w"),), "aten.t.default", (Ref("t"),), phase="backward"),
            Node((dx,), "aten.mm.default", (Ref("g"), Ref("tb")), phase="backward"),
        ),
        (Output("y", "output", "0"), Output("dx", "gradient", "input 0"), Output(None, "gradient", "fc.weight")),
        "small",
        "hand",
    )


def odd_arguments() -> Graph:
    """Every kind of argument that a node may have."""
    value = Value("y", (), "int64")
    text = 'a "quoted"\n@ {text'
    args = ((1, (2, None)), True, -0.5, float("inf"), float("nan"), 1 + 2j, text, Literal("dtype", "f"))
    return Graph((), (Node((value, None), "ns.op.overload", args, (("dim", -1),), recompute="r1", region="n"),), ())


def test_text_parses_back():
    assert parse_graph(format_graph(small_graph())) == small_graph()
    text = format_graph(odd_arguments())
    assert format_graph(parse_graph(text)) == text


def test_small_graph_prints_as_before(golden):
    golden("small_graph", format_graph(small_graph()))


@pytest.mark.parametrize("name", ["mlp", "convnet", "encoder", "kwargs_pytree"])
def test_captured_graphs_verify_and_parse_back(name):
    built = CASES[name].build()
    args, kwargs = built.make_batch(0, CASES[name].rows)
    graph = verify(capture(built.module, args, kwargs).graph)
    assert parse_graph(format_graph(graph)) == graph
    verify(recompute(graph))


@pytest.mark.parametrize(
    ("line", "what"),
    [("  y: float64[2] = aten.neg.default(%)", "line 2"), ("  input x as parameter", "line 2")],
)
def test_what_cannot_be_read_is_named_by_line(line, what):
    with pytest.raises(ValueError, match=what):
        parse_graph("graph g {\n" + line + "\n}")


def break_graph(kind: str) -> Graph:
    graph = small_graph()
    nodes = list(graph.nodes)
    if kind == "not defined":
        nodes = nodes[1:]
    elif kind == "twice":
        nodes.insert(1, nodes[0])
    elif kind == "forward reads backward":
        nodes[1] = replace(nodes[1], args=(Ref("g"), Ref("t")))
    elif kind == "unknown phase":
        nodes[1] = replace(nodes[1], phase="sideways")
    return graph.with_nodes(tuple(nodes), kind)


@pytest.mark.parametrize("kind", ["not defined", "twice", "forward reads backward", "unknown phase"])
def test_the_verifier_catches(kind):
    verify(small_graph())
    with pytest.raises(AssertionError, match=kind):
        verify(break_graph(kind))


def test_liveness_counts_storages_once():
    graph = small_graph()
    assert last_use(graph) == {"w": 0, "x": 1, "g": 3, "t": 2, "y": 4, "tb": 3, "dx": 4}
    assert storage_intervals(graph)["w"] == (-1, 3)
    assert "t" not in storage_intervals(graph)
    w, x, y, g, dx = 96, 48, 64, 64, 48
    assert live_bytes(graph) == [w + x + g, w + x + g + y, w + g + y, w + g + y + dx]


def test_an_input_may_stand_before_the_owner_of_its_storage():
    graph = small_graph()
    view = Input(Value("v", (2, 3), "float64", None, "w"), "saved", "v")
    assert storage_intervals(replace(graph, inputs=(view, *graph.inputs)))["w"] == (-1, 3)


def test_backward_makes_its_own_views():
    graph = verify(recompute(small_graph()))
    forward = {v.name for n in graph.nodes if n.phase == "forward" for v in n.results}
    backward_reads = {name for n in graph.nodes if n.phase == "backward" for name in n.operands}
    assert not forward & backward_reads
    assert [n.op for n in graph.nodes if n.phase == "backward"] == ["aten.t.default"] * 2 + ["aten.mm.default"]


def test_leaves_are_found_and_replaced_by_path():
    node = odd_arguments().nodes[0]
    found = dict(leaves(node.args, node.kwargs))
    assert found[(0, 1, 0)] == 2 and found[("dim",)] == -1
    args, kwargs = replace_leaves(node.args, node.kwargs, {(0, 1, 0): 7, ("dim",): 3})
    assert args[0] == (1, (7, None)) and kwargs == (("dim", 3),)


def test_capture_leaves_the_module_alone():
    built = CASES["gpt_tied"].build()
    before = {name: p.clone() for name, p in built.module.named_parameters()}
    args, kwargs = built.make_batch(0, 4)
    capture(built.module, args, kwargs)
    after = dict(built.module.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(before[n], p) and p.is_leaf and type(p) is torch.nn.Parameter for n, p in after.items())
