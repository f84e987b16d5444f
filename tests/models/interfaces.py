"""Models that differ in what goes in, what comes out and what is kept, not in their arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.case import VOCAB, WIDTH, Batch, Built, case, draw, itself, normal, tokens_and_targets
from tests.models.layers import regression_batch


class BagLM(nn.Module):
    """The smallest language model: embedding, one hidden layer, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCAB)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.head(F.gelu(self.hidden(self.embedding(tokens_bt))))


class TwoOutputs(BagLM):
    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> tuple[Tensor, Tensor]:
        logits_btv = super().forward(tokens_bt)
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten()), logits_btv


@case(notes="returns (loss, logits); only the loss receives a gradient")
def two_outputs() -> Built:
    return Built(TwoOutputs(), tokens_and_targets, lambda outputs: outputs[0])


@case(notes="both outputs receive a gradient")
def two_gradients() -> Built:
    return Built(TwoOutputs(), tokens_and_targets, lambda outputs: outputs[0] + 0.01 * outputs[1].square().mean())


@case(notes="returns logits; the loss (every target is class 3) is taken outside")
def no_loss() -> Built:
    def make_batch(step: int, rows: int) -> Batch:
        (tokens, _), _ = tokens_and_targets(step, rows)
        return (tokens,), {}

    def loss_from(logits_btv: Tensor) -> Tensor:
        targets = torch.full(logits_btv.shape[:2], 3)
        return F.cross_entropy(logits_btv.flatten(0, 1), targets.flatten())

    return Built(BagLM(), make_batch, loss_from)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(WIDTH, 40).requires_grad_(False)
        self.adapter = nn.Linear(40, 40)
        self.unused = nn.Parameter(torch.ones(17))
        self.head = nn.Linear(40, 5)

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        h = F.relu(self.features(x_bc))
        return F.mse_loss(self.head(h + self.adapter(h)), y_bd)


@case(notes="frozen parameters, and one that nothing uses: both have no gradient")
def frozen() -> Built:
    return Built(Frozen(), regression_batch, itself)


class Buffers(nn.Module):
    """Counts its steps and keeps a running mean over the rows, which it uses before it is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40), nn.Linear(40, 5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running_mean", torch.zeros(40))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 40), persistent=False)

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        h_bc = torch.tanh(self.first(x_bc))
        centred_bc = (h_bc - self.running_mean) * self.scale
        if self.training:
            self.steps += 1
            self.running_mean.lerp_(h_bc.detach().mean(0), 0.1)
        return F.mse_loss(self.second(centred_bc), y_bd)


@case(notes="integer counter and running mean written in forward; one buffer that is not saved")
def buffers() -> Built:
    return Built(Buffers(), regression_batch, itself)


class Pytrees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"left": nn.Linear(WIDTH, 24), "right": nn.Linear(WIDTH, 24)})
        self.head = nn.Linear(24, 5)

    def forward(
        self,
        inputs: dict[str, Tensor],
        labels: tuple[Tensor, list[Tensor]],
        power: int,
        *,
        weights: dict[str, float],
        center: bool = False,
        extra: Tensor | None = None,
        mode: str = "sum",
        options: dict | None = None,
    ) -> dict:
        h = sum(weights[side] * layer(inputs[side]) for side, layer in self.layers.items())
        if center:
            h = h - h.mean(-1, keepdim=True)
        if extra is not None:
            h = h + extra
        prediction = self.head(torch.tanh(h) ** power)
        target, (temperature,) = labels
        error = (prediction - target).square() * temperature
        loss = error.mean() if mode == "mean" else error.sum()
        return {"loss": loss, "parts": [prediction.detach(), {"mode": mode, "none": None}]}


@case(notes="nested dict, tuple and list in and out; int, float, bool, None and str among them; a scalar tensor")
def kwargs_pytree() -> Built:
    def make_batch(step: int, rows: int) -> Batch:
        inputs = {"left": normal(step, rows, WIDTH), "right": normal(step + 300, rows, WIDTH)}
        temperature = torch.rand((), generator=draw(step), dtype=torch.float64) + 0.5
        labels = (normal(step + 500, rows, 5), [temperature])
        kwargs = {"weights": {"left": 0.75, "right": 1.25}, "center": True, "extra": None, "mode": "mean"}
        return (inputs, labels, 2), {**kwargs, "options": {}}

    return Built(Pytrees(), make_batch, lambda outputs: outputs["loss"])
