"""Attention: the written-out formula, fast kernels that compute the same, and rotary positions.

Shapes are written with the same letters in every module: B batch, T tokens, C channels of the
residual stream, H query heads, G key/value heads, d_k the size of a query or key, d_v the size of
a value, V the vocabulary. T_q queries attend to T_k keys.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from config import GPTConfig

# Llama 3.1 stretches a wavelength that makes fewer than ROPE_LOW turns in `rope_trained` tokens by
# the whole factor, and leaves one that makes more than ROPE_HIGH turns as it is.
ROPE_LOW = 1.0
ROPE_HIGH = 4.0

# Number of tokens up to which `short_attention` is faster than torch's kernel in bf16 on a CPU.
SHORT_ATTENTION_MAX_TOKENS = 512


# --- The formula ----------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q Kᵀ · scale + M) V, written out.

    This is the reference for `fused_attention`. Queries may come from another sequence than keys
    and values.

    Args:
        q: Queries (…, T_q, d_k), or (…, H, T_q, d_k) with heads.
        k: Keys (…, T_k, d_k), or (…, G, T_k, d_k) with heads. H is a multiple of G: the first H/G
            query heads share key/value head 0, the next H/G share head 1, and so on.
        v: Values (…, T_k, d_v), grouped like the keys. d_v may differ from d_k.
        mask: M, broadcast to (…, T_q, T_k). A boolean mask is True where a query may attend; any
            other mask is added to the scores. A query that may attend to no key gets weights and
            an output of zero.
        scale: Factor of the dot products; None: 1/√d_k.
        sink: Sink logits, broadcast to (…, T_q, 1): the score of one more key, whose value is 0.

    Returns:
        The output (…, T_q, d_v) and the weights (…, T_q, T_k), in the dtype of the queries. Each
        row of the weights sums to 1; with a sink to less, by the weight of the sink.

    Reference: Vaswani et al. 2017, "Attention Is All You Need"; Ainslie et al. 2023, "GQA"; Xiao
    et al. 2023, "Efficient Streaming Language Models with Attention Sinks", and gpt-oss (sinks).
    """
    weights = attention_weights(q, k, mask, scale, sink)
    return weights @ repeat_groups(v, q), weights


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute the weights (…, T_q, T_k) of `attention`, which takes the same arguments."""
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ repeat_groups(k, q).transpose(-2, -1) * scale  # (…, T_q, T_k)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    if sink is not None:
        column = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    if mask is None:
        return scores.softmax(dim=-1)
    # The softmax of a row of -inf is 0/0. Such a row enters it as zeros, so that its gradient is
    # 0 and not NaN, and leaves it as zeros.
    is_empty = (scores == -math.inf).all(dim=-1, keepdim=True)  # (…, T_q, 1)
    return scores.masked_fill(is_empty, 0.0).softmax(dim=-1).masked_fill(is_empty, 0.0)


def repeat_groups(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values (…, G, T_k, d) for each of the heads of q (…, H, T_q, d_k)."""
    if q.dim() < 3 or x.dim() < 3 or q.shape[-3] == x.shape[-3]:
        return x
    n_head, n_group = q.shape[-3], x.shape[-3]
    if n_group == 0 or n_head % n_group:
        raise ValueError(f"{n_head} query heads are not a multiple of {n_group} key/value heads")
    return x.repeat_interleave(n_head // n_group, dim=-3)  # (…, H, T_k, d)


def causal_mask(T_q: int, T_k: int, device: torch.device | None = None) -> Tensor:
    """Return the boolean mask (T_q, T_k) that lets each query attend to no later key.

    The last query is aligned to the last key: T_q < T_k means that T_k - T_q tokens are cached.
    """
    return torch.ones(T_q, T_k, dtype=torch.bool, device=device).tril(diagonal=T_k - T_q)


def shift_keys(k: Tensor, first: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return for each of the keys k (B, T, G, d_k) the key of the token before, for smeared keys.

    `first` (B, G, d_k) is the key before those. `mask` (…, T, T_k) is that of `attention`: if a
    query may not attend to the token before it in any head, the previous key is 0.
    """
    previous = torch.cat((first[:, None], k[:, :-1]), dim=1)  # (B, T, G, d_k)
    if mask is None:
        return previous
    T, T_k = k.shape[1], mask.shape[-1]
    may_attend = mask if mask.dtype == torch.bool else mask > -math.inf
    may_attend = may_attend.expand(*mask.shape[:-2], T, T_k)[(None,) * (4 - mask.dim())]
    # From each query to the token before it: (B, T), or T - 1 if the first query has none
    may_attend = may_attend.diagonal(T_k - T - 1, dim1=-2, dim2=-1).any(dim=1)
    may_attend = F.pad(may_attend, (T - may_attend.shape[-1], 0))
    return previous * may_attend[..., None, None]


# --- Faster kernels -------------------------------------------------------------------------------


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute the output (B, H, T_q, d_v) of `attention` with the fastest kernel.

    Queries are (B, H, T_q, d_k), keys (B, G, T_k, d_k) and values (B, G, T_k, d_v). Without a mask,
    attention is causal if T_q = T_k; else every query attends to every key. `dropout` is the share
    of the weights that are dropped. `sink` holds the sink logits (H, 1, 1) of the heads.
    """
    if sink is not None:
        return _attention_with_sink(q, k, v, mask, dropout, sink)
    return _fastest_attention(q, k, v, mask, dropout, 1 / math.sqrt(q.shape[-1]))


def _attention_with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, sink: Tensor
) -> Tensor:
    """Compute attention with sink logits (H, 1, 1) by kernels that do not know them.

    The sink becomes a key in front of the others, whose value is 0. One more channel gives it its
    score: it is the sink logit in queries, 1 in the sink's key and 0 in other keys.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    is_causal = mask is None and bool(k.shape[2] == q.shape[2])
    logits = (sink / scale).to(q.dtype).expand(*q.shape[:3], 1)  # (B, H, T_q, 1)
    q = torch.cat((q, logits), dim=-1)  # (B, H, T_q, d_k + 1)
    k = F.pad(k, (0, 1, 1, 0))  # (B, G, 1 + T_k, d_k + 1)
    k[:, :, 0, -1] = 1
    # The fastest kernels need d_v = d_k, so the values get a channel too.
    v = F.pad(v, (0, 1, 1, 0))  # (B, G, 1 + T_k, d_v + 1)
    if is_causal:
        q = F.pad(q, (0, 0, 1, 0))  # a query in front, so that the others attend to the sink too
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)  # True, or 0 to be added
    y = _fastest_attention(q, k, v, mask, dropout, scale)[..., :-1]
    return y[:, :, 1:] if is_causal else y


def _fastest_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """Compute what `fused_attention` does, without sinks, with a `scale` of the dot products."""
    T_q, T_k = q.shape[2], k.shape[2]
    # bool() makes an export with dynamic lengths decide this once.
    is_causal = mask is None and bool(T_k == T_q)
    is_bf16_on_cpu = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    if is_causal and is_bf16_on_cpu and T_q <= SHORT_ATTENTION_MAX_TOKENS:
        return short_attention(q, k, v, dropout, scale)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=q.shape[1] != k.shape[1],
        dropout_p=dropout,
        scale=scale,
    )


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Compute causal attention over a few hundred tokens with batched matrix products.

    In bf16 on a CPU, torch's fused kernel takes 2 to 5 times as long (LOG.md). The arguments and
    the output are those of `fused_attention`, with T_q = T_k = T. `scale` is the factor of the dot
    products; None: 1/√d_k.
    """
    (B, H, T, d_k), G = q.shape, k.shape[1]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(diagonal=1)
    # One product scales and masks the scores of all query heads that share a key/value head.
    scores = torch.baddbmm(
        future.repeat(H // G, 1),  # (H/G · T, T)
        q.reshape(B * G, H // G * T, d_k),
        k.flatten(0, 1).mT,  # (B · G, d_k, T)
        alpha=1 / math.sqrt(d_k) if scale is None else scale,
    )
    weights = F.dropout(scores.softmax(dim=-1), dropout)  # (B · G, H/G · T, T)
    return torch.bmm(weights.to(v.dtype), v.flatten(0, 1)).view(B, H, T, -1)


def attend_from_last_token(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    """Compute the attention of the last token alone, which may attend to every key.

    Queries (B, H, d_k), keys (B, G, T_k, d_k) and values (B, G, T_k, d_v) give the heads' outputs,
    concatenated (B, H · d_v). The query heads that share a key/value head enter the kernel as
    several queries of that head, so that keys and values are not repeated. `sink` holds the sink
    logits (H, 1, 1) of the heads.
    """
    (B, H, d_k), G = q.shape, k.shape[1]
    q = q.reshape(B, G, H // G, d_k)
    if sink is None:
        y = F.scaled_dot_product_attention(q, k, v)  # (B, G, H/G, d_v)
    else:
        y, _ = attention(q, k, v, sink=sink.view(G, H // G, 1))
    return y.flatten(1)


# --- Rotary positions (Su et al. 2021) ------------------------------------------------------------


def rotary_frequencies(config: GPTConfig) -> Tensor:
    """Return the angles (d_k/2) in radians by which the pairs of channels turn per position.

    `rope_factor` stretches the wavelengths: all of them alike, or, if `rope_trained` is set, the
    more the fewer turns they make in `rope_trained` tokens.

    Reference: Su et al. 2021, "RoFormer"; Chen et al. 2023, "Extending Context Window of Large
    Language Models via Position Interpolation"; Llama 3.1 for `rope_trained`.
    """
    d_k, theta = config.key_dim, config.rope_theta
    exponents = torch.arange(0, d_k, 2, dtype=torch.float32) / d_k  # (d_k/2)
    if config.rope_factor == 1:
        return theta**-exponents
    # Rounded as in the models that were trained so: the angles of distant tokens depend on it.
    frequencies = 1 / theta**exponents
    turns = (config.rope_trained or 0) / (2 * math.pi / frequencies)
    unstretched = ((turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)).clamp(0, 1)  # share, (d_k/2)
    return (1 - unstretched) * frequencies / config.rope_factor + unstretched * frequencies


def rotary_table(length: int, config: GPTConfig) -> Tensor:
    """Return the cosines and sines (2, length, d_k) by which `rotate` turns queries and keys.

    Both halves of the channels have the same d_k/2 angles; the first half of the sines is negated.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * rotary_frequencies(config)  # (T, d_k/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + d_k/2}) of x (…, d_k) by the angles of `rotary` (2, …, d_k)."""
    cos, sin = rotary.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
