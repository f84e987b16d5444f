"""What forward returns beside fresh tensors, and what it leaves behind: as eager has it, or refused with the reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CaptureError


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))
        self.count = 0
        self.fn = forward

    def forward(self, x):
        return self.fn(self, x)


def _twice(m, x):
    y = m.linear(x)
    return y, y, y.mT, y[0], y.detach()


def _hidden_and_pooled(m, x):
    y = m.linear(x)
    return y, y[:, 0]


def _base_not_returned(m, x):
    y = x @ m.w
    return y.mT, y[0]


def _sum_and_views(m, x):
    y = m.linear(x).tanh()
    return y.sum(), y.view(-1), y


ALIASES = {
    "twice": _twice,
    "hidden_and_pooled": _hidden_and_pooled,
    "base_not_returned": _base_not_returned,
    "sum_and_views": _sum_and_views,
    "parameter": lambda m, x: (x @ m.w, m.w),
    "view_of_parameter": lambda m, x: (m.w.t(), m.w[1:], x @ m.w),
    "parameter_alone": lambda m, x: (m.w,),
    "input": lambda m, x: (x, x @ m.w, x.mT),
    "input_alone": lambda m, x: (x,),
    "detached": lambda m, x: (m.linear(x), m.linear(x).detach()),
}


@pytest.mark.parametrize("wants", [False, True], ids=["", "input gradient"])
@pytest.mark.parametrize("name", ALIASES)
def test_outputs_that_share_storage_keep_their_gradients(name, wants):
    found = []
    for parallel in (False, True):
        x = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_(wants)
        model = Net(ALIASES[name])
        module = sw.parallelize(model, (x,)) if parallel else model
        outputs = module(x)
        trained = [(k + 1) * t.sin().sum() for k, t in enumerate(outputs) if t.requires_grad]
        if trained:
            torch.stack(trained).sum().backward()
        gradients = [t.grad for t in (x, *module.parameters())]
        found.append(([t.detach() for t in outputs], [t.requires_grad for t in outputs], gradients))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]
    for ours, theirs in zip(found[1][2], found[0][2], strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)


def _replaces_buffer(m, x):
    m.mean = m.mean * 0.5 + m.linear(x).detach().mean()
    return m.linear(x) * m.mean


def test_a_buffer_that_forward_replaces_changes_as_in_eager():
    x = torch.randn(3, 4, dtype=torch.float64)
    eager, ours = Net(_replaces_buffer), sw.parallelize(Net(_replaces_buffer), (x,))
    for _ in range(3):
        torch.testing.assert_close(ours(x), eager(x))
        torch.testing.assert_close(ours.mean, eager.mean)


def _counts(m, x):
    m.count += 1
    return m.linear(x) * m.count


def _replaces_with_gradient(m, x):
    m.mean = m.mean + m.linear(x).mean()
    return m.linear(x)


def _replaces_with_another_shape(m, x):
    m.mean = m.linear(x).detach().mean(0)
    return m.linear(x)


@dataclasses.dataclass
class Unknown:
    hidden: torch.Tensor


REFUSED = [
    (_counts, r"forward changes count at every call \(from 1 to 2\)"),
    (_replaces_with_gradient, "the buffer mean by a value with a gradient"),
    (_replaces_with_another_shape, "replaces the buffer mean"),
    (lambda m, x: Unknown(m.linear(x)), "Unknown that holds tensors"),
]


@pytest.mark.parametrize("forward, message", REFUSED, ids=["counter", "gradient", "shape", "dataclass"])
def test_what_would_be_lost_is_refused(forward, message):
    with pytest.raises(CaptureError, match=message):
        sw.parallelize(Net(forward), (torch.randn(3, 4, dtype=torch.float64),))


def test_a_parameter_that_forward_writes_into_is_refused():
    with pytest.raises(CaptureError, match=r"writes into the parameter weight .*max_norm"):
        sw.parallelize(nn.Embedding(7, 5, max_norm=0.5), (torch.tensor([1, 2]),))


def _keeps(m, x):
    y = m.linear(x)
    m.auxiliary = y.square().mean()
    return y


def test_a_tensor_left_in_an_attribute_is_told_of():
    with pytest.warns(UserWarning, match="forward leaves tensors in auxiliary"):
        sw.parallelize(Net(_keeps), (torch.randn(3, 4, dtype=torch.float64),))


def test_a_check_inside_an_operator_is_left_out():
    def solve(m, x):
        return torch.linalg.solve(x @ x.mT + torch.eye(4, dtype=x.dtype), m.linear(x))

    x = torch.randn(4, 4, dtype=torch.float64)
    eager, ours = Net(solve), sw.parallelize(Net(solve), (x,))
    torch.testing.assert_close(ours(x), eager(x))
    ours(x).sum().backward()
    eager(x).sum().backward()
    torch.testing.assert_close(ours.linear.weight.grad, eager.linear.weight.grad)
