"""The planner against brute force, its certificate, determinism, and what it does when the solver fails."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from shardwise.errors import MemoryLimitError
from shardwise.plan import limited, unlimited
from shardwise.plan.ascent import Ascent
from shardwise.plan.certificate import check
from shardwise.plan.evaluate import Assignment, evaluate
from shardwise.plan.fold import fold
from shardwise.plan.formulate import Formulation, all_kept
from shardwise.plan.network import MICRO, build_network, expand, reduce
from shardwise.plan.planner import optimise
from shardwise.plan.price import Relaxed, relax
from shardwise.plan.rounding import Around, mend
from shardwise.plan.unlimited import tighten

from .small_problems import all_plans, random_problem

MESHES = ((2,), (2, 2))
SEEDS = range(20)
PER_SEED = 5


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_brute_force(seed: int, mesh: tuple[int, ...]) -> None:
    """200 problems; in each the unlimited one, one whose limit binds, and one that is infeasible."""
    for k in range(PER_SEED):
        problem = random_problem(seed * PER_SEED + k, mesh)
        plans = all_plans(problem)
        best = min(e.seconds for _, e in plans)
        outcome = optimise(problem)
        assert outcome.status == "optimal"
        assert outcome.evaluation.seconds == pytest.approx(best, rel=1e-6)
        assert outcome.certificate is not None
        assert check(problem, outcome.certificate()) <= best * (1 + 1e-9)
        least = min(e.peak_bytes for _, e in plans)
        peak = min(e.peak_bytes for _, e in plans if e.seconds <= best * (1 + 1e-9))
        rng = random.Random(seed)
        if peak > least:
            limit = rng.choice((least, (least + peak) // 2, peak - 1))
            fitting = min(e.seconds for _, e in plans if e.peak_bytes <= limit)
            limited = replace(problem, settings=replace(problem.settings, memory_limit_bytes=limit))
            outcome = optimise(limited)
            assert outcome.evaluation.peak_bytes <= limit
            assert outcome.evaluation.seconds == pytest.approx(fitting, rel=1e-6), (outcome.status, outcome.gap)
            assert outcome.bound_s <= fitting * (1 + 1e-6)
            assert outcome.status == "optimal"
        if k == 0:
            limited = replace(problem, settings=replace(problem.settings, memory_limit_bytes=least - 1))
            with pytest.raises(MemoryLimitError) as error:
                optimise(limited)
            assert error.value.least_bytes == least


def test_certificate_proves_the_bound() -> None:
    """Where nothing had to be branched on, the prices prove the optimum itself."""
    proven = 0
    for seed in range(30):
        problem = random_problem(seed, (2, 2))
        outcome = optimise(problem)
        assert outcome.certificate is not None
        bound = check(problem, outcome.certificate())
        if outcome.nodes == 0:
            proven += 1
            assert bound == pytest.approx(outcome.evaluation.seconds, rel=1e-6)
    assert proven >= 20


def test_a_wrong_certificate_proves_less() -> None:
    problem = random_problem(1, (2,))
    outcome = optimise(problem)
    assert outcome.certificate is not None
    certificate = outcome.certificate()
    for prices in certificate.take.values():
        for layout in prices:
            prices[layout] += 1e-6
    assert check(problem, certificate) < outcome.evaluation.seconds


def test_folded_bounds_are_lower_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prices of a folded network prove a bound for the whole, after any number of rounds of colouring."""
    monkeypatch.setattr(unlimited, "LARGE", 0)
    for rounds in (1, 2, 3, None):
        monkeypatch.setattr(unlimited, "FOLD_ROUNDS", rounds)
        for seed in range(10):
            problem = random_problem(seed, (2,))
            best = min(e.seconds for _, e in all_plans(problem))
            outcome = optimise(problem)
            assert outcome.bound_s <= best * (1 + 1e-9) and outcome.evaluation.seconds >= best * (1 - 1e-9)
            assert outcome.certificate is not None
            assert check(problem, outcome.certificate()) == pytest.approx(outcome.bound_s, rel=1e-6)


SCRIPT = """
from tests.unit.small_problems import random_problem
from shardwise.plan.planner import optimise
for seed in range(6):
    a = optimise(random_problem(seed, (2, 2))).assignment
    print(a.chosen, sorted((n, str(q)) for n, q in a.kept))
"""


def test_deterministic() -> None:
    """Five times in one process, and in fresh processes with other hash seeds."""
    problem = random_problem(7, (2, 2))
    assert len({optimise(problem).assignment for _ in range(5)}) == 1
    outputs = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_sweeps_never_lower_the_bound() -> None:
    """Every sweep of the ascent keeps the prices feasible: the bound grows and never passes the optimum."""
    for seed in range(12):
        problem = random_problem(seed, (2, 2))
        best = min(e.seconds for _, e in all_plans(problem)) * MICRO
        network = reduce(build_network(problem))
        for rounds in (None, 1, 2):
            ascent = Ascent(fold(network, rounds))
            before = ascent.bound()
            for number in range(12):
                ascent.sweep(backwards=number % 2 == 1)
                now = ascent.bound()
                assert before * (1 - 1e-9) - 1e-9 <= now <= best * (1 + 1e-9)
                before = now


def test_what_is_dropped_is_in_no_better_plan() -> None:
    """The program that the prices leave has the optimum of the whole as long as that is within the margin."""
    for seed in range(12):
        problem = random_problem(seed, (2, 2))
        network = reduce(build_network(problem))
        whole = relax(Formulation(problem, network, fold(network, None), limited=False)).bound
        ascent = Ascent(fold(network, None))
        for _ in range(3):
            ascent.sweep(backwards=False)
            ascent.sweep(backwards=True)
        plans = (e.seconds * MICRO for _, e in all_plans(problem))
        best = min(plans)
        left, _ = tighten(ascent, best - ascent.bound() + 1e-6)
        assert sum(map(len, left.cost)) <= sum(map(len, network.cost.values()))
        relaxed = relax(Formulation(problem, network, left, limited=False))
        assert whole * (1 - 1e-9) - 1e-9 <= relaxed.bound <= best * (1 + 1e-9)


def test_a_price_for_bytes_finds_plans_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no program is solved: the plan fits, the bound holds, and most are near the best."""
    monkeypatch.setattr(limited, "LARGE", 0)
    ratios = []
    for seed in range(30):
        problem = random_problem(seed, (2, 2))
        plans = all_plans(problem)
        least = min(e.peak_bytes for _, e in plans)
        peak = optimise(problem).evaluation.peak_bytes
        limit = (least + peak) // 2
        tight = replace(problem, settings=replace(problem.settings, memory_limit_bytes=limit))
        fitting = min(e.seconds for _, e in plans if e.peak_bytes <= limit)
        try:
            outcome = optimise(tight)
        except MemoryLimitError as error:
            assert error.least_bytes > limit
            continue
        assert outcome.evaluation.peak_bytes <= limit and outcome.bound_s <= fitting * (1 + 1e-9)
        ratios.append(outcome.evaluation.seconds / fitting)
    assert len(ratios) >= 25 and sorted(ratios)[len(ratios) // 2] <= 1.1, sorted(ratios)


def test_planning_prints_nothing() -> None:
    """Neither to stdout nor to stderr, from the first import on."""
    script = """
from tests.unit.small_problems import random_problem
from shardwise.plan.planner import optimise
assert optimise(random_problem(5, (2, 2))).status == "optimal"
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "" and run.stderr == ""


def test_solver_failure_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that finds nothing costs quality, never a crash."""
    monkeypatch.setattr(unlimited, "relax", lambda form: Relaxed("unknown", np.zeros(0), np.zeros(0), 0.0))
    problem = random_problem(3, (2,))
    outcome = optimise(problem)
    assert outcome.status == "fallback"
    assert outcome.evaluation.seconds < float("inf")
    assert outcome.bound_s <= outcome.evaluation.seconds


def test_mending_never_makes_a_plan_slower() -> None:
    """Vertices that read a value twice, and shared hubs, included."""
    for seed in range(40):
        problem = random_problem(seed, (2,))
        network = reduce(build_network(problem))
        rng = random.Random(seed)
        chosen = {k: rng.randrange(len(cost)) for k, cost in network.cost.items()}
        seconds = []
        for choice in (chosen, mend(Around(network), chosen)):
            full = expand(network, choice)
            complete = tuple(full[k] for k in range(len(problem.vertices)))
            seconds.append(evaluate(problem, Assignment(complete, all_kept(problem, complete))).seconds)
        assert seconds[1] <= seconds[0] * (1 + 1e-9)
