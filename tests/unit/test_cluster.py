"""Clusters: files refused with their line, presets, round trips, links of mesh axes, the probe, the fit."""

import json
import random
import re

import pytest

from shardwise.cluster import (
    AxisLink,
    Cluster,
    Device,
    Level,
    fit_alpha_beta,
    mesh_shapes,
    preset_names,
    probe_local,
    read_machine,
)
from shardwise.cluster.files import parse_text
from shardwise.cluster.lines import key_lines
from shardwise.cluster.units import parse_quantity
from shardwise.errors import ClusterFileError, InputError

GOOD = """\
# a comment, so that lines count
name = "tiny"
source = "made up"

[device]
name = "thing"
memory_bytes = "40GiB"
memory_bytes_per_s = "600GB/s"
launch_s = "10us"

[device.flops_per_s]
float32 = "19.5TFLOPS"
bfloat16 = 312e12

[[levels]]
name = "inner"
size = 4
alpha_s = 2e-6
bytes_per_s = "100GB/s"

[[levels]]
name = "outer"
size = 2
alpha_s = "5us"
bytes_per_s = "200Gbit/s"

[levels.fits.all_gather]
alpha_s = 0
beta_s_per_byte = 4e-11
"""

DEVICE = Device("d", {"float32": 1e12}, 1 << 30, 1e11, 1e-6)


def write(tmp_path, text, name="c.toml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def levels(*triples):
    return tuple(Level(f"l{i}", size, alpha, rate) for i, (size, alpha, rate) in enumerate(triples))


# Files


def test_a_good_file_in_base_units(tmp_path):
    cluster = Cluster.load(write(tmp_path, GOOD))
    assert cluster.device.memory_bytes == 40 * 2**30
    assert cluster.device.memory_bytes_per_s == 600e9
    assert cluster.device.launch_s == pytest.approx(10e-6)
    assert cluster.device.flops_per_s == {"float32": 19.5e12, "bfloat16": 312e12}
    assert [level.size for level in cluster.levels] == [4, 2]
    assert cluster.levels[1].bytes_per_s == 25e9
    assert cluster.levels[1].fits == {"all_gather": (0.0, 4e-11)}
    assert cluster.world_size == 8


def replaced(old, new):
    assert GOOD.count(old) >= 1
    return GOOD.replace(old, new, 1)


MALFORMED = {
    "unknown key at the root": (replaced('source = "made up"', 'source = "x"\nsorce = "y"'), 4, "sorce", "'source'"),
    "unknown key in the device": (replaced("launch_s", "lunch_s"), 9, "device.lunch_s", "'launch_s'"),
    "unknown dtype": (replaced("bfloat16", "bfloat61"), 13, "device.flops_per_s.bfloat61", "'bfloat16'"),
    "unknown key in the second level": (replaced('"5us"', '"5us"\nspeed = 1'), 25, "levels[1].speed", "bytes_per_s"),
    "unknown collective": (replaced("all_gather", "allgather"), 27, "levels[1].fits.allgather", "'all_gather'"),
    "missing key at the root": (replaced('name = "tiny"\n', ""), 1, "name", "missing"),
    "missing key in the device": (replaced('launch_s = "10us"\n', ""), 5, "device.launch_s", "missing"),
    "missing key in the second level": (replaced('bytes_per_s = "200Gbit/s"\n', ""), 21, "bytes_per_s", "missing"),
    "missing key in a fit": (replaced("beta_s_per_byte = 4e-11\n", ""), 27, "beta_s_per_byte", "missing"),
    "missing device": ('name = "x"\nsource = "y"\nlevels = []\n', 1, "device", "missing"),
    "text for a size": (replaced("size = 4", 'size = "4"'), 17, "levels[0].size", "whole number"),
    "boolean for a size": (replaced("size = 4", "size = true"), 17, "levels[0].size", "whole number"),
    "fraction for a size": (replaced("size = 2", "size = 2.5"), 23, "levels[1].size", "whole number"),
    "zero size": (replaced("size = 2", "size = 0"), 23, "levels[1].size", "at least 1"),
    "number for a name": (replaced('name = "thing"', "name = 3"), 6, "device.name", "text"),
    "empty name": (replaced('name = "tiny"', 'name = " "'), 2, "name", "text"),
    "list for a number": (replaced('"10us"', "[1]"), 9, "device.launch_s", "list"),
    "boolean for a number": (replaced('"10us"', "true"), 9, "device.launch_s", "boolean"),
    "table for a number": (replaced('"10us"', "{a = 1}"), 9, "device.launch_s", "table"),
    "number for a table": (GOOD[: GOOD.index("[levels.fits")] + "fits = 3", 27, "levels[1].fits", "table"),
    "negative number": (replaced("2e-6", "-2e-6"), 18, "levels[0].alpha_s", "positive"),
    "zero bandwidth": (replaced('"100GB/s"', "0"), 19, "levels[0].bytes_per_s", "positive"),
    "negative text": (replaced('"40GiB"', '"-40GiB"'), 7, "device.memory_bytes", "positive"),
    "infinity": (replaced("312e12", "inf"), 13, "device.flops_per_s.bfloat16", "positive"),
    "not a number": (replaced("312e12", "nan"), 13, "device.flops_per_s.bfloat16", "positive"),
    "a wrong unit": (replaced('"40GiB"', '"40GB/s"'), 7, "device.memory_bytes", "40GiB"),
    "a unit in the wrong case": (replaced('"40GiB"', '"40gib"'), 7, "device.memory_bytes", '"GiB"'),
    "no number at all": (replaced('"10us"', '"fast"'), 9, "device.launch_s", "10us"),
    "less than a byte": (replaced('"40GiB"', "0.25"), 7, "device.memory_bytes", "positive"),
    "no levels": (GOOD[: GOOD.index("[[levels]]")] + "", 1, "levels", "missing"),
    "an empty list of levels": ("levels = []\n" + GOOD[: GOOD.index("[[levels]]")], 1, "levels", "at least one"),
    "one table of levels": (GOOD.split("[[levels]]")[0] + "[levels]\nsize = 4", 15, "levels", "at least one"),
    "no flops": (GOOD.replace('float32 = "19.5TFLOPS"\nbfloat16 = 312e12\n', ""), 11, "device.flops_per_s", "at least"),
    "inline tables": (
        'name="x"\nsource="y"\ndevice = {name="d", memory_bytes=1, memory_bytes_per_s=1, launch_s=1,'
        " flops_per_s={float32=1}}\nlevels = [\n  {name='a', size=2, alpha_s=1, bytes_per_s=1},\n"
        "  # [[levels]]\n  {name='b', size=-2, alpha_s=1, bytes_per_s=1},\n]\n",
        7, "levels[1].size", "at least 1",
    ),
    "after a long text": (
        replaced('"made up"', '"""two\nsize = 3\n[x]"""').replace("size = 4", "size = 0"),
        19, "levels[0].size", "at least 1",
    ),
    "Windows line ends": (replaced("size = 4", "size = 0").replace("\n", "\r\n"), 17, "levels[0].size", "at least 1"),
    "a syntax error": (replaced("size = 4", "size = = 4"), 17, "size", "not TOML"),
    "a key given twice": (replaced("size = 4", "size = 4\nsize = 5"), 18, "size", "not TOML"),
    "an open text": (replaced('"thing"', '"thing'), 6, "name", "not TOML"),
    "not UTF-8": (GOOD.encode().replace(b"thing", b"th\xffng"), 6, "", "UTF-8"),
    "binary": (b"\x00\x01\x02", 1, "", "not TOML"),
    "absurd digits": (replaced("size = 4", "size = " + "9" * 9999), 17, "", "not a cluster file"),
    "an open list": (GOOD + "x = [\n", 31, "", "not TOML"),
    "an empty file": ("", 1, "name", "missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_names_file_line_and_key(tmp_path, case):
    text, line, key, hint = MALFORMED[case]
    path = write(tmp_path, text)
    with pytest.raises(ClusterFileError) as info:
        Cluster.load(path)
    message = str(info.value)
    assert message.startswith(f"{path}, line {line}"), message
    assert not message[len(f"{path}, line {line}")].isdigit(), message
    assert key in message and hint in message, message


def test_json_files_have_lines_too(tmp_path):
    data = Cluster.load(write(tmp_path, GOOD)).to_dict()
    text = json.dumps(data, indent=2)
    assert Cluster.load(write(tmp_path, text, "c.json")).to_dict() == data
    line = text.splitlines().index('      "size": 2,') + 1
    bad = text.replace('"size": 2', '"size": -2')
    with pytest.raises(ClusterFileError, match=rf"c\.json, line {line}, key 'levels\[1\]\.size'"):
        Cluster.load(write(tmp_path, bad, "c.json"))
    with pytest.raises(ClusterFileError, match=r"line 1: not JSON"):
        Cluster.load(write(tmp_path, "{", "c.json"))
    with pytest.raises(ClusterFileError, match=r"line 2, key 'name': given twice"):
        Cluster.load(write(tmp_path, '{"name": "a",\n"name": "b"}', "c.json"))
    with pytest.raises(ClusterFileError, match="expected a table"):
        Cluster.load(write(tmp_path, "[1]", "c.json"))


def test_damaged_files_raise_nothing_else():
    """Every key the scanner walks past must not break it, whatever stands there."""
    rng = random.Random(0)
    pieces = [*GOOD.split(), *"[]{}=\"',.#\n", '"""', "\\", "[[", "x.y", "1e999", "é", "\x85"]
    refused = 0
    for _ in range(1500):
        at, cut = rng.randrange(len(GOOD)), rng.randrange(12)
        text = GOOD[:at] + rng.choice(pieces) + GOOD[at + cut :]
        try:
            parse_text(text, "file", is_json=False)
        except ClusterFileError as error:
            refused += 1
            assert re.match(r"file, line \d+", str(error)) and 1 <= int(str(error).split()[2].strip(",:")) <= 99
    assert refused > 1000


def test_the_scanner_agrees_with_the_parser_on_keys():
    lines = key_lines(GOOD, is_json=False)
    source = GOOD.splitlines()
    assert source[lines["device", "launch_s"] - 1].startswith("launch_s")
    assert source[lines["levels", 1, "fits", "all_gather", "beta_s_per_byte"] - 1].startswith("beta")
    assert lines["levels", 0] == 15 and lines["levels", 1] == 21


def test_an_unknown_preset_lists_presets_and_the_closest():
    with pytest.raises(ClusterFileError, match=r"did you mean 'a100x8'\?.*cpu-gloo"):
        Cluster.load("a100x9")
    with pytest.raises(ClusterFileError, match="h100x64"):
        Cluster.load("/nowhere/at/all.toml")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ClusterFileError, match="is a folder"):
        Cluster.load(tmp_path)


def test_a_large_file_is_not_read(tmp_path):
    with pytest.raises(ClusterFileError, match="larger than"):
        Cluster.load(write(tmp_path, "#" * (2 << 20)))


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("40GiB", "bytes", 40 * 2**30),
        ("80 GB", "bytes", 80e9),
        ("12", "bytes", 12),
        ("600GB/s", "bytes_per_s", 600e9),
        ("800Gbps", "bytes_per_s", 100e9),
        ("10us", "s", 1e-5),
        ("3 ns", "s", 3e-9),
        ("1.5e-6", "s", 1.5e-6),
        ("312TFLOPS", "flops_per_s", 312e12),
        ("1.5 PFLOP/s", "flops_per_s", 1.5e15),
    ],
)
def test_quantities(text, unit, value):
    assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-12)


# Presets, round trips, fingerprints


def test_the_presets_are_those_promised():
    assert {"cpu-gloo", "a100x8", "a800x32", "h100x64"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_round_trip_and_say_their_source(name):
    cluster = Cluster.load(name)
    assert cluster.name == name and cluster.source
    again = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster and again.fingerprint() == cluster.fingerprint()
    assert hash(again) == hash(cluster)
    assert all(len(cluster.axes(shape)) == len(shape) for shape in cluster.mesh_shapes())


def test_worlds_of_the_presets():
    assert [Cluster.load(name).world_size for name in ("cpu-gloo", "a100x8", "a800x32", "h100x64")] == [2, 8, 32, 64]


def test_the_fingerprint_sees_values_not_spelling(tmp_path):
    one = Cluster.load(write(tmp_path, GOOD)).fingerprint()
    same = Cluster.load(write(tmp_path, replaced('"600GB/s"', "600_000_000_000"))).fingerprint()
    other = Cluster.load(write(tmp_path, replaced('"600GB/s"', "601e9"))).fingerprint()
    assert one == same != other and len(one) == 64


def test_scaled_links_are_described_and_faster():
    base = Cluster.load("cpu-gloo")
    fast = base.scaled(1000)
    assert "described" in fast.source and fast.device == base.device
    assert fast.levels[0].bytes_per_s == pytest.approx(1000 * base.levels[0].bytes_per_s)
    assert fast.levels[0].alpha_s == pytest.approx(base.levels[0].alpha_s / 1000)
    assert fast.levels[0].fits["all_reduce"] == pytest.approx([x / 1000 for x in base.levels[0].fits["all_reduce"]])
    assert Cluster.from_dict(fast.to_dict()) == fast
    with pytest.raises(InputError, match="link_factor"):
        base.scaled(0)


def test_dtypes_without_a_figure_fall_back():
    device = Device("d", {"float32": 2.0, "bfloat16": 4.0}, 1, 1.0, 1.0)
    expected = {"float64": 2.0, "torch.float16": 4.0, "float8_e4m3fn": 4.0, "int64": 2.0, "bool": 2.0, "complex64": 2.0}
    assert {dtype: device.flops_per_s_of(dtype) for dtype in expected} == expected


def test_senseless_parts_are_refused():
    with pytest.raises(InputError, match="bytes_per_s"):
        Level("x", 2, 1e-6, 0.0)
    with pytest.raises(InputError, match="float16"):
        Device("d", {"fp16": 1.0}, 1, 1.0, 1.0)
    with pytest.raises(InputError, match="level"):
        Cluster("c", DEVICE, (), "s")


# Links of mesh axes


def test_axes_of_one_level_all_use_it():
    cluster = Cluster("c", DEVICE, levels((8, 2e-6, 1e11)), "s")
    assert cluster.axes((8,)) == (AxisLink(8, 2e-6, 1e11),)
    assert cluster.axes((2, 4)) == (AxisLink(2, 2e-6, 1e11), AxisLink(4, 2e-6, 1e11))
    assert cluster.axes((8, 1))[1].size == 1


def test_axes_of_two_levels():
    cluster = Cluster("c", DEVICE, levels((8, 2e-6, 100e9), (4, 5e-6, 10e9)), "s")
    data, tensor = cluster.axes((4, 8))
    assert tensor == AxisLink(8, 2e-6, 100e9)  # inside a node
    assert data == AxisLink(4, 5e-6, 10e9)  # one member a node: its own share of the network
    # (8, 4): groups of 8 with stride 4 have two members a node, and so two shares of the network.
    assert cluster.axes((8, 4))[0] == AxisLink(8, 5e-6, 20e9)
    # All ranks in one group: eight shares, 80 GB/s; the slowest level is still the network.
    assert cluster.axes((32,)) == (AxisLink(32, 5e-6, 80e9),)
    # (2, 16): the inner axis joins two nodes, the outer pairs of them.
    assert cluster.axes((2, 16)) == (AxisLink(2, 5e-6, 10e9), AxisLink(16, 5e-6, 80e9))


def test_the_inner_level_limits_where_it_is_the_slowest():
    cluster = Cluster("c", DEVICE, levels((8, 2e-6, 30e9), (4, 5e-6, 10e9)), "s")
    assert cluster.axes((32,))[0].bytes_per_s == 30e9


def test_axes_of_three_levels_and_meshes_that_do_not_follow_them():
    cluster = Cluster("c", DEVICE, levels((2, 1e-6, 100e9), (3, 2e-6, 20e9), (2, 4e-6, 5e9)), "s")
    assert [link.alpha_s for link in cluster.axes((2, 3, 2))] == [4e-6, 2e-6, 1e-6]
    assert [link.bytes_per_s for link in cluster.axes((2, 3, 2))] == [5e9, 20e9, 100e9]
    # Innermost axis of 3 over nodes of 2: the group 0 1 | 2 has a node with one member, so one share of level 1.
    assert cluster.axes((4, 3))[1] == AxisLink(3, 2e-6, 20e9)


def test_fits_hold_within_one_level_and_their_latency_follows_the_size():
    fits = {"all_reduce": (30e-6, 1e-10)}
    cluster = Cluster("c", DEVICE, (Level("in", 4, 1e-6, 1e10, fits), Level("out", 2, 1e-5, 1e9)), "s")
    assert cluster.axes((2, 4))[1].fits == fits
    assert cluster.axes((4, 2))[1].fits["all_reduce"] == pytest.approx((10e-6, 1e-10))
    assert cluster.axes((8,))[0].fits is None and cluster.axes((2, 4))[0].fits is None


@pytest.mark.parametrize("shape", [(3,), (2, 8), (), (8, 0), (-8,), (2.0, 4), (True, 8)])
def test_a_mesh_that_does_not_fit_is_refused(shape):
    with pytest.raises(InputError, match="mesh shape"):
        Cluster.load("a100x8").axes(shape)


def test_mesh_shapes():
    assert mesh_shapes(1) == ((1,),)
    assert mesh_shapes(7) == ((7,),)
    assert mesh_shapes(8) == ((8,), (4, 2), (2, 4), (2, 2, 2))
    assert mesh_shapes(12, 2) == ((12,), (6, 2), (4, 3), (3, 4), (2, 6))
    assert Cluster.load("a100x8").mesh_shapes(4) == ((4,), (2, 2))


# Probe


def fake_root(tmp_path):
    files = {
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
        "proc/cpuinfo": "".join(
            f"processor\t: {n}\nmodel name\t: Toy CPU\ncpu MHz\t: 1000.0\nflags\t: fpu avx2 fma\n\n" for n in range(4)
        ),
        "proc/self/status": "Name: x\nCpus_allowed_list:\t0-3\n",
        "sys/devices/system/cpu/online": "0-3\n",
        "sys/devices/system/cpu/cpu0/cache/index0/size": "32K\n",
        "sys/devices/system/cpu/cpu0/cache/index3/size": "8M\n",
    }
    files |= {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 2},{n % 2 + 2}\n" for n in range(4)
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_probe_reads_a_given_root(tmp_path):
    machine = read_machine(fake_root(tmp_path))
    assert (machine.cpu_name, machine.cores, machine.threads) == ("Toy CPU", 2, 4)
    assert (machine.memory_bytes, machine.cache_bytes, machine.hz) == (16 << 30, 8 << 20, 1e9)
    cluster = probe_local(2, tmp_path)
    assert cluster.world_size == 2 and "estimated" in cluster.source and "estimated" in cluster.device.name
    assert cluster.device.memory_bytes == 8 << 30
    assert cluster.device.flops_per_s["float64"] == pytest.approx(1e9 * 16 * 0.6)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_probe_sees_the_limits_of_a_container(tmp_path):
    root = fake_root(tmp_path)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    (root / "sys/fs/cgroup/memory.max").write_text("1073741824\n")
    machine = read_machine(root)
    assert machine.usable_cores == 0.5 and machine.memory_bytes == 1 << 30
    (root / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert read_machine(root).usable_cores == 2 and read_machine(root).memory_bytes == 16 << 30


def test_probe_of_nothing_says_so(tmp_path):
    with pytest.raises(InputError, match="MemTotal"):
        read_machine(tmp_path)
    with pytest.raises(InputError, match="world"):
        probe_local(0)


# Fit


@pytest.mark.parametrize(("alpha_s", "beta"), [(20e-6, 1e-9), (1e-3, 5e-12), (0.0, 2e-10), (5e-6, 0.0)])
def test_fit_recovers_exact_lines(alpha_s, beta):
    samples = [(size, alpha_s + beta * size) for size in (4096, 32768, 262144, 1 << 20, 1 << 22)]
    assert fit_alpha_beta(samples) == pytest.approx((alpha_s, beta), rel=1e-6, abs=1e-15)


def test_fit_withstands_noise_and_an_outlier():
    rng = random.Random(0)
    samples = [
        (size, (50e-6 + 1e-9 * size) * rng.uniform(0.95, 1.05)) for size in (4096, 32768, 262144, 1 << 20, 1 << 22) * 3
    ]
    samples.append((4096, 5e-3))
    alpha_s, beta = fit_alpha_beta(samples)
    assert alpha_s == pytest.approx(50e-6, rel=0.1) and beta == pytest.approx(1e-9, rel=0.1)


def test_fit_at_the_borders():
    assert fit_alpha_beta([(1000, 1e-6)] * 3) == pytest.approx((0.0, 1e-9))
    alpha_s, beta = fit_alpha_beta([(1000, 1e-6), (2000, 4e-6)])  # would need a negative latency
    assert alpha_s == 0.0 and beta > 0
    alpha_s, beta = fit_alpha_beta([(1000, 4e-6), (2000, 1e-6)])  # would need a negative bandwidth
    assert alpha_s > 0 and beta == 0.0
    assert fit_alpha_beta([(0, 2e-6)]) == pytest.approx((2e-6, 0.0))
    with pytest.raises(InputError):
        fit_alpha_beta([])
    with pytest.raises(InputError):
        fit_alpha_beta([(1.0, 0.0)])
