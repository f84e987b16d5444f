"""Options and fixtures of all tests.

    --quarter N        of the tests marked `full`, keep every fourth by a stable hash of its name
    --budget SECONDS   start no further test marked `full` once the session has run this long; say so for each
    --update-golden    rewrite tests/golden/ instead of comparing with it
"""

from __future__ import annotations

import difflib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dist.pool import Pool, close_pools, pool

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", type=int, choices=range(4), help="run one quarter of the tests marked full")
    parser.addoption("--budget", type=float, help="seconds after which no further test marked full is started")
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:  # such names differ from run to run: neither quarters nor tests side by side could use them
        raise pytest.UsageError(f"a test has an address in its name: {addresses[0]}")
    quarter = config.getoption("--quarter")
    if quarter is None:
        return
    kept, dropped = [], []
    for item in items:
        # crc32, since Python's own hash of a string differs from process to process.
        other = item.get_closest_marker("full") and zlib.crc32(item.nodeid.encode()) % 4 != quarter
        (dropped if other else kept).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


STARTED_S = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.getoption("--budget")
    if budget is not None and item.get_closest_marker("full") and time.monotonic() - STARTED_S > budget:
        pytest.skip(f"the budget of {budget:.0f} s is spent; `make test-all` runs everything")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # While there are few full tests a quarter may hold none, which is no failure.
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--quarter") is not None:
        session.exitstatus = pytest.ExitCode.OK


def compare_golden(path: Path, text: str, update: bool) -> None:
    """Fails with the difference unless the file holds the text; under `update` writes it."""
    text = text.rstrip("\n") + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old != text:
        lines = difflib.unified_diff(old.splitlines(), text.splitlines(), f"golden/{path.name}", "now", lineterm="")
        pytest.fail("\n".join([*lines, "", "If the change is wanted: pytest --update-golden, and commit."]), False)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares with tests/golden/NAME.txt."""
    update = request.config.getoption("--update-golden")
    return lambda name, text: compare_golden(GOLDEN / f"{name}.txt", text, update)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of data that is not in the repository: $SHARDWISE_SHARED, or ../shared."""
    path = Path(os.environ.get("SHARDWISE_SHARED") or ROOT.parent / "shared")
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}: set SHARDWISE_SHARED to its folder")
    return path


@pytest.fixture(params=[2, 4], ids=["2ranks", "4ranks"])
def ranks(request: pytest.FixtureRequest) -> Pool:
    """The session's pool at 2 and at 4 ranks: `ranks.run(fn, *args)`, `ranks.world`.

    Other sizes: `@pytest.mark.parametrize("ranks", [4], indirect=True)`.
    """
    return pool(request.param)


@pytest.fixture(scope="session", autouse=True)
def _no_ranks_left_over() -> Iterator[None]:
    yield
    close_pools()
