"""What a capture refuses, with the user's own line, and the forms that unusual calls take in a graph."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.pytorch.capture import capture
from shardwise.pytorch.mutable import twin_of
from tests.dist.toys import fast
from tests.models.unusual import clip_, move_

X = torch.linspace(-1, 1, 32).view(4, 8)


class Around(nn.Module):
    """A linear layer, and a function behind it."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


@torch.library.custom_op("toytest::tagged_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def tagged_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("toytest::quiet_noise", mutates_args=())
def quiet_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


for _op in (tagged_noise, quiet_noise):
    _op.register_fake(torch.empty_like)
    _op.register_autograd(lambda ctx, g: g)


def poisson(h):
    return h * torch.poisson(h.detach().abs())


def binomial(h):
    return h * torch.binomial(h.detach().abs().ceil(), torch.full_like(h, 0.5))


def gamma(h):
    return h * torch._standard_gamma(h.detach().abs() + 1)


def custom(h):
    return tagged_noise(h)


def in_backward(h):
    return Noisy.apply(h)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g * torch.poisson(torch.ones_like(g))


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (poisson, "aten.poisson.default"),
        (binomial, "aten.binomial.default"),
        (gamma, "aten._standard_gamma.default"),
        (custom, "toytest.tagged_noise.default"),
        (in_backward, "aten.poisson.default"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_a_random_operator_without_a_counter_based_form_is_refused_with_its_line(function, operator):
    with pytest.raises(CaptureError) as caught:
        capture(Around(function), (X,))
    assert operator in str(caught.value) and "draws random numbers" in str(caught.value)
    if function is not in_backward:
        line = inspect.getsourcelines(function)[1] + 1
        assert f"test_capture.py:{line})" in str(caught.value)


def silent(h):
    return quiet_noise(h)


def test_an_operator_that_draws_without_saying_so_is_found_by_running_it_twice():
    with pytest.raises(CaptureError, match="other results of the same operands") as caught:
        sw.plan(Around(silent), (X,), mesh=(2,), cluster=fast(2))
    line = inspect.getsourcelines(silent)[1] + 1
    assert "toytest.quiet_noise.default" in str(caught.value) and f"test_capture.py:{line})" in str(caught.value)


def reentrant(h):
    return checkpoint(lambda a: F.dropout(a.sin(), 0.5), h, use_reentrant=True)


def reentrant_sequential(h):
    return checkpoint_sequential([nn.Tanh(), nn.ReLU()], 2, h, use_reentrant=True)


@pytest.mark.parametrize("function", [reentrant, reentrant_sequential], ids=lambda f: f.__name__)
def test_a_reentrant_checkpoint_is_refused_with_its_line_and_works_where_nothing_is_trained(function):
    line = inspect.getsourcelines(function)[1] + 1
    with pytest.raises(CaptureError, match=rf"use_reentrant=True.*test_capture.py:{line}\).*use_reentrant=False"):
        capture(Around(function), (X,))
    assert capture(Around(function), (X,), training=False).graph.nodes


def branches(h):
    return torch.cond(h.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (h,))


def test_an_operator_of_higher_order_is_refused_with_its_line():
    with pytest.raises(CaptureError, match=r"cond .*test_capture\.py:\d+"):
        capture(Around(branches), (X,), training=False)


# ---- operators that write into their arguments


def test_the_twin_of_a_writing_operator_writes_nothing():
    a, b = X.clone(), torch.ones(4, 8)
    moved, after_a, after_b = twin_of(torch.ops.toytest.move_.default)(a, b, 0.25)
    assert torch.equal(a, X) and torch.equal(b, torch.ones(4, 8))
    expected = move_(a, b, 0.25)
    assert torch.equal(moved, expected) and torch.equal(after_a, a) and torch.equal(after_b, b)
    assert twin_of(torch.ops.toytest.move_.default) is twin_of(torch.ops.toytest.move_.default)
    torch.library.opcheck(twin_of(torch.ops.toytest.clip_.default), (X.clone(), -0.5, 0.5))


@torch.library.custom_op("toytest::swap_", mutates_args=("a", "b"))
def swap_(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


@torch.library.custom_op("toytest::zero_all_", mutates_args=("many",))
def zero_all_(many: list[Tensor]) -> None:
    for one in many:
        one.zero_()


def swap_halves(h):
    h = h.detach().clone()
    swap_(h[:2], h[2:])
    return h


def zero_two(h):
    h = h.detach().clone()
    zero_all_([h])
    return h


@pytest.mark.parametrize(
    ("function", "reason"), [(swap_halves, "two views of one tensor"), (zero_two, "a list of tensors")]
)
def test_writes_that_have_no_form_are_refused_with_their_line(function, reason):
    line = inspect.getsourcelines(function)[1] + 2
    with pytest.raises(CaptureError, match=rf"test_capture.py:{line}\): .*{reason}"):
        capture(Around(function), (X,))


def clipped(h):
    h = h.detach().clone()
    clip_(h, -0.5, 0.5)
    return h


def test_a_writing_operator_is_one_node_with_the_users_line():
    graph = capture(Around(clipped), (X,)).graph
    (node,) = [n for n in graph.nodes if "clip_" in n.op]
    assert node.op.startswith("shardwise_functional.") and len(node.results) == 1
    assert node.source.endswith(f"test_capture.py:{inspect.getsourcelines(clipped)[1] + 2}")
