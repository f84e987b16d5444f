"""A byte-level GPT for one device: what a user would write, with no line of parallel code.

Shapes in names and comments: B rows, T tokens, C embedding width, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100  # a target of this value does not count in the loss; PyTorch's own default


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    dropout: float = 0.0
    tied: bool = False  # the output layer uses the embedding's own weight
    bias: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")


def demo_config() -> GPTConfig:
    """About 10.9 million parameters: learns visibly within a minute on two CPU cores."""
    return GPTConfig(vocab_size=256, block_size=128, n_layer=6, n_head=6, n_embd=384)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.proj_dropout = nn.Dropout(config.dropout)

    def forward(self, x_btc: Tensor) -> Tensor:
        B, T, C = x_btc.shape
        q, k, v = self.qkv(x_btc).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.proj_dropout(self.proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_btc: Tensor) -> Tensor:
        return self.dropout(self.proj(F.gelu(self.up(x_btc))))


class Block(nn.Module):
    """Pre-norm: the residual stream itself is never normalised."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_attn = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.norm_mlp = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x_btc: Tensor) -> Tensor:
        x_btc = x_btc + self.attn(self.norm_attn(x_btc))
        return x_btc + self.mlp(self.norm_mlp(x_btc))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self._initialize()

    def _initialize(self) -> None:
        # GPT-2's: 0.02, and narrower by the depth where a block writes to the residual stream.
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(".proj")
                std = 0.02 * (2 * self.config.n_layer) ** -0.5 if residual else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        """The mean loss over the targets that are not IGNORE_INDEX; without targets, the logits [B, T, V]."""
        T = tokens_bt.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"{T} tokens a row, but block_size is {self.config.block_size}: cut the rows or raise it")
        position_t = torch.arange(T, device=tokens_bt.device)
        x_btc = self.dropout(self.embedding(tokens_bt) + self.positions(position_t))
        for layer in self.layers:
            x_btc = layer(x_btc)
        logits_btv = self.head(self.norm(x_btc))
        if targets_bt is None:
            return logits_btv
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten(), ignore_index=IGNORE_INDEX)
