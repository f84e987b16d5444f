"""What a trace does not say of itself: lines of the user, checkpointed regions; and a meta module gives the same."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.ir.graph import BACKWARD, FORWARD
from shardwise.ir.passes import recompute, without_sources
from shardwise.ir.text import format_graph
from shardwise.pytorch.capture import capture
from tests.models import CASES

X = torch.linspace(-1, 1, 24).view(4, 6)


class Lined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def helper(self, h: Tensor) -> Tensor:
        return h.sin()  # line of the helper

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)  # line of the linear layer
        return F.softmax(self.helper(h), -1)  # line of the softmax


def line(text: str) -> str:
    """file:line of the line that ends with a comment."""
    lines, first = inspect.getsourcelines(Lined)
    return f"{__file__}:{next(first + k for k, code in enumerate(lines) if code.rstrip().endswith('# ' + text))}"


def test_every_node_names_the_innermost_line_of_the_user():
    graph = capture(Lined(), (X,)).graph
    where = {n.op: n.source for n in graph.nodes if n.phase == FORWARD}
    assert where["aten.addmm.default"] == line("line of the linear layer")
    assert where["aten.sin.default"] == line("line of the helper")
    assert where["aten._softmax.default"] == line("line of the softmax")


def test_backward_names_the_line_of_the_forward_operator_that_it_belongs_to():
    graph = capture(Lined(), (X,)).graph
    where = {n.op: n.source for n in graph.nodes if n.phase == BACKWARD}
    assert where["aten._softmax_backward_data.default"] == line("line of the softmax")
    assert where["aten.cos.default"] == line("line of the helper")
    assert {n.source for n in graph.nodes if n.op == "aten.mm.default"} == {line("line of the linear layer")}


class Regions(nn.Module):
    def __init__(self, use_checkpoint: bool) -> None:
        super().__init__()
        self.use_checkpoint = use_checkpoint

    def run(self, function, *args):
        return checkpoint(function, *args, use_reentrant=False) if self.use_checkpoint else function(*args)

    def forward(self, x: Tensor) -> Tensor:
        a = x.sin()
        b = self.run(lambda v: (v.tanh() * 2).exp(), a)
        c = b.cosh()
        d = self.run(lambda v: v.sigmoid().sqrt(), c)
        return (d * self.run(lambda v: v.erf(), x)).sum()


def test_nodes_are_of_their_region_and_the_graph_is_the_same_without():
    marked = capture(Regions(True), (X.requires_grad_(),)).graph
    plain = capture(Regions(False), (X.requires_grad_(),)).graph
    assert [n.op for n in marked.nodes] == [n.op for n in plain.nodes]
    assert all(n.recompute is None for n in plain.nodes)
    regions: dict[str | None, list[str]] = {}
    for node in marked.nodes:
        if node.phase == FORWARD:
            regions.setdefault(node.recompute, []).append(node.op.split(".")[1])
    inside = sorted(ops for name, ops in regions.items() if name is not None)
    assert inside == [["erf"], ["sigmoid", "sqrt"], ["tanh", "mul", "exp"]]
    assert regions[None] == ["sin", "cosh", "mul", "sum"]


def test_regions_are_made_again_from_their_inputs():
    graph = recompute(capture(Regions(True), (X.requires_grad_(),)).graph)
    back = [n.op.split(".")[1] for n in graph.nodes if n.phase == BACKWARD]
    assert {"tanh", "sigmoid"} <= set(back), "made again"
    made = {v.name: n for n in graph.nodes if n.phase == FORWARD for v in n.results if v is not None}
    crossing = {made[o].op for n in graph.nodes if n.phase == BACKWARD for o in n.operands if o in made}
    assert not crossing & {"aten.tanh.default", "aten.mul.Tensor", "aten.sigmoid.default"}, crossing


def on_meta(module: nn.Module) -> nn.Module:
    """A copy on meta with the ties of the original, which `to` would not keep."""
    memo = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if trained else meta
    return copy.deepcopy(module, memo)


@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "convnet", "encoder", "frozen", "shared_module", "writing_op"])
def test_a_module_on_meta_gives_the_graph_of_the_real_one(name):
    built = CASES[name].build()
    args, kwargs = built.make_batch(0, CASES[name].rows)
    real = capture(built.module, args, kwargs).graph
    meta = capture(on_meta(built.module), args, kwargs).graph
    assert format_graph(without_sources(meta)) == format_graph(without_sources(real))


class Attention(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()


def test_attention_stays_one_operator_also_for_arguments_on_meta():
    q = torch.randn(2, 2, 8, 16, requires_grad=True)
    graphs = [capture(Attention(), (t,)).graph for t in (q, torch.empty_like(q, device="meta").requires_grad_())]
    assert format_graph(graphs[0]) == format_graph(graphs[1])
    assert next(n.op for n in graphs[0].nodes if n.phase == FORWARD).startswith("aten._scaled_dot_product_flash")
