"""Models that lean on rare parts of PyTorch: operators that write, one layer twice, complex numbers, nested regions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.case import WIDTH, Built, case, itself
from tests.models.layers import regression_batch


# Operators that write into their arguments: a trace brings them as auto_functionalized_v2.
@torch.library.custom_op("toytest::clip_", mutates_args=("x",))
def clip_(x: Tensor, low: float, high: float) -> None:
    x.clamp_(low, high)


@torch.library.custom_op("toytest::move_", mutates_args=("a", "b"))
def move_(a: Tensor, b: Tensor, share: float) -> Tensor:
    """Moves a share of `a` to `b`, row by row; returns what was moved."""
    moved = a * share
    a.sub_(moved)
    b.add_(moved.sum(-1, keepdim=True))
    return moved


@move_.register_fake
def _(a: Tensor, b: Tensor, share: float) -> Tensor:
    return torch.empty_like(a)


class WritingNet(nn.Module):
    """Calls writing operators on a whole value, on a slice, on a transposed view, and on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40), nn.Linear(40, 5)
        self.register_buffer("largest", torch.full((40,), 0.1))

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        h_bc = self.first(x_bc)
        gates_bc = h_bc.detach().abs()
        clip_(gates_bc, 0.1, 1.0)
        clip_(gates_bc[:, 8:24], 0.3, 0.7)
        clip_(gates_bc.t()[2:4], 0.4, 0.5)
        rest_bc, total_bc = h_bc.detach().clone(), torch.zeros_like(h_bc)
        moved_bc = move_(rest_bc, total_bc, 0.25)
        with torch.no_grad():
            top_c = h_bc.abs().amax(0)
            clip_(top_c, 0.0, 2.0)
            self.largest.copy_(torch.maximum(self.largest, top_c))
        h_bc = h_bc * gates_bc + rest_bc * 0.1 + total_bc * 0.01 - moved_bc
        return F.mse_loss(self.second(h_bc / (1 + self.largest)), y_bd)


@case(
    notes="custom operators with mutates_args, on values, views and what goes into a buffer; one returns a result too"
)
def writing_op() -> Built:
    return Built(WritingNet(), regression_batch, itself)


class Scaled(nn.Module):
    """A layer with a buffer that grows at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(36, 36)
        self.register_buffer("scale", torch.ones(36))

    def forward(self, h_bc: Tensor) -> Tensor:
        scale = self.scale.clone()
        self.scale += 0.1 * h_bc.detach().square().mean(0)
        return torch.tanh(self.linear(h_bc) / scale)


class SharedNet(nn.Module):
    """One layer under two names, and a parameter of it under a third."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 36)
        self.mix = Scaled()
        self.again = self.mix
        self.leave = nn.Linear(36, 5)
        self.bias = self.mix.linear.bias

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        h_bc = torch.tanh(self.enter(x_bc))
        h_bc = h_bc + self.mix(h_bc)
        h_bc = h_bc + self.again(h_bc) * self.bias
        return F.mse_loss(self.leave(h_bc), y_bd)


@case(notes="a submodule with parameters and buffers under two names; a parameter tied to one inside it")
def shared_module() -> Built:
    return Built(SharedNet(), regression_batch, itself)


class ComplexNet(nn.Module):
    """Rotary positions as complex numbers, then a filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 24), nn.Linear(24, 5)
        angles = torch.outer(torch.arange(4.0), torch.linspace(0.1, 1, 3))
        self.register_buffer("turn", torch.view_as_real(torch.polar(torch.ones_like(angles), angles)))
        self.filter = nn.Parameter(torch.linspace(-1, 1, 26).view(13, 2))

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        h_bc = self.enter(x_bc)
        pairs_bij = torch.view_as_complex(h_bc.view(-1, 4, 3, 2))
        h_bc = torch.view_as_real(pairs_bij * torch.view_as_complex(self.turn)).flatten(1)
        spectrum_bf = torch.fft.rfft(h_bc) * torch.view_as_complex(self.filter)
        h_bc = torch.fft.irfft(spectrum_bf, n=24)
        return F.mse_loss(self.leave(h_bc), y_bd) + 0.01 * spectrum_bf.abs().mean()


@case(notes="view_as_complex, view_as_real, products of complex numbers, FFT and its inverse, in forward and backward")
def complex_net() -> Built:
    return Built(ComplexNet(), regression_batch, itself)


class RegionsNet(nn.Module):
    """Every block in a checkpointed region of its own, one region inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        def last_two(h_bc: Tensor) -> Tensor:
            h_bc = h_bc + checkpoint(self.blocks[1], h_bc, use_reentrant=False)
            return h_bc + self.blocks[2](h_bc)

        h_bc = x_bc + checkpoint(self.blocks[0], x_bc, use_reentrant=False)
        h_bc = checkpoint(last_two, h_bc, use_reentrant=False)
        return F.mse_loss(self.head(h_bc), y_bd)


@case(random=True, notes="torch.utils.checkpoint around blocks with dropout, one region inside another")
def nested_regions() -> Built:
    return Built(RegionsNet(), regression_batch, itself)
