"""The rules of a whole graph are kept: the next run reads them, and makes them anew where it must."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from shardwise.ir.graph import Graph
from shardwise.ir.passes import recompute
from shardwise.pipeline import find_rules
from shardwise.pytorch.capture import capture
from shardwise.rules import ruled


class _Classifier(torch.nn.Module):
    """A batch norm and a cross-entropy: both are opened into decompositions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.out(self.norm(x)), target)


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    return recompute(capture(_Classifier(), (torch.randn(8, 6), torch.arange(8)), None).graph)


def _file(folder: Path) -> Path:
    (path,) = (folder / "graphs").glob("*.json")
    return path


def test_what_is_read_back_is_what_was_found(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_rules(graph)
    assert found.regions and found.graph != graph
    monkeypatch.setattr("shardwise.pipeline.descend", lambda *_: pytest.fail("the rules were found anew"))
    again = find_rules(graph)
    assert (again.graph, again.rules, again.regions) == (found.graph, found.rules, found.regions)
    assert again.fused_rules == found.fused_rules and again.discovered == 0
    with pytest.raises(pytest.fail.Exception, match="found anew"):
        find_rules(graph, use_disk=False)


def test_another_graph_or_version_is_not_answered(graph: Graph, tmp_path: Path) -> None:
    ruled.save_ruled(key := ruled.ruled_key(graph, "torch-1"), find_rules(graph))
    assert ruled.load_ruled(key, graph) is not None
    assert ruled.ruled_key(graph, "torch-2") != key
    other = recompute(capture(_Classifier(), (torch.randn(6, 6), torch.arange(6)), None).graph)
    assert ruled.ruled_key(other, "torch-1") != key


@pytest.mark.parametrize("entry", ["key", "graph", "of", "regions", "rules", None])
def test_a_damaged_file_is_put_aside_and_rebuilt(graph: Graph, tmp_path: Path, entry: str | None) -> None:
    found = find_rules(graph)
    path = _file(tmp_path)
    data = json.loads(path.read_text())
    if entry is None:
        path.write_text(path.read_text()[:-40])
    else:
        wrong = {"graph": "graph {", "of": [0], "regions": {"a": "b"}, "rules": [{}]}
        content = data["ruled"] | {entry: wrong.get(entry, "other")}
        path.write_text(ruled.disk.encode("ruled", content, ruled.FORMAT))
    with pytest.warns(UserWarning, match="put aside and rebuilt"):
        again = find_rules(graph)
    assert again.rules == found.rules and path.with_suffix(".damaged").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_rules(graph).rules == found.rules
