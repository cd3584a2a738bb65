"""The models that GlassGPT is compared with: nanoGPT's in plain PyTorch, transformers' GPT-2."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig

INIT_STD = 0.02


def build_transformers(config: GPTConfig) -> nn.Module:
    """Build transformers' GPT-2 of a size, without dropout and special tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    hf_config = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.block_size,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(hf_config)


class PlainBlock(nn.Module):
    """A block of GPT-2 with one matrix for queries, keys and values, and fused attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.heads = config.n_head
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.W_QKV = nn.Linear(width, 3 * width)
        self.W_O = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream (B, T, C) after the block."""
        qkv = self.W_QKV(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, d_k) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.W_O(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return x + self.mlp(self.norm_2(x))


class PlainGPT(nn.Module):
    """GPT-2 with its head tied to the embedding.

    Reference:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*(PlainBlock(config) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INIT_STD)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of tokens and targets (B, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        x = self.norm(self.blocks(x))
        logits = F.linear(x, self.token_embedding.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
