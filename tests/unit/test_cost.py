"""Costs against values worked out by hand."""

import pytest

from shardwise.cluster import COLLECTIVES, AxisLink, Cluster, Device
from shardwise.cost import bytes_on_wire, collective_s, roofline_s

LINK = AxisLink(4, 1e-6, 1e9)  # 1 us a message, 1 ns a byte


@pytest.mark.parametrize(
    ("kind", "wire_bytes", "seconds"),
    [
        ("all_gather", 3000, 3e-6 + 3e-6),
        ("reduce_scatter", 3000, 3e-6 + 3e-6),
        ("all_reduce", 6000, 6e-6 + 6e-6),
        ("all_to_all", 750, 3e-6 + 0.75e-6),  # each rank holds 1000 and keeps a quarter of it
    ],
)
def test_collectives_by_hand(kind, wire_bytes, seconds):
    assert bytes_on_wire(kind, 4000, 4) == pytest.approx(wire_bytes)
    assert collective_s(kind, 4000, LINK) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_group_of_one_costs_nothing(kind):
    assert bytes_on_wire(kind, 1 << 30, 1) == 0
    assert collective_s(kind, 1 << 30, AxisLink(1, 1.0, 1.0, {kind: (1.0, 1.0)})) == 0


def test_a_fit_replaces_the_formula_of_its_kind_only():
    link = AxisLink(4, 1e-6, 1e9, {"all_gather": (1e-3, 1e-6)})
    assert collective_s("all_gather", 4000, link) == pytest.approx(1e-3 + 3000e-6)
    assert collective_s("all_reduce", 4000, link) == collective_s("all_reduce", 4000, LINK)


def test_identities_between_collectives():
    one_way = collective_s("reduce_scatter", 1 << 20, LINK) + collective_s("all_gather", 1 << 20, LINK)
    assert collective_s("all_reduce", 1 << 20, LINK) == pytest.approx(one_way)
    # Moving shards is far cheaper than gathering them: by the group's size once latency is negligible.
    ratio = collective_s("all_gather", 1 << 30, LINK) / collective_s("all_to_all", 1 << 30, LINK)
    assert ratio == pytest.approx(4, rel=1e-4)


def test_costs_over_a_real_description():
    data, tensor = Cluster.load("a800x32").axes((4, 8))
    assert collective_s("all_reduce", 1 << 26, data) > collective_s("all_reduce", 1 << 26, tensor)
    # 64 MiB over 8 ranks at 160 GB/s: 14 messages of 1.9 us and 7/4 of the bytes.
    assert collective_s("all_reduce", 1 << 26, tensor) == pytest.approx(14 * 1.9e-6 + 1.75 * (1 << 26) / 160e9)


def test_roofline_by_hand():
    device = Device("d", {"float32": 1e12, "bfloat16": 4e12}, 1 << 30, 1e11, 1e-6)
    assert roofline_s(1e9, 1e6, "float32", device) == pytest.approx(1e-3 + 1e-6)  # bound by arithmetic
    assert roofline_s(1e9, 1e6, "bfloat16", device) == pytest.approx(0.25e-3 + 1e-6)
    assert roofline_s(1e6, 1e9, "float32", device) == pytest.approx(1e-2 + 1e-6)  # bound by memory
    assert roofline_s(0, 0, "int64", device) == pytest.approx(1e-6)
