"""Every class of torch.optim on sharded parameters: equal to one process, or refused with the reason in the table."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from shardwise.errors import UnsupportedError
from shardwise.pytorch.optimizers import NOT_FUSED, REFUSED
from tests.dist.pool import run_world
from tests.dist.toys import Net, batch, make, pair, parallel, same

ALL = sorted(
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
)
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
NO_FOREACH = {"LBFGS", "Muon", "SparseAdam"}


def variants(name):
    """Options that a class offers."""
    found = [{}]
    if name not in NO_FOREACH:
        found += [{"foreach": True}, {"foreach": False}]
    if name in FUSED:
        found.append({"fused": True})
    return found


def options(name):
    """Arguments that make every term of the formula count."""
    extra = {
        "Adam": {"weight_decay": 0.1, "amsgrad": True},
        "AdamW": {"amsgrad": True},
        "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "RMSprop": {"centered": True, "momentum": 0.5},
        "LBFGS": {},
    }
    return {"lr": 0.05, **extra.get(name, {})}


def steps(module, optimizer):
    for step in range(4):
        optimizer.zero_grad()
        module(*batch(step)).backward()
        optimizer.step()


def equal_or_refused(rank, world, names):
    found = {}
    model = pair(world, Net, every=True)
    assert all(p.placements[0].is_shard() for p in model[1].parameters())
    for name in names:
        for variant in variants(name):
            plain, ours = copy.deepcopy(model)
            kind = getattr(torch.optim, name)
            mine = kind(ours.parameters(), **options(name), **variant) if name != "Muon" else None
            refused = name in REFUSED or (name in NOT_FUSED and variant.get("fused"))
            if refused:
                if mine is None:
                    mine = kind([p for p in ours.parameters() if p.ndim == 2], lr=0.05)
                before = [p.to_local().clone() for p in ours.parameters()]
                with pytest.raises(UnsupportedError, match=name):
                    ours(*batch()).backward()
                    mine.step((lambda: torch.tensor(0.0)) if name == "LBFGS" else None)
                assert all(torch.equal(a, p.to_local()) for a, p in zip(before, ours.parameters()))
            else:
                steps(plain, kind(plain.parameters(), **options(name), **variant))
                steps(ours, mine)
                same(ours, plain, 1e-9)
            found[f"{name} {variant}"] = "refused" if refused else "equal"
    return found


def test_every_optimizer_two_ranks():
    found = run_world(2, equal_or_refused, ALL, timeout=300)[0]
    assert {k.split()[0] for k in found} == set(ALL)


def whole_parameters(rank, world):
    """What is refused on pieces works where the plan keeps the parameters whole."""
    model = make(Net)
    wishes = {name: "R" for name, _ in model.named_parameters()}
    model = model, parallel(copy.deepcopy(model), world, batch(), constraints=wishes)
    assert model[1].plan.flops_share <= 0.6
    for name, variant in (("Adafactor", {}), ("LBFGS", {}), ("Muon", {}), ("Rprop", {"foreach": False})):
        plain, ours = copy.deepcopy(model)
        for module in (plain, ours):
            parameters = [p for p in module.parameters() if name != "Muon" or p.ndim == 2]
            optimizer = getattr(torch.optim, name)(parameters, lr=0.05, **variant)
            for step in range(3):
                optimizer.zero_grad()
                if name == "LBFGS":
                    optimizer.step(lambda o=optimizer, m=module, s=step: closure(o, m, s))
                else:
                    module(*batch(step)).backward()
                    optimizer.step()
        same(ours, plain, 1e-6 if name == "Muon" else 1e-9)  # Muon works in bfloat16


def closure(optimizer, module, step):
    optimizer.zero_grad()
    loss = module(*batch(step))
    loss.backward()
    return loss


def test_some_optimizers_four_ranks():
    run_world(4, equal_or_refused, ["AdamW", "SGD", "Adafactor"], timeout=200)


def built_before(rank, world):
    plain = make(Net)
    optimizer = torch.optim.AdamW(plain.parameters())
    ours = parallel(plain, world, batch())
    ours(*batch()).backward()
    with pytest.raises(UnsupportedError, match="built before parallelize"):
        optimizer.step()
    late = torch.optim.SGD([ours.up.weight], lr=0.1)
    late.step()
    late.add_param_group({"params": optimizer.param_groups[0]["params"][:1]})
    with pytest.raises(UnsupportedError, match="built before parallelize"):
        late.step()
    other = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])
    other.step(lambda: torch.tensor(0.0))


def scheduled(rank, world):
    """Schedulers, parameter groups, state dict of the optimizer in the same run."""
    plain, ours = pair(world, Net, every=True)
    for module in (plain, ours):
        groups = [
            {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.2},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(5):
            module(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            (warm if step < 2 else decay).step()
            if step == 2:
                state = optimizer.state_dict()
                optimizer = torch.optim.AdamW(groups, lr=0.05)
                optimizer.load_state_dict(state)
                decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    same(ours, plain, 1e-9)


@pytest.mark.parametrize("check", [built_before, scheduled, whole_parameters], ids=lambda f: f.__name__)
def test_two_ranks(check):
    run_world(2, check)


def test_the_table_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    assert set(ALL) <= set(rows)
    for name in ALL:
        assert ("refused" in rows[name].split("|")[2]) == (name in REFUSED), rows[name]
        if name in REFUSED:
            assert REFUSED[name] in rows[name]
        if name in FUSED:
            assert ("refused" in rows[name].split("|")[4]) == (name in NOT_FUSED), rows[name]
