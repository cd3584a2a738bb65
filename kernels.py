"""The same arithmetic as the model's formulas, in fewer calls and less memory.

Shapes are written with the letters of model.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Number of tokens up to which `attend_short` is faster than torch's kernel in bf16 on a CPU.
SHORT_ATTENTION_MAX_TOKENS = 512
# Logits that `cross_entropy` converts to float32 at once, by type of device. On a CPU 4 MB fit the
# processor's cache. On a GPU 128 MB keep it busy for longer than Python takes to launch the next
# kernels (an estimate: at 2 to 3 TB/s, several passes over them take 0.2 ms or more).
MAX_FLOAT32_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 25}
# Factor of the stored gradient of the logits, so that small values do not underflow in fp16. It is
# a power of two, which changes no digit, and the largest for which no value can overflow.
GRADIENT_SCALE = 2.0**15


# --- Precision ------------------------------------------------------------------------------------


def autocast(device: str, precision: str) -> torch.autocast:
    """Return the context in which a forward pass runs in a precision, a key of `DTYPES`."""
    is_enabled = precision != "fp32"
    return torch.autocast(device.partition(":")[0], DTYPES[precision], enabled=is_enabled)


def in_float32_or_finer(values: Tensor) -> Tensor:
    """Convert values of lower precision to float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# --- Attention ------------------------------------------------------------------------------------


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute the output of `model.attention` with the fastest kernel for its sizes and device.

    q (B, H, T_q, d_k), k (B, G, T_k, d_k) and v (B, G, T_k, d_v) give (B, H, T_q, d_v). Without a
    mask, attention is causal if T_q = T_k. `dropout` is the share of the weights that are dropped.
    """
    T_q, T_k = q.shape[2], k.shape[2]
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    # bool() makes an export with dynamic lengths decide this once.
    is_causal = mask is None and bool(T_k == T_q)
    is_bf16_on_cpu = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    if is_causal and is_bf16_on_cpu and T_q <= SHORT_ATTENTION_MAX_TOKENS:
        return attend_short(q, k, v, dropout, scale)
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=is_grouped
    )


def attend_short(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> Tensor:
    """Compute causal attention by matrix products: in bf16 on a CPU, torch's kernel is slower.

    For up to a few hundred tokens it takes 2 to 5 times as long (LOG.md). The arguments are those
    of `attend`, with T_q = T_k = T.
    """
    (B, H, T, d_k), G = q.shape, k.shape[1]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(diagonal=1)
    # One product scales and masks the scores of all query heads that share a key/value head.
    scores = torch.baddbmm(
        future.repeat(H // G, 1),  # (H/G · T, T)
        q.reshape(B * G, H // G * T, d_k),
        k.flatten(0, 1).mT,  # (B · G, d_k, T)
        alpha=scale,
    )
    weights = F.dropout(scores.softmax(dim=-1), dropout)  # (B · G, H/G · T, T)
    return torch.bmm(weights.to(v.dtype), v.flatten(0, 1)).view(B, H, T, -1)


# --- Norms ----------------------------------------------------------------------------------------


def is_trained_eagerly(x: Tensor) -> bool:
    """Return whether x needs a gradient and is not compiled by torch.compile."""
    return x.requires_grad and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, gains: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute x / √(mean x² + ε) over the last dimension of x (…, C), times the gains.

    `eps` is ε; None is the machine epsilon of the dtype of x. Torch's function takes longer on a
    CPU, but only there.

    Reference: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    if x.device.type == "cpu" and is_trained_eagerly(x):
        x = UnitRMS.apply(x, torch.finfo(x.dtype).eps if eps is None else eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], eps=eps)
    return x if gains is None else x * gains


class RMSNorm(nn.RMSNorm):
    """`rms_norm` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (…, C)."""
        return rms_norm(x, self.weight, self.eps)


class UnitRMS(torch.autograd.Function):
    """x / √(mean x² + ε), in a few calls forward and backward, where torch makes a dozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        """Normalize x (…, C)."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (…, 1)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()  # (…, 1)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Compute (g - y · mean(g y)) · scale from the output y and its gradient g (…, C)."""
        y, scale = ctx.saved_tensors
        projection = (grad * y).mean(dim=-1, keepdim=True)  # (…, 1)
        return torch.addcmul(grad, y, projection, value=-1).mul_(scale), None


# --- Logits and loss ------------------------------------------------------------------------------


def padded_logits(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Compute the logits (…, V + padding) of x (…, C) by the output layer's weight (V, C).

    The logits of the added ids are -∞, so that their probability and their gradients are 0, and a
    loss over all columns is that over the first V.
    """
    bias = F.pad(weight.new_zeros(len(weight)), (0, padding), value=-math.inf)
    return F.linear(x, F.pad(weight, (0, 0, 0, padding)), bias)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean of -ln p(target) in nats, a float32 scalar, as `F.cross_entropy` does.

    For many logits (N, V) this needs memory for a few rows of float32 probabilities, where torch's
    function keeps (N, V) of them, and on a CPU half the time (LOG.md). torch.compile fuses torch's
    function into kernels that need no such memory either. Targets (N,) of -1 are left out.
    """
    max_float32_logits = MAX_FLOAT32_LOGITS.get(logits.device.type, logits.numel())
    if is_trained_eagerly(logits) and logits.numel() > max_float32_logits:
        return CrossEntropy.apply(logits, targets, max_float32_logits)
    return F.cross_entropy(logits.float(), targets, ignore_index=-1)


class CrossEntropy(torch.autograd.Function):
    """`F.cross_entropy` that computes the gradient of each part of the logits right after its loss.

    A token whose probability underflows float32 costs 87 nats.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, max_float32_logits: int) -> Tensor:
        """Compute the loss of targets (N,) by logits (N, V), a few rows at a time."""
        gradient = torch.empty_like(logits)
        loss = logits.new_zeros((), dtype=torch.float32)
        is_counted = targets.ge(0)
        row_weights = is_counted / is_counted.sum()  # (N,)
        rows = max(1, max_float32_logits // logits.shape[1])
        for start in range(0, len(logits), rows):
            chunk = slice(start, start + rows)
            target = targets[chunk, None].clamp(min=0)  # (rows, 1)
            row_weight = row_weights[chunk, None]  # (rows, 1)
            p = logits[chunk].softmax(dim=-1, dtype=torch.float32)  # (rows, V)
            p_target = p.gather(1, target).clamp(min=torch.finfo(p.dtype).tiny)  # (rows, 1)
            loss -= (p_target.log() * row_weight).sum()
            # The gradient is (p - 1 at the target) times the weight of the row.
            p.scatter_add_(1, target, -torch.ones_like(row_weight))
            torch.mul(p, GRADIENT_SCALE * row_weight, out=gradient[chunk])
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient that the forward pass computed, in place: there is no second pass."""
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad / GRADIENT_SCALE), None, None
