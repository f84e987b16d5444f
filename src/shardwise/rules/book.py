"""The RuleBook: all rules known, by the printed proxy call; kept on disk and shipped with the package.

A lookup asks, in order: memory, the cache on disk, the book that ships with the package; what none of them knows is
discovered. The cache is one JSON file per framework version, written atomically (a temporary file, then rename),
with a checksum: a damaged file is reported, put aside and rebuilt. Ranks may write at the same time: each merges
what it finds on disk under a lock, and the last rename wins with both sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from ..errors import CaptureError
from ..ir import disk
from ..ir.graph import Graph
from ..ir.runner import Call, OperatorError, OpRunner, call_of
from .blocks import Search, search_of
from .discover import REFUSED, UNREPEATABLE
from .halo import discover_windows
from .proxy import fit_blocks, format_call, proxy_of, stand_ins
from .rule import DimRef, Rule
from .sandbox import discover_all
from .views import view_rule

FORMAT = 10
"""Version of the discovery and of the JSON form; rules of another version are not read."""


def read_rules(text: str) -> dict[str, Rule]:
    """Reads the JSON form. Raises ValueError where it is damaged or of another version."""
    table = disk.decode("rules", text, FORMAT)
    try:
        return {key: Rule.from_dict(value) for key, value in table.items()}
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def write_rules(rules: dict[str, Rule], framework: str) -> str:
    """The JSON form of a book."""
    return disk.encode("rules", {key: rules[key].to_dict() for key in sorted(rules)}, FORMAT, framework=framework)


def shipped_name(framework: str) -> str:
    """File name of the book that ships for a framework version."""
    return f"book-{framework}.json"


@dataclass
class Counts:
    """Where the rules of a graph came from."""

    views: int = 0
    known: int = 0
    discovered: int = 0
    replicated: int = 0


@dataclass
class RuleBook:
    """Rules by key, with the discovery behind them."""

    runner: OpRunner
    use_disk: bool = True
    use_shipped: bool = True
    rules: dict[str, Rule] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    discover: Callable[..., list[Rule]] = discover_all
    """What finds the rules of (stand-ins, runner, progress): forks children, unless the framework cannot be forked."""
    windows: bool = True
    """Whether pieces may overlap: what lowers the plan has to bring them their neighbours' elements."""
    _resolved: dict[str, Rule] = field(default_factory=dict)
    """Rules by the printed call itself, not by its stand-in."""
    _loaded: bool = False

    def path(self) -> Path:
        """The cache file of this framework version."""
        return disk.cache_dir() / f"rules-{self.runner.framework}-v{FORMAT}.json"

    def load(self) -> None:
        """Reads the shipped book and the cache, once."""
        if self._loaded:
            return
        self._loaded = True
        if self.use_shipped:
            self._load_shipped()
        if self.use_disk:
            self.rules.update(self._read_disk())

    def _load_shipped(self) -> None:
        """A book of another version of the discovery, or none for this framework, is no book."""
        name = shipped_name(self.runner.framework)
        with contextlib.suppress(FileNotFoundError, ValueError):
            text = resources.files("shardwise.rules").joinpath("shipped", name).read_text(encoding="utf-8")
            self.rules.update(read_rules(text))

    def _read_disk(self) -> dict[str, Rule]:
        return disk.read(self.path(), "the rule cache", read_rules) or {}

    def save(self) -> None:
        """Merges into the cache on disk, under a lock: ranks may write at the same time."""
        if not self.use_disk:
            return
        path = self.path()
        with disk.guarded(path, "the rule cache"), disk.locked(path):
            disk.replace(path, write_rules(self._read_disk() | self.rules, self.runner.framework))

    def find(
        self, calls: Iterable[Call], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Rule]:
        """The rule of every call, discovering what is not known; new rules are saved."""
        self.load()
        keys: list[str] = []
        proxies: dict[str, Call] = {}
        originals: dict[str, Call] = {}
        for call in calls:
            key = format_call(call)
            keys.append(key)
            if key not in self._resolved and key not in proxies:
                proxy = self._without_execution(key, call)
                if proxy is not None:
                    proxies[key] = proxy
                    originals[key] = call
        self._discover(proxies.values(), progress)
        refused = {key: p for key, p in proxies.items() if self.rules[format_call(p)].found_on == REFUSED}
        for key, proxy in refused.items():
            others = [s for s in stand_ins(originals[key], self.runner) if s != proxy]
            self._discover(others, progress)
            accepted = [s for s in others if self.rules[format_call(s)].found_on != REFUSED]
            proxies[key] = [*accepted, proxy][0]
        for key, proxy in proxies.items():
            self._resolved[key] = self._fitted(self.rules[format_call(proxy)], originals[key])
        self._find_windows({key: originals[key] for key in proxies}, progress)
        return [self._resolved[key] for key in keys]

    def _find_windows(self, calls: dict[str, Call], progress: Callable[[int, int], None]) -> None:
        """Adds the factors whose pieces overlap to the rules of calls that were just resolved."""
        searches: dict[str, Search] = {}
        for key, call in calls.items() if self.windows else ():
            rule = self._resolved[key]
            search = search_of(call, rule, self.runner) if rule.found_on == self.runner.framework else None
            if search is not None:
                searches[key] = search
        unknown = {s.key: s for s in searches.values() if s.key not in self.rules}
        if unknown:
            found = discover_all(list(unknown.values()), self.runner, progress, find=discover_windows)
            self.rules.update(zip(unknown, found))
            self.counts.discovered += len(unknown)
            self.save()
        for key, search in searches.items():
            more = self.rules[search.key].factors
            if more:
                plain = self._resolved[key]
                self._resolved[key] = replace(plain, factors=(*plain.factors, *more))

    def _discover(self, proxies: Iterable[Call], progress: Callable[[int, int], None]) -> None:
        """Finds and saves the rules of those stand-ins that have none."""
        unknown = {key: p for p in proxies if (key := format_call(p)) not in self.rules}
        if unknown:
            self.rules.update(zip(unknown, self.discover(list(unknown.values()), self.runner, progress)))
            self.counts.discovered += len(unknown)
            self.save()

    def _without_execution(self, key: str, call: Call) -> Call | None:
        """Resolves a call that is a view or has no small stand-in; else returns the stand-in."""
        try:
            view = view_rule(call, self.runner)
        except OperatorError:
            view = None
        proxy = proxy_of(call, self.runner) if view is None else None
        if proxy is None:
            self._resolved[key] = view or Rule(found_on="no small stand-in")
        return proxy

    def _fitted(self, rule: Rule, call: Call) -> Rule:
        blocks = any(isinstance(r, DimRef) and r.outer * r.unit > 1 for f in rule.factors for r in f.results)
        return fit_blocks(rule, call, self.runner) if blocks else rule

    def of_graph(
        self, graph: Graph, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[Rule, ...]:
        """The rule of every node of a graph, in order. Raises CaptureError for one that draws random numbers."""
        found = tuple(self.find((call_of(node, graph.values)[0] for node in graph.nodes), progress))
        for node, rule in zip(graph.nodes, found):
            if rule.found_on == UNREPEATABLE:
                raise CaptureError(
                    f"{node.op} (at {node.source or 'an unknown line'}) makes other results of the same operands every "
                    "time, so the ranks would train on different numbers. If it draws random numbers, draw with the "
                    "framework's own operators (docs/random.md), and hand the numbers in"
                )
        return found
