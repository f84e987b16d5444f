"""Cluster files and presets: read, checked strictly, and refused with the file, the line and the key.

A file is TOML (or JSON, as `Cluster.to_dict` writes it) with exactly these keys; docs name the units in `units.py`:

    name, source                                                   text
    [device] name, memory_bytes, memory_bytes_per_s, launch_s      and [device.flops_per_s] float64 .. float16
    [[levels]] name, size, alpha_s, bytes_per_s                    innermost first
    [levels.fits.KIND] alpha_s, beta_s_per_byte                    optional; KIND in COLLECTIVES
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import NoReturn

from ..errors import ClusterFileError
from . import lines as _lines
from .links import COLLECTIVES, Level
from .model import DTYPES, Cluster, Device
from .units import EXAMPLES, parse_quantity

_LARGEST_FILE_BYTES = 1 << 20  # a description is a few KiB; anything larger is another kind of file


def preset_names() -> tuple[str, ...]:
    """The clusters that ship with the package."""
    entries = (entry.name for entry in (resources.files(__name__.rpartition(".")[0]) / "presets").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """A preset by name, or a .toml or .json file by path. Raises ClusterFileError."""
    text_name = os.fspath(name_or_path)
    if text_name in preset_names():
        resource = resources.files(__name__.rpartition(".")[0]) / "presets" / f"{text_name}.toml"
        return parse_text(resource.read_text(encoding="utf-8"), f"preset {text_name}", is_json=False)
    path = Path(text_name)
    if not path.is_file():
        what = "is a folder" if text_name and path.is_dir() else "is neither a preset nor a file"
        raise ClusterFileError(f"{text_name!r} {what}; {_suggest(path.stem, preset_names(), 'presets')}")
    return parse_text(_read(path), str(path), is_json=path.suffix.lower() == ".json")


def parse_text(text: str, where: str, is_json: bool) -> Cluster:
    """The cluster that a TOML or JSON text describes; `where` names the text in messages."""
    data = _parse_json(text, where) if is_json else _parse_toml(text, where)
    return parse_cluster(data, where, _lines.key_lines(text, is_json))


def parse_cluster(data: object, where: str = "cluster", lines: dict[_lines.Path, int] | None = None) -> Cluster:
    """The cluster that plain data describes. Raises ClusterFileError with the line where `lines` knows it."""
    reader = _Reader(where, lines)
    root = reader.table(data, (), required=("name", "source", "device", "levels"))
    device = _device(reader, root["device"])
    level_list = root["levels"]
    if not isinstance(level_list, list) or not level_list:
        reader.fail(("levels",), "expected at least one [[levels]] table, innermost level first")
    levels = tuple(_level(reader, item, ("levels", index)) for index, item in enumerate(level_list))
    return Cluster(reader.text(root, (), "name"), device, levels, reader.text(root, (), "source"))


def _device(reader: _Reader, data: object) -> Device:
    path = ("device",)
    table = reader.table(data, path, ("name", "flops_per_s", "memory_bytes", "memory_bytes_per_s", "launch_s"))
    flops_path = (*path, "flops_per_s")
    flops = reader.table(table["flops_per_s"], flops_path, (), DTYPES)
    if not flops:
        reader.fail(flops_path, f"expected at least one of {', '.join(DTYPES)}")
    return Device(
        name=reader.text(table, path, "name"),
        flops_per_s={dtype: reader.quantity(flops, flops_path, dtype, "flops_per_s") for dtype in flops},
        memory_bytes=round(reader.quantity(table, path, "memory_bytes", "bytes", least=1)),
        memory_bytes_per_s=reader.quantity(table, path, "memory_bytes_per_s", "bytes_per_s"),
        launch_s=reader.quantity(table, path, "launch_s", "s"),
    )


def _level(reader: _Reader, data: object, path: _lines.Path) -> Level:
    table = reader.table(data, path, ("name", "size", "alpha_s", "bytes_per_s"), ("fits",))
    size = table["size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        reader.fail((*path, "size"), f"expected a whole number of at least 1, got {size!r}")
    return Level(
        name=reader.text(table, path, "name"),
        size=size,
        alpha_s=reader.quantity(table, path, "alpha_s", "s"),
        bytes_per_s=reader.quantity(table, path, "bytes_per_s", "bytes_per_s"),
        fits=_fits(reader, table["fits"], (*path, "fits")) if "fits" in table else None,
    )


def _fits(reader: _Reader, data: object, path: _lines.Path) -> dict[str, tuple[float, float]]:
    fits = {}
    for kind, item in reader.table(data, path, (), COLLECTIVES).items():
        here = (*path, kind)
        table = reader.table(item, here, ("alpha_s", "beta_s_per_byte"))
        # A fit may find no latency at all, so zero is a value here.
        alpha_s = reader.quantity(table, here, "alpha_s", "s", allow_zero=True)
        fits[kind] = (alpha_s, reader.quantity(table, here, "beta_s_per_byte", "s_per_byte", allow_zero=True))
    return fits


class _Reader:
    """Takes values out of plain data and refuses what does not fit, naming file, line and key."""

    def __init__(self, where: str, lines: dict[_lines.Path, int] | None):
        self.where = where
        self.lines = lines

    def fail(self, path: _lines.Path, message: str) -> NoReturn:
        line = "" if self.lines is None else f", line {_lines.line_of(self.lines, path)}"
        key = f", key '{_dotted(path)}'" if path else ""
        raise ClusterFileError(f"{self.where}{line}{key}: {message}")

    def table(
        self, data: object, path: _lines.Path, required: Iterable[str], optional: Iterable[str] = ()
    ) -> dict[str, object]:
        required, known = tuple(required), (*required, *optional)
        if not isinstance(data, dict):
            self.fail(path, f"expected a table with {', '.join(known)}, got {_kind(data)}")
        for key in data:
            if key not in known:
                self.fail((*path, key), f"unknown key; {_suggest(str(key), known, 'keys here')}")
        for key in required:
            if key not in data:
                self.fail((*path, key), f"missing; the table needs {', '.join(required)}")
        return data

    def text(self, table: dict[str, object], path: _lines.Path, key: str) -> str:
        value = table[key]
        if not isinstance(value, str) or not value.strip():
            self.fail((*path, key), f"expected a text that is not empty, got {_kind(value)}")
        return value

    def quantity(
        self,
        table: dict[str, object],
        path: _lines.Path,
        key: str,
        unit: str,
        least: float = 0.0,
        allow_zero: bool = False,
    ) -> float:
        """A positive, finite number in base units; text with a unit is converted."""
        value, here, number = table[key], (*path, key), math.nan
        if isinstance(value, str):
            try:
                number = parse_quantity(value, unit)
            except ValueError as error:
                self.fail(here, f"{error}; expected {EXAMPLES[unit]}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(here, f"expected {EXAMPLES[unit]}, got {_kind(value)}")
        else:
            number = _float(value)
        if not (math.isfinite(number) and number >= least and (number > 0 or (allow_zero and number == 0))):
            self.fail(here, f"must be a positive, finite number, got {value!r}; expected {EXAMPLES[unit]}")
        return number


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise ClusterFileError(f"{path}: larger than {_LARGEST_FILE_BYTES} bytes; is this a cluster file?")
        raw = path.read_bytes()
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ClusterFileError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from error
    except OSError as error:
        raise ClusterFileError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_toml(text: str, where: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        rows = text.split("\n")
        match = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(match[1]) if match else len(rows)
        key = re.match(r"\s*([\w.\-\"']+)\s*=", rows[line - 1])
        named = f", key '{key[1]}'" if key else ""
        shown = rows[line - 1].strip()[:80]
        raise ClusterFileError(f"{where}, line {line}{named}: not TOML: {error}; the line reads {shown!r}") from error
    except (ValueError, RecursionError) as error:
        raise _absurd(text, where, error) from error


def _absurd(text: str, where: str, error: Exception) -> ClusterFileError:
    """For what the parsers refuse without a line: thousands of digits or brackets, so the longest line has them."""
    rows = text.split("\n")
    line = max(range(len(rows)), key=lambda index: len(rows[index])) + 1
    return ClusterFileError(f"{where}, line {line}: not a cluster file: {error}")


def _parse_json(text: str, where: str) -> object:
    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: dict[str, object] = {}
        for key, value in pairs:
            if key in seen:
                found = [match.start() for match in re.finditer(re.escape(json.dumps(key)), text)]
                line = text.count("\n", 0, found[-1]) + 1 if found else 1
                raise ClusterFileError(f"{where}, line {line}, key '{key}': given twice; keep one")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ClusterFileError(f"{where}, line {error.lineno}: not JSON: {error.msg}") from error
    except ClusterFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise _absurd(text, where, error) from error


def _suggest(word: str, known: Iterable[str], what: str) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}{what}: {', '.join(known)}"


def _kind(value: object) -> str:
    names: dict[type, str] = {bool: "a boolean", dict: "a table", list: "a list", str: "the text"}
    shown = "" if isinstance(value, (dict, list)) else f" {value!r}"
    return f"{names.get(type(value), type(value).__name__)}{shown}"


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _dotted(path: _lines.Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
