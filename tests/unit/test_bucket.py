"""Small gradients share buffers, and what the planner charges for them is what the program does."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.api import plan_model
from shardwise.cluster import AxisLink, Device, Level
from shardwise.cost.collectives import BUFFER_BYTES, SHARED_BYTES, collective_s
from shardwise.ir.graph import BACKWARD
from shardwise.ir.passes import leaving
from shardwise.plan.reshard import Resharding
from shardwise.pytorch.buffers import plan_buffers, writing
from shardwise.spmd.bucket import bucket_gradients, late_views
from shardwise.spmd.device import device_program
from shardwise.spmd.lower import lower
from shardwise.spmd.split import split

ALPHA_S, BYTES_PER_S = 1e-3, 1e9
DEVICE = Device("slow links", {"float32": 1e11}, 1 << 34, 1e10, 1e-6)
CLUSTER = sw.Cluster("slow links", DEVICE, (Level("link", 2, ALPHA_S / 2, BYTES_PER_S),), "described")


class Layers(nn.Module):
    """Six small layers and one with a large weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 40_000))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def planned():
    """Data parallel."""
    model = Layers().to("meta")
    names = [name for name, _ in model.named_parameters()]
    wishes = dict.fromkeys(names, "R") | {"input 0": "S0"}
    return plan_model(model, (torch.randn(1 << 16, 32, device="meta"),), mesh=(2,), cluster=CLUSTER, constraints=wishes)


def reductions(graph):
    return [n for n in graph.nodes if n.op.startswith("comm.all_reduce") and n.phase == BACKWARD]


def test_a_small_all_reduce_pays_its_part_of_a_buffers_latency():
    link = AxisLink(2, ALPHA_S / 2, BYTES_PER_S, shared_buffers=True)
    plain = AxisLink(2, ALPHA_S / 2, BYTES_PER_S)
    n = BUFFER_BYTES // 8
    assert collective_s("all_reduce", n, link) == pytest.approx(ALPHA_S / 8 + n / BYTES_PER_S)
    assert collective_s("all_reduce", n, plain) == pytest.approx(ALPHA_S + n / BYTES_PER_S)
    for kind, size in (("all_reduce", SHARED_BYTES + 1), ("all_gather", n), ("reduce_scatter", n)):
        assert collective_s(kind, size, link) == collective_s(kind, size, plain)


def test_gradients_leave_and_what_backward_reads_does_not(planned):
    graph = planned.graph
    left = leaving(graph)
    gradients = {o.name for o in graph.outputs_of("gradient") if o.name is not None}
    assert gradients <= left
    views = {n.name for n in graph.nodes if all(v is None or v.alias for v in n.results)}
    read = {name for n in graph.nodes if n.name not in views for name in n.operands}
    assert not left & read


def test_small_gradients_travel_together_and_the_plan_says_so(planned):
    plan = planned.plan
    resharding = Resharding(plan.mesh, CLUSTER.axes(plan.mesh))
    graph = late_views(lower(planned.graph, planned.rules, plan, resharding, (0,)))
    together = bucket_gradients(graph)
    before, after = reductions(graph), reductions(together)
    assert len(before) == 14, "a weight and a bias of seven layers"
    sizes = sorted(len(n.results) for n in after)
    assert sizes == [1, 13], "all but the large weight share one buffer"
    assert len(after[0].results) == 1, "the large one is made first, and starts at once"
    made = {v.name for n in before for v in n.results if v is not None}
    assert {v.name for n in after for v in n.results if v is not None} == made

    moved = sum(v.nbytes for n in before for v in n.results if v is not None)
    small = sum(n.results[0].nbytes for n in before if n.results[0].nbytes <= SHARED_BYTES)
    charged = sum(t.seconds for t in plan.transfers if t.phase == "backward" and "all_reduce" in t.kinds)
    # On two ranks an all-reduce puts its bytes on the wire once.
    assert charged == pytest.approx(ALPHA_S * (1 + small / BUFFER_BYTES) + moved / BYTES_PER_S, rel=1e-3)


def test_a_reduction_stands_behind_the_maker_of_its_last_operand(planned):
    plan = planned.plan
    resharding = Resharding(plan.mesh, CLUSTER.axes(plan.mesh))
    graph = device_program(planned.graph, planned.rules, plan, resharding, (0,))
    for k, node in enumerate(graph.nodes):
        if node in reductions(graph):
            assert max(graph.producer[name] for name in node.operands) in (k - 1, k - 2)


def test_gradients_are_made_inside_their_buffer(planned):
    plan = planned.plan
    resharding = Resharding(plan.mesh, CLUSTER.axes(plan.mesh))
    graph = split(device_program(planned.graph, planned.rules, plan, resharding, (0,))).backward
    assert graph is not None
    buffers = plan_buffers(graph)
    (buffer,) = buffers.sent.values()
    places = sorted((s.start, s.stop) for s in buffer.slots)
    assert places[0][0] == 0 and places[-1][1] == buffer.numel
    assert all(a[1] == b[0] for a, b in zip(places, places[1:])), "no gap, no overlap"
    assert len(buffers.made_in) == 13
    makers = [graph.nodes[graph.producer[name]] for name in buffers.made_in]
    assert all(writing(node) is not None for node in makers), "products and sums have a variant with out="
    assert [b for k in buffers.begins.values() for b in k] == [buffer]
    assert min(graph.producer[name] for name in buffers.made_in) in buffers.begins
