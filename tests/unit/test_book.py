"""The book of rules: on disk it survives damage, full disks, kills and company; what ships is what is found anew."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest

from shardwise.ir.graph import Ref
from shardwise.ir.runner import Call, TensorMeta
from shardwise.pytorch.common import common_programs
from shardwise.rules.book import RuleBook, read_rules, shipped_name, write_rules
from shardwise.rules.rule import DimRef, Factor, Rule, rule_json
from shardwise.rules.ship import SHIPPED, ship
from tests.graphs import RUNNER


def _rule(k: int) -> Rule:
    return Rule((Factor((DimRef(0, k + 1),), (DimRef(0),)),), ((0,),), found_on="a test")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _book(**rules: Rule) -> RuleBook:
    return RuleBook(RUNNER, use_shipped=False, rules=dict(rules))


CALL = Call("aten.neg.default", (TensorMeta((8, 32), "float32"),), (Ref("0"),))


def test_rules_are_kept_and_read_back(cache: Path) -> None:
    first = _book()
    (rule,) = first.find([CALL])
    second = _book()
    assert second.find([CALL]) == [rule]
    assert (first.counts.discovered, second.counts.discovered) == (1, 0)
    assert read_rules(second.path().read_text()) == first.rules


def _another_version(text: str) -> str:
    return json.dumps(json.loads(text) | {"format": -1})


def _changed(text: str) -> str:
    return text.replace('"found_on": "torch', '"found_on": "t0rch')


@pytest.mark.parametrize(
    "damage",
    [lambda t: t[: len(t) // 2], lambda t: "", lambda t: "[1, 2]", lambda t: "\x00" * 100, _another_version, _changed],
    ids=["truncated", "empty", "other", "zeros", "version", "checksum"],
)
def test_a_damaged_file_is_put_aside_and_rebuilt(cache: Path, damage) -> None:
    book = _book()
    book.find([CALL])
    path = book.path()
    path.write_text(damage(path.read_text()))
    again = _book()
    with pytest.warns(UserWarning, match="put aside and rebuilt"):
        again.find([CALL])
    assert again.counts.discovered == 1
    assert path.with_suffix(".damaged").exists()
    assert read_rules(path.read_text()) == again.rules


def test_a_disk_that_cannot_be_written_costs_a_warning(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    book = _book()
    with pytest.warns(UserWarning, match="cannot be written"):
        (rule,) = book.find([CALL])
    assert rule.factors


def test_a_full_disk_costs_a_warning_and_not_the_old_rules(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _book(old=_rule(1)).save()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        _book(new=_rule(2)).save()
    monkeypatch.undo()
    os.environ["SHARDWISE_CACHE"] = str(cache)
    assert set(read_rules(_book().path().read_text())) == {"old"}
    assert [p.suffix for p in cache.iterdir() if p.suffix not in (".json", ".lock")] == []


def _write_many(worker: int, count: int) -> None:
    for k in range(count):
        _book(**{f"rule_{worker}_{k}": _rule(k)}).save()


def test_processes_that_write_at_once_lose_nothing(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(w, 10)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(w.exitcode == 0 for w in workers)
    rules = read_rules(_book().path().read_text())
    assert rules == {f"rule_{w}_{k}": _rule(k) for w in range(4) for k in range(10)}


def _write_forever() -> None:
    k = 0
    while True:
        _book(**{f"rule_{k % 50}_{n}": _rule(n) for n in range(200)}).save()
        k += 1


def test_a_kill_leaves_a_whole_file(cache: Path) -> None:
    _book(first=_rule(0)).save()
    context = multiprocessing.get_context("fork")
    for seed in range(8):
        worker = context.Process(target=_write_forever)
        worker.start()
        time.sleep(0.02 + random.Random(seed).random() * 0.2)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            book = _book()
            book.load()
        assert "first" in book.rules
    _book(last=_rule(1)).save()
    assert "last" in read_rules(_book().path().read_text())


def test_the_text_form_is_canonical() -> None:
    rules = {"b": _rule(1), "a": _rule(2)}
    assert write_rules(rules, "x") == write_rules(dict(sorted(rules.items())), "x")
    assert read_rules(write_rules(rules, "x")) == rules


def test_the_shipped_book_is_used(cache: Path) -> None:
    book = RuleBook(RUNNER, use_disk=False)
    book.load()
    assert len(book.rules) > 500
    assert {r.found_on for r in book.rules.values() if r.factors} == {RUNNER.framework}


def test_a_random_tenth_of_the_shipped_book_is_found_again(tmp_path: Path) -> None:
    """All operators of a tenth of its programs, entry by entry."""
    seed = int.from_bytes(os.urandom(3))
    print(f"seed {seed}")
    shipped = read_rules((SHIPPED / shipped_name(RUNNER.framework)).read_text())
    programs = common_programs()
    chosen = random.Random(seed).sample(programs, len(programs) // 10)
    ship(RUNNER, (program() for program in chosen), tmp_path / "book.json")
    found = read_rules((tmp_path / "book.json").read_text())
    assert found
    for key, rule in found.items():
        assert key in shipped, f"seed {seed}: {key} is not in the shipped book: run `make rules-book`"
        assert rule_json(rule) == rule_json(shipped[key]), f"seed {seed}: {key}"
