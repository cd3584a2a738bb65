"""Functions that the model and its cached decoder share; on a CPU, in fewer calls than torch's.

Shapes are written with the letters of model.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHORT = 512  # tokens up to which `short_attention` is the faster one
LOGITS_AT_ONCE = 1 << 20  # that `CrossEntropy` has in float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x (…, in); of one row (1, in) by a matrix–vector product, which reads bf16
    weights faster on a CPU (LOG.md)."""
    if x.dim() > 2 or len(x) > 1:
        return F.linear(x, weight, bias)
    y = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])  # (out)
    return y[None]


def activate(kind: str, h: Tensor, gate: Tensor | None = None) -> Tensor:
    """GELU (tanh form), ReLU² (So et al. 2021), or SwiGLU with its gate (Shazeer 2020), of h."""
    if kind == "swiglu":
        return F.silu(gate) * h
    return F.relu(h).square() if kind == "relu2" else F.gelu(h, approximate="tanh")


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i+d/2}) of x (…, d_k) by their positions' angles, (2, …, d_k)."""
    cos, sin = rotary.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def short_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention (B, H, T, d_v) of q (B, H, T, d_k) to k and v (B, G, T, …), as a CPU runs
    it fastest in bf16: torch's fused kernel takes 2 to 5 times as long there, up to a few hundred
    tokens (LOG.md). `dropout` is the fraction of the weights that is dropped."""
    (B, H, T, d_k), G = q.shape, k.shape[1]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(diagonal=1)
    # The scores of the query heads that share a key/value head, scaled and masked in one product.
    scores = torch.baddbmm(future.repeat(H // G, 1), q.reshape(B * G, H // G * T, d_k),
                           k.flatten(0, 1).mT, alpha=1 / math.sqrt(d_k))
    weights = F.dropout(scores.softmax(dim=-1), dropout)  # (B · G, H/G · T, T)
    return torch.bmm(weights.to(v.dtype), v.flatten(0, 1)).view(B, H, T, -1)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
                    dropout: float = 0.0) -> Tensor:
    """`model.attention` (B, H, T, d_v) by the fastest kernel; causal where the mask is None."""
    T, T_k = q.shape[2], k.shape[2]
    whole = mask is None and T_k == T
    if whole and q.dtype == torch.bfloat16 and q.device.type == "cpu" and T <= SHORT:
        return short_attention(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole,
                                          enable_gqa=q.shape[1] != k.shape[1], dropout_p=dropout)


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether x is trained through on a CPU, uncompiled: where functions of our own are faster."""
    return x.device.type == "cpu" and x.requires_grad and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, gains: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / √(mean x² + ε) over the last dimension, times the gains (Zhang and Sennrich 2019)."""
    if is_eager_on_cpu(x):
        x = UnitRMS.apply(x, torch.finfo(x.dtype).eps if eps is None else eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], eps=eps)
    return x if gains is None else x * gains


class RMSNorm(nn.RMSNorm):
    """`rms_norm` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class UnitRMS(torch.autograd.Function):
    """x / √(mean x² + ε) in few calls: torch's on a CPU is a dozen, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()  # (…, 1)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(dim=-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(scale), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -ln p of targets (N,), but for -1, by logits (N, V): `F.cross_entropy`, of many
    logits on a CPU in half the time, and in the memory of a part of them (LOG.md)."""
    if is_eager_on_cpu(logits) and logits.numel() > LOGITS_AT_ONCE:
        return CrossEntropy.apply(logits, targets)
    return F.cross_entropy(logits.float(), targets, ignore_index=-1)


class CrossEntropy(torch.autograd.Function):
    """`F.cross_entropy`, row by row with its gradient, while the rows are in the processor's cache.
    A token that float32 gives no chance counts as 87 nats."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        gradient, loss = torch.empty_like(logits), logits.new_zeros((), dtype=torch.float32)
        counts = targets.ge(0)
        shares = counts / counts.sum()  # (N,)
        rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
        for z, target, share, out in zip(*(t.split(rows) for t in (
                logits, targets.clamp(min=0)[:, None], shares[:, None], gradient))):
            p = z.softmax(dim=-1, dtype=torch.float32)  # (rows, V)
            chance = p.gather(1, target).clamp(min=torch.finfo(p.dtype).tiny)
            loss -= (chance.log() * share).sum()
            p.scatter_add_(1, target, -torch.ones_like(share))
            torch.mul(p, share, out=out)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad, None
