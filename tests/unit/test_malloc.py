"""malloc keeps what is freed, unless the user has tuned it."""

import os
import subprocess
import sys

import pytest

from shardwise.cpu import malloc

KEPT = """
import torch
from shardwise.cpu.malloc import keep_freed_memory
done = {call}
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident_bytes()
block = torch.ones(6 << 20)
del block
print(done, resident_bytes() - before)
"""
BLOCK_BYTES = 24 << 20


def kept_bytes(call: str, **env: str) -> tuple[str, int]:
    """(what the call returned, bytes that stay resident of a block of 24 MiB that was filled and freed)."""
    clean = {k: v for k, v in os.environ.items() if k not in malloc.SETTINGS}
    code = KEPT.format(call=call)
    run = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    done, count = run.stdout.split()
    return done, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is on Linux alone")
def test_freed_memory_stays():
    done, count = kept_bytes("keep_freed_memory()")
    assert done == "True" and count > 0.9 * BLOCK_BYTES
    assert kept_bytes("None")[1] < 0.5 * BLOCK_BYTES


def test_tuned_malloc_is_left_alone():
    assert kept_bytes("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
