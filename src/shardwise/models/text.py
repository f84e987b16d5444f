"""Text to train on that every machine with Python has: the standard library's own source, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import InputError

# Not source that people wrote (generated, with paths of the build in it), or not part of the library.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_SKIPPED_PREFIX = "_sysconfigdata"


def stdlib_corpus(max_bytes: int = 4_000_000, root: str | Path | None = None) -> np.ndarray:
    """The first `max_bytes` of the standard library's `.py` files in the order of their names, as uint8.

    The same Python release gives the same bytes on every machine. `root` replaces the library's folder.
    """
    folder = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    left = max_bytes
    for path in _source_files(folder):
        if left <= 0:
            break
        data = path.read_bytes()[:left]
        parts.append(data)
        left -= len(data)
    corpus = np.frombuffer(b"".join(parts), dtype=np.uint8)
    if corpus.size == 0:
        raise InputError(
            f"no Python source in {folder}: this Python was installed without its library's source. "
            "Pass root=FOLDER with any .py files, or install the package that carries them (e.g. libpython3-stdlib)."
        )
    return corpus


def batches(
    corpus: np.ndarray, batch: int, block: int, steps: int, seed: int = 0, first_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` pairs of int64 [batch, block]: tokens, and the byte after each of them.

    A step depends on (seed, step) alone, so a run that restarts at `first_step` sees what it would have seen.
    """
    if corpus.size <= block:
        raise InputError(f"a corpus of {corpus.size} bytes has no window of {block} + 1: use a smaller block")
    offset = np.arange(block + 1)
    for step in range(first_step, first_step + steps):
        start = np.random.default_rng([seed, step]).integers(0, corpus.size - block, size=batch)
        window = torch.from_numpy(corpus[start[:, None] + offset].astype(np.int64))
        yield window[:, :-1].clone(), window[:, 1:].clone()


def _source_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = []
    for path in folder.rglob("*.py"):
        inside = path.relative_to(folder)
        if not _SKIPPED_FOLDERS.intersection(inside.parts) and not inside.name.startswith(_SKIPPED_PREFIX):
            found.append((inside.as_posix(), path))
    return [path for _, path in sorted(found)]
