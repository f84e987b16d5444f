"""Random numbers that do not depend on where an element lies: see `operators`, `decompositions` and `state`."""

from shardwise.pytorch.random.decompositions import random_decompositions
from shardwise.pytorch.random.detect import draws, is_random
from shardwise.pytorch.random.kernel import prepare
from shardwise.pytorch.random.operators import (
    OPERATORS,
    random_bernoulli,
    random_bits,
    random_exponential,
    random_integer,
    random_normal,
    random_uniform,
)
from shardwise.pytorch.random.state import RandomState, positions

__all__ = [
    "OPERATORS",
    "RandomState",
    "draws",
    "is_random",
    "positions",
    "prepare",
    "random_bernoulli",
    "random_bits",
    "random_decompositions",
    "random_exponential",
    "random_integer",
    "random_normal",
    "random_uniform",
]
