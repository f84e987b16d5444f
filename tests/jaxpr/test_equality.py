"""Steps on eight virtual devices against one device, in fp64.

XLA keeps any sharding equal, so the plans are those for links so fast that everything is split, and the test asserts
that the work was.
"""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="JAX is an optional extra: pip install 'shardwise[jax]'")

from .devices import on_devices
from .runs import compare, loops, uneven

pytestmark = pytest.mark.full  # minutes: rules are found by running, plans are for 8 devices

TOLERANCE = 1e-9
"""fp64, relative to the largest element: sums are rounded in another order."""
MESHES = ([8], [2, 4], [2, 2, 2])
DEFAULT = [
    ("conv", [8], "sgd"),
    ("gpt", [8], "adamw"),
    ("moe", [8], "sgd"),
    ("equinox", [8], "sgd"),
]
SHARE = {"equinox": 0.35, "moe": 0.2}
"""Work per device; where it is more than 0.15, operators over few rows stand in the way (a recurrent cell's gates of
width 8, positions in the queues of experts)."""


def check(model: str, mesh: list[int], optimizer: str) -> None:
    if model == "flax":
        pytest.importorskip("flax", reason="the model is Flax's: pip install flax")
    found = on_devices(compare, model, mesh, optimizer)
    assert found["difference"] < TOLERANCE
    assert found["shardings"]
    assert found["transfers"]
    assert found["share"] < SHARE.get(model, 0.16)


@pytest.mark.parametrize("model, mesh, optimizer", DEFAULT)
def test_a_sharded_step_equals_one_device(model, mesh, optimizer):
    check(model, mesh, optimizer)


REST = [
    (model, mesh, optimizer)
    for model in ("mlp", "conv", "gpt", "moe", "equinox", "flax")
    for mesh in MESHES
    for optimizer in ("adamw", "sgd")
    if (model, mesh, optimizer) not in DEFAULT
]


@pytest.mark.full
@pytest.mark.parametrize("model, mesh, optimizer", REST)
def test_every_model_on_every_mesh(model, mesh, optimizer):
    check(model, mesh, optimizer)


def test_constraints_and_donation():
    wishes = {"params.0.w": "[S0, S1]", "params.1.w": "[R, S0]"}
    found = on_devices(compare, "mlp", [2, 4], "adamw", 1000.0, wishes, None, True)
    assert found["difference"] < TOLERANCE and found["shardings"]
    assert "Shard(dim=0" in found["layouts"]["params.0.w"] and "Shard(dim=1" in found["layouts"]["params.0.w"]


@pytest.mark.full
def test_remat():
    found = on_devices(compare, "gpt", [8], "sgd", 1000.0, None, {"remat": True, "layers": 2})
    assert found["difference"] < TOLERANCE and found["share"] < 0.16


def test_loops_and_branches():
    assert max(on_devices(loops).values()) < TOLERANCE


@pytest.mark.full
def test_uneven_sizes_are_split_where_they_can_be():
    found = on_devices(uneven)
    assert found["difference"] < TOLERANCE
    assert found["share"] < 0.6  # of 30 rows and 18 columns, 2 devices get equal parts, 4 do not
