"""Runs functions of tests in one process with eight virtual devices, which starts when the first test asks.

The devices are chosen when jax starts, and the rest of the tests must not see them. Functions are named by module and
name, get plain arguments and return plain data.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COUNT = 8
_process: list[subprocess.Popen[str]] = []


def on_devices(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns there. An exception there is an AssertionError here, with its traceback."""
    if not _process or _process[0].poll() is not None:
        _process[:] = [_start()]
        atexit.register(stop)
    process = _process[0]
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([function.__module__, function.__name__, args]) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith('{"shardwise"'):
            answer = json.loads(line)["shardwise"]
            assert answer["ok"], answer["error"]
            return answer["value"]
    raise AssertionError(f"the process with {COUNT} devices ended while it ran {function.__name__}{args}")


def _start() -> subprocess.Popen[str]:
    env = dict(os.environ, XLA_FLAGS=f"--xla_force_host_platform_device_count={COUNT}", JAX_PLATFORMS="cpu")
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__], env=env, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def stop() -> None:
    """Ends the process."""
    for process in _process:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    _process.clear()


def main() -> None:
    """The process: one call a line."""
    import jax

    jax.config.update("jax_enable_x64", True)
    for line in sys.stdin:
        module, name, args = json.loads(line)
        try:
            answer = {"ok": True, "value": getattr(importlib.import_module(module), name)(*args)}
        except Exception:
            answer = {"ok": False, "error": traceback.format_exc()}
        print(json.dumps({"shardwise": answer}), flush=True)


if __name__ == "__main__":
    main()
