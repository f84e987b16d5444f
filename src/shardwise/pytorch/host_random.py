"""Draws from Python's and numpy's generators inside forward, which a trace bakes in.

A model that draws but whose graph does not depend on what it draws (layers dropped with probability zero) can be
captured; others would do the same in every step, in silence.
"""

from __future__ import annotations

import random
import sys
from typing import Any

TRIES = 4
"""Further captures with other draws, where forward draws."""


def state() -> tuple[Any, ...]:
    """The states of both generators; equal before and after where nothing was drawn."""
    numpy = sys.modules.get("numpy")
    theirs = None if numpy is None else numpy.random.get_state(legacy=False)
    if theirs is None:
        return random.getstate(), None
    inner = theirs["state"]
    return random.getstate(), (inner["key"].tobytes() if "key" in inner else str(inner), inner.get("pos"))


REFUSED = (
    "forward draws from Python's or numpy's random generator, and what it computes depends on it; a captured program "
    "would do the same in every step. Draw with torch (torch.rand, torch.randint), or draw outside and pass the "
    "value as an argument"
)
