from __future__ import annotations

import fnmatch
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, compare_golden, pytest_collection_modifyitems


def select(quarter: int | None, names: list[str]) -> list[str]:
    """Names that start with `full` carry the mark."""
    items = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _, name=name: name.startswith("full") or None)
        for name in names
    ]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: quarter, hook=hook), items)
    return [item.nodeid for item in items]


def test_the_quarters_are_a_partition_of_the_full_tests():
    names = [f"full/test_{i}" for i in range(200)]
    quarters = [select(quarter, names) for quarter in range(4)]
    assert sorted(name for quarter in quarters for name in quarter) == sorted(names)
    assert all(len(quarter) > 25 for quarter in quarters)
    assert quarters == [select(quarter, names) for quarter in range(4)]


def test_other_tests_are_in_every_quarter():
    assert all(select(quarter, ["test_a", "test_b"]) == ["test_a", "test_b"] for quarter in range(4))
    assert select(None, ["full/a", "b"]) == ["full/a", "b"]


def test_golden_files(tmp_path):
    path = tmp_path / "golden" / "graph.txt"
    with pytest.raises(pytest.fail.Exception, match="--update-golden"):
        compare_golden(path, "a\nb", update=False)
    compare_golden(path, "a\nb", update=True)
    compare_golden(path, "a\nb\n", update=False)
    with pytest.raises(pytest.fail.Exception, match=r"\+c"):
        compare_golden(path, "a\nc", update=False)


def test_no_folder_of_tests_is_left_out_in_silence(request):
    """pytest by default does not look into folders named dist or build."""
    skipped = request.config.getini("norecursedirs")
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert "dist" in names
    assert not [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in skipped)]
