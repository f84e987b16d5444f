"""Writes the book that ships with the package: the rules of common operators, found anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..ir.graph import Graph
from ..ir.runner import OpRunner
from .book import RuleBook, shipped_name, write_rules
from .descend import descend

SHIPPED = Path(__file__).parent / "shipped"


def ship(
    runner: OpRunner,
    graphs: Iterable[Graph],
    path: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Finds the rules of all operators of these graphs and of their decompositions, and writes them to `path` (by
    default where the package looks for them). Neither the cache nor a book is read. Returns their number."""
    book = RuleBook(runner, use_disk=False, use_shipped=False)
    for graph in graphs:
        descend(graph, book, progress)
    path = path or SHIPPED / shipped_name(runner.framework)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_rules(book.rules, runner.framework) + "\n", encoding="utf-8")
    return len(book.rules)
