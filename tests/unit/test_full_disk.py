"""A disk that is full when the caches are written: training goes on, nothing half-written stays, the next start works.

The kernel itself refuses the writes: under a limit on the size of files every write beyond it fails, after a part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TRAINS = """
import json, resource, signal, sys, warnings
limit = int(sys.argv[1])
import torch, shardwise as sw
from tests.models import CASES
torch.set_num_threads(1)
if limit >= 0:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails as on a full disk, with an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    losses = []
    for name in ("toy_op", "nested_regions"):  # one operator to discover; one program that draws
        module, make_batch, loss_from = CASES[name].build()
        args, kwargs = make_batch(0, 8)
        model = sw.parallelize(module, args, example_kwargs=kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        for step in range(3):
            args, kwargs = make_batch(step, 8)
            loss = loss_from(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
texts = [str(w.message) for w in caught if "shardwise" in w.filename or "/shardwise/" in str(w.message)]
print("RESULT", json.dumps([losses, texts, model._shardwise.origin.plan_cached]))
"""


def train(cache: Path, limit: int) -> tuple[list[float], list[str], bool]:
    """Three steps of two models in a process of its own; `limit` in bytes a file, -1 for none."""
    environment = {**os.environ, "SHARDWISE_CACHE": str(cache), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", TRAINS, str(limit)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [x for x in run.stdout.splitlines() if x.startswith("RESULT ")]
    losses, texts, cached = json.loads(line.removeprefix("RESULT "))
    return losses, texts, cached


@pytest.mark.parametrize(
    "limit", [pytest.param(0, id="nothing fits", marks=pytest.mark.full), pytest.param(300, id="a part fits")]
)
def test_a_full_disk_does_not_stop_training(tmp_path, limit):
    cache = tmp_path / "cache"
    losses, texts, _ = train(cache, limit)
    for what in ("the rule cache", "the plan", "the measured cluster"):
        found = [t for t in texts if t.startswith(what)]
        assert found and all("cannot be written" in t and "File too large" in t for t in found), (what, texts)
    left = [p for p in cache.rglob("*") if p.is_file() and p.stat().st_size > 0 and "random" not in p.name]
    assert not [p for p in left if p.suffix not in (".lock",)], left
    # The disk has room again: the same numbers, no complaint, and the caches are there.
    again, texts, cached = train(cache, -1)
    assert again == losses and not texts and not cached
    again, texts, cached = train(cache, -1)
    assert again == losses and not texts and cached
