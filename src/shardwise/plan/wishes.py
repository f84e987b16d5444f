"""What the user fixes or forbids, as text: `{"fc.weight": "S0", "input 0": "!R", "output 0": "[S0, R]"}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ..errors import InputError
from ..ir.placement import Layout, R, format_layout, parse_layout

Constraints = Mapping[str, str]
Placed = tuple[tuple[str, Layout], ...]
"""(path, layout)"""


@dataclass(frozen=True)
class Wish:
    """One placement that the user fixes or forbids."""

    path: str
    layout: Layout
    forbidden: bool

    def __str__(self) -> str:
        return ("!" if self.forbidden else "") + format_layout(self.layout)


def read_wishes(constraints: Constraints | None) -> tuple[Wish, ...]:
    """Reads `constraints`. Raises InputError for what is no dictionary, and naming the path for what is no layout."""
    if constraints is not None and not isinstance(constraints, Mapping):
        raise InputError(
            f"constraints: expected a dictionary such as {{'fc.weight': 'S0'}}, got {type(constraints).__name__}"
        )
    found = []
    for path, text in (constraints or {}).items():
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"constraints[{path!r}]: expected a placement such as 'S0', 'R' or '!R', got {text!r}")
        try:
            layout = parse_layout(text.strip().removeprefix("!"))
        except ValueError as error:
            raise InputError(f"constraints[{path!r}]: {error}") from None
        found.append(Wish(path, layout, text.strip().startswith("!")))
    return tuple(found)


def fitting_shapes(
    wishes: Sequence[Wish], shapes: tuple[tuple[int, ...], ...], known: Sequence[str], what: str, example: str
) -> tuple[tuple[int, ...], ...]:
    """The mesh shapes that have as many axes as the wishes name. Raises InputError where there is none, or for a path
    that is not among the `known` ones of `what`; `example` says what paths look like."""
    for wish in wishes:
        if wish.path not in known:
            close = ", ".join(get_close_matches(str(wish.path), known, 3)) or example
            raise InputError(f"constraints: the {what} has no {wish.path!r}; try {close}")
        left = tuple(s for s in shapes if len(s) == len(wish.layout))
        if not left:
            raise InputError(
                f"constraints[{wish.path!r}]: {wish} has {_axes(len(wish.layout))}, the mesh has {len(shapes[0])}; "
                "write one placement per axis, such as '[S0, R]' on two, or choose the mesh with mesh="
            )
        shapes = left
    return shapes


def _axes(count: int) -> str:
    return f"{count} ax{'i' if count == 1 else 'e'}s"


def fixed_and_forbidden(wishes: Sequence[Wish]) -> tuple[Placed, Placed]:
    """(path, layout) of what must be, and of what must not be."""
    fixed = tuple((w.path, w.layout) for w in wishes if not w.forbidden)
    return fixed, tuple((w.path, w.layout) for w in wishes if w.forbidden)


def inputs_kept_whole(wishes: Sequence[Wish]) -> frozenset[int]:
    """The numbers of the inputs that every device must have whole."""
    whole = (w.path.removeprefix("input ") for w in wishes if not w.forbidden and set(w.layout) == {R})
    return frozenset(int(number) for number in whole if number.isdigit())
