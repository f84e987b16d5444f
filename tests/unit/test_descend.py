"""Descent into decompositions: what is opened, what stays closed, and that the numbers stay the same."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.ir.graph import Graph
from shardwise.ir.verify import verify
from shardwise.models import GPT, GPTConfig
from shardwise.pytorch.capture import capture
from shardwise.rules.book import RuleBook
from shardwise.rules.descend import descend
from shardwise.rules.flow import follow
from shardwise.rules.rule import DimRef
from tests.graphs import RUNNER, inputs_for, run_graph

VOCAB = 11
TOLERANCE = 1e-10
"""fp64; a graph of sums in another order. Relative to the largest output: a bias before a norm has no gradient."""


class Classifier(nn.Module):
    """Convolutions with batch norm (and a group norm), then a weighted cross-entropy with ignored labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, affine=False), nn.GroupNorm(2, 8))
        self.head = nn.Linear(8, VOCAB)
        self.register_buffer("weights", torch.linspace(0.5, 1.5, VOCAB, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.second(self.first(x)).mean((2, 3))
        return F.cross_entropy(self.head(h), y, weight=self.weights, ignore_index=2)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 6, padding_idx=3)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(self.words(x)).softmax(-1), y)


def _images() -> tuple[Tensor, Tensor]:
    return torch.zeros(6, 3, 7, 5, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)


def _model(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if name == "gpt":
        tokens = torch.zeros(2, 7, dtype=torch.int64)
        return GPT(GPTConfig(vocab_size=VOCAB, block_size=7, n_layer=2, n_head=2, n_embd=12)), (tokens, tokens)
    if name == "regression":
        return Regression(), (torch.zeros(6, 4, dtype=torch.int64), torch.zeros(6, 4, 5, dtype=torch.float64))
    return (Classifier().eval() if name == "frozen_norms" else Classifier()), _images()


@lru_cache
def _descended(name: str):
    model, args = _model(name)
    graph = capture(model.double(), args).graph
    return graph, *descend(graph, RuleBook(RUNNER))


@pytest.mark.parametrize("name", ["classifier", "frozen_norms", "regression", "gpt"])
def test_equals_the_original(name: str) -> None:
    graph, opened, rules, regions = _descended(name)
    verify(opened)
    assert len(rules) == len(opened.nodes) and regions
    assert {n.region for n in opened.nodes} == {None, *regions}
    assert opened.inputs == graph.inputs and opened.outputs == graph.outputs
    for region, node in regions.items():
        inner = [n for n in opened.nodes if n.region == region]
        assert {n.phase for n in inner} == {node.phase} and {n.source for n in inner} == {node.source}
    for seed in range(2):
        inputs = inputs_for(graph, seed, VOCAB)
        wanted = run_graph(graph, inputs)
        scale = max(np.abs(w).max(initial=0.0) for w in wanted if w is not None)
        for got, want in zip(run_graph(opened, inputs), wanted, strict=True):
            if got is not None and want is not None:
                np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * scale)


def _operators(regions: dict) -> set[str]:
    return {node.op.split(".")[1] for node in regions.values()}


def _forward(graph: Graph, rules: tuple) -> tuple[Graph, tuple]:
    kept = [(n, r) for n, r in zip(graph.nodes, rules) if n.phase == "forward"]
    return graph.with_nodes(tuple(n for n, _ in kept), "forward"), tuple(r for _, r in kept)


def test_the_batch_flows_through_convolutions_and_norms() -> None:
    _, opened, rules, regions = _descended("classifier")
    images = opened.inputs_of("input")[0].value
    flow = follow(*_forward(opened, rules), images.name, DimRef(0))
    assert flow is not None, "the rows of the batch are gathered somewhere"
    assert flow.reduced <= 8, "more than a number per channel is reduced"
    wanted = {"_native_batch_norm_legit_functional", "native_batch_norm_backward", "nll_loss_forward"}
    assert wanted <= _operators(regions)


def test_the_vocabulary_is_opened_and_the_width_stays_closed() -> None:
    model, args = _model("gpt")
    del model
    deep = GPT(GPTConfig(vocab_size=VOCAB, block_size=7, n_layer=6, n_head=2, n_embd=12)).double()
    graph = capture(deep, args).graph
    opened, _, regions = descend(graph, RuleBook(RUNNER))
    assert {"_log_softmax", "nll_loss_forward", "_log_softmax_backward_data"} <= _operators(regions)
    assert not {"native_layer_norm", "native_layer_norm_backward"} & _operators(regions)
    assert len(opened.nodes) < 1.1 * len(graph.nodes)


def test_nothing_to_open_leaves_the_graph_alone() -> None:
    graph = capture(nn.Linear(6, 5).double(), (torch.zeros(4, 6, dtype=torch.float64),)).graph
    opened, rules, regions = descend(graph, RuleBook(RUNNER))
    assert opened is graph and regions == {} and len(rules) == len(graph.nodes)


def test_padding_of_an_embedding_does_not_close_its_rows() -> None:
    _, opened, rules, regions = _descended("regression")
    assert {"embedding_dense_backward", "mse_loss"} <= _operators(regions)
    for node, rule in zip(opened.nodes, rules):
        if "embedding" in node.op:
            assert any(f.index is not None for f in rule.factors), node.op
