"""What the planner finds by itself on described clusters, and that a Plan is data."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.api import memory_bytes, plan_model
from shardwise.errors import ConstraintError, InputError, MemoryLimitError
from shardwise.ir.placement import R, Shard, format_layout
from shardwise.plan.limited import size_text
from shardwise.plan.plan import Plan
from tests.dist.toys import fast


class ConvNorm(nn.Module):
    """Two convolutions with batch norms in training mode, and a classifier."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x, labels):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Vocabulary(nn.Module):
    """An embedding and a head over a vocabulary far larger than the width."""

    def __init__(self, words=50_000, width=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)

    def forward(self, tokens, labels):
        return F.cross_entropy(self.head(self.embed(tokens)), labels)


def moved(planned, phases=("forward", "backward")):
    """(value, elements) of every resharding that communicates."""
    return [
        (t.value, planned.graph.values[t.value].numel)
        for t in planned.plan.transfers
        if t.phase in phases and any(k not in ("slice", "zero") for k in t.kinds)
    ]


def meta(*shape, dtype=None):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_data_parallel_of_conv_and_batch_norm_moves_channels_only():
    example = (meta(256, 3, 128, 128), meta(256, dtype=torch.long))
    planned = plan_model(ConvNorm(), example, mesh=(8,), cluster="a100x8", constraints={"input 0": "S0"})
    assert planned.plan.flops_share == pytest.approx(1 / 8, rel=1e-3)
    largest_parameter = max(p.numel() for p in ConvNorm().parameters())
    pooled = 256 * 32
    assert max(n for _, n in moved(planned)) <= max(largest_parameter, pooled)
    norms = [(v, n) for v, n in moved(planned, ("forward",)) if n <= 32]
    assert len(norms) == 4, "two sums of channels per norm"


def test_a_cross_entropy_split_over_the_vocabulary_moves_tokens_only():
    example = (meta(512, dtype=torch.long), meta(512, dtype=torch.long))
    wishes = {"head.weight": "S0", "embed.weight": "S0"}
    planned = plan_model(Vocabulary(words=1_000_000), example, mesh=(8,), cluster="a100x8", constraints=wishes)
    assert planned.plan.flops_share == pytest.approx(1 / 8, rel=1e-3)
    assert max(n for _, n in moved(planned)) <= 512 * 64, moved(planned)
    assert {n for _, n in moved(planned, ("forward",))} <= {512 * 64, 512, 1}


def test_a_plan_is_data():
    plan = sw.plan(ConvNorm(), (meta(64, 3, 32, 32), meta(64, dtype=torch.long)), mesh=(2, 4), cluster="a100x8")
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.fingerprint == plan.fingerprint and str(again) == str(plan)
    assert "head.weight" in plan.explain("head.weight")
    with pytest.raises(KeyError, match=r"head\.weight"):
        plan.explain("head.weigth")
    for broken in ("", "{}", plan.to_json().replace('"S', '"Q'), plan.to_json()[:-40]):
        if broken != plan.to_json():
            with pytest.raises(ValueError, match=r".+"):
                Plan.from_json(broken)


def test_planning_is_deterministic():
    example = (meta(512, dtype=torch.long), meta(512, dtype=torch.long))
    prints = {sw.plan(Vocabulary(), example, mesh=(2, 4), cluster="a100x8").fingerprint for _ in range(3)}
    assert len(prints) == 1


def test_a_memory_limit_splits_the_parameters_and_names_the_least():
    example = (meta(512, dtype=torch.long), meta(512, dtype=torch.long))
    free = sw.plan(Vocabulary(), example, mesh=(8,), cluster="a100x8")
    with pytest.raises(MemoryLimitError, match="the least that would do") as caught:
        sw.plan(Vocabulary(), example, mesh=(8,), cluster="a100x8", memory_limit=1000)
    least = caught.value.least_bytes
    enough = sw.plan(Vocabulary(), example, mesh=(8,), cluster="a100x8", memory_limit=int(least * 1.01) + 1)
    assert enough.peak_bytes <= least * 1.01 + 1
    middle = (least + free.peak_bytes) // 2
    tight = sw.plan(Vocabulary(), example, mesh=(8,), cluster="a100x8", memory_limit=middle)
    assert tight.peak_bytes <= middle and tight.seconds >= free.seconds * (1 - 1e-9)


def test_a_mesh_shape_that_does_not_fit_leaves_the_others():
    """Pieces of 12 rows on 8 devices are of 2, so that one axis needs more memory than two."""
    model, example = nn.Linear(12, 12, bias=False), (meta(12, 12),)

    def least(mesh):
        with pytest.raises(MemoryLimitError, match="the least that would do") as caught:
            sw.plan(model, example, mesh=mesh, cluster="a100x8", memory_limit=100)
        return caught.value

    one, two, three = (least(mesh) for mesh in ((8,), (4, 2), (2, 2, 2)))
    assert one.least_bytes > two.least_bytes >= three.least_bytes and one.mesh == (8,)
    any_mesh = least(None)
    assert any_mesh.least_bytes == three.least_bytes
    words = f"least that would do is {size_text(any_mesh.least_bytes, up=True)}, on mesh {any_mesh.mesh}"
    assert words in str(any_mesh)
    assert least(any_mesh.mesh).least_bytes == any_mesh.least_bytes, "the mesh that it names"
    plan = sw.plan(model, example, cluster="a100x8", memory_limit=one.least_bytes - 1)
    assert len(plan.mesh) > 1 and plan.peak_bytes < one.least_bytes
    wish = sw.plan(model, example, cluster="a100x8", constraints={"weight": "[S0, S0, S1]"})
    assert wish.mesh == (2, 2, 2), "the shapes with as many axes"


@pytest.mark.parametrize(
    ("nbytes", "down", "up"),
    [
        (1, "1 B", "1 B"),
        (1023, "1023 B", "1023 B"),
        (1024, "1.000 KiB", "1.000 KiB"),
        (1025, "1.000 KiB", "1.001 KiB"),
        ((1 << 20) - 1, "1023.999 KiB", "1024.000 KiB"),
        (7 * 2**20 // 2, "3.500 MiB", "3.500 MiB"),
        (1 << 30, "1.000 GiB", "1.000 GiB"),
        (5 << 40, "5120.000 GiB", "5120.000 GiB"),
    ],
)
def test_sizes_in_words(nbytes, down, up):
    assert (size_text(nbytes), size_text(nbytes, up=True)) == (down, up)
    assert memory_bytes(down) <= nbytes <= memory_bytes(up), "the least fits where it is handed back as the limit"


@pytest.mark.parametrize("mesh", ["8", (8.0,), 8.0, ("8",), True, {8: 1}, b"8"])
def test_a_mesh_of_no_whole_numbers_is_refused(mesh):
    with pytest.raises(InputError, match="mesh: expected a DeviceMesh, a shape such as"):
        sw.plan(nn.Linear(8, 8), (meta(8, 8),), mesh=mesh, cluster="a100x8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a placement such as 'S0', 'R' or '!R', got ''"),
        (" ", "expected a placement"),
        (None, "expected a placement such as 'S0', 'R' or '!R', got None"),
        ("[S0", "a bracket is open"),
        ("!", "not a placement: ''"),
        ("[]", "has 0 axes, the mesh has 1"),
    ],
)
def test_a_wish_that_is_no_layout_is_refused(text, message):
    with pytest.raises(InputError, match=r"constraints\['weight'\]") as caught:
        sw.plan(nn.Linear(8, 8), (meta(8, 8),), mesh=8, cluster="a100x8", constraints={"weight": text})
    assert message in str(caught.value)


def test_wishes_are_kept_or_refused():
    example = (meta(64, 3, 32, 32), meta(64, dtype=torch.long))
    plan = sw.plan(ConvNorm(), example, mesh=(8,), cluster="a100x8", constraints={"head.weight": "S1"})
    assert plan.layouts["head.weight"] == (Shard(1),)
    plan = sw.plan(ConvNorm(), example, mesh=(8,), cluster="a100x8", constraints={"head.weight": "!R"})
    assert plan.layouts["head.weight"] != (R,)
    refused = (
        ({"head.weight": "S7"}, ConstraintError),
        ({"head.weight": "Q"}, InputError),
        ({"head.weight": "[S0, S1]"}, InputError),
        ({"head.wait": "S0"}, InputError),
    )
    for wish, error in refused:
        with pytest.raises(error, match=r"head\.weight"):
            sw.plan(ConvNorm(), example, mesh=(8,), cluster="a100x8", constraints=wish)
    with pytest.raises(InputError, match="8"):
        sw.plan(ConvNorm(), example, mesh=(3,), cluster="a100x8")


class Pair(nn.Module):
    """Two small outputs, which come whole where nobody asks for anything else."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)

    def forward(self, x):
        return self.up(x), self.up(x).mean()


WISHES = {
    "output 0": {"S0": ["S0"], "S1": ["S1"], "R": ["R"], "!R": ["S0", "S1"], "!S0": ["R", "S1"]},
    "input 0": {"S0": ["S0"], "S1": ["S1"], "R": ["R"], "!R": ["S0", "S1"], "!S1": ["R", "S0"]},
}


@pytest.mark.parametrize(("path", "wish"), [(p, w) for p, wishes in WISHES.items() for w in wishes])
def test_wishes_for_inputs_and_outputs_are_kept(path, wish):
    plan = sw.plan(Pair(), (meta(8, 6),), mesh=(2,), cluster=fast(2), constraints={path: wish})
    kind, number = path.split()
    (found,) = (x for k, p, x in (*plan.inputs, *plan.outputs) if (k, p) == (kind, number))
    assert format_layout(found) in WISHES[path][wish]


def test_what_an_output_cannot_be_is_refused():
    for wish in ({"output 1": "!R"}, {"output 1": "S0"}, {"output 0": "S2"}, {"input 0": "S2"}):
        with pytest.raises(ConstraintError, match=next(iter(wish))):
            sw.plan(Pair(), (meta(8, 6),), mesh=(2,), cluster=fast(2), constraints=wish)


def test_without_a_mesh_the_planner_chooses_its_shape():
    example = (meta(512, dtype=torch.long), meta(512, dtype=torch.long))
    chosen = sw.plan(Vocabulary(words=5_000), example, cluster="a100x8")
    assert torch.Size(chosen.mesh).numel() == 8
    for shape in ((8,), (2, 4)):
        assert chosen.seconds <= sw.plan(Vocabulary(words=5_000), example, mesh=shape, cluster="a100x8").seconds
