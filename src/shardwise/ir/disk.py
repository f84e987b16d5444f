"""Small JSON files that outlive a run: the book of rules, plans, measured clusters.

Every file carries a format and a checksum. It is written atomically (a temporary file, then rename); a damaged one is
put aside with a warning and counts as missing; a disk that cannot be written costs a warning, never the run. What is
read is parsed as JSON and validated by its reader, never unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def cache_dir() -> Path:
    """$SHARDWISE_CACHE, or `shardwise` in the user's cache folder."""
    if path := os.environ.get("SHARDWISE_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def checksum(content: Any) -> str:
    """sha256 of the canonical JSON of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@cache
def source_digest(folders: tuple[str, ...]) -> str:
    """Of the package's own source in these folders: what another version made is not read."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def encode(key: str, content: Any, file_format: int, **notes: str) -> str:
    """The text of a file that holds `content` under `key`; `notes` are for people."""
    return json.dumps({"format": file_format, **notes, "checksum": checksum(content), key: content}, indent=0)


def decode(key: str, text: str, file_format: int) -> Any:
    """The content of a file's text. Raises ValueError where it is damaged or of another format."""
    try:
        data = json.loads(text)
        if data["format"] != file_format:
            raise ValueError(f"format {data['format']}, expected {file_format}")
        if data["checksum"] != checksum(data[key]):
            raise ValueError("checksum does not match")
        return data[key]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read(path: Path, what: str, parse: Callable[[str], T]) -> T | None:
    """What `parse` makes of a file; None where there is none. A file that it refuses (ValueError) is put aside."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"{what} {path} is damaged ({error}); it is put aside and rebuilt", stacklevel=3)
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(".damaged"))
        return None


def write(path: Path, what: str, text: str) -> None:
    """Writes a file atomically; where the disk refuses, warns."""
    with guarded(path, what):
        replace(path, text)


@contextlib.contextmanager
def guarded(path: Path, what: str) -> Iterator[None]:
    """Turns what the disk refuses into a warning."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{what} {path} cannot be written ({error}); the next run will make it anew", stacklevel=4)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time works on a file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def replace(path: Path, text: str) -> None:
    """The whole text or nothing, whoever reads or dies meanwhile. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
