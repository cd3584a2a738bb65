"""The model's mathematics in fewer calls: functions for a CPU, and the cached decoder. Shapes are
written with the letters of model.py."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHORT = 512  # tokens up to which `short_attention` is the faster one
LOGITS_AT_ONCE = 1 << 20  # that `CrossEntropy` has in float32


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
    scores = torch.baddbmm(
        future.repeat(H // G, 1),
        q.reshape(B * G, H // G * T, d_k),
        k.flatten(0, 1).mT,
        alpha=1 / math.sqrt(d_k),
    )
    weights = F.dropout(scores.softmax(dim=-1), dropout)  # (B · G, H/G · T, T)
    return torch.bmm(weights.to(v.dtype), v.flatten(0, 1)).view(B, H, T, -1)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """`model.attention` (B, H, T, d_v) by the fastest kernel; causal where the mask is None."""
    T, T_k = q.shape[2], k.shape[2]
    whole = mask is None and bool(T_k == T)  # in an export whose lengths vary it is decided once
    if whole and q.dtype == torch.bfloat16 and q.device.type == "cpu" and T <= SHORT:
        return short_attention(q, k, v, dropout)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=whole,
        enable_gqa=q.shape[1] != k.shape[1],
        dropout_p=dropout,
    )


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
        for z, target, share, out in zip(
            *(
                t.split(rows)
                for t in (logits, targets.clamp(min=0)[:, None], shares[:, None], gradient)
            )
        ):
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


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: what grouped heads make small. 2 ·
    n_layer · B · G · length · d numbers for d_k = d_v = d: H/G times fewer than multi-head."""

    def __init__(
        self,
        config,
        batch_size: int,
        length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Room for `length` tokens (block_size when None); `GPT.make_cache` knows the rest."""
        shape = (config.n_layer, batch_size, config.kv_heads, length or config.block_size)
        self.keys = torch.empty(*shape, config.key_dim, device=device, dtype=dtype)
        self.values = torch.empty(*shape, config.value_dim, device=device, dtype=dtype)
        self.length = 0  # tokens that every layer holds
        self.before = max(config.ngrams - 1, 0)  # tokens that an n-gram has before its last
        self.tokens = torch.full((batch_size, self.before + shape[3]), -1, device=device)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def take(self, tokens: Tensor) -> Tensor:
        """Store tokens (B, T) behind those held; give them with n - 1 before, (B, n - 1 + T)."""
        end = self.before + self.length + tokens.shape[1]
        self.tokens[:, self.before + self.length : end] = tokens
        return self.tokens[:, self.length : end]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k (B, G, T, d_k) and v (B, G, T, d_v) behind the tokens held; return all of them.
        `length` stays: GPT moves it once every layer has stored the same tokens."""
        keys, values, count = self.keys[layer], self.values[layer], k.shape[2]
        keys.narrow(2, self.length, count).copy_(k)
        values.narrow(2, self.length, count).copy_(v)
        return keys.narrow(2, 0, self.length + count), values.narrow(2, 0, self.length + count)


class Decoder:
    """A model's next-token logits with a cache, as `GPT.forward` gives them, in fewer calls: they,
    not the arithmetic, take the time of a small model's step (LOG.md)."""

    @torch.inference_mode()
    def __init__(self, model, cache: KVCache):
        """Reads the weights of a `model.GPT` as they are now; fills and moves on the cache."""
        weight = model.token_embedding.weight
        self.model, self.cache, self.device = model, cache, weight.device
        self.block_size, self.vocab_size = model.config.block_size, model.config.vocab_size
        self.rotary = None if model.rotary is None else model.rotary.to(weight.dtype)
        self.norm, self.head = function(model.norm), function(model.head)
        # Of each layer: W_Q, W_K, W_V in one, the gains of q and k, its cache, its functions.
        self.layers = [
            (
                *b.attention.joined(),
                b.attention.gains(),
                keys,
                values,
                *map(
                    function,
                    (
                        b.norm_1,
                        b.attention.W_O,
                        b.norm_2,
                        b.mlp.W_in,
                        getattr(b.mlp, "W_gate", None),
                        b.mlp.W_out,
                    ),
                ),
            )
            for b, keys, values in zip(model.blocks, cache.keys, cache.values)
        ]

    def forget(self) -> None:
        """Begin again, before any token."""
        self.cache.length = 0

    def fill(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after tokens (B, T) more."""
        if tokens.shape[1] == 1:
            return self.step(tokens[:, 0])
        with self.model.evaluating():
            return self.head(self.norm(self.model.hidden(tokens, self.cache)[:, -1]))

    def step(self, token: Tensor) -> Tensor:
        """Logits (B, V) after one token (B,) more."""
        c, B, n = self.model.config, len(token), self.cache.length
        H, G, d_k, d_v = c.n_head, c.kv_heads, c.key_dim, c.value_dim
        x = self.model.token_embedding.weight[token]  # (B, C)
        if self.model.position_embedding is not None:
            x = x + self.model.position_embedding.weight[n]
        if self.model.ngrams is not None:
            x = x + self.model.ngrams(self.cache.take(token[:, None]))[:, 0]
        if c.norm_embedding:
            x = rms_norm(x)
        eps = c.norm_eps if c.qk_norm == "gains" else None
        for W_QKV, bias, gains, keys, values, norm_1, W_O, norm_2, W_in, gate, W_out in self.layers:
            qk, v = F.linear(norm_1(x), W_QKV, bias).split(((H + G) * d_k, G * d_v), dim=-1)
            qk = qk.view(B, H + G, d_k)
            if c.qk_norm:
                qk = rms_norm(qk, gains, eps)
            if self.rotary is not None:
                qk = rotate(qk, self.rotary[:, n])
            q, k = qk.split((H, G), dim=1)  # (B, H, d_k), (B, G, d_k)
            keys.select(2, n).copy_(k)
            values.select(2, n).copy_(v.view(B, G, d_v))
            # Query heads that share keys are as many queries to them, each of which may see all.
            q = q.reshape(B, G, H // G, d_k).to(keys.dtype)
            y = F.scaled_dot_product_attention(
                q, keys.narrow(2, 0, n + 1), values.narrow(2, 0, n + 1)
            )
            x = x + W_O(y.reshape(B, H * d_v).to(x.dtype))
            h = norm_2(x)
            x = x + W_out(activate(c.mlp, W_in(h), gate and gate(h)))
        self.cache.length = n + 1
        return self.head(self.norm(x))


def function(module: nn.Module | None) -> partial | None:
    """A linear layer or a norm as a function with its weights, without what torch does around."""
    does = {nn.Linear: F.linear, nn.LayerNorm: F.layer_norm}.get(type(module), F.rms_norm)
    names = ("weight", "bias") + ("normalized_shape", "eps") * (does is not F.linear)
    found = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return module and partial(does, **found)
