"""Layers of a model computed from their formulas, head by head and query by query."""

import math

import torch
import torch.nn.functional as F

from model import attention

# Turns in the trained length that Llama 3.1 stretches completely, and not at all.
ROPE_LOW, ROPE_HIGH = 1, 4


def rotary_frequency(config, pair):
    """Radians by which a pair of channels turns per position."""
    turning = int(config.rope_share * config.key_dim) // 2  # pairs
    if pair >= turning:
        return 0
    frequency = config.rope_theta ** (-pair / turning)
    turns = (config.rope_trained or 0) * frequency / (2 * math.pi)
    if turns >= ROPE_HIGH:
        return frequency
    if turns <= ROPE_LOW:
        return frequency / config.rope_factor
    share = (turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)
    return share * frequency + (1 - share) * frequency / config.rope_factor


def rotate(x, config):
    """Queries or keys x (B, T, d_k) of positions 0 … T - 1, turned as complex numbers."""
    T, d_k = x.shape[-2:]
    frequencies = torch.tensor(
        [rotary_frequency(config, pair) for pair in range(d_k // 2)], dtype=torch.float64
    )
    angles = torch.arange(T)[:, None] * frequencies  # (T, d_k/2)
    z = torch.complex(*x.chunk(2, dim=-1))
    turn = torch.polar(torch.ones_like(angles), angles).to(z.dtype)
    return torch.cat(((z * turn).real, (z * turn).imag), dim=-1).to(x.dtype)


def project_head(linear, head, size, x):
    """The part of a projection of x (B, T, C) that one head reads, (B, T, size)."""
    rows = slice(head * size, (head + 1) * size)
    bias = None if linear.bias is None else linear.bias[rows]
    return F.linear(x, linear.weight[rows], bias)


def rms_norm(x, eps):
    """x / √(mean x² + ε)."""
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def self_attention(layer, x, replace_head=lambda head, y: y):
    """What a `SelfAttention` returns for x (B, T, C), whose heads write `replace_head(head, y)`."""
    c, T, heads = layer.config, x.shape[1], []
    for head in range(c.n_head):
        group = head // (c.n_head // c.kv_heads)
        q = project_head(layer.W_Q, head, c.key_dim, x)
        k = project_head(layer.W_K, group, c.key_dim, x)
        v = project_head(layer.W_V, group, c.value_dim, x)
        if c.qk_norm:
            eps = c.norm_eps if c.qk_norm == "gains" else 0
            q, k = rms_norm(q, eps), rms_norm(k, eps)
        if c.qk_norm == "gains":
            q, k = q * layer.norm_q.weight, k * layer.norm_k.weight
        if c.smear_keys:
            share = 1 / (1 + torch.exp(-layer.smear[group]))
            k = share * k + (1 - share) * F.pad(k, (0, 0, 1, -1))  # keys of the tokens before
        if c.position == "rope":
            q, k = rotate(q, c), rotate(k, c)
        rows = []
        for t in range(T):  # a query attends to the keys up to its own
            keys, values = k[:, : t + 1], v[:, : t + 1]
            scores = (keys @ q[:, t, :, None])[..., 0] / math.sqrt(c.key_dim)  # (B, t + 1)
            if c.attention_sink:  # a score that is not of a token
                scores = F.pad(scores, (1, 0)) + F.pad(10 * layer.sink[head, None], (0, t + 1))
            exp = (scores - scores.amax(dim=-1, keepdim=True)).exp()  # in the range of floats
            weights = (exp / exp.sum(dim=-1, keepdim=True))[:, -t - 1 :]
            rows.append((weights[..., None] * values).sum(dim=1))  # (B, d_v)
        y = torch.stack(rows, dim=1)  # (B, T, d_v)
        if c.attention_gate != "none":
            gates = c.gate_dim // c.n_head
            y = y / (1 + torch.exp(-project_head(layer.W_gate, head, gates, x)))
        heads.append(replace_head(head, y))
    return layer.W_O(torch.cat(heads, dim=-1))


def attend(q, k, v, mask, layer):
    """The output and the weights of attention with the sink logits of a layer, if it has some."""
    if not layer.config.attention_sink:
        return attention(q, k, v, mask)
    groups = 1 if q.dim() < 4 else q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=-3) if groups > 1 else x for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    column = (10 * layer.sink[:, None, None]).to(scores.dtype).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    return weights @ v, weights


def norm(layer, x, config):
    """What a norm of the model returns for x (…, C); x for None."""
    if layer is None:
        return x
    if config.norm == "rmsnorm":
        return rms_norm(x, config.norm_eps) * layer.weight
    assert config.norm == "layernorm"
    x = rms_norm(x - x.mean(dim=-1, keepdim=True), config.norm_eps) * layer.weight
    return x if layer.bias is None else x + layer.bias


def block(layer, x):
    """What a `Block` returns for x (B, T, C)."""
    c = layer.attention.config
    y = x + self_attention(layer.attention, norm(layer.norm_1, x, c))
    return y + mlp(layer.mlp, norm(layer.norm_2, x if c.parallel_mlp else y, c))


def mlp(layer, x):
    """What an `MLP` returns for x (…, C); 0 for None."""
    if layer is None:
        return torch.zeros_like(x)
    h = layer.W_in(x)
    if layer.config.mlp == "gelu":
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    elif layer.config.mlp == "gelu_exact":
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    elif layer.config.mlp == "relu2":
        h = torch.where(h > 0, h * h, torch.zeros_like(h))
    else:
        assert layer.config.mlp == "swiglu"
        gate = layer.W_gate(x)
        h = gate / (1 + torch.exp(-gate)) * h
    return layer.W_out(h)
