"""The model that nanoGPT trains, in plain torch: what a step of that shape costs with nothing
around it. The GPT-2 architecture (Radford et al. 2019) with one matrix for queries, keys and
values, fused attention, and the head tied to the embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig


class PlainBlock(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        self.heads, width = c.n_head, c.n_embd
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, d_k) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return x + self.mlp(self.before_mlp(x))


class PlainGPT(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.n_embd)
        self.positions = nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.Sequential(*(PlainBlock(c) for _ in range(c.n_layer)))
        self.norm = nn.LayerNorm(c.n_embd)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of tokens and targets (B, T)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))  # (B, T, C)
        logits = F.linear(x, self.tokens.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
