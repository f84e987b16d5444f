"""The demo end to end, short; what happens when a rank dies; nothing stays behind."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from shardwise import cli, demo
from shardwise.errors import InputError, RunError
from shardwise.models.training import Recipe


def children() -> dict[int, str]:
    """Processes of a demo: pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if "shardwise.demo" in command:
                found[int(folder.name)] = command
    return found


def ours(before: dict[int, str]) -> dict[int, str]:
    """Those that this test started, once they had time to end."""
    deadline = time.monotonic() + 15
    while (left := {p: c for p, c in children().items() if p not in before}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))


def test_it_trains_alike_and_starts_warm_again(capfd, monkeypatch):
    before = children()
    found = {}
    for turn in ("cold", "warm"):
        monkeypatch.setattr("sys.argv", ["shardwise", "demo", "--steps", "20", "--rows", "2", "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capfd.readouterr().out
        assert ended.value.code == 0
        found[turn] = json.loads(text)
    cold, warm = found["cold"], found["warm"]
    assert not cold["origin"]["plan_cached"] and warm["origin"]["plan_cached"] and not warm["origin"]["discovered"]
    assert cold["losses"] == warm["losses"]
    assert cold["difference"] <= 1e-4 and cold["fall"] >= 1 and len(cold["losses"]["parallel"]) == 20
    assert len(cold["measured"]["peak_bytes"]) == 2
    assert not ours(before)


def test_a_rank_that_dies_ends_all():
    before = children()

    def kill_one() -> None:
        ranks = [p for p, c in children().items() if p not in before and "torch.distributed.run" not in c]
        os.kill(max(ranks), signal.SIGKILL)

    def watch(name: str, event: dict) -> None:
        if name == "step" and event["number"] == 2:
            threading.Thread(target=kill_one).start()

    with pytest.raises(RunError, match="the parallel run"):
        demo.run_demo(demo.Options(recipe=Recipe(steps=10_000, rows=2)), watch)
    assert not ours(before)


def test_an_interrupt_leaves_nothing_behind():
    before = children()

    def watch(name: str, event: dict) -> None:
        if name == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(demo.Options(recipe=Recipe(steps=10_000, rows=2)), watch)
    assert not ours(before)


def test_no_source_of_the_library(monkeypatch, tmp_path):
    paths = {"stdlib": str(tmp_path / "nothing")}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    with pytest.raises(InputError, match="no Python source"):
        demo.run_demo(demo.Options(), lambda name, event: None)


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} cannot be used"):
            demo.check_port(port)
    with pytest.raises(InputError, match="port 700000"):
        demo.check_port(700000)


def run_of(losses):
    return demo.Run(tuple(losses), 1.0, 1.1, 1)


def test_what_counts_as_a_failure():
    falling = [5.0 - 0.1 * k for k in range(30)]
    good = demo.Comparison(run_of(falling), run_of(x * (1 + 5e-5) for x in falling))
    assert good.failures == () and 1e-5 < good.difference < 1e-4
    apart = demo.Comparison(run_of(falling), run_of(x * (1 + 5e-4) for x in falling))
    flat = demo.Comparison(run_of([5.0] * 30), run_of([5.0] * 30))
    lost = demo.Comparison(run_of([float("nan")] * 30), run_of(falling))
    assert [len(x.failures) for x in (apart, flat, lost)] == [1, 1, 2]
