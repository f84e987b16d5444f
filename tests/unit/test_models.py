from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.models import CASES

# A gradient that is missing on purpose.
WITHOUT_GRADIENT = {"frozen": {"features.weight", "features.bias", "unused"}}


def run(name: str, step: int = 0, rows: int | None = None):
    case = CASES[name]
    module, make_batch, loss_from = case.build()
    args, kwargs = make_batch(step, case.rows if rows is None else rows)
    torch.manual_seed(3)
    loss = loss_from(module(*args, **kwargs))
    loss.backward()
    return module, loss.detach()


def same(a, b) -> bool:
    leaves, leaves2 = pytree.tree_leaves(a), pytree.tree_leaves(b)
    pairs = zip(leaves, leaves2, strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("name", CASES)
def test_runs_with_finite_loss_and_gradients(name):
    module, loss = run(name)
    assert loss.dim() == 0 and loss.dtype == torch.float64 and loss.isfinite()
    for key, parameter in module.named_parameters():
        assert parameter.dtype == torch.float64
        if key in WITHOUT_GRADIENT.get(name, ()):
            assert parameter.grad is None, key
        else:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-9, key


@pytest.mark.parametrize("name", CASES)
def test_repeats_bit_for_bit(name):
    before = torch.get_rng_state()
    CASES[name].build()
    assert torch.equal(before, torch.get_rng_state()), "building a case moved the caller's random state"
    (module, loss), (module2, loss2) = run(name), run(name)
    assert torch.equal(loss, loss2)
    for (key, a), (_, b) in zip(module.named_parameters(), module2.named_parameters(), strict=True):
        assert torch.equal(a, b) and (a.grad is b.grad is None or torch.equal(a.grad, b.grad)), key
    for (key, a), (_, b) in zip(module.named_buffers(), module2.named_buffers(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", CASES)
def test_is_small_and_steps_differ(name):
    module, make_batch, _ = CASES[name].build()
    assert sum(p.numel() for p in module.parameters()) < 70_000
    rows = CASES[name].rows
    assert same(make_batch(1, rows), make_batch(1, rows))
    assert not same(make_batch(0, rows), make_batch(1, rows))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 6])
def test_other_numbers_of_rows(name, rows):
    if name == "convnet" and rows == 1:
        rows = 2  # so that the statistics of the last norm are over more than a few numbers
    assert run(name, rows=rows)[1].isfinite()


@pytest.mark.parametrize("name", CASES)
def test_local_rows_put_together_are_the_batch(name):
    case = CASES[name]
    _, make_batch, _ = case.build()
    for rows, world in ((8, 4), (7, 2), (6, 4)):
        batch = make_batch(0, rows)
        parts = [pytree.tree_leaves(case.local_rows(batch, rows, rank, world)) for rank in range(world)]
        for whole, *pieces in zip(pytree.tree_leaves(batch), *parts, strict=True):
            if isinstance(whole, torch.Tensor) and whole.dim() > case.batch_dim:
                assert torch.equal(torch.cat(pieces, case.batch_dim), whole)
            else:
                assert all(piece is whole for piece in pieces)


def test_only_the_random_cases_draw_random_numbers():
    for name, case in CASES.items():
        module, make_batch, _ = case.build()
        args, kwargs = make_batch(0, case.rows)
        before = torch.get_rng_state()
        module(*args, **kwargs)
        assert torch.equal(before, torch.get_rng_state()) != case.random, name


def test_checkpointing_changes_nothing():
    assert torch.equal(run("checkpointed")[1], run("gpt")[1])


def test_gradient_of_the_toy_operator():
    from tests.models.layers import smooth_gate

    torch.manual_seed(0)
    inputs = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda x, gate: smooth_gate(x, gate, 1.5), inputs)
    torch.library.opcheck(smooth_gate, (*inputs, 1.5))
