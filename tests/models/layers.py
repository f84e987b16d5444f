"""Models without a sequence: perceptrons, convolutions, a custom operator, in-place writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.case import WIDTH, Batch, Built, case, draw, itself, normal

CLASSES = 11


def image_batch(step: int, rows: int) -> Batch:
    labels = torch.randint(CLASSES, (rows,), generator=draw(step + 500))
    return (normal(step, rows, 3, 8, 8), labels), {}


def regression_batch(step: int, rows: int) -> Batch:
    return (normal(step, rows, WIDTH), normal(step + 500, rows, 5)), {}


class Regression(nn.Module):
    """Any body with the mean squared error behind it."""

    def __init__(self, *body: nn.Module):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        return F.mse_loss(self.body(x_bc), y_bd)


@case()
def mlp() -> Built:
    body = (nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    return Built(Regression(*body), regression_batch, itself)


@case(rows=7, notes="every width and the number of rows are prime: all pieces are uneven")
def uneven_mlp() -> Built:
    body = (nn.Linear(13, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 53), nn.Sigmoid(), nn.Linear(53, 5))

    def make_batch(step: int, rows: int) -> Batch:
        return (normal(step, rows, 13), normal(step + 500, rows, 5)), {}

    return Built(Regression(*body), make_batch, itself)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 8, 1), (8, 12, 2), (12, 16, 1)):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x_bchw: Tensor, labels_b: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x_bchw)), labels_b)


@case(notes="batch norm in training mode: statistics over all rows, running buffers")
def convnet() -> Built:
    return Built(ConvNet(), image_batch, itself)


class DepthwiseConv1d(nn.Module):
    """Channels first [B, C, T]: pointwise, gate, depthwise, pointwise, as in a Conformer."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.grouped = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)

    def forward(self, x_bct: Tensor, y_bct: Tensor) -> Tensor:
        y = self.depthwise(F.glu(self.expand(x_bct), dim=1))
        y = x_bct + self.grouped(F.silu(self.norm(y)))
        return F.smooth_l1_loss(y, y_bct)


@case(notes="depthwise and grouped convolution, GLU, group norm")
def depthwise() -> Built:
    def make_batch(step: int, rows: int) -> Batch:
        return (normal(step, rows, WIDTH, 10), normal(step + 500, rows, WIDTH, 10)), {}

    return Built(DepthwiseConv1d(), make_batch, itself)


# An operator that nobody wrote a rule for. It splits along every dim but the last, which it centres.
@torch.library.custom_op("toytest::smooth_gate", mutates_args=())
def smooth_gate(x: Tensor, gate: Tensor, sharpness: float) -> Tensor:
    return x * torch.sigmoid(sharpness * (gate - gate.mean(-1, keepdim=True)))


@smooth_gate.register_fake
def _(x: Tensor, gate: Tensor, sharpness: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("toytest::smooth_gate_backward", mutates_args=())
def smooth_gate_backward(grad: Tensor, x: Tensor, gate: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
    open_ = torch.sigmoid(sharpness * (gate - gate.mean(-1, keepdim=True)))
    grad_centred = grad * x * open_ * (1 - open_) * sharpness
    return grad * open_, grad_centred - grad_centred.mean(-1, keepdim=True)


@smooth_gate_backward.register_fake
def _(grad: Tensor, x: Tensor, gate: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate)


def _save_for_backward(ctx, inputs, output) -> None:
    x, gate, ctx.sharpness = inputs
    ctx.save_for_backward(x, gate)


def _backward(ctx, grad: Tensor):
    grad_x, grad_gate = smooth_gate_backward(grad, *ctx.saved_tensors, ctx.sharpness)
    return grad_x, grad_gate, None


smooth_gate.register_autograd(_backward, setup_context=_save_for_backward)


class GatedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)
        self.out = nn.Linear(48, 5)

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        return F.mse_loss(self.out(smooth_gate(self.value(x_bc), self.gate(x_bc), 1.5)), y_bd)


@case(notes="a custom operator, forward and backward, known to nobody: toytest::smooth_gate")
def toy_op() -> Built:
    return Built(GatedNet(), regression_batch, itself)


class InplaceNet(nn.Module):
    """Writes through views of its own values: slices, transposes, a diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 36), nn.Linear(36, 5)

    def forward(self, x_bc: Tensor, y_bd: Tensor) -> Tensor:
        h_bc = self.first(x_bc)
        square_bss = h_bc.view(-1, 6, 6)
        square_bss[:, ::2].mul_(0.5)
        square_bss.transpose(1, 2)[:, 1:3].add_(1.0)
        square_bss.diagonal(dim1=1, dim2=2).zero_()
        h_bc[:, :5] += y_bd
        h_bc.relu_()
        out_bd = torch.zeros_like(y_bd)
        out_bd.copy_(self.second(h_bc))
        out_bd[:, 0] = out_bd[:, 1] + 2 * out_bd[:, 2]
        return (out_bd - y_bd).square_().mean()


@case(notes="in-place operators on views, copy_, assignment to a slice")
def inplace_net() -> Built:
    return Built(InplaceNet(), regression_batch, itself)
