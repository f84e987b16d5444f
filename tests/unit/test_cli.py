"""The command line: what it prints, what it refuses, and its exit code."""

import json

import pytest

from shardwise import cli
from shardwise.errors import InputError

MODEL = """
print("a line of the user")
import torch
from torch import nn

def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), (torch.empty(32, 64),)

def small():
    return nn.Linear(12, 12, bias=False), (torch.empty(12, 12),)

def not_a_tuple():
    return 3

def no_args():
    return nn.Linear(2, 2), torch.zeros(2, 2)

def raises():
    return {}["missing"]

number = 3
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def run(monkeypatch, capfd, *argv):
    """(exit code, standard output, standard error)."""
    monkeypatch.setattr("sys.argv", ["shardwise", *map(str, argv)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    found = capfd.readouterr()
    return ended.value.code, found.out, found.err


def test_plan_as_json_explained_and_saved(monkeypatch, capfd, model, tmp_path):
    saved = tmp_path / "plan.json"
    argv = ("plan", f"{model}:build", "--mesh", "2,4", "--explain", "0.weight", "--save", saved, "--json")
    code, text, _ = run(monkeypatch, capfd, *argv)
    assert code == 0
    data = json.loads(text)
    assert data["plan"]["mesh"] == [2, 4] and "0.weight" in data["explain"]["0.weight"]
    assert json.loads(saved.read_text()) == data["plan"]


def test_plan_as_tables(monkeypatch, capfd, model):
    code, text, _ = run(monkeypatch, capfd, "plan", f"{model}:build", "--cluster", "cpu-gloo", "--mesh", "2")
    assert code == 0
    for part in ("placements on mesh (2,)", "*.weight", "peak memory per device", "certificate"):
        assert part in text


def test_rules(monkeypatch, capfd, model):
    code, text, _ = run(monkeypatch, capfd, "rules", f"{model}:build", "--json")
    assert code == 0
    data = json.loads(text)
    found = {row["operator"]: row["rule"] for row in data["rules"]}
    assert any("reduce{" in rule for rule in found.values())
    assert data["replicated_only"] == []
    code, text, _ = run(monkeypatch, capfd, "rules", f"{model}:build")
    assert code == 0 and "can only be replicated: none" in text


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("model.py", "expected FILE:FUNCTION"),
        ("{folder}/absent.py:build", "no such file"),
        ("{folder}/model.py:biuld", "no function 'biuld'; close: build"),
        ("{folder}/model.py:number", "no function 'number'"),
        ("{folder}/model.py:not_a_tuple", "returned int; expected (model, args)"),
        ("{folder}/model.py:no_args", "a tuple of (Linear, Tensor)"),
        ("{folder}/model.py:raises", "KeyError: 'missing'"),
        ("{folder}/broken.py:build", "broken.py, line 2"),
        ("{folder}/notes.txt:build", "has to end in .py"),
    ],
)
def test_a_wrong_model_is_refused(model, where, message):
    (model.parent / "broken.py").write_text("x = 1\ndef build(:\n")
    (model.parent / "notes.txt").write_text("")
    with pytest.raises(InputError) as error:
        cli.load_model(where.format(folder=model.parent))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cluster", "a100x9"], "neither a preset nor a file"),
        (["--mesh", "two"], "--mesh: expected a shape"),
        (["--mesh", "2,3"], "mesh (2, 3) has 6 devices but the cluster has 8 devices; the product must be 8"),
        (["--cluster", ""], "'' is neither a preset nor a file; presets: a100x8"),
        (["--memory-limit", "lots"], "memory_limit: expected bytes"),
        (["--mesh", "8", "--memory-limit", "1KiB"], "the least that would do is"),
        (["--mesh", "8", "--explain", "0.wieght"], "close: 0.weight"),
        (["--mesh", "8", "--save", "/nowhere/plan.json"], "No such file"),
    ],
)
def test_a_wrong_wish_is_one_message(monkeypatch, capfd, model, argv, message):
    code, text, error = run(monkeypatch, capfd, "plan", f"{model}:build", *argv)
    assert code == 1 and text == ""
    assert message in " ".join(error.split()) and "Traceback" not in error


def test_a_limit_that_no_mesh_meets(monkeypatch, capfd, model):
    code, _, error = run(monkeypatch, capfd, "plan", f"{model}:small", "--memory-limit", "100B")
    assert code == 1
    words = " ".join(error.split())
    assert "no plan on any mesh ((8,), (4, 2), (2, 4), (2, 2, 2)) fits into 100 B per device; the least that" in words
    assert ", on mesh (" in words


@pytest.mark.parametrize("argv", [[], ["m.py:f", "--ship"]])
def test_rules_wants_a_model_or_ship(monkeypatch, capfd, argv):
    code, _, error = run(monkeypatch, capfd, "rules", *argv)
    assert code == 1 and "--ship alone" in error
