"""The planner on models of equal layers: what is folded and dropped against the whole program solved as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.cluster import Cluster
from shardwise.ir.passes import recompute
from shardwise.models import GPT
from shardwise.models.gpt import GPTConfig
from shardwise.plan import unlimited
from shardwise.plan.certificate import check
from shardwise.plan.fold import fold
from shardwise.plan.formulate import Formulation
from shardwise.plan.network import MICRO, build_network, reduce
from shardwise.plan.planner import optimise
from shardwise.plan.price import relax
from shardwise.plan.problem import Problem, Settings, build_problem
from shardwise.pytorch.capture import capture
from shardwise.pytorch.flops import count_flops
from shardwise.pytorch.runner import TorchRunner
from shardwise.rules.book import RuleBook


def gpt_problem(layers: int, mesh: tuple[int, ...]) -> Problem:
    """A GPT of small width."""
    config = GPTConfig(vocab_size=512, block_size=128, n_layer=layers, n_head=8, n_embd=256)
    tokens = torch.zeros(8, config.block_size, dtype=torch.long)
    return problem_of(GPT(config), (tokens, tokens), mesh)


def problem_of(module: nn.Module, example: tuple, mesh: tuple[int, ...]) -> Problem:
    """A model on a described cluster of 4 devices."""
    graph = recompute(capture(module, example).graph)
    rules = RuleBook(TorchRunner()).of_graph(graph)
    cluster = Cluster.load("a100x8")
    four = replace(cluster, levels=(replace(cluster.levels[0], size=4),))
    return build_problem(graph, rules, four, Settings(mesh), count_flops(graph))


def test_bounds_agree_with_the_whole_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping strategies loses no better plan; folding leaves a bound that is lower, and near."""
    problem = gpt_problem(2, (4,))
    network = reduce(build_network(problem))
    whole = relax(Formulation(problem, network, fold(network, None), limited=False)).bound / MICRO
    outcome = optimise(problem)
    assert outcome.status == "optimal"
    assert whole * (1 - 1e-9) <= outcome.bound_s <= whole * 1.001
    assert outcome.certificate is not None
    assert check(problem, outcome.certificate()) == pytest.approx(whole, rel=1e-5)
    monkeypatch.setattr(unlimited, "LARGE", 0)
    folded = optimise(problem)
    best = outcome.evaluation.seconds
    assert whole * 0.98 <= folded.bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= folded.evaluation.seconds <= best * 1.02


def test_many_layers_are_planned_near_their_bound() -> None:
    """12 layers are folded: a plan within 2 % of a bound that its prices prove."""
    problem = gpt_problem(12, (4,))
    outcome = optimise(problem)
    assert outcome.gap <= 0.02
    assert outcome.certificate is not None
    assert check(problem, outcome.certificate()) <= outcome.evaluation.seconds * (1 + 1e-9)


class _SharedScale(nn.Module):
    """Equal layers, all of which read one value that none of them makes."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        scale = scale.exp()
        for layer in self.layers:
            x = x + layer(x * scale).relu()
        return x.mean()


def test_layers_that_read_one_value_are_folded() -> None:
    """However many they are: readers of a value are not told apart by the order in which they read."""
    example = torch.randn(64, 256), torch.randn(64, 256)
    groups = []
    for layers in (8, 16):
        network = reduce(build_network(problem_of(_SharedScale(layers), example, (4,))))
        groups.append(len(fold(network, unlimited.FOLD_ROUNDS).members))
    assert groups[0] == groups[1] < len(network.cost) / 2


SCRIPT = """
from shardwise.plan import unlimited
from shardwise.plan.planner import optimise
from tests.unit.test_planner_layers import gpt_problem

def decisions():
    problem = gpt_problem(2, (4,))
    for unlimited.LARGE in (400, 0):
        outcome = optimise(problem)
        yield outcome.assignment.chosen, outcome.bound_s

print(list(decisions()))
"""


def test_plans_and_bounds_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gpt_problem(2, (4,))
    here = []
    for large in (400, 0):
        monkeypatch.setattr(unlimited, "LARGE", large)
        outcome = optimise(problem)
        here.append((outcome.assignment.chosen, outcome.bound_s))
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(here)
