from __future__ import annotations

import copy
import re

import pytest
import torch

from tests.equality import compare, reference_run, train
from tests.models import CASES


@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_and_repeats(name):
    run = reference_run(CASES[name], steps=3)
    assert all(loss.isfinite() for loss in run.losses)
    assert compare(reference_run(CASES[name], steps=3), run) == 0.0


@pytest.fixture
def runs():
    reference = reference_run(CASES["buffers"], steps=2)
    return copy.deepcopy(reference), reference


def test_names_what_differs_and_by_how_much(runs):
    result, reference = runs
    result.parameters["second.weight"][2, 3] += 1e-6
    with pytest.raises(AssertionError, match=r"1 of \d+ tensors differ.*\n  parameter second.weight: off by 1.000e-06"):
        compare(result, reference)
    with pytest.raises(AssertionError, match=r"at \[2, 3\] of \[5, 40\]"):
        compare(result, reference)
    assert 0 < compare(result, reference, tolerance=1e-3) < 1e-4


def test_rounding_passes(runs):
    result, reference = runs
    for values in (result.parameters, *result.gradients):
        for value in values.values():
            value += value.abs().max() * 1e-13
    assert 0 < compare(result, reference) < 1e-11


@pytest.mark.parametrize("name", CASES)
def test_an_error_of_a_millionth_in_any_parameter_is_caught(name):
    reference = reference_run(CASES[name], steps=2)
    result = copy.deepcopy(reference)
    for key, value in result.parameters.items():
        kept = value.clone()
        value *= 1 + 1e-6
        with pytest.raises(AssertionError, match=rf"1 of \d+ tensors differ.*\n  parameter {re.escape(key)}: "):
            compare(result, reference)
        value.copy_(kept)
    assert compare(result, reference) == 0.0


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_of_another_scale_is_caught_in_any_parameter(name):
    reference = reference_run(CASES[name], steps=1)
    result = copy.deepcopy(reference)
    for key, value in result.gradients[0].items():
        if value is None:
            continue
        for scale in (0.5, 2.0, 1 + 1e-5):  # a mean taken twice, a sum of both ranks, a count that is a little off
            kept = value.clone()
            value *= scale
            with pytest.raises(AssertionError, match=rf"step 0: gradient of {re.escape(key)}: "):
                compare(result, reference)
            value.copy_(kept)


def test_rounding_of_a_parameter_that_is_zero_in_theory_passes_and_a_gradient_there_does_not(runs):
    result, reference = runs
    norm = sum(g.square().sum() for g in reference.gradients[1].values()) ** 0.5
    for run in runs:
        run.parameters["first.bias"].zero_()
    reference.parameters["first.bias"][3] = 1e-17 * norm
    compare(result, reference)
    result.parameters["first.bias"][3] = 1e-12 * norm  # a step at a learning rate of 0.1 on 1e-11 of the gradients
    with pytest.raises(AssertionError, match=r"parameter first\.bias"):
        compare(result, reference)


def test_a_gradient_is_measured_by_the_global_norm(runs):
    result, reference = runs
    norm = sum(g.square().sum() for g in reference.gradients[1].values()) ** 0.5
    result.gradients[1]["first.bias"][0] += 0.5e-9 * norm
    compare(result, reference)
    result.gradients[1]["first.bias"][0] += 1e-9 * norm
    with pytest.raises(AssertionError, match=r"step 1: gradient of first\.bias"):
        compare(result, reference)


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda r: r.losses.__setitem__(1, r.losses[1] * float("nan")), "loss of step 1: off by nan"),
        (lambda r: r.losses.pop(), "losses: 1 steps, reference has 2"),
        (lambda r: r.buffers["steps"].add_(1), "buffer steps: 1 of 1 elements differ"),
        (lambda r: r.gradients[0].__setitem__("first.bias", None), "step 0: gradient of first.bias: none"),
        (lambda r: r.parameters.pop("first.bias"), "parameter first.bias: missing"),
        (lambda r: r.parameters.__setitem__("extra", torch.ones(1)), "parameter extra: not in the reference"),
        (lambda r: r.buffers.__setitem__("scale", torch.ones(3)), "buffer scale: torch.float32"),
    ],
)
def test_nothing_else_passes(runs, spoil, text):
    result, reference = runs
    spoil(result)
    with pytest.raises(AssertionError) as caught:
        compare(result, reference)
    assert text in str(caught.value)


def test_a_mean_of_means_over_uneven_labels_is_caught():
    case = CASES["ignored_labels"]
    reference = reference_run(case, steps=1)
    module, make_batch, loss_from = case.build()

    class HalfByHalf(torch.nn.Module):
        """What data parallelism that averages the ranks' losses would compute."""

        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, *args):
            halves = [case.local_rows((args, {}), case.rows, rank, 2)[0] for rank in range(2)]
            return sum(self.inner(*half) for half in halves) / 2

        def named_parameters(self, *args, **kwargs):
            return self.inner.named_parameters(*args, **kwargs)

    result = train(HalfByHalf(), make_batch, loss_from, steps=1, rows=case.rows)
    assert not torch.allclose(result.losses[0], reference.losses[0], rtol=1e-6)
    with pytest.raises(AssertionError, match="59 of 59 tensors differ"):
        compare(result, reference)
