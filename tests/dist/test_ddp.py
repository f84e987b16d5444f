"""The loop and the comparison on real ranks: DDP agrees where a mean of means is right, and is caught where not."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.equality import compare, reference_run, train
from tests.models import CASES


def train_ddp(rank, world, name):
    case = CASES[name]
    module, make_batch, loss_from = case.build()
    ddp = DistributedDataParallel(module)

    def local(step, rows):
        return case.local_rows(make_batch(step, rows), rows, rank, world)

    run = train(ddp, local, loss_from, steps=2, rows=case.rows)
    prefix = "module."
    run.losses.clear()  # each rank's own
    for values in (run.parameters, *run.gradients):
        for key in list(values):
            values[key.removeprefix(prefix)] = values.pop(key)
    return run


@pytest.mark.parametrize("name", ["gpt", "mlp", "gpt_tied"])
def test_ddp_equals_one_process(ranks, name):
    reference = reference_run(CASES[name], steps=2)
    reference.losses.clear()
    for run in ranks.run(train_ddp, name):
        compare(run, reference)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("name", ["ignored_labels", "moe"])
def test_ddp_differs_where_the_loss_is_no_mean_over_rows(ranks, name):
    reference = reference_run(CASES[name], steps=2)
    reference.losses.clear()
    for run in ranks.run(train_ddp, name):
        with pytest.raises(AssertionError, match="step 0: gradient of|parameter"):
            compare(run, reference)
