"""Backward where some outputs receive no gradient: values and missing gradients are those of eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.ir.graph import BACKWARD, FORWARD

X = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)


class Heads(nn.Module):
    """A trunk and two heads; one parameter reaches the first output alone, one the second alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.trunk(x)) + self.frozen(torch.relu(self.trunk(x)))
        return F.layer_norm(self.first(h), (3,)), self.second(h[:, 1:].repeat(1, 2)[:, :8]).softmax(-1), h.detach()


class Clip(torch.autograd.Function):
    """Its backward is not linear: where no gradient comes, eager PyTorch never calls it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.01, 0.01) + 0.5


class Clipped(Heads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.first(h), Clip.apply(self.second(Clip.apply(h)))


class Joined(nn.Module):
    """Both outputs are parts of one value, so that its gradient is put together from what comes and from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.linear(x).sin().split([2, 4], 1)
        return left * self.scale, right.cos()


def loss_of(outputs: tuple[Tensor, ...], used: tuple[int, ...]) -> Tensor:
    return sum((outputs[k] * (k + 1)).square().sum() for k in used)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", [Heads, Clipped, Joined], ids=lambda k: k.__name__)
def test_gradients_are_those_of_eager(kind, used):
    torch.manual_seed(1)
    plain = kind().double()
    ours = sw.parallelize(copy.deepcopy(plain), (X.clone().requires_grad_(),))
    for step in range(2):
        inputs = []
        for module in (plain, ours):
            x = (X + step).requires_grad_()
            loss_of(module(x), used).backward()
            inputs.append(x)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-12, atol=1e-14)
    mine = dict(ours.named_parameters())
    missing = set()
    for name, theirs in plain.named_parameters():
        if theirs.grad is None:
            missing.add(name)
            assert mine[name].grad is None, f"{name} has a gradient, where eager has none"
        else:
            torch.testing.assert_close(mine[name].grad, theirs.grad, rtol=1e-12, atol=1e-14, msg=name)
    expected = {"frozen.weight", "frozen.bias"} if kind is not Joined else set()
    if kind is not Joined and len(used) == 1:
        expected |= {f"{'second' if used == (0,) else 'first'}.{part}" for part in ("weight", "bias")}
    if kind is Joined and used == (1,):
        expected = {"scale"}
    assert missing == expected


def test_what_leads_to_no_gradient_is_not_computed():
    ours = sw.parallelize(Heads().double(), (X,))
    program = ours._shardwise.first
    whole, part = program.without(frozenset()), program.without(frozenset({"1"}))
    assert [n for n in part.nodes if n.phase == FORWARD] == [n for n in whole.nodes if n.phase == FORWARD]
    assert {i.path for i in whole.inputs_of("tangent")} - {i.path for i in part.inputs_of("tangent")} == {"1"}
    back = [n for n in part.nodes if n.phase == BACKWARD]
    assert 0 < len(back) < len([n for n in whole.nodes if n.phase == BACKWARD])
    assert not any("softmax" in n.op for n in back), "the backward of the second head is gone"
    names = {o.path: o.name for o in part.outputs_of("gradient")}
    assert names["second.weight"] is None and names["first.weight"] and names["trunk.weight"]


def test_a_missing_part_of_a_joined_gradient_is_a_zero_that_takes_no_memory():
    ours = sw.parallelize(Joined().double(), (X,))
    program = ours._shardwise.first
    part = program.without(frozenset({"0"}))
    assert {i.kind for i in part.inputs} >= {"zero", "tangent"}
    ours(X)[1].sum().backward()
    assert ours.scale.grad is None and ours.linear.weight.grad is not None


def test_a_call_without_any_gradient_leaves_none():
    torch.manual_seed(0)
    ours = sw.parallelize(Heads().double(), (X,))
    first, _second, h = ours(X)
    assert first.requires_grad and not h.requires_grad
    (first.detach().sum() + ours.first.bias.sum()).backward()
    assert all(p.grad is None for n, p in ours.named_parameters() if n != "first.bias")
