"""On which line a key of a TOML or JSON text stands; the parsers of the standard library do not say.

Only for texts that have parsed already, so the grammar here is loose: it follows brackets, strings and comments.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|\#[^\n]*|\n|[\[\]{},=:.]|[^\s\[\]{},=:.\'"\#]+',
    re.DOTALL,
)


class _Scanner:
    """Walks the tokens once and notes the line of every key and list element."""

    def __init__(self, text: str):
        self.lines: dict[Path, int] = {(): 1}
        self.tokens: list[tuple[str, int]] = []
        line, seen = 1, 0
        for match in _TOKEN.finditer(text):
            line += text.count("\n", seen, match.start())
            seen = match.start()
            if not match[0].startswith("#"):
                self.tokens.append((match[0], line))
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)][1] if self.tokens else 1

    def skip(self, *tokens: str) -> None:
        while self.peek() in tokens and self.peek():
            self.at += 1

    def note(self, path: Path, line: int) -> None:
        for length in range(1, len(path) + 1):  # a dotted key is the first mention of its tables too
            self.lines.setdefault(path[:length], line)

    def key(self) -> Path:
        """A dotted key, up to and without '=', ':' or ']'."""
        parts: list[str] = []
        while self.peek() not in ("=", ":", "]", ""):
            token = self.peek()
            if token not in (".", "\n"):
                parts.append(token[1:-1] if token[0] in "\"'" else token)
            self.at += 1
        return tuple(parts)

    def entry(self, table: Path) -> None:
        line = self.line()
        path = table + self.key()
        self.at += 1
        self.note(path, line)
        self.value(path)

    def value(self, path: Path) -> None:
        if self.peek() == "{":
            self.at += 1
            self.skip("\n", ",")
            while self.peek() not in ("}", ""):
                self.entry(path)
                self.skip("\n", ",")
            self.at += 1
        elif self.peek() == "[":
            self.at += 1
            index = 0
            self.skip("\n", ",")
            while self.peek() not in ("]", ""):
                self.note((*path, index), self.line())
                self.value((*path, index))
                self.skip("\n", ",")
                index += 1
            self.at += 1
        else:
            while self.peek() not in ("\n", ",", "}", "]", ""):
                self.at += 1

    def toml(self) -> None:
        table: Path = ()
        counts: dict[Path, int] = {}
        self.skip("\n")
        while self.peek():
            if self.peek() == "[":
                line = self.line()
                self.skip("[")
                is_element = self.tokens[self.at - 2][0] == "[" and self.at >= 2
                table = self._resolve(self.key(), counts)
                self.skip("]")
                if is_element:
                    self.note(table, line)
                    counts[table] = counts.get(table, -1) + 1
                    table = (*table, counts[table])
                self.note(table, line)
            else:
                self.entry(table)
            self.skip("\n")

    @staticmethod
    def _resolve(header: Path, counts: dict[Path, int]) -> Path:
        """[levels.fits] means the fits of the level opened last; the last part itself stays bare."""
        path: Path = ()
        for part in header[:-1]:
            path = (*path, part)
            if path in counts:
                path = (*path, counts[path])
        return path + header[-1:]


def key_lines(text: str, is_json: bool) -> dict[Path, int]:
    """Line, from 1, of every key (and list element) of a TOML or JSON text, by its path."""
    scanner = _Scanner(text)
    if is_json:
        scanner.skip("\n")
        scanner.value(())
    else:
        scanner.toml()
    return scanner.lines


def line_of(lines: dict[Path, int], path: Path) -> int:
    """The line of `path`, or of the nearest table around it (for a key that is missing)."""
    while path not in lines:
        path = path[:-1]
    return lines[path]
