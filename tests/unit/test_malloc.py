"""malloc keeps what is freed, unless the user has tuned it."""

import subprocess
import sys

import pytest

from shardwise.cpu import malloc

FAULTS = """
import resource, torch
from shardwise.cpu.malloc import keep_freed_memory
kept = {call}
def step():
    tensors = [torch.ones(1 << 20) for _ in range(8)]
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str, **env: str) -> tuple[str, int]:
    """(what the call returned, page faults of ten steps that fill 32 MiB each: 8,192 pages)."""
    import os

    clean = {k: v for k, v in os.environ.items() if k not in malloc.SETTINGS}
    code = FAULTS.format(call=call)
    run = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    kept, count = run.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is on Linux alone")
def test_steps_do_not_fault_their_pages_in_again():
    kept, count = faults("keep_freed_memory()")
    assert kept == "True" and count < 8192, "less than one step's pages in ten steps"
    assert faults("None")[1] > 4 * 8192


def test_tuned_malloc_is_left_alone():
    assert faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
