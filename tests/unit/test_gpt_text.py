from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardwise.errors import InputError
from shardwise.models import GPT, GPTConfig, batches, demo_config, stdlib_corpus

TINY = GPTConfig(vocab_size=256, block_size=16, n_layer=2, n_head=4, n_embd=32)


def test_demo_config_has_about_ten_million_parameters():
    with torch.device("meta"):
        model = GPT(demo_config())
    assert 10_000_000 < sum(p.numel() for p in model.parameters()) < 12_000_000


def test_untrained_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 16))
    assert GPT(TINY)(tokens, tokens).item() == pytest.approx(math.log(256), abs=0.2)


def test_no_token_sees_a_later_one():
    torch.manual_seed(0)
    model = GPT(TINY)
    a = torch.randint(256, (1, 16))
    b = a.clone()
    b[0, 10:] = 0
    assert torch.equal(model(a)[0, :10], model(b)[0, :10])


def test_tied_weights_are_one_parameter():
    model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=2, n_embd=8, tied=True))
    assert model.head.weight is model.embedding.weight


def test_rows_longer_than_the_block_are_refused():
    with pytest.raises(ValueError, match="block_size is 16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.int64))


def test_corpus_and_batches_repeat():
    corpus = stdlib_corpus(200_000)
    assert corpus.dtype == np.uint8 and corpus.size == 200_000
    assert np.array_equal(corpus, stdlib_corpus(200_000))
    first = list(batches(corpus, batch=3, block=8, steps=4, seed=5))
    again = list(batches(corpus, batch=3, block=8, steps=4, seed=5))
    for (tokens, targets), (tokens2, targets2) in zip(first, again):
        assert tokens.shape == (3, 8) and tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens, tokens2) and torch.equal(targets, targets2)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
    resumed = next(batches(corpus, batch=3, block=8, steps=1, seed=5, first_step=2))
    assert torch.equal(resumed[0], first[2][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_every_window_of_the_corpus_can_be_drawn():
    corpus = np.arange(10, dtype=np.uint8)
    last = {int(targets[0, -1]) for _, targets in batches(corpus, batch=1, block=7, steps=50)}
    assert last == {7, 8, 9}


def test_missing_source_is_named(tmp_path):
    with pytest.raises(InputError, match="without its library's source"):
        stdlib_corpus(root=tmp_path)
    with pytest.raises(InputError, match="smaller block"):
        next(batches(np.zeros(8, np.uint8), batch=1, block=8, steps=1))


def test_it_learns():
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens, targets in batches(stdlib_corpus(100_000), batch=16, block=16, steps=40):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.5
