"""Sequence models: GPTs, encoder, encoder-decoder, mixture of experts, LSTM.

Shapes: B rows, T tokens, C width, H heads, D width of a head, E experts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_checkpointed

from shardwise.models import GPT, GPTConfig
from tests.models.case import BLOCK, VOCAB, WIDTH, Batch, Built, case, draw, itself, tokens_and_targets

TINY = GPTConfig(vocab_size=VOCAB, block_size=BLOCK, n_layer=2, n_head=4, n_embd=WIDTH)
IGNORED = -100


@case()
def gpt() -> Built:
    return Built(GPT(TINY), tokens_and_targets, itself)


@case(random=True, notes="dropout of activations and, inside attention, of weights")
def gpt_dropout() -> Built:
    return Built(GPT(replace(TINY, dropout=0.1)), tokens_and_targets, itself)


@case(notes="one parameter under two names, with two gradients to add")
def gpt_tied() -> Built:
    return Built(GPT(replace(TINY, tied=True)), tokens_and_targets, itself)


@case(notes="rows differ in how many labels count, and whole rows are ignored: a mean of the ranks' means is wrong")
def ignored_labels() -> Built:
    def make_batch(step: int, rows: int) -> Batch:
        (tokens, targets), _ = tokens_and_targets(step, rows)
        for row in range(rows):
            # Rows 2 and 3 of every 8 count nothing at all: at 4 ranks, rank 1 has no label.
            counted = 0 if row % 8 in (2, 3) else 1 + (5 * row + step) % BLOCK
            targets[row, counted:] = IGNORED
        return (tokens, targets), {}

    return Built(GPT(TINY), make_batch, itself)


class CheckpointedGPT(GPT):
    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        position_t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btc = self.embedding(tokens_bt) + self.positions(position_t)
        for layer in self.layers:
            x_btc = run_checkpointed(layer, x_btc, use_reentrant=False)
        logits_btv = self.head(self.norm(x_btc))
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


@case(notes="torch.utils.checkpoint around every block; the numbers are those of gpt")
def checkpointed() -> Built:
    return Built(CheckpointedGPT(TINY), tokens_and_targets, itself)


class EncoderBlock(nn.Module):
    """Post-norm, bidirectional, with a learned bias [H, T, T] on the scores."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # a key's bias shifts all scores alike: no gradient
        self.bias_htt = nn.Parameter(0.1 * torch.randn(heads, BLOCK, BLOCK))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm_attn, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x_btc: Tensor, padded_bt: Tensor) -> Tensor:
        B, T, C = x_btc.shape
        q, k, v = (
            layer(x_btc).view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mask_bhtt = self.bias_htt[None, :, :T, :T].masked_fill(padded_bt[:, None, None, :], float("-inf"))
        y_bhtd = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_bhtt)
        x_btc = self.norm_attn(x_btc + self.out(y_bhtd.transpose(1, 2).reshape(B, T, C)))
        return self.norm_mlp(x_btc + self.mlp(x_btc))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(BLOCK, WIDTH))
        self.blocks = nn.ModuleList(EncoderBlock(heads=4) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_bt: Tensor, padded_bt: Tensor, labels_bt: Tensor) -> Tensor:
        x_btc = self.embedding(tokens_bt) + self.positions[: tokens_bt.shape[1]]
        for block in self.blocks:
            x_btc = block(x_btc, padded_bt)
        labels_bt = labels_bt.masked_fill(padded_bt, IGNORED)
        return F.cross_entropy(self.head(x_btc).transpose(1, 2), labels_bt)


@case(notes="key-padding mask by row, learned additive mask, cross entropy over dim 1 of [B, V, T]")
def encoder() -> Built:
    def make_batch(step: int, rows: int) -> Batch:
        (tokens, labels), _ = tokens_and_targets(step, rows)
        length_b = torch.randint(3, BLOCK + 1, (rows, 1), generator=draw(step + 500))
        return (tokens, torch.arange(BLOCK) >= length_b, labels), {}

    return Built(Encoder(), make_batch, itself)


class Attention(nn.Module):
    """Scores and softmax written out; `memory` is what is looked at."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_btc: Tensor, memory_bsc: Tensor, hidden_ts: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).movedim(2, 1)
            for layer, t in ((self.query, x_btc), (self.key, memory_bsc), (self.value, memory_bsc))
        )
        scores_bhts = q @ k.mT / q.shape[-1] ** 0.5
        if hidden_ts is not None:
            scores_bhts = scores_bhts.masked_fill(hidden_ts, -1e9)
        return self.out((scores_bhts.softmax(-1) @ v).movedim(1, 2).flatten(2))


class CrossBlock(nn.Module):
    """Self-attention, attention to the encoder's output where there is one, MLP."""

    def __init__(self, crossed: bool):
        super().__init__()
        self.attn = Attention(heads=4)
        self.cross = Attention(heads=4) if crossed else None
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x_btc: Tensor, memory_bsc: Tensor | None, hidden_tt: Tensor | None) -> Tensor:
        y_btc = self.norms[0](x_btc)
        x_btc = x_btc + self.attn(y_btc, y_btc, hidden_tt)
        if self.cross is not None:
            x_btc = x_btc + self.cross(self.norms[1](x_btc), memory_bsc)
        return x_btc + self.mlp(self.norms[2](x_btc))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(CrossBlock(crossed=False) for _ in range(2))
        self.decoder = nn.ModuleList(CrossBlock(crossed=True) for _ in range(2))
        # norms[1] of an encoder block would have no use, and so no gradient.
        for block in self.encoder:
            block.norms[1] = nn.Identity()

    def forward(self, source_bs: Tensor, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        memory_bsc = self.embedding(source_bs)
        for block in self.encoder:
            memory_bsc = block(memory_bsc, None, None)
        T = tokens_bt.shape[1]
        hidden_tt = torch.ones(T, T, dtype=torch.bool, device=tokens_bt.device).triu(1)
        x_btc = self.embedding(tokens_bt)
        for block in self.decoder:
            x_btc = block(x_btc, memory_bsc, hidden_tt)
        logits_btv = x_btc @ self.embedding.weight.T / WIDTH
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


@case(notes="cross attention between sequences of different lengths; one embedding used three times")
def encdec() -> Built:
    def make_batch(step: int, rows: int) -> Batch:
        (tokens, targets), _ = tokens_and_targets(step, rows)
        source = torch.randint(VOCAB, (rows, 9), generator=draw(step + 500))
        return (source, tokens, targets), {}

    return Built(EncoderDecoder(), make_batch, itself)


class Experts(nn.Module):
    """Top-k routing with fixed shapes: every expert sees every token, and all but k gates are zero."""

    def __init__(self, experts: int, k: int):
        super().__init__()
        self.k = k
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up_ech = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down_ehc = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x_btc: Tensor) -> tuple[Tensor, Tensor]:
        score_bte = self.router(x_btc)
        best_btk, which_btk = score_bte.topk(self.k, dim=-1)
        gate_bte = torch.zeros_like(score_bte).scatter(-1, which_btk, best_btk.softmax(-1))
        hidden_bteh = F.gelu(torch.einsum("btc,ech->bteh", x_btc, self.up_ech))
        y_btec = torch.einsum("bteh,ehc->btec", hidden_bteh, self.down_ehc)
        # Balance: a product of two means over all tokens, so a mean of the ranks' products is wrong.
        used_e = (gate_bte > 0).to(x_btc.dtype).mean((0, 1))
        balance = score_bte.shape[-1] * (used_e * score_bte.softmax(-1).mean((0, 1))).sum()
        return torch.einsum("btec,bte->btc", y_btec, gate_bte), balance


class MixtureLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Experts(experts=4, k=2) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        x_btc = self.embedding(tokens_bt)
        balances = []
        for layer in self.layers:
            y_btc, balance = layer(F.rms_norm(x_btc, (WIDTH,)))
            x_btc = x_btc + y_btc
            balances.append(balance)
        loss = F.cross_entropy(self.head(x_btc).flatten(0, 1), targets_bt.flatten())
        return loss + 0.01 * sum(balances)


@case(notes="topk, scatter of gates, einsum over experts, a loss that is not a mean over rows")
def moe() -> Built:
    return Built(MixtureLM(), tokens_and_targets, itself)


class LSTMLM(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


@case()
def lstm() -> Built:
    return Built(LSTMLM(batch_first=True), tokens_and_targets, itself)


@case(batch_dim=1, notes="time comes first: rows are counted by dim 1 of the inputs")
def lstm_time_first() -> Built:
    def make_batch(step: int, rows: int) -> Batch:
        (tokens, targets), _ = tokens_and_targets(step, rows)
        return (tokens.T.contiguous(), targets.T.contiguous()), {}

    return Built(LSTMLM(batch_first=False), make_batch, itself)
