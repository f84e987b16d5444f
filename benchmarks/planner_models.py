"""The models that `benchmarks/planner.py` plans, captured on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise.ir.graph import Graph
from shardwise.ir.passes import recompute
from shardwise.models import GPT
from shardwise.models.gpt import demo_config
from shardwise.pipeline import find_rules
from shardwise.pytorch.capture import Program, capture
from shardwise.pytorch.flops import count_flops
from shardwise.rules.rule import Rule

BATCH = 8
LLAMA_ROWS, LLAMA_TOKENS = 16, 4096


@dataclass(frozen=True)
class Model:
    """A captured model with its rules."""

    graph: Graph
    rules: tuple[Rule, ...]
    flops: dict[str, float]


def _ruled(program: Program) -> Model:
    """As it is planned: with decompositions where they help."""
    ruled = find_rules(recompute(program.graph))
    return Model(ruled.graph, ruled.rules, count_flops(ruled.graph))


def gpt(layers: int) -> Model:
    """GPT of the demo's width."""
    config = replace(demo_config(), n_layer=layers)
    tokens = torch.zeros(BATCH, config.block_size, dtype=torch.long)
    return _ruled(capture(GPT(config), (tokens, tokens)))


def mlp() -> Model:
    """One block."""
    block = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    return _ruled(capture(block, (torch.randn(64, 128, 1024),)))


def llama() -> Model:
    """LLaMA-3-8B in bfloat16 as transformers builds it, 16 rows of 4,096 tokens, forward and backward. Raises
    ImportError where transformers is missing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0, rms_norm_eps=1e-5, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        module = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(LLAMA_ROWS, LLAMA_TOKENS, dtype=torch.long)
    return _ruled(capture(module, (), {"input_ids": tokens, "labels": tokens}, training=True))


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    **{f"gpt{layers}": (lambda layers=layers: gpt(layers)) for layers in (2, 4, 8, 32)},
    "llama8b": llama,
}
