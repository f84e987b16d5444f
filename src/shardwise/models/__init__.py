"""Plain single-device torch models and their data; they know nothing of the rest."""

from shardwise.models.gpt import GPT, GPTConfig, demo_config
from shardwise.models.text import batches, stdlib_corpus

__all__ = ["GPT", "GPTConfig", "batches", "demo_config", "stdlib_corpus"]
