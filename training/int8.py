"""Linear layers whose weights take a byte each: `quantize=int8` of sample.py."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Up to so many rows torch's kernel is as fast as a product in bf16 or faster; beyond, it counts
# more than it reads (LOG.md).
FEW = 16
# The kernel reads beyond the end of rows that are no multiple of so many numbers long.
STRIDE = 16
PIECE = 1 << 20  # weights that are bf16 at once


class Int8Linear(nn.Module):
    """`nn.Linear` with weights W ≈ scale · q: q int8, a bf16 scale for each row of W.

    Weight-only, symmetric, by the row's largest weight: each is within scale / 2 of what it was
    (LLM.int8(), Dettmers et al. 2022, without outliers). Inputs stay bf16.
    """

    def __init__(self, layer: nn.Linear):
        """Reads the layer's weights as they are now."""
        super().__init__()
        weight = layer.weight.detach().float()
        # Rounded first, so that the numbers fit the very scale that they are multiplied by.
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-30).bfloat16()  # (out)
        q = (weight / scale.float()[:, None]).round().to(torch.int8)  # (out, in)
        self.register_buffer("q", q, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The weights (out, in) that it stands for, as fine as the scales."""
        return self.q.to(self.scale.dtype) * self.scale[:, None]

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        """As `nn.Linear` does, which can read it then."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.q, self.scale, self.bias)

    def beside(self, *others: "Int8Linear") -> partial:
        """This layer and others side by side, as a function of the input that they share."""
        layers = (self, *others)
        bias = None if self.bias is None else torch.cat([layer.bias for layer in layers])
        return partial(int8_linear, q=torch.cat([layer.q for layer in layers]),
                       scale=torch.cat([layer.scale for layer in layers]), bias=bias)


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, in) times the weights of an `Int8Linear`, in bf16: (…, out)."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if len(rows) <= FEW and q.shape[1] % STRIDE == 0:
        y = torch._weight_int8pack_mm(rows, q, scale).to(x.dtype)  # float32 on CUDA
    else:
        pieces = q.split(max(1, PIECE // q.shape[1]))
        y = torch.cat([F.linear(rows, piece.to(x.dtype)) for piece in pieces], dim=-1) * scale
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], -1)


def quantize(model: nn.Module) -> None:
    """Put an `Int8Linear` in the place of each linear layer."""
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, Int8Linear(layer))
