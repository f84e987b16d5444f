"""Files that outlive a run: whole or absent, damaged ones put aside, a bad disk costs a warning only."""

import json
import multiprocessing
from dataclasses import replace

import pytest

from shardwise.cluster import Cluster
from shardwise.ir import disk
from shardwise.ir.graph import Graph, Input, Node, Output, Ref, Value
from shardwise.plan.plan import Plan
from shardwise.plan.problem import Settings
from shardwise.plan.store import load_plan, plan_key, save_plan
from shardwise.rules.rule import DimRef, Factor, Rule

PLAN = Plan((2,), (("parameter", "w", ()),), (), (), (), (), 1.0, 0.5, 10, 5, 0.5, 1.5, "optimal", "c")
PLAN = replace(PLAN, inputs=())
RULE = Rule((Factor((DimRef(0),), (DimRef(0),)),), found_on="test")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def graph(op="aten.neg.default", source=""):
    x, y = Value("x", (4,), "float32"), Value("y", (4,), "float32")
    return Graph(
        (Input(x, "input", "0"),), (Node((y,), op, (Ref("x"),), source=source),), (Output("y", "output", "0"),)
    )


def parse(text):
    return disk.decode("data", text, 3)


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "deep" / "file.json"
    assert disk.read(path, "it", parse) is None
    disk.write(path, "it", disk.encode("data", {"a": [1, 2.5, "ü"]}, 3, made_by="test"))
    assert disk.read(path, "it", parse) == {"a": [1, 2.5, "ü"]}
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"format": 3}', "format", "flip", "[" * 100_000])
def test_a_damaged_file_is_put_aside(tmp_path, damage):
    path = tmp_path / "file.json"
    text = disk.encode("data", {"a": 1}, 3)
    damaged = {"format": text.replace('"format": 3', '"format": 4'), "flip": text.replace('"a": 1', '"a": 2')}
    path.write_text(damaged.get(damage, damage))
    with pytest.warns(UserWarning, match="damaged"):
        assert disk.read(path, "it", parse) is None
    assert not path.exists() and path.with_suffix(".damaged").exists()
    disk.write(path, "it", text)
    assert disk.read(path, "it", parse) == {"a": 1}


def test_a_disk_that_refuses_costs_a_warning(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    path = tmp_path / "file.json"
    disk.write(path, "it", "old")
    monkeypatch.setattr(disk.os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        disk.write(path, "it", "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file.json"]
    blocked = tmp_path / "file.json" / "below.json"
    with pytest.warns(UserWarning, match="cannot be written"):
        disk.write(blocked, "it", "text")


def _write_often(path, k):
    for _ in range(30):
        disk.write(path, "it", disk.encode("data", {str(k): "x" * 5000}, 3))


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path):
    path = tmp_path / "file.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, k)) for k in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = disk.read(path, "it", parse)
        assert found is None or len(found) == 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_plan_is_found_by_its_problem():
    cluster, settings = Cluster.load("a100x8"), [Settings((8,))]
    key = plan_key(graph(), [RULE], cluster, settings)
    assert key == plan_key(graph(source="user.py:3"), [RULE], cluster, settings)
    others = {
        plan_key(graph("aten.abs.default"), [RULE], cluster, settings),
        plan_key(graph(), [Rule()], cluster, settings),
        plan_key(graph(), [RULE], cluster.scaled(2.0), settings),
        plan_key(graph(), [RULE], cluster, [Settings((8,), 1 << 30)]),
        plan_key(graph(), [RULE], cluster, [Settings((2, 4))]),
    }
    assert key not in others and len(others) == 5
    assert load_plan(key) is None
    save_plan(key, PLAN)
    assert load_plan(key) == PLAN


def test_a_plan_of_another_problem_is_not_taken(cache):
    save_plan("a" * 64, PLAN)
    (file,) = (cache / "plans").iterdir()
    file.rename(file.with_name("b" * 32 + ".json"))
    with pytest.warns(UserWarning, match="another problem"):
        assert load_plan("b" * 64) is None


def test_a_plan_with_other_content_is_not_taken(cache):
    save_plan("a" * 64, PLAN)
    (file,) = (cache / "plans").iterdir()
    data = json.loads(file.read_text())
    data["plan"]["plan"]["mesh"] = "two"
    data["checksum"] = disk.checksum(data["plan"])
    file.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="damaged"):
        assert load_plan("a" * 64) is None
